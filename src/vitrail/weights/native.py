"""vitrail's own format: safetensors with vitrail's tensor names and the model info in the header.

A model folder also holds the model info as config.json, for people to read; the safetensors file alone is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from vitrail.config import BiTConfig, SwinConfig, ViTConfig
from vitrail.errors import FormatError
from vitrail.models import build
from vitrail.storage.atomic_write import new_folder, write_json
from vitrail.weights.archive import Archive
from vitrail.weights.format import Format
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig, RenameTable, Rule
from vitrail.weights.writers import write_safetensors

HEADER = "vitrail"
"""The metadata key that holds the model info."""


def detect(archive: Archive) -> str | None:
    names = archive.tensors
    vit = "patch.weight" in names and "blocks.0.attention.qkv.weight" in names
    swin = "patch_norm.weight" in names and "stages.0.blocks.0.attention.qkv.weight" in names
    bit = "root.weight" in names and "stages.0.0.conv1.weight" in names
    return "" if vit or bit or swin or HEADER in archive.metadata else None


def infer_info(archive: Archive) -> ModelInfo:
    if HEADER in archive.metadata:
        return ModelInfo.from_dict(json.loads(archive.metadata[HEADER]))
    sidecar = archive.sidecars.get("config.json")
    if isinstance(sidecar, dict) and sidecar.get("format") == "vitrail":
        return ModelInfo.from_dict(sidecar)
    raise FormatError(f"{archive.source} has vitrail's tensor names but no model info; put its config.json beside it.")


def table(config: AnyConfig) -> RenameTable:
    """The identity: names are not changed."""
    return RenameTable("vitrail", [Rule(name, name) for name in build(config, meta=True).state_dict()])


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    info: ModelInfo,
    overwrite: bool,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a folder, or a single file if the path ends in .safetensors. `read`: as for `write_safetensors`."""
    header = {"format": "pt", HEADER: json.dumps(info.to_dict())}
    if path.suffix == ".safetensors":
        write_safetensors(path, tensors, header, overwrite=overwrite, read=read)
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors, header, read=read)
        write_json(folder / "config.json", info.to_dict())


NATIVE = Format("vitrail", detect, infer_info, table, write, config_types=(ViTConfig, BiTConfig, SwinConfig))
