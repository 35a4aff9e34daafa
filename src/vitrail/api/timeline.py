"""`timeline`: a run's snapshots as animations of what its model learned, and as strips for papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from vitrail.config import pair
from vitrail.data.decode import ImageLike
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.errors import ModelError, NotFoundError, TrainError, VitrailError
from vitrail.explain.animation import NEAR, Film, draw_animation, draw_strip
from vitrail.explain.canvas import save, save_arrays
from vitrail.explain.panes import Pixels, shown
from vitrail.explain.timeline import NO_IMAGE, SUBJECTS, Frames, Moment, frames
from vitrail.models import Net
from vitrail.report.run_record import Curve, RunRecord, read_run
from vitrail.runtime import warn_once
from vitrail.train.run_folder import RunFolder
from vitrail.train.snapshots import find_snapshots
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo

MOST = 60
"""Moments of an animation: of more snapshots, so many at equal distances are shown."""
LOOKED_AT = 32
"""Images whose attention distances are averaged."""
BESIDE = {"filters": ("shares",), "distances": ("uniform",)}
"""Further numbers of a subject."""

Watch = Callable[[int, int], object]
"""Told after each part of the work how many are done, and of how many."""


@dataclass(frozen=True)
class Seen:
    """Images to look at attention on, as the network takes them; without them, the reason."""

    images: Tensor | None = None
    """B C H W."""
    image: Tensor | None = None
    """1 C H W."""
    pixels: Pixels | None = None
    """The same image, for people."""
    missing: str = ""


def timeline(
    run: str | Path,
    out: str | Path,
    what: Sequence[str] = (),
    *,
    image: ImageLike | None = None,
    watch: Watch | None = None,
) -> list[Path]:
    """Follow a run through its snapshots: `timeline("runs/digits", "figures", ["positions"])`.

    For each subject ("positions", "filters", "distances", "rollout"; all, unless `what` names some)
    `out` gets timeline-SUBJECT.gif, the same as a strip (.png, .svg) and its numbers (.npz). Rollout is of
    `image`, else of the first that the run was measured on. What this model does not have is left out,
    and said.
    """
    told = read_run(Path(run).expanduser())
    taken = _taken(told.path)
    _, info = checkpoint.read(taken[max(taken)])
    seen = _seen(told.path, info, image) if not what or {"distances", "rollout"} & set(what) else Seen()
    whole, done = len(taken) + len(what or SUBJECTS), 0

    def watched() -> Iterator[Net]:
        nonlocal done
        for path in taken.values():
            yield checkpoint.read(path)[0]
            done += 1
            if watch is not None:
                watch(done, whole)

    found = frames(watched(), what, images=seen.images, image=seen.image)
    _say_left_out(found, told, seen)
    curve = told.evaluation_curve("map" if told.multi_label else "top1", ema=told.has_ema)
    moments = [_moment(told, step, curve, max(taken)) for step in taken]
    paths: list[Path] = []
    for done, subject in enumerate(found.subjects, start=len(taken) + 1):
        film = Film(
            subject,
            {name: found.arrays[name] for name in (subject, *BESIDE.get(subject, ()))},
            moments,
            about=f"{told.name}: {_model(info)}",
            measured=list(zip(*(values.tolist() for values in curve), strict=True)),
            image=seen.pixels,
        )
        paths += _written(film, Path(out).expanduser() / f"timeline-{subject}")
        if watch is not None:
            watch(done, whole)
    return paths


def _taken(run: Path) -> dict[int, Path]:
    """Snapshots by step: two or more, but not more than can be watched."""
    found = find_snapshots(RunFolder(run).snapshots)
    if len(found) < 2:
        have = f"has one snapshot only, of step {next(iter(found))}" if found else "has no snapshots"
        raise NotFoundError(
            f"{run} {have}, and a timeline needs two or more; train with snapshot_every='1 epoch' "
            "(a run that is resumed takes it too)."
        )
    if len(found) <= MOST:
        return found
    warn_once([f"{run} has {len(found)} snapshots; {MOST} of them are shown"])
    steps = np.array(list(found))[np.linspace(0, len(found) - 1, MOST).round().astype(int)]
    return {step: found[step] for step in steps.tolist()}


def _seen(run: Path, info: ModelInfo, image: ImageLike | None) -> Seen:
    """Images the run was measured on; an image of the user's own stands in where they are gone."""
    preprocess = Preprocess(info.preprocess)
    images, missing, first = None, "", image
    try:
        config = RunFolder(run).read_config()
        source = open_data(config.data, require_labels=config.objective != "masked-patch").validation
        some = np.unique(np.linspace(0, len(source) - 1, LOOKED_AT).round().astype(int))
        images = preprocess([source[int(i)].image for i in some])
        first = source[0].image if image is None else image
    except (OSError, TrainError, VitrailError) as error:
        missing = f"the images it was measured on cannot be read: {error}"
    if first is None:
        return Seen(missing=missing)
    one = preprocess(first)
    return Seen(one if images is None else images, one, shown(preprocess.pixels(first)), missing)


def _say_left_out(found: Frames, told: RunRecord, seen: Seen) -> None:
    known = {subject: seen.missing or why if why == NO_IMAGE else why for subject, why in found.left_out.items()}
    reasons = [f"{subject}: {why}" for subject, why in known.items()]
    if not found.subjects:
        raise ModelError(f"there is nothing to follow in {told.path}; {'; '.join(reasons)}")
    warn_once([f"left out {reason}" for reason in reasons], about=str(told.path))


def _moment(told: RunRecord, step: int, curve: Curve, last: int) -> Moment:
    whole = told.steps_per_epoch or 1.0
    places, scores = curve
    near = np.flatnonzero(np.abs(places * whole - step) <= NEAR * last)
    return Moment(step, step / whole if told.steps_per_epoch else None, float(scores[near[-1]]) if len(near) else None)


def _model(info: ModelInfo) -> str:
    """ViT, 28 px in patches of 4."""
    size = "×".join(map(str, dict.fromkeys(pair(info.config.image_size))))
    patch = getattr(info.config, "patch_size", None)
    return f"{info.family}, {size} px" + (f" in patches of {pair(patch)[0]}" if patch else "")


def _written(film: Film, stem: Path) -> list[Path]:
    strip, moments = draw_strip(film), film.moments
    numbers = dict(film.arrays) | {
        "step": np.array([m.step for m in moments], dtype=float),
        "epoch": np.array([np.nan if m.epoch is None else m.epoch for m in moments]),
        "score": np.array([np.nan if m.score is None else m.score for m in moments]),
    }
    return [
        draw_animation(film, stem.with_suffix(".gif")),
        save(strip, stem.with_suffix(".png")),
        save(strip, stem.with_suffix(".svg")),
        save_arrays(numbers, stem.with_suffix(".npz")),
    ]
