"""`vitrail datasets`: what is known by name, where it lies, how to get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, out, show
from vitrail.cli.options import Json
from vitrail.errors import ConfigError, NotFound, nearest

if TYPE_CHECKING:
    from vitrail.data.sources.catalog import DatasetInfo

WIDE = 100
"""Columns from which addresses fit beside the numbers."""

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them, with all that is known of it.")]
Root = Annotated[str | None, typer.Option("--root", metavar="DIR", help="A folder to look in first, before the cache.")]
Get = Annotated[bool, typer.Option("--get", help="Download it where it is not here yet, and verify its content.")]


def datasets(name: Name = None, root: Root = None, get: Get = False, as_json: Json = False) -> None:
    """List the data sets that are known by name: their size, and where they lie or come from.

    Any folder of class folders, table, tar shards or hf:user/name can be used too: see docs/data.md.
    """
    if get and name is None:
        raise ConfigError("--get wants the name of the data set to get, such as vitrail datasets cifar10 --get.")
    with err.status("looking"):
        from vitrail.data.sources.builtin import ensure_available
        from vitrail.data.sources.catalog import CATALOG

        entries = list(CATALOG.values()) if name is None else [_entry(name)]
    if get:
        ensure_available(entries[0], root)
    rows = [_row(entry, root) for entry in entries]
    if as_json:
        typer.echo(json.dumps({"datasets": rows}, indent=2))
    elif name is None:
        show(_listing(rows))
        if out.width < WIDE and not all(row["here"] for row in rows):
            show(Text(f"From where: in a window of {WIDE} columns, or vitrail datasets NAME", style="dim"))
    else:
        show(_detail(rows[0], verified=get))


def _entry(name: str) -> DatasetInfo:
    from vitrail.data.sources.catalog import CATALOG
    from vitrail.data.sources.source_spec import canonical_name

    if found := canonical_name(name):
        return CATALOG[found]
    raise NotFound(f"no data set {name!r} is known by name{nearest(name, CATALOG)}")


def _row(entry: DatasetInfo, root: str | None) -> dict[str, Any]:
    from vitrail.data.sources.builtin import find_dataset

    place = find_dataset(entry, root) if entry.files else None
    return {
        "name": entry.name,
        "title": entry.title,
        "train": entry.split_sizes[0],
        "test": entry.split_sizes[1],
        "classes": list(entry.labels),
        "image": list(entry.shape),
        "here": not entry.files or place is not None,
        "folder": str(place.folder) if place else None,
        "layout": place.layout if place else None,
        "download": entry.base_urls[0] if entry.base_urls else None,
        "bytes": entry.size,
        "digest": entry.digest or None,
    }


def _listing(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("images", "classes", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    for row in rows:
        images = f"{row['train'] + row['test']:,}"
        table.add_row(row["name"], images, str(len(row["classes"])), _size(row), _where(row, out.width >= WIDE))
    return table


def _detail(row: dict[str, Any], verified: bool) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("name", f"{row['name']}: {row['title']}")
    table.add_row("images", f"{row['train']:,} to learn from, {row['test']:,} to test on")
    table.add_row("size", f"{_size(row)}, {'gray' if row['image'][2] == 1 else 'color'}")
    table.add_row("classes", Text(f"{len(row['classes'])}: {', '.join(row['classes'])}"))
    table.add_row("where", _where(row, wide=True))
    if row["layout"]:
        table.add_row("as", row["layout"])
    if row["digest"]:
        table.add_row("content", Text(f"sha256 {row['digest']}{' (verified)' if verified else ''}"))
    elif row["bytes"]:
        table.add_row("content", "no digest known; its files' published MD5 is checked when they are downloaded")
    return table


def _size(row: dict[str, Any]) -> str:
    height, width, _ = row["image"]
    return f"{height} x {width}"


def _where(row: dict[str, Any], wide: bool) -> Text:
    from vitrail.data.sources.data_cache import display_path

    if row["folder"]:
        return Text(display_path(Path(row["folder"])))
    if row["here"]:
        return Text("in scikit-learn")
    origin = f" from {row['download']}" if wide else ""
    return Text(f"would be downloaded{origin}, {row['bytes'] / 1e6:,.0f} MB", style="dim")
