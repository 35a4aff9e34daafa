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
from vitrail.export.compare import BATCH, ROUNDS, TOLERANCE, rate
from vitrail.export.engines import RUNS, Engine, FileEngine, open_file, openvino_core, torch_engine
from vitrail.export.export import exact, prepared
from vitrail.export.extras import installed
from vitrail.export.images import Pixels, samples
from vitrail.export.kept import WRITTEN, alone, folder_of, is_kept, kept_engine
from vitrail.export.sheet import Precision, Sheet
from vitrail.models import Net
from vitrail.runtime import warn_once
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.writers import write_json

SECONDS = 0.15
"""Each candidate's turn in a round."""
CLOSE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1}
"""How far the outputs of an engine that nobody has named may be off, as a share of their size."""

Found = dict[str, Any]
"""What is remembered of a race."""


def fastest(
    net: Net,
    info: ModelInfo,
    device: torch.device,
    threads: int | None = None,
    calibrate: Sequence[Any] = (),
    lanes: int = 1,
) -> Engine:
    """Of torch, ONNX Runtime and OpenVINO in float32 and OpenVINO in bfloat16 and int8: the fastest that agrees.

    With images to calibrate on, int8 has its scales from them, and ONNX Runtime has it too. Beside a
    GPU it is torch.
    """
    if device.type != "cpu":
        warn_once([f"engine auto takes torch: it is the one that runs on {device.type}"])
        return torch_engine(net, info, device, threads, lanes)
    net = exact(net)
    if not (installed("onnx") and installed("onnxscript") and any(map(installed, WRITTEN))):
        warn_once(["engine auto takes torch: no other is installed (pip install 'vitrail[export]')"])
        return torch_engine(net, info, device, threads, lanes)
    calibration = prepared(Sheet(info=info, to="onnx"), calibrate)
    folder = folder_of(net, info, calibration)
    place = folder / f"choice-{_machine(threads)}.json"
    with alone(folder / ".race"):
        found = _remembered(place)
        again = found is not None
        if found is None:
            warn_once(["trying the engines that are installed, which takes up to a minute, once"], about=str(place))
            found = _raced(net, info, threads, calibration)
            if is_kept(folder_of(net, info, calibration)):  # a choice that a full disk made is not remembered
                with suppress(VitrailError, OSError):
                    write_json(place, found, overwrite=True)
    warn_once([f"engine auto takes {told(found)}{f'; remembered in {place}' * again}"])
    if found["engine"] == "torch":
        return torch_engine(net, info, device, threads, lanes)
    return kept_engine(net, info, found["engine"], found["precision"], threads, lanes, calibration)


def opened(path: Path, engine: str | None = None, threads: int | None = None, lanes: int = 1) -> FileEngine:
    """An exported file, run by the engine it was compared in; by another, or the fastest, if that gives the same."""
    able = [name for name in RUNS[path.suffix.lower()] if name == "torch" or installed(name)]
    usual = RUNS[path.suffix.lower()][0]
    if engine in (None, usual) or usual not in able or (engine == "auto" and len(able) == 1):
        first = able[0] if usual not in able and engine == "auto" and able else engine
        return open_file(path, None if first == "auto" else first, threads, lanes)
    if engine != "auto":
        other = open_file(path, engine, threads, lanes)
        _check_same(other, open_file(path, usual, threads, lanes), path)
        return other
    racing: dict[tuple[str, str], Engine] = {}
    refused = {}
    for name in able:
        try:
            one = open_file(path, name, threads)
            if racing:
                _check_same(one, next(iter(racing.values())), path)
            racing[name, one.precision] = one
        except VitrailError as error:
            refused[name] = str(error)
    if not racing:
        raise CheckpointError(next(iter(refused.values())))
    batch = _batch(next(iter(racing.values())).info)
    found = {**_timed(racing, batch), "refused": refused}
    warn_once([f"engine auto takes {told(found)}"])
    return open_file(path, found["engine"], threads, lanes)


def _check_same(one: FileEngine, other: Engine, path: Path) -> None:
    """Raise CheckpointError where two engines make different things of one file."""
    assert isinstance(other, FileEngine)
    batch = _batch(one.info)
    got, expected = one.outputs(batch), other.outputs(batch)
    off = float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
    if not off <= TOLERANCE[one.precision]:
        raise CheckpointError(
            f"{one.name} gives other outputs for {path} than {other.name}, by {off:.2g} of their size; "
            f"try --engine {other.name}."
        )


def _raced(net: Net, info: ModelInfo, threads: int | None, calibration: Sequence[Pixels]) -> Found:
    """Every candidate that agrees, timed in turns."""
    own = torch_engine(net, info, "cpu", threads)
    racing: dict[tuple[str, str], Engine] = {("torch", "float32"): own}
    refused: dict[str, str] = {}
    batch = _batch(info)
    expected = own.logits(batch)
    off: dict[str, float] = {}
    for name, precision in candidates(bool(calibration)):
        who = f"{name} {precision}"
        try:
            engine = kept_engine(net, info, name, precision, threads, 1, calibration)
        except VitrailError as error:
            refused[who] = str(error)
            continue
        off[who] = float(np.linalg.norm(engine.logits(batch) - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
        if off[who] <= CLOSE[precision]:
            racing[name, precision] = engine
        else:
            refused[who] = f"its outputs are off by {off[who]:.2g} of their size, {CLOSE[precision]:g} is allowed"
    return {**_timed(racing, batch), "refused": refused, "off": off}


def _timed(racing: dict[tuple[str, str], Engine], batch: Pixels) -> Found:
    """Images a second, in turns: a machine that is slow for a while is slow for all."""
    for engine in racing.values():
        engine.logits(batch)
    rates: dict[tuple[str, str], list[float]] = {who: [] for who in racing}
    for _ in range(ROUNDS):
        for who, engine in racing.items():
            rates[who].append(rate(engine, batch, SECONDS))
    middle = {who: float(np.median(found)) for who, found in rates.items()}
    best = max(middle, key=lambda who: middle[who])
    return {
        "engine": best[0],
        "precision": best[1],
        "images_per_second": {" ".join(who): found for who, found in middle.items()},
    }


def candidates(calibrated: bool) -> Iterator[tuple[str, Precision]]:
    """Engines and precisions besides torch; ONNX first, which OpenVINO's files are made from."""
    for name in WRITTEN:
        if installed(name):
            yield name, "float32"
            if calibrated and installed("onnxruntime"):
                yield name, "int8"
    if installed("openvino"):
        if not calibrated:
            yield "openvino", "int8"
        if "BF16" in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            yield "openvino", "bfloat16"


def _batch(info: ModelInfo) -> Pixels:
    return np.stack(prepared(Sheet(info=info, to="onnx"), samples(info.config.channels))[:BATCH])


def told(found: Found) -> str:
    """What was chosen, and why."""
    rates = dict(found["images_per_second"])
    best = f"{found['engine']} {found['precision']}"
    own = rates.pop(best)
    others = ", ".join(f"{who.removesuffix(' float32')} {value:.0f}" for who, value in rates.items())
    why = f"{own:.0f} images a second ({others})" if others else "nothing else agrees"
    what = f"{found['engine']} in {found['precision']}"
    refused = f"; {len(found['refused'])} did not agree with the model or could not be run" if found["refused"] else ""
    off = found.get("off", {}).get(best, 0)
    little = f"; its outputs differ from float32's by {100 * off:.1f} % of their size" if off > CLOSE["float32"] else ""
    return f"{what}: {why}{refused}{little}"


def _remembered(place: Path) -> Found | None:
    try:
        found: Found = json.loads(place.read_text())
        told(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if found["engine"] in ("torch", *WRITTEN) else None


def _machine(threads: int | None) -> str:
    """What a choice holds for, beside the model: this CPU with its instruction sets, and the number of its cores."""
    kind = json.dumps([detect_cpu().cache_key, threads or usable_cores()])
    return hashlib.blake2b(kind.encode(), digest_size=4).hexdigest()
