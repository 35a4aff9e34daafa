"""The snapshots of a run as animations and as strips of frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from vitrail.config import pair
from vitrail.config.train import SELF_SUPERVISED
from vitrail.data.decode import ImageLike
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.errors import ModelError, NotFoundError, TrainError, VitrailError
from vitrail.explain.animation import MATCH_TOLERANCE, Timeline, draw_animation, draw_strip
from vitrail.explain.canvas import save, save_arrays
from vitrail.explain.overlays import Pixels, as_rgb
from vitrail.explain.timeline import NO_IMAGE, SUBJECTS, Frames, Snapshot, compute_frames
from vitrail.models import Net
from vitrail.runs.run_folder import RunFolder
from vitrail.runs.run_record import Curve, RunRecord, read_run
from vitrail.runtime import warn_once
from vitrail.training.snapshots import find_snapshots
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo

MAX_FRAMES = 60
"""Maximum number of frames; with more snapshots, evenly spaced ones are used."""
NUM_DISTANCE_IMAGES = 32
"""Number of images for the mean attention distance."""
EXTRA_ARRAYS = {"filters": ("shares",), "distances": ("uniform",)}
"""Additional arrays of a subject."""

ProgressCallback = Callable[[int, int], object]
"""Called with the number of finished and of all parts of the work."""


@dataclass(frozen=True)
class TimelineImages:
    """Preprocessed images for attention distances and rollout, or the reason why there are none."""

    images: Tensor | None = None
    """B C H W."""
    image: Tensor | None = None
    """1 C H W."""
    pixels: Pixels | None = None
    """The same image as RGB."""
    missing: str = ""


def draw_timelines(
    run: str | Path,
    out: str | Path,
    what: Sequence[str] = (),
    *,
    image: ImageLike | None = None,
    on_progress: ProgressCallback | None = None,
) -> list[Path]:
    """Draw the development of a model over the snapshots of its run: `draw_timelines("runs/digits", "figures")`.

    For each subject in `what` ("positions", "filters", "distances", "rollout"; default all) writes
    timeline-SUBJECT.gif, a strip of frames (.png, .svg) and the data (.npz) to `out`. The rollout is that of `image`,
    or of the first evaluation image. Subjects that do not apply to the model are skipped with a note.
    """
    record = read_run(Path(run).expanduser())
    paths_by_step = _choose_snapshots(record.path)
    _, info = checkpoint.read(paths_by_step[max(paths_by_step)])
    inputs = (
        _timeline_images(record.path, info, image)
        if not what or {"distances", "rollout"} & set(what)
        else TimelineImages()
    )
    total, done = len(paths_by_step) + len(what or SUBJECTS), 0

    def nets_with_progress() -> Iterator[Net]:
        nonlocal done
        for path in paths_by_step.values():
            yield checkpoint.read(path)[0]
            done += 1
            if on_progress is not None:
                on_progress(done, total)

    frames = compute_frames(nets_with_progress(), what, images=inputs.images, image=inputs.image)
    _report_skipped(frames, record, inputs)
    curve = record.evaluation_curve("map" if record.multi_label else "top1", ema=record.has_ema)
    snapshots = [_snapshot_at(record, step, curve, max(paths_by_step)) for step in paths_by_step]
    paths: list[Path] = []
    for done, subject in enumerate(frames.subjects, start=len(paths_by_step) + 1):
        subject_timeline = Timeline(
            subject,
            {name: frames.arrays[name] for name in (subject, *EXTRA_ARRAYS.get(subject, ()))},
            snapshots,
            about=f"{record.name}: {_model(info)}",
            measured=list(zip(*(values.tolist() for values in curve), strict=True)),
            image=inputs.pixels,
        )
        paths += _write(subject_timeline, Path(out).expanduser() / f"timeline-{subject}")
        if on_progress is not None:
            on_progress(done, total)
    return paths


def _choose_snapshots(run: Path) -> dict[int, Path]:
    """Snapshots by step: at least two, at most MAX_FRAMES."""
    found = find_snapshots(RunFolder(run).snapshots)
    if len(found) < 2:
        state = f"has only one snapshot, of step {next(iter(found))}" if found else "has no snapshots"
        raise NotFoundError(
            f"{run} {state}; a timeline needs two or more. Train with snapshot_every='1 epoch' "
            "(also possible when a run is resumed)."
        )
    if len(found) <= MAX_FRAMES:
        return found
    warn_once([f"{run} has {len(found)} snapshots; {MAX_FRAMES} of them are shown"])
    steps = np.array(list(found))[np.linspace(0, len(found) - 1, MAX_FRAMES).round().astype(int)]
    return {step: found[step] for step in steps.tolist()}


def _timeline_images(run: Path, info: ModelInfo, image: ImageLike | None) -> TimelineImages:
    """Evaluation images of the run; if they are gone, `image` replaces them."""
    preprocess = Preprocess(info.preprocess)
    images, missing, first = None, "", image
    try:
        config = RunFolder(run).read_config()
        source = open_data(config.data, require_labels=config.objective not in SELF_SUPERVISED).validation
        indices = np.unique(np.linspace(0, len(source) - 1, NUM_DISTANCE_IMAGES).round().astype(int))
        images = preprocess([source[int(i)].image for i in indices])
        first = source[0].image if image is None else image
    except (OSError, TrainError, VitrailError) as error:
        missing = f"the evaluation images cannot be read: {error}"
    if first is None:
        return TimelineImages(missing=missing)
    one = preprocess(first)
    return TimelineImages(one if images is None else images, one, as_rgb(preprocess.pixels(first)), missing)


def _report_skipped(frames: Frames, record: RunRecord, inputs: TimelineImages) -> None:
    known = {subject: inputs.missing or why if why == NO_IMAGE else why for subject, why in frames.skipped.items()}
    reasons = [f"{subject}: {why}" for subject, why in known.items()]
    if not frames.subjects:
        raise ModelError(f"no timeline can be drawn for {record.path}; {'; '.join(reasons)}")
    warn_once([f"skipped {reason}" for reason in reasons], about=str(record.path))


def _snapshot_at(record: RunRecord, step: int, curve: Curve, last: int) -> Snapshot:
    steps_per_epoch = record.steps_per_epoch or 1.0
    epochs, scores = curve
    near = np.flatnonzero(np.abs(epochs * steps_per_epoch - step) <= MATCH_TOLERANCE * last)
    return Snapshot(
        step, step / steps_per_epoch if record.steps_per_epoch else None, float(scores[near[-1]]) if len(near) else None
    )


def _model(info: ModelInfo) -> str:
    """Such as `ViT, 28 px, 4 px patches`."""
    size = "×".join(map(str, dict.fromkeys(pair(info.config.image_size))))
    patch = getattr(info.config, "patch_size", None)
    return f"{info.family}, {size} px" + (f", {pair(patch)[0]} px patches" if patch else "")


def _write(timeline: Timeline, stem: Path) -> list[Path]:
    strip, snapshots = draw_strip(timeline), timeline.snapshots
    numbers = dict(timeline.arrays) | {
        "step": np.array([m.step for m in snapshots], dtype=float),
        "epoch": np.array([np.nan if m.epoch is None else m.epoch for m in snapshots]),
        "score": np.array([np.nan if m.score is None else m.score for m in snapshots]),
    }
    return [
        draw_animation(timeline, stem.with_suffix(".gif")),
        save(strip, stem.with_suffix(".png")),
        save(strip, stem.with_suffix(".svg")),
        save_arrays(numbers, stem.with_suffix(".npz")),
    ]
