"""Options of the commands that compute any number of images in parts, and how they show the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import print_error, print_note, print_plain, progress_bar
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.bulk.running import BulkResult

MAX_LISTED = 10
"""Unreadable images that are listed; further ones are counted."""


@dataclass(frozen=True)
class BulkOptions:
    """How a job is divided into parts, and where they are computed."""

    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Compute shard I of N, for instance on another machine; auto: from the variables of a SLURM job array "
            "or an indexed Kubernetes Job.",
        ),
    ] = None
    join: Annotated[
        list[Path] | None,
        typer.Option("--join", metavar="DIR", help="Join the parts in these folders into --out; repeatable."),
    ] = None
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ray|ray://HOST:PORT", help="Compute the parts on a Ray cluster."),
    ] = None
    actors: Annotated[
        int | None,
        typer.Option(
            "--actors", min=1, metavar="N", help="With --on ray: worker processes.", show_default="one per GPU or core"
        ),
    ] = None
    part_size: Annotated[
        int, typer.Option("--part-size", min=1, metavar="N", help="Images per part, which a killed run computes again.")
    ] = 1024
    threads: Annotated[
        int,
        typer.Option(
            "--threads",
            min=1,
            metavar="N",
            help="Threads per batch on a CPU, which computes several batches at a time.",
        ),
    ] = 1
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False

    @property
    def run_options(self) -> dict[str, Any]:
        """The keywords of `vitrail.bulk.running.run`."""
        return {
            "shard": self.shard or "1/1",
            "on": self.on,
            "actors": self.actors,
            "images_per_part": self.part_size,
            "threads": self.threads,
            "overwrite": self.overwrite,
        }


def join_folders(options: BulkOptions, out: Path | None, task: str, given: Mapping[str, object]) -> BulkResult:
    """Join the folders of --join; `given`: options that do not go with it, and their values."""
    wrong = [name for name, value in {**given, "--shard": options.shard, "--on": options.on}.items() if value]
    if wrong:
        raise ConfigError(f"--join only joins parts that exist; leave out {', '.join(wrong)}.")
    if out is None:
        raise ConfigError(f"--join needs --out: vitrail {task} --join a/ --join b/ --out joined/.")
    from vitrail.bulk.joining import join

    return join(options.join or [], out, task=task, overwrite=options.overwrite)


@contextmanager
def show_images(what: str) -> Iterator[dict[str, Callable[..., None]]]:
    """A progress bar over images: `started` and `advance` of `vitrail.bulk.running.run`."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)
        try:
            yield {
                "started": lambda total, done: bar.update(task, total=total, completed=done),
                "advance": lambda count: bar.advance(task, count),
            }
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped by Ctrl-C; run the same command again to continue") from None


def print_result(result: BulkResult, what: str, as_json: bool, skip_bad: bool) -> None:
    """Print the result; the exit status is 1 if images were unreadable and `skip_bad` is not set."""
    if as_json:
        typer.echo(json.dumps(_to_json(result), indent=2))
    else:
        images = f"{result.num_images:,} image{'s' * (result.num_images != 1)}"
        print_plain(f"{result.path}: {images}, {what}.")
    if result.missing:
        from vitrail.storage.part_folder import describe_missing

        print_note(f"{describe_missing(result.missing, result.num_parts)}: other shards compute them.")
    count = len(result.unreadable)
    if not result.written or count > MAX_LISTED:  # those found by this call have been listed as they were found
        for key, reason in list(result.unreadable.items())[:MAX_LISTED]:
            print_note(f"{key} cannot be used: {reason}.")
    if count and not skip_bad:
        print_error(f"skipped {count:,} unreadable image{'s' * (count != 1)}; add --skip-bad to allow this.")
        raise typer.Exit(1)


def _to_json(result: BulkResult) -> dict[str, Any]:
    path = {"folder" if result.path.is_dir() else "file": str(result.path)}
    found = {**path, "num_images": result.num_images, "width": result.width}
    if result.features:
        found["features"] = result.features
    if result.path.is_dir():
        found |= {"num_parts": result.num_parts, "missing_parts": list(result.missing)}
    return found | {"unreadable": dict(result.unreadable)}
