"""`vitrail search`: the stored images that are most similar to some images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import one_line, print_note, progress_bar
from vitrail.cli.model_options import BatchSize, ModelSpec, open_model
from vitrail.cli.option_groups import LoadOptions, with_option_groups
from vitrail.cli.options import Data, Json, Root
from vitrail.cli.predict import (
    Out,
    UnreadableImages,
    check_destination,
    find_images,
    json_list,
    print_text,
    write_output,
)
from vitrail.errors import ConfigError, VitrailError

if TYPE_CHECKING:
    from vitrail.retrieval.feature_index import FeatureIndex, Match
    from vitrail.retrieval.query_features import QueryEncoder


@dataclass
class Row:
    """The matches of one image, or the error that occurred when reading it."""

    path: Path
    matches: list[Match] = field(default_factory=list)
    error: str = ""


Images = Annotated[
    list[str] | None,
    typer.Argument(metavar="[IMAGE]...", help="Image files, folders, or quoted patterns ('photos/**/*.jpg')."),
]
Index = Annotated[
    Path | None, typer.Option("--index", "-i", metavar="PATH", help="The features: the --out of vitrail embed.")
]
Recall = Annotated[
    float,
    typer.Option(
        "--recall", metavar="R", help="Share of the 10 nearest images that an index has to find, as measured on itself."
    ),
]


@with_option_groups
def search(
    images: Images = None,
    index: Index = None,
    model: ModelSpec = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of similar images to show.")] = 10,
    exclude_self: Annotated[
        bool, typer.Option("--exclude-self", help="Leave out the image itself, if it is among the features.")
    ] = False,
    recall: Recall = 0.95,
    exact: Annotated[bool, typer.Option("--exact", help="Compare every image, without an index.")] = False,
    build: Annotated[bool, typer.Option("--build", help="Build the index anew. Needs no images.")] = False,
    lists: Annotated[
        int | None,
        typer.Option("--lists", metavar="N", help="With --build: inverted lists.", show_default="4 sqrt(images)"),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", help="Draw the images and their neighbors: a .png file.")
    ] = None,
    data: Data = None,
    root: Root = None,
    out: Out = None,
    batch_size: BatchSize = 32,
    loading: LoadOptions = LoadOptions(),
    as_json: Json = False,
) -> None:
    """Find the most similar images among features that `vitrail embed` wrote. Prints CSV for a folder or a pattern.

    vitrail search cat.jpg --index features.parquet --model MODEL

    Collections of 50,000 images or more get an index beside the features, which is built once.
    """
    as_json = as_json or (out is not None and out.suffix.lower() == ".json")
    if index is None:
        raise ConfigError("search needs --index PATH: vitrail search cat.jpg --index features.parquet.")
    if not images and not build:
        raise ConfigError("search needs an image, or --build: vitrail search cat.jpg --index features.parquet.")
    if (exact and build) or (lists is not None and not build):
        raise ConfigError("--lists needs --build, and --exact uses no index; drop one of them.")
    if figure is None and (data is not None or root is not None):
        raise ConfigError("--data and --root are for the images of --figure FILE; pass all, or leave them out.")
    options = loading.load_options
    paths, many = find_images(images) if images else ([], False)
    for file in (out, figure):
        if file is not None:
            check_destination(file)
    if figure is not None:
        _check_extension(figure)
    opened = _open_index(index, recall, exact, build, lists)
    print_note(f"{index}: {opened}.")
    if not paths:
        return
    rows = _Rows(opened, _encoder(opened, model, options), paths, batch_size, top, exclude_self)
    kept = list(rows) if figure is not None else rows
    text = _json(kept) if as_json else _csv(kept) if many or out is not None else _listing(kept)
    if out is not None:
        write_output(out, "".join(text))
        print_note(f"wrote the neighbors of {len(paths) - rows.unreadable.count} of {len(paths)} images to {out}.")
    else:
        print_text(text)
    if figure is not None:
        _draw(figure, [row for row in kept if not row.error], opened, data, root)
    rows.unreadable.exit_if_any(len(paths))


def _open_index(path: Path, recall: float, exact: bool, build: bool, lists: int | None) -> FeatureIndex:
    from vitrail.retrieval.feature_index import FeatureIndex

    with progress_bar() as bar:
        task = bar.add_task("indexing", total=None, visible=build)
        callbacks: dict[str, Any] = {
            "started": lambda total: bar.update(task, total=total, visible=True),
            "advance": lambda count: bar.advance(task, count),
        }
        if build:
            return FeatureIndex.build(path, lists=lists, recall=recall, **callbacks)
        return FeatureIndex.open(path, recall=recall, exact=exact, **callbacks)


def _encoder(index: FeatureIndex, model: str | None, options: dict[str, Any]) -> QueryEncoder:
    """The model of --model; without it the shipped one, if it made the features."""
    from vitrail.retrieval.query_features import QueryEncoder
    from vitrail.weights.shipped import DEFAULT_MODEL

    vit = open_model(model or DEFAULT_MODEL.name, require_classes=False, require_network=False, **options)
    try:
        return QueryEncoder.for_features(vit, index.metadata, index.store.path)
    except ConfigError as error:
        if model is None:
            made_by = index.metadata.get("model")
            raise ConfigError(
                f"{index.store.path} was made by {made_by}, not by the model that ships with vitrail; pass it with "
                "--model."
            ) from error
        raise


class _Rows:
    """Iterates over the rows in input order as they are found; reports unreadable images."""

    def __init__(
        self, index: FeatureIndex, encoder: QueryEncoder, paths: list[Path], batch_size: int, top: int, no_self: bool
    ) -> None:
        self.index, self.encoder, self.paths = index, encoder, paths
        self.batch_size, self.top, self.no_self = batch_size, top, no_self
        self.unreadable = UnreadableImages()

    def __iter__(self) -> Iterator[Row]:
        from vitrail.retrieval.search import search_stream

        answers = search_stream(
            self.paths,
            self.index,
            self.encoder,
            top=self.top,
            exclude_self=self.no_self,
            batch_size=self.batch_size,
        )
        with progress_bar(len(self.paths) > self.batch_size) as bar:
            task = bar.add_task("searching", total=len(self.paths))
            for path, answer in zip(self.paths, answers, strict=True):
                if isinstance(answer, VitrailError):
                    self.unreadable.report(str(answer))
                    yield Row(path, error=str(answer))
                else:
                    yield Row(path, answer)
                bar.advance(task)


def _label(match: Match) -> str:
    return ", ".join(match.label) if isinstance(match.label, list) else match.label or ""


def _listing(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row.error:
            continue
        lines = [f"  {m.similarity:6.3f}  {_label(m)}{'  ' * bool(_label(m))}{m.key}  ({m.split})" for m in row.matches]
        yield one_line(row.path) + "".join(map(one_line, lines or ["  no similar images"]))


def _csv(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each match: path, rank from 1, similarity, label, key, split; and error for an unreadable image."""
    from vitrail.data.csv_escape import csv_line

    yield csv_line(["path", "rank", "similarity", "label", "key", "split", "error"])
    for row in rows:
        for rank, match in enumerate(row.matches, start=1):
            yield csv_line([row.path, rank, f"{match.similarity:.6f}", _label(match), match.key, match.split, ""])
        if row.error:
            yield csv_line([row.path, *[""] * 5, row.error])


def _json(rows: Iterable[Row]) -> Iterator[str]:
    """A JSON list with one object per image."""
    return json_list(_entry(row) for row in rows)


def _entry(row: Row) -> dict[str, Any]:
    found = {"error": row.error} if row.error else {"matches": [asdict(match) for match in row.matches]}
    return {"path": str(row.path)} | found


def _check_extension(path: Path) -> None:
    """Raise ConfigError if a figure cannot have this name, before any work is done."""
    from vitrail.explain.canvas import FORMATS

    *drawn, _ = FORMATS  # the last one, npz, is data
    if path.suffix.lower().removeprefix(".") not in drawn:
        raise ConfigError(f"--figure {path}: expected one of the file extensions {', '.join(drawn)}.")


def _draw(path: Path, rows: list[Row], index: FeatureIndex, data: str | None, root: str | None) -> None:
    """Write the figure of the first images and their neighbors."""
    from vitrail.config import DataConfig
    from vitrail.explain.canvas import save
    from vitrail.retrieval.neighbor_figure import MAX_QUERIES, find_images, neighbor_figure

    if not rows:
        return
    if len(rows) > MAX_QUERIES:
        print_note(f"the figure has the first {MAX_QUERIES} of {len(rows)} images.")
    rows = rows[:MAX_QUERIES]
    wanted = {(match.split, match.key) for row in rows for match in row.matches}
    source = data or index.metadata.get("data") or ""
    try:
        found = find_images(DataConfig(source=source, root=root), wanted)
    except VitrailError as error:
        raise type(error)(f"--figure: {error} Pass the embedded images with --data SPEC.") from error
    if missing := len(wanted) - len(found):
        print_note(f"{missing} of {len(wanted)} neighbors are not in {source} or cannot be read; they are not drawn.")
    title = f"most similar images: {index.metadata.get('model')}, {index.metadata.get('features')}"
    drawn = neighbor_figure(
        [(str(row.path), row.path) for row in rows], [row.matches for row in rows], found, title, f"{source}: {index}"
    )
    save(drawn, path)
    print_note(f"wrote {path}.")
