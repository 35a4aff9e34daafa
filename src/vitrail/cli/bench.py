"""`vitrail bench`: speed and memory of this package and its peers, measured in one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, print_plain
from vitrail.cli.options import Data, Device, Json, Root, parse_ints, parse_list, parse_time
from vitrail.cli.train import command_line
from vitrail.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from vitrail.bench.cases import Group
    from vitrail.bench.measurement import Benchmark, Row

PRECISIONS = ("auto", "float32", "bfloat16")

app = typer.Typer(no_args_is_help=False, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Folder for JSON, tables and a chart; the same folder continues."),
]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Rounds, in which all take turns.")]
Turn = Annotated[
    float | None,
    typer.Option("--turn", min=0, metavar="SECONDS", help="Duration of a turn.", show_default="0.5; 1 on a GPU"),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Start nothing that does not fit: 9min, 1h. Continue with the same --out."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Cases that are prepared (compiled) at a time.", show_default="1; up to 4 on a GPU"
    ),
]
BatchSizes = Annotated[
    str | None,
    typer.Option(metavar="N,...", help="Batch sizes.", show_default="by model and mode; 1,16 on a CPU"),
]


@app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: timm,torchvision,transformers,vit-pytorch; none for no library.",
            show_default="all; on a CPU timm",
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated names such as B/16,DeiT-S/16@384.",
            show_default="B/16,L/16,S/16,H/14; on a CPU Ti/16,B/16",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="A checkpoint instead of random weights; on a CPU, with --data.")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: train,inference,latency,explain.",
            show_default="train,inference; on a CPU inference",
        ),
    ] = None,
    batch_size: BatchSizes = None,
    precision: Annotated[
        str,
        typer.Option(metavar="NAME", help="float32, bfloat16, or auto: bfloat16 on a GPU, on a CPU every one it has."),
    ] = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False,
    data: Data = None,
    root: Root = None,
    calibrate: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Calibration images for int8 with the engine auto.")
    ] = None,
    device: Device = "auto",
    out: Out = None,
    rounds: Rounds = 5,
    turn: Turn = None,
    jobs: Jobs = None,
    time_limit: TimeLimit = None,
    as_json: Json = False,
) -> None:
    """Measure the speed and memory of vitrail beside timm, torchvision, transformers and vit-pytorch.

    vitrail bench --models B/16 --out bench

    Each case runs in a process of its own, and the cases of a table take turns, on random images and weights.

    The outputs of each case are compared with those of the plain float32 network.

    On a CPU, every installed engine is measured.

    With --model and --data, top-1 accuracy on labeled images decides which outputs agree.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    if model is not None and models is not None:
        raise ConfigError("got --model and --models; pass one of them.")
    if data is not None and model is None:
        raise ConfigError("--data needs --model FILE: the accuracy of random weights says nothing.")
    check_choice("--precision", precision, PRECISIONS)
    limit = None if time_limit is None else parse_time(time_limit, "--time-limit")
    sizes = None if batch_size is None else parse_sizes(batch_size, "--batch-size")
    with err.status("starting"):
        from vitrail.bench.benchmark import benchmark
        from vitrail.bench.cases import Request
    request = Request(
        against=() if against == "none" else parse_list(against),
        models=(model,) if model is not None else parse_list(models),
        modes=parse_list(modes),
        batch_sizes=sizes,
        precision=precision,
        device=device,
        eager=eager,
        data=data,
        root=root,
        calibrate=calibrate,
    )
    with continue_hint(out), show_progress() as progress:
        result = benchmark(
            request,
            out,
            rounds=rounds,
            turn_s=turn,
            jobs=jobs,
            time_limit_s=limit,
            command=command_line(),
            progress=progress,
            show=(lambda group, rows: None) if as_json else print_group,
        )
    finish(result, out, as_json)


def _refuse_options(ctx: typer.Context) -> None:
    """Options before the name of another benchmark would be ignored."""
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.removeprefix('as_').replace('_', '-')}"
            raise ConfigError(f"{option} is an option of `vitrail bench`; pass options after {ctx.invoked_subcommand}.")


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError for another value of an option."""
    if value not in choices:
        raise ConfigError(f"unknown {option} {value!r}{did_you_mean(value, choices)}")


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """`"1,16"` -> (1, 16), positive numbers."""
    sizes = parse_ints(text, option)
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{option} expects positive numbers such as 64 or 1,16, got {text!r}.")
    return sizes


@contextmanager
def continue_hint(out: Path | None) -> Iterator[None]:
    """Say after Ctrl-C how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        how = "run the same command again to continue" if out is not None else "with --out DIR it could be continued"
        raise KeyboardInterrupt(f"stopped by Ctrl-C; {how}") from None


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """A spinner with the current step in a terminal, else a line for each."""
    if not err.is_terminal:
        yield lambda what: err.print(Text(what, style="dim"), soft_wrap=True)
        return
    with err.status("starting") as status:
        yield lambda what: status.update(Text(what))


def print_group(group: Group, rows: Sequence[Row]) -> None:
    """The table of one group."""
    from vitrail.bench.result_tables import cells

    headings, lines = cells(rows)
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    texts = ("library", "version", "setting", "precision", "")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != "", justify="left" if heading in texts else "right")
    for line in lines:
        table.add_row(*line, style="bold" if line[0] == "vitrail" else "")
    print_plain(Text(group.title, style="bold"))
    print_plain(table)
    print_plain(Text(""))


def finish(result: Benchmark, out: Path | None, as_json: bool) -> None:
    """Print the JSON or the files; the exit status is 1 if a case of this package failed or nothing was measured."""
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    elif out is not None:
        files = [out / name for name in ("bench.json", "bench.md", "bench.png")]
        print_plain(Text("\n".join(str(file) for file in files if file.exists())))
    if result.unfinished:
        again = "run the same command again to continue" if out is not None else "raise --time-limit"
        err.print(Text(f"{result.unfinished} tables did not fit in the time limit; {again}."), soft_wrap=True)
    own = [row for row in result.rows if row.is_own]
    if not any(row.measured for row in own) or (not result.unfinished and not all(row.measured for row in own)):
        raise typer.Exit(1)
