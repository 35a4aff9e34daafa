"""`vitrail datasets`: list and download the built-in datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, out, print_plain
from vitrail.cli.options import Json
from vitrail.errors import ConfigError, NotFoundError, did_you_mean

if TYPE_CHECKING:
    from vitrail.data.sources.catalog import DatasetInfo

WIDE = 100
"""Terminal width from which the list includes download URLs."""

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A dataset to show in detail.")]
Root = Annotated[str | None, typer.Option("--root", metavar="DIR", help="A folder to search before the cache.")]
Download = Annotated[
    bool, typer.Option("--download", help="Download the dataset unless it is here, and verify its content.")
]


def datasets(name: Name = None, root: Root = None, download: Download = False, as_json: Json = False) -> None:
    """List the built-in datasets: number of images, classes, image size, and where they are.

    A folder of class folders, a table, tar shards and hf:user/name can be used as well: see docs/data.md.
    """
    if download and name is None:
        raise ConfigError("--download needs the name of a dataset, such as vitrail datasets cifar10 --download.")
    with err.status("searching"):
        from vitrail.data.sources.builtin import ensure_available
        from vitrail.data.sources.catalog import CATALOG

        entries = list(CATALOG.values()) if name is None else [_dataset(name)]
    if download:
        ensure_available(entries[0], root)
    rows = [_row(entry, root) for entry in entries]
    if as_json:
        typer.echo(json.dumps({"datasets": rows}, indent=2))
    elif name is None:
        print_plain(_listing(rows))
        if out.width < WIDE and not all(row["available"] for row in rows):
            print_plain(
                Text(f"For the URLs, widen the window to {WIDE} columns or run vitrail datasets NAME", style="dim")
            )
    else:
        print_plain(_detail(rows[0], verified=download))


def _dataset(name: str) -> DatasetInfo:
    from vitrail.data.sources.catalog import CATALOG
    from vitrail.data.sources.source_spec import canonical_name

    if found := canonical_name(name):
        return CATALOG[found]
    raise NotFoundError(f"unknown built-in dataset {name!r}{did_you_mean(name, CATALOG)}")


def _row(dataset: DatasetInfo, root: str | None) -> dict[str, Any]:
    from vitrail.data.sources.builtin import find_dataset

    location = find_dataset(dataset, root) if dataset.files else None
    return {
        "name": dataset.name,
        "title": dataset.title,
        "train": dataset.split_sizes[0],
        "test": dataset.split_sizes[1],
        "class_names": list(dataset.labels),
        "image_shape": list(dataset.shape),
        "available": not dataset.files or location is not None,
        "folder": str(location.folder) if location else None,
        "layout": location.layout if location else None,
        "url": dataset.base_urls[0] if dataset.base_urls else None,
        "download_bytes": dataset.size,
        "sha256": dataset.digest or None,
    }


def _listing(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("images", "classes", "image size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("location", overflow="fold")
    for row in rows:
        images = f"{row['train'] + row['test']:,}"
        location = _format_location(row, out.width >= WIDE)
        table.add_row(row["name"], images, str(len(row["class_names"])), _format_size(row), location)
    return table


def _detail(row: dict[str, Any], verified: bool) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("name", f"{row['name']}: {row['title']}")
    table.add_row("images", f"{row['train']:,} training, {row['test']:,} test")
    table.add_row("image size", f"{_format_size(row)}, {'gray' if row['image_shape'][2] == 1 else 'color'}")
    table.add_row("classes", Text(f"{len(row['class_names'])}: {', '.join(row['class_names'])}"))
    table.add_row("location", _format_location(row, wide=True))
    if row["layout"]:
        table.add_row("layout", row["layout"])
    if row["sha256"]:
        table.add_row("content", Text(f"sha256 {row['sha256']}{' (verified)' if verified else ''}"))
    elif row["download_bytes"]:
        table.add_row("content", "no digest known; the published MD5 of its files is checked after a download")
    return table


def _format_size(row: dict[str, Any]) -> str:
    height, width, _ = row["image_shape"]
    return f"{height} x {width}"


def _format_location(row: dict[str, Any], wide: bool) -> Text:
    from vitrail.data.sources.data_cache import display_path

    if row["folder"]:
        return Text(display_path(Path(row["folder"])))
    if row["available"]:
        return Text("in scikit-learn")
    origin = f" from {row['url']}" if wide else ""
    return Text(f"not downloaded ({row['download_bytes'] / 1e6:,.0f} MB{origin})", style="dim")
