"""Format: how one library's checkpoints are detected, read and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.config import BiTConfig, NetConfig, SwinConfig, ViTConfig
from vitrail.errors import ConversionError
from vitrail.storage.atomic_write import new_folder, write_json
from vitrail.weights.archive import Archive
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig, RenameTable
from vitrail.weights.writers import write_safetensors

Writer = Callable[[Path, Mapping[str, Tensor], ModelInfo, bool], list[str] | None]
"""(path, tensors under the format's names, model info, overwrite) -> notes for the user, if any."""


def header_metadata(sidecars: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a single safetensors file: the JSON files that a folder would hold, by file name."""
    return {"format": "pt", **{name: json.dumps(value) for name, value in sidecars.items()}}


def write_folder(path: Path, tensors: Mapping[str, Tensor], sidecars: Mapping[str, Any], overwrite: bool) -> None:
    """A folder of safetensors and JSON files, or one .safetensors file with the JSON files in its header."""
    if path.suffix == ".safetensors":
        write_safetensors(path, tensors, header_metadata(sidecars), overwrite=overwrite)
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors, header_metadata({}))
        for name, values in sidecars.items():
            write_json(folder / name, values)


def no_parts(_: ModelInfo) -> list[str]:
    return []


KINDS: dict[type[NetConfig], str] = {
    ViTConfig: "a Vision Transformer",
    BiTConfig: "a BiT ResNet",
    SwinConfig: "a Swin Transformer",
}
"""Names of the kinds of networks in errors."""


@dataclass(frozen=True)
class Format:
    """A checkpoint format."""

    name: str
    """As given to `--to` and shown in messages."""
    detect: Callable[[Archive], str | None]
    """The prefix of the network's tensor names ("" for none), from names and shapes alone; None for another format."""
    infer_info: Callable[[Archive], ModelInfo]
    """The model info, from tensor shapes and sidecar files. The prefix has been removed from the names."""
    table: Callable[[AnyConfig], RenameTable]
    """The rename table for a network of this config."""
    write: Writer | None = None
    """Writes the files; None for a read-only format."""
    unsupported_parts: Callable[[ModelInfo], list[str]] = no_parts
    """Names the parts of a model that the format cannot represent."""
    inexact_conventions: Callable[[ModelInfo], list[str]] = no_parts
    """Names the conventions that the format cannot state: the tensors fit, but the other library's outputs differ
    slightly."""

    normalize_name: Callable[[str], str] = str
    """Applied to the tensor names after the prefix is removed and before anything else reads them."""

    _: KW_ONLY
    ignored_outside: tuple[str, ...] = ()
    """Patterns of tensor names outside the prefix that may be ignored: heads of other tasks, text towers."""
    config_types: tuple[type[NetConfig], ...] = (ViTConfig, BiTConfig)
    """The kinds of networks that the format has names for."""
    accepts: Callable[[AnyConfig], bool] = lambda _: True
    """Whether the format is for networks with such a config, whatever else it lacks."""

    def is_for(self, config: AnyConfig) -> bool:
        """Whether this is the format for the kind of network; else its `unsupported_parts` do not apply."""
        return type(config) in self.config_types and self.accepts(config)

    def missing_parts(self, info: ModelInfo) -> list[str]:
        """`unsupported_parts`, or the kind of network if the format has no names for it."""
        kind = type(info.config)
        return self.unsupported_parts(info) if kind in self.config_types else [KINDS[kind]]

    def check_writable(self, info: ModelInfo, approximate: bool = False) -> None:
        """Raise ConversionError if the format cannot represent the model; `approximate` permits inexact conventions."""
        if self.write is None:
            raise ConversionError(f"{self.name} files can be read but not written.")
        if parts := self.missing_parts(info):
            raise ConversionError(f"{self.name}'s format cannot represent {_join_and(parts)}.")
        if (inexact := self.inexact_conventions(info)) and not approximate:
            raise ConversionError(
                f"{self.name}'s format cannot state {_join_and(inexact)}; its library would compute slightly "
                "different outputs. Pass --approximate (approximate=True) to write it anyway."
            )


def _join_and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
