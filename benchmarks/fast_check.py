"""Every kernel against float64 on a GPU, in full: odd and real sizes, all outputs, forward and backward.

Memory is filled with NaN before it is used, so a value that a kernel does not write is an infinite error. An error is
the larger of two: the norm of the difference over the norm of the expected values, and a 32nd of the largest
difference over their root mean square, which a single wrong value raises. Run by fast_path.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from fast_kernels import BATCH, DEVICE, HALF, random, tokens_of
from fast_rows import Candidate, Session, relative
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.kernels import choice, eight_bit, fused_mlp, packed_attention
from vitrail.kernels.gelu_polynomial import gelu, gelu_derivative
from vitrail.models.layers import MLP, Block
from vitrail.models.model_names import config_from_name

LIMIT = 8e-3
"""Of bfloat16 results: rounding alone gives up to 2e-3."""
ODD = ((1037, 208, 336), (130, 48, 16), (4096, 768, 3072))
"""Rows, width, hidden width: ragged in every dimension of a tile, less than a tile, and whole tiles."""
BEYOND_32_BITS = (720_000, 64, 3072)
"""Rows and hidden width with more than 2^31 products; the last rows are compared."""

Outputs = Callable[[], Sequence[Tensor]]


def error_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    errors = [0.0]
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours.detach().double() - theirs.detach().double()).abs().max()
        rms = theirs.detach().double().square().mean().sqrt().clamp_min(1e-30)
        worst = float(difference / rms) / 32
        errors += [relative(ours, theirs), worst if worst == worst else float("inf")]
    return max(errors)


def check(name: str, run: Outputs, expected: Outputs, limit: float = LIMIT) -> Candidate:
    """`run` is called twice: the second time it must write the same values."""

    def make() -> tuple[Callable[[], Sequence[Tensor]], Callable[[], float]]:
        return run, lambda: error_of(run(), expected())

    return Candidate(name, make, limit=limit)


def products(rows: int, width: int, hidden: int, config_name: str | None = None) -> Iterator[Candidate]:
    """The three epilogues, in both forms of GELU."""
    from vitrail.kernels import triton_products

    x, w, b = random(rows, width), random(hidden, width, scale=width**-0.5), random(hidden)
    down, z, residual = random(width, hidden, scale=hidden**-0.5), random(rows, hidden, scale=2), random(rows, width)
    configs = {} if config_name is None else {"config": triton_products.CONFIGS[config_name]}
    sizes = f"{rows} x {width} x {hidden}{'' if config_name is None else ', ' + config_name}"

    def keep(tanh: bool) -> Sequence[Tensor]:
        out, argument = x.new_empty(rows, hidden), x.new_empty(rows, hidden)
        triton_products.launch("gelu", x, w, out, bias=b, argument=argument, tanh=tanh, **configs)
        return out, argument

    def plain(tanh: bool) -> Sequence[Tensor]:
        argument = F.linear(x.double(), w.double(), b.double())
        return F.gelu(argument, approximate="tanh" if tanh else "none"), argument

    def linear_residual() -> Sequence[Tensor]:
        out, hidden_x = residual.new_empty(rows, width), z
        config = configs or {"config": triton_products.RESIDUAL}
        triton_products.launch("linear", hidden_x, down, out, bias=b[:width], residual=residual, **config)
        return (out,)

    def plain_residual() -> Sequence[Tensor]:
        return (F.linear(z.double(), down.double(), b[:width].double()) + residual.double(),)

    def backward(tanh: bool) -> Sequence[Tensor]:
        return triton_products.dgelu(x, down, z, tanh, **configs)

    def plain_backward(tanh: bool) -> Sequence[Tensor]:
        full = z.double().requires_grad_()
        value = F.gelu(full, approximate="tanh" if tanh else "none")
        (grad,) = torch.autograd.grad(value, full, x.double() @ down.double())
        return grad, value, grad.sum(0)

    for tanh in (False, True):
        form = ", tanh" * tanh
        yield check(f"GELU, {sizes}{form}", partial(keep, tanh), partial(plain, tanh))
        yield check(f"GELU' {sizes}{form}", partial(backward, tanh), partial(plain_backward, tanh))
    if width <= hidden:
        yield check(f"residual, {sizes}", linear_residual, plain_residual)


def large_products() -> Iterator[Candidate]:
    rows, width, hidden = BEYOND_32_BITS

    def run() -> Sequence[Tensor]:
        x, w, b = inputs()
        return (fused_mlp.linear_gelu(x, w, b, "triton")[-512:],)

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        return random(rows, width), random(hidden, width, scale=width**-0.5), random(hidden)

    def expected() -> Sequence[Tensor]:
        x, w, b = inputs()
        return (F.gelu(F.linear(x[-512:].double(), w.double(), b.double())),)

    yield check(f"GELU, {rows} x {width} x {hidden}, the last rows", run, expected)


def eight_bit_products() -> Iterator[Candidate]:
    rows, width, hidden = 1037, 208, 336
    x, layer = random(rows, width), nn.Linear(width, hidden).to(DEVICE, HALF)
    small = eight_bit.EightBitLinear(layer)

    def expected() -> Sequence[Tensor]:
        values, scale = eight_bit.quantize_rows(x)
        weight = small.weight.double() * small.weight_scale.t().double()
        return (F.linear(values.double() * scale.double(), weight, layer.bias.double()),)

    def fused(out_scale: Tensor | None) -> Sequence[Tensor]:
        from vitrail.kernels.triton_products import TileConfig, launch

        values, scale = eight_bit.quantize_rows(x)
        out = torch.empty(rows, hidden, device=DEVICE, dtype=HALF if out_scale is None else eight_bit.E4M3)
        scales = {"row_scale": scale, "column_scale": small.weight_scale, "out_scale": out_scale}
        launch("gelu", values, small.weight, out, bias=layer.bias.detach(), **scales, config=TileConfig(block_k=128))
        return (out.float() * (1 if out_scale is None else out_scale),)

    def exact() -> Sequence[Tensor]:
        return (F.gelu(expected()[0]),)

    with torch.no_grad():
        yield check("e4m3, scales of rows", lambda: (small(x),), expected)
        yield check("e4m3, triton GELU to bfloat16", lambda: fused(None), exact)
        yield check("e4m3, triton GELU to e4m3", lambda: fused(torch.tensor(8 / 448, device=DEVICE)), exact, 5e-2)


def mlps(backend: str) -> Iterator[Candidate]:
    """Both layers, forward and backward: outputs and five gradients; with a gradient whose rows are not contiguous."""
    for rows, width, hidden in ODD:
        x, w, b = random(rows, width), random(hidden, width, scale=width**-0.5), random(hidden)
        tensors = (x, w, b, random(width, hidden, scale=hidden**-0.5), random(width))
        grad = random(width, rows).t()

        def run(tensors: Sequence[Tensor] = tensors, grad: Tensor = grad, exact: bool = False) -> Sequence[Tensor]:
            leaves = [(t.double() if exact else t.clone()).requires_grad_() for t in tensors]
            out = fused_mlp.mlp_reference(*leaves) if exact else fused_mlp.fused_mlp(*leaves, backend)
            return out, *torch.autograd.grad(out, leaves, grad.double() if exact else grad)

        yield check(f"MLP with {backend}, {rows} x {width} x {hidden}", run, partial(run, exact=True))


def attentions() -> Iterator[Candidate]:
    from vitrail.kernels.triton_attention import packed_attention as kernel

    for tokens in (5, 17, 50, 65, 145, 196, 197, 201, 209, 256):
        for channels in (32, 64, 128):
            qkv = random(3, tokens, 3 * 3 * channels)
            yield check(
                f"attention, {tokens} tokens, heads of {channels}",
                lambda qkv=qkv: (kernel(qkv, 3),),
                lambda qkv=qkv: (packed_attention.packed_attention_reference(qkv.double(), 3),),
            )


def windows() -> Iterator[Candidate]:
    """Attention in windows: output, and gradients of qkv, bias and, with cosines, scale."""
    from vitrail.kernels.window_attention import window_attention, window_attention_reference

    for images, count, groups, tokens, heads, channels, cosine in (
        (2, 4, 1, 49, 3, 32, False),
        (2, 4, 4, 49, 3, 32, False),
        (7, 4, 4, 64, 2, 32, True),
        (3, 3, 3, 16, 3, 8, True),
        (128, 64, 64, 49, 3, 32, False),
    ):
        qkv = random(images, count, tokens, 3, heads, channels)
        bias, scale = random(groups, heads, tokens, tokens), torch.rand(heads, device=DEVICE) + 1
        grad = random(images, count, tokens, heads, channels)

        def run(exact: bool, given: Sequence[Tensor] = (qkv, bias, scale, grad), c: bool = cosine) -> Sequence[Tensor]:
            *leaves, grad = [t.double() if exact else t.clone() for t in given]
            for leaf in leaves:
                leaf.requires_grad_()
            out = (window_attention_reference if exact else window_attention)(*leaves, c)
            return out, *torch.autograd.grad(out, leaves if c else leaves[:2], grad)

        name = f"windows, {images} x {count} of {tokens} tokens, {groups} biases{', cosines' * cosine}"
        yield check(name, partial(run, False), partial(run, True), 2e-2)


def compiled_blocks() -> Iterator[Candidate]:
    """Blocks with each kernel, compiled as one graph, against the plain block in float32: outputs or gradients."""
    config = ViTConfig(width=384, num_heads=6, mlp_dim=1536, activation="gelu")
    for activation in ("gelu", "gelu-tanh"):
        block = Block(config.replace(activation=activation)).to(DEVICE)
        for p in block.parameters():
            nn.init.normal_(p, std=0.05) if p.ndim > 1 else nn.init.uniform_(p, 0, 1)
        x = torch.randn(16, 197, 384, device=DEVICE)
        residuals = {"residual": "triton", "attention residual": "triton"}
        for forced in (
            {"mlp": "triton"},
            {"mlp": "triton", **residuals, "attention": "triton"},
            {"gelu": "polynomial"},
        ):
            for mode in (None, "reduce-overhead"):
                named = ", ".join(f"{k}={v}" for k, v in forced.items()) + f", {mode}" * (mode is not None)
                run = partial(inference, block, x, forced, mode)
                yield check(f"{activation} block: {named}", run, partial(inference, block, x, {}, None, True), 2e-2)
        for forced in ({"mlp training": "triton"}, {"gelu": "polynomial"}):
            named = ", ".join(f"{k}={v}" for k, v in forced.items())
            run = partial(training, block, x, forced)
            yield check(f"{activation} block: {named}", run, partial(training, block, x, {}, True), 2e-2)


def inference(
    block: Block, x: Tensor, forced: dict[str, str], mode: str | None, exact: bool = False
) -> Sequence[Tensor]:
    with torch.no_grad(), choice.force(forced):
        if exact:
            return (block(x),)
        torch._dynamo.reset()
        copy = Block(config_like(block)).to(DEVICE, HALF).eval()
        copy.load_state_dict(block.state_dict())
        run = torch.compile(copy, fullgraph=True, mode=mode)
        return [run(x.to(HALF)).clone() for _ in range(3)][-1:]


def training(block: Block, x: Tensor, forced: dict[str, str], exact: bool = False) -> Sequence[Tensor]:
    with choice.force(forced), torch.autocast(DEVICE, HALF, enabled=not exact):
        torch._dynamo.reset()
        run = block if exact else torch.compile(block, fullgraph=True)
        out = run(x)
        return out, *torch.autograd.grad(out.float().square().sum(), list(block.parameters()))


def config_like(block: Block) -> ViTConfig:
    tanh = block.mlp.activation is not F.gelu
    return ViTConfig(width=384, num_heads=6, mlp_dim=1536, activation="gelu-tanh" if tanh else "gelu")


def formulas() -> Iterator[Candidate]:
    """The cheap GELU compiled by Inductor, and its gradient."""
    x = random(4099, 96, scale=3)

    def run(tanh: bool) -> Sequence[Tensor]:
        torch._dynamo.reset()
        return torch.compile(lambda x: (gelu(x, tanh), gelu_derivative(x, tanh)))(x.float())

    def plain(tanh: bool) -> Sequence[Tensor]:
        full = x.double().requires_grad_()
        value = F.gelu(full, approximate="tanh" if tanh else "none")
        return value, *torch.autograd.grad(value.sum(), full)

    for tanh in (False, True):
        yield check(f"formula of GELU{', tanh' * tanh}", partial(run, tanh), partial(plain, tanh), 1e-3)


def hooks_are_seen() -> Iterator[Candidate]:
    """A layer with a hook takes the plain path, and the hook sees its output."""
    mlp, x = MLP(ViTConfig(width=64, num_heads=2, mlp_dim=128, activation="gelu")).to(DEVICE, HALF), random(2048, 64)
    for p in mlp.parameters():
        nn.init.normal_(p, std=0.1)

    def run() -> Sequence[Tensor]:
        seen: list[Tensor] = []
        handle = mlp.up.register_forward_hook(lambda module, args, out: seen.append(out))
        with choice.force({"mlp": "triton"}), torch.no_grad():
            out = mlp(x)
        handle.remove()
        return out, *seen

    def expected() -> Sequence[Tensor]:
        up = F.linear(x.double(), mlp.up.weight.double(), mlp.up.bias.double())
        return F.linear(F.gelu(up), mlp.down.weight.double(), mlp.down.bias.double()), up

    yield check("an MLP with a hook", run, expected)


def all_checks(model: str) -> Iterator[tuple[str, Callable[[], Iterator[Candidate]]]]:
    """Name and candidates of each table, the quickest to fail first."""
    from vitrail.kernels.triton_products import CONFIGS

    config = config_from_name(f"ViT-{model}")
    rows = BATCH[model][0] * tokens_of(config)
    for sizes in ODD:
        yield f"check: products, {sizes[0]} rows", partial(products, *sizes)
    yield f"check: products of {model}", partial(products, rows, config.width, config.mlp_dim)
    yield "check: attention", attentions
    yield "check: windows", windows
    yield "check: e4m3", eight_bit_products
    yield "check: MLPs", partial(mlps, "triton")
    yield "check: formulas", formulas
    yield "check: hooks", hooks_are_seen
    yield "check: compiled blocks", compiled_blocks
    for name in CONFIGS:
        yield f"check: tiling {name}", partial(products, 1037, 208, 336, name)
    yield "check: more than 2^31 values", large_products


def checks(options: argparse.Namespace, session: Session) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # with it, torch.empty is filled with NaN
    rows = [row for title, make in all_checks(options.model) for row in session.table(title, make(), timed=False)]
    torch.use_deterministic_algorithms(False)
    wrong = [row for row in rows if row.failed]
    print(f"\n{len(rows) - len(wrong)} of {len(rows)} checks passed")
    for row in wrong:
        print(f"  {row.name}: {row.note}")
