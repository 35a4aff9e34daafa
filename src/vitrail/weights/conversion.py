"""Convert a model to another library's format, verify it, and report what the format does not store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.config import SwinConfig, ViTConfig
from vitrail.errors import CheckpointError, FormatError
from vitrail.models import Net
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of a conversion: the checkpoint was written and reads back with identical tensors."""

    to: str
    """The format."""
    num_tensors: int
    """Number of tensors that were compared."""
    inexact_conventions: tuple[str, ...]
    """Conventions that the format cannot state: its library computes slightly different outputs."""
    lost: tuple[str, ...]
    """Information that the file does not store, so that a reader makes other assumptions."""
    writer_notes: tuple[str, ...] = ()
    """Further notes of the writer, such as dtypes that were converted."""

    @property
    def notes(self) -> list[str]:
        """All of this as sentences for the user."""
        return [
            *self.writer_notes,
            *(
                f"{self.to}'s format cannot state {what}; its library computes slightly different outputs."
                for what in self.inexact_conventions
            ),
            *(f"{self.to}'s format does not store {what}; readers of the file will not have it." for what in self.lost),
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

    ConversionError is raised before anything is written if the format cannot represent the model, or if its library
    would compute slightly different outputs and `approximate` is false.
    """
    written = checkpoint.write(net, info, path, to=to, overwrite=overwrite, approximate=approximate)
    again, back, unsaid = _read_back(Path(path).expanduser(), info)
    return Conversion(
        to=to,
        num_tensors=_count_equal_tensors(net, again, path),
        inexact_conventions=tuple(checkpoint.format_for(to, info).inexact_conventions(info)),
        lost=(*unsaid, *lost_information(info, back)),
        writer_notes=tuple(written),
    )


def lost_information(info: ModelInfo, back: ModelInfo) -> list[str]:
    """What the original model info states and the one read back does not."""
    lost = []
    if info.labels is not None and back.labels != info.labels:
        lost.append("class names")
    if info.config.num_classes and back.task != info.task:
        outputs = {"classify": "classes", "embed": "features"}
        lost.append(f"that its outputs are {outputs[info.task]} (read back, they are {outputs[back.task]})")
    if info.multi_label != back.multi_label:
        lost.append("whether an image may have several classes (multi-label), or exactly one")
    ours, theirs = info.preprocess.to_dict(), back.preprocess.to_dict()
    if ours["resize"] == "squash" and not ours["resize_to"]:
        ours.pop("crop_rounding")  # there is no crop
    differ = [f"{name}={value}" for name, value in ours.items() if theirs[name] != value]
    if differ:
        lost.append(f"preprocessing ({', '.join(differ)})")
    if isinstance(info.config, SwinConfig) and isinstance(back.config, SwinConfig):
        lost += _lost_swin_conventions(info.config, back.config)
    before, after = (getattr(c.config, "resample", "") for c in (info, back))
    if before != after and getattr(info.config, "position", "").startswith("learned"):
        lost.append(f"how positions are resampled for other sizes (it was {before}, there {after})")
    return lost


def _lost_swin_conventions(before: SwinConfig, after: SwinConfig) -> list[str]:
    titles = {
        "window_rule": "how windows are placed on other image sizes",
        "uncovered": "how images are treated whose size is not a multiple of the patch size",
        "image_size": "the image size",
        "mask_value": "the mask's value",
    }
    return [
        f"{title} (it was {getattr(before, name)}, there {getattr(after, name)})"
        for name, title in titles.items()
        if getattr(before, name) != getattr(after, name)
    ]


def _read_back(path: Path, info: ModelInfo) -> tuple[Net, ModelInfo, list[str]]:
    """The network and model info from the file alone; if that fails, with its family given, which counts as lost."""
    # A bare file may not state the number of heads.
    overrides = {"num_heads": info.config.num_heads} if isinstance(info.config, ViTConfig) else {}
    try:
        net, back = checkpoint.read(path, dtype=None, check_finite=False, overrides=overrides)
    except FormatError:
        net, back = checkpoint.read(path, dtype=None, check_finite=False, overrides=overrides, family=info.family)
        return net, back, [f"its family, without which it cannot be read (family={info.family})"]
    return net, back, []


def _count_equal_tensors(net: Net, again: Net, path: str | Path) -> int:
    """The number of tensors; CheckpointError if any differ."""
    ours, back = net.state_dict(), again.state_dict()
    differ = sorted(ours.keys() ^ back.keys())
    differ += [name for name in ours if name in back and not _is_equal(ours[name], back[name])]
    if differ:
        raise CheckpointError(f"{path} reads back differently: {', '.join(differ[:8])}; please report this.")
    return len(ours)


def _is_equal(ours: Tensor, back: Tensor) -> bool:
    ours = ours.cpu()
    back = back.to(ours.dtype)  # NumPy has no bfloat16: float32 holds the same values
    if ours.shape != back.shape:
        return False
    return torch.allclose(ours, back, rtol=0, atol=0, equal_nan=True)
