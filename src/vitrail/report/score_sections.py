"""Sections about accuracy: headline, comparison, confusion matrix, per-class scores, example images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from vitrail.evaluation.scores import Scores
from vitrail.report.charts import ticks
from vitrail.report.formatting import format_interval, format_number, format_percent, format_tick_percent, pluralize
from vitrail.report.markup import Markup, join, tag
from vitrail.report.report_data import (
    ClassScore,
    ReportData,
    class_scores,
    confused_pairs,
    most_confident_errors,
    typical_correct,
)
from vitrail.report.thumbnails import img, thumbnail

MAX_MATRIX_CLASSES = 25
"""Number of classes up to which the whole confusion matrix is shown."""
MAX_BARS = 40
"""Number of classes up to which every class has a bar; with more, only the worst."""
NUM_WORST = 16
SHORT_NAME_LENGTH = 4
"""Length of class names up to which columns can be narrow."""
NUM_MISTAKES, NUM_CORRECT = 24, 14

SPLIT_NAMES = {"test": "test", "validation": "validation", "held out": "held-out"}
"""`Splits.eval_split` -> adjective."""


def headline_scores(report: ReportData) -> dict[str, Any] | None:
    """The scores on the images that are shown: those of the final model, or else the last evaluation of the run."""
    return report.scores.to_dict() if report.scores is not None else report.run.last_scores


def headline(report: ReportData) -> Markup:
    """The main result in one sentence, with its interval below."""
    scores, split = headline_scores(report), SPLIT_NAMES.get(report.measured_on, report.measured_on)
    if scores is None or scores.get("top1") is None:
        return _loss_headline(report, scores)
    if report.run.test_scores is None:
        selected = report.measured_on != "test" and report.run.config.get("keep") in ("auto", "best")
        caveat = "The weights were selected on these images, so accuracy on new images may be slightly lower."
        return _accuracy_headline(report, scores, split, caveat if selected else "")
    name = "map" if scores.get("map") is not None else "top1"
    count = int(scores["count"])
    other = f"On {pluralize(count, f'{split} image')}: {format_percent(scores[name], count)}."
    return _accuracy_headline(report, report.run.test_scores, "test", other)


def _accuracy_headline(report: ReportData, scores: dict[str, Any], split: str, more: str) -> Markup:
    count = int(scores["count"])
    images = pluralize(count, f"{split} image")
    if scores.get("map") is not None:
        classes = pluralize(len(report.labels), "class", "classes")
        first = tag("strong", format_percent(scores["map"], count))
        sentence = tag("p", first, f" mean average precision over {classes} ({images}).", cls="headline")
        return join(sentence, tag("p", more, cls="sub") if more else None)
    first = tag("strong", format_percent(scores["top1"], count))
    sentence = tag("p", first, f" top-1 accuracy ({images}).", cls="headline")
    details = [f"95 % interval: {format_interval(scores['low'], scores['high'], count)}."]
    if len(report.labels) > 10:
        details.append(f"Top-5 accuracy: {format_percent(scores['top5'], count)}.")
    return join(sentence, tag("p", " ".join([*details, more]).strip(), cls="sub"))


def _loss_headline(report: ReportData, scores: dict[str, Any] | None) -> Markup:
    """The final training loss, if there is no accuracy."""
    _, losses = report.run.training_curve("loss")
    if not len(losses):
        return tag("p", "Nothing has been measured yet.", cls="headline")
    start = f" (from {format_number(losses[0])} at the start)" if len(losses) > 1 else ""
    sentence = tag("p", tag("strong", format_number(losses[-1])), f" training loss{start}.", cls="headline")
    if scores is None or scores.get("loss") is None:
        return sentence
    split = SPLIT_NAMES.get(report.measured_on, report.measured_on)
    return join(sentence, tag("p", f"Loss on {split} images: {format_number(scores['loss'])}.", cls="sub"))


def comparison_section(report: ReportData) -> Markup:
    """This model, baselines and other runs on one axis, each with its interval."""
    own = headline_scores(report)
    if own is None or own.get("top1") is None or own.get("map") is not None:
        return Markup("")
    rows: list[tuple[str, dict[str, Any], str]] = [("this model", own, "run0")]
    if report.run.test_scores is not None:  # baselines and other runs were measured on the same split as `own`
        split = SPLIT_NAMES.get(report.measured_on, report.measured_on)
        rows = [("this model, test", report.run.test_scores, "run0"), (f"this model, {split}", own, "run0")]
    rows += [(name, baseline.to_dict(), "baseline") for name, baseline in report.baselines.items()]
    others = [(name, run.last_scores) for name, run in report.other_runs.items()]
    rows += [
        (name, scores, f"run{1 + i % 3}")
        for i, (name, scores) in enumerate(others)
        if scores and scores.get("top1") is not None
    ]
    if len(rows) < 2:
        return Markup("")
    low = min(scores["top1"] if scores.get("low") is None else scores["low"] for _, scores, _ in rows)
    start = max(math.floor(low * 20 - 0.5) / 20, 0.0)
    axis = [
        tag("span", format_tick_percent(m), style=f"left:{_axis_percent(m, start):.2f}%") for m in ticks(start, 1.0, 5)
    ]
    lines = [_forest_row(name, scores, cls, start) for name, scores, cls in rows]
    return tag("div", *lines, tag("div", tag("div", *axis, cls="track"), cls="forest-axis"), cls="forest")


def _axis_percent(fraction: float, start: float) -> float:
    return 100 * (fraction - start) / (1 - start)


def _forest_row(name: str, scores: dict[str, Any], cls: str, start: float) -> Markup:
    top1, count = scores["top1"], scores.get("count")
    low, high = scores.get("low"), scores.get("high")
    parts, text = [], format_percent(top1, count)
    if low is not None and high is not None:
        left, right = _axis_percent(low, start), _axis_percent(high, start)
        text += f", 95 % interval {format_interval(low, high, count)}"
        parts.append(tag("span", cls="whisker", style=f"left:{left:.2f}%;width:{right - left:.2f}%"))
    parts.append(tag("span", cls="dot", style=f"left:{_axis_percent(top1, start):.2f}%"))
    return tag(
        "div",
        tag("span", name, cls="who"),
        tag("div", *parts, cls="track", role="img", aria_label=f"{name}: {text}"),
        tag("span", format_percent(top1, count), cls="much"),
        cls=f"forest-row {cls}",
    )


def confusion_section(report: ReportData) -> Markup:
    """The confusion matrix if it is small enough; otherwise the most frequently confused pairs."""
    scores = report.scores
    assert scores is not None
    if (
        scores.confusion is not None
        and 2 <= len(scores.confusion) <= MAX_MATRIX_CLASSES
        and len(report.labels) == len(scores.confusion)
    ):
        split = SPLIT_NAMES.get(report.measured_on, report.measured_on)
        text = f"Rows: true class. Columns: predicted class. {pluralize(scores.count, f'{split} image')}."
        note = tag("p", text, cls="caption")
        return join(note, tag("div", _matrix(report, scores), cls="scroll"))
    return confused_pairs_section(report)


def wide_matrix(report: ReportData) -> bool:
    """Whether the matrix needs the whole page width, because half of it would cut off columns with long names."""
    return 10 < len(report.labels) <= MAX_MATRIX_CLASSES and _has_long_names(report)


def _has_long_names(report: ReportData) -> bool:
    return max(map(len, report.labels)) > SHORT_NAME_LENGTH


def _matrix(report: ReportData, scores: Scores) -> Markup:
    table = scores.confusion
    assert table is not None
    wrong = max((int(table[i, j]) for i in range(len(table)) for j in range(len(table)) if i != j), default=1) or 1
    head = tag(
        "tr",
        tag("th"),
        *(
            tag("th", tag("span", report.short_label(k)), scope="col", title=name)
            for k, name in enumerate(report.labels)
        ),
    )
    rows = []
    for i, name in enumerate(report.labels):
        total = int(table[i].sum())
        cells = [_cell(report, i, j, int(table[i, j]), total, wrong) for j in range(len(table))]
        rows.append(tag("tr", tag("th", report.short_label(i), scope="row", title=name), *cells))
    return tag(
        "table", tag("thead", head), tag("tbody", *rows), cls="matrix named" if _has_long_names(report) else "matrix"
    )


def _cell(report: ReportData, i: int, j: int, count: int, total: int, wrong: int) -> Markup:
    """Correct predictions in one color by their fraction, errors in another that makes a single one visible."""
    if not count:
        return tag("td", tag("span", "·", cls="none"))
    strength = 0.15 + 0.75 * count / max(total, 1) if i == j else 0.25 + 0.65 * count / max(wrong, 4)
    kind = "hit" if i == j else "miss"
    about = f"{report.label(i)} predicted as {report.label(j)}: {count} of {total}"
    deep = " deep" if strength > 0.5 else ""
    return tag("td", f"{count:,}", cls=f"{kind}{deep}", style=f"--a:{strength:.2f}", title=about)


def confused_pairs_section(report: ReportData) -> Markup:
    """The most frequently confused classes, as a list."""
    assert report.scores is not None
    confusions = confused_pairs(report.scores, NUM_WORST)
    if not confusions:
        return tag("p", "No two classes were confused.", cls="quiet")
    most = confusions[0][2]
    rows = [
        tag(
            "li",
            tag("span", tag("b", report.label(a)), " predicted as ", tag("b", report.label(b)), cls="pair"),
            tag("span", cls="bar miss", style=f"--w:{100 * n / most:.1f}%"),
            tag("span", f"{n:,} ×", cls="much"),
        )
        for a, b, n in confusions
    ]
    return join(tag("p", "Most frequent confusions:", cls="caption"), tag("ol", *rows, cls="pairs"))


def class_section(report: ReportData) -> Markup:
    """A bar for each class; with many classes, for the worst."""
    assert report.scores is not None
    all_classes = class_scores(report.scores)
    multi_label = report.scores.average_precisions is not None
    listed = all_classes
    if len(all_classes) > MAX_BARS:
        listed = sorted(all_classes, key=lambda c: (c.value, -c.count))[:NUM_WORST]
    rows = [_class_bar(report, c) for c in listed]
    short = max((len(report.label(c.index)) for c in listed), default=0) <= SHORT_NAME_LENGTH
    metric = "average precision" if multi_label else "recall, with its 95 % interval"
    which = f"The {len(listed)} worst of {len(all_classes)} classes" if len(listed) < len(all_classes) else "By class"
    note = f"{which}: {metric}."
    return join(tag("p", note, cls="caption"), tag("div", *rows, cls="bars narrow" if short else "bars"))


def _class_bar(report: ReportData, score: ClassScore) -> Markup:
    name = report.label(score.index)
    track = [tag("span", cls="fill", style=f"width:{100 * score.value:.1f}%")]
    if score.low is not None and score.high is not None:
        width = 100 * (score.high - score.low)
        track.append(tag("span", cls="whisker", style=f"left:{100 * score.low:.1f}%;width:{width:.1f}%"))
    return tag(
        "div",
        tag("span", report.short_label(score.index), cls="who", title=name),
        tag("div", *track, cls="track"),
        tag("span", f"{100 * score.value:.0f} %", cls="much"),
        tag("span", f"of {score.count:,}", cls="of"),
        cls="bar-row",
    )


def mistake_section(report: ReportData) -> Markup:
    """The errors with the highest confidence."""
    samples, cards = report.samples, []
    if samples is None:
        return Markup("")
    for mistake in most_confident_errors(samples, NUM_MISTAKES):
        truth, predicted = report.true_labels(samples, mistake.row), report.short_label(mistake.predicted)
        true_label = tag("span", "true: ", tag("b", truth), cls="truth")
        about, index = f"{truth}, predicted as {predicted}", int(samples.index[mistake.row])
        cards.append(_card(report, index, predicted, mistake.score, about, true_label, "wrong"))
    note = "Preprocessed images with the predicted class and its probability."
    return _gallery(cards, note) or tag("p", "There are none to show.", cls="quiet")


def correct_section(report: ReportData) -> Markup:
    """Typical correct predictions."""
    samples, cards = report.samples, []
    if samples is None:
        return Markup("")
    for row in typical_correct(samples, NUM_CORRECT):
        predicted, truth = report.short_label(int(samples.prediction[row])), report.true_labels(samples, row)
        index, score = int(samples.index[row]), float(samples.score[row])
        true_label = tag("span", "true: ", tag("b", truth), cls="truth") if truth != predicted else None
        cards.append(_card(report, index, predicted, score, f"{predicted}, correct", true_label, "right"))
    note = "The prediction is one of the image's classes." if report.multi_label else None
    return _gallery(cards, note, "gallery small")


def _gallery(cards: Iterable[Markup], note: str | None, cls: str = "gallery") -> Markup:
    """The cards that have an image, under a note; nothing if there are none."""
    cards = [card for card in cards if card]
    caption = tag("p", note, cls="caption") if note else None
    return join(caption, tag("div", *cards, cls=cls)) if cards else Markup("")


def _card(
    report: ReportData, index: int, name: str, score: float, about: str, true_label: Markup | None, cls: str
) -> Markup:
    pixels = report.pixels(index)
    if pixels is None:
        return Markup("")
    label = tag("span", name, cls="predicted")
    probability = tag("span", f"{100 * score:.0f} %", cls="much")
    text = tag("figcaption", label, probability, true_label)
    return tag("figure", img(thumbnail(pixels), about), text, cls=f"card {cls}", title=report.key(index))
