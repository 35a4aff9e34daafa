"""Which of a model's outputs each class of the data is: by WordNet's numbers, by name, or by order.

Data may have a few of the model's classes only (ten folders of ImageNet): the answer is still the
likeliest of all outputs. A class that no output stands for is refused, unless no image is of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitrail.data.sources.base import Sample, Source, Targets
from vitrail.errors import DataError
from vitrail.evaluate.scores import Ints
from vitrail.evaluate.synsets import (
    IMAGENET_CLASSES,
    Synsets,
    normalize_name,
    synsets_in_labels,
    synsets_of_outputs,
    timm_synsets,
)
from vitrail.weights.class_names import imagenet_1k, stated_labels
from vitrail.weights.model_info import ModelInfo

# N images, C classes of the data, K outputs of the model

MatchMethod = Literal["synset", "name", "order"]
MAX_LISTED = 3


@dataclass(frozen=True)
class ClassMatch:
    """Data and model, brought together."""

    outputs: Ints
    """C: the output of each class; -1 where there is none, and no image needs it."""
    method: MatchMethod
    labels: tuple[str, ...]
    """K: what the outputs are called."""
    notes: tuple[str, ...] = ()
    synsets: Synsets | None = None
    """K: their WordNet numbers, where they are known."""


class MappedSource:
    """The same images; their classes are a model's outputs."""

    def __init__(self, source: Source, match: ClassMatch) -> None:
        self.source, self.name, self.multi_label = source, source.name, source.multi_label
        self.labels = match.labels
        places, targets = match.outputs, source.targets
        if self.multi_label:
            there = places >= 0
            self.targets: Targets = np.zeros((len(source), len(match.labels)), np.bool_)
            self.targets[:, places[there]] = targets[:, there]
        else:
            self.targets = np.where(targets < 0, -1, places[np.maximum(targets, 0)])

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        target = self.targets[index]
        found = tuple(np.flatnonzero(target).tolist()) if self.multi_label else int(target)
        sample = self.source[index]
        return Sample(sample.key, sample.image, found)

    def key(self, index: int) -> str:
        return self.source.key(index)

    @property
    def pixels(self) -> npt.NDArray[np.uint8] | None:
        return self.source.pixels

    @property
    def blocks(self) -> tuple[int, ...] | None:
        return self.source.blocks


def match_classes(
    source: Source,
    labels: Sequence[str] | None,
    num_outputs: int,
    *,
    synsets: Synsets | None = None,
    require_synsets: bool = False,
    labels_are_names: bool = False,
) -> ClassMatch:
    """The output of each class of the data. `labels` are the model's, `synsets` what lies beside the data.

    imagenet: only WordNet's numbers will do. named: the data's names are known to be its own, even where
    they are numbers, as those of handwritten digits.
    """
    if not source.labels:
        raise DataError(f"the images of {source.name} have no labels to be right or wrong about.")
    numbers = synsets or synsets_in_labels(source.labels)
    if numbers is not None:
        own, note = synsets_of_outputs(labels, num_outputs, numbers)
        if own is not None:
            place = {number: k for k, number in enumerate(own)}
            places = np.array([place.get(number, -1) for number in numbers], np.int64)
            _check_all_matched(source, places, labels, num_outputs)
            names = _display_names(labels, places, source.labels, own)
            return ClassMatch(places, "synset", names, (note,) if note else (), own)
    if require_synsets:
        raise DataError(_missing_synsets_error(source, num_outputs, numbers))
    if labels is not None:
        places = _match_by_name(source.labels, labels)
        counted = (_all_numeric(source.labels) and not labels_are_names) or _all_numeric(labels)
        if (places >= 0).any() or len(labels) != len(source.labels) or not counted:
            _check_all_matched(source, places, labels, num_outputs)
            return ClassMatch(places, "name", tuple(labels))
    return _match_by_order(source, labels, num_outputs)


def labels_for_matching(info: ModelInfo, source: Source) -> tuple[str, ...] | None:
    """The names of a model's classes to match the data's with; None where they go by order.

    Names that were only assumed count as well, unless the data has as many classes with other names.
    """
    if info.labels is None or len(source.labels) != len(info.labels):
        return info.labels
    shared = (_match_by_name(source.labels, info.labels) >= 0).mean()
    return info.labels if shared >= 0.5 else stated_labels(info)


def _match_by_name(wanted: Sequence[str], labels: Sequence[str]) -> Ints:
    """Equal but for capitals, underscores and hyphens; else by the first of several names. Never by a name of two."""
    found = np.full(len(wanted), -1, np.int64)
    spellings = ([normalize_name(label) for label in labels], [normalize_name(label.split(",")[0]) for label in labels])
    for names in spellings:
        counts = Counter(names)
        place = {name: k for k, name in enumerate(names) if counts[name] == 1}
        missing = [place.get(normalize_name(word), -1) for word in wanted]
        found = np.where(found < 0, missing, found)
    return found


def _match_by_order(source: Source, labels: Sequence[str] | None, outputs: int) -> ClassMatch:
    """One after the other: all that is left where names are not known."""
    count = len(source.labels)
    if count != outputs:
        raise DataError(
            f"{source.name} has {count:,} classes and the model {outputs:,} outputs without names; "
            "name them with --labels FILE, in their order."
        )
    note = "the model's outputs are taken for the data's classes in their order, since "
    note += "the checkpoint does not name them" if labels is None else "only one side names them, the other counts"
    names = source.labels if labels is None or _all_numeric(labels) else labels
    return ClassMatch(np.arange(count), "order", tuple(names), (note,))


def _all_numeric(labels: Sequence[str]) -> bool:
    return all(label.isdecimal() for label in labels)


def _check_all_matched(source: Source, places: Ints, labels: Sequence[str] | None, outputs: int) -> None:
    """Refuse classes that have images and no output."""
    targets = source.targets
    counts = targets.sum(0) if source.multi_label else np.bincount(targets[targets >= 0], minlength=len(places))
    there = int((counts > 0).sum())
    unknown = [source.labels[c] for c in np.flatnonzero((places < 0) & (counts > 0))]
    if not unknown:
        return
    shown = ", ".join(unknown[:MAX_LISTED]) + (", ..." if len(unknown) > MAX_LISTED else "")
    whose = "none" if len(unknown) == there else f"{there - len(unknown):,}"
    others = "" if labels is None else f", such as {', '.join(labels[:MAX_LISTED])}"
    raise DataError(
        f"the model knows {whose} of the {there:,} classes of {source.name} (not {shown}): it has {outputs:,} "
        f"of its own{others}. Measure it on those, name its outputs with --labels FILE, or teach it these with "
        "vitrail finetune."
    )


def _display_names(labels: Sequence[str] | None, places: Ints, data: Sequence[str], own: Synsets) -> tuple[str, ...]:
    """What people read: the model's own names, else those of its outputs' WordNet numbers, else the data's."""
    if labels is not None and synsets_in_labels(labels) is None:
        return tuple(labels)
    known = imagenet_1k()
    if known and len(own) == IMAGENET_CLASSES and set(own) == set(timm_synsets() or own):
        named = dict(zip(sorted(own), known, strict=True))  # ImageNet-1k's order
        return tuple(named[number] for number in own)
    names = list(labels) if labels is not None else [f"class {k}" for k in range(len(own))]
    for label, k in zip(data, places.tolist(), strict=True):
        if k >= 0:
            names[k] = label
    return tuple(names)


def _missing_synsets_error(source: Source, outputs: int, numbers: Synsets | None) -> str:
    if numbers is None:
        return (
            f"the classes of {source.name} have no WordNet numbers, which the ImageNet protocol goes by; wanted "
            "folders such as n01440764, or a synsets.json beside the data."
        )
    return (
        f"which ImageNet class each of the model's {outputs:,} outputs is, nobody knows; `pip install timm`, which has "
        "the lists, or name them with --labels FILE, one WordNet number on each line."
    )
