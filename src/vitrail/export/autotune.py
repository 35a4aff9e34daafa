"""The fastest engine that agrees with the model, found once for a machine and remembered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.errors import CheckpointError, VitrailError
from vitrail.export.compare import BATCH, ROUNDS, TOLERANCE, measure_throughput
from vitrail.export.engine_cache import ENGINE_FORMATS, cache_folder, cached_engine, file_lock, is_persistent
from vitrail.export.engines import ENGINES_BY_SUFFIX, Engine, FileEngine, open_file, openvino_core, torch_engine
from vitrail.export.export_metadata import ExportMetadata, Precision
from vitrail.export.exporter import float32_on_cpu, preprocess_images
from vitrail.export.optional_packages import is_installed
from vitrail.export.sample_images import Pixels, sample_images
from vitrail.models import Net
from vitrail.runtime import warn_once
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.writers import write_json

SECONDS = 0.15
"""Each candidate's turn in a round."""
MAX_ERROR = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1}
"""How far the outputs of an engine that nobody has named may be off, as a share of their size."""

Found = dict[str, Any]
"""What is remembered of a race."""


def fastest_engine(
    net: Net,
    info: ModelInfo,
    device: torch.device,
    threads: int | None = None,
    calibrate: Sequence[Any] = (),
    concurrency: int = 1,
) -> Engine:
    """Of torch, ONNX Runtime and OpenVINO in float32 and OpenVINO in bfloat16 and int8: the fastest that agrees.

    With images to calibrate on, int8 has its scales from them, and ONNX Runtime has it too. Beside a
    GPU it is torch.
    """
    if device.type != "cpu":
        warn_once([f"engine auto takes torch: it is the one that runs on {device.type}"])
        return torch_engine(net, info, device, threads, concurrency)
    net = float32_on_cpu(net)
    if not (is_installed("onnx") and is_installed("onnxscript") and any(map(is_installed, ENGINE_FORMATS))):
        warn_once(["engine auto takes torch: no other is installed (pip install 'vitrail[export]')"])
        return torch_engine(net, info, device, threads, concurrency)
    calibration = preprocess_images(ExportMetadata(info=info, to="onnx"), calibrate)
    folder = cache_folder(net, info, calibration)
    place = folder / f"choice-{_machine_key(threads)}.json"
    with file_lock(folder / ".race"):
        found = _read_choice(place)
        again = found is not None
        if found is None:
            warn_once(["trying the engines that are installed, which takes up to a minute, once"], about=str(place))
            found = _benchmark_candidates(net, info, threads, calibration)
            if is_persistent(cache_folder(net, info, calibration)):  # a choice that a full disk made is not remembered
                with suppress(VitrailError, OSError):
                    write_json(place, found, overwrite=True)
    warn_once([f"engine auto takes {describe_choice(found)}{f'; remembered in {place}' * again}"])
    if found["engine"] == "torch":
        return torch_engine(net, info, device, threads, concurrency)
    return cached_engine(net, info, found["engine"], found["precision"], threads, concurrency, calibration)


def open_export(path: Path, engine: str | None = None, threads: int | None = None, concurrency: int = 1) -> FileEngine:
    """An exported file, run by the engine it was compared in; by another, or the fastest, if that gives the same."""
    able = [name for name in ENGINES_BY_SUFFIX[path.suffix.lower()] if name == "torch" or is_installed(name)]
    usual = ENGINES_BY_SUFFIX[path.suffix.lower()][0]
    if engine in (None, usual) or usual not in able or (engine == "auto" and len(able) == 1):
        first = able[0] if usual not in able and engine == "auto" and able else engine
        return open_file(path, None if first == "auto" else first, threads, concurrency)
    if engine != "auto":
        other = open_file(path, engine, threads, concurrency)
        _check_same_outputs(other, open_file(path, usual, threads, concurrency), path)
        return other
    racing: dict[tuple[str, str], Engine] = {}
    refused = {}
    for name in able:
        try:
            one = open_file(path, name, threads)
            if racing:
                _check_same_outputs(one, next(iter(racing.values())), path)
            racing[name, one.precision] = one
        except VitrailError as error:
            refused[name] = str(error)
    if not racing:
        raise CheckpointError(next(iter(refused.values())))
    batch = _sample_batch(next(iter(racing.values())).info)
    found = {**_time_engines(racing, batch), "refused": refused}
    warn_once([f"engine auto takes {describe_choice(found)}"])
    return open_file(path, found["engine"], threads, concurrency)


def _check_same_outputs(one: FileEngine, other: Engine, path: Path) -> None:
    """Raise CheckpointError where two engines make different things of one file."""
    assert isinstance(other, FileEngine)
    batch = _sample_batch(one.info)
    got, expected = one.outputs(batch), other.outputs(batch)
    off = float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
    if not off <= TOLERANCE[one.precision]:
        raise CheckpointError(
            f"{one.name} gives other outputs for {path} than {other.name}, by {off:.2g} of their size; "
            f"try --engine {other.name}."
        )


def _benchmark_candidates(net: Net, info: ModelInfo, threads: int | None, calibration: Sequence[Pixels]) -> Found:
    """Every candidate that agrees, timed in turns."""
    own = torch_engine(net, info, "cpu", threads)
    racing: dict[tuple[str, str], Engine] = {("torch", "float32"): own}
    refused: dict[str, str] = {}
    batch = _sample_batch(info)
    expected = own.logits(batch)
    off: dict[str, float] = {}
    for name, precision in candidates(bool(calibration)):
        who = f"{name} {precision}"
        try:
            engine = cached_engine(net, info, name, precision, threads, 1, calibration)
        except VitrailError as error:
            refused[who] = str(error)
            continue
        off[who] = float(np.linalg.norm(engine.logits(batch) - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
        if off[who] <= MAX_ERROR[precision]:
            racing[name, precision] = engine
        else:
            refused[who] = f"its outputs are off by {off[who]:.2g} of their size, {MAX_ERROR[precision]:g} is allowed"
    return {**_time_engines(racing, batch), "refused": refused, "off": off}


def _time_engines(racing: dict[tuple[str, str], Engine], batch: Pixels) -> Found:
    """Images a second, in turns: a machine that is slow for a while is slow for all."""
    for engine in racing.values():
        engine.logits(batch)
    rates: dict[tuple[str, str], list[float]] = {who: [] for who in racing}
    for _ in range(ROUNDS):
        for who, engine in racing.items():
            rates[who].append(measure_throughput(engine, batch, SECONDS))
    middle = {who: float(np.median(found)) for who, found in rates.items()}
    best = max(middle, key=lambda who: middle[who])
    return {
        "engine": best[0],
        "precision": best[1],
        "images_per_second": {" ".join(who): found for who, found in middle.items()},
    }


def candidates(calibrated: bool) -> Iterator[tuple[str, Precision]]:
    """Engines and precisions besides torch; ONNX first, which OpenVINO's files are made from."""
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


def _sample_batch(info: ModelInfo) -> Pixels:
    return np.stack(
        preprocess_images(ExportMetadata(info=info, to="onnx"), sample_images(info.config.channels))[:BATCH]
    )


def describe_choice(found: Found) -> str:
    """What was chosen, and why."""
    rates = dict(found["images_per_second"])
    best = f"{found['engine']} {found['precision']}"
    own = rates.pop(best)
    others = ", ".join(f"{who.removesuffix(' float32')} {value:.0f}" for who, value in rates.items())
    why = f"{own:.0f} images a second ({others})" if others else "nothing else agrees"
    what = f"{found['engine']} in {found['precision']}"
    refused = f"; {len(found['refused'])} did not agree with the model or could not be run" if found["refused"] else ""
    off = found.get("off", {}).get(best, 0)
    little = (
        f"; its outputs differ from float32's by {100 * off:.1f} % of their size" if off > MAX_ERROR["float32"] else ""
    )
    return f"{what}: {why}{refused}{little}"


def _read_choice(place: Path) -> Found | None:
    try:
        found: Found = json.loads(place.read_text())
        describe_choice(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if found["engine"] in ("torch", *ENGINE_FORMATS) else None


def _machine_key(threads: int | None) -> str:
    """What a choice holds for, beside the model: this CPU with its instruction sets, and the number of its cores."""
    kind = json.dumps([detect_cpu().cache_key, threads or usable_cores()])
    return hashlib.blake2b(kind.encode(), digest_size=4).hexdigest()
