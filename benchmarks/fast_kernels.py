"""The kernels of the fast path, each beside the plain one: run by fast_path.py."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fast_session import Call, Candidate, Session, relative
from torch import Tensor, nn

from vitrail.kernels import eight_bit, gelu_polynomial
from vitrail.models.model_names import config_from_name

# M rows = images x tokens; D width; H hidden width

BATCH = {"S/16": (1024, 512), "B/16": (512, 256), "L/16": (256, 128), "H/14": (256, 64)}
"""Images of a batch for inference and training."""


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


CHECKED = 512
"""Rows that are compared with float64."""


def forward_candidates(m: int, d: int, h: int) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
    """Products with GELU; with GELU, keeping its argument; with a residual (h -> d)."""
    x, w, b = random(m, d), random(h, d, scale=d**-0.5), random(h)
    hidden, down, down_bias, residual = random(m, h), random(d, h, scale=h**-0.5), random(d), random(m, d)
    flops = 2.0 * m * d * h
    plain = F.linear(x[:CHECKED].double(), w.double(), b.double())
    exact = F.gelu(plain)
    summed = F.linear(hidden[:CHECKED].double(), down.double(), down_bias.double()) + residual[:CHECKED].double()

    def made(function: Callable[[], Any], expected: Tensor, index: int | None = None) -> Any:
        def pick(out: Any) -> Tensor:
            return (out if index is None else out[index])[:CHECKED]

        return lambda: (function, lambda: relative(pick(function()), expected))

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    own = compiled(lambda x, w, b: gelu_polynomial.gelu(F.linear(x, w, b).float()).bfloat16())
    erf = compiled(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    add = compiled(lambda x, w, b, r: F.linear(x, w, b) + r)
    gelu = [
        Candidate("Inductor, exact GELU", made(lambda: erf(x, w, b), exact), flops, 1.124),
        Candidate("product and bias only", made(lambda: F.linear(x, w, b), plain), flops, 0.689),
        Candidate("Inductor, polynomial GELU", made(lambda: own(x, w, b), exact), flops, 1.02),
        Candidate(
            "cuBLASLt, tanh GELU",
            made(lambda: torch._addmm_activation(b, x, w.t(), use_gelu=True), exact),
            flops,
            0.813,
        ),
    ]
    keep, res = (
        [],
        [
            Candidate("Inductor", made(lambda: add(hidden, down, down_bias, residual), summed), flops, 0.80),
            Candidate(
                "cuBLAS, beta = 1, bias in the residual",
                made(lambda: torch.addmm(residual, hidden, down.t()), summed - down_bias.double()),
                flops,
                0.75,
            ),
        ],
    )
    for name, config, module in configs():
        gelu.append(Candidate(name, made(partial(module.gelu, x, w, b, config), exact), flops, module.predicted))
        keep.append(
            Candidate(name, made(partial(module.keep, x, w, b, config), exact, 0), flops, module.predicted + 0.08)
        )
        call = partial(module.residual, hidden, down, down_bias, residual, config)
        res.append(Candidate(name, made(call, summed), flops, module.predicted))
    return gelu, keep, res


class TritonCalls:
    predicted = 0.78

    def __init__(self) -> None:
        from vitrail.kernels import triton_products

        self.module = triton_products

    def gelu(self, x: Tensor, w: Tensor, b: Tensor, config: Any) -> Tensor:
        out = x.new_empty(len(x), len(w))
        self.module.launch("gelu", x, w, out, bias=b, config=config)
        return out

    def keep(self, x: Tensor, w: Tensor, b: Tensor, config: Any) -> tuple[Tensor, Tensor]:
        out = x.new_empty(len(x), len(w))
        argument = torch.empty_like(out)
        self.module.launch("gelu", x, w, out, bias=b, argument=argument, config=config)
        return out, argument

    def residual(self, x: Tensor, w: Tensor, b: Tensor, residual: Tensor, config: Any) -> Tensor:
        out = torch.empty_like(residual)
        self.module.launch("linear", x, w, out, bias=b, residual=residual, config=config)
        return out

    def dgelu(self, *tensors: Tensor, config: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.module.dgelu(*tensors, config)


class QuackCalls:
    predicted = 0.66

    def __init__(self) -> None:
        from vitrail.kernels import quack_products

        self.module = quack_products
        self.gelu, self.keep = quack_products.linear_gelu, quack_products.linear_gelu_keep
        self.residual = quack_products.linear_residual

    def dgelu(self, *tensors: Tensor, config: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.module.dgelu(*tensors, config)


def configs() -> Iterator[tuple[str, Any, Any]]:
    """Name, tiling and calls of every kernel that is installed."""
    for kind, make in (("quack", QuackCalls), ("triton", TritonCalls)):
        try:
            calls = make()
        except Exception as error:
            print(f"  {kind} is left out: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            continue
        for name, config in calls.module.CONFIGS.items():
            yield f"{kind} {name}", config, calls


def backward_candidates(m: int, d: int, h: int) -> list[Candidate]:
    """(grad weight) GELU'(argument), GELU(argument), column sums."""
    grad, weight, argument = random(m, d), random(d, h, scale=h**-0.5), random(m, h)
    exact = argument[:CHECKED].double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(exact), exact, grad[:CHECKED].double() @ weight.double())

    @partial(torch.compile, dynamic=False)
    def plain(grad: Tensor, weight: Tensor, argument: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product = torch.ops.aten.gelu_backward(grad @ weight, argument)
        return product, F.gelu(argument), product.float().sum(0)

    def made(function: Callable[[], Any]) -> Any:
        return lambda: (function, lambda: relative(function()[0][:CHECKED], expected))

    flops = 2.0 * m * d * h
    found = [Candidate("Inductor", made(lambda: plain(grad, weight, argument)), flops, 1.45)]
    for name, config, calls in configs():
        call = partial(calls.dgelu, grad, weight, argument, config=config)
        found.append(Candidate(name, made(call), flops, calls.predicted + 0.3))
    return found


def eight_bit_candidates(m: int, d: int, h: int) -> list[Candidate]:
    x, w, b = random(m, d), random(h, d, scale=d**-0.5), random(h)
    (values, scale), (weight, weight_scale) = eight_bit.quantize_rows(x), eight_bit.quantize_rows(w)
    columns, one = weight_scale.t().contiguous(), torch.ones((), device="cuda")
    restored = (values[:CHECKED].double() * scale[:CHECKED].double()) @ (weight.double() * weight_scale.double()).t()
    expected, flops = restored + b.double(), 2.0 * m * d * h
    norm = nn.LayerNorm(d, device="cuda", dtype=torch.bfloat16)
    quantized_norm = torch.compile(lambda x: eight_bit.quantize_rows(norm(x)), dynamic=False)
    quantized_gelu = torch.compile(lambda z: eight_bit.quantize_rows(F.gelu(z)), dynamic=False)
    hidden = random(m, h)

    def product(scale_a: Tensor, scale_b: Tensor) -> Call:
        return lambda: torch._scaled_mm(
            values, weight.t(), scale_a=scale_a, scale_b=scale_b, bias=b, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def checked(call: Call, wanted: Tensor) -> Any:
        return lambda: (call, lambda: relative(call()[:CHECKED], wanted))

    def unchecked(call: Call) -> Any:
        return lambda: (call, lambda: 0.0)

    def triton_gelu(config: Any, out_scale: Tensor | None) -> Call:
        from vitrail.kernels import triton_products

        out = torch.empty(m, h, device="cuda", dtype=eight_bit.E4M3 if out_scale is not None else torch.bfloat16)

        def call() -> Tensor:
            triton_products.launch(
                "gelu", values, weight, out, bias=b, row_scale=scale, column_scale=columns, out_scale=out_scale,
                config=config,
            )  # fmt: skip
            return out

        return call

    def triton(out_scale: Tensor | None, **tile: int) -> Any:
        from vitrail.kernels.triton_products import TileConfig

        call = triton_gelu(TileConfig(block_k=128, **tile), out_scale)
        return call, lambda: relative(
            call()[:CHECKED].float() * (1 if out_scale is None else out_scale), F.gelu(expected)
        )

    units = (values[:CHECKED].double() @ weight.double().t()) + b.double()
    static = torch.tensor(8 / 448, device="cuda")
    narrow = {"stages": 3, "block_n": 128, "warps": 4, "per_sm": 2}
    return [
        Candidate("_scaled_mm, one scale", checked(product(one, one), units), flops, 0.467),
        Candidate("_scaled_mm, scales of rows", checked(product(scale, columns), expected), flops, 0.50),
        Candidate("Inductor: LayerNorm and rows to e4m3", unchecked(lambda: quantized_norm(x)), flops, 0.06),
        Candidate("Inductor: GELU and rows to e4m3", unchecked(lambda: quantized_gelu(hidden)), flops, 0.25),
        Candidate("triton GELU to bfloat16, 3 stages", lambda: triton(None, stages=3), flops, 0.60),
        Candidate("triton GELU to e4m3, one scale, 4 stages", lambda: triton(static, stages=4), flops, 0.52),
        Candidate(
            "triton GELU to e4m3, 128x128, 2 per SM",
            lambda: triton(static, **narrow),
            flops,
            0.5,
        ),
    ]


def gemm(options: argparse.Namespace, session: Session) -> None:
    config = config_from_name(f"ViT-{options.model}")
    inference, training = BATCH[options.model]
    tokens = config.grid[0] * config.grid[1] + 1
    d, h = config.width, config.mlp_dim
    if not options.train:
        gelu, _, residual = forward_candidates(inference * tokens, d, h)
        session.table(f"{inference * tokens} x {d} -> {h}, bias, GELU", gelu)
        session.table(f"{inference * tokens} x {h} -> {d}, bias, residual", residual)
        session.table(f"e4m3, {inference * tokens} x {d} -> {h}", eight_bit_candidates(inference * tokens, d, h))
    else:
        _, keep, _ = forward_candidates(training * tokens, d, h)
        session.table(f"{training * tokens} x {d} -> {h}, bias, GELU, argument kept", keep)
        session.table(f"{training * tokens} x {d} -> {h}, GELU' and sums", backward_candidates(training * tokens, d, h))


def attention(options: argparse.Namespace, session: Session) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = config_from_name(f"ViT-{options.model}")
    images, tokens = BATCH[options.model][options.train], config.grid[0] * config.grid[1] + 1
    heads, width = config.num_heads, config.width
    qkv = random(images, tokens, 3 * width).requires_grad_(options.train)
    grad = random(images, tokens, width)
    some = qkv[:4].detach().double().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(*some).transpose(1, 2).flatten(2)
    flops = (3.5 if options.train else 1) * 4.0 * images * tokens**2 * width

    def packed(backend: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
                out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            if options.train:
                out.backward(grad)
                qkv.grad = None
            return out

        return call

    def made(call: Callable[[], Tensor]) -> Any:
        return lambda: (call, lambda: relative(call()[:4], expected))

    def fa3() -> Any:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
        return made(packed(SDPBackend.FLASH_ATTENTION))()

    def own(block: int, warps: int) -> Callable[[], Tensor]:
        def call() -> Tensor:
            from vitrail.kernels.triton_attention import packed_attention

            return packed_attention(qkv, heads, block, warps)

        return call

    found = [
        Candidate("default", made(packed(None)), flops, 0.77 if options.train else 0.35),
        Candidate("cuDNN", made(packed(SDPBackend.CUDNN_ATTENTION)), flops, 0.77 if options.train else 0.35),
        Candidate("flash", made(packed(SDPBackend.FLASH_ATTENTION)), flops, 1.29 if options.train else 0.56),
        Candidate("efficient", made(packed(SDPBackend.EFFICIENT_ATTENTION)), flops, 1.81 if options.train else 0.88),
    ]
    if not options.train:
        found += [
            Candidate(f"triton, {b} queries, {w} warps", made(own(b, w)), flops, 0.26)
            for b, w in ((64, 4), (128, 8), (64, 8))
        ]
    found.append(Candidate("flash 3", fa3, flops))
    session.table(
        f"attention {images} x {tokens} x {heads} x {width // heads}{', with backward' * options.train}", found
    )
