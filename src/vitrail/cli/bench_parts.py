"""`vitrail bench engines|input|loop|serve|growth|communication`: benchmarks of single parts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.bench import (
    Out,
    Rounds,
    TimeLimit,
    Turn,
    check_choice,
    continue_hint,
    finish,
    parse_sizes,
    print_group,
    show_progress,
)
from vitrail.cli.console import err, print_plain
from vitrail.cli.options import Data, Device, Json, Root, parse_list, parse_time
from vitrail.cli.train import command_line
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.bench.growth import Growth

Shards = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="A folder of tar shards with JPEGs.", show_default="bundled images"),
]


def engines(
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="A name (random weights), a file or a hub id.")
    ] = "Ti/16",
    batch_size: Annotated[str, typer.Option(metavar="N,...", help="Batch sizes.")] = "8",
    calibrate: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Calibration images for int8 with the engine auto.")
    ] = None,
    data: Data = None,
    root: Root = None,
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False,
    out: Out = None,
    rounds: Rounds = 7,
    turn: Turn = None,
    as_json: Json = False,
) -> None:
    """Measure one model on this CPU in every installed engine and precision, beside timm.

    vitrail bench engines --model MODEL --data shards:val-*.tar

    With --data, the top-1 accuracy of each engine is measured too.
    """
    sizes = parse_sizes(batch_size, "--batch-size")
    with err.status("starting"):
        from vitrail.bench.benchmark import benchmark
        from vitrail.bench.cases import Request
    request = Request(
        models=(model,),
        modes=("inference",),
        batch_sizes=sizes,
        device="cpu",
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
            command=command_line(),
            progress=progress,
            show=(lambda group, rows: None) if as_json else print_group,
        )
    finish(result, out, as_json)


def input_pipeline(
    against: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated, or none.")] = "timm,torchvision",
    small: Annotated[int, typer.Option(min=0, metavar="N", help="Number of images with a short side of 256.")] = 4096,
    large: Annotated[int, typer.Option(min=0, metavar="N", help="Number of images of 12 megapixels.")] = 48,
    data: Shards = None,
    rounds: Rounds = 5,
    cores: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of cores to use.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the input pipeline, from JPEG files to training batches, beside timm and torchvision."""
    with err.status("starting"):
        from vitrail.bench.input_speed import measure_input
    peers = () if against == "none" else parse_list(against) or ()
    with show_progress() as progress:
        rows = measure_input(
            against=peers, small=small, large=large, shards=data, rounds=rounds, cores=cores, progress=progress
        )
    _print([row.to_dict() for row in rows], as_json)


def training_loop(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, and settings to change.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps in each round.")] = 200,
    rounds: Rounds = 3,
    as_json: Json = False,
) -> None:
    """Measure the training loop of a recipe relative to its bare training step.

    vitrail bench loop cifar10
    """
    recipe, overrides = _recipe(arguments)
    with err.status("starting"):
        from vitrail.bench.loop_speed import measure_loop
    with show_progress() as progress:
        found = measure_loop(recipe, overrides, steps_per_round=steps, rounds=rounds, progress=progress)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    pairs = zip(found.bare, found.loop, strict=True)
    _print([{"bare step, images/s": bare, "loop, images/s": loop, "ratio": loop / bare} for bare, loop in pairs], False)
    print_plain(Text(f"ratio of the medians: {found.ratio:.1%}"))


def service(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a file, a folder or a hub id.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="Further options of `vitrail serve`, after --.")
    ] = None,
    data: Shards = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="torch, onnxruntime, openvino or auto.")] = "torch",
    clients: Annotated[int, typer.Option(min=1, metavar="N", help="Number of concurrent clients.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="Duration of each part of a round.")] = 8,
    rounds: Rounds = 3,
    as_json: Json = False,
) -> None:
    """Measure `vitrail serve` under load, relative to a plain loop without HTTP.

    vitrail bench serve MODEL --clients 128 -- --device cuda --workers 4
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the server; must be set before torch is imported
    with err.status("starting"):
        from vitrail.bench.serve_load import measure_service, median_round
    rows = measure_service(
        model,
        engine=engine,
        shards=data,
        clients=clients,
        seconds=seconds,
        rounds=rounds,
        options=options or (),
        show=lambda row: err.print(Text(f"{row.service:.1f} images/s, {row.ratio:.0%} of the plain loop", style="dim")),
    )
    middle = median_round(rows)
    if as_json:
        value = {"rounds": [row.to_dict() for row in rows], "median": middle.to_dict()}
        typer.echo(json.dumps(value, indent=2))
        return
    _print([row.to_dict() for row in (*rows, middle)], False)
    print_plain(
        Text(
            f"median of {len(rows)}: {middle.service:.1f} images/s, {middle.ratio:.0%} of the plain loop "
            f"({middle.cpu_ratio:.0%} by CPU time); p99 {middle.p99_ms / middle.mean_ms:.1f} times the mean latency"
        )
    )


def growth(
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="A ViT, such as B/16.")] = "",
    mode: Annotated[str, typer.Option(metavar="NAME", help="train or inference.")] = "inference",
    image_sizes: Annotated[
        str | None, typer.Option(metavar="N,...", help="Image sizes in pixels.", show_default="160 to 1024")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="N,...", help="Batch sizes.", show_default="1 to 256; 1 to 16 on a CPU")
    ] = None,
    depths: Annotated[str | None, typer.Option(metavar="N,...", help="Depths.", show_default="3,6,12,24")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Batch size while others vary.", show_default="16; 1 on a CPU"),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="With torch.compile, which takes longer.")] = False,
    device: Device = "auto",
    out: Out = None,
    rounds: Rounds = 3,
    turn: Turn = None,
    time_limit: TimeLimit = None,
    as_json: Json = False,
) -> None:
    """Measure how time and memory grow with image size, batch size and depth, and a ViT against a ResNet of its FLOPs.

    vitrail bench growth --model L/16 --mode train --batch-size 8 --out growth
    """
    check_choice("--mode", mode, ("train", "inference"))
    limit = None if time_limit is None else parse_time(time_limit, "--time-limit")
    lists = {
        name: parse_sizes(text, f"--{name.replace('_', '-')}")
        for name, text in (("image_sizes", image_sizes), ("batch_sizes", batch_sizes), ("depths", depths))
        if text is not None
    }
    with err.status("starting"):
        from vitrail.bench.benchmark import benchmark_device
        from vitrail.bench.growth import measure_growth, write_growth
    model = model or ("Ti/16" if benchmark_device(device) == "cpu" else "B/16")
    with continue_hint(out), show_progress() as progress:
        found = measure_growth(
            model,
            out,
            mode=mode,
            device=device,
            batch_size=batch_size,
            compiled=compiled,
            rounds=rounds,
            turn_s=turn,
            time_limit_s=limit,
            command=command_line(),
            progress=progress,
            **lists,
        )
    if out is not None:
        write_growth(found, out, command_line())
    _print_growth(found, out, as_json)
    if not any(point.ms for sweep in found.sweeps for point in sweep.points):
        raise typer.Exit(1)


def _print_growth(found: Growth, out: Path | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    for sweep in found.sweeps:
        print_plain(Text(sweep.title, style="bold"))
        points: list[dict[str, Any]] = []
        for p in sweep.points:
            costs = {"ms/image": p.ms, "peak MB/image": p.memory_mb, "GFLOP": p.gflops}
            points.append({sweep.variable: p.value, **costs, "status": p.status})
        _print(points, False)
        for name, quantity in (("time", "ms"), ("memory", "memory_mb"), ("FLOPs", "gflops")):
            overall, last = sweep.exponent(quantity), sweep.last_exponent(quantity)
            if overall is not None and last is not None:
                print_plain(Text(f"exponent of {name}: {overall:z.2f}; of the last two points {last:z.2f}"))
        print_plain(Text(""))
    print_plain(Text("ViT and ResNet of similar FLOPs", style="bold"))
    names = ("model", "images_per_s", "tflops", "memory_gb", "ratio", "status")
    rows = [{name: getattr(row, name) for name in names} for pair in found.pairs for row in pair]
    _print([{"model": row.pop("model"), "GFLOP": found.gflops[row_model], **row} for row, row_model in
            [(dict(row), row["model"]) for row in rows]], False)  # fmt: skip
    if out is not None:
        print_plain(Text(f"{out / 'growth.json'}\n{out / 'growth.png'}"))


def communication(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, and settings to change.")
    ] = None,
    processes: Annotated[str, typer.Option(metavar="N,...", help="Numbers of processes.")] = "2,4",
    parallel: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated: ddp,fsdp,hsdp.")] = "ddp,fsdp",
    shard_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="With hsdp: number of processes that share the weights.")
    ] = 2,
    as_json: Json = False,
) -> None:
    """Count what a training step communicates: bytes by collective, in real runs with several processes on this CPU.

    vitrail bench communication --processes 2,4
    """
    recipe, overrides = _recipe(arguments)
    kinds = parse_list(parallel) or ()
    for kind in kinds:
        check_choice("--parallel", kind, ("ddp", "fsdp", "hsdp"))
    worlds = parse_sizes(processes, "--processes")
    with err.status("starting"):
        from vitrail.bench.communication import count_communication
    with show_progress() as progress:
        found = count_communication(recipe, overrides, worlds, kinds, progress, shard_size)
    _print([entry.to_dict() for entry in found], as_json)


def _recipe(arguments: Sequence[str] | None) -> tuple[str, list[str]]:
    """["cifar10", "batch_size=64"] -> the recipe and its overrides; the recipe is digits by default."""
    names = [text for text in arguments or () if "=" not in text]
    if len(names) > 1:
        raise ConfigError(f"expected one recipe, got {', '.join(names)}; settings are written KEY=VALUE.")
    return (names or ["digits"])[0], [text for text in arguments or () if "=" in text]


def _print(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Rows as JSON or as a table, without columns that are empty or say that all is well."""
    if as_json:
        typer.echo(json.dumps(list(rows), indent=2))
        return
    columns = [name for name in rows[0] if any(row[name] not in (None, "", "ok") for row in rows)]
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_text = any(isinstance(row[name], str) for row in rows)
        table.add_column(name.replace("_", " "), no_wrap=not is_text, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    print_plain(table)


def _cell(value: Any) -> str:
    if value is None or value == "ok":
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
