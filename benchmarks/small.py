"""Profiles the training step of a small model on a CPU and compares it with the time of its matrix products at peak.

    python benchmarks/small.py [--threads 2] [--rounds 30] [--compile]

The model is the MNIST recipe's: 28 px, patch 4, width 64, 4 heads, 2 layers, MLP 256, batch size 256, float32, AdamW.
The variants run in turn; the output shows the minimum and the median over all rounds, since other processes only add
time. With one thread, process CPU time is measured, which other processes hardly affect. The limit is the FLOPs of the
matrix products at the speed of one large product.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.models import build
from vitrail.models.flops import count_flops
from vitrail.models.layers import attend
from vitrail.runtime.malloc import tune_malloc

LECTURE = ViTConfig(
    image_size=28, patch_size=4, channels=1, width=64, depth=2, num_heads=4, mlp_dim=256, num_classes=10
)
BATCH = 256
FORMS = {"tanh": "gelu-tanh", "erf": "gelu"}


@dataclass
class Training:
    """The parts of a training step of one network."""

    step: Callable[[], None]
    forward: Callable[[], Tensor]
    optimize: Callable[[], object]


def training(activation: str, compiled: bool = False, parts: int = 1) -> Training:
    """`parts`: number of micro-batches, whose activations then fit in the cache."""
    net = build(LECTURE.replace(activation=activation), seed=0).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    images, targets = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    run = torch.compile(net, fullgraph=True) if compiled else net

    pieces = list(zip(images.chunk(parts), targets.chunk(parts), strict=True))

    def forward() -> Tensor:
        return F.cross_entropy(run(images), targets)

    def step() -> None:
        for images_part, targets_part in pieces:
            (F.cross_entropy(run(images_part), targets_part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, forward, optimizer.step)


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Run the calls in turn; minimum and median of each in milliseconds."""
    for call in calls.values():
        call(), call(), call()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(1000 * (clock() - start))
    return {name: (min(found), statistics.median(found)) for name, found in times.items()}


def show(title: str, found: dict[str, tuple[float, float]], floor: float | None = None) -> None:
    print(f"\n{title}: milliseconds, least (median)")
    for name, (least, median) in found.items():
        beside = f"   {least / floor:4.2f} x the limit" if floor else ""
        print(f"  {name:34s} {least:8.2f} ({median:.2f}){beside}")


def operators(run: Training, steps: int = 10) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            run.step()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_cpu_time_total)
    whole = sum(e.self_cpu_time_total for e in events)
    print("\noperators of a step (eager, tanh): share of the time")
    for event in events[:14]:
        print(f"  {event.key[:52]:52s} {100 * event.self_cpu_time_total / whole:5.1f} %   {event.count // steps} calls")


def attention(rounds: int) -> dict[str, tuple[float, float]]:
    """Attention of one layer, forward and backward: torch's fused kernel, and explicit products and softmax."""
    tokens, heads = 50, LECTURE.num_heads
    qkv = torch.randn(BATCH, tokens, 3 * LECTURE.width, requires_grad=True)
    grad = torch.randn(BATCH, heads, tokens, LECTURE.width // heads)

    def call(keep: list[Tensor] | None) -> None:
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        attend(q, k, v, weights_out=keep).backward(grad)
        qkv.grad = None

    return in_turn({"fused (SDPA)": lambda: call(None), "written out": lambda: call([])}, rounds)


def gelus(rounds: int) -> dict[str, tuple[float, float]]:
    """The activation of one layer, forward and backward."""
    x = torch.randn(BATCH * 50, LECTURE.mlp_dim, requires_grad=True)
    grad = torch.randn(BATCH * 50, LECTURE.mlp_dim)

    def call(form: str) -> None:
        F.gelu(x, approximate=form).backward(grad)
        x.grad = None

    return in_turn({"GELU, tanh": lambda: call("tanh"), "GELU, erf": lambda: call("none")}, rounds)


def products(rounds: int) -> dict[str, tuple[float, float]]:
    """All matrix products of a step in their own shapes, without bias."""
    rows, width, mlp = BATCH * 50, LECTURE.width, LECTURE.mlp_dim
    shapes = [(width, 3 * width), (width, width), (width, mlp), (mlp, width)]
    given = [(torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n)) for k, n in shapes]

    def call() -> None:
        for _ in range(LECTURE.depth):
            for x, w, g in given:
                (x @ w.t(), g @ w, g.t() @ x)

    return in_turn({"matrix products alone": call}, rounds)


def peak(rounds: int = 20) -> float:
    """FLOPs per millisecond in one large product."""
    a = torch.randn(1536, 1536)
    return 2 * 1536**3 / in_turn({"product": lambda: a @ a}, rounds)["product"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--compile", action="store_true", help="also compiled with inductor, which needs a C++ compiler"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fastest = peak()
    work = 3 * BATCH * count_flops(LECTURE)
    floor = work / fastest
    print(f"the MNIST recipe's ViT, batch size {BATCH}, float32, {options.threads} threads, torch {torch.__version__}")
    print(f"a step is {work / 1e9:.2f} GFLOP; at {fastest / 1e6:.0f} GFLOP/s that is {floor:.1f} ms")
    tanh, erf = training("gelu-tanh"), training("gelu")
    show("a step", in_turn({"tanh": tanh.step, "erf": erf.step}, options.rounds), floor)
    print("\nmalloc tuned from here on:", "yes" if tune_malloc() else "no (not glibc)")
    steps = {"tanh": tanh.step, "erf": erf.step}
    for parts in (4, 8):
        steps |= {f"{name}, in {parts} parts": training(kind, parts=parts).step for name, kind in FORMS.items()}
    if options.compile:
        steps |= {f"{name}, compiled": training(kind, compiled=True).step for name, kind in FORMS.items()}
    show("a step", in_turn(steps, options.rounds), floor)
    parts = {"forward": erf.forward, "forward and backward": lambda: erf.forward().backward()}
    show("parts of it (erf)", in_turn(parts | {"optimizer": erf.optimize}, options.rounds))
    pieces = products(options.rounds) | attention(options.rounds) | gelus(options.rounds)
    show("pieces (attention and GELU: of one layer, forward and backward)", pieces)
    operators(tanh)


if __name__ == "__main__":
    main()
