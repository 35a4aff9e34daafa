"""What a checkpoint format is: how it is recognized, read, and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.errors import ConversionError
from vitrail.weights.archive import Archive
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig, RenameTable

Writer = Callable[[Path, Mapping[str, Tensor], ModelInfo, bool], list[str] | None]
"""Path, their tensors, info, overwrite -> what to say aloud, if anything."""


def header_metadata(sidecars: Mapping[str, Any]) -> dict[str, str]:
    """The header of a safetensors file that stands alone: the JSON files that would lie beside it, by name."""
    return {"format": "pt", **{name: json.dumps(value) for name, value in sidecars.items()}}


def no_parts(_: ModelInfo) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way of storing a Vision Transformer."""

    name: str
    """What `--to` takes and messages say."""
    detect: Callable[[Archive], str | None]
    """The prefix its names stand under ("" for none), from the names and shapes alone; None: not this."""
    infer_info: Callable[[Archive], ModelInfo]
    """Config, preprocessing and labels, from shapes and sidecars; names come without the prefix."""
    table: Callable[[AnyConfig], RenameTable]
    """The rename table for a network of this config."""
    write: Writer | None = None
    """Path, their tensors, info, overwrite -> files. None: read only."""
    unsupported_parts: Callable[[ModelInfo], list[str]] = no_parts
    """Parts of a model the format has no place for, by name."""
    inexact_conventions: Callable[[ModelInfo], list[str]] = no_parts
    """Conventions the format cannot state: the tensors fit, the other library's numbers differ a little."""

    ignored_outside: tuple[str, ...] = ()
    """Patterns of tensors that may stand beside the prefix: heads of other tasks, text towers."""

    normalize_name: Callable[[str], str] = str
    """Applied to their names, after the prefix is gone, before anything else reads them."""

    def check_writable(self, info: ModelInfo, approximate: bool = False) -> None:
        """Raise ConversionError where this model does not fit; small drifts pass if told so."""
        if self.write is None:
            raise ConversionError(f"{self.name} files can be read, not written.")
        if parts := self.unsupported_parts(info):
            raise ConversionError(f"{self.name}'s format has no place for {_and(parts)}.")
        if (drifts := self.inexact_conventions(info)) and not approximate:
            raise ConversionError(
                f"{self.name}'s format cannot state {_and(drifts)}; its library would compute slightly "
                "different numbers. Pass --approximate (approximate=True) to write it all the same."
            )


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
