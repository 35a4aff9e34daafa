"""An export beside the model it was made from, on the same images: error, agreement, speed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.errors import CheckpointError
from vitrail.evaluate.intervals import Estimate, paired_difference, proportion
from vitrail.export.engines import Engine, FileEngine, Floats, Pixels, TorchEngine, openvino_limit
from vitrail.export.export_metadata import OutputType
from vitrail.runtime.amx import ISA_VARIABLE
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import CpuInfo, detect_cpu

# N images, K outputs

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2}
"""How far the outputs of all images together may be off, as a share of their size."""
AGREEMENT = {"float32": 1.0, "bfloat16": 0.97, "int8": 0.9}
"""Share of images whose likeliest class must be the same, or within what so few of them leave open."""
BATCH = 8
"""Images at a time, where any number will do."""
ROUNDS = 5
SECONDS = 0.2
"""Each one's turn in a round."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Images a second, the export and the model in turns."""

    export: float
    model: float
    ratio: float
    """The median of each round's."""
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "images_per_second": self.export,
            "model_images_per_second": self.model,
            "ratio": self.ratio,
            "batch": self.batch_size,
        }


@dataclass(frozen=True)
class Environment:
    """Where a comparison was made: another CPU or version may round differently, and has another speed."""

    cpu: CpuInfo
    engine: str
    version: str
    """Of the engine; empty where it is not known."""
    cores: int
    """Cores that the engine could use."""
    limit: str = ""
    """Value of ONEDNN_MAX_CPU_ISA, which keeps instruction sets from being used; empty where it is not set."""

    @classmethod
    def detect(cls, engine: str) -> Environment:
        try:
            found = version(engine)
        except PackageNotFoundError:
            found = ""
        limit = openvino_limit() if engine == "openvino" else os.environ.get(ISA_VARIABLE, "")
        return cls(detect_cpu(), engine, found, usable_cores(), limit)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "cpu": self.cpu.name,
            "architecture": self.cpu.machine,
            "instructions": list(self.cpu.instructions),
            "cores": self.cores,
            "engine": self.engine,
            "engine_version": self.version,
        }
        return found | ({ISA_VARIABLE: self.limit} if self.limit else {})

    def __str__(self) -> str:
        many = "1 core" if self.cores == 1 else f"{self.cores} cores"
        limit = f", {ISA_VARIABLE}={self.limit}" if self.limit else ""
        return f"{self.engine} {self.version} on {self.cpu}, {many}{limit}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found."""

    images: int
    output_type: OutputType
    precision: str
    error: float
    """The largest difference of any output."""
    relative: float
    """All differences together, as a share of the model's outputs."""
    same: int | None
    """Images whose likeliest class is the same; None where outputs are not classes."""
    near: int
    """Of the others, those where the model's two likeliest classes lie within the error."""
    change: Estimate | None
    """Top-1 of the export less that of the model, where images have labels."""
    top1: tuple[float, float] | None
    """Of the export and of the model."""
    ran_on: Environment
    speed: Speed | None = None
    alike: bool = False
    """Whether the model gives the same for every image, so that agreeing with it says little."""

    @property
    def agreement(self) -> Estimate | None:
        return None if self.same is None else proportion(self.same, self.images)

    @property
    def problem(self) -> str:
        """Why this export will not do, in a few words; empty where it will."""
        allowed = TOLERANCE[self.precision]
        if not self.relative <= allowed:  # a NaN is no agreement
            return f"its {self.output_type} are off by {self.relative:.2g} of their size, {allowed:g} is allowed"
        found = None if self.same is None else proportion(self.same + self.near, self.images)
        if found is not None and found.high < AGREEMENT[self.precision]:
            expected = f"{100 * AGREEMENT[self.precision]:.0f} %"
            return f"it names the same class in {self.same} of {self.images} images, expected {expected}"
        return ""

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        if not self.alike:
            return []
        return ["the model gives the same for every image, so the comparison shows little: has its head learned yet?"]

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "images": self.images,
            "output": self.output_type,
            "largest_error": self.error,
            "relative_error": self.relative,
            "relative_error_allowed": TOLERANCE[self.precision],
            "ran_on": self.ran_on.to_dict(),
        }
        if self.agreement is not None:
            found["same_top1"] = {"count": self.same, **self.agreement.to_dict(), "expected": AGREEMENT[self.precision]}
        if self.change is not None and self.top1 is not None:
            found["top1"] = {"export": self.top1[0], "model": self.top1[1], "difference": self.change.to_dict()}
        if self.speed is not None:
            found["speed"] = self.speed.to_dict()
        return found


def compare(
    engine: FileEngine,
    model: TorchEngine,
    pixels: Sequence[Pixels],
    targets: npt.NDArray[np.int64] | None = None,
    *,
    timed: bool = True,
    advance: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """Both on the same images, N times H W C; `targets` are their classes, -1 where nobody knows."""
    size = engine.metadata.batch_size or BATCH
    ours, theirs = [], []
    for i in range(0, len(pixels), size):
        batch = np.stack(pixels[i : i + size])
        ours.append(engine.outputs(batch))
        theirs.append(apply_output_type(model.logits(batch), engine.metadata.output_type, engine.info.multi_label))
        advance(len(batch))
    got, expected = np.concatenate(ours).astype(np.float64), np.concatenate(theirs).astype(np.float64)
    speed = None
    if timed:
        many = np.stack([pixels[i % len(pixels)] for i in range(size)])
        speed = time_alternately(engine, model, many)
    return compare_outputs(got, expected, targets, engine, speed)


def compare_outputs(
    got: npt.NDArray[np.float64],
    expected: npt.NDArray[np.float64],
    targets: npt.NDArray[np.int64] | None,
    engine: FileEngine,
    speed: Speed | None = None,
) -> Comparison:
    """N K of the export and of the model -> the numbers."""
    off = np.abs(got - expected)
    error = float(off.max()) if np.isfinite(off).all() else float("inf")
    same, near, change, top1 = None, 0, None, None
    if engine.info.task == "classify" and expected.shape[1] > 1:
        ours, theirs = got.argmax(1), expected.argmax(1)
        two = np.sort(expected, axis=1)[:, -2:]
        same = int((ours == theirs).sum())
        near = int(((ours != theirs) & (two[:, 1] - two[:, 0] <= 2 * off.max(1))).sum()) if np.isfinite(error) else 0
        if targets is not None and (known := targets >= 0).any():
            right, before = (ours == targets)[known], (theirs == targets)[known]
            change, top1 = paired_difference(right, before), (float(right.mean()), float(before.mean()))
    return Comparison(
        images=len(got),
        output_type=engine.metadata.output_type,
        precision=engine.precision,
        error=error,
        relative=float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30),
        same=same,
        near=near if engine.precision == "float32" else 0,
        change=change,
        top1=top1,
        ran_on=Environment.detect(engine.name),
        speed=speed,
        alike=len(expected) > 1
        and bool(np.ptp(expected, axis=0).max() <= 1e-6 * max(float(np.abs(expected).max()), 1e-30)),
    )


def apply_output_type(logits: Floats, output_type: OutputType, multi_label: bool) -> Floats:
    """What a file would say where the model has these logits."""
    if output_type != "probabilities":
        return logits
    if multi_label:
        return 0.5 * (1 + np.tanh(0.5 * logits))  # the sigmoid, without overflow
    grown = np.exp(logits - logits.max(1, keepdims=True))
    return grown / grown.sum(1, keepdims=True)


def time_alternately(engine: Engine, model: Engine, batch: Pixels) -> Speed:
    """How fast both are: a machine that is slow for a while is slow for both."""
    for one in (engine, model):
        one.logits(batch)
    rounds = [
        (measure_throughput(engine, batch, SECONDS), measure_throughput(model, batch, SECONDS)) for _ in range(ROUNDS)
    ]
    export, own = (statistics.median(r[i] for r in rounds) for i in (0, 1))
    return Speed(export=export, model=own, ratio=statistics.median(a / b for a, b in rounds), batch_size=len(batch))


def measure_throughput(engine: Engine, batch: Pixels, seconds: float) -> float:
    """Images a second over about so many seconds, after a pause: threads of the last one asked spin for a while."""
    time.sleep(seconds / 2)
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or not count:
        engine.logits(batch)
        count += len(batch)
    return count / spent if spent >= seconds else count / (time.perf_counter() - start)


def check_agreement(comparison: Comparison, what: str) -> None:
    """Raise CheckpointError where an export is not the model."""
    if comparison.problem:
        raise CheckpointError(f"{what} does not agree with the model: {comparison.problem}. Nothing was left behind.")
