"""The kernels of the fast path, each beside the plain one: run by fast_path.py."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fast_rows import Call, Candidate, Session, relative
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.kernels import eight_bit, gelu_polynomial
from vitrail.models.model_names import config_from_name

# M rows = images x tokens; D width; H hidden width

BATCH = {"S/16": (1024, 512), "B/16": (512, 256), "L/16": (256, 128), "H/14": (256, 64)}
"""Images of a batch for inference and training."""
CHECKED = 512
"""Rows that are compared with float64 here; fast_check.py compares all."""
LIMIT = 1e-2
"""Largest error of our kernels; those of other GELUs differ by more."""


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""Without a GPU the checks run in Triton's interpreter, which cannot multiply bfloat16: they test these scripts."""


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(HALF)


def tokens_of(config: ViTConfig) -> int:
    return config.grid[0] * config.grid[1] + config.num_prefix_tokens


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def timed(call: Callable[[], Any], expected: Tensor | None = None, index: int | None = None) -> Any:
    """The setup of a Candidate; the first rows of the result (of its item `index`) are compared."""

    def error() -> float:
        if expected is None:
            return 0.0
        out = call()
        return relative((out if index is None else out[index])[: len(expected)], expected)

    return lambda: (call, error)


def first_product(m: int, d: int, h: int, keep: bool) -> Iterator[Candidate]:
    """GELU(x w^T + b); keep: with its argument, for training."""
    x, w, b = random(m, d), random(h, d, scale=d**-0.5), random(h)
    flops, index = 2.0 * m * d * h, 0 if keep else None
    plain = F.linear(x[:CHECKED].double(), w.double(), b.double())
    exact, tanh = F.gelu(plain), F.gelu(plain, approximate="tanh")

    def inductor(activation: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        def function(x: Tensor, w: Tensor, b: Tensor) -> Any:
            z = F.linear(x, w, b)
            return (activation(z), z) if keep else activation(z)

        return partial(compiled(function), x, w, b)

    def own(z: Tensor, form: bool = False) -> Tensor:
        return gelu_polynomial.gelu(z.float(), form).bfloat16()

    def plain_tanh(z: Tensor) -> Tensor:
        return F.gelu(z, approximate="tanh")

    yield Candidate("Inductor, exact GELU", timed(inductor(F.gelu), exact, index), flops, 1.2 if keep else 1.124)
    yield Candidate("product and bias only", timed(lambda: F.linear(x, w, b), plain), flops, 0.689)
    yield Candidate("Inductor, polynomial GELU", timed(inductor(own), exact, index), flops, 0.98, LIMIT)
    yield Candidate("Inductor, tanh GELU", timed(inductor(plain_tanh), tanh, index), flops, 1.05)
    call = inductor(partial(own, form=True))
    yield Candidate("Inductor, tanh GELU by our formula", timed(call, tanh, index), flops, 0.98, LIMIT)
    if not keep:
        call = partial(torch._addmm_activation, b, x, w.t(), use_gelu=True)
        yield Candidate("cuBLASLt, tanh GELU", timed(call, tanh), flops, 0.813)
    for name, config, calls in configs():
        call = partial(calls.keep if keep else calls.gelu, x, w, b, config)
        yield Candidate(name, timed(call, exact, index), flops, calls.predicted + 0.08 * keep, LIMIT)


def product_with_residual(m: int, d: int, h: int) -> Iterator[Candidate]:
    """x w^T + b + residual, h -> d."""
    x, w, b, residual = random(m, h), random(d, h, scale=h**-0.5), random(d), random(m, d)
    flops = 2.0 * m * d * h
    exact = F.linear(x[:CHECKED].double(), w.double(), b.double()) + residual[:CHECKED].double()
    add = compiled(lambda x, w, b, r: F.linear(x, w, b) + r)
    yield Candidate("Inductor", timed(lambda: add(x, w, b, residual), exact), flops, 0.80)
    call = partial(torch.addmm, residual, x, w.t())
    yield Candidate("cuBLAS, beta = 1, without bias", timed(call, exact - b.double()), flops, 0.75)
    for name, config, calls in configs():
        call = partial(calls.residual, x, w, b, residual, config)
        yield Candidate(name, timed(call, exact), flops, calls.predicted, LIMIT)


class TritonCalls:
    predicted = 0.85

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
        return self.module.dgelu(*tensors, config=config)


class QuackCalls:
    predicted = 0.66

    def __init__(self) -> None:
        from vitrail.kernels import quack_products

        self.module = quack_products
        self.gelu, self.keep = quack_products.linear_gelu, quack_products.linear_gelu_keep
        self.residual, self.dgelu = quack_products.linear_residual, quack_products.dgelu


def configs() -> Iterator[tuple[str, Any, Any]]:
    """Name, tiling and calls of every kernel that is installed."""
    for kind, make in (("triton", TritonCalls), ("quack", QuackCalls)):
        try:
            calls = make()
        except Exception as error:
            print(f"  {kind} is left out: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            continue
        for name, config in calls.module.CONFIGS.items():
            yield f"{kind} {name}", config, calls


def backward_product(m: int, d: int, h: int) -> Iterator[Candidate]:
    """(grad weight) GELU'(argument), GELU(argument), column sums."""
    grad, weight, argument = random(m, d), random(d, h, scale=h**-0.5), random(m, h)
    exact = argument[:CHECKED].double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(exact), exact, grad[:CHECKED].double() @ weight.double())
    flops = 2.0 * m * d * h

    @compiled
    def plain(grad: Tensor, weight: Tensor, argument: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product = torch.ops.aten.gelu_backward(grad @ weight, argument)
        return product, F.gelu(argument), product.float().sum(0)

    @compiled
    def own(grad: Tensor, weight: Tensor, argument: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = argument.float()
        product = ((grad @ weight).float() * gelu_polynomial.gelu_derivative(z)).bfloat16()
        return product, gelu_polynomial.gelu(z).bfloat16(), product.float().sum(0)

    given = grad, weight, argument
    yield Candidate("Inductor, exact GELU", timed(lambda: plain(*given), expected, 0), flops, 1.45)
    yield Candidate("product only", timed(lambda: grad @ weight), flops, 0.69)
    yield Candidate("Inductor, polynomial GELU", timed(lambda: own(*given), expected, 0), flops, 1.3, LIMIT)
    for name, config, calls in configs():
        call = partial(calls.dgelu, *given, config=config)
        yield Candidate(name, timed(call, expected, 0), flops, calls.predicted + 0.3, LIMIT)


def eight_bit_products(m: int, d: int, h: int) -> Iterator[Candidate]:
    x, w, b = random(m, d), random(h, d, scale=d**-0.5), random(h)
    (values, scale), (weight, weight_scale) = eight_bit.quantize_rows(x), eight_bit.quantize_rows(w)
    columns, one = weight_scale.t().contiguous(), torch.ones((), device=DEVICE)
    restored = (values[:CHECKED].double() * scale[:CHECKED].double()) @ (weight.double() * weight_scale.double()).t()
    expected, flops = restored + b.double(), 2.0 * m * d * h
    units = (values[:CHECKED].double() @ weight.double().t()) + b.double()

    def product(scale_a: Tensor, scale_b: Tensor) -> Call:
        return lambda: torch._scaled_mm(
            values, weight.t(), scale_a=scale_a, scale_b=scale_b, bias=b, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    yield Candidate("_scaled_mm, one scale", timed(product(one, one), units), flops, 0.467, LIMIT)
    yield Candidate("_scaled_mm, scales of rows", timed(product(scale, columns), expected), flops, 0.50, LIMIT)

    norm, hidden = nn.LayerNorm(d, device=DEVICE, dtype=torch.bfloat16), random(m, h)
    before: dict[str, tuple[Callable[[Tensor], Any], Tensor, float]] = {
        "LayerNorm": (norm, x, 0.06),
        "GELU": (F.gelu, hidden, 0.45),
        "polynomial GELU": (lambda z: gelu_polynomial.gelu(z.float()), hidden, 0.25),
    }
    for name, (function, given, predicted) in before.items():
        run = compiled(lambda x, function=function: eight_bit.quantize_rows(function(x)))
        yield Candidate(f"Inductor: {name} and rows to e4m3", timed(partial(run, given)), flops, predicted)

    def fused(out_scale: Tensor | None, **tile: int) -> Any:
        from vitrail.kernels.triton_products import TileConfig, launch

        out = torch.empty(m, h, device=DEVICE, dtype=torch.bfloat16 if out_scale is None else eight_bit.E4M3)
        scales = {"row_scale": scale, "column_scale": columns, "out_scale": out_scale}

        def call() -> Tensor:
            launch("gelu", values, weight, out, bias=b, **scales, config=TileConfig(block_k=128, **tile))
            return out

        factor = 1 if out_scale is None else out_scale
        return call, lambda: relative(call()[:CHECKED].float() * factor, F.gelu(expected))

    static, wide = torch.tensor(8 / 448, device=DEVICE), {"block_n": 256, "warps": 8, "per_sm": 1}
    yield Candidate("triton GELU to bfloat16, 128x128, 2 per SM", lambda: fused(None), flops, 0.60)
    yield Candidate("triton GELU to e4m3, one scale, 128x128, 2 per SM", lambda: fused(static), flops, 0.52)
    yield Candidate("triton GELU to e4m3, one scale, 128x256", lambda: fused(static, **wide), flops, 0.55)


def gemm(options: argparse.Namespace, session: Session) -> None:
    config = config_from_name(f"ViT-{options.model}")
    assert isinstance(config, ViTConfig)
    d, h, m = config.width, config.mlp_dim, BATCH[options.model][options.train] * tokens_of(config)
    if options.train:
        session.table(f"{m} x {d} -> {h}, bias, GELU, argument kept", first_product(m, d, h, True))
        session.table(f"{m} x {d} -> {h}, GELU' and sums", backward_product(m, d, h))
    else:
        session.table(f"{m} x {d} -> {h}, bias, GELU", first_product(m, d, h, False))
        session.table(f"{m} x {h} -> {d}, bias, residual", product_with_residual(m, d, h))
        session.table(f"e4m3, {m} x {d} -> {h}", eight_bit_products(m, d, h))


def attention(options: argparse.Namespace, session: Session) -> None:
    config = config_from_name(f"ViT-{options.model}")
    assert isinstance(config, ViTConfig)
    images, tokens = BATCH[options.model][options.train], tokens_of(config)
    heads, width = config.num_heads, config.width
    title = f"attention {images} x {tokens} x {heads} x {width // heads}{', with backward' * options.train}"
    session.table(title, attentions(images, tokens, heads, width, options.train))


def attentions(images: int, tokens: int, heads: int, width: int, train: bool) -> Iterator[Candidate]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    qkv = random(images, tokens, 3 * width).requires_grad_(train)
    grad = random(images, tokens, width)
    some = qkv[:4].detach().double().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(*some).transpose(1, 2).flatten(2)
    flops = (3.5 if train else 1) * 4.0 * images * tokens**2 * width

    def packed(backend: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
                out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            if train:
                out.backward(grad)
                qkv.grad = None
            return out

        return call

    def fa3() -> Any:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
        return timed(packed(SDPBackend.FLASH_ATTENTION), expected)()

    predicted = (0.77, 0.77, 1.29, 1.81) if train else (0.35, 0.35, 0.56, 0.88)
    backends = (None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for name, backend, ms in zip(("default", "cuDNN", "flash", "efficient"), backends, predicted, strict=True):
        yield Candidate(name, timed(packed(backend), expected), flops, ms)
    if not train:
        from vitrail.kernels.triton_attention import packed_attention

        for block, warps in ((64, 4), (128, 8)):
            call = partial(packed_attention, qkv, heads, block, warps)
            yield Candidate(f"triton, {block} queries, {warps} warps", timed(call, expected), flops, 0.2, LIMIT)
    yield Candidate("flash 3", fa3, flops)
