"""Tries a new version of a model on images before it answers requests, and compares it with the version in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.config import DataConfig
from vitrail.data.decode import ImageLike
from vitrail.data.sources.base import IMAGE_EXTENSIONS
from vitrail.data.sources.source_factory import open_source_splits
from vitrail.errors import ConfigError, VitrailError
from vitrail.serve.model_folder import ModelSettings
from vitrail.serve.served_model import Floats, ServedModel
from vitrail.serve.static_files import WEB_DIR

# B images, K outputs

MAX_IMAGES = 256
"""Canary images in use; of more, as many are taken, evenly spaced."""
BATCH = 8
DEFAULT_DROP = 1.0
"""Allowed loss of top-1 accuracy, in percentage points."""


class CanaryError(VitrailError):
    """The new version must not replace the version in use; the message says why."""


@dataclass(frozen=True)
class CanaryImage:
    """An image, with its class if it is known."""

    image: ImageLike
    label: str | None = None


@dataclass(frozen=True)
class CanaryReport:
    """What trying a version on images showed."""

    images: int
    compared_with: str | None = None
    """The version that was in use."""
    agreement: float | None = None
    """Fraction of the images for which both versions have the same top class."""
    accuracy: float | None = None
    """Top-1 accuracy of the new version on the images whose classes both know."""
    previous_accuracy: float | None = None
    """The same of the version in use."""

    def describe(self) -> str:
        """One phrase for the log."""
        parts = [f"finite outputs on {self.images} images"]
        if self.agreement is not None:
            parts.append(f"{self.agreement:.1%} agreement with version {self.compared_with}")
        if self.accuracy is not None:
            before = "" if self.previous_accuracy is None else f", before {self.previous_accuracy:.1%}"
            parts.append(f"accuracy {self.accuracy:.1%}{before}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_canary(folder: Path | None, spec: str | None) -> list[CanaryImage]:
    """The images of a model's canary folder, of --canary, or a few samples that ship with vitrail."""
    if folder is not None:
        images = _read_folder(folder)
    elif spec is not None and Path(spec).expanduser().is_dir():
        images = _read_folder(Path(spec).expanduser())
    elif spec is not None:
        images = _read_source(spec)
    else:
        return [CanaryImage(path) for path in sorted((WEB_DIR / "samples").glob("*.jpg"))]
    if not images:
        raise CanaryError(f"there are no images in {folder or spec}; add some, or remove it.")
    return images


def _read_folder(folder: Path) -> list[CanaryImage]:
    """The images of a folder; those in a subfolder have its name as their class."""
    paths = sorted(
        path for path in [*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")] if path.suffix.lower() in IMAGE_EXTENSIONS
    )
    return [CanaryImage(path, None if path.parent == folder else path.parent.name) for path in _spread(paths)]


def _read_source(spec: str) -> list[CanaryImage]:
    """Images of a data set, such as cifar10 or table:labels.csv."""
    source = open_source_splits(DataConfig(source=spec), require_labels=False).evaluation_source
    if not hasattr(source, "__len__"):
        raise ConfigError(f"--canary {spec} is a stream; expected a folder or data set with a length.")
    images = []
    for index in _spread(range(len(source))):
        sample = source[index]
        known = isinstance(sample.target, int) and 0 <= sample.target < len(source.labels)
        images.append(CanaryImage(sample.image, source.labels[sample.target] if known else None))  # type: ignore[index]
    return images


def _spread(items: Sequence[Any]) -> list[Any]:
    """At most MAX_IMAGES items, evenly spaced."""
    if len(items) <= MAX_IMAGES:
        return list(items)
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, MAX_IMAGES)]


def check_classes(new: ServedModel, old: ServedModel, settings: ModelSettings, images: Sequence[CanaryImage]) -> None:
    """Raise CanaryError if clients of the version in use would misread the answers of the new one."""
    if settings.classes == "any":
        return
    advice = '; if that is intended, put {"classes": "any"} into serving.json beside the versions.'
    if new.classifies != old.classifies:
        kinds = ("features", "classes")
        raise CanaryError(f"it outputs {kinds[new.classifies]}, the version in use {kinds[old.classifies]}{advice}")
    if not new.classifies:
        mine, theirs = (run_on(served, images[:1]).shape[1] for served in (new, old))
        if mine != theirs:
            raise CanaryError(f"its features have {mine:,} numbers, those of the version in use {theirs:,}{advice}")
        return
    mine, theirs = new.info.config.num_classes, old.info.config.num_classes
    if mine < theirs:
        raise CanaryError(f"it has {mine:,} classes, the version in use {theirs:,}{advice}")
    for index, (label, before) in enumerate(zip(new.info.labels or (), old.info.labels or (), strict=False)):
        if label != before:
            raise CanaryError(
                f"its class {index} is {label[:60]!r}, that of the version in use {before[:60]!r}{advice}"
            )


def check_outputs(
    new: ServedModel,
    images: Sequence[CanaryImage],
    old: ServedModel | None,
    old_version: str | None,
    max_drop: float,
) -> CanaryReport:
    """Run the new version on the images and compare it with the version in use.

    Raises CanaryError if its outputs are not finite or the same for every image, or if its top-1 accuracy is lower by
    more than `max_drop` percentage points.
    """
    outputs = run_on(new, images)
    if not np.isfinite(outputs).all():
        bad = int((~np.isfinite(outputs).all(1)).sum())
        raise CanaryError(f"its outputs for {bad} of {len(images)} canary images are not finite.")
    if new.has_features and not new.outputs_features:
        features = run_on(new, images[:BATCH], "features")
        if not np.isfinite(features).all():
            raise CanaryError("its features for the canary images are not finite.")
    if len(outputs) > 1 and np.ptp(outputs, axis=0).max() <= 1e-6 * max(float(np.abs(outputs).max()), 1e-30):
        raise CanaryError(f"its outputs are the same for all {len(images)} canary images.")
    if not new.classifies:
        return CanaryReport(len(images))
    top = _top_labels(new, outputs)
    if old is None or not old.classifies:
        return CanaryReport(len(images), accuracy=_accuracy(top, images, set(new.info.labels or ())))
    before = _top_labels(old, run_on(old, images))
    both = set(new.info.labels or ()) & set(old.info.labels or ())
    report = CanaryReport(
        len(images),
        old_version,
        sum(a == b for a, b in zip(top, before, strict=True)) / len(images),
        _accuracy(top, images, both),
        _accuracy(before, images, both),
    )
    _check_accuracy(report, max_drop)
    return report


def _check_accuracy(report: CanaryReport, max_drop: float) -> None:
    if report.accuracy is None or report.previous_accuracy is None:
        return
    drop = 100 * (report.previous_accuracy - report.accuracy)
    if drop > max_drop + 1e-9:
        raise CanaryError(
            f"its accuracy on the canary images is {report.accuracy:.1%}, that of version {report.compared_with} "
            f"{report.previous_accuracy:.1%}; {drop:.1f} points less, at most {max_drop:g} are allowed."
        )


def run_on(served: ServedModel, images: Sequence[CanaryImage], want: Any = "logits") -> Floats:
    """Outputs for the images, B K."""
    batches = []
    for start in range(0, len(images), BATCH):
        pixels = [served.preprocess.pixels(one.image) for one in images[start : start + BATCH]]
        batches.append(served.outputs(np.stack(pixels), want))
    return np.concatenate(batches)


def _top_labels(served: ServedModel, outputs: npt.NDArray[Any]) -> list[str]:
    """Name (or number) of the top class of each image."""
    labels = served.info.labels
    return [str(index) if labels is None else labels[index] for index in outputs.argmax(1).tolist()]


def _accuracy(top: Sequence[str], images: Sequence[CanaryImage], known: set[str]) -> float | None:
    """Top-1 accuracy on the images whose class is known; None if there are none."""
    right = [name == one.label for name, one in zip(top, images, strict=True) if one.label in known]
    return sum(right) / len(right) if right else None
