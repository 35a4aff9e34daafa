"""Options that commands share, and the parsers of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.config import parse_value
from vitrail.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OutFolder = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder.")]
Formats = Annotated[
    str, typer.Option("--format", metavar="NAMES", help="Comma-separated: png,jpg,svg,pdf, and npz for the data.")
]

Data = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="SPEC", help="A built-in dataset (see `vitrail datasets`), a folder, a table or shards."
    ),
]
Root = Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder of the built-in datasets.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable images instead of failing.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.")]
ImageSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Image size in pixels: 384, or 288x192 (height x width).")
]

SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
HEIGHT_BY_WIDTH = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def names_option(flag: str, names: str) -> Any:
    """An option for some of these comma-separated names; its default is all."""
    return typer.Option(flag, metavar="NAMES", help=f"Comma-separated: {names}. Default: all.")


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


def parse_ints(text: str, option: str) -> tuple[int, ...]:
    """ "9,10,11,12" -> (9, 10, 11, 12); "last" -> ()."""
    if text == "last":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} expects whole numbers such as 5 or 1,5,10, got {text!r}.") from None


def parse_time(text: str, option: str) -> float:
    """`"25min"` -> 1500 seconds; also s, h and d, and sums such as `"1h30min"`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)(?![a-z])", text)
    if not parts or re.sub(r"[\d.\s]|min|s|h|d", "", text) or "".join(n + u for n, u in parts) != text.replace(" ", ""):
        raise ConfigError(f"{option} expects a duration such as 25min or 1.5h, got {text!r}.")
    return sum(float(number) * SECONDS[unit] for number, unit in parts)
