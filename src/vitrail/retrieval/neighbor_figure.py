"""Figure of query images and their nearest neighbors, a row for each query."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitrail.config import DataConfig
from vitrail.data.decode import ImageLike, decode
from vitrail.data.sources import open_source_splits
from vitrail.data.sources.base import Source
from vitrail.errors import DataError, VitrailError
from vitrail.explain.canvas import FAINT, INK, QUIET, new_figure, set_title
from vitrail.explain.label_text import truncate
from vitrail.explain.overlays import Pixels, as_rgb
from vitrail.retrieval.feature_index import Match

MAX_QUERIES = 12
"""Rows of the figure."""
LABEL_CHARS = 24

ImageKey = tuple[str, str]
"""Split and key of a stored image."""


def neighbor_figure(
    queries: Sequence[tuple[str, ImageLike]],
    matches: Sequence[Sequence[Match]],
    images: Mapping[ImageKey, Pixels],
    title: str,
    subtitle: str,
) -> Figure:
    """A row for each query, (name, image): the query, then its neighbors with similarity and label.

    Neighbors that are not among `images` are drawn as an empty square with their key.
    """
    columns = 1 + max((len(row) for row in matches), default=0)
    side = min(1.6, 18 / columns)
    figure = new_figure(max(side * columns, 4.6), len(queries) * (side + 0.4) + 0.7)
    axes = figure.subplots(len(queries), columns, squeeze=False)
    for row, (name, image), found in zip(axes, queries, matches, strict=True):
        for ax in row:
            ax.axis("off")
        _draw(row[0], as_rgb(decode(image)), "query", truncate(Path(name).name, LABEL_CHARS))
        for ax, match in zip(row[1:], found, strict=False):
            label = ", ".join(match.label) if isinstance(match.label, list) else match.label or match.key
            text = truncate(label, LABEL_CHARS)
            _draw(ax, images.get((match.split, match.key)), f"{match.similarity:.3f}", text)
    set_title(figure, title, subtitle)
    return figure


def _draw(ax: Axes, pixels: Pixels | None, heading: str, text: str) -> None:
    """An image with a heading above and a line below it."""
    if pixels is None:
        ax.add_patch(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=FAINT))
        ax.set(xlim=(0, 1), ylim=(1, 0), aspect="equal")
    else:
        ax.imshow(pixels, interpolation="nearest" if min(pixels.shape[:2]) <= 64 else "antialiased")
    ax.set_title(heading, fontsize=8.5, color=INK, pad=3)
    ax.text(0.5, -0.04, text, transform=ax.transAxes, ha="center", va="top", fontsize=6.5, color=QUIET)


def find_images(config: DataConfig, wanted: Iterable[ImageKey]) -> dict[ImageKey, Pixels]:
    """Decode stored images from the data they were embedded from, by split and key; unreadable ones are left out."""
    missing = set(wanted)
    parts = open_source_splits(config, require_labels=False)
    found: dict[ImageKey, Pixels] = {}
    for split, source in (("train", parts.train), ("validation", parts.validation), ("test", parts.test)):
        keys = {key for name, key in missing if name == split}
        if source is None or not keys:
            continue
        if hasattr(source, "samples"):
            raise DataError(f"{config.source} is a stream, whose images cannot be opened by name; try shards:.")
        found |= {(split, key): pixels for key, pixels in _decoded(source, keys)}
    return found


def _decoded(source: Source, keys: set[str]) -> Iterable[tuple[str, Pixels]]:
    for i in range(len(source)):
        if (key := source.key(i)) in keys:
            try:
                yield key, as_rgb(decode(source[i].image))
            except (VitrailError, OSError):
                continue
