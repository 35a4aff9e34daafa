"""WordNet's numbers of ImageNet's classes (n01440764 is the tench): of the data, and of a model's outputs.

ImageNet-1k's order is that of its 1,000 numbers, sorted. timm's package has the lists of it and of
the larger ImageNets; they are read, and timm is not imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.sources import shards
from vitrail.data.sources.source_spec import parse_source
from vitrail.errors import DataError, VitrailError
from vitrail.weights.labels import ASSUMED, imagenet_1k

# K outputs of a model

SYNSET = re.compile(r"(n\d{8})(?!\d)")
BESIDE = "synsets.json"
IMAGENET = 1000
LISTS = {
    IMAGENET: "imagenet_synsets.txt",
    11821: "imagenet12k_synsets.txt",
    21841: "imagenet22k_synsets.txt",
    21843: "imagenet21k_goog_synsets.txt",
}
"""Outputs that an ImageNet of that size has -> timm's list of them."""
AGREE = 0.5
"""Of 1,000 names in their places, so many can only be ImageNet's."""

Synsets = tuple[str, ...]


def in_names(labels: Sequence[str]) -> Synsets | None:
    """Those that class names begin with, as folders' do; None unless all have one of their own."""
    found = [SYNSET.match(label) for label in labels]
    numbers = tuple(match[1] for match in found if match)
    return numbers if len(labels) and len(set(numbers)) == len(labels) else None


def beside(data: str, labels: Sequence[str]) -> Synsets | None:
    """What `synsets.json` in the data's folder says, one for each class, in their order; None without it."""
    try:
        spec = parse_source(data)
        place = shards.find_shards(spec.location)[0] if spec.kind in ("shards", "stream") else spec.location
    except VitrailError:
        return None
    folder = Path(place) if os.path.isdir(place) else Path(place).parent
    file = folder / BESIDE
    if spec.kind in ("builtin", "hf") or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is no JSON: {error}.") from None
    numbers = in_names(found) if isinstance(found, list) and all(isinstance(n, str) for n in found) else None
    if numbers is None or len(numbers) != len(labels):
        raise DataError(
            f"{file} does not go with the data's {len(labels):,} classes; wanted a list of as many WordNet numbers, "
            'all different, in their order: ["n01440764", ...].'
        )
    return numbers


def of_outputs(labels: Sequence[str] | None, count: int, data: Synsets | None = None) -> tuple[Synsets | None, str]:
    """The number of each of a model's outputs, and what had to be assumed; None where it is no ImageNet model.

    `data`: those of the data, which are ImageNet's own list where they are all of its classes.
    """
    if labels is not None and (named := in_names(labels)):
        return named, ""
    known = listed(count)
    if known is None and count == IMAGENET and data is not None and len(data) == IMAGENET:
        known = tuple(sorted(data))
    if known is None:
        return None, ""
    if labels is None:
        usual = f"those of the ImageNet of {count:,} classes, in the usual order"
        note = f"the checkpoint does not name its outputs: they are taken for {usual}"
        return known, ASSUMED if count == IMAGENET else note
    return (known, "") if names_agree(labels) else (None, "")


def names_agree(labels: Sequence[str] | None) -> bool | None:
    """Whether names of outputs are ImageNet-1k's, in its order; None where nothing is named, or nobody knows."""
    if labels is None or all(label.isdecimal() for label in labels):
        return None
    if len(labels) != IMAGENET:
        return False
    names = imagenet_1k()
    if names is None:
        return None
    alike = sum(_first(mine) == _first(usual) for mine, usual in zip(labels, names, strict=True))
    return alike >= AGREE * IMAGENET


def listed(count: int = IMAGENET) -> Synsets | None:
    """The numbers of the ImageNet of so many classes, in order, from timm's files; None without them."""
    text = _timm(LISTS[count]) if count in LISTS else None
    numbers = tuple(text.split()) if text else ()
    return numbers if len(numbers) == count else None


def published_real() -> str | None:
    """The text of ImageNet-ReaL's labels, which timm ships too; None without it."""
    return _timm("imagenet_real_labels.json")


def plain_name(name: str) -> str:
    """Without capitals, underscores and hyphens."""
    return re.sub(r"[\s_\-]+", " ", name).strip().lower()


def _first(names: str) -> str:
    """The first of several names of one class, without its explanation."""
    return plain_name(names.split(",")[0].split("(")[0])


def _timm(name: str) -> str | None:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        return None
    try:
        return (Path(spec.origin).parent / "data" / "_info" / name).read_text(encoding="utf-8")
    except OSError:  # a version that keeps them elsewhere
        return None
