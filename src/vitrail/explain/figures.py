"""Arrays -> matplotlib figures. Titles name what is shown, the model, the image and the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitrail.explain.canvas import COLORS, DASHES, FAINT, HEAT, INK, QUIET, new_figure, set_title
from vitrail.explain.faithfulness import RANDOM, Faithfulness
from vitrail.explain.filters import filter_images
from vitrail.explain.label_text import unique_abbreviations
from vitrail.explain.overlays import (
    Floats,
    Pixels,
    heat_overlay,
    mask_overlay,
    mosaic,
    normalize_map,
    tile_images,
    upscale,
)

# H x W pixels, h rows and w columns of patches, L layers, H heads

MAX_LABEL_CHARS = 34
"""Maximum length of a class name beside its bar."""
MAX_MAPS_PER_SIDE = 14
"""Maximum number of small maps per side; with more rows or columns, every second, third, ... is drawn."""

METHOD_CAPTIONS = {
    "rollout": "attention rollout\nall layers",
    "gradient": "gradient-weighted rollout\nfor the class",
    "attention": "attention\nlast layer",
    "occlusion": "occlusion\nprobability lost if masked",
}
"""Title and subtitle of each method."""


def overview(
    pixels: Pixels, maps: Mapping[str, Floats], scores: Sequence[tuple[str, float]], title: str, subtitle: str
) -> Figure:
    """The image, its predictions, and a heat map for each method."""
    columns = 1 + len(maps)
    height = 2.5 * pixels.shape[0] / pixels.shape[1]
    figure = new_figure(2.5 * columns, height + 1.05 + (1.25 if scores else 0))
    rows = figure.subfigures(
        2 if scores else 1, 1, height_ratios=[height + 0.35, 1.25] if scores else None, squeeze=False
    )
    axes = rows[0, 0].subplots(1, columns, squeeze=False)[0]
    _image(axes[0], pixels, "input image\nafter preprocessing")
    for ax, (kind, view) in zip(axes[1:], maps.items(), strict=True):
        _image(
            ax, heat_overlay(pixels, np.maximum(view, 0)), METHOD_CAPTIONS.get(kind, kind)
        )  # occlusion may be negative
    if scores:
        bars(rows[1, 0].subplots(1, 2, width_ratios=(1, max(0.01, columns / 2 - 1)))[0], scores)
        rows[1, 0].axes[1].axis("off")
    set_title(figure, title, subtitle)
    return figure


def bars(ax: Axes, scores: Sequence[tuple[str, float]]) -> None:
    """Bar chart of class probabilities, highest first."""
    names = unique_abbreviations([label for label, _ in scores], MAX_LABEL_CHARS)
    places = range(len(scores))[::-1]
    ax.barh(places, [score for _, score in scores], color=[COLORS[0], *[FAINT] * (len(scores) - 1)], height=0.72)
    for place, (_, score) in zip(places, scores, strict=True):
        ax.text(score + 0.008, place, f"{100 * score:.1f} %", va="center", fontsize=8.5, color=INK)
    ax.set_yticks(places, names, fontsize=8.5, color=INK)
    ax.set_xlim(0, 1.08)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def heads(pixels: Pixels, views: Floats, title: str, subtitle: str, mark: tuple[int, int] | None = None) -> Figure:
    """Attention of each head of one layer, H h w, and their mean. `mark`: the query patch, 1-based."""
    shown = [*views, views.mean(0)]
    words = [f"head {i + 1}" for i in range(len(views))] + ["all heads"]
    columns = min(len(shown), 7)
    rows = -(-len(shown) // columns)
    side = 1.9
    figure = new_figure(max(side * columns, 4.6), rows * (side * pixels.shape[0] / pixels.shape[1] + 0.3) + 0.65)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, view, text in zip(axes, shown, words, strict=False):
        _image(ax, heat_overlay(pixels, view), text)
        if mark is not None:
            height, width = (n / count for n, count in zip(pixels.shape[:2], views.shape[1:], strict=True))
            corner = (mark[1] - 1) * width - 0.5, (mark[0] - 1) * height - 0.5
            ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="white", linewidth=1.4))
    for ax in axes[len(shown) :]:
        ax.axis("off")
    set_title(figure, title, subtitle)
    return figure


def layers(views: Floats, title: str, subtitle: str) -> Figure:
    """L H h w: a small map for each layer (columns) and head (rows), each with its own scale."""
    depth, count, height, width = views.shape
    bright = np.array([normalize_map(view) for view in views.reshape(-1, height, width)]).reshape(views.shape)
    side = max(1, round(70 / max(height, width)))
    gap = max(side, 3)
    image = mosaic(bright.swapaxes(0, 1), side=side, gap=gap, low=0, high=1, colors=HEAT)
    inches = min(0.8 * depth, 14.0)
    figure = new_figure(max(inches + 0.6, 5.2), inches * image.shape[0] / image.shape[1] + 1.1)
    _mosaic_axes(figure.subplots(), image, gap, count, depth, "head", "layer")
    set_title(figure, title, subtitle)
    return figure


def faithfulness_curves(curves: Mapping[str, Faithfulness], title: str, subtitle: str) -> Figure:
    """Deletion and insertion curves of each explanation."""
    figure = new_figure(9, 4.7)
    both = figure.subplots(1, 2, sharey=True)
    ways = (
        ("deletion", "masked, most important first", "smaller"),
        ("insertion", "revealed, most important first", "larger"),
    )
    for ax, (way, what, good) in zip(both, ways, strict=True):
        ordered = sorted(curves, key=lambda n: getattr(curves[n], way).area, reverse=way == "insertion")
        for kind in ordered:
            curve = getattr(curves[kind], way)
            place = [k for k in curves if k != RANDOM].index(kind) if kind != RANDOM else 0
            color, dash = (QUIET, (0, (1, 1.5))) if kind == RANDOM else (COLORS[place % 5], DASHES[place % 5])
            label = f"{kind}  {curve.area:.3f}"
            ax.plot(curve.fractions, curve.values, color=color, linestyle=dash, linewidth=2, label=label)
        ax.set_title(f"{way}: {good} area is better", loc="left", fontsize=10, color=INK)
        ax.set_xlabel(f"fraction of patches {what}", color=INK, fontsize=9)
        ax.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
        ax.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
        ax.grid(axis="y", color=FAINT, linewidth=0.7)
        ax.spines[["top", "right", "left"]].set_visible(False)
        legend = ax.legend(
            frameon=False,
            fontsize=8.5,
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.19),
            ncols=2,
            columnspacing=1.2,
            handlelength=2.2,
            title="area under the curve, best first",
            title_fontsize=8.5,
            alignment="left",
        )
        legend.get_title().set_color(QUIET)
    both[0].set_ylim(0, 1.05 * max(1e-6, *(c.values.max() for f in curves.values() for c in (f.deletion, f.insertion))))
    both[0].set_ylabel("probability of the class", color=INK, fontsize=9)
    set_title(figure, title, subtitle)
    return figure


def rollout_grid(
    images: Sequence[Pixels], maps: Sequence[Floats], title: str, subtitle: str, columns: int = 8
) -> Figure:
    """Pairs of an image and the image masked by its map, as in the paper's Fig. 6."""
    pairs = [np.concatenate([p, mask_overlay(p, m)], axis=1) for p, m in zip(images, maps, strict=True)]
    columns = min(columns, len(pairs))
    tiled = tile_images(pairs, columns, gap=max(2, pairs[0].shape[0] // 32))
    width = min(2.3 * columns, 15.0)
    figure = new_figure(max(width, 4.6), width * tiled.shape[0] / tiled.shape[1] + 0.7)
    _image(figure.subplots(), tiled)
    set_title(figure, title, subtitle)
    return figure


def distances(by_head: Floats, uniform: float, title: str, subtitle: str) -> Figure:
    """L H in pixels: a point per head and a line through the mean of each layer."""
    depth, count = by_head.shape
    figure = new_figure(6.4, 4.2)
    ax = figure.subplots()
    x = np.arange(1, depth + 1)
    ordered = np.sort(by_head, axis=1)
    for h in range(count):
        ax.plot(x, ordered[:, h], "o", color=COLORS[0], alpha=0.65, markersize=5, markeredgewidth=0)
    ax.plot(x, by_head.mean(1), color=COLORS[1], linewidth=2)
    clear = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    words = "mean of\nthe heads"
    ax.text(depth + 0.3, by_head[-1].mean(), words, color=COLORS[1], va="center", fontsize=8.5, bbox=clear)
    ax.axhline(uniform, color=QUIET, linestyle=":", linewidth=1.2)
    words = "uniform attention"
    ax.text(0.62, uniform * 1.015, words, color=QUIET, va="bottom", fontsize=8.5, bbox=clear)
    ax.set_xlabel("layer", color=INK)
    ax.set_ylabel("mean attention distance (pixels)", color=INK)
    ax.set_xlim(0.5, depth + max(1.0, 0.16 * depth))
    ax.set_ylim(0, max(uniform, float(by_head.max())) * 1.12)
    ax.set_xticks(x if depth <= 16 else x[1::2])
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    ax.spines[["top", "right", "left"]].set_visible(False)
    set_title(figure, title, subtitle)
    return figure


def positions(similarity: Floats, title: str, subtitle: str) -> Figure:
    """h w h w: a grid of maps; the map at (i, j) is the similarity of that patch's position to all others."""
    rows, columns = similarity.shape[:2]
    step = max(-(-rows // MAX_MAPS_PER_SIDE), -(-columns // MAX_MAPS_PER_SIDE))
    shown = similarity[step // 2 :: step, step // 2 :: step]
    low = float(similarity.min())
    side = max(1, round(700 / (max(shown.shape[:2]) * max(rows, columns))))
    gap = max(3, round(0.07 * side * max(rows, columns)))
    image = mosaic(shown, side=side, gap=gap, low=low, high=1.0, colors=HEAT)
    figure = new_figure(6.6, 5.35 * image.shape[0] / image.shape[1] + 1.15)
    ax = figure.subplots()
    labels = [range(step // 2 + 1, n + 1, step) for n in (rows, columns)]
    _mosaic_axes(ax, image, gap, len(labels[0]), len(labels[1]), "patch row", "patch column", *labels)
    bar = figure.colorbar(ScalarMappable(Normalize(low, 1), HEAT), ax=ax, shrink=0.8, pad=0.02)
    bar.set_label("similarity", fontsize=9, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)
    set_title(figure, title, subtitle)
    return figure


def filters(patterns: Floats, explained_variance: Floats, title: str, subtitle: str) -> Figure:
    """n p q C: principal components of the patch embedding filters, in order."""
    columns = min(len(patterns), 7)
    rows = -(-len(patterns) // columns)
    figure = new_figure(max(0.92 * columns, 4.6), 1.1 * rows + 0.7)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, image, fraction in zip(axes, filter_images(patterns), explained_variance, strict=False):
        _image(ax, upscale(image, 96), f"{100 * fraction:.1f} %", size=7.5)
    for ax in axes[len(patterns) :]:
        ax.axis("off")
    set_title(figure, title, subtitle)
    return figure


def colors(images: Sequence[Pixels], feature_colors: Floats, title: str, subtitle: str, columns: int = 6) -> Figure:
    """Images, each with its patch features as colors below (B h w 3, from 0 to 1)."""
    columns = min(columns, len(images))
    rows = 2 * -(-len(images) // columns)
    side = min(2.2, 13 / columns)
    figure = new_figure(max(side * columns, 4.6), rows * side * images[0].shape[0] / images[0].shape[1] + 0.75)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.ravel():
        ax.axis("off")
    for i, (image, color) in enumerate(zip(images, feature_colors, strict=True)):
        row, column = 2 * (i // columns), i % columns
        _image(axes[row, column], image)
        axes[row + 1, column].imshow(color, interpolation="nearest", extent=(0, image.shape[1], image.shape[0], 0))
    set_title(figure, title, subtitle)
    return figure


def _image(ax: Axes, pixels: Pixels, text: str = "", size: float = 8.5) -> None:
    ax.imshow(pixels, interpolation="nearest" if min(pixels.shape[:2]) <= 64 else "antialiased")
    if text:
        first, _, rest = text.partition("\n")
        ax.set_title(first + ("\n" if rest else ""), fontsize=size + (1 if rest else 0), color=INK, pad=4)
        if rest:
            ax.text(
                0.5, 1.025, rest, transform=ax.transAxes, ha="center", va="bottom", fontsize=size - 0.5, color=QUIET
            )
    ax.axis("off")


def _mosaic_axes(
    ax: Axes,
    image: Pixels,
    gap: int,
    rows: int,
    columns: int,
    down: str,
    across: str,
    row_names: Sequence[int] | None = None,
    column_names: Sequence[int] | None = None,
) -> None:
    """Draw a grid of maps with numbered rows and columns."""
    ax.imshow(image, interpolation="nearest", aspect="equal")
    height, width = (image.shape[0] + gap) / rows, (image.shape[1] + gap) / columns
    down_at, across_at = ([s * (i + 0.5) - gap / 2 for i in range(n)] for s, n in ((height, rows), (width, columns)))
    ax.set_yticks(down_at, [*map(str, row_names or range(1, rows + 1))], fontsize=8)
    ax.set_xticks(across_at, [*map(str, column_names or range(1, columns + 1))], fontsize=8)
    ax.set_ylabel(down, fontsize=9, color=INK)
    ax.set_xlabel(across, fontsize=9, color=INK)
    ax.tick_params(length=0, colors=QUIET)
    ax.spines[:].set_visible(False)
