"""Comparison of an exported file with the model on the same images: error, top-1 agreement, speed."""

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

from vitrail.engines.engine import Engine, FileEngine, Floats, Pixels, TorchEngine
from vitrail.engines.export_metadata import OutputType
from vitrail.engines.openvino_engine import openvino_limit
from vitrail.errors import CheckpointError
from vitrail.evaluation.intervals import Estimate, paired_difference, proportion
from vitrail.runtime.amx import ISA_VARIABLE
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import CpuInfo, detect_cpu

# N images, K outputs

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2}
"""Maximum relative error over all images: norm of the difference / norm of the model's outputs."""
AGREEMENT = {"float32": 1.0, "bfloat16": 0.97, "int8": 0.9}
"""Minimum fraction of images with the same top-1 class, compared with the upper end of its 95 % interval."""
BATCH_SIZE = 8
"""Batch size for files that accept any."""
ROUNDS = 5
SECONDS = 0.2
"""Duration of each timing in a round."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Images/s of the exported file and of the model, timed in turns."""

    export: float
    model: float
    ratio: float
    """Median of the ratios of the rounds."""
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
    """CPU, engine and version of a comparison, on which rounding and speed depend."""

    cpu: CpuInfo
    engine: str
    version: str
    """Version of the engine; empty if unknown."""
    cores: int
    """Number of cores available to the engine."""
    isa_limit: str = ""
    """Value of ONEDNN_MAX_CPU_ISA, which limits the instruction sets in use; empty if not set."""

    @classmethod
    def detect(cls, engine: str) -> Environment:
        try:
            installed = version(engine)
        except PackageNotFoundError:
            installed = ""
        isa_limit = openvino_limit() if engine == "openvino" else os.environ.get(ISA_VARIABLE, "")
        return cls(detect_cpu(), engine, installed, usable_cores(), isa_limit)

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "cpu": self.cpu.name,
            "architecture": self.cpu.machine,
            "instructions": list(self.cpu.instructions),
            "cores": self.cores,
            "engine": self.engine,
            "engine_version": self.version,
        }
        return values | ({ISA_VARIABLE: self.isa_limit} if self.isa_limit else {})

    def __str__(self) -> str:
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        limit = f", {ISA_VARIABLE}={self.isa_limit}" if self.isa_limit else ""
        return f"{self.engine} {self.version} on {self.cpu}, {cores}{limit}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between the outputs of an exported file and those of the model."""

    images: int
    output_type: OutputType
    precision: str
    max_error: float
    """Largest absolute difference of an output."""
    relative_error: float
    """Norm of the difference over all images / norm of the model's outputs."""
    same_top1: int | None
    """Number of images with the same top-1 class; None if the outputs are not classes."""
    near_ties: int
    """Number of other images on which the model's two highest outputs differ by no more than the error explains."""
    top1_change: Estimate | None
    """Top-1 accuracy of the file minus that of the model; None without labels."""
    top1: tuple[float, float] | None
    """Top-1 accuracy of the file and of the model."""
    ran_on: Environment
    speed: Speed | None = None
    constant_outputs: bool = False
    """Whether the model gives the same outputs for every image, so that agreement shows little."""

    @property
    def agreement(self) -> Estimate | None:
        """Fraction of images with the same top-1 class."""
        return None if self.same_top1 is None else proportion(self.same_top1, self.images)

    @property
    def problem(self) -> str:
        """Why the file does not match the model; empty if it does."""
        allowed = TOLERANCE[self.precision]
        if not self.relative_error <= allowed:  # also true for NaN
            return f"its {self.output_type} have relative error {self.relative_error:.2g}; {allowed:g} is allowed"
        agreement = None if self.same_top1 is None else proportion(self.same_top1 + self.near_ties, self.images)
        if agreement is not None and agreement.high < AGREEMENT[self.precision]:
            expected = f"{100 * AGREEMENT[self.precision]:.0f} %"
            return f"got the same top-1 class for {self.same_top1} of {self.images} images, expected {expected}"
        return ""

    @property
    def notes(self) -> list[str]:
        """Remarks on the validity of the comparison."""
        if not self.constant_outputs:
            return []
        return [
            "the outputs are the same for every image, so the comparison shows little; check that the head is trained"
        ]

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "images": self.images,
            "output": self.output_type,
            "largest_error": self.max_error,
            "relative_error": self.relative_error,
            "relative_error_allowed": TOLERANCE[self.precision],
            "ran_on": self.ran_on.to_dict(),
        }
        if self.agreement is not None:
            values["same_top1"] = {
                "count": self.same_top1,
                **self.agreement.to_dict(),
                "expected": AGREEMENT[self.precision],
            }
        if self.top1_change is not None and self.top1 is not None:
            values["top1"] = {"export": self.top1[0], "model": self.top1[1], "difference": self.top1_change.to_dict()}
        if self.speed is not None:
            values["speed"] = self.speed.to_dict()
        return values


def compare(
    engine: FileEngine,
    model: TorchEngine,
    pixels: Sequence[Pixels],
    targets: npt.NDArray[np.int64] | None = None,
    *,
    timed: bool = True,
    advance: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """Run the file and the model on the same N images, each H W C; `targets` are class indices, -1 if unknown.

    `advance` is called with the number of images after each batch.
    """
    size = engine.metadata.batch_size or BATCH_SIZE
    outputs, references = [], []
    for i in range(0, len(pixels), size):
        batch = np.stack(pixels[i : i + size])
        outputs.append(engine.outputs(batch))
        references.append(apply_output_type(model.logits(batch), engine.metadata.output_type, engine.info.multi_label))
        advance(len(batch))
    got, expected = np.concatenate(outputs).astype(np.float64), np.concatenate(references).astype(np.float64)
    speed = None
    if timed:
        batch = np.stack([pixels[i % len(pixels)] for i in range(size)])
        speed = time_alternately(engine, model, batch)
    return compare_outputs(got, expected, targets, engine, speed)


def compare_outputs(
    got: npt.NDArray[np.float64],
    expected: npt.NDArray[np.float64],
    targets: npt.NDArray[np.int64] | None,
    engine: FileEngine,
    speed: Speed | None = None,
) -> Comparison:
    """Compare the outputs of the file (`got`) with those of the model (`expected`), both N K."""
    difference = np.abs(got - expected)
    max_error = float(difference.max()) if np.isfinite(difference).all() else float("inf")
    same_top1, near_ties, top1_change, top1 = None, 0, None, None
    if engine.info.task == "classify" and expected.shape[1] > 1:
        predicted, model_predicted = got.argmax(1), expected.argmax(1)
        top2 = np.sort(expected, axis=1)[:, -2:]
        same_top1 = int((predicted == model_predicted).sum())
        near_ties = (
            int(((predicted != model_predicted) & (top2[:, 1] - top2[:, 0] <= 2 * difference.max(1))).sum())
            if np.isfinite(max_error)
            else 0
        )
        if targets is not None and (labeled := targets >= 0).any():
            correct, model_correct = (predicted == targets)[labeled], (model_predicted == targets)[labeled]
            top1_change, top1 = (
                paired_difference(correct, model_correct),
                (float(correct.mean()), float(model_correct.mean())),
            )
    return Comparison(
        images=len(got),
        output_type=engine.metadata.output_type,
        precision=engine.precision,
        max_error=max_error,
        relative_error=float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30),
        same_top1=same_top1,
        near_ties=near_ties if engine.precision == "float32" else 0,
        top1_change=top1_change,
        top1=top1,
        ran_on=Environment.detect(engine.name),
        speed=speed,
        constant_outputs=len(expected) > 1
        and bool(np.ptp(expected, axis=0).max() <= 1e-6 * max(float(np.abs(expected).max()), 1e-30)),
    )


def apply_output_type(logits: Floats, output_type: OutputType, multi_label: bool) -> Floats:
    """Convert logits to the output type of a file, N K."""
    if output_type != "probabilities":
        return logits
    if multi_label:
        return 0.5 * (1 + np.tanh(0.5 * logits))  # the sigmoid, without overflow
    exps = np.exp(logits - logits.max(1, keepdims=True))
    return exps / exps.sum(1, keepdims=True)


def time_alternately(engine: Engine, model: Engine, batch: Pixels) -> Speed:
    """Images/s of both, timed in turns: a temporary slowdown of the machine affects both."""
    for each in (engine, model):
        each.logits(batch)
    rounds = [
        (measure_throughput(engine, batch, SECONDS), measure_throughput(model, batch, SECONDS)) for _ in range(ROUNDS)
    ]
    export, original = (statistics.median(r[i] for r in rounds) for i in (0, 1))
    return Speed(
        export=export, model=original, ratio=statistics.median(a / b for a, b in rounds), batch_size=len(batch)
    )


def measure_throughput(engine: Engine, batch: Pixels, seconds: float) -> float:
    """Images/s over about `seconds`, after a pause: idle threads of the previous engine go on spinning for a while."""
    time.sleep(seconds / 2)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not count:
        engine.logits(batch)
        count += len(batch)
    return count / elapsed if elapsed >= seconds else count / (time.perf_counter() - start)


def check_agreement(comparison: Comparison, name: str) -> None:
    """Raise CheckpointError if the file does not match the model."""
    if comparison.problem:
        raise CheckpointError(f"{name} does not match the model: {comparison.problem}. No file was written.")
