"""`vitrail eval`: measure a classifier on labeled images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vitrail.cli import console
from vitrail.cli.console import err, print_plain, progress_bar
from vitrail.cli.model_options import LabelFile, ModelSpec, open_with_engine
from vitrail.cli.option_groups import (
    CheckpointOptions,
    DataOptions,
    DeviceOptions,
    EngineOptions,
    with_option_groups,
)
from vitrail.cli.options import Json, parse_size
from vitrail.errors import ConfigError
from vitrail.runtime import is_main_process, log_on_main_process

if TYPE_CHECKING:
    from vitrail.evaluation.intervals import Estimate
    from vitrail.evaluation.summary import Evaluation, SizeResult

MAX_NAME_LENGTH = 30
"""Characters of a class name that are shown."""

Sizes = Annotated[
    str | None,
    typer.Option(
        "--image-size", metavar="SIZE,...", help="Image size in pixels, or several sizes to compare: 160,224,288."
    ),
]
Flip = Annotated[bool, typer.Option("--flip", help="Average the probabilities of each image and its mirror image.")]
Protocol = Annotated[
    str, typer.Option(metavar="NAME", help="auto; imagenet: match classes by WordNet ID only; real: add ImageNet-ReaL.")
]
Real = Annotated[
    Path | None, typer.Option("--real", metavar="FILE", help="ImageNet-ReaL's labels. Default: timm's copy.")
]
HeldOut = Annotated[bool, typer.Option("--held-out", help="Measure only the images that training would hold out.")]
Batch = Annotated[int | None, typer.Option(min=1, metavar="N", help="Images per batch.", show_default="32, GPU 256")]
Bins = Annotated[int, typer.Option(min=1, metavar="N", help="Number of calibration bins.")]
Worst = Annotated[int, typer.Option(min=0, metavar="N", help="Number of worst classes to list.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write figures, tables and all predictions here.")
]
Formats = Annotated[
    str, typer.Option("--format", metavar="NAMES", help="Comma-separated formats of the figures: png,svg,npz.")
]


@with_option_groups
def evaluate(
    model: ModelSpec = None,
    source: DataOptions = DataOptions(),
    image_size: Sizes = None,
    flip: Flip = False,
    protocol: Protocol = "auto",
    real: Real = None,
    labels: LabelFile = None,
    held_out: HeldOut = False,
    checkpoint: CheckpointOptions = CheckpointOptions(),
    batch_size: Batch = None,
    bins: Bins = 15,
    device: DeviceOptions = DeviceOptions(),
    engine: EngineOptions = EngineOptions(),
    worst: Worst = 10,
    to: Out = None,
    formats: Formats = "png",
    as_json: Json = False,
) -> None:
    """Measure a classifier: accuracy, loss, calibration and the worst classes, with 95 % intervals.

    vitrail eval --model MODEL --data photos/ --out measured/
    """
    data = source.data
    if data is None:
        raise typer.BadParameter("eval needs --data, the labeled images to evaluate")
    sizes = [parse_size(text.strip()) for text in image_size.split(",")] if image_size is not None else None
    kinds = [kind.strip() for kind in formats.split(",") if kind.strip()]
    if to is not None and to.exists() and not to.is_dir():
        raise ConfigError(f"--out {to} is a file; give the name of a folder.")
    load_options = checkpoint.load_options
    if to is not None:
        from vitrail.report.evaluation_files import check_formats, write_evaluation

        check_formats(kinds)  # fail before the work, not after it
    from vitrail.weights.model_info import strip_local_folders

    with log_on_main_process():
        only_size = sizes[0] if sizes is not None and len(sizes) == 1 else None
        on_cpu = replace(device, device="cpu")  # evaluate() moves it to the device
        vit = open_with_engine(
            model,
            engine,
            device if engine.engine == "auto" else on_cpu,
            require_classes=False,
            image_size=only_size,
            labels=labels,
            **load_options,
        )
    with err.status("starting"):
        from vitrail.evaluation.evaluate import evaluate as evaluate_model

    evaluation = evaluate_model(
        vit,
        data,
        image_size=[s for s in sizes if s is not None] if sizes is not None else None,
        flip=flip,
        protocol=protocol,  # type: ignore[arg-type]
        real=real,
        held_out=held_out,
        root=source.root,
        skip_bad=source.skip_bad,
        batch_size=batch_size,
        bins=bins,
        device=device.device,
        progress=_progress,
    )
    if not is_main_process():
        return
    evaluation = replace(evaluation, model=strip_local_folders(model) if model else evaluation.model)
    if to is not None:
        write_evaluation(evaluation, to, kinds)
    if as_json:
        typer.echo(json.dumps(evaluation.to_dict(worst), indent=2))
        return
    for part in format_evaluation(evaluation, worst):
        print_plain(part)
    if to is not None:
        print_plain(Text(f"\n{to}/ has the figures, eval.json, per_class.csv and predictions.csv", style="dim"))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    with progress_bar(is_main_process()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def format_evaluation(evaluation: Evaluation, worst: int) -> Iterator[RenderableType]:
    """The printed result, from top to bottom."""
    first = evaluation.first
    present, outputs = len(first.per_class.present), len(evaluation.labels)
    yield Text(f"{evaluation.model} on {evaluation.data}", style="bold")
    images = f"{first.scores.count:,} {'image' if first.scores.count == 1 else 'images'}"
    of_all = f"{present:,} of {outputs:,}" if present < outputs else f"{present:,}"
    classes = f"{of_all} {'class' if outputs == 1 else 'classes'}"
    size_ = "" if len(evaluation.sizes) > 1 else f", {_format_size(first)} px"
    yield Text(f"{images}, {classes}{size_}{', averaged with mirror images' if evaluation.flip else ''}\n", style="dim")
    if len(evaluation.sizes) > 1:
        yield _sizes_table(evaluation)
    else:
        yield _scores_table(evaluation, first)
    if worst and (rows := first.worst_classes(worst)):
        yield Text("")
        yield _worst_classes_table(evaluation, first, rows)
    if evaluation.unreadable:
        bad = len(evaluation.unreadable)
        images = "image" if bad == 1 else "images"
        yield Text(f"\n{bad:,} unreadable {images} skipped.", style="dim")


def _scores_table(evaluation: Evaluation, measured: SizeResult) -> Table:
    """One metric per row with its interval; in a narrow window everything except the value may wrap."""
    table = Table(box=None, show_header=True, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("95 % interval", style="dim")
    table.add_column("", style="dim")
    count, real = measured.scores.count, measured.real
    if measured.mean_average_precision is not None:
        table.add_row("mAP", *_format_percent(measured.mean_average_precision, count), "mean over classes")
    for name, value in (("top-1", measured.top1), ("top-5", measured.top5)):
        if value is not None:
            table.add_row(name, *_format_percent(value, count), "")
    if real is not None:
        of = f"{real.count:,} images with ReaL labels"
        table.add_row("ReaL top-1", *_format_percent(real.top1, real.count), of)
        table.add_row("ReaL top-5", *_format_percent(real.top5, real.count), "")
    table.add_row("loss", *_format_loss(measured.loss), "")
    if measured.calibration is not None:
        gap = measured.calibration.overconfidence
        how = "overconfident by" if gap > 0 else "underconfident by"
        about = f"{how} {100 * abs(gap):.1f} %" if math.isfinite(gap) and abs(gap) >= 5e-4 else ""
        table.add_row("calibration error", *_format_percent(measured.calibration.error, count), about)
    throughput = measured.throughput
    table.add_row("images/s", f"{throughput.total:,.0f}", "", f"network alone {throughput.network:,.0f}")
    return table


def _sizes_table(evaluation: Evaluation) -> Table:
    """Two rows per size: the values; below, dimmed, images/s and the intervals."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    multi_label = evaluation.multi_label
    heads = ["size", "mAP, %" if multi_label else "top-1, %", "top-5, %", "loss", "ECE, %"]
    heads += [] if multi_label else [f"vs {_format_size(evaluation.first)}"]
    for head in heads:
        table.add_column(head, no_wrap=True)
    for m in evaluation.sizes:
        count = m.scores.count
        error = None if m.calibration is None else m.calibration.error
        fractions = [m.mean_average_precision if multi_label else m.top1, m.top5, error]
        cells = [("–", "") if e is None else _format_percent(e, count) for e in fractions]
        cells.insert(2, _format_loss(m.loss))
        if not multi_label:
            change = ("", "") if m.top1_change is None else _format_percent(m.top1_change, count, signed=True)
            cells.append(change)
        values, ranges = ([cell[i].removesuffix(" %") for cell in cells] for i in (0, 1))
        ranges = [text if text[:1] in "+-" else text.replace(" to ", "–") for text in ranges]  # fits 80 columns
        table.add_row(_format_size(m), *values)
        table.add_row(*(Text(text, style="dim") for text in (f"{m.throughput.total:,.0f}/s", *ranges)))
    return table


def _worst_classes_table(evaluation: Evaluation, measured: SizeResult, rows: list[int]) -> Table:
    from vitrail.evaluation.per_class import mistaken_for
    from vitrail.evaluation.scores import wilson_interval
    from vitrail.explain.label_text import unique_abbreviations

    classes, precise = measured.per_class, measured.per_class.average_precision
    names = unique_abbreviations(evaluation.labels, MAX_NAME_LENGTH)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    where = f" at {_format_size(measured)}" if len(evaluation.sizes) > 1 else ""
    table.add_column(f"worst classes{where}", max_width=MAX_NAME_LENGTH, overflow="fold")
    for head in ("AP" if precise is not None else "recall", "images"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("" if precise is not None else "95 % interval", style="dim", no_wrap=True)
    wide = console.out.width >= 60
    if wide:
        table.add_column("" if precise is not None else "predicted instead")
    for k in rows:
        value = classes.recall[k] if precise is None else precise[k]
        low, high = wilson_interval(classes.correct[k], classes.support[k])
        instead = ", ".join(
            f"{names[other]}{f' ({n})' if n > 1 else ''}" for other, n in mistaken_for(measured.samples, k)
        )
        interval = f"{100 * low:.0f} to {100 * high:.0f}" if precise is None else ""
        row = (names[k], f"{100 * value:.0f} %", f"{classes.support[k]:,}", interval)
        table.add_row(*row, *[Text(instead, no_wrap=True, overflow="ellipsis")] * wide)
    return table


def _format_percent(estimate: Estimate, count: int, *, signed: bool = False) -> tuple[str, str]:
    """74.3 % and 71.6 to 77.0; two decimals with at least 5,000 images."""
    digits, plus = (2 if count >= 5000 else 1), "+" if signed else ""
    value, low, high = (f"{100 * v:{plus}.{digits}f}" for v in (estimate.value, estimate.low, estimate.high))
    return f"{value} %", f"{low} to {high}"


def _format_loss(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.value:.4f}", f"{estimate.low:.3f} to {estimate.high:.3f}"


def _format_size(measured: SizeResult) -> str:
    height, width = measured.image_size
    return f"{height}" if height == width else f"{height}x{width}"
