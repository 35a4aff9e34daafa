"""Match the classes of a data set to a model's outputs: by WordNet ID, by name, or by order.

The data may have a subset of the model's classes (ten folders of ImageNet); the prediction is still the highest of all
outputs. A class that has images but no output is an error.
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
from vitrail.evaluation.scores import Ints
from vitrail.evaluation.synsets import (
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
    """Which output each class of the data is."""

    outputs: Ints
    """C: the output of each class; -1 if there is none, which is allowed for a class without images."""
    method: MatchMethod
    labels: tuple[str, ...]
    """K: names of the outputs."""
    notes: tuple[str, ...] = ()
    synsets: Synsets | None = None
    """K: WordNet IDs of the outputs, if known."""


class MappedSource:
    """A source whose targets are a model's output indices."""

    def __init__(self, source: Source, match: ClassMatch) -> None:
        self.source, self.name, self.multi_label = source, source.name, source.multi_label
        self.labels = match.labels
        outputs, targets = match.outputs, source.targets
        if self.multi_label:
            matched = outputs >= 0
            self.targets: Targets = np.zeros((len(source), len(match.labels)), np.bool_)
            self.targets[:, outputs[matched]] = targets[:, matched]
        else:
            self.targets = np.where(targets < 0, -1, outputs[np.maximum(targets, 0)])

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        target = self.targets[index]
        targets = tuple(np.flatnonzero(target).tolist()) if self.multi_label else int(target)
        sample = self.source[index]
        return Sample(sample.key, sample.image, targets)

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
    """Match each class of the data to an output. `labels` are the model's; `synsets` are those of the data.

    require_synsets: match by WordNet ID only. labels_are_names: the data's labels are names even if they are numeric,
    as those of handwritten digits are.
    """
    if not source.labels:
        raise DataError(f"the images of {source.name} have no labels, so accuracy cannot be measured.")
    numbers = synsets or synsets_in_labels(source.labels)
    if numbers is not None:
        own, note = synsets_of_outputs(labels, num_outputs, numbers)
        if own is not None:
            output_of = {number: k for k, number in enumerate(own)}
            outputs = np.array([output_of.get(number, -1) for number in numbers], np.int64)
            _check_all_matched(source, outputs, labels, num_outputs)
            names = _display_names(labels, outputs, source.labels, own)
            return ClassMatch(outputs, "synset", names, (note,) if note else (), own)
    if require_synsets:
        raise DataError(_missing_synsets_error(source, num_outputs, numbers))
    if labels is not None:
        outputs = _match_by_name(source.labels, labels)
        unnamed = (_all_numeric(source.labels) and not labels_are_names) or _all_numeric(labels)
        if (outputs >= 0).any() or len(labels) != len(source.labels) or not unnamed:
            _check_all_matched(source, outputs, labels, num_outputs)
            return ClassMatch(outputs, "name", tuple(labels))
    return _match_by_order(source, labels, num_outputs)


def labels_for_matching(info: ModelInfo, source: Source) -> tuple[str, ...] | None:
    """The model's class names to match by, or None to match by order.

    Assumed names (of unnamed ImageNet outputs) count too, unless the data has as many classes with other names.
    """
    if info.labels is None or len(source.labels) != len(info.labels):
        return info.labels
    shared = (_match_by_name(source.labels, info.labels) >= 0).mean()
    return info.labels if shared >= 0.5 else stated_labels(info)


def _match_by_name(expected: Sequence[str], labels: Sequence[str]) -> Ints:
    """Match by name, ignoring case, underscores and hyphens; else by the first synonym. Duplicates never match."""
    found = np.full(len(expected), -1, np.int64)
    spellings = ([normalize_name(label) for label in labels], [normalize_name(label.split(",")[0]) for label in labels])
    for names in spellings:
        counts = Counter(names)
        output_of = {name: k for k, name in enumerate(names) if counts[name] == 1}
        matches = [output_of.get(normalize_name(name), -1) for name in expected]
        found = np.where(found < 0, matches, found)
    return found


def _match_by_order(source: Source, labels: Sequence[str] | None, num_outputs: int) -> ClassMatch:
    """Match class i to output i; the last resort, without names."""
    count = len(source.labels)
    if count != num_outputs:
        raise DataError(
            f"{source.name} has {count:,} classes and the model {num_outputs:,} outputs without names; "
            "name the outputs with --labels FILE, in order."
        )
    note = "the data's classes are matched to the model's outputs by order, because "
    note += "the checkpoint has no class names" if labels is None else "only one of them has class names"
    names = source.labels if labels is None or _all_numeric(labels) else labels
    return ClassMatch(np.arange(count), "order", tuple(names), (note,))


def _all_numeric(labels: Sequence[str]) -> bool:
    return all(label.isdecimal() for label in labels)


def _check_all_matched(source: Source, outputs: Ints, labels: Sequence[str] | None, num_outputs: int) -> None:
    """Raise an error if a class has images but no output."""
    targets = source.targets
    counts = targets.sum(0) if source.multi_label else np.bincount(targets[targets >= 0], minlength=len(outputs))
    present = int((counts > 0).sum())
    unmatched = [source.labels[c] for c in np.flatnonzero((outputs < 0) & (counts > 0))]
    if not unmatched:
        return
    listed = ", ".join(unmatched[:MAX_LISTED]) + (", ..." if len(unmatched) > MAX_LISTED else "")
    matched = "none" if len(unmatched) == present else f"{present - len(unmatched):,}"
    others = "" if labels is None else f", such as {', '.join(labels[:MAX_LISTED])}"
    raise DataError(
        f"the model has {matched} of the {present:,} classes of {source.name} (missing: {listed}); it has "
        f"{num_outputs:,} outputs{others}. Use data with the model's classes, name the outputs with --labels FILE, or "
        "train the model on the classes of the data with vitrail finetune."
    )


def _display_names(labels: Sequence[str] | None, outputs: Ints, data: Sequence[str], own: Synsets) -> tuple[str, ...]:
    """Names for display: the model's own, else those of the outputs' WordNet IDs, else the data's."""
    if labels is not None and synsets_in_labels(labels) is None:
        return tuple(labels)
    known = imagenet_1k()
    if known and len(own) == IMAGENET_CLASSES and set(own) == set(timm_synsets() or own):
        named = dict(zip(sorted(own), known, strict=True))  # ImageNet-1k's order
        return tuple(named[number] for number in own)
    names = list(labels) if labels is not None else [f"class {k}" for k in range(len(own))]
    for label, k in zip(data, outputs.tolist(), strict=True):
        if k >= 0:
            names[k] = label
    return tuple(names)


def _missing_synsets_error(source: Source, num_outputs: int, numbers: Synsets | None) -> str:
    if numbers is None:
        return (
            f"the classes of {source.name} have no WordNet IDs, which the ImageNet protocol needs; expected "
            "folders such as n01440764, or a synsets.json next to the data."
        )
    return (
        f"the ImageNet classes of the model's {num_outputs:,} outputs are unknown; install timm (`pip install timm`), "
        "which has the lists, or name the outputs with --labels FILE, one WordNet ID per line."
    )
