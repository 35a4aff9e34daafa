"""Whole networks with each set of kernels, and timm's, compiled and in turns: run by fast_session.py.

    python benchmarks/fast_networks.py [--model B/16] [--train] [--out DIR] [--seconds 300]

The cases are those of `vitrail bench`: a process for each, prepared side by side, outputs (in training the gradients
too) compared with the plain float32 network. A kernel that does not compile is a row that says so. The same --out
continues. Prints the fastest kernels last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitrail.bench.benchmark import benchmark_device, measure_groups
from vitrail.bench.cases import OWN, PRODUCT, Case, Group, default_batches, full_name
from vitrail.bench.measurement import Row
from vitrail.bench.result_tables import cells
from vitrail.kernels import choice

INFERENCE = (
    "plain",
    "gelu=polynomial",
    "attention=triton",
    "mlp=triton",
    "mlp=triton,residual=triton",
    "mlp=quack",
    "mlp=quack,residual=triton",
    "mlp=quack,residual=quack",
    "mlp=quack,residual=triton,attention residual=triton",
    "mlp=quack,residual=triton,attention residual=quack",
)
EIGHT_BIT = ("plain", "gelu=polynomial", "8-bit mlp=triton", "8-bit mlp=triton,8-bit residual=triton")
TRAINING = ("plain", "gelu=polynomial", "mlp training=triton", "mlp training=quack")
IS_FASTER = 1.005
"""Times the plain network's rate: less is noise."""


def cases(model: str, train: bool, device: str) -> Group:
    mode = "train" if train else "inference"
    (batch_size,) = default_batches(model, mode, gpu=True)
    base = Case(library=OWN, model=model, batch_size=batch_size, device=device, precision="bfloat16", compile="default")
    base = replace(base, work="train") if train else base
    kernels = [
        each for each in (TRAINING if train else INFERENCE) if "quack" not in each or choice.is_installed("quack")
    ]
    found = [replace(base, kernels=each) for each in kernels]
    if not train:
        found += [replace(base, precision="float8", kernels=each) for each in EIGHT_BIT]
    others = [replace(base, library="timm"), Case(library=PRODUCT, work="product", precision="bfloat16", device=device)]
    return Group(model=model, mode=mode, batch_size=batch_size, cases=(*found, *others))


def fastest(group: Group, rows: Sequence[Row], precision: str) -> str:
    """The kernels of the fastest row whose outputs agree; plain, if none is faster by more than noise."""
    kernels = {(case.setting, case.shown_precision): case.kernels for case in group.cases if case.library == OWN}
    rates = {
        kernels[row.setting, row.precision]: row.images_per_s or 0.0
        for row in rows
        if row.is_own and row.precision.startswith(precision) and row.status in ("ok", "baseline")
    }
    best = max(rates, key=lambda name: rates[name], default="plain")
    return best if rates.get(best, 0.0) > IS_FASTER * rates.get("plain", 0.0) else "plain"


def show(group: Group, rows: Sequence[Row]) -> None:
    headings, lines = cells(rows)
    widths = [max(len(line[i]) for line in (headings, *lines)) for i in range(len(headings))]
    print(f"\n{group.title}")
    for line in (headings, *lines):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=6)
    options = parser.parse_args()
    device = benchmark_device("auto")
    group = cases(full_name(options.model), options.train, device)
    result = measure_groups(
        [group], device, options.out, rounds=options.rounds, turn_s=0.5, jobs=options.jobs,
        time_limit_s=options.seconds, command="fast_networks.py", show=show, summary=False,
        progress=lambda what: print(f"    {what}", flush=True),
    )  # fmt: skip
    found = {precision: fastest(group, result.rows, precision) for precision in ("bfloat16", "float8")}
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    print("\n" + json.dumps({"model": options.model, "train": options.train, "gpu": name, "fastest": found}))


if __name__ == "__main__":
    main()
