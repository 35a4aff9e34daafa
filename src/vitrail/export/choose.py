"""The fastest engine that agrees with the model, found once and remembered.

Files and choices lie in $VITRAIL_ENGINES, else beside vitrail's other caches, under a digest of the
weights, the preprocessing, the versions and the machine: what was found there holds here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.data.sources import places
from vitrail.errors import VitrailError
from vitrail.export.compare import BATCH, ROUNDS, rate
from vitrail.export.engines import Engine, TorchEngine, open_file, openvino_core, torch_engine
from vitrail.export.export import export, prepared
from vitrail.export.extras import installed
from vitrail.export.pictures import Pixels, samples
from vitrail.export.sheet import SUFFIXES, Answer, Precision, Sheet, To
from vitrail.models import Net
from vitrail.runtime import say
from vitrail.weights.card import Card
from vitrail.weights.write import write_json

SECONDS = 0.15
"""Each candidate's turn in a round."""
WRITTEN: dict[str, To] = {"onnxruntime": "onnx", "openvino": "openvino"}
"""What an engine reads."""


def fastest(
    net: Net, card: Card, device: torch.device, threads: int | None = None, calibrate: Sequence[Any] = ()
) -> Engine:
    """Of torch, ONNX Runtime and OpenVINO in float32 and OpenVINO in bfloat16: the fastest that agrees.

    int8 joins them only where there are pictures to calibrate it on: like those it will see. Beside
    a GPU it is torch.
    """
    own = torch_engine(net, card, device, threads)
    if device.type != "cpu":
        say([f"engine auto takes torch: it is the one that runs on {device.type}"])
        return own
    known = [name for name in WRITTEN if installed(name) and installed("onnx") and installed("onnxscript")]
    if not known:
        say(["engine auto takes torch: no other is installed (pip install 'vitrail[export]')"])
        return own
    folder = _folder(net, card, threads)
    calibration = prepared(_any_sheet(card), calibrate)
    if calibration:  # other pictures, other scales
        folder = folder / hashlib.blake2b(b"".join(p.tobytes() for p in calibration), digest_size=8).hexdigest()
        folder.mkdir(exist_ok=True)
    found = _remembered(folder)
    if found is None:
        found = _raced(net, card, own, folder, threads, calibration)
        with suppress(VitrailError, OSError):
            write_json(folder / "choice.json", found, overwrite=True)
    say([f"engine auto takes {_told(found)}"])
    if found["engine"] == "torch":
        return own
    return open_file(folder / _name(found["engine"], found["precision"]), found["engine"], threads)


def engine_of(net: Net, card: Card, name: str, precision: Precision = "float32", threads: int | None = None) -> Engine:
    """This engine for this network: exported and compared once, then kept."""
    return open_file(_exported(net, card, name, precision, _folder(net, card, threads)), name, threads)


def _exported(
    net: Net, card: Card, name: str, precision: Precision, folder: Path, calibration: Sequence[Pixels] = ()
) -> Path:
    path = folder / _name(name, precision)
    if not path.exists():
        answer: Answer = "logits" if card.task == "classify" else "features"
        sheet = Sheet(card=card.but(config=net.config), to=WRITTEN[name], precision=precision, answer=answer)
        pictures = prepared(sheet, samples(card.config.channels))
        export(net, sheet, path, pictures, calibration=calibration, timed=False, overwrite=True)
    return path


def _raced(
    net: Net, card: Card, own: TorchEngine, folder: Path, threads: int | None, calibration: Sequence[Pixels]
) -> dict[str, Any]:
    """Every candidate that agrees, timed in turns."""
    racing: dict[tuple[str, str], Engine] = {("torch", "float32"): own}
    refused: dict[str, str] = {}
    for name, precision in _candidates(bool(calibration)):
        try:
            path = _exported(net, card, name, precision, folder, calibration)
            racing[name, precision] = open_file(path, name, threads)
        except VitrailError as error:
            refused[f"{name} {precision}"] = str(error)
    batch = np.stack(prepared(_any_sheet(card), samples(card.config.channels))[:BATCH])
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
        "pictures_per_second": {" ".join(who): found for who, found in middle.items()},
        "refused": refused,
    }


def _candidates(calibrated: bool) -> Iterator[tuple[str, Precision]]:
    for name in WRITTEN:
        if installed(name):
            yield name, "float32"
            if calibrated and installed("onnxruntime"):
                yield name, "int8"
    if installed("openvino") and "BF16" in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        yield "openvino", "bfloat16"


def _any_sheet(card: Card) -> Sheet:
    return Sheet(card=card, to="onnx")


def _told(found: dict[str, Any]) -> str:
    rates = dict(found["pictures_per_second"])
    best = f"{found['engine']} {found['precision']}"
    own = rates.pop(best)
    others = ", ".join(f"{who.removesuffix(' float32')} {value:.0f}" for who, value in rates.items())
    why = f"{own:.0f} pictures a second (torch {others.removeprefix('torch ')})" if others else "nothing else agrees"
    what = f"{found['engine']} in {found['precision']}"
    refused = f"; {len(found['refused'])} did not agree with the model" if found["refused"] else ""
    return f"{what}: {why}{refused}"


def _remembered(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "choice.json").read_text())
        there = found["engine"] == "torch" or (folder / _name(found["engine"], found["precision"])).exists()
        return found if there and found["pictures_per_second"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _name(engine: str, precision: str) -> str:
    return f"{precision}{SUFFIXES[WRITTEN[engine]]}"


def _folder(net: Net, card: Card, threads: int | None) -> Path:
    given, data = os.environ.get("VITRAIL_ENGINES"), places.cache()
    usual = data / "engines" if os.environ.get("VITRAIL_DATA") else data.with_name("engines")
    folder = (Path(given).expanduser() if given else usual) / digest(net, card, threads)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(net: Net, card: Card, threads: int | None) -> str:
    """Sixteen letters that differ where anything does that a file or a choice depends on."""
    found = hashlib.blake2b(digest_size=8)
    machine = [platform.machine(), _processor(), str(os.cpu_count()), str(threads)]
    versions = [_version(name) for name in ("vitrail", "torch", "onnx", "onnxscript", "onnxruntime", "openvino")]
    told = card.but(config=net.config).to_dict() | {"origin": ""}
    found.update(json.dumps([told, machine, versions], sort_keys=True).encode())
    for name, tensor in sorted(net.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("model name")), "")
    return platform.processor()
