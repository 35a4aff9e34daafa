"""WordNet IDs of ImageNet's classes (n01440764 is the tench), of a data set and of a model's outputs.

The standard order of ImageNet-1k is that of its 1,000 sorted IDs. The lists for ImageNet-1k and the larger ImageNets
are read from timm's data files, without importing timm.
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
"""Number of classes of an ImageNet -> timm's list of their WordNet IDs."""
MIN_AGREEMENT = 0.5
"""Fraction of equal names above which 1,000 labels are considered to be ImageNet-1k's."""

Synsets = tuple[str, ...]


def synsets_in_labels(labels: Sequence[str]) -> Synsets | None:
    """The WordNet IDs that class names start with, as folder names do; None unless all have one and all differ."""
    found = [SYNSET.match(label) for label in labels]
    numbers = tuple(match[1] for match in found if match)
    return numbers if len(labels) and len(set(numbers)) == len(labels) else None


def read_synsets_file(data: str, labels: Sequence[str]) -> Synsets | None:
    """The IDs in `synsets.json` next to the data, one per class, in order; None without the file."""
    try:
        spec = parse_source(data)
        path = shards.find_shards(spec.location)[0] if spec.kind in ("shards", "stream") else spec.location
    except VitrailError:
        return None
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    file = folder / SYNSETS_FILE
    if spec.kind in ("builtin", "hf") or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}.") from None
    numbers = synsets_in_labels(found) if isinstance(found, list) and all(isinstance(n, str) for n in found) else None
    if numbers is None or len(numbers) != len(labels):
        raise DataError(
            f"{file} does not match the data's {len(labels):,} classes; expected a list of as many WordNet IDs, "
            'all different, in the order of the classes: ["n01440764", ...].'
        )
    return numbers


def synsets_of_outputs(
    labels: Sequence[str] | None, num_outputs: int, data: Synsets | None = None
) -> tuple[Synsets | None, str]:
    """The WordNet ID of each output and a note about what was assumed; None if the model is not an ImageNet model.

    `data`: the IDs of the data, which replace timm's list if they are all 1,000.
    """
    if labels is not None and (named := synsets_in_labels(labels)):
        return named, ""
    known = timm_synsets(num_outputs)
    if known is None and num_outputs == IMAGENET_CLASSES and data is not None and len(data) == IMAGENET_CLASSES:
        known = tuple(sorted(data))
    if known is None:
        return None, ""
    if labels is None:
        order = f"the ImageNet with {num_outputs:,} classes, in the standard order"
        note = f"the checkpoint has no class names: its outputs are assumed to be those of {order}"
        return known, ASSUMED_IMAGENET if num_outputs == IMAGENET_CLASSES else note
    return (known, "") if labels_are_imagenet_1k(labels) else (None, "")


def labels_are_imagenet_1k(labels: Sequence[str] | None) -> bool | None:
    """Whether these are ImageNet-1k's class names in the standard order; None if that is unknown."""
    if labels is None or all(label.isdecimal() for label in labels):
        return None
    if len(labels) != IMAGENET_CLASSES:
        return False
    names = imagenet_1k()
    if names is None:
        return None
    alike = sum(_first_name(mine) == _first_name(usual) for mine, usual in zip(labels, names, strict=True))
    return alike >= MIN_AGREEMENT * IMAGENET_CLASSES


def timm_synsets(num_classes: int = IMAGENET_CLASSES) -> Synsets | None:
    """The WordNet IDs of the ImageNet with this number of classes, in order, from timm's files; None without them."""
    text = _read_timm_file(TIMM_LISTS[num_classes]) if num_classes in TIMM_LISTS else None
    numbers = tuple(text.split()) if text else ()
    return numbers if len(numbers) == num_classes else None


def timm_real_labels() -> str | None:
    """The text of timm's copy of ImageNet-ReaL's labels; None without timm."""
    return _read_timm_file("imagenet_real_labels.json")


def normalize_name(name: str) -> str:
    """Lowercase, with underscores and hyphens as spaces."""
    return re.sub(r"[\s_\-]+", " ", name).strip().lower()


def _first_name(names: str) -> str:
    """The first of several synonyms, without its explanation in parentheses."""
    return normalize_name(names.split(",")[0].split("(")[0])


def _read_timm_file(name: str) -> str | None:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        return None
    try:
        return (Path(spec.origin).parent / "data" / "_info" / name).read_text(encoding="utf-8")
    except OSError:  # other versions of timm have other files
        return None
