"""Options that commands share, and the parsers of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from vitrail.config import parse_value
from vitrail.errors import ConfigError

Family = Annotated[
    str | None,
    typer.Option("--family", metavar="NAME", help="Model family of a file without metadata: DeiT, DINO, MAE, ..."),
]
Section = Annotated[
    str | None,
    typer.Option("--section", metavar="NAME", help="Part of a training checkpoint to read, such as teacher."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting that is missing in the file, such as num_heads=4; repeatable."
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="SPEC", help="A built-in dataset, a folder, a table or shards; see vitrail datasets."
    ),
]
Root = Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder of the built-in datasets.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable images instead of failing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Formats = Annotated[
    str, typer.Option("--format", metavar="NAMES", help="Comma-separated: png,jpg,svg,pdf, and npz for the data.")
]

HEIGHT_BY_WIDTH = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """`"384"` -> 384; `"384x288"` -> (384, 288), height first."""
    if text is None:
        return None
    if match := HEIGHT_BY_WIDTH.fullmatch(text.lower()):
        return int(match[1]), int(match[2])
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--image-size expects 384 or 384x288 (height x width), got {text!r}.")
    return int(text)


def parse_settings(arguments: Sequence[str] | None) -> dict[str, Any]:
    """["num_heads=4", "image_size=224x448"] -> {"num_heads": 4, "image_size": (224, 448)}."""
    settings: dict[str, Any] = {}
    for text in arguments or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set expects KEY=VALUE, such as num_heads=4, got {text!r}.")
        settings[name.strip()] = parse_value(value.strip())
    return settings


def parse_list(text: str | None) -> tuple[str, ...] | None:
    """`"rollout, gradient"` -> ("rollout", "gradient"); None stays None."""
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ConfigError(f"got {text!r}, expected comma-separated names.")
    return words
