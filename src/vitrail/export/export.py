"""From a network to a file that is known to agree with it; a file that does not is never seen."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.export import formats
from vitrail.export.compare import Comparison, check, compare
from vitrail.export.engines import FileEngine, Pixels, TorchEngine, open_file
from vitrail.export.packaged import traced
from vitrail.export.sheet import SUFFIXES, Sheet
from vitrail.models import Net
from vitrail.weights.write import explained, sync, write_json

CALIBRATED = 4
"""Pictures at a time while calibrating: every product's activations are kept meanwhile."""


@dataclass(frozen=True)
class Exported:
    """A file that agrees with the model."""

    path: Path
    sheet: Sheet
    comparison: Comparison
    size: int
    """Bytes, with the file beside it where there are two."""
    weights: int
    """Bytes of the model's own weights, in float32."""
    notes: tuple[str, ...] = ()

    @property
    def report(self) -> Path:
        return self.path.with_suffix(".json")

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.path.name,
            "bytes": self.size,
            "model_bytes": self.weights,
            "comparison": self.comparison.to_dict(),
            "notes": list(self.notes),
            **self.sheet.to_dict(),
        }


def destination(path: str | Path, to: str) -> Path:
    """A file as the format calls it; a name without an ending, or a folder, gets one."""
    path = Path(path).expanduser()
    suffix = SUFFIXES[to]
    if path.suffix == suffix:
        return path
    if path.is_dir() or not path.suffix:
        return path / f"model{suffix}" if path.is_dir() else path.with_name(path.name + suffix)
    raise CheckpointError(f"{path}: a file for {to} ends in {suffix}; try {path.with_suffix(suffix)}.")


def free(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError where files of this name are there already, or the folder is not."""
    if not path.parent.is_dir():
        raise CheckpointError(f"could not write {path}: there is no folder {path.parent}; make it first.")
    there = [part for part in reversed(_finished(path)) if part.exists()]
    if there and not overwrite:
        raise CheckpointError(f"{there[0]} exists already; choose another name, or pass overwrite=True (--overwrite).")


def export(
    net: Net,
    sheet: Sheet,
    path: Path,
    pictures: Sequence[Pixels],
    *,
    targets: npt.NDArray[np.int64] | None = None,
    calibration: Sequence[Pixels] = (),
    overwrite: bool = False,
    timed: bool = True,
    step: Callable[[str], None] = lambda what: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Exported:
    """Write, run, compare with the model on `pictures` (each H W C), and only then move into place."""
    free(path, overwrite)
    with explained(path):
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        there = folder / path.name
        step("tracing")
        program = traced(net, sheet)
        step("calibrating and writing" if calibration else "writing")
        with explained(path):
            notes = formats.write(program, sheet, there, calibrating(sheet, calibration))
        del program
        step("comparing")
        engine = open_file(there)
        found = compare(engine, model_of(net, sheet), pictures, targets, timed=timed, advance=advance)
        check(found, path.name)
        size = sum(part.stat().st_size for part in formats.parts_of(there))
        made = Exported(path, sheet, found, size, _weights(net), tuple(notes))
        write_json(there.with_suffix(".json"), made.to_dict())
        del engine
        with explained(path):
            _move(there, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return made


def calibrating(sheet: Sheet, pictures: Sequence[Pixels]) -> list[Pixels]:
    """Pictures as the file wants them, a few at a time."""
    if sheet.precision != "int8":
        return []
    size = sheet.batch or CALIBRATED
    shaped = FileEngine("onnxruntime", sheet, lambda given: given)
    full = len(pictures) // size * size if sheet.batch else len(pictures)
    return [shaped.prepared(np.stack(pictures[i : i + size])) for i in range(0, full, size)]


def model_of(net: Net, sheet: Sheet) -> TorchEngine:
    """What an export is held against: the network itself, in float32, on the CPU."""
    if next(net.parameters()).dtype != torch.float32 or next(net.parameters()).device.type != "cpu":
        net = net.rebuilt(net.config, {}).to("cpu", torch.float32)
    return TorchEngine(net, sheet.card)


def prepared(sheet: Sheet, pictures: Sequence[Any]) -> list[Pixels]:
    """Pictures of any kind -> H W C each, as the model's preprocessing makes them."""
    pixels = Preprocess(sheet.card.preprocess).pixels
    return [pixels(picture) for picture in pictures]


def _weights(net: Net) -> int:
    return sum(4 * p.numel() for p in net.parameters())


def _finished(path: Path) -> list[Path]:
    beside = path.with_suffix(".bin") if path.suffix == ".xml" else path.with_name(f"{path.name}.data")
    return [beside, path.with_suffix(".json"), path]


def _move(there: Path, path: Path) -> None:
    """The file that is opened comes last: what it needs is there before it."""
    for new, final in zip(_finished(there), _finished(path), strict=True):
        if new.exists():
            sync(new)
            new.replace(final)
        elif final.exists():  # of an export that was replaced
            final.unlink()
    sync(path.absolute().parent)
