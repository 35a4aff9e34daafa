"""ImageNet-ReaL: accuracy on reassessed labels of the validation images (Beyer et al. 2020).

A top-1 prediction is correct if it is one of an image's labels; a top-5 prediction is correct if one of the five is.
Images without a label are excluded. Labels are ImageNet-1k class indices. `real.json` lists them in the order of the
validation images' numbers; a dictionary from image name to labels can be used for images with other names.
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
from vitrail.evaluation.intervals import Estimate, proportion
from vitrail.evaluation.scores import SampleResults
from vitrail.evaluation.synsets import IMAGENET_CLASSES, Synsets, labels_are_imagenet_1k, timm_real_labels, timm_synsets

# N images, K outputs

VALIDATION_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")

RealLabels = list[list[int]] | dict[str, list[int]]
"""Lists of class indices, by validation image number minus one or by image name."""


@dataclass(frozen=True)
class RealAccuracy:
    """Accuracy on ImageNet-ReaL's labels."""

    top1: Estimate
    top5: Estimate
    count: int
    """Number of images with at least one label."""
    excluded: int
    """Number of images without a label."""

    def to_dict(self) -> dict[str, Any]:
        found = {"top1": self.top1.to_dict(), "top5": self.top5.to_dict()}
        return {**found, "count": self.count, "excluded": self.excluded}


def read_real_labels(path: str | Path | None) -> RealLabels:
    """Read real.json, a dictionary in the same format, or, without a path, the copy that timm ships."""
    source = "timm's copy of real.json" if path is None else str(path)
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
        raise ConfigError(f"{source} is not valid JSON: {error}.") from None
    rows = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(rows, list) or not rows or not all(_is_class_list(row) for row in rows):
        raise ConfigError(
            f"{source} has no ReaL labels; expected lists of class indices from 0 to {IMAGENET_CLASSES - 1}, or a "
            'dictionary from image names to such lists: {"cat.jpg": [281, 285]}.'
        )
    return found


def _is_class_list(row: Any) -> bool:
    return isinstance(row, list) and all(
        isinstance(k, int) and not isinstance(k, bool) and 0 <= k < IMAGENET_CLASSES for k in row
    )


def outputs_by_class(num_outputs: int, synsets: Synsets | None, labels: Sequence[str] | None) -> tuple[list[int], str]:
    """ImageNet-1k class index -> the model's output, -1 if it has none; and a note about what was assumed.

    `synsets` are the outputs' WordNet IDs, if known; otherwise their names, `labels`, are used.
    """
    if synsets is not None:
        return _outputs_by_synset(synsets)
    if num_outputs != IMAGENET_CLASSES:
        raise DataError(
            f"ImageNet-ReaL's labels are ImageNet-1k classes, and it is unknown which of the model's {num_outputs:,} "
            "outputs those are."
        )
    agree = labels_are_imagenet_1k(labels)
    if agree is False:
        raise DataError(
            "the names of the model's 1,000 outputs are not ImageNet-1k's in the standard order, which ImageNet-ReaL's "
            "labels refer to; name the outputs with --labels FILE, one WordNet ID per line."
        )
    note = "for ImageNet-ReaL, the model's 1,000 outputs are assumed to be ImageNet-1k's in the standard order"
    return list(range(IMAGENET_CLASSES)), "" if agree else note


def _outputs_by_synset(synsets: Synsets) -> tuple[list[int], str]:
    """Output of each class of ImageNet-1k, whose order is that of its sorted WordNet IDs."""
    known, note = timm_synsets(), ""
    if known is None:
        if len(synsets) != IMAGENET_CLASSES:
            raise NotFoundError("the list of ImageNet-1k's classes is missing; `pip install timm`, which has it.")
        known, note = tuple(sorted(synsets)), "the outputs' 1,000 WordNet IDs are assumed to be ImageNet-1k's"
    output_of = {number: k for k, number in enumerate(synsets)}
    if not output_of.keys() & set(known):
        raise DataError(
            f"none of the model's {len(synsets):,} outputs is an ImageNet-1k class; ImageNet-ReaL needs at least one."
        )
    return [output_of.get(number, -1) for number in known], note


def valid_outputs(keys: Sequence[str], labels: RealLabels, outputs: Sequence[int]) -> list[list[int] | None]:
    """The correct outputs of each image; None for images without an entry in `labels`."""
    rows: list[list[int] | None] = [_labels_of(key, labels) for key in keys]
    if all(row is None for row in rows):
        reason = "none of them is a name in the dictionary" if isinstance(labels, dict) else "none has such a number"
        raise DataError(
            f"the ReaL labels do not match these images: their names are like {keys[0]}, and {reason}; expected "
            "ILSVRC2012_val_00000001 in a name, or a dictionary from names to class indices."
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
    """`valid` holds the correct outputs of each sample."""
    assert samples.top_classes is not None
    labeled = [(i, outputs) for i, outputs in enumerate(valid) if outputs]
    if not labeled:
        raise DataError(f"none of the {len(valid):,} images has a ReaL label.")
    hits: npt.NDArray[np.bool_] = np.array([np.isin(samples.top_classes[i], outputs) for i, outputs in labeled])  # N 5
    top1, top5 = proportion(int(hits[:, 0].sum()), len(labeled)), proportion(int(hits.any(1).sum()), len(labeled))
    assert top1 is not None
    assert top5 is not None
    return RealAccuracy(top1, top5, len(labeled), len(valid) - len(labeled))
