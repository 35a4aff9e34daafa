"""Sections about the model: attention rollout, position similarity, patch embedding filters."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import torch

from vitrail.errors import ModelError
from vitrail.explain.filters import filter_components, filter_images
from vitrail.explain.overlays import Pixels, heat_overlay, mosaic, tile_images, upscale
from vitrail.explain.positions import SIMILARITY_MEANING, position_similarity
from vitrail.explain.rollout import rollout_map
from vitrail.models import ViT
from vitrail.report.markup import Markup, join, tag
from vitrail.report.report_data import ReportData, most_confident_errors, typical_correct
from vitrail.report.thumbnails import img, png_uri, thumbnail

NUM_ATTENTION_IMAGES = 8
"""Number of images shown with their attention, two of them errors if there are any."""


def attention_examples(report: ReportData) -> list[tuple[int, str]]:
    """Indices of images in the source, each with its caption."""
    samples = report.samples
    if report.source is None:
        return []
    if samples is None:
        even = np.linspace(0, len(report.source) - 1, min(NUM_ATTENTION_IMAGES, len(report.source))).astype(int)
        return [(int(i), "") for i in dict.fromkeys(even.tolist())]
    wrong = [
        (m.row, f"{report.short_label(m.predicted)} (true: {report.true_labels(samples, m.row)})")
        for m in most_confident_errors(samples, 2)
    ]
    rows = typical_correct(samples, NUM_ATTENTION_IMAGES - len(wrong))
    correct = [(row, report.true_labels(samples, row)) for row in rows]
    return [(int(samples.index[row]), caption) for row, caption in (*correct, *wrong)]


def attention_maps(report: ReportData, indices: list[int]) -> npt.NDArray[np.floating[Any]]:
    """n h w: attention rollout from the output to each patch; ModelError if the network has no attention."""
    assert report.source is not None
    like = next(report.net.parameters())
    maps = []
    for index in indices:  # one at a time: the attention matrices of a batch may not fit in memory
        images = report.preprocess(report.source[index].image).to(like)
        with torch.no_grad():
            maps.append(rollout_map(report.net, images)[0].float().cpu().numpy())
    return np.stack(maps)


def attention_section(report: ReportData) -> tuple[Markup, list[Pixels]]:
    """Each image next to its attention rollout; also returns the pairs for a figure."""
    examples = [(index, caption, report.pixels(index)) for index, caption in attention_examples(report)]
    readable = [(index, caption, pixels) for index, caption, pixels in examples if pixels is not None]
    if not readable:
        return tag("p", "There are no images to show.", cls="quiet"), []
    try:
        maps = attention_maps(report, [index for index, _, _ in readable])
    except ModelError as error:
        return unavailable(error), []
    cards, figure = [], []
    for (index, caption, pixels), view in zip(readable, maps, strict=True):
        small = thumbnail(pixels)
        overlay = heat_overlay(small, view)
        pair = tag("div", img(small, caption or "an image"), img(overlay, "attention rollout"), cls="pair-of")
        below = tag("figcaption", caption) if caption else None
        cards.append(tag("figure", pair, below, cls="card look", title=report.key(index)))
        figure += [small, overlay]
    rows, columns = maps.shape[1:]
    note = (
        f"Attention rollout: how much each of the {rows} × {columns} patches contributes to the output through all "
        "layers; brighter = more attention. It shows where information flows, not why."
    )
    return join(tag("p", note, cls="caption"), tag("div", *cards, cls="gallery looks")), figure


def position_section(report: ReportData) -> tuple[Markup, Pixels | None]:
    """Similarity of position embeddings: one small map for each patch."""
    try:
        similarity = position_similarity(report.net)
    except ModelError as error:
        return unavailable(error), None
    columns = similarity.shape[1]
    low = float(similarity.min())
    side = max(2, min(12, round(880 / columns**2)))  # twice the displayed size, for high-resolution screens
    image = mosaic(similarity, side=side, gap=max(side // 2, 3), low=low, high=1.0)
    assert isinstance(report.net, ViT)
    where = " in the first layer" if len(report.net.positions) > 1 else ""
    kind = report.net.config.position
    note = f"The map in row i and column j shows the similarity of that patch's position to all others{where}: "
    note += f"{SIMILARITY_MEANING[kind]}."
    if kind == "learned-1d":
        note += " The model was never given row or column indices; it learned any 2D structure."
    body = tag(
        "img",
        src=png_uri(image),
        alt="similarity maps of the position embeddings",
        cls="sharp mosaic" if columns <= 8 else "mosaic",
        width=image.shape[1],
        height=image.shape[0],
    )
    return join(tag("p", note, cls="caption"), tag("div", body, cls="wide"), color_bar(low, 1.0)), image


def color_bar(low: float, high: float, colors: str = "viridis") -> Markup:
    stops = ", ".join(matplotlib.colors.to_hex(matplotlib.colormaps[colors](i / 8)) for i in range(9))
    bar = tag("span", cls="bar-colors", style=f"background:linear-gradient(90deg, {stops})")
    return tag("p", tag("span", f"{low:.2f}"), bar, tag("span", f"{high:.2f}"), cls="color-bar")


def filter_section(report: ReportData) -> tuple[Markup, Pixels | None]:
    """The principal components of the patch embedding's filters."""
    try:
        patterns, fractions = filter_components(report.net)
    except ModelError as error:
        return unavailable(error), None
    images = [upscale(p, 32) for p in filter_images(patterns)]
    sheet = tile_images(images, columns=min(len(images), 7), gap=4)
    note = (
        f"The first {len(images)} principal components of the patch embedding's filters, in order; together they "
        f"explain {100 * fractions.sum():.0f} % of the variance."
    )
    body = tag(
        "img",
        src=png_uri(sheet),
        alt="principal components of the patch embedding filters",
        cls="sharp mosaic",
        width=sheet.shape[1],
        height=sheet.shape[0],
    )
    return join(tag("p", note, cls="caption"), tag("div", body, cls="wide")), sheet


def unavailable(error: ModelError) -> Markup:
    """The reason why a section is empty."""
    text = str(error)
    return tag("p", text[0].upper() + text[1:], cls="quiet")
