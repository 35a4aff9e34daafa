"""`vitrail convert`: convert a checkpoint from one format to another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.console import err, one_line
from vitrail.cli.option_groups import CheckpointOptions, with_option_groups
from vitrail.cli.options import Json
from vitrail.errors import CheckpointError, NotFoundError, did_you_mean

SourceArgument = Annotated[str, typer.Argument(metavar="SRC", help="A name, a file, a folder or a hub id.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="A folder or a file, depending on the format.")]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="vitrail, timm, huggingface, torchvision, google, big_vision, facebook or microsoft.",
    ),
]


@with_option_groups
def convert(
    src: SourceArgument,
    dst: Destination,
    to: To = "vitrail",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Convert even if the other library's results differ slightly.")
    ] = False,
    checkpoint: CheckpointOptions = CheckpointOptions(),
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to another format, read it back and compare every tensor."""
    with err.status(f"reading {src}"):
        from vitrail.plugins import plugin_names
        from vitrail.runtime import warn_once
        from vitrail.weights import conversion
        from vitrail.weights.checkpoint import FORMATS, read
        from vitrail.weights.locate import locate

    formats = {*(f.name for f in FORMATS), *plugin_names("formats")}
    if to not in formats:
        raise NotFoundError(f"unknown format {to!r}{did_you_mean(to, formats)}")
    if not overwrite and (dst.is_file() or (dst.is_dir() and any(dst.iterdir()))):
        raise CheckpointError(f"{dst} already exists; choose another name, or replace it with --overwrite.")
    options = checkpoint.load_options
    location = locate(src)  # shows its own progress bar if it downloads
    with err.status(f"reading {src}"):
        net, info = read(location.path, dtype=None, **options)
    if location.origin:
        info = info.replace(origin=location.origin)
    warn_once([*location.notes, *info.notes])
    with err.status(f"writing {dst} and reading it back"):
        result = conversion.convert(net, info, dst, to=to, overwrite=overwrite, approximate=approximate)
    warn_once(result.notes)
    if as_json:
        report = {
            "source": src,
            "destination": str(dst),
            "format": to,
            "tensors": result.num_tensors,
            "identical": True,
        }
        typer.echo(json.dumps(report | {"drift": result.inexact_conventions, "lost": result.lost}))
    else:
        typer.echo(one_line(f"{dst}: {to} format, {result.num_tensors} tensors, identical when read back."), nl=False)
