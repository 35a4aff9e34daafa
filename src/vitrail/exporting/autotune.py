"""`--engine auto`: times the installed engines and selects the fastest; the choice is cached for this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.engines.engine import Engine, torch_engine
from vitrail.engines.export_metadata import ExportMetadata, Precision
from vitrail.engines.openvino_engine import openvino_core
from vitrail.engines.optional_packages import is_installed
from vitrail.errors import VitrailError
from vitrail.exporting.compare import BATCH_SIZE, ROUNDS, measure_throughput
from vitrail.exporting.engine_cache import ENGINE_FORMATS, cache_folder, cached_engine, is_persistent
from vitrail.exporting.exporter import float32_on_cpu, preprocess_images
from vitrail.exporting.sample_images import Pixels, sample_images
from vitrail.models import Net
from vitrail.runtime import warn_once
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu
from vitrail.storage.atomic_write import write_json
from vitrail.storage.locks import file_lock
from vitrail.weights.model_info import ModelInfo

SECONDS = 0.15
"""Duration of each timing in a round."""
MAX_ERROR = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1}
"""Maximum relative error of the outputs of an engine that is selected automatically, by precision."""

Benchmark = dict[str, Any]
"""Result of a benchmark, cached as JSON."""


def fastest_engine(
    net: Net,
    info: ModelInfo,
    device: torch.device,
    threads: int | None = None,
    calibrate: Sequence[Any] = (),
    concurrency: int = 1,
) -> Engine:
    """The fastest engine whose outputs match those of torch in float32; torch on a GPU.

    The candidates are torch, ONNX Runtime and OpenVINO in float32, and OpenVINO in int8 (dynamic) and, if the CPU
    supports it, bfloat16. With images to `calibrate`, int8 is static, and ONNX Runtime is a candidate for it too.
    """
    if device.type != "cpu":
        warn_once([f"--engine auto selected torch, the only engine for {device.type}"])
        return torch_engine(net, info, device, threads, concurrency)
    net = float32_on_cpu(net)
    if not (is_installed("onnx") and is_installed("onnxscript") and any(map(is_installed, ENGINE_FORMATS))):
        warn_once(["--engine auto selected torch: no other engine is installed (pip install 'vitrail[export]')"])
        return torch_engine(net, info, device, threads, concurrency)
    calibration = preprocess_images(ExportMetadata(info=info, to="onnx"), calibrate)
    folder = cache_folder(net, info, calibration)
    path = folder / f"choice-{_machine_key(threads)}.json"
    with file_lock(folder / ".race"):
        benchmark = _read_choice(path)
        is_cached = benchmark is not None
        if benchmark is None:
            warn_once(
                ["timing the installed engines; this takes up to a minute and is done only once"], about=str(path)
            )
            benchmark = _benchmark_candidates(net, info, threads, calibration)
            if is_persistent(cache_folder(net, info, calibration)):  # not a choice that a full disk caused
                with suppress(VitrailError, OSError):
                    write_json(path, benchmark, overwrite=True)
    warn_once([f"--engine auto selected {describe_choice(benchmark)}{f'; cached in {path}' * is_cached}"])
    if benchmark["engine"] == "torch":
        return torch_engine(net, info, device, threads, concurrency)
    return cached_engine(net, info, benchmark["engine"], benchmark["precision"], threads, concurrency, calibration)


def _benchmark_candidates(net: Net, info: ModelInfo, threads: int | None, calibration: Sequence[Pixels]) -> Benchmark:
    """Time torch and every candidate whose outputs match those of torch."""
    reference = torch_engine(net, info, "cpu", threads)
    engines: dict[tuple[str, str], Engine] = {("torch", "float32"): reference}
    excluded: dict[str, str] = {}
    batch = sample_batch(info)
    expected = reference.logits(batch)
    errors: dict[str, float] = {}
    for name, precision in candidates(bool(calibration)):
        label = f"{name} {precision}"
        try:
            engine = cached_engine(net, info, name, precision, threads, 1, calibration)
        except VitrailError as error:
            excluded[label] = str(error)
            continue
        errors[label] = float(np.linalg.norm(engine.logits(batch) - expected)) / max(
            float(np.linalg.norm(expected)), 1e-30
        )
        if errors[label] <= MAX_ERROR[precision]:
            engines[name, precision] = engine
        else:
            excluded[label] = (
                f"got a relative error of {errors[label]:.2g}; at most {MAX_ERROR[precision]:g} is allowed"
            )
    return {**time_engines(engines, batch), "refused": excluded, "off": errors}


def time_engines(engines: dict[tuple[str, str], Engine], batch: Pixels) -> Benchmark:
    """Median images/s of each engine, timed in turns: a temporary slowdown of the machine affects all of them."""
    for engine in engines.values():
        engine.logits(batch)
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in engines}
    for _ in range(ROUNDS):
        for key, engine in engines.items():
            rates[key].append(measure_throughput(engine, batch, SECONDS))
    medians = {key: float(np.median(values)) for key, values in rates.items()}
    fastest = max(medians, key=lambda key: medians[key])
    return {
        "engine": fastest[0],
        "precision": fastest[1],
        "images_per_second": {" ".join(key): median for key, median in medians.items()},
    }


def candidates(calibrated: bool) -> Iterator[tuple[str, Precision]]:
    """Engines and precisions other than torch; ONNX first, since OpenVINO files are converted from ONNX files."""
    for name in ENGINE_FORMATS:
        if is_installed(name):
            yield name, "float32"
            if calibrated and is_installed("onnxruntime"):
                yield name, "int8"
    if is_installed("openvino"):
        if not calibrated:
            yield "openvino", "int8"
        if "BF16" in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            yield "openvino", "bfloat16"


def sample_batch(info: ModelInfo) -> Pixels:
    """A batch of the sample images, preprocessed: B H W C."""
    return np.stack(
        preprocess_images(ExportMetadata(info=info, to="onnx"), sample_images(info.config.channels))[:BATCH_SIZE]
    )


def describe_choice(benchmark: Benchmark) -> str:
    """The selected engine and its speed, the speed of the others, and its relative error."""
    rates = dict(benchmark["images_per_second"])
    fastest = f"{benchmark['engine']} {benchmark['precision']}"
    rate = rates.pop(fastest)
    others = ", ".join(f"{label.removesuffix(' float32')} {value:.0f}" for label, value in rates.items())
    speed = f"{rate:.0f} images/s ({others})" if others else "no other engine matches the model"
    selected = f"{benchmark['engine']} in {benchmark['precision']}"
    excluded = (
        f"; {len(benchmark['refused'])} excluded, with different outputs or an error" if benchmark["refused"] else ""
    )
    relative_error = benchmark.get("off", {}).get(fastest, 0)
    error_note = (
        f"; relative error {100 * relative_error:.1f} % compared with float32"
        if relative_error > MAX_ERROR["float32"]
        else ""
    )
    return f"{selected}: {speed}{excluded}{error_note}"


def _read_choice(path: Path) -> Benchmark | None:
    """The cached benchmark; None if there is none or it is invalid."""
    try:
        benchmark: Benchmark = json.loads(path.read_text())
        describe_choice(benchmark)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return benchmark if benchmark["engine"] in ("torch", *ENGINE_FORMATS) else None


def _machine_key(threads: int | None) -> str:
    """Digest of the CPU, its instruction sets and the number of cores, for which a choice is valid."""
    key = json.dumps([detect_cpu().cache_key, threads or usable_cores()])
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
