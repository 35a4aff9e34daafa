"""`vitrail probe`: how good a model's features are, by three simple classifiers on top of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.api.model import Model
from vitrail.config import DataConfig
from vitrail.data.sources import open_data
from vitrail.data.sources.base import Source
from vitrail.data.sources.holdout import hold_out_stratified
from vitrail.data.sources.subset import Subset
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.evaluate import fewshot, knn, logistic
from vitrail.evaluate.feature_file import read_features
from vitrail.evaluate.features import Features, FeatureSpec, extract_features, resolve_features
from vitrail.evaluate.intervals import Estimate, bounded_mean, proportion
from vitrail.runtime import warn_once

METHODS = ("fewshot", "knn", "logistic")

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""What is being done and how long it is -> something to tell of each step."""


@dataclass(frozen=True)
class ProbeScore:
    """How well one classifier on the features does."""

    method: str
    name: str
    """Which of its kind: 5 shots, 20 neighbors."""
    accuracy: Estimate
    spread: float | None = None
    """Standard std from one choice of shots to another."""
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        spread = {} if self.spread is None else {"spread": self.spread}
        return {"method": self.method, "name": self.name, **self.accuracy.to_dict(), **spread, **self.details}


@dataclass(frozen=True)
class ProbeResult:
    """What was found about some features."""

    scores: tuple[ProbeScore, ...]
    num_train: int
    num_test: int
    """Images learned from and measured on."""
    width: int
    num_classes: int
    unreadable: int = 0

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_train": self.num_train, "num_test": self.num_test}
        found |= {"width": self.width, "num_classes": self.num_classes}
        return found | {"unreadable": self.unreadable, "scores": [score.to_dict() for score in self.scores]}


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Which classifiers are tried, and how."""

    methods: tuple[str, ...] = METHODS
    shots: tuple[int, ...] | None = None
    """None: the paper's, `fewshot.SHOTS`, as far as every class has so many images."""
    num_seeds: int = 3
    ks: tuple[int, ...] | None = None
    """None: 20, or all images where there are fewer."""
    vote: knn.Vote = "weighted"
    c: float | None = None
    """Logistic regression's C; None: chosen."""

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"no way to probe is called {method!r}{did_you_mean(method, METHODS)}")
        if self.num_seeds < 1:
            raise ConfigError(f"seeds={self.num_seeds}: wanted 1 choice of shots or more.")
        for name, given in (("shots", self.shots), ("k", self.ks)):
            if given is not None and (not given or min(given) < 1):
                raise ConfigError(
                    f"{name}={','.join(map(str, given)) or 'nothing'}: wanted 1 or more, such as 5 or 1,5."
                )
        if self.c is not None:
            logistic.check_c(self.c)


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Where nobody looks."""
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
    """Learn from the training part of some data, with the network as it is; measure on its test part.

    `max_images`: no more images than this of either part, with each class's share of them.
    """
    settings, config = settings or ProbeSettings(), DataConfig(source=data) if isinstance(data, str) else data
    splits = open_data(config)
    if hasattr(splits.train, "samples"):
        raise DataError(f"{config.source} is a stream, which cannot be probed with; try shards:.")
    tested = splits.test if splits.test is not None else splits.validation
    parts = [subsample(part, max_images) for part in (splits.train, tested)]
    resolve_settings(_targets_only(parts[0]), settings)  # what cannot be is refused before anything is computed
    _targets_only(parts[1])
    spec, found, bad = resolve_features(spec or FeatureSpec(), model.net), [], 0
    for name, part in zip(("to learn from", "to measure on"), parts, strict=True):
        with progress(f"features {name}", len(part)) as advance:
            options: dict[str, Any] = {"preprocess": model.preprocess, "spec": spec, "batch_size": batch_size}
            features, unread = extract_features(model.net, part, device=model.device, advance=advance, **options)
        found.append(features)
        bad += len(unread)
    if bad and not config.skip_bad:
        many = "image" if bad == 1 else "images"
        raise DataError(f"{bad:,} {many} cannot be read; repair what is named above, or leave it out with --skip-bad.")
    return probe_features(found[0], found[1], settings, device=model.device, progress=progress, unreadable=bad)


def probe_files(
    paths: Sequence[Path],
    *,
    settings: ProbeSettings | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> ProbeResult:
    """The same with features that `vitrail embed` has written."""
    train, test = read_features(paths)
    return probe_features(train, test, settings or ProbeSettings(), device=torch.device(device), progress=progress)


def subsample(source: Source, max_images: int | None) -> Source:
    """So many of the images, with each class's share of them, chosen by a hash of their names."""
    if max_images is None or len(source) <= max_images:
        return source
    classes = len(np.unique(source.targets[source.targets >= 0]))
    if max_images < classes:
        raise ConfigError(
            f"--max-images {max_images} is less than an image of each of the {classes} classes of {source.name}."
        )
    keys = (source.key(i) for i in range(len(source)))
    chosen = np.flatnonzero(hold_out_stratified(keys, source.targets, max_images / len(source)))
    warn_once([f"{len(chosen):,} of {len(source):,} images are used, each class's share of them"], about=source.name)
    return Subset(source, chosen)


def _targets_only(source: Source) -> Features:
    """The classes of a source's images, with no features yet."""
    if source.multi_label:
        raise DataError(f"{source.name} has several labels to an image; features are probed with one each.")
    targets = torch.from_numpy(np.asarray(source.targets, dtype=np.int64))
    targets = targets[targets >= 0]
    if not len(targets):
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label.")
    return Features(torch.empty(len(targets), 0), targets, source.labels, source.name)


def resolve_settings(train: Features, settings: ProbeSettings) -> ProbeSettings:
    """What can be tried: of what was not settings for by number the possible, the rest said aloud; else refused."""
    fewshot.check_classes(train)
    methods, notes = settings.methods, list[str]()
    shots = fewshot.SHOTS if settings.shots is None else settings.shots
    ks = (20,) if settings.ks is None else settings.ks
    if "fewshot" in methods:
        least = int(torch.bincount(train.targets, minlength=len(train.labels)).min())
        possible = tuple(n for n in shots if n <= least)
        if possible != shots and settings.shots is None and (possible or set(methods) != {"fewshot"}):
            *max_images, last = map(str, shots[len(possible) :])
            what = f"{', '.join(max_images)}{' and ' * bool(max_images)}{last} shots are" if possible else "few-shot is"
            notes.append(f"{what} left out: the class with the fewest images has {least}")
            shots, methods = possible, methods if possible else tuple(m for m in methods if m != "fewshot")
        for n in shots:
            fewshot.check_shots(train, n)
    if "knn" in methods and max(ks) > len(train):
        if settings.ks is not None:
            knn.check_k(max(ks), len(train))
        notes.append(f"all {len(train)} images to learn from vote, where 20 neighbors would")
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
    """Each classifier in turn."""
    if train.values.shape[1] != test.values.shape[1]:
        raise DataError(
            f"{train.name} has {train.values.shape[1]} features and {test.name} {test.values.shape[1]}; wanted "
            "those of one model, layer and pooling."
        )
    settings = resolve_settings(train, settings)
    ways = {"fewshot": _probe_fewshot, "knn": _probe_knn, "logistic": _probe_logistic}
    scores = [s for method in settings.methods for s in ways[method](train, test, settings, device, progress)]
    there = len(train.targets.unique())
    return ProbeResult(tuple(scores), len(train), len(test), train.values.shape[1], there, unreadable)


def _probe_fewshot(
    train: Features, test: Features, settings: ProbeSettings, device: torch.device, progress: Progress
) -> Iterator[ProbeScore]:
    assert settings.shots is not None
    with progress("few-shot", len(settings.shots) * settings.num_seeds) as advance:
        for shots in settings.shots:
            rights = []
            for seed in range(settings.num_seeds):
                rights.append(fewshot.predict_few_shot(train, test, shots, seed, device=device) == test.targets)
                advance(1)
            right = torch.stack(rights).double()  # seeds Q
            spread = float(right.mean(1).std()) if settings.num_seeds > 1 else None
            name = f"{shots} {'shot' if shots == 1 else 'shots'}"
            details = {"shots": shots, "seeds": settings.num_seeds}
            yield ProbeScore("fewshot", name, bounded_mean(right.mean(0).numpy()), spread, details)


def _probe_knn(
    train: Features, test: Features, settings: ProbeSettings, device: torch.device, progress: Progress
) -> Iterator[ProbeScore]:
    assert settings.ks is not None
    with progress("neighbors", len(test)) as advance:
        near = knn.nearest_neighbors(train.values, test.values.to(device), max(settings.ks), advance=advance)
    for k in settings.ks:
        said = knn.predicted_classes(knn.class_votes(near, train.targets, len(train.labels), k, vote=settings.vote))
        name = f"{k} {'neighbor' if k == 1 else 'neighbors'}"
        yield ProbeScore("knn", name, _accuracy(said, test.targets), details={"k": k, "vote": settings.vote})


def _probe_logistic(
    train: Features, test: Features, settings: ProbeSettings, device: torch.device, progress: Progress
) -> Iterator[ProbeScore]:
    with progress("logistic regression", logistic.SEARCH_FITS + 1) as advance:
        c = settings.c
        if c is None:
            c = logistic.search_c(train, device=device, advance=advance)
        fit = logistic.fit(train, c, device=device)
        advance(1)
    said = fit.predict(test.values).cpu()
    chosen = settings.c is None
    details = {"C": c, "chosen": chosen, "solver": fit.solver}
    details |= {"at_edge": logistic.is_at_range_edge(c)} if chosen else {}
    yield ProbeScore("logistic", f"C = {c:.3g}", _accuracy(said, test.targets), details=details)


def _accuracy(said: Tensor, truth: Tensor) -> Estimate:
    found = proportion(int((said == truth).sum()), len(truth))
    assert found is not None
    return found
