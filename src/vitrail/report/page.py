"""Run folder -> report.html: one file that holds everything it shows, for light and dark, phone and paper."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import torch

from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Source
from vitrail.evaluate.scores import Scores
from vitrail.explain.panes import tiles
from vitrail.models import Net
from vitrail.report import results, views
from vitrail.report.charts import Chart, Series, to_svg, wants_log
from vitrail.report.figures import draw_charts, draw_confusion, save_image
from vitrail.report.markup import Markup, join, tag
from vitrail.report.runs import Run, read_run, told_apart
from vitrail.report.story import Story
from vitrail.report.words import (
    about_model,
    about_run,
    augmentation,
    counted,
    millions,
    number,
    percent,
    short_percent,
    spell_time,
)
from vitrail.weights.model_info import portable
from vitrail.weights.write import write_text

LISTED = 200
"""Unreadable images that are named."""


def write_report(
    run: Path,
    *,
    net: Net,
    preprocess: Preprocess,
    labels: Sequence[str],
    scores: Scores | None = None,
    source: Source | None = None,
    measured_on: str = "validation",
    baselines: Mapping[str, Scores] | None = None,
    comparisons: Sequence[Path] = (),
    unreadable: Sequence[tuple[str, str]] = (),
    command: str | None = None,
) -> Path:
    """Write run/report.html and run/figures/*.png from what the run left and what its model scores.

    `scores` were measured on `source` (its images are shown); without them, as after masked-patch
    training, the page tells of the loss alone. `baselines` stand beside the model by name,
    `comparisons` are folders of other runs, `command` is what started this one.
    """
    this = read_run(run)
    story = Story(
        run=this,
        net=net,
        preprocess=preprocess,
        labels=labels,
        scores=scores,
        source=source,
        measured_on=measured_on,
        baselines=dict(baselines or {}),
        others=_named(this, comparisons),
        unreadable=unreadable,
        command=command,
    )
    figures = run / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    path = run / "report.html"
    write_text(path, page(story, figures), overwrite=True)
    return path


def _named(run: Run, comparisons: Sequence[Path]) -> dict[str, Run]:
    named: dict[str, Run] = {}
    for path in comparisons:
        other = read_run(path)
        name = told_apart(run, other)
        named[name if name not in named else f"{name} ({path.name})"] = other
    return named


def page(story: Story, figures: Path) -> str:
    """The whole page; figures are saved on the way."""
    sections = [s for s in (*_learning(story, figures), *_judging(story, figures), *_looking(story, figures)) if s[2]]
    sections += _telling(story)
    links = [tag("a", title, href=f"#{key}") for key, title, _ in sections]
    blocks = [tag("section", tag("h2", title), body, id=key) for key, title, body in sections]
    style = files("vitrail.report").joinpath("style.css").read_text(encoding="utf-8")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{story.run.name} · vitrail"),
        tag("style", Markup(style)),
    ]
    body = [_top(story), tag("nav", *links), tag("main", *blocks), _foot()]
    html = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return f"<!doctype html>\n{html}\n"


Section = tuple[str, str, Markup]
"""Anchor, title, body."""


def _top(story: Story) -> Markup:
    run = story.run
    panes = [tag("i", cls=f"pane p{(7 * i + 3 * (i // 3)) % 5}") for i in range(9)]
    brand = tag("p", tag("span", *panes, cls="window", aria_hidden="true"), "vitrail · report of a run", cls="brand")
    stopped = run.unfinished()
    notice = None
    if stopped is not None:
        notice = tag(
            "p", f"This run stopped at {stopped[0]} of {stopped[1]}: what follows is how far it came.", cls="notice"
        )
    facts = [
        ("parameters", millions(sum(p.numel() for p in story.net.parameters()))),
        ("training time", spell_time(run.seconds)),
        ("images a second, typically", number(run.rate)),
        ("images seen", f"{run.images:,}" if run.images else "–"),
    ]
    tiles_ = [tag("div", tag("b", value), tag("span", name), cls="fact") for name, value in facts]
    return tag(
        "header",
        brand,
        tag("h1", run.name),
        results.headline(story),
        notice,
        results.comparison(story),
        tag("div", *tiles_, cls="facts"),
    )


def charts(story: Story) -> list[Chart]:
    """Loss, accuracy, learning rate, speed."""
    run = story.run
    x_name = "epoch" if run.per_epoch else "step"
    losses = [Series("training", run.logged("loss"), quiet=True), *_measured(story, "loss")]
    if run.multi_label:  # accuracy, which is what training logs, is another measure
        title, scored = "Mean average precision", _measured(story, "map")
    else:
        title = "Accuracy"
        scored = [Series("training", run.logged("accuracy"), quiet=True), *_measured(story, "top1")]
    return [
        Chart("Loss", tuple(losses), number, x_name, log=wants_log([s.curve for s in losses])),
        Chart(title, tuple(scored), percent, x_name, ceiling=1.0, tick=short_percent),
        Chart("Learning rate", (Series("", run.logged("lr")),), number, x_name, floor=0.0, named=False),
        Chart("Images a second", (Series("", run.logged("images_per_s")),), number, x_name, floor=0.0),
    ]


def _measured(story: Story, name: str) -> list[Series]:
    run = story.run
    plain, average = run.measured(name), run.measured(name, ema=True)
    place = results.PLACES.get(story.measured_on, story.measured_on)
    found = [Series(place, plain if len(plain[0]) else average)]
    if len(plain[0]) and len(average[0]):
        found.append(Series("averaged weights", average, color=4))
    for i, (title, other) in enumerate(story.others.items()):
        found.append(Series(title, other.measured(name, ema=other.averages), color=1 + i % 3))
    return found


def _learning(story: Story, figures: Path) -> list[Section]:
    drawn = charts(story)
    shown = [tag("figure", tag("figcaption", c.title), to_svg(c)) for c in drawn if c.drawn]
    draw_charts(drawn[:3], figures / "curves.png", story.run.name)
    if not shown:
        return [("curves", "How it learned", tag("p", "The run ended before its first step was logged.", cls="quiet"))]
    return [("curves", "How it learned", join(tag("div", *shown, cls="charts"), _harder(story)))]


def _harder(story: Story) -> Markup:
    """Why the loss in training may lie above the one that is measured."""
    config = story.run.config
    reasons = []
    if augmentation(config.get("augment", {})) != "none":
        reasons.append("augmented images")
    if config.get("classify", {}).get("label_smoothing"):
        reasons.append("smoothed labels")
    model = config.get("model") or {}
    if model.get("dropout") or model.get("drop_path"):
        reasons.append("parts of the network left out")
    if not reasons or config.get("objective") == "masked-patch":
        return Markup("")
    return tag(
        "p",
        f"Training is measured as it happens, with {' and '.join(reasons)}: harder than the test.",
        cls="caption after",
    )


def _judging(story: Story, figures: Path) -> list[Section]:
    scores = story.scores
    if scores is None:
        return []
    draw_confusion(story, scores, figures / "confusion.png")
    parts = [tag("div", results.classes(story))]
    title = "Class by class"
    if scores.average_precisions is None:
        title = "Right and wrong"
        parts.insert(0, tag("div", results.confusion(story)))
    return [
        ("classes", title, tag("div", *parts, cls="two stacked" if results.wide_matrix(story) else "two")),
        ("mistakes", "The surest mistakes", results.mistakes(story)),
        ("right", "Correctly named", results.right_ones(story)),
    ]


def _looking(story: Story, figures: Path) -> list[Section]:
    looks, pairs = views.attention(story)
    if pairs:
        save_image(tiles(pairs, columns=4, gap=max(pairs[0].shape[0] // 24, 1)), figures / "attention.png")
    places, maps = views.positions(story)
    if maps is not None:
        save_image(maps, figures / "positions.png")
    patterns, sheet = views.patch_filters(story)
    if sheet is not None:
        save_image(sheet, figures / "filters.png", least=240)
    inside = [("Positions", places), ("Patch filters", patterns)]
    halves = [tag("div", tag("h3", name), body) for name, body in inside]
    return [
        ("attention", "What it looks at", looks),
        ("weights", "What its weights hold", tag("div", *halves, cls="two")),
    ]


def _telling(story: Story) -> list[Section]:
    rows = [*about_model(story.net), *about_run(story.run.config, story.multi_label), *_around(story)]
    table = tag("table", *(tag("tr", tag("th", k, scope="row"), tag("td", v)) for k, v in rows), cls="about")
    sections = [("about", "What was trained", table), ("again", "Use it, repeat it", _commands(story))]
    if story.unreadable:
        sections.append(("unreadable", "Images that could not be read", _unreadable(story)))
    return sections


def _around(story: Story) -> list[tuple[str, str]]:
    config, rows = story.run.config, []
    rows.append(("Preprocessing", story.preprocess.config.summary()))
    if story.scores is not None:
        where = results.PLACES.get(story.measured_on, story.measured_on)
        rows.append(("Measured on", counted(story.scores.count, f"{where} image")))
    rows.append(("Precision, seed", f"{config.get('precision', 'float32')}, {config.get('seed', 0)}"))
    return rows


def _commands(story: Story) -> Markup:
    finished = (story.run.path / "model" / "config.json").exists()
    folder = Path(portable(str(story.run.path)))
    model = folder / "model"
    steps = [
        ("Name what is in an image", f"vitrail predict --model {shlex.quote(str(model))} image.jpg"),
        (
            "The same in Python",
            f'import vitrail\n\nvit = vitrail.load("{model.as_posix()}")\nvit.predict("image.jpg")',
        ),
    ]
    if story.run.config.get("objective") == "masked-patch":
        steps = [("Teach it classes", f"vitrail finetune --model {shlex.quote(str(model))} --data photos/")]
    if story.run.unfinished() is not None and not finished:
        steps.insert(0, ("Go on where it stopped", f"vitrail train --resume --out {shlex.quote(str(folder))}"))
    if story.command:
        steps.append(("Run it again", _again(story.command, folder)))
    rows = [join(tag("p", name, cls="caption"), tag("pre", tag("code", text))) for name, text in steps]
    where = " beside this page, with the full paths, which this page leaves out."
    settings = tag("p", "Every setting is in ", tag("code", "config.json"), where, cls="caption after")
    return tag("div", *rows, settings, cls="commands")


def _again(command: str, folder: Path) -> str:
    """What repeats the run: a resumed one would only go on, so it is its settings that start anew."""
    if not {"--resume", "--auto-resume"}.isdisjoint(command.split()):
        return f"vitrail train {shlex.quote(str(folder / 'config.json'))}"
    return shlex.join(_portable(word) for word in shlex.split(command))


def _portable(word: str) -> str:
    """A word of a command; of --data=/home/me/photos or init_from=/home/me/x.npz the last part of the path."""
    name, equals, value = word.partition("=")
    return f"{name}={portable(value)}" if equals else portable(word)


def _unreadable(story: Story) -> Markup:
    listed = story.unreadable[:LISTED]
    rows = [tag("li", tag("code", key), f" {why}") for key, why in listed]
    rest = len(story.unreadable) - len(listed)
    more = tag("p", f"and {rest:,} more.", cls="quiet") if rest else None
    count = counted(len(story.unreadable), "image")
    note = tag("p", f"{count} had no part in training or measuring.", cls="caption")
    return join(note, tag("details", tag("summary", f"Show {len(listed)}"), tag("ul", *rows), more))


def _foot() -> Markup:
    try:
        made = f"vitrail {version('vitrail')}"
    except PackageNotFoundError:
        made = "vitrail"
    return tag(
        "footer",
        tag(
            "p",
            f"Made by {made} with PyTorch {torch.__version__.partition('+')[0]}. This file holds everything it shows.",
        ),
    )
