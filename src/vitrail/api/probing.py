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
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evaluate import fewshot, knn, logistic
from vitrail.evaluate.feature_file import read_features
from vitrail.evaluate.features import Features, Place, gather, settled
from vitrail.evaluate.intervals import Estimate, of_shares, share
from vitrail.runtime import warn_once

METHODS = ("fewshot", "knn", "logistic")

Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""What is being done and how long it is -> something to tell of each step."""


@dataclass(frozen=True)
class Score:
    """How well one classifier on the features does."""

    method: str
    name: str
    """Which of its kind: 5 shots, 20 neighbors."""
    accuracy: Estimate
    spread: float | None = None
    """Standard deviation from one choice of shots to another."""
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        spread = {} if self.spread is None else {"spread": self.spread}
        return {"method": self.method, "name": self.name, **self.accuracy.to_dict(), **spread, **self.settings}


@dataclass(frozen=True)
class Probe:
    """What was found about some features."""

    scores: tuple[Score, ...]
    train: int
    test: int
    """Images learned from and measured on."""
    width: int
    num_classes: int
    unreadable: int = 0

    def to_dict(self) -> dict[str, Any]:
        found = {"train": self.train, "test": self.test, "width": self.width, "classes": self.num_classes}
        return found | {"unreadable": self.unreadable, "scores": [score.to_dict() for score in self.scores]}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which classifiers are tried, and how."""

    methods: tuple[str, ...] = METHODS
    shots: tuple[int, ...] | None = None
    """None: the paper's, `fewshot.SHOTS`, as far as every class has so many images."""
    seeds: int = 3
    ks: tuple[int, ...] | None = None
    """None: 20, or all images where there are fewer."""
    vote: knn.Vote = "weighted"
    strength: float | None = None
    """Logistic regression's C; None: chosen."""

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"no way to probe is called {method!r}{nearest(method, METHODS)}")
        if self.seeds < 1:
            raise ConfigError(f"seeds={self.seeds}: wanted 1 choice of shots or more.")
        for name, given in (("shots", self.shots), ("k", self.ks)):
            if given is not None and (not given or min(given) < 1):
                raise ConfigError(
                    f"{name}={','.join(map(str, given)) or 'nothing'}: wanted 1 or more, such as 5 or 1,5."
                )
        if self.strength is not None:
            logistic.check_strength(self.strength)


def unwatched(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Where nobody looks."""
    return nullcontext(lambda count: None)


def probe(
    model: Model,
    data: str | DataConfig,
    *,
    asked: Asked | None = None,
    place: Place | None = None,
    most: int | None = None,
    batch_size: int = 64,
    watch: Watch = unwatched,
) -> Probe:
    """Learn from the training part of some data, with the network as it is; measure on its test part.

    `most`: no more images than this of either part, with each class's share of them.
    """
    asked, config = asked or Asked(), DataConfig(source=data) if isinstance(data, str) else data
    splits = open_data(config)
    if hasattr(splits.train, "samples"):
        raise DataError(f"{config.source} is a stream, which cannot be probed with; try shards:.")
    tested = splits.test if splits.test is not None else splits.validation
    parts = [limited(part, most) for part in (splits.train, tested)]
    plan(_unseen(parts[0]), asked)  # what cannot be is refused before anything is computed
    _unseen(parts[1])
    place, found, bad = settled(place or Place(), model.net), [], 0
    for name, part in zip(("to learn from", "to measure on"), parts, strict=True):
        with watch(f"features {name}", len(part)) as advance:
            options: dict[str, Any] = {"preprocess": model.preprocess, "place": place, "batch_size": batch_size}
            features, unread = gather(model.net, part, device=model.device, advance=advance, **options)
        found.append(features)
        bad += len(unread)
    if bad and not config.skip_bad:
        many = "image" if bad == 1 else "images"
        raise DataError(f"{bad:,} {many} cannot be read; repair what is named above, or leave it out with --skip-bad.")
    return probe_features(found[0], found[1], asked, device=model.device, watch=watch, unreadable=bad)


def probe_files(
    paths: Sequence[Path], *, asked: Asked | None = None, device: torch.device | str = "cpu", watch: Watch = unwatched
) -> Probe:
    """The same with features that `vitrail embed` has written."""
    train, test = read_features(paths)
    return probe_features(train, test, asked or Asked(), device=torch.device(device), watch=watch)


def limited(source: Source, most: int | None) -> Source:
    """So many of the images, with each class's share of them, chosen by a hash of their names."""
    if most is None or len(source) <= most:
        return source
    classes = len(np.unique(source.targets[source.targets >= 0]))
    if most < classes:
        raise ConfigError(f"--most {most} is less than an image of each of the {classes} classes of {source.name}.")
    keys = (source.key(i) for i in range(len(source)))
    chosen = np.flatnonzero(hold_out_stratified(keys, source.targets, most / len(source)))
    warn_once([f"{len(chosen):,} of {len(source):,} images are used, each class's share of them"], about=source.name)
    return Subset(source, chosen)


def _unseen(source: Source) -> Features:
    """The classes of a source's images, with no features yet."""
    if source.multi_label:
        raise DataError(f"{source.name} has several labels to an image; features are probed with one each.")
    targets = torch.from_numpy(np.asarray(source.targets, dtype=np.int64))
    targets = targets[targets >= 0]
    if not len(targets):
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label.")
    return Features(torch.empty(len(targets), 0), targets, source.labels, source.name)


def plan(train: Features, asked: Asked) -> Asked:
    """What can be tried: of what was not asked for by number the possible, the rest said aloud; else refused."""
    fewshot.check_classes(train)
    methods, notes = asked.methods, list[str]()
    shots = fewshot.SHOTS if asked.shots is None else asked.shots
    ks = (20,) if asked.ks is None else asked.ks
    if "fewshot" in methods:
        least = int(torch.bincount(train.targets, minlength=len(train.labels)).min())
        possible = tuple(n for n in shots if n <= least)
        if possible != shots and asked.shots is None and (possible or set(methods) != {"fewshot"}):
            *most, last = map(str, shots[len(possible) :])
            what = f"{', '.join(most)}{' and ' * bool(most)}{last} shots are" if possible else "few-shot is"
            notes.append(f"{what} left out: the class with the fewest images has {least}")
            shots, methods = possible, methods if possible else tuple(m for m in methods if m != "fewshot")
        for n in shots:
            fewshot.check_shots(train, n)
    if "knn" in methods and max(ks) > len(train):
        if asked.ks is not None:
            knn.check_k(max(ks), len(train))
        notes.append(f"all {len(train)} images to learn from vote, where 20 neighbors would")
        ks = (len(train),)
    warn_once(notes, about=train.name)
    return replace(asked, methods=methods, shots=shots or None, ks=ks)


def probe_features(
    train: Features,
    test: Features,
    asked: Asked,
    *,
    device: torch.device,
    watch: Watch = unwatched,
    unreadable: int = 0,
) -> Probe:
    """Each classifier in turn."""
    if train.values.shape[1] != test.values.shape[1]:
        raise DataError(
            f"{train.name} has {train.values.shape[1]} features and {test.name} {test.values.shape[1]}; wanted "
            "those of one model, layer and pooling."
        )
    asked = plan(train, asked)
    ways = {"fewshot": _fewshot, "knn": _knn, "logistic": _logistic}
    scores = [s for method in asked.methods for s in ways[method](train, test, asked, device, watch)]
    there = len(train.targets.unique())
    return Probe(tuple(scores), len(train), len(test), train.values.shape[1], there, unreadable)


def _fewshot(train: Features, test: Features, asked: Asked, device: torch.device, watch: Watch) -> Iterator[Score]:
    assert asked.shots is not None
    with watch("few-shot", len(asked.shots) * asked.seeds) as advance:
        for shots in asked.shots:
            rights = []
            for seed in range(asked.seeds):
                rights.append(fewshot.few_shot(train, test, shots, seed, device=device) == test.targets)
                advance(1)
            right = torch.stack(rights).double()  # seeds Q
            spread = float(right.mean(1).std()) if asked.seeds > 1 else None
            name = f"{shots} {'shot' if shots == 1 else 'shots'}"
            settings = {"shots": shots, "seeds": asked.seeds}
            yield Score("fewshot", name, of_shares(right.mean(0).numpy()), spread, settings)


def _knn(train: Features, test: Features, asked: Asked, device: torch.device, watch: Watch) -> Iterator[Score]:
    assert asked.ks is not None
    with watch("neighbors", len(test)) as advance:
        near = knn.nearest_neighbors(train.values, test.values.to(device), max(asked.ks), advance=advance)
    for k in asked.ks:
        said = knn.voted(knn.votes(near, train.targets, len(train.labels), k, vote=asked.vote))
        name = f"{k} {'neighbor' if k == 1 else 'neighbors'}"
        yield Score("knn", name, _accuracy(said, test.targets), settings={"k": k, "vote": asked.vote})


def _logistic(train: Features, test: Features, asked: Asked, device: torch.device, watch: Watch) -> Iterator[Score]:
    with watch("logistic regression", logistic.FITS + 1) as advance:
        strength = asked.strength
        if strength is None:
            strength = logistic.choose(train, device=device, advance=advance)
        fit = logistic.fit(train, strength, device=device)
        advance(1)
    said = fit.predict(test.values).cpu()
    chosen = asked.strength is None
    settings = {"C": strength, "chosen": chosen, "solver": fit.solver}
    settings |= {"at_edge": logistic.at_edge(strength)} if chosen else {}
    yield Score("logistic", f"C = {strength:.3g}", _accuracy(said, test.targets), settings=settings)


def _accuracy(said: Tensor, truth: Tensor) -> Estimate:
    found = share(int((said == truth).sum()), len(truth))
    assert found is not None
    return found
