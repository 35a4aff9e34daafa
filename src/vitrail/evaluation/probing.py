"""`vitrail probe`: measure a model's features with simple classifiers on top of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config import DataConfig
from vitrail.data.sources import open_data
from vitrail.data.sources.base import Source
from vitrail.data.sources.holdout import hold_out_stratified
from vitrail.data.sources.subset import Subset
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.evaluation import fewshot, knn, logistic
from vitrail.evaluation.feature_file import read_features
from vitrail.evaluation.features import Features, FeatureSpec, extract_features, resolve_features
from vitrail.evaluation.intervals import Estimate, bounded_mean, proportion
from vitrail.model import Model
from vitrail.runtime import warn_once

METHODS = ("fewshot", "knn", "logistic")

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(description, total) -> a context manager that gives `advance(n)`, called after each n steps."""


@dataclass(frozen=True)
class ProbeScore:
    """Accuracy of one classifier on frozen features."""

    method: str
    name: str
    """Its setting: "5 shots", "20 neighbors"."""
    accuracy: Estimate
    spread: float | None = None
    """Standard deviation of the accuracy over choices of shots."""
    details: dict[str, Any] = field(default_factory=dict)
    """The classifier's hyperparameters."""

    def to_dict(self) -> dict[str, Any]:
        spread = {} if self.spread is None else {"spread": self.spread}
        return {"method": self.method, "name": self.name, **self.accuracy.to_dict(), **spread, **self.details}


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies of all classifiers."""

    scores: tuple[ProbeScore, ...]
    num_train: int
    num_test: int
    """Number of training and test images."""
    width: int
    num_classes: int
    unreadable: int = 0

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_train": self.num_train, "num_test": self.num_test}
        found |= {"width": self.width, "num_classes": self.num_classes}
        return found | {"unreadable": self.unreadable, "scores": [score.to_dict() for score in self.scores]}


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Which classifiers to fit, and their hyperparameters."""

    methods: tuple[str, ...] = METHODS
    shots: tuple[int, ...] | None = None
    """None: `fewshot.SHOTS`, as in the paper, except those that exceed the smallest class."""
    num_seeds: int = 3
    ks: tuple[int, ...] | None = None
    """None: 20, or all training images if there are fewer."""
    vote: knn.Vote = "weighted"
    c: float | None = None
    """Inverse regularization strength of logistic regression; None: searched."""

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"unknown probing method {method!r}{did_you_mean(method, METHODS)}")
        if self.num_seeds < 1:
            raise ConfigError(f"seeds={self.num_seeds}: expected at least 1.")
        for name, given in (("shots", self.shots), ("k", self.ks)):
            if given is not None and (not given or min(given) < 1):
                raise ConfigError(
                    f"{name}={','.join(map(str, given)) or 'nothing'}: expected 1 or more, such as 5 or 1,5."
                )
        if self.c is not None:
            logistic.check_c(self.c)


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A `Progress` that shows nothing."""
    return nullcontext(lambda count: None)


def probe(
    model: Model,
    data: str | DataConfig,
    *,
    settings: ProbeSettings | None = None,
    spec: FeatureSpec | None = None,
    max_images: int | None = None,
    batch_size: int = 64,
    progress: Progress = no_progress,
) -> ProbeResult:
    """Fit classifiers to the frozen features of the training split, and measure them on the test split.

    `max_images`: use at most this many images of each split, stratified by class.
    """
    settings, config = settings or ProbeSettings(), DataConfig(source=data) if isinstance(data, str) else data
    splits = open_data(config)
    if hasattr(splits.train, "samples"):
        raise DataError(f"{config.source} is a stream, which cannot be probed; try shards:.")
    tested = splits.test if splits.test is not None else splits.validation
    parts = [subsample(part, max_images) for part in (splits.train, tested)]
    resolve_settings(_targets_only(parts[0]), settings)  # impossible settings fail before anything is computed
    _targets_only(parts[1])
    spec, found, bad = resolve_features(spec or FeatureSpec(), model.net), [], 0
    for name, part in zip(("training", "test"), parts, strict=True):
        with progress(f"{name} features", len(part)) as advance:
            options: dict[str, Any] = {"preprocess": model.preprocess, "spec": spec, "batch_size": batch_size}
            features, unread = extract_features(model.net, part, device=model.device, advance=advance, **options)
        found.append(features)
        bad += len(unread)
    if bad and not config.skip_bad:
        images = "image" if bad == 1 else "images"
        raise DataError(f"{bad:,} {images} cannot be read; repair those listed above, or skip them with --skip-bad.")
    return probe_features(found[0], found[1], settings, device=model.device, progress=progress, unreadable=bad)


def probe_files(
    paths: Sequence[Path],
    *,
    settings: ProbeSettings | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> ProbeResult:
    """The same with feature files written by `vitrail embed`."""
    train, test = read_features(paths)
    return probe_features(train, test, settings or ProbeSettings(), device=torch.device(device), progress=progress)


def subsample(source: Source, max_images: int | None) -> Source:
    """At most `max_images` images, stratified by class and chosen by a hash of their names."""
    if max_images is None or len(source) <= max_images:
        return source
    classes = len(np.unique(source.targets[source.targets >= 0]))
    if max_images < classes:
        raise ConfigError(f"--max-images {max_images} is less than one image per class: {source.name} has {classes}.")
    keys = (source.key(i) for i in range(len(source)))
    chosen = np.flatnonzero(hold_out_stratified(keys, source.targets, max_images / len(source)))
    warn_once([f"using {len(chosen):,} of {len(source):,} images, stratified by class"], about=source.name)
    return Subset(source, chosen)


def _targets_only(source: Source) -> Features:
    """The targets of a source, without features, for early checks."""
    if source.multi_label:
        raise DataError(f"{source.name} is multi-label; probing needs one label per image.")
    targets = torch.from_numpy(np.asarray(source.targets, dtype=np.int64))
    targets = targets[targets >= 0]
    if not len(targets):
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label.")
    return Features(torch.empty(len(targets), 0), targets, source.labels, source.name)


def resolve_settings(train: Features, settings: ProbeSettings) -> ProbeSettings:
    """Replace defaults that the data is too small for, with a note; raise an error for explicit values."""
    fewshot.check_classes(train)
    methods, notes = settings.methods, list[str]()
    shots = fewshot.SHOTS if settings.shots is None else settings.shots
    ks = (20,) if settings.ks is None else settings.ks
    if "fewshot" in methods:
        fewest = int(torch.bincount(train.targets, minlength=len(train.labels)).min())
        possible = tuple(n for n in shots if n <= fewest)
        if possible != shots and settings.shots is None and (possible or set(methods) != {"fewshot"}):
            *others, last = map(str, shots[len(possible) :])
            skipped = f"{', '.join(others)}{' and ' * bool(others)}{last} shots are" if possible else "few-shot is"
            notes.append(f"{skipped} skipped: the class with the fewest images has {fewest}")
            shots, methods = possible, methods if possible else tuple(m for m in methods if m != "fewshot")
        for n in shots:
            fewshot.check_shots(train, n)
    if "knn" in methods and max(ks) > len(train):
        if settings.ks is not None:
            knn.check_k(max(ks), len(train))
        notes.append(f"all {len(train)} training images vote, because there are fewer than 20")
        ks = (len(train),)
    warn_once(notes, about=train.name)
    return replace(settings, methods=methods, shots=shots or None, ks=ks)


def probe_features(
    train: Features,
    test: Features,
    settings: ProbeSettings,
    *,
    device: torch.device,
    progress: Progress = no_progress,
    unreadable: int = 0,
) -> ProbeResult:
    """Fit and measure each classifier in turn."""
    if train.values.shape[1] != test.values.shape[1]:
        raise DataError(
            f"{train.name} has {train.values.shape[1]} features and {test.name} {test.values.shape[1]}; expected "
            "features of the same model, layer and pooling."
        )
    settings = resolve_settings(train, settings)
    probes = {"fewshot": _probe_fewshot, "knn": _probe_knn, "logistic": _probe_logistic}
    scores = [s for method in settings.methods for s in probes[method](train, test, settings, device, progress)]
    num_classes = len(train.targets.unique())
    return ProbeResult(tuple(scores), len(train), len(test), train.values.shape[1], num_classes, unreadable)


def _probe_fewshot(
    train: Features, test: Features, settings: ProbeSettings, device: torch.device, progress: Progress
) -> Iterator[ProbeScore]:
    assert settings.shots is not None
    with progress("few-shot", len(settings.shots) * settings.num_seeds) as advance:
        for shots in settings.shots:
            runs = []
            for seed in range(settings.num_seeds):
                runs.append(fewshot.predict_few_shot(train, test, shots, seed, device=device) == test.targets)
                advance(1)
            correct = torch.stack(runs).double()  # seeds Q
            spread = float(correct.mean(1).std()) if settings.num_seeds > 1 else None
            name = f"{shots} {'shot' if shots == 1 else 'shots'}"
            details = {"shots": shots, "seeds": settings.num_seeds}
            yield ProbeScore("fewshot", name, bounded_mean(correct.mean(0).numpy()), spread, details)


def _probe_knn(
    train: Features, test: Features, settings: ProbeSettings, device: torch.device, progress: Progress
) -> Iterator[ProbeScore]:
    assert settings.ks is not None
    with progress("neighbors", len(test)) as advance:
        near = knn.nearest_neighbors(train.values, test.values.to(device), max(settings.ks), advance=advance)
    for k in settings.ks:
        votes = knn.class_votes(near, train.targets, len(train.labels), k, vote=settings.vote)
        name = f"{k} {'neighbor' if k == 1 else 'neighbors'}"
        accuracy = _accuracy(knn.predicted_classes(votes), test.targets)
        yield ProbeScore("knn", name, accuracy, details={"k": k, "vote": settings.vote})


def _probe_logistic(
    train: Features, test: Features, settings: ProbeSettings, device: torch.device, progress: Progress
) -> Iterator[ProbeScore]:
    with progress("logistic regression", logistic.SEARCH_FITS + 1) as advance:
        c = settings.c
        if c is None:
            c = logistic.search_c(train, device=device, advance=advance)
        fit = logistic.fit(train, c, device=device)
        advance(1)
    accuracy = _accuracy(fit.predict(test.values).cpu(), test.targets)
    searched = settings.c is None
    details = {"C": c, "chosen": searched, "solver": fit.solver}
    details |= {"at_edge": logistic.is_at_range_edge(c)} if searched else {}
    yield ProbeScore("logistic", f"C = {c:.3g}", accuracy, details=details)


def _accuracy(predicted: Tensor, truth: Tensor) -> Estimate:
    accuracy = proportion(int((predicted == truth).sum()), len(truth))
    assert accuracy is not None
    return accuracy
