"""The sections about right and wrong: headline, comparison, confusion, classes, images."""

from __future__ import annotations

import math
from typing import Any

from vitrail.evaluate.scores import Scores
from vitrail.report.charts import ticks
from vitrail.report.images import img, thumbnail
from vitrail.report.markup import Markup, join, tag
from vitrail.report.story import ClassScore, Story, by_class, confused_pairs, some_right, surest_mistakes
from vitrail.report.words import between, counted, number, percent, short_percent

MATRIX = 25
"""Classes up to which the whole confusion matrix is shown."""
BARS = 40
"""Classes up to which each has a bar; of more, the worst."""
WORST = 16
SHORT = 4
"""Characters of class names that need no room of their own."""
MISTAKES, RIGHT = 24, 14

PLACES = {"test": "test", "validation": "validation", "held out": "held-out"}
"""What `Splits.eval_split` says -> an adjective."""


def found_of(story: Story) -> dict[str, Any] | None:
    """What was measured on the images that are shown: of the final model, else the run's last one."""
    return story.scores.to_dict() if story.scores is not None else story.run.result


def headline(story: Story) -> Markup:
    """The result in one sentence, and what stands beside it."""
    found, place = found_of(story), PLACES.get(story.measured_on, story.measured_on)
    if found is None or found.get("top1") is None:
        return _learned(story, found)
    if story.run.tested is None:
        chosen = story.measured_on != "test" and story.run.config.get("keep") in ("auto", "best")
        warned = "The weights were chosen on these same images, so new ones may do a little worse." if chosen else ""
        return _told(story, found, place, warned)
    name = "map" if found.get("map") is not None else "top1"
    other = counted(int(found["count"]), f"{place} image")
    return _told(story, story.run.tested, "test", f"On {other}: {percent(found[name], int(found['count']))}.")


def _told(story: Story, found: dict[str, Any], place: str, more: str) -> Markup:
    count = int(found["count"])
    images = counted(count, f"{place} image")
    if found.get("map") is not None:
        classes = counted(len(story.labels), "class", "classes")
        first = tag("strong", percent(found["map"], count))
        sentence = tag("p", first, f" mean average precision over {classes} on {images}.", cls="headline")
        return join(sentence, tag("p", more, cls="sub") if more else None)
    first = tag("strong", percent(found["top1"], count))
    sentence = tag("p", first, f" of {images} {'is' if count == 1 else 'are'} named correctly.", cls="headline")
    details = [f"With 95 % confidence, between {between(found['low'], found['high'], count, 'and')}."]
    if len(story.labels) > 10:
        details.append(f"The right class is among the first five for {percent(found['top5'], count)}.")
    return join(sentence, tag("p", " ".join([*details, more]).strip(), cls="sub"))


def _learned(story: Story, found: dict[str, Any] | None) -> Markup:
    """Where there is no accuracy: how far the loss came down."""
    _, losses = story.run.logged("loss")
    if not len(losses):
        return tag("p", "Nothing has been measured yet.", cls="headline")
    fell = f" is what the loss came to, from {number(losses[0])} at the start." if len(losses) > 1 else " is the loss."
    sentence = tag("p", tag("strong", number(losses[-1])), fell, cls="headline")
    if found is None or found.get("loss") is None:
        return sentence
    held = f"On {PLACES.get(story.measured_on, story.measured_on)} images it is {number(found['loss'])}."
    return join(sentence, tag("p", held, cls="sub"))


def comparison(story: Story) -> Markup:
    """This model, baselines and other runs on one axis, each with its interval."""
    own = found_of(story)
    if own is None or own.get("top1") is None or own.get("map") is not None:
        return Markup("")
    rows: list[tuple[str, dict[str, Any], str]] = [("this model", own, "run0")]
    if story.run.tested is not None:  # baselines and other runs were measured where `own` was
        place = PLACES.get(story.measured_on, story.measured_on)
        rows = [("this model, test", story.run.tested, "run0"), (f"this model, {place}", own, "run0")]
    rows += [(name, baseline.to_dict(), "baseline") for name, baseline in story.baselines.items()]
    others = [(name, run.result) for name, run in story.others.items()]
    rows += [
        (name, found, f"run{1 + i % 3}")
        for i, (name, found) in enumerate(others)
        if found and found.get("top1") is not None
    ]
    if len(rows) < 2:
        return Markup("")
    low = min(found["top1"] if found.get("low") is None else found["low"] for _, found, _ in rows)
    start = max(math.floor(low * 20 - 0.5) / 20, 0.0)
    axis = [tag("span", short_percent(m), style=f"left:{_place(m, start):.2f}%") for m in ticks(start, 1.0, 5)]
    lines = [_forest_row(name, found, cls, start) for name, found, cls in rows]
    return tag("div", *lines, tag("div", tag("div", *axis, cls="track"), cls="forest-axis"), cls="forest")


def _place(share: float, start: float) -> float:
    return 100 * (share - start) / (1 - start)


def _forest_row(name: str, found: dict[str, Any], cls: str, start: float) -> Markup:
    top1, count = found["top1"], found.get("count")
    low, high = found.get("low"), found.get("high")
    parts, words = [], percent(top1, count)
    if low is not None and high is not None:
        left, right = _place(low, start), _place(high, start)
        words += f", 95 % interval {between(low, high, count)}"
        parts.append(tag("span", cls="whisker", style=f"left:{left:.2f}%;width:{right - left:.2f}%"))
    parts.append(tag("span", cls="dot", style=f"left:{_place(top1, start):.2f}%"))
    return tag(
        "div",
        tag("span", name, cls="who"),
        tag("div", *parts, cls="track", role="img", aria_label=f"{name}: {words}"),
        tag("span", percent(top1, count), cls="much"),
        cls=f"forest-row {cls}",
    )


def confusion(story: Story) -> Markup:
    """The matrix where it can be read; else the pairs that are mixed up most."""
    scores = story.scores
    assert scores is not None
    if (
        scores.confusion is not None
        and 2 <= len(scores.confusion) <= MATRIX
        and len(story.labels) == len(scores.confusion)
    ):
        place = PLACES.get(story.measured_on, story.measured_on)
        words = f"In rows what {counted(scores.count, f'{place} image')} truly show, in columns what the model said."
        note = tag("p", words, cls="caption")
        return join(note, tag("div", _matrix(story, scores), cls="scroll"))
    return pairs(story)


def wide_matrix(story: Story) -> bool:
    """Whether the matrix needs the whole width of the page: in half of it, columns of named classes are cut off."""
    return 10 < len(story.labels) <= MATRIX and _named(story)


def _named(story: Story) -> bool:
    return max(map(len, story.labels)) > SHORT


def _matrix(story: Story, scores: Scores) -> Markup:
    table = scores.confusion
    assert table is not None
    wrong = max((int(table[i, j]) for i in range(len(table)) for j in range(len(table)) if i != j), default=1) or 1
    head = tag(
        "tr",
        tag("th"),
        *(tag("th", tag("span", story.brief(k)), scope="col", title=name) for k, name in enumerate(story.labels)),
    )
    rows = []
    for i, name in enumerate(story.labels):
        total = int(table[i].sum())
        cells = [_cell(story, i, j, int(table[i, j]), total, wrong) for j in range(len(table))]
        rows.append(tag("tr", tag("th", story.brief(i), scope="row", title=name), *cells))
    return tag("table", tag("thead", head), tag("tbody", *rows), cls="matrix named" if _named(story) else "matrix")


def _cell(story: Story, i: int, j: int, count: int, total: int, wrong: int) -> Markup:
    """Right answers in one color by their share, wrong ones in another, so strong that a single one is seen."""
    if not count:
        return tag("td", tag("span", "·", cls="none"))
    strength = 0.15 + 0.75 * count / max(total, 1) if i == j else 0.25 + 0.65 * count / max(wrong, 4)
    kind = "hit" if i == j else "miss"
    said = f"{story.label(i)} said to be {story.label(j)}: {count} of {total}"
    deep = " deep" if strength > 0.5 else ""
    return tag("td", f"{count:,}", cls=f"{kind}{deep}", style=f"--a:{strength:.2f}", title=said)


def pairs(story: Story) -> Markup:
    """The commonest mistakes by class, as a list."""
    assert story.scores is not None
    found = confused_pairs(story.scores, WORST)
    if not found:
        return tag("p", "No two classes were mixed up.", cls="quiet")
    most = found[0][2]
    rows = [
        tag(
            "li",
            tag("span", tag("b", story.label(a)), " said to be ", tag("b", story.label(b)), cls="pair"),
            tag("span", cls="bar miss", style=f"--w:{100 * n / most:.1f}%"),
            tag("span", f"{n:,} ×", cls="much"),
        )
        for a, b, n in found
    ]
    return join(tag("p", "Mixed up most often:", cls="caption"), tag("ol", *rows, cls="pairs"))


def classes(story: Story) -> Markup:
    """A bar for each class, or for the worst of many."""
    assert story.scores is not None
    found = by_class(story.scores)
    several = story.scores.average_precisions is not None
    kept = found
    if len(found) > BARS:
        kept = sorted(found, key=lambda c: (c.value, -c.count))[:WORST]
    rows = [_class_bar(story, c) for c in kept]
    short = max((len(story.label(c.index)) for c in kept), default=0) <= SHORT
    what = "average precision" if several else "share named correctly, with its 95 % interval"
    note = (
        f"The {len(kept)} weakest of {len(found)} classes: {what}." if len(kept) < len(found) else f"By class: {what}."
    )
    return join(tag("p", note, cls="caption"), tag("div", *rows, cls="bars narrow" if short else "bars"))


def _class_bar(story: Story, one: ClassScore) -> Markup:
    name = story.label(one.index)
    track = [tag("span", cls="fill", style=f"width:{100 * one.value:.1f}%")]
    if one.low is not None and one.high is not None:
        track.append(
            tag("span", cls="whisker", style=f"left:{100 * one.low:.1f}%;width:{100 * (one.high - one.low):.1f}%")
        )
    return tag(
        "div",
        tag("span", story.brief(one.index), cls="who", title=name),
        tag("div", *track, cls="track"),
        tag("span", f"{100 * one.value:.0f} %", cls="much"),
        tag("span", f"of {one.count:,}", cls="of"),
        cls="bar-row",
    )


def mistakes(story: Story) -> Markup:
    """The images the model was surest about and wrong."""
    samples = story.scores.samples if story.scores else None
    if samples is None:
        return Markup("")
    cards = []
    for mistake in surest_mistakes(samples, MISTAKES):
        truth, said = story.truth(samples, mistake.row), story.brief(mistake.said)
        rest = tag("span", "truly ", tag("b", truth), cls="truth")
        about, index = f"{truth}, said to be {said}", int(samples.index[mistake.row])
        cards.append(_card(story, index, said, mistake.score, about, rest, "wrong"))
    cards = [c for c in cards if c]
    if not cards:
        return tag("p", "There is none to show.", cls="quiet")
    note = "Images as the network sees them, with how sure it was."
    return join(tag("p", note, cls="caption"), tag("div", *cards, cls="gallery"))


def right_ones(story: Story) -> Markup:
    """Usual right answers."""
    samples = story.scores.samples if story.scores else None
    if samples is None:
        return Markup("")
    cards = []
    for row in some_right(samples, RIGHT):
        said, truth = story.brief(int(samples.prediction[row])), story.truth(samples, row)
        index, score = int(samples.index[row]), float(samples.score[row])
        rest = tag("span", "truly ", tag("b", truth), cls="truth") if truth != said else None
        cards.append(_card(story, index, said, score, f"{said}, correctly", rest, "right"))
    cards = [c for c in cards if c]
    if not cards:
        return Markup("")
    note = "The likeliest class is one of the image's own." if story.multi_label else None
    return join(tag("p", note, cls="caption") if note else None, tag("div", *cards, cls="gallery small"))


def _card(story: Story, index: int, name: str, score: float, about: str, rest: Markup | None, cls: str) -> Markup:
    pixels = story.image(index)
    if pixels is None:
        return Markup("")
    said = tag("span", name, cls="said")
    sure = tag("span", f"{100 * score:.0f} %", cls="much")
    words = tag("figcaption", said, sure, rest)
    return tag("figure", img(thumbnail(pixels), about), words, cls=f"card {cls}", title=story.key(index))
