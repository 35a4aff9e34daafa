"""Choose which images are held out of training.

A hash of the image's key (or of its group's name) decides, so adding, removing or renaming an image
does not move any other. The exception is a class whose images the hash would put all on one side:
then the image with the smallest hash is held out, or the one with the largest is used for training,
until the class has grown. A class with a single image is always used for training.

    hold_out               any data: the fraction is met on average, and stable as the data grows
    hold_out_stratified    data that never changes: an exact fraction of every class
    select_range           a part of the training images, as an exact range of every class
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vitrail.data.sources.base import Targets
from vitrail.errors import ConfigError

Mask = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]
MAX_EXAMPLES = 5
"""Classes listed in a note."""

# N images, U units that are not split (images, or groups of them), K classes


def hash_names(texts: Iterable[str]) -> Hashes:
    """A 64-bit hash of each name, after Unicode normalization (macOS decomposes accented characters)."""
    digests = bytearray()
    for text in texts:
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        digests += hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return np.frombuffer(bytes(digests), "<u8").astype(np.uint64)


def group_names(paths: Iterable[str], pattern: str) -> list[str]:
    """The group of each path: the text that the pattern matches, or the path itself if it does not match."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"groups={pattern!r} is not a valid regular expression: {error}.") from None
    names, matched = [], False
    for path in paths:
        match = compiled.search(path)
        matched = matched or match is not None
        # A path cannot contain a null character, so a group cannot be mistaken for a path.
        names.append(path if match is None else "\0" + ((match[1] if compiled.groups else match[0]) or ""))
    if not matched and names:
        raise ConfigError(
            f"groups={pattern!r} matches no image's path; expected a regular expression for paths such as {names[0]!r}."
        )
    return names


def hold_out(
    keys: Iterable[str],
    targets: Targets,
    fraction: float,
    labels: Sequence[str] = (),
    groups: Iterable[str] | None = None,
) -> tuple[Mask, list[str]]:
    """Choose the images to hold out: N booleans, and notes about classes that needed special treatment."""
    unit_hashes, unit = np.unique(hash_names(keys if groups is None else groups), return_inverse=True)
    held_out = unit_hashes < np.uint64(min(int(fraction * 2**64), 2**64 - 1))  # U, by ascending hash
    classes, units = _class_units(targets, unit)
    single, moved, not_held_out = _fill_empty_sides(held_out, classes, units)
    one = "one group" if groups is not None else "one image"
    notes = []
    if single:
        verb = "has" if len(single) == 1 else "have"
        notes.append(f"{_format_classes(single, labels)} {verb} only {one}, which is used for training")
    if moved:
        each = " of each" * (len(moved) > 1)
        notes.append(
            f"the hash put all images of {_format_classes(moved, labels)} into one split, so {one}{each} was moved to "
            "the other; it may move back when more are added"
        )
    if not_held_out:
        notes.append(f"no images of {_format_classes(not_held_out, labels)} can be held out without splitting a group")
    return held_out[unit], notes


def hold_out_stratified(keys: Iterable[str], targets: Targets, fraction: float) -> Mask:
    """Hold out the images with the smallest hashes of each class: an exact fraction, but at least one."""
    order = hash_names(keys)
    mask = np.zeros(len(targets), np.bool_)
    for target in np.unique(targets):
        members = np.flatnonzero(targets == target)
        count = max(round(fraction * len(members)), 1) if len(members) > 1 else 0
        mask[members[np.argsort(order[members], kind="stable")[:count]]] = True
    return mask


def select_range(keys: Iterable[str], targets: Targets, low: float, high: float) -> npt.NDArray[np.int64]:
    """Indices of the images from fraction `low` to `high` of each class, ordered by their hashes; at least one each.

    Ranges that do not overlap select different images, unless a class has too few; a larger range contains a smaller.
    """
    order = hash_names(keys)
    chosen = []
    for target in np.unique(targets):
        members = np.flatnonzero(targets == target)
        start = min(round(low * len(members)), len(members) - 1)
        stop = max(round(high * len(members)), start + 1)
        chosen.append(members[np.argsort(order[members], kind="stable")[start:stop]])
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)


def _class_units(targets: Targets, unit: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct (class, unit) pairs, as two arrays, sorted by class and then by hash."""
    rows, numbers = np.nonzero(targets) if targets.ndim == 2 else (np.arange(len(targets)), targets)
    labeled = numbers >= 0
    width = int(unit.max(initial=0)) + 1
    pairs = np.unique(numbers[labeled].astype(np.int64) * width + unit[rows[labeled]])
    return pairs // width, pairs % width


def _fill_empty_sides(
    held_out: Mask, classes: npt.NDArray[np.int64], units: npt.NDArray[np.int64]
) -> tuple[list[int], list[int], list[int]]:
    """Move units, in place, until every class is both in training and held out.

    Returns the classes with a single unit, those with a moved unit, and those of which nothing can
    be held out. Training has priority: no unit is held out if a class would lose its last training unit.
    """
    present, starts = np.unique(classes, return_index=True)
    units_of = dict(zip(present.tolist(), np.split(units, starts[1:]), strict=True)) if len(present) else {}
    order = np.argsort(units, kind="stable")
    sorted_units, sorted_classes = units[order], classes[order]

    def classes_in(unit: int) -> list[int]:
        first, last = np.searchsorted(sorted_units, [unit, unit + 1])
        return sorted_classes[first:last].tolist()

    single = [target for target, members in units_of.items() if len(members) == 1]
    held_out[[int(units_of[target][0]) for target in single]] = False
    moved, not_held_out = [], []
    for target, members in units_of.items():
        if held_out[members].all():
            held_out[members[-1]] = False
            moved.append(target)
    for target, members in units_of.items():
        if len(members) == 1 or held_out[members].any():
            continue
        for unit in members.tolist():
            affected = [units_of[k] for k in classes_in(unit)]
            if all(np.count_nonzero(~held_out[others]) > 1 for others in affected):
                held_out[unit] = True
                moved.append(target)
                break
        else:
            not_held_out.append(target)
    return single, list(dict.fromkeys(moved)), not_held_out


def _format_classes(classes: Sequence[int], labels: Sequence[str]) -> str:
    """`the class cat`, `the classes cat, dog and 3 more`."""
    names = [labels[k] if k < len(labels) else str(k) for k in classes]
    rest = f" and {len(names) - MAX_EXAMPLES} more" if len(names) > MAX_EXAMPLES else ""
    return f"the class{'es' if len(names) > 1 else ''} {', '.join(names[:MAX_EXAMPLES])}{rest}"
