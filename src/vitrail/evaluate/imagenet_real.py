"""ImageNet-ReaL: the validation images with every label that people found right (Beyer et al. 2020).

An answer is right if it is one of an image's labels; of five, if one of them is. Images for which
nothing was found right are left out. RealLabels are numbers of ImageNet-1k's classes, and `real.json`
lists them in the order of the validation images' own numbers; a dictionary from an image's name
to its labels does for images that go by other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.errors import ConfigError, DataError, NotFoundError
from vitrail.evaluate.intervals import Estimate, proportion
from vitrail.evaluate.scores import SampleResults
from vitrail.evaluate.synsets import IMAGENET_CLASSES, Synsets, labels_are_imagenet_1k, timm_real_labels, timm_synsets

# N images, K outputs

VALIDATION_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")

RealLabels = list[list[int]] | dict[str, list[int]]
"""Class numbers by the validation image's number less one, or by its name."""


@dataclass(frozen=True)
class RealAccuracy:
    """Accuracy on the labels that people found right."""

    top1: Estimate
    top5: Estimate
    count: int
    """Images that have such a label."""
    excluded: int
    """Images that have none."""

    def to_dict(self) -> dict[str, Any]:
        found = {"top1": self.top1.to_dict(), "top5": self.top5.to_dict()}
        return {**found, "count": self.count, "excluded": self.excluded}


def read_real_labels(path: str | Path | None) -> RealLabels:
    """real.json, a dictionary of your own, or, without a path, the copy that timm ships."""
    said = "timm's copy of real.json" if path is None else str(path)
    if path is None:
        text = timm_real_labels()
        if text is None:
            raise NotFoundError(
                "ImageNet-ReaL needs its labels: --real real.json, or `pip install timm`, which ships them."
            )
    else:
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise NotFoundError(f"{path} cannot be read: {error.strerror or error}.") from None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{said} is no JSON: {error}.") from None
    rows = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(rows, list) or not rows or not all(_is_class_list(row) for row in rows):
        raise ConfigError(
            f"{said} holds no ReaL labels; wanted a list of lists of class numbers, 0 to {IMAGENET_CLASSES - 1}, or a "
            'dictionary from names to such lists: {"cat.jpg": [281, 285]}.'
        )
    return found


def _is_class_list(row: Any) -> bool:
    return isinstance(row, list) and all(
        isinstance(k, int) and not isinstance(k, bool) and 0 <= k < IMAGENET_CLASSES for k in row
    )


def outputs_by_class(outputs: int, synsets: Synsets | None, labels: Sequence[str] | None) -> tuple[list[int], str]:
    """ImageNet-1k's class number -> the model's output, -1 where it has none; and what had to be assumed.

    `synsets` are the outputs' WordNet numbers, where they are known; else their names, `labels`, decide.
    """
    if synsets is not None:
        return _outputs_by_synset(synsets)
    if outputs != IMAGENET_CLASSES:
        raise DataError(
            f"ImageNet-ReaL's labels are ImageNet-1k's classes, and which of the model's {outputs:,} outputs those "
            "are, nobody knows."
        )
    agree = labels_are_imagenet_1k(labels)
    if agree is False:
        raise DataError(
            "the names of the model's 1,000 outputs are not ImageNet-1k's in their order, and ImageNet-ReaL's labels "
            "are numbers in it; name the outputs with --labels FILE, one WordNet number on each line."
        )
    note = "for ImageNet-ReaL the model's 1,000 outputs are taken for ImageNet-1k's, in the usual order"
    return list(range(IMAGENET_CLASSES)), "" if agree else note


def _outputs_by_synset(synsets: Synsets) -> tuple[list[int], str]:
    """Where each class of ImageNet-1k, whose order is that of its sorted numbers, is among the outputs."""
    known, note = timm_synsets(), ""
    if known is None:
        if len(synsets) != IMAGENET_CLASSES:
            raise NotFoundError("which outputs are ImageNet-1k's classes, timm's files tell: `pip install timm`.")
        known, note = tuple(sorted(synsets)), "the outputs' 1,000 WordNet numbers are taken for ImageNet-1k's"
    place = {number: k for k, number in enumerate(synsets)}
    if not place.keys() & set(known):
        raise DataError(f"none of the model's {len(synsets):,} outputs is a class of ImageNet-1k, which ReaL is about.")
    return [place.get(number, -1) for number in known], note


def valid_outputs(keys: Sequence[str], labels: RealLabels, outputs: Sequence[int]) -> list[list[int] | None]:
    """Of each image the outputs that are right; None where the labels do not speak of it."""
    rows: list[list[int] | None] = [_labels_of(key, labels) for key in keys]
    if all(row is None for row in rows):
        asked = "none of them is a name in the dictionary" if isinstance(labels, dict) else "none has such a number"
        raise DataError(
            f"the ReaL labels do not go with these images: they are called {keys[0]} and the like, and {asked}; "
            "wanted ILSVRC2012_val_00000001 in a name, or a dictionary from names to class numbers."
        )
    return [None if row is None else [outputs[k] for k in row] for row in rows]


def _labels_of(key: str, labels: RealLabels) -> list[int] | None:
    if isinstance(labels, dict):
        path = PurePosixPath(key)
        return next((labels[name] for name in (key, path.name, path.stem) if name in labels), None)
    match = VALIDATION_NUMBER.search(key)
    number = int(match[1]) if match else 0
    return labels[number - 1] if 0 < number <= len(labels) else None


def real_accuracy(samples: SampleResults, valid: Sequence[list[int] | None]) -> RealAccuracy:
    """`valid` holds the right outputs of each sample."""
    assert samples.top_classes is not None
    asked = [(i, right) for i, right in enumerate(valid) if right]
    if not asked:
        raise DataError(f"none of the {len(valid):,} images has a ReaL label.")
    hits: npt.NDArray[np.bool_] = np.array([np.isin(samples.top_classes[i], right) for i, right in asked])  # N 5
    top1, top5 = proportion(int(hits[:, 0].sum()), len(asked)), proportion(int(hits.any(1).sum()), len(asked))
    assert top1 is not None
    assert top5 is not None
    return RealAccuracy(top1, top5, len(asked), len(valid) - len(asked))
