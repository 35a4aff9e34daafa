"""`vitrail reproduce`: re-run a finding of the paper at the scale at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, print_plain
from vitrail.cli.options import Data, Device, Json, Root, parse_time
from vitrail.cli.train import command_line
from vitrail.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from vitrail.reproduction.dry_run import DryRun
    from vitrail.reproduction.reproduce import Reproduction, Status

OUTCOME_STYLES = {"holds": "green", "does not hold": "red", "undecided": "yellow"}


def reproduce(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME] [KEY=VALUE]...", help="An experiment, and settings of all its runs to change."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="tiny: minutes on two CPU cores; gpu; paper: the paper's own settings.",
            show_default="gpu if there is one, else tiny",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of seeds.", show_default="3")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Output folder.", show_default="runs/reproduce/NAME-SCALE"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Run only the most telling part that fits: 25min, 2h.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Run part I of N, for instance on another machine.")
    ] = None,
    join: Annotated[
        list[Path] | None, typer.Option("--join", metavar="DIR", help="Add the finished runs of a part; repeatable.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at a time.", show_default="one per CPU core; 12 on a GPU"),
    ] = None,
    data: Data = None,
    root: Root = None,
    device: Device = "auto",
    only_check: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, its cost and whether the data is here; run nothing.")
    ] = False,
    list_experiments: Annotated[bool, typer.Option("--list", help="List the experiments with their results.")] = False,
    as_json: Json = False,
) -> None:
    """Re-run one of the paper's findings, and write a page with figures, tables and a verdict on each claim.

    vitrail reproduce positions --scale tiny

    Run it again to continue after an interruption, or with a larger --budget or --seeds: finished runs are kept.
    """
    names = [text for text in arguments or [] if "=" not in text]
    if list_experiments:
        _list_experiments(as_json)
        return
    if len(names) != 1:
        raise ConfigError(f"expected one experiment, got {len(names)}; `vitrail reproduce --list` lists them.")
    with err.status("starting"):
        from vitrail.config import DataConfig
        from vitrail.reproduction.dry_run import dry_run
        from vitrail.reproduction.reproduce import reproduce as run
        from vitrail.reproduction.session import Request
    overrides = [text for text in arguments or [] if "=" in text]
    if root is not None:
        overrides.append(f"data.root={root}")
    options: dict[str, Any] = {
        "scale": _parse_scale(scale),
        "seeds": seeds,
        "overrides": overrides,
        "out": out,
        "data": None if data is None else DataConfig(source=data),
        "part": part,
        "join": join or [],
        "budget_s": None if budget is None else parse_time(budget, "--budget"),
        "jobs": jobs,
        "device": device,
    }
    if only_check:
        _print_dry_run(dry_run(Request(name=names[0], **options)), as_json)
        return
    try:
        with show_progress(names[0]) as on_progress:
            done = run(names[0], **options, command=command_line(), on_progress=on_progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped by Ctrl-C; run the same command again to continue") from None
    _print_result(done, as_json)


def _parse_scale(text: str | None) -> str | None:
    from vitrail.reproduction.arm import SCALES

    if text is not None and text not in SCALES:
        raise ConfigError(f"unknown scale {text!r}{did_you_mean(text, SCALES)}")
    return text


@contextmanager
def show_progress(name: str) -> Iterator[Callable[[Status], None]]:
    """In a terminal, a bar for the whole and one for each run; elsewhere, a line for each finished run."""
    from vitrail.report.formatting import format_duration

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    progress = Progress(
        *columns, console=err, transient=True, disable=not err.is_terminal, redirect_stdout=False, redirect_stderr=False
    )
    whole = progress.add_task(name, total=None, note="")
    bars: dict[str, TaskID] = {}

    def show(status: Status) -> None:
        left = "" if status.seconds_left is None else f", about {format_duration(status.seconds_left)} left"
        count = f"{status.finished} of {status.total} runs"
        if status.newest is not None:
            accuracy = status.newest.value("test")
            result = "" if accuracy is None else f"  {100 * accuracy:6.2f} %"
            err.print(Text(f"{count}  {status.newest.key}{result}{'' if err.is_terminal else left}"), soft_wrap=True)
        done = status.finished + sum(status.running.values())
        progress.update(whole, total=status.total, completed=done, note=count + left)
        for key in bars.keys() - status.running.keys():
            progress.remove_task(bars.pop(key))
        for key, fraction in status.running.items():
            if key not in bars:
                bars[key] = progress.add_task(f"  {key}", total=1.0, note="")
            progress.update(bars[key], completed=fraction)

    with progress:
        yield show


def _print_result(done: Reproduction, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(done.to_dict(), indent=2))
        return
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    for verdict in done.analysis.verdicts:
        outcome = Text(verdict.outcome, style=OUTCOME_STYLES[verdict.outcome])
        table.add_row(outcome, Text.assemble(verdict.claim, "\n", (verdict.reason, "dim")))
    print_plain(table)
    about = f"\n{done.finished} of {done.total} runs" + (f"; {done.left_out}" if done.left_out else "")
    print_plain(Text(f"{about}\n{done.page}"))


def _print_dry_run(found: DryRun, as_json: bool) -> None:
    """Print a dry run; the exit status is 1 if the experiment cannot run here."""
    from vitrail.data.resident import format_bytes

    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        table = Table.grid(padding=(0, 3))
        at_a_time = f", {found.jobs} at a time" if found.jobs > 1 else ""
        rows = {
            "experiment": f"{found.experiment}, scale {found.scale}",
            "data": f"{found.data}, {found.num_images:,} training images{' (assumed)' * found.is_assumed}",
            "runs": f"{found.trials} ({found.arms} arms); {found.finished} finished",
            "time": f"about {_format_long(found.seconds)} on {_DEVICES.get(found.device, found.device)}{at_a_time}",
            "memory": f"about {format_bytes(found.memory)} for the largest run",
            "not planned": found.left_out,
        }
        for name, value in rows.items():
            if value:
                table.add_row(name, value)
        for problem in found.problems:
            table.add_row(Text("problem", style="red"), problem)
        print_plain(table)
    if found.problems:
        raise typer.Exit(1)


_DEVICES = {"cpu": "this CPU", "cuda": "one GPU of an H200's speed", "mps": "an Apple GPU"}


def _format_long(seconds: float) -> str:
    from vitrail.report.formatting import format_duration

    return f"{seconds / 86400:,.0f} days" if seconds > 3 * 86400 else format_duration(seconds)


def _list_experiments(as_json: bool) -> None:
    from vitrail.reproduction.experiment_list import catalog

    entries = catalog()
    if as_json:
        typer.echo(json.dumps([entry.to_dict() for entry in entries], indent=2))
        return
    table = Table(
        "experiment",
        "claim",
        "cost at scale tiny and gpu",
        "last result",
        box=None,
        pad_edge=False,
        padding=(0, 2, 1, 0),
    )
    for entry in entries:
        table.add_row(Text(entry.name, style="bold"), entry.claim, entry.cost, entry.result)
    print_plain(table)
