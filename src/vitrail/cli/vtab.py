"""`vitrail vtab`: measure a model on the VTAB-1k tasks found on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, print_plain
from vitrail.cli.model_options import BatchSize, ModelSpec
from vitrail.cli.options import Device, ImageSize, Json, parse_size
from vitrail.cli.probe import show_progress
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.evaluation.intervals import Estimate
    from vitrail.vtab import VtabResult


def vtab(
    model: ModelSpec = None,
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="A folder with a folder for each task.")
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help="Tasks to run. Default: all that are found.")] = "",
    method: Annotated[
        str, typer.Option(metavar="HOW", help="finetune: the full protocol; linear: on frozen features, fast.")
    ] = "finetune",
    learning_rates: Annotated[
        str, typer.Option("--lr", metavar="LR,...", help="Fine-tuning: learning rates to select from.")
    ] = "0.003,0.01,0.03",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Fine-tuning: number of steps.")] = 2500,
    image_size: ImageSize = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the fine-tuning runs.")] = Path(
        "runs/vtab"
    ),
    batch_size: BatchSize = 64,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run VTAB-1k: select settings with 800 + 200 images, train on all 1,000, and measure the whole test split.

    vitrail vtab --model MODEL --root vtab-1k/ --method linear
    """
    if root is None:
        raise ConfigError("vtab needs --root DIR: a folder with a folder for each task, as in docs/evaluation.md.")
    if model is None:
        raise ConfigError("vtab needs --model MODEL: the model that ships with vitrail is too small for these tasks.")
    try:
        chosen = tuple(float(text) for text in learning_rates.split(","))
    except ValueError:
        raise ConfigError(f"--lr expects numbers such as 0.003,0.01, got {learning_rates!r}.") from None
    with err.status("starting"):
        from vitrail.vtab import vtab as run
    found = run(
        model,
        root,
        tasks=[text.strip() for text in tasks.split(",") if text.strip()],
        method=method,  # type: ignore[arg-type]
        learning_rates=chosen,
        steps=steps,
        image_size=parse_size(image_size),
        device=device,
        out=out,
        batch_size=batch_size,
        progress=show_progress,
    )
    if as_json:
        typer.echo(json.dumps({"model": model, **found.to_dict()}, indent=2))
        return
    for part in format_vtab(found, root):
        print_plain(part)


def format_vtab(found: VtabResult, root: Path) -> Iterator[RenderableType]:
    """Accuracies by task and group, the means, and the missing tasks."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("group", "task", "accuracy", "95 % interval", "test images", "selected"):
        number = name in ("accuracy", "test images")  # must not be cut off in a narrow window
        table.add_column(name, no_wrap=number, overflow="fold", justify="right" if number else "left")
    before = ""
    for score in found.scores:
        value, group = score.accuracy, score.task.group
        chosen = ", ".join(f"{name} {number:.3g}" for name, number in score.chosen.items())
        chosen += ", at the edge of the searched range" * score.at_edge
        row = (*_format_estimate(value), f"{score.count:,}", Text(chosen, style="dim"))
        table.add_row(group if group != before else "", score.task.title, *row)
        before = group
    for name, mean in found.means.items():
        table.add_row(Text("VTAB score" if name == "VTAB" else name, style="bold"), "mean", *_format_estimate(mean))
    yield table
    if found.missing:
        names = ", ".join(task.name for task in found.missing)
        yield Text(f"\n{len(found.missing)} of 19 tasks are missing, so there is no VTAB score: {names}.")
        yield Text(
            f"Put each in a folder of its name in {root}: train800.txt, val200.txt and test.txt (`path label` on each "
            "line) with the images, or train/ and test/ with a folder for each class.",
            style="dim",
        )


def _format_estimate(value: Estimate) -> tuple[str, Text]:
    """A proportion and its interval."""
    return f"{100 * value.value:.2f} %", Text(f"{100 * value.low:.1f} to {100 * value.high:.1f}", style="dim")
