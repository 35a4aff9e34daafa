"""The figures and files that `vitrail eval --out` writes.

reliability    accuracy by confidence
sizes          accuracy at each image size, with its interval
confusion      confusion matrix; with many classes, the most frequently confused pairs
classes        recall by class; with many classes, the worst
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitrail.data.csv_escape import csv_line
from vitrail.errors import ConfigError, did_you_mean
from vitrail.evaluation.intervals import Estimate
from vitrail.evaluation.per_class import confused_pairs, partial_confusion
from vitrail.evaluation.scores import wilson_interval
from vitrail.evaluation.summary import Evaluation, SizeResult
from vitrail.explain.canvas import COLORS, FAINT, INK, QUIET, Arrays, new_figure, save, save_arrays, set_title
from vitrail.explain.label_text import truncate, unique_abbreviations
from vitrail.report.png_figures import draw_counts
from vitrail.storage.atomic_write import write_json, write_text

FORMATS = ("png", "svg", "npz")
MAX_MATRIX_CLASSES = 25
"""Number of classes up to which the whole confusion matrix is drawn."""
MAX_BARS = 30
"""Maximum number of bars in a figure."""
MAX_NAME_LENGTH = 28
"""Characters of a class name that fit next to a figure."""

FigureData = tuple[Figure, Arrays]


def write_evaluation(found: Evaluation, folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Write the figures, eval.json, per_class.csv and predictions.csv, and replace existing files of these names."""
    check_formats(formats)
    written = []
    for name, draw in FIGURES.items():
        drawn = draw(found)
        if drawn is None:
            continue
        figure, arrays = drawn
        for kind in formats:
            path = folder / f"{name}.{kind}"
            written.append(save_arrays(arrays, path) if kind == "npz" else save(figure, path))
    texts = {"per_class.csv": _per_class_csv(found), "predictions.csv": _predictions_csv(found)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "eval.json", found.to_dict(), overwrite=True)
    for name, rows in texts.items():
        write_text(folder / name, rows, overwrite=True)
    return [*written, folder / "eval.json", *(folder / name for name in texts)]


def check_formats(formats: Sequence[str]) -> None:
    """Raise an error for an unknown figure format."""
    for kind in formats:
        if kind not in FORMATS:
            raise ConfigError(f"unknown figure format {kind!r}{did_you_mean(kind, FORMATS)}")


def reliability(found: Evaluation) -> FigureData | None:
    """A bar for the accuracy of each bin; a perfectly calibrated model lies on the diagonal."""
    table = found.calibration
    if table is None:
        return None
    figure = new_figure(5.2, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    nonempty = table.counts > 0
    width = np.diff(table.edges)[0]
    right = np.rint(table.accuracy[nonempty] * table.counts[nonempty])
    whiskers = np.array([wilson_interval(r, n) for r, n in zip(right, table.counts[nonempty], strict=True)]).T
    upper.plot([0, 1], [0, 1], color=QUIET, linestyle=":", linewidth=1.2, zorder=1)
    middles = (table.edges[:-1] + width / 2)[nonempty]
    upper.bar(middles, table.accuracy[nonempty], 0.94 * width, color=COLORS[0], alpha=0.25, zorder=0)
    whiskers = np.abs(whiskers - table.accuracy[nonempty])
    style: dict[str, Any] = {"fmt": "o", "color": COLORS[0], "markersize": 5, "elinewidth": 1.2, "zorder": 2}
    upper.errorbar(table.confidence[nonempty], table.accuracy[nonempty], whiskers, **style)
    upper.set(ylim=(0, 1.02), xlim=(0, 1.02), ylabel="accuracy")
    lower.bar(middles, table.counts[nonempty], 0.94 * width, color=QUIET, alpha=0.5)
    lower.set(xlabel="confidence", ylabel="images")
    for ax in (upper, lower):
        _style_axes(ax)
    set_title(figure, f"Calibration error {_format_estimate(table.error)}", _subtitle(found, found.first))
    arrays = {"edges": table.edges, "counts": table.counts, "confidence": table.confidence, "accuracy": table.accuracy}
    return figure, {**arrays, "ece": [table.error.value, table.error.low, table.error.high]}


def accuracy_by_size(found: Evaluation) -> FigureData | None:
    """Top-1 (mAP for multi-label data) by image size."""
    if len(found.sizes) < 2:
        return None
    ordered = sorted(found.sizes, key=lambda m: (m.image_size[0] * m.image_size[1], m.image_size))
    multi_label = found.multi_label
    estimates = [m.mean_average_precision if multi_label else m.top1 for m in ordered]
    measured = [(m, e) for m, e in zip(ordered, estimates, strict=True) if e is not None]
    if not measured:
        return None
    x = np.array([np.sqrt(m.image_size[0] * m.image_size[1]) for m, _ in measured])
    value, low, high = (100 * np.array([getattr(e, name) for _, e in measured]) for name in ("value", "low", "high"))
    figure = new_figure(6.2, 4.2)
    ax = figure.subplots()
    ax.fill_between(x, low, high, color=COLORS[0], alpha=0.13, linewidth=0)
    ax.plot(x, value, color=COLORS[0], marker="o", markersize=5, linewidth=2)
    names = [_format_size(m) for m, _ in measured]
    for at, height in zip(x, value, strict=True):
        ax.annotate(f"{height:.1f}", (at, height), (0, 7), textcoords="offset points", ha="center", color=INK)
    ax.set_xticks(x, names)
    ax.set(xlabel="image size, pixels", ylabel="mAP, %" if multi_label else "top-1, %")
    ax.margins(x=0.07, y=0.18)
    _style_axes(ax)
    what = "Mean average precision" if multi_label else "Accuracy"
    set_title(figure, f"{what} by image size, with its 95 % interval", _subtitle(found))
    return figure, {
        "image_size": np.array([m.image_size for m, _ in measured]),
        "value": value,
        "low": low,
        "high": high,
    }


def confusion(found: Evaluation) -> FigureData | None:
    """The confusion matrix of the classes with images; with many classes, the most frequent confusions."""
    samples, present = found.first.samples, found.first.per_class.present
    if samples.truth.ndim != 1 or len(present) < 2:
        return None
    if len(present) > MAX_MATRIX_CLASSES:
        return _confused_pairs_figure(found)
    table = partial_confusion(samples, present.tolist())
    if not table[:, -1].any():
        table = table[:, :-1]
    names = unique_abbreviations([found.labels[k] for k in present], MAX_NAME_LENGTH)
    side = 1.9 + 0.36 * len(present)
    figure = new_figure(side + 1.2, side + 0.5)
    ax = draw_counts(figure, table, names, [*names, "others"][: table.shape[1]])
    ax.tick_params(colors=INK)
    set_title(figure, "Confusion matrix", _subtitle(found, found.first))
    return figure, {"confusion": table, "classes": present}


def _confused_pairs_figure(found: Evaluation) -> FigureData | None:
    pairs = confused_pairs(found.first.samples, MAX_BARS)
    if not pairs or pairs[0][2] < 2:  # no confusion occurred twice
        return None
    names = unique_abbreviations(found.labels, MAX_NAME_LENGTH)
    labels = [f"{names[a]} → {names[b]}" for a, b, _ in pairs]
    counts = np.array([n for _, _, n in pairs])
    figure = new_figure(7.6, 1.3 + 0.21 * len(pairs))
    ax = figure.subplots()
    ax.barh(labels, counts, color=COLORS[1], height=0.66)
    ax.invert_yaxis()
    ax.set_xlabel("images", color=INK)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _style_axes(ax, horizontal=True)
    set_title(figure, "Most frequent confusions: true → predicted", _subtitle(found, found.first))
    return figure, {"pairs": np.array([(a, b) for a, b, _ in pairs]), "counts": counts}


def classes(found: Evaluation) -> FigureData | None:
    """A bar for the recall of each class, with its interval; with many classes, the worst."""
    scored = found.first.per_class
    if len(scored.present) < 2 or scored.support.max() < 2:
        return None
    precise = scored.average_precision
    value = scored.recall if precise is None else precise
    few = len(scored.present) <= MAX_BARS
    shown = np.array(scored.present.tolist() if few else scored.worst(MAX_BARS))
    figure = new_figure(7.2, 1.4 + 0.21 * len(shown))
    ax = figure.subplots()
    names = unique_abbreviations([found.labels[k] for k in shown], MAX_NAME_LENGTH)
    labels = [f"{name} ({scored.support[k]:,})" for name, k in zip(names, shown, strict=True)]
    ax.barh(range(len(shown)), 100 * value[shown], color=COLORS[0], height=0.66)
    if precise is None:
        ends = 100 * np.array([wilson_interval(scored.correct[k], scored.support[k]) for k in shown]).T
        style: dict[str, Any] = {"fmt": "none", "ecolor": INK, "elinewidth": 1, "capsize": 2}
        ax.errorbar(100 * value[shown], range(len(shown)), xerr=np.abs(ends - 100 * value[shown]), **style)
    ax.set_yticks(range(len(shown)), labels)
    ax.invert_yaxis()
    ax.set(xlim=(0, 101), ylim=(len(shown) - 0.4, -0.6))
    what = "recall" if precise is None else "average precision"
    ax.set_xlabel(f"{what}, %", color=INK)
    _style_axes(ax, horizontal=True)
    which = "Each class" if few else f"The {len(shown)} worst of {len(scored.present):,} classes"
    set_title(figure, f"{which}: {what} (number of images)", _subtitle(found, found.first))
    return figure, {"classes": shown, "value": value[shown], "support": scored.support[shown]}


FIGURES: dict[str, Callable[[Evaluation], FigureData | None]] = {
    "reliability": reliability,
    "sizes": accuracy_by_size,
    "confusion": confusion,
    "classes": classes,
}


def _style_axes(ax: Any, horizontal: bool = False) -> None:
    """Faint grid, few lines."""
    ax.grid(axis="x" if horizontal else "y", color=FAINT, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(length=0, labelsize=8, colors=INK)
    ax.xaxis.label.set(color=INK, fontsize=9)
    ax.yaxis.label.set(color=INK, fontsize=9)


def _subtitle(found: Evaluation, measured: SizeResult | None = None) -> str:
    size = f" at {_format_size(measured)} px" if measured is not None else ""
    mirrored = ", averaged with mirror images" if found.flip else ""
    images = f"{found.first.scores.count:,} images"
    model = found.model.rpartition("/")[2] if found.model.startswith((".", "/", "~")) else found.model
    return f"{truncate(model, 44)} on {truncate(found.data, 30)}{size}{mirrored}, {images}"


def _format_estimate(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} % ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def _format_size(measured: SizeResult) -> str:
    height, width = measured.image_size
    return f"{height}" if height == width else f"{height}x{width}"


def _per_class_csv(found: Evaluation) -> str:
    """One row for each image size and class that has images or is predicted."""
    rows = []
    for measured in found.sizes:
        scored = measured.per_class
        listed = np.flatnonzero((scored.support > 0) | (scored.predicted > 0))
        rows += [{"image_size": _format_size(measured)} | scored.to_row(int(k), found.labels[k]) for k in listed]
    return _csv(rows)


def _predictions_csv(found: Evaluation) -> str:
    """One row for each image size and image."""
    return _csv(row for measured in found.sizes for row in _prediction_rows(found, measured))


def _prediction_rows(found: Evaluation, measured: SizeResult) -> Iterable[dict[str, Any]]:
    s, size, names = measured.samples, _format_size(measured), found.labels
    assert s.rank is not None
    assert s.loss is not None
    for i, index in enumerate(s.index.tolist()):
        truth = [int(s.truth[i])] if s.truth.ndim == 1 else np.flatnonzero(s.truth[i]).tolist()
        yield {
            "image_size": size,
            "key": found.keys[index],
            "truth": "|".join(names[k] for k in truth),
            "prediction": names[s.prediction[i]],
            "score": f"{s.score[i]:.6f}",
            "truth_score": f"{s.truth_score[i]:.6f}",
            "rank": int(s.rank[i]),
            "loss": f"{s.loss[i]:.6f}",
        }


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    lines: list[str] = []
    for row in rows:
        lines += [csv_line(row.values())] if lines else [csv_line(row), csv_line(row.values())]
    return "".join(lines)
