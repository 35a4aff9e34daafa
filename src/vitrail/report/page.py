"""Run folder -> report.html: one self-contained page with light and dark themes, for screens, phones and print."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import torch

from vitrail.config.train import SELF_SUPERVISED
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Source
from vitrail.evaluation.scores import Scores
from vitrail.explain.overlays import tile_images
from vitrail.models import Net
from vitrail.report import model_sections, score_sections
from vitrail.report.charts import Chart, Series, needs_log_scale, to_svg
from vitrail.report.formatting import (
    describe_augmentation,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_tick_percent,
    model_rows,
    pluralize,
    run_rows,
)
from vitrail.report.markup import Markup, join, tag
from vitrail.report.png_figures import draw_charts, draw_confusion, save_image
from vitrail.report.report_data import ReportData
from vitrail.runs.run_record import RunRecord, describe_difference, read_run
from vitrail.storage.atomic_write import write_text
from vitrail.weights.model_info import strip_local_folders

MAX_LISTED_UNREADABLE = 200
"""Maximum number of unreadable images that are listed."""


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
    """Write run/report.html and run/figures/*.png.

    `scores` were measured on `source`, whose images are shown; without them, as after masked-patch training, the page
    shows only the loss. `baselines` are shown next to the model by name, `comparisons` are folders of other runs, and
    `command` is the command that started this run.
    """
    this = read_run(run)
    report = ReportData(
        run=this,
        net=net,
        preprocess=preprocess,
        labels=labels,
        scores=scores,
        source=source,
        measured_on=measured_on,
        baselines=dict(baselines or {}),
        other_runs=_read_comparisons(this, comparisons),
        unreadable=unreadable,
        command=command,
    )
    figures = run / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    path = run / "report.html"
    write_text(path, page(report, figures), overwrite=True)
    return path


def _read_comparisons(run: RunRecord, comparisons: Sequence[Path]) -> dict[str, RunRecord]:
    """Display name -> run, for the run folders to compare with: the name states how their settings differ."""
    named: dict[str, RunRecord] = {}
    for path in comparisons:
        other = read_run(path)
        name = describe_difference(run, other)
        named[name if name not in named else f"{name} ({path.name})"] = other
    return named


def page(report: ReportData, figures: Path) -> str:
    """The HTML of the page; also saves the figures."""
    parts = (_training_sections(report, figures), _score_sections(report, figures), _model_sections(report, figures))
    sections = [section for part in parts for section in part if section[2]]
    sections += _setup_sections(report)
    links = [tag("a", title, href=f"#{key}") for key, title, _ in sections]
    blocks = [tag("section", tag("h2", title), body, id=key) for key, title, body in sections]
    style = files("vitrail.report").joinpath("style.css").read_text(encoding="utf-8")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{report.run.name} · vitrail"),
        tag("style", Markup(style)),
    ]
    body = [_header(report), tag("nav", *links), tag("main", *blocks), _footer()]
    html = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return f"<!doctype html>\n{html}\n"


Section = tuple[str, str, Markup]
"""Anchor, title, body."""


def _header(report: ReportData) -> Markup:
    run = report.run
    panes = [tag("i", cls=f"pane p{(7 * i + 3 * (i // 3)) % 5}") for i in range(9)]
    brand = tag("p", tag("span", *panes, cls="window", aria_hidden="true"), "vitrail · training report", cls="brand")
    stopped = run.progress_if_stopped()
    notice = None
    if stopped is not None:
        notice = tag(
            "p", f"This run stopped at {stopped[0]} of {stopped[1]}. The results are those at this point.", cls="notice"
        )
    facts = [
        ("parameters", format_count(sum(p.numel() for p in report.net.parameters()))),
        ("training time", format_duration(run.seconds)),
        ("images per second (median)", format_number(run.images_per_second)),
        ("training images processed", f"{run.num_images:,}" if run.num_images else "–"),
    ]
    tiles = [tag("div", tag("b", value), tag("span", name), cls="fact") for name, value in facts]
    return tag(
        "header",
        brand,
        tag("h1", run.name),
        score_sections.headline(report),
        notice,
        score_sections.comparison_section(report),
        tag("div", *tiles, cls="facts"),
    )


def charts(report: ReportData) -> list[Chart]:
    """Loss, accuracy, learning rate and throughput."""
    run = report.run
    x_label = "epoch" if run.steps_per_epoch else "step"
    losses = [Series("training", run.training_curve("loss"), thin=True), *_evaluation_series(report, "loss")]
    if run.multi_label:  # the accuracy that training logs is not comparable with mAP
        title, scored = "Mean average precision", _evaluation_series(report, "map")
    else:
        title = "Accuracy"
        scored = [Series("training", run.training_curve("accuracy"), thin=True), *_evaluation_series(report, "top1")]
    rate, speed = (Series("", run.training_curve(name)) for name in ("lr", "images_per_s"))
    return [
        Chart("Loss", tuple(losses), format_number, x_label, log=needs_log_scale([s.curve for s in losses])),
        Chart(title, tuple(scored), format_percent, x_label, ceiling=1.0, format_tick=format_tick_percent),
        Chart("Learning rate", (rate,), format_number, x_label, floor=0.0, label_lines=False),
        Chart("Images per second", (speed,), format_number, x_label, floor=0.0),
    ]


def _evaluation_series(report: ReportData, name: str) -> list[Series]:
    run = report.run
    raw, ema = run.evaluation_curve(name), run.evaluation_curve(name, ema=True)
    split = score_sections.SPLIT_NAMES.get(report.measured_on, report.measured_on)
    series = [Series(split, raw if len(raw[0]) else ema)]
    if len(raw[0]) and len(ema[0]):
        series.append(Series("EMA weights", ema, color_index=4))
    for i, (title, other) in enumerate(report.other_runs.items()):
        series.append(Series(title, other.evaluation_curve(name, ema=other.has_ema), color_index=1 + i % 3))
    return series


def _training_sections(report: ReportData, figures: Path) -> list[Section]:
    all_charts = charts(report)
    drawings = [tag("figure", tag("figcaption", c.title), to_svg(c)) for c in all_charts if c.visible_series]
    draw_charts(all_charts[:3], figures / "curves.png", report.run.name)
    if not drawings:
        return [("curves", "Training curves", tag("p", "The run ended before its first logged step.", cls="quiet"))]
    return [("curves", "Training curves", join(tag("div", *drawings, cls="charts"), _training_note(report)))]


def _training_note(report: ReportData) -> Markup:
    """Why the training loss may be higher than the evaluation loss."""
    config = report.run.config
    reasons = []
    if describe_augmentation(config.get("augment", {})) != "none":
        reasons.append("augmented images")
    if config.get("classify", {}).get("label_smoothing"):
        reasons.append("label smoothing")
    model = config.get("model") or {}
    if model.get("dropout") or model.get("drop_path"):
        reasons.append("dropout")
    if not reasons or config.get("objective") in SELF_SUPERVISED:
        return Markup("")
    return tag(
        "p",
        f"Training metrics are computed during training, with {' and '.join(reasons)}, so they can be worse than "
        "the evaluation metrics.",
        cls="caption after",
    )


def _score_sections(report: ReportData, figures: Path) -> list[Section]:
    scores = report.scores
    if scores is None:
        return []
    draw_confusion(report, scores, figures / "confusion.png")
    parts = [tag("div", score_sections.class_section(report))]
    title = "Per-class scores"
    if scores.average_precisions is None:
        title = "Confusion matrix and per-class recall"
        parts.insert(0, tag("div", score_sections.confusion_section(report)))
    return [
        ("classes", title, tag("div", *parts, cls="two stacked" if score_sections.wide_matrix(report) else "two")),
        ("mistakes", "Most confident errors", score_sections.mistake_section(report)),
        ("right", "Correct predictions", score_sections.correct_section(report)),
    ]


def _model_sections(report: ReportData, figures: Path) -> list[Section]:
    attention, pairs = model_sections.attention_section(report)
    if pairs:
        save_image(tile_images(pairs, columns=4, gap=max(pairs[0].shape[0] // 24, 1)), figures / "attention.png")
    positions, maps = model_sections.position_section(report)
    if maps is not None:
        save_image(maps, figures / "positions.png")
    filters, filter_image = model_sections.filter_section(report)
    if filter_image is not None:
        save_image(filter_image, figures / "filters.png", min_size=240)
    halves = [
        tag("div", tag("h3", n), body)
        for n, body in (("Position embeddings", positions), ("Patch embedding filters", filters))
    ]
    return [
        ("attention", "Attention", attention),
        ("weights", "Learned weights", tag("div", *halves, cls="two")),
    ]


def _setup_sections(report: ReportData) -> list[Section]:
    rows = [*model_rows(report.net), *run_rows(report.run.config, report.multi_label), *_evaluation_rows(report)]
    table = tag("table", *(tag("tr", tag("th", k, scope="row"), tag("td", v)) for k, v in rows), cls="about")
    sections = [("about", "Model and training settings", table), ("again", "Commands", _commands(report))]
    if report.unreadable:
        sections.append(("unreadable", "Unreadable images", _unreadable_section(report)))
    return sections


def _evaluation_rows(report: ReportData) -> list[tuple[str, str]]:
    config, rows = report.run.config, []
    rows.append(("Preprocessing", report.preprocess.config.summary()))
    if report.scores is not None:
        split = score_sections.SPLIT_NAMES.get(report.measured_on, report.measured_on)
        rows.append(("Evaluated on", pluralize(report.scores.count, f"{split} image")))
    rows.append(("Precision, seed", f"{config.get('precision', 'float32')}, {config.get('seed', 0)}"))
    return rows


def _commands(report: ReportData) -> Markup:
    finished = (report.run.path / "model" / "config.json").exists()
    folder = Path(strip_local_folders(str(report.run.path)))
    model = folder / "model"
    steps = [
        ("Classify an image", f"vitrail predict --model {shlex.quote(str(model))} image.jpg"),
        (
            "The same in Python",
            f'import vitrail\n\nvit = vitrail.load("{model.as_posix()}")\nvit.predict("image.jpg")',
        ),
    ]
    if report.run.config.get("objective") in SELF_SUPERVISED:
        steps = [("Fine-tune it to classify", f"vitrail finetune --model {shlex.quote(str(model))} --data photos/")]
    if report.run.progress_if_stopped() is not None and not finished:
        steps.insert(0, ("Resume the run", f"vitrail train --resume --out {shlex.quote(str(folder))}"))
    if report.command:
        steps.append(("Repeat the run", _rerun_command(report.command, folder)))
    rows = [join(tag("p", name, cls="caption"), tag("pre", tag("code", text))) for name, text in steps]
    note = " next to this page contains all settings, with full paths, which this page omits."
    settings = tag("p", tag("code", "config.json"), note, cls="caption after")
    return tag("div", *rows, settings, cls="commands")


def _rerun_command(command: str, folder: Path) -> str:
    """The command that repeats the run from the start; for a resumed run, from its config.json."""
    if not {"--resume", "--auto-resume"}.isdisjoint(command.split()):
        return f"vitrail train {shlex.quote(str(folder / 'config.json'))}"
    return shlex.join(_portable_word(word) for word in shlex.split(command))


def _portable_word(word: str) -> str:
    """A word of a command without the folders of its path: --data=/home/me/photos, init_from=/home/me/x.npz."""
    name, equals, value = word.partition("=")
    return f"{name}={strip_local_folders(value)}" if equals else strip_local_folders(word)


def _unreadable_section(report: ReportData) -> Markup:
    listed = report.unreadable[:MAX_LISTED_UNREADABLE]
    rows = [tag("li", tag("code", key), f" {why}") for key, why in listed]
    unlisted = len(report.unreadable) - len(listed)
    more = tag("p", f"and {unlisted:,} more.", cls="quiet") if unlisted else None
    count = pluralize(len(report.unreadable), "image")
    note = tag(
        "p", f"{count} could not be read and {'was' if len(report.unreadable) == 1 else 'were'} skipped.", cls="caption"
    )
    return join(note, tag("details", tag("summary", f"Show {len(listed)}"), tag("ul", *rows), more))


def _footer() -> Markup:
    try:
        name = f"vitrail {version('vitrail')}"
    except PackageNotFoundError:
        name = "vitrail"
    return tag(
        "footer",
        tag(
            "p",
            f"Written by {name} with PyTorch {torch.__version__.partition('+')[0]}. This file is self-contained.",
        ),
    )
