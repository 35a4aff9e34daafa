"""Writing a model in another library's format, and what its next reader will not know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import CheckpointError, FormatError
from vitrail.models import Net
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A checkpoint that was written and reads back with the same tensors."""

    to: str
    """The format."""
    num_tensors: int
    """How many were compared."""
    inexact_conventions: tuple[str, ...]
    """Conventions that the format cannot state: its library computes slightly different numbers."""
    lost: tuple[str, ...]
    """What the file does not say, so that its next reader assumes something else."""
    writer_notes: tuple[str, ...] = ()
    """Further notes of the writer, such as a type that was widened."""

    @property
    def notes(self) -> list[str]:
        """All of it, as sentences for people."""
        return [
            *self.writer_notes,
            *(
                f"{self.to}'s format cannot state {what}; its library computes slightly different numbers."
                for what in self.inexact_conventions
            ),
            *(f"{self.to}'s format does not carry {what}; who reads it must be told." for what in self.lost),
        ]


def convert(
    net: Net,
    info: ModelInfo,
    path: str | Path,
    *,
    to: str = "vitrail",
    overwrite: bool = False,
    approximate: bool = False,
) -> Conversion:
    """Write a checkpoint, read it back and compare every tensor.

    ConversionError is raised, before anything is written, where the format has no place for the model, or where
    its library would compute slightly different numbers and `approximate` is false.
    """
    written = checkpoint.write(net, info, path, to=to, overwrite=overwrite, approximate=approximate)
    again, back, unsaid = _read_back(Path(path).expanduser(), info)
    return Conversion(
        to=to,
        num_tensors=_compared(net, again, path),
        inexact_conventions=tuple(checkpoint.format_for(to, info).inexact_conventions(info)),
        lost=(*unsaid, *lost_information(info, back)),
        writer_notes=tuple(written),
    )


def lost_information(info: ModelInfo, back: ModelInfo) -> list[str]:
    """What a model info said before writing that the info read back does not say."""
    found = []
    if info.labels is not None and back.labels != info.labels:
        found.append("class names")
    if info.config.num_classes and back.task != info.task:
        outputs = {"classify": "classes", "embed": "features"}
        found.append(f"that its outputs are {outputs[info.task]} (read back, they are {outputs[back.task]})")
    if info.multi_label != back.multi_label:
        found.append("whether an image may have several classes (multi-label), or exactly one")
    ours, theirs = info.preprocess.to_dict(), back.preprocess.to_dict()
    if ours["resize"] == "squash" and not ours["resize_to"]:
        ours.pop("crop_rounding")  # of a crop, and there is none
    differ = [f"{name}={value}" for name, value in ours.items() if theirs[name] != value]
    if differ:
        found.append(f"preprocessing ({', '.join(differ)})")
    before, after = (getattr(c.config, "resample", "") for c in (info, back))
    if before != after and getattr(info.config, "position", "").startswith("learned"):
        found.append(f"how positions are resampled for other sizes (it was {before}, there {after})")
    return found


def _read_back(path: Path, info: ModelInfo) -> tuple[Net, ModelInfo, list[str]]:
    """The network and info as read from the file alone; where that is not enough, told its family, which is a loss."""
    told = {"num_heads": info.config.num_heads} if isinstance(info.config, ViTConfig) else {}  # a bare file may not say
    try:
        net, back = checkpoint.read(path, dtype=None, check_finite=False, overrides=told)
    except FormatError:
        net, back = checkpoint.read(path, dtype=None, check_finite=False, overrides=told, family=info.family)
        return net, back, [f"its family, without which it is not read (family={info.family})"]
    return net, back, []


def _compared(net: Net, again: Net, path: str | Path) -> int:
    """How many tensors there are, all of them the same in both."""
    ours, back = net.state_dict(), again.state_dict()
    differ = sorted(ours.keys() ^ back.keys())
    differ += [name for name in ours if name in back and not _same(ours[name], back[name])]
    if differ:
        raise CheckpointError(f"{path} reads back differently: {', '.join(differ[:8])}; please report this.")
    return len(ours)


def _same(ours: Tensor, back: Tensor) -> bool:
    ours = ours.cpu()
    back = back.to(ours.dtype)  # NumPy has no bfloat16: float32 holds the same values
    if ours.shape != back.shape:
        return False
    return torch.allclose(ours, back, rtol=0, atol=0, equal_nan=True)
