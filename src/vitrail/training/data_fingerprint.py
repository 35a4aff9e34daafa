"""Checks that a resumed run uses the data it started with.

A checkpoint stores the class names in order, and a digest of the key and label of every image. With other classes, or
the same classes in another order, the outputs of the head would silently stand for the wrong classes, so resuming is
refused. Other changes of the data are reported in a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.data.sources.base import Splits
from vitrail.data.sources.fingerprint import fingerprint
from vitrail.errors import DataError, TrainError
from vitrail.runtime.distributed import DistributedContext

DataFingerprint = dict[str, Any]
MAX_NAMES_SHOWN = 6
"""Maximum number of class names in a message."""


def fingerprint_data(
    splits: Splits, labels: Sequence[str], multi_label: bool, distributed: DistributedContext
) -> DataFingerprint:
    """The description of the data that a checkpoint stores; raises DataError if it differs between processes.

    `labels`: the class names, empty for a run without labels. Digests are None for a stream.
    """
    found: DataFingerprint = {
        "labels": list(labels),
        "multi_label": multi_label,
        "images": len(splits.train) if hasattr(splits.train, "__len__") else None,
        "train": fingerprint(splits.train),
        "validation": fingerprint(splits.validation),
    }
    by_rank = distributed.all_gather_object(found)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            what = "their images or labels differ"
            if other["labels"] != by_rank[0]["labels"]:
                what = f"the classes are {_format_names(by_rank[0]['labels'])} and {_format_names(other['labels'])}"
            raise DataError(f"processes 0 and {rank} read different data: {what}.")
    return found


def check_splits(splits: Splits, labels: tuple[str, ...], source: str) -> None:
    """Raise unless the validation and test splits have the classes of the training split, in the same order."""
    for part in (splits.validation, splits.test):
        if part is not None and tuple(part.labels) != labels:
            raise DataError(
                f"{part.name} has the classes {_format_names(part.labels)}, but the training images of {source} have "
                f"{_format_names(labels)}; give their order with data.class_names=."
            )


def check_fingerprint(saved: DataFingerprint, current: DataFingerprint, source: str) -> list[str]:
    """Notes about what has changed since the checkpoint; raises TrainError if the classes have changed."""
    if not saved:
        return [
            "the checkpoint was written by an older version, which did not record the classes and images, so it was "
            f"not checked whether {source} has changed"
        ]
    if classes := describe_class_changes(saved, current):
        raise TrainError(
            f"the classes of {source} have changed since the start of the run, so the model's outputs would no longer "
            f"match them: {classes}. Restore the classes, or start a new run."
        )
    notes = []
    if current["train"] is None:
        notes.append(f"{source} is a stream, so it was not checked whether its images have changed")
    elif saved["train"] != current["train"]:
        before, after = saved["images"], current["images"]
        number = f"{after:,} as before, with other names or labels"
        if before != after:
            number = f"{before:,} before, {after:,} now"
        notes.append(
            f"the training images of {source} have changed since the start of the run ({number}): from this step on, "
            "the order of samples differs, and the result will differ from that of an uninterrupted run"
        )
    if saved["validation"] != current["validation"]:
        notes.append(
            f"the validation images of {source} have changed since the start of the run: later scores cannot be "
            "compared with earlier ones, and the best score so far was measured on the old images"
        )
    return notes


def describe_class_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """A description of how the classes differ; empty if they do not."""
    before, after = saved["labels"], current["labels"]
    if saved["multi_label"] != current["multi_label"]:
        one, other = ("one label", "any number of labels")[:: -1 if saved["multi_label"] else 1]
        return f"an image had {one} and now has {other}"
    if before == after:
        return ""
    if max(len(before), len(after)) <= MAX_NAMES_SHOWN:
        return f"they were {_format_names(before)} and are now {_format_names(after)}"
    words = [] if len(before) == len(after) else [f"there were {len(before):,} and are now {len(after):,}"]
    known, found = set(before), set(after)
    words += [f"missing: {_format_names(gone)}"] if (gone := [name for name in before if name not in found]) else []
    words += [f"new: {_format_names(new)}"] if (new := [name for name in after if name not in known]) else []
    moved = [number for number, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
    if moved:
        at = moved[0]
        words.append(
            f"{len(moved):,} have another index, the first is class {at}: it was {before[at]} and is now {after[at]}"
        )
    return "; ".join(words)


def _format_names(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > MAX_NAMES_SHOWN else ""
    return (", ".join(names[:MAX_NAMES_SHOWN]) or "none") + more
