"""Whether a run goes on with the data it began with.

A checkpoint keeps the names of the classes, in order, and a digest of the key and label of every image. The head's
outputs have no names of their own: with other classes, or the same in another order, they would silently stand for
something else, so that is refused. Other changes of the data are said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.data.sources.base import Splits
from vitrail.data.sources.fingerprint import fingerprint
from vitrail.errors import DataError, TrainError
from vitrail.train.parallel import Ranks

Described = dict[str, Any]
SHOWN = 6
"""So many names of classes are listed in a message."""


def describe_data(splits: Splits, labels: Sequence[str], multi_label: bool, ranks: Ranks) -> Described:
    """What a checkpoint keeps of the data; every process must have the same.

    `labels` are the classes that are learned, none for a run without labels. Digests are None for a stream.
    """
    found: Described = {
        "labels": list(labels),
        "multi_label": multi_label,
        "images": len(splits.train) if hasattr(splits.train, "__len__") else None,
        "train": fingerprint(splits.train),
        "validation": fingerprint(splits.validation),
    }
    every = ranks.all_told(found)
    for rank, other in enumerate(every):
        if other != every[0]:
            what = "their images or labels differ"
            if other["labels"] != every[0]["labels"]:
                what = f"the classes are {_listed(every[0]['labels'])} and {_listed(other['labels'])}"
            raise DataError(f"processes 0 and {rank} read different data: {what}.")
    return found


def check_splits(splits: Splits, labels: tuple[str, ...], source: str) -> None:
    """The images to measure on have the classes of those to learn from, in the same order."""
    for part in (splits.validation, splits.test):
        if part is not None and tuple(part.labels) != labels:
            raise DataError(
                f"{part.name} has the classes {_listed(part.labels)}, and the training images of {source} have "
                f"{_listed(labels)}; name them in one order with data.class_names=."
            )


def check_data(then: Described, now: Described, source: str) -> list[str]:
    """What has changed since the checkpoint, as sentences; TrainError where the head's outputs would mean others."""
    if not then:
        return [
            f"the checkpoint was written by an older version and does not say which classes and images it learned "
            f"from: whether {source} is unchanged is not checked"
        ]
    if classes := changed_classes(then, now):
        raise TrainError(
            f"{source} has other classes than the run began with, and the model's outputs would stand for the wrong "
            f"ones: {classes}. Put the classes back as they were, or start a new run."
        )
    notes = []
    if now["train"] is None:
        notes.append(f"{source} is a stream: whether its images are those the run began with is not checked")
    elif then["train"] != now["train"]:
        before, after = then["images"], now["images"]
        number = f"{after:,} as before, with other names or labels"
        if before != after:
            number = f"{before:,} then, {after:,} now"
        notes.append(
            f"the training images of {source} are not those the run began with ({number}): from here on the order of "
            "samples is another, and the result will not be that of an undisturbed run"
        )
    if then["validation"] != now["validation"]:
        notes.append(
            f"the validation images of {source} are not those the run began with: scores from here on cannot be "
            "compared with those before, and the best so far was measured on the old images"
        )
    return notes


def changed_classes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How the classes differ, in words; empty where they do not."""
    before, after = then["labels"], now["labels"]
    if then["multi_label"] != now["multi_label"]:
        one, other = ("one label", "any number of labels")[:: -1 if then["multi_label"] else 1]
        return f"an image had {one} and has {other}"
    if before == after:
        return ""
    if max(len(before), len(after)) <= SHOWN:
        return f"they were {_listed(before)} and are {_listed(after)}"
    words = [] if len(before) == len(after) else [f"there were {len(before):,} and are {len(after):,}"]
    known, found = set(before), set(after)
    words += [f"gone: {_listed(gone)}"] if (gone := [name for name in before if name not in found]) else []
    words += [f"new: {_listed(new)}"] if (new := [name for name in after if name not in known]) else []
    moved = [number for number, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
    if moved:
        at = moved[0]
        words.append(f"{len(moved):,} names at another place, the first: class {at} was {before[at]}, is {after[at]}")
    return "; ".join(words)


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "none") + more
