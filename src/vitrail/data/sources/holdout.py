"""Which images are kept aside to measure on.

The hash of an image's key (of its group's name, where groups stay together) decides, so an image
that is added, removed or renamed moves no other, but in a class that the hash leaves without a
image on one side. That one is helped: the one with its smallest hash is held out, or the one with
its largest is learned from, until the class has grown, when another may take its place. Whatever
has one image only is learned from.

    hold_out       any data: a share that is right on average, stable as the data grow
    stratified     data that never grow: the exact share of every class
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
"""So many examples are named in a note."""

# N images, U units that stay together (images, or groups of them), K classes


def hash_names(texts: Iterable[str]) -> Hashes:
    """64 bits for each text; the same on macOS, which spells accents in two characters."""
    found = bytearray()
    for text in texts:
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        found += hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return np.frombuffer(bytes(found), "<u8").astype(np.uint64)


def group_names(paths: Iterable[str], pattern: str) -> list[str]:
    """The name of each path's group: what the pattern matches, or the path itself where it does not."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"groups={pattern!r} is no regular expression: {error}.") from None
    names, matched = [], False
    for path in paths:
        match = found.search(path)
        matched = matched or match is not None
        # A path cannot hold a null character, so no group is mistaken for an image.
        names.append(path if match is None else "\0" + ((match[1] if found.groups else match[0]) or ""))
    if not matched and names:
        raise ConfigError(
            f"groups={pattern!r} matches no image's path, such as {names[0]!r}; wanted a regular expression over it."
        )
    return names


def hold_out(
    keys: Iterable[str], targets: Targets, share: float, labels: Sequence[str] = (), groups: Iterable[str] | None = None
) -> tuple[Mask, list[str]]:
    """Which of N images are held out, and what has to be said about it."""
    found, unit = np.unique(hash_names(keys if groups is None else groups), return_inverse=True)
    held = found < np.uint64(min(int(share * 2**64), 2**64 - 1))  # U, by ascending hash
    classes, units = _class_units(targets, unit)
    lone, helped, unheld = _fill_empty_sides(held, classes, units)
    one = "one group" if groups is not None else "one image"
    notes = []
    if lone:
        notes.append(
            f"{_format_classes(lone, labels)} {'has' if len(lone) == 1 else 'have'} {one} only, kept to learn from"
        )
    if helped:
        notes.append(
            f"the hash left one side of {_format_classes(helped, labels)} empty, so {one}"
            f"{' of each' * (len(helped) > 1)} was put there; when more are added, it may move back"
        )
    if unheld:
        notes.append(f"nothing of {_format_classes(unheld, labels)} could be held out without splitting a group")
    return held[unit], notes


def hold_out_stratified(keys: Iterable[str], targets: Targets, share: float) -> Mask:
    """The images with the smallest hashes of each class: its exact share, one at least."""
    order = hash_names(keys)
    mask = np.zeros(len(targets), np.bool_)
    for number in np.unique(targets):
        mine = np.flatnonzero(targets == number)
        count = max(round(share * len(mine)), 1) if len(mine) > 1 else 0
        mask[mine[np.argsort(order[mine], kind="stable")[:count]]] = True
    return mask


def _class_units(targets: Targets, unit: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each pair of a class and a unit that holds it, once; by class, then by ascending hash."""
    rows, numbers = np.nonzero(targets) if targets.ndim == 2 else (np.arange(len(targets)), targets)
    labeled = numbers >= 0
    width = int(unit.max(initial=0)) + 1
    pairs = np.unique(numbers[labeled].astype(np.int64) * width + unit[rows[labeled]])
    return pairs // width, pairs % width


def _fill_empty_sides(
    held: Mask, classes: npt.NDArray[np.int64], units: npt.NDArray[np.int64]
) -> tuple[list[int], list[int], list[int]]:
    """Move units, in place, until every class has both sides.

    The classes of one unit, those that were helped, and those beyond help. Learning goes first: no
    unit is held out that would leave a class with nothing to learn from.
    """
    present, starts = np.unique(classes, return_index=True)
    runs = dict(zip(present.tolist(), np.split(units, starts[1:]), strict=True)) if len(present) else {}
    order = np.argsort(units, kind="stable")
    by_unit, owners = units[order], classes[order]

    def classes_in(unit: int) -> list[int]:
        first, last = np.searchsorted(by_unit, [unit, unit + 1])
        return owners[first:last].tolist()

    lone = [number for number, mine in runs.items() if len(mine) == 1]
    held[[int(runs[number][0]) for number in lone]] = False
    helped, unheld = [], []
    for number, mine in runs.items():
        if held[mine].all():
            held[mine[-1]] = False
            helped.append(number)
    for number, mine in runs.items():
        if len(mine) == 1 or held[mine].any():
            continue
        for unit in mine.tolist():
            others = [runs[k] for k in classes_in(unit)]
            if all(np.count_nonzero(~held[other]) > 1 for other in others):
                held[unit] = True
                helped.append(number)
                break
        else:
            unheld.append(number)
    return lone, list(dict.fromkeys(helped)), unheld


def _format_classes(numbers: Sequence[int], labels: Sequence[str]) -> str:
    """`the class cat`, `the classes cat, dog and 3 more`."""
    names = [labels[n] if n < len(labels) else str(n) for n in numbers]
    rest = f" and {len(names) - MAX_EXAMPLES} more" if len(names) > MAX_EXAMPLES else ""
    return f"the class{'es' if len(names) > 1 else ''} {', '.join(names[:MAX_EXAMPLES])}{rest}"
