"""Attention inside windows with a relative bias: every way to compute it, in one run.

    python benchmarks/window_attention.py --part kernels                  # the stages of Swin-T, one table for each
    python benchmarks/window_attention.py --part kernels --version 2      # windows of 8 x 8
    python benchmarks/window_attention.py --part networks --models Swin-T
    python benchmarks/window_attention.py --stages 1,3 --only sdpa,triton --json rows.jsonl
    python benchmarks/window_attention.py --device cpu --batch-size 1 --rounds 1   # a check without a GPU

Each candidate gets the packed queries, keys and values of all windows, B nW N 3 H K, and returns B nW N D, so that
copies count. Times are medians over rounds in which all candidates take turns; errors are relative to float64. A
candidate that does not run is a row with the reason.

The second part puts the kernel of `vitrail/kernels/window_attention.py` into whole networks, beside the networks as
they are, compiled and in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.config import SwinConfig
from vitrail.models import build, windows
from vitrail.models.model_names import config_from_name
from vitrail.models.swin_layers import MAX_LOG_SCALE, WindowAttention, add_mask, attend_in_windows

# B images; nW windows of N tokens; H heads of K channels; G = 1 or nW biases

BASELINE = "sdpa, bias broadcast (as it is)"
Call = Callable[[Tensor, Tensor], Tensor]
"""qkv, B nW N 3 H K, and bias, G H N N -> B nW N D."""


def parts(qkv: Tensor) -> list[Tensor]:
    """q, k and v, each B nW N H K."""
    return list(qkv.unbind(3))


def explicit(qkv: Tensor, bias: Tensor) -> Tensor:
    """Logits, bias, softmax and product as separate operations, as most libraries have them."""
    q, k, v = (x.transpose(2, 3) for x in parts(qkv))
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + bias
    return (logits.softmax(-1).to(v.dtype) @ v).transpose(2, 3).flatten(3)


def as_it_is(qkv: Tensor, bias: Tensor) -> Tensor:
    return attend_in_windows(*parts(qkv), bias, None, 0.0, None)


def expanded(qkv: Tensor, bias: Tensor) -> Tensor:
    """The bias as a tensor of its own for every window of every image."""
    images, num_windows = qkv.shape[:2]
    q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in parts(qkv))
    whole = bias.expand(num_windows, *bias.shape[1:]).repeat(images, 1, 1, 1)
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=whole), qkv)


def aligned(qkv: Tensor, bias: Tensor) -> Tensor:
    """Rows of the bias start at multiples of 8 elements, as the memory-efficient kernel needs them."""
    tokens = bias.shape[-1]
    return as_it_is(qkv, F.pad(bias, (0, -tokens % 8))[..., :tokens])


def padded_tokens(qkv: Tensor, bias: Tensor) -> Tensor:
    """Windows padded to a multiple of 16 tokens."""
    tokens = bias.shape[-1]
    extra = -tokens % 16
    bias = F.pad(F.pad(bias, (0, extra), value=float("-inf")), (0, 0, 0, extra))
    return as_it_is(F.pad(qkv, (0, 0, 0, 0, 0, 0, 0, extra)), bias)[:, :, :tokens]


def merged(x: Tensor, qkv: Tensor) -> Tensor:
    """B nW, H, N, K -> B nW N D."""
    return x.transpose(1, 2).flatten(2).unflatten(0, qkv.shape[:2])


def flex(qkv: Tensor, bias: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    groups = len(bias)

    def add_bias(score: Tensor, window: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + bias[window % groups, head, row, column]

    q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in parts(qkv))
    out = flex_attention(q, k, v, score_mod=add_bias)
    assert isinstance(out, Tensor)
    return merged(out, qkv)


def triton_kernel(windows_per_program: int) -> Call:
    def call(qkv: Tensor, bias: Tensor) -> Tensor:
        from vitrail.kernels.window_attention import window_attention

        scale = torch.full((qkv.shape[4],), qkv.shape[5] ** -0.5, device=qkv.device)
        return window_attention(qkv, bias, scale, windows_per_program=windows_per_program).flatten(3)

    return call


@dataclass(frozen=True)
class Candidate:
    name: str
    call: Call
    backend: SDPBackend | None = None
    """The only backend of scaled_dot_product_attention that may be used."""
    compiled: bool = False


CANDIDATES = (
    Candidate("explicit", explicit),
    Candidate("explicit, compiled", explicit, compiled=True),
    Candidate(BASELINE, as_it_is),
    Candidate("sdpa, bias broadcast, compiled", as_it_is, compiled=True),
    Candidate("  flash only", as_it_is, SDPBackend.FLASH_ATTENTION),
    Candidate("  cudnn only", as_it_is, SDPBackend.CUDNN_ATTENTION),
    Candidate("  efficient only", as_it_is, SDPBackend.EFFICIENT_ATTENTION),
    Candidate("  math only", as_it_is, SDPBackend.MATH),
    Candidate("sdpa, bias expanded", expanded),
    Candidate("sdpa, bias aligned", aligned),
    Candidate("sdpa, tokens padded", padded_tokens),
    Candidate("flex, compiled", flex, compiled=True),
    *(Candidate(f"triton, {n} windows", triton_kernel(n)) for n in (1, 4, 16, 64)),
)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str, at_least: float = 0.02) -> float:
    """Seconds of one call, from as many as take about `at_least`."""
    calls = 1
    while True:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        took = time.perf_counter() - start
        if took >= at_least or calls >= 1024:
            return took / calls
        calls *= 4


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@dataclass
class Prepared:
    """A candidate that runs, with its errors and times."""

    name: str
    forward: Callable[[], object]
    both: Callable[[], object]
    error: float
    grad_error: float
    forward_times: list[float]
    both_times: list[float]


def prepare(candidate: Candidate, qkv: Tensor, bias: Tensor, grad: Tensor, expected: Sequence[Tensor]) -> Prepared:
    """Run a candidate once and compare it; raises whatever it raises."""
    call = torch.compile(candidate.call, dynamic=False) if candidate.compiled else candidate.call
    context = (lambda: sdpa_kernel(candidate.backend)) if candidate.backend is not None else nullcontext

    def forward() -> Tensor:
        with torch.no_grad(), context():
            return call(qkv, bias)

    def both() -> tuple[Tensor, ...]:
        with context():
            return torch.autograd.grad(call(qkv, bias), (qkv, bias), grad)

    error = relative(forward(), expected[0])
    grad_error = max(relative(a, b) for a, b in zip(both(), expected[1:], strict=True))
    return Prepared(candidate.name, forward, both, error, grad_error, [], [])


def write_row(file: str | None, title: str, name: str, ms: float | None = None, **row: Any) -> None:
    """Append a result to a file, as fast_rows.py does."""
    if file is not None:
        entry = {"title": title, "name": name, "row": {"name": name, "ms": ms, **row}}
        with Path(file).open("a") as lines:
            lines.write(json.dumps(entry) + "\n")


def compare(title: str, qkv: Tensor, bias: Tensor, options: argparse.Namespace) -> None:
    """Print one table."""
    device = qkv.device.type
    qkv, bias = qkv.requires_grad_(), bias.requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (qkv, bias)]
    grad = torch.randn(*qkv.shape[:3], qkv.shape[4] * qkv.shape[5], device=qkv.device).to(qkv.dtype)
    out = explicit(exact[0], exact[1])
    expected = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
    headings = f"{'forward':>10s} {'ratio':>6s} {'+ backward':>11s} {'ratio':>6s} {'error':>8s} {'gradients':>9s}"
    print(f"\n{title}\n{'':32s} {headings}")
    ready = []
    for candidate in CANDIDATES:
        if not any(word in candidate.name for word in options.only.split(",")):
            continue
        try:
            ready.append(prepare(candidate, qkv, bias, grad, expected))
        except Exception as reason:
            note = str(reason).strip().partition("\n")[0]
            print(f"{candidate.name:32s} does not run: {note[:90]}", flush=True)
            write_row(options.json, title, candidate.name, note=f"{type(reason).__name__}: {note}"[:240])
    for _ in range(options.rounds):
        for row in ready:
            row.forward_times.append(seconds(row.forward, device))
            row.both_times.append(seconds(row.both, device))
    base = next((row for row in ready if row.name == BASELINE), ready[0])
    for row in ready:
        a, b = median(row.forward_times), median(row.both_times)
        a_ratio = median(x / y for x, y in zip(base.forward_times, row.forward_times, strict=True))
        b_ratio = median(x / y for x, y in zip(base.both_times, row.both_times, strict=True))
        print(
            f"{row.name:32s} {1000 * a:7.3f} ms {a_ratio:6.2f} {1000 * b:8.3f} ms {b_ratio:6.2f} "
            f"{row.error:8.1e} {row.grad_error:9.1e}",
            flush=True,
        )
        write_row(options.json, title, row.name, 1000 * a, error=row.error)
        write_row(options.json, f"{title}, with backward", row.name, 1000 * b, error=row.grad_error)


def stages(config: SwinConfig) -> Iterator[tuple[int, bool]]:
    """Stages, without and with a shift."""
    for stage, grid in enumerate(config.stage_grids(config.grid)):
        for shifted in (False, True):
            if not shifted or any(config.window_placement(stage).on(grid).shift):
                yield stage, shifted


def measure_kernels(options: argparse.Namespace) -> None:
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    config = config_from_name("Swin-T" if options.version == 1 else "SwinV2-T")
    assert isinstance(config, SwinConfig)
    grids = config.stage_grids(config.grid)
    wanted = {int(number) - 1 for number in options.stages.split(",") if number}
    for stage, shifted in stages(config):
        if wanted and stage not in wanted:
            continue
        plan = windows.window_plan(
            grids[stage], config.window_placement(stage), shifted, torch.empty(0, device=options.device)
        )
        heads, tokens = config.num_heads[stage], plan.shape.size[0] * plan.shape.size[1]
        shape = (options.batch_size, plan.num_windows, tokens, 3, heads, config.stage_width(stage) // heads)
        torch.manual_seed(0)
        qkv = torch.randn(shape, device=options.device).to(dtype)
        bias = add_mask(torch.randn(heads, tokens, tokens, device=options.device), plan, -100.0).to(dtype)
        title = (
            f"stage {stage + 1}{', shifted' * shifted}: {shape[0]} images, {shape[1]} windows of {tokens} tokens, "
            f"{heads} heads of {shape[-1]}, {str(dtype).removeprefix('torch.')}"
        )
        compare(title, qkv, bias, options)


class KernelAttention(WindowAttention):
    """WindowAttention with the Triton kernel; for networks without dropout."""

    def forward(
        self,
        x: Tensor,
        grid: windows.Grid,
        weights_out: list[Tensor] | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        from vitrail.kernels.window_attention import window_attention

        plan = self.plan(grid, x)
        qkv = self.qkv(windows.to_windows(x, plan)).unflatten(-1, (3, self.num_heads, -1))  # B nW N 3 H K
        bias, cosine = self.bias(plan, qkv), self.log_scale is not None
        if self.log_scale is not None:
            scale = self.log_scale.clamp(max=MAX_LOG_SCALE).exp()
        else:
            scale = torch.full((self.num_heads,), qkv.shape[-1] ** -0.5, device=x.device)
        y: Tensor = self.out(windows.from_windows(window_attention(qkv, bias, scale, cosine).flatten(3), plan))
        return y


def network(name: str, with_kernel: bool) -> nn.Module:
    net = build(config_from_name(name), seed=0)
    for module in net.modules():
        if with_kernel and isinstance(module, WindowAttention):
            module.__class__ = KernelAttention
    return net


def network_step(net: nn.Module, images: Tensor, train: bool) -> Callable[[], object]:
    """A compiled forward pass in bfloat16, or one with its backward pass under autocast."""
    run: Any = torch.compile(net)
    if not train:
        return torch.no_grad()(lambda: run(images))

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = run(images).float().square().mean()
        loss.backward()
        net.zero_grad(set_to_none=True)

    return step


def measure_networks(options: argparse.Namespace) -> None:
    for name in options.models.split(","):
        for train in (False, True):
            torch._dynamo.reset()
            steps: dict[str, Callable[[], object]] = {}
            for way, with_kernel in (("as it is", False), ("triton kernel", True)):
                net = network(name, with_kernel).to(options.device).train(train)
                images = torch.randn(options.batch_size, 3, *net.config.image_size, device=options.device)
                if not train:
                    net, images = net.bfloat16(), images.bfloat16()
                step = network_step(net, images, train)
                try:
                    for _ in range(3):
                        step()
                    steps[way] = step
                except Exception as reason:
                    note = str(reason).strip().partition("\n")[0]
                    print(f"{name}, {way}, does not run: {note[:90]}", flush=True)
                    write_row(
                        options.json, f"{name}, training={train}", way, note=f"{type(reason).__name__}: {note}"[:240]
                    )
            times = {way: [] for way in steps}
            for _ in range(options.rounds):
                for way, step in steps.items():
                    times[way].append(seconds(step, options.device, 0.5))
            title = f"{name} {'training' if train else 'inference'}"
            show_networks(title, options.batch_size, times)
            for way, found in times.items():
                write_row(options.json, f"{title}, batch {options.batch_size}", way, 1000 * median(found))


def show_networks(title: str, batch_size: int, times: dict[str, list[float]]) -> None:
    rates = {way: batch_size / median(found) for way, found in times.items()}
    shown = "   ".join(f"{way} {rate:8.1f} images/s" for way, rate in rates.items())
    ratio = rates.get("triton kernel", float("nan")) / rates.get("as it is", float("nan"))
    print(f"{title}, batch {batch_size}: {shown}   {ratio:.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "kernels", "networks"), default="all")
    parser.add_argument("--version", type=int, choices=(1, 2), default=1, help="of the windows: 7 x 7 or 8 x 8 tokens")
    parser.add_argument("--models", default="Swin-T")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="candidates whose names contain one of these words")
    parser.add_argument("--stages", default="", help="of the network, such as 1,3; all by default")
    parser.add_argument("--json", help="file to which results are appended")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if options.device != 'cpu' else 'CPU'}")
    if options.part != "networks":
        measure_kernels(options)
    if options.part != "kernels":
        print()
        measure_networks(options)


if __name__ == "__main__":
    main()
