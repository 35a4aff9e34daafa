"""The sections that look inside: what the model attends to, what it knows of places, what its filters are."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import torch

from vitrail.errors import ModelError
from vitrail.explain.filters import filter_images, filters
from vitrail.explain.overlays import Pixels, heat_overlay, mosaic, tile_images, upscale
from vitrail.explain.positions import SIMILARITY_MEANING, position_similarity
from vitrail.explain.rollout import rollout_map
from vitrail.models import ViT
from vitrail.report.markup import Markup, join, tag
from vitrail.report.report_data import ReportData, most_confident_errors, typical_correct
from vitrail.report.thumbnails import img, png_uri, thumbnail

NUM_ATTENTION_IMAGES = 8
"""Images shown with what the model attends to, two of them mistakes where there are any."""


def attention_examples(report: ReportData) -> list[tuple[int, str]]:
    """Numbers of images in the source, each with what to write under it."""
    samples = report.scores.samples if report.scores else None
    if report.source is None:
        return []
    if samples is None:
        places = np.linspace(0, len(report.source) - 1, min(NUM_ATTENTION_IMAGES, len(report.source))).astype(int)
        return [(int(i), "") for i in dict.fromkeys(places.tolist())]
    wrong = [
        (m.row, f"{report.short_label(m.predicted)}, truly {report.true_labels(samples, m.row)}")
        for m in most_confident_errors(samples, 2)
    ]
    right = [
        (row, report.true_labels(samples, row)) for row in typical_correct(samples, NUM_ATTENTION_IMAGES - len(wrong))
    ]
    return [(int(samples.index[row]), words) for row, words in (*right, *wrong)]


def attention_maps(report: ReportData, indices: list[int]) -> npt.NDArray[np.floating[Any]]:
    """n h w: how much of each patch is in the model's answer; ModelError where there is no attention."""
    assert report.source is not None
    like = next(report.net.parameters())
    found = []
    for index in indices:  # one by one: the explicit attention of a batch may not fit
        images = report.preprocess(report.source[index].image).to(like)
        with torch.no_grad():
            found.append(rollout_map(report.net, images)[0].float().cpu().numpy())
    return np.stack(found)


def attention_section(report: ReportData) -> tuple[Markup, list[Pixels]]:
    """Each image beside itself under the light of attention; and the pairs, for a figure."""
    chosen = [(index, words, report.pixels(index)) for index, words in attention_examples(report)]
    seen = [(index, words, pixels) for index, words, pixels in chosen if pixels is not None]
    if not seen:
        return tag("p", "There is no image to look at.", cls="quiet"), []
    try:
        maps = attention_maps(report, [index for index, _, _ in seen])
    except ModelError as error:
        return unavailable(error), []
    cards, figure = [], []
    for (index, words, pixels), view in zip(seen, maps, strict=True):
        small = thumbnail(pixels)
        under = heat_overlay(small, view)
        pair = tag("div", img(small, words or "an image"), img(under, "where it looks"), cls="pair-of")
        caption = tag("figcaption", words) if words else None
        cards.append(tag("figure", pair, caption, cls="card look", title=report.key(index)))
        figure += [small, under]
    rows, columns = maps.shape[1:]
    note = (
        f"Beside each image: how much of each of its {rows} × {columns} patches reaches the answer through all "
        "layers (attention rollout), bright is much. It says where information flows, not why."
    )
    return join(tag("p", note, cls="caption"), tag("div", *cards, cls="gallery looks")), figure


def position_section(report: ReportData) -> tuple[Markup, Pixels | None]:
    """How alike the positions are: one small map for each patch."""
    try:
        alike = position_similarity(report.net)
    except ModelError as error:
        return unavailable(error), None
    columns = alike.shape[1]
    low = float(alike.min())
    side = max(2, min(12, round(880 / columns**2)))  # twice as fine as it is shown: screens differ
    image = mosaic(alike, side=side, gap=max(side // 2, 3), low=low, high=1.0)
    assert isinstance(report.net, ViT)
    where = ", in its first layer" if len(report.net.positions) > 1 else ""
    kind = report.net.config.position
    note = f"The small map in row i and column j: how alike that patch's position{where} is to every other's, as "
    note += f"{SIMILARITY_MEANING[kind]}."
    if kind == "learned-1d":
        note += " The model was told nothing of rows and columns; what order there is, it learned."
    body = tag(
        "img",
        src=png_uri(image),
        alt="maps of position similarity",
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
    """The main patterns of the patch projection."""
    try:
        patterns, shares = filters(report.net)
    except ModelError as error:
        return unavailable(error), None
    images = [upscale(p, 32) for p in filter_images(patterns)]
    sheet = tile_images(images, columns=min(len(images), 7), gap=4)
    note = (
        f"The {len(images)} main patterns that its patch projection looks for, the strongest first; "
        f"together {100 * shares.sum():.0f} % of it."
    )
    body = tag(
        "img",
        src=png_uri(sheet),
        alt="patterns of the patch projection",
        cls="sharp mosaic",
        width=sheet.shape[1],
        height=sheet.shape[0],
    )
    return join(tag("p", note, cls="caption"), tag("div", body, cls="wide")), sheet


def unavailable(error: ModelError) -> Markup:
    """Why there is nothing to see."""
    text = str(error)
    return tag("p", text[0].upper() + text[1:], cls="quiet")
