"""ModelInfo: what a checkpoint holds besides its tensors (config, preprocessing, class names)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import PurePath, PureWindowsPath
from typing import Any, Literal

from vitrail.config import CONFIG_TYPES, NetConfig, PreprocessConfig
from vitrail.config.format_version import VERSION, upgrade
from vitrail.errors import ConfigError, FormatError
from vitrail.models.families import FAMILIES

FINE_TUNED_PREFIX, TRAINED_PREFIX = "fine-tuned from ", "trained on "
"""Prefixes of `ModelInfo.origin` for models that vitrail trained."""
LOCAL_PATH = re.compile(
    rf"(?P<start>(?:{FINE_TUNED_PREFIX}|{TRAINED_PREFIX})*(?:[a-z]+:)??)(?P<path>([/\\~]|[A-Za-z]:[/\\]|\.{{1,2}}([/\\]|$)).*)",
    re.DOTALL,
)
"""A path from the root, the home folder or above the working directory, with an optional prefix such as `folder:`."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Everything about a checkpoint except its tensors."""

    config: NetConfig
    preprocess: PreprocessConfig
    labels: tuple[str, ...] | None = None
    """Class names in the order of the head's outputs; None if the checkpoint has none."""
    family: str = "ViT"
    """A key of `models.families.FAMILIES`."""
    task: Literal["classify", "embed"] = "classify"
    """Whether the outputs are class logits or an embedding."""
    multi_label: bool = False
    """Multi-label: an image may have several classes, and each output goes through its own sigmoid."""
    name: str = ""
    """The model's own name, such as that of the run that trained it; may be empty."""
    origin: str = ""
    """What the model was read, trained or fine-tuned from, as text for display."""
    notes: tuple[str, ...] = field(default=())
    """Assumptions made while reading the checkpoint. They are logged, not stored."""

    def __post_init__(self) -> None:
        if self.labels is not None and self.config.num_classes != len(self.labels):
            raise ConfigError(f"{len(self.labels)} class names were given for {self.config.num_classes} outputs.")

    @property
    def title(self) -> str:
        """Display name: `name`, else one derived from `origin`, else the family."""
        if self.name:
            return self.name
        origin = strip_local_folders(self.origin)
        if origin.startswith(FINE_TUNED_PREFIX):
            return f"fine-tuned {_file_stem(origin.removeprefix(FINE_TUNED_PREFIX))}"
        return f"{self.family} {origin}" if origin.startswith(TRAINED_PREFIX) else _file_stem(origin) or self.family

    @property
    def trained_by_vitrail(self) -> bool:
        """Whether vitrail trained the model. If it then has no class names, they cannot be assumed to be ImageNet's."""
        return self.origin.startswith((FINE_TUNED_PREFIX, TRAINED_PREFIX))

    def replace(self, **changes: Any) -> ModelInfo:
        return replace(self, **changes)

    def with_notes(self, *notes: str) -> ModelInfo:
        return replace(self, notes=(*self.notes, *notes))

    def to_dict(self) -> dict[str, Any]:
        """The stored form: plain JSON values."""
        return {
            "format": "vitrail",
            "version": VERSION,
            "config_type": next(name for name, kind in CONFIG_TYPES.items() if type(self.config) is kind),
            "family": self.family,
            "task": self.task,
            "multi_label": self.multi_label,
            **({"name": self.name} if self.name else {}),
            "origin": strip_local_folders(self.origin),
            "model": self.config.to_dict(),
            "preprocess": self.preprocess.to_dict(),
            "labels": None if self.labels is None else list(self.labels),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelInfo:
        if values.get("format") != "vitrail" or "version" not in values:
            raise FormatError(
                f"expected format='vitrail' and a version, got format={values.get('format')!r}, "
                f"version={values.get('version')!r}."
            )
        values = upgrade("model", values)
        for name, allowed in (
            ("config_type", tuple(CONFIG_TYPES)),
            ("task", ("classify", "embed")),
            ("family", tuple(FAMILIES)),
        ):
            if values[name] not in allowed:
                raise FormatError(f"the model info's {name}={values[name]!r} is not one of {', '.join(allowed)}.")
        labels = values.get("labels")
        return cls(
            config=CONFIG_TYPES[values["config_type"]].from_dict(values["model"]),
            preprocess=PreprocessConfig.from_dict(values["preprocess"]),
            labels=None if labels is None else tuple(labels),
            family=values["family"],
            task=values["task"],
            multi_label=bool(values.get("multi_label", False)),
            name=values.get("name", ""),
            origin=values["origin"],
        )


def strip_local_folders(text: str) -> str:
    """Shorten an absolute path in a path, data spec (folder:/home/me/photos) or origin to its last component.

    Used for text that is shared with others. Names, hub ids and relative paths are returned unchanged.
    """
    match = LOCAL_PATH.fullmatch(text)
    return match["start"] + (PureWindowsPath(match["path"]).name or match["path"]) if match else text


def _file_stem(origin: str) -> str:
    """A weights file's name without its suffix; a hub id or name unchanged."""
    path = PurePath(origin)
    return path.stem if path.suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin") else origin
