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
from vitrail.weights.class_names import ASSUMED_IMAGENET, imagenet_1k

# K outputs of a model

SYNSET = re.compile(r"(n\d{8})(?!\d)")
SYNSETS_FILE = "synsets.json"
IMAGENET_CLASSES = 1000
TIMM_LISTS = {
    IMAGENET_CLASSES: "imagenet_synsets.txt",
    11821: "imagenet12k_synsets.txt",
    21841: "imagenet22k_synsets.txt",
    21843: "imagenet21k_goog_synsets.txt",
}
"""Outputs that an ImageNet of that size has -> timm's list of them."""
MIN_AGREEMENT = 0.5
"""Of 1,000 names in their places, so many can only be ImageNet's."""

Synsets = tuple[str, ...]


def synsets_in_labels(labels: Sequence[str]) -> Synsets | None:
    """Those that class names begin with, as folders' do; None unless all have one of their own."""
    found = [SYNSET.match(label) for label in labels]
    numbers = tuple(match[1] for match in found if match)
    return numbers if len(labels) and len(set(numbers)) == len(labels) else None


def read_synsets_file(data: str, labels: Sequence[str]) -> Synsets | None:
    """What `synsets.json` in the data's folder says, one for each class, in their order; None without it."""
    try:
        spec = parse_source(data)
        place = shards.find_shards(spec.location)[0] if spec.kind in ("shards", "stream") else spec.location
    except VitrailError:
        return None
    folder = Path(place) if os.path.isdir(place) else Path(place).parent
    file = folder / SYNSETS_FILE
    if spec.kind in ("builtin", "hf") or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is no JSON: {error}.") from None
    numbers = synsets_in_labels(found) if isinstance(found, list) and all(isinstance(n, str) for n in found) else None
    if numbers is None or len(numbers) != len(labels):
        raise DataError(
            f"{file} does not go with the data's {len(labels):,} classes; wanted a list of as many WordNet numbers, "
            'all different, in their order: ["n01440764", ...].'
        )
    return numbers


def synsets_of_outputs(
    labels: Sequence[str] | None, count: int, data: Synsets | None = None
) -> tuple[Synsets | None, str]:
    """The number of each of a model's outputs, and what had to be assumed; None where it is no ImageNet model.

    `data`: those of the data, which are ImageNet's own list where they are all of its classes.
    """
    if labels is not None and (named := synsets_in_labels(labels)):
        return named, ""
    known = timm_synsets(count)
    if known is None and count == IMAGENET_CLASSES and data is not None and len(data) == IMAGENET_CLASSES:
        known = tuple(sorted(data))
    if known is None:
        return None, ""
    if labels is None:
        usual = f"those of the ImageNet of {count:,} classes, in the usual order"
        note = f"the checkpoint does not name its outputs: they are taken for {usual}"
        return known, ASSUMED_IMAGENET if count == IMAGENET_CLASSES else note
    return (known, "") if labels_are_imagenet_1k(labels) else (None, "")


def labels_are_imagenet_1k(labels: Sequence[str] | None) -> bool | None:
    """Whether names of outputs are ImageNet-1k's, in its order; None where nothing is named, or nobody knows."""
    if labels is None or all(label.isdecimal() for label in labels):
        return None
    if len(labels) != IMAGENET_CLASSES:
        return False
    names = imagenet_1k()
    if names is None:
        return None
    alike = sum(_first_name(mine) == _first_name(usual) for mine, usual in zip(labels, names, strict=True))
    return alike >= MIN_AGREEMENT * IMAGENET_CLASSES


def timm_synsets(count: int = IMAGENET_CLASSES) -> Synsets | None:
    """The numbers of the ImageNet of so many classes, in order, from timm's files; None without them."""
    text = _read_timm_file(TIMM_LISTS[count]) if count in TIMM_LISTS else None
    numbers = tuple(text.split()) if text else ()
    return numbers if len(numbers) == count else None


def timm_real_labels() -> str | None:
    """The text of ImageNet-ReaL's labels, which timm ships too; None without it."""
    return _read_timm_file("imagenet_real_labels.json")


def normalize_name(name: str) -> str:
    """Without capitals, underscores and hyphens."""
    return re.sub(r"[\s_\-]+", " ", name).strip().lower()


def _first_name(names: str) -> str:
    """The first of several names of one class, without its explanation."""
    return normalize_name(names.split(",")[0].split("(")[0])


def _read_timm_file(name: str) -> str | None:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        return None
    try:
        return (Path(spec.origin).parent / "data" / "_info" / name).read_text(encoding="utf-8")
    except OSError:  # a version that keeps them elsewhere
        return None
