"""How cost grows: time and memory per image against image size, batch size and depth; a ViT against a ResNet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.bench.benchmark import benchmark_device, computes_bfloat16, measure_groups
from vitrail.bench.cases import OWN, Case, Group, full_name
from vitrail.bench.growth_chart import growth_chart
from vitrail.bench.libraries import network_config
from vitrail.bench.measurement import Benchmark, Row
from vitrail.bench.power_law import Point, Sweep
from vitrail.config import ViTConfig, pair
from vitrail.errors import ConfigError
from vitrail.explain.canvas import save
from vitrail.models.flops import count_flops
from vitrail.models.model_names import BIT_LAYERS
from vitrail.storage.atomic_write import write_json

IMAGE_SIZES = (160, 224, 320, 448, 640, 768, 1024)
DEPTHS = (3, 6, 12, 24)
BATCH_SIZES = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 4, 16, 64, 256)}
DEFAULT_BATCH = {"cpu": 1, "cuda": 16}
RESNET_MODELS = {"cpu": ("S/16",), "cuda": ("S/16", "B/16", "L/16")}
RESNET_WIDTHS = (1, 2, 3, 4)
RESNET_BATCH = {"cpu": 4, "cuda": 64}


@dataclass(frozen=True)
class Growth:
    """All sweeps, and the pairs of a ViT and a ResNet with about its FLOPs."""

    sweeps: list[Sweep]
    pairs: list[tuple[Row, Row]]
    result: Benchmark

    @property
    def gflops(self) -> dict[str, float]:
        """FLOPs of a forward pass of each model in the pairs, in 10^9."""
        names = {row.model for pair in self.pairs for row in pair}
        return {name: count_flops(network_config(name, {})) / 1e9 for name in names}

    def to_dict(self) -> dict[str, Any]:
        return {
            "environment": self.result.environment,
            "sweeps": [sweep.to_dict() for sweep in self.sweeps],
            "vit_and_resnet": [[row.to_dict() for row in rows] for rows in self.pairs],
            "gflops": self.gflops,
        }


def measure_growth(
    model: str,
    out: Path | None = None,
    *,
    mode: str = "inference",
    device: str = "auto",
    image_sizes: Sequence[int] = IMAGE_SIZES,
    batch_sizes: Sequence[int] | None = None,
    depths: Sequence[int] = DEPTHS,
    batch_size: int | None = None,
    compiled: bool = False,
    rounds: int = 3,
    turn_s: float | None = None,
    time_limit_s: float | None = None,
    command: str = "vitrail bench growth",
    progress: Callable[[str], None] = lambda what: None,
) -> Growth:
    """Measure each sweep; the points of a sweep take turns. Values for which there is no memory are points that say so.

    `batch_size` is that of the sweeps over image size and depth.
    """
    name, chosen = full_name(model), benchmark_device(device)
    config = network_config(name, {})
    if not isinstance(config, ViTConfig):
        raise ConfigError(f"{model} has no patches; growth is measured for ViTs, such as B/16.")
    kind = chosen.partition(":")[0]
    base = Case(
        library=OWN,
        model=name,
        work="train" if mode == "train" else "forward",
        precision="bfloat16" if kind == "cuda" and computes_bfloat16(chosen) else "float32",
        device=chosen,
        batch_size=batch_size or DEFAULT_BATCH[kind],
        compile="default" if compiled else None,
    )
    patch = pair(config.patch_size)[0]
    sides = sorted({max(round(side / patch), 1) * patch for side in image_sizes})
    values = {
        "image size": [(side, replace(base, changes={"image_size": side})) for side in sides],
        "batch size": [(n, replace(base, batch_size=n)) for n in batch_sizes or BATCH_SIZES[kind]],
        "depth": [(depth, replace(base, changes={"depth": depth})) for depth in depths],
    }
    groups = {
        variable: Group(
            model=name, mode=mode, batch_size=base.batch_size, cases=tuple(case for _, case in cases),
            baseline="first", variable=f"by {variable}",
        )
        for variable, cases in values.items()
    }  # fmt: skip
    resnets = [resnet_group(base, vit, mode, RESNET_BATCH[kind]) for vit in RESNET_MODELS[kind]]
    found: dict[str, Sequence[Row]] = {}
    result = measure_groups(
        [*groups.values(), *resnets],
        chosen,
        out,
        rounds=rounds,
        turn_s=turn_s,
        jobs=None,
        time_limit_s=time_limit_s,
        command=command,
        progress=progress,
        show=lambda group, rows: found.__setitem__(group.title, rows),
        summary=False,
    )
    sweeps = [_sweep(variable, group, values[variable], found[group.title]) for variable, group in groups.items()]
    return Growth(sweeps, [(found[g.title][0], found[g.title][1]) for g in resnets], result)


def _sweep(variable: str, group: Group, values: Sequence[tuple[int, Case]], rows: Sequence[Row]) -> Sweep:
    points = []
    for (value, case), row in zip(values, rows, strict=True):
        flops = count_flops(network_config(case.model, case.changes)) * (3 if case.work == "train" else 1)
        points.append(
            Point(
                value=value,
                ms=None if row.step_ms is None else row.step_ms / case.batch_size,
                memory_mb=None if row.memory_gb is None else 1e3 * row.memory_gb / case.batch_size,
                gflops=flops / 1e9,
                status="ok" if row.measured else row.status,
            )
        )
    return Sweep(variable=variable, title=group.title, points=tuple(points))


def resnet_group(base: Case, vit: str, mode: str, batch_size: int) -> Group:
    """A ViT and the BiT of this package with the most similar FLOPs."""
    name = full_name(vit)
    flops = count_flops(network_config(name, {}))
    names = [f"BiT-{depth}x{width}" for depth in BIT_LAYERS for width in RESNET_WIDTHS]
    nearest = min(names, key=lambda bit: abs(math.log(count_flops(network_config(bit, {})) / flops)))
    cases = tuple(replace(base, model=each, batch_size=batch_size) for each in (name, nearest))
    return Group(
        model=name, mode=mode, batch_size=batch_size, cases=cases, baseline="first", variable=f"against {nearest}"
    )


def write_growth(growth: Growth, out: Path, command: str) -> None:
    """Write growth.json and growth.png."""
    write_json(out / "growth.json", {"command": command, **growth.to_dict()}, overwrite=True)
    if any(point.ms for sweep in growth.sweeps for point in sweep.points):
        save(growth_chart(growth.sweeps, growth.result.environment), out / "growth.png")
