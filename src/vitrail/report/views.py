"""The sections that look inside: what the model attends to, what it knows of places, what its filters are."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import torch

from vitrail.errors import ModelError
from vitrail.explain.filters import filter_images, filters
from vitrail.explain.panes import Pixels, enlarged, lit, mosaic, tiles
from vitrail.explain.positions import MEANING, position_similarity
from vitrail.explain.rollout import class_view
from vitrail.models import ViT
from vitrail.report.images import img, png_uri, thumbnail
from vitrail.report.markup import Markup, join, tag
from vitrail.report.story import Story, some_right, surest_mistakes

LOOKS = 8
"""Images shown with what the model attends to, two of them mistakes where there are any."""


def looked_at(story: Story) -> list[tuple[int, str]]:
    """Numbers of images in the source, each with what to write under it."""
    samples = story.scores.samples if story.scores else None
    if story.source is None:
        return []
    if samples is None:
        places = np.linspace(0, len(story.source) - 1, min(LOOKS, len(story.source))).astype(int)
        return [(int(i), "") for i in dict.fromkeys(places.tolist())]
    wrong = [
        (m.row, f"{story.brief(m.said)}, truly {story.truth(samples, m.row)}") for m in surest_mistakes(samples, 2)
    ]
    right = [(row, story.truth(samples, row)) for row in some_right(samples, LOOKS - len(wrong))]
    return [(int(samples.index[row]), words) for row, words in (*right, *wrong)]


def views(story: Story, indices: list[int]) -> npt.NDArray[np.floating[Any]]:
    """n h w: how much of each patch is in the model's answer; ModelError where there is no attention."""
    assert story.source is not None
    like = next(story.net.parameters())
    found = []
    for index in indices:  # one by one: the explicit attention of a batch may not fit
        images = story.preprocess(story.source[index].image).to(like)
        with torch.no_grad():
            found.append(class_view(story.net, images)[0].float().cpu().numpy())
    return np.stack(found)


def attention(story: Story) -> tuple[Markup, list[Pixels]]:
    """Each image beside itself under the light of attention; and the pairs, for a figure."""
    chosen = [(index, words, story.image(index)) for index, words in looked_at(story)]
    seen = [(index, words, pixels) for index, words, pixels in chosen if pixels is not None]
    if not seen:
        return tag("p", "There is no image to look at.", cls="quiet"), []
    try:
        maps = views(story, [index for index, _, _ in seen])
    except ModelError as error:
        return reason(error), []
    cards, figure = [], []
    for (index, words, pixels), view in zip(seen, maps, strict=True):
        small = thumbnail(pixels)
        under = lit(small, view)
        pair = tag("div", img(small, words or "an image"), img(under, "where it looks"), cls="pair-of")
        caption = tag("figcaption", words) if words else None
        cards.append(tag("figure", pair, caption, cls="card look", title=story.key(index)))
        figure += [small, under]
    rows, columns = maps.shape[1:]
    note = (
        f"Beside each image: how much of each of its {rows} × {columns} patches reaches the answer through all "
        "layers (attention rollout), bright is much. It says where information flows, not why."
    )
    return join(tag("p", note, cls="caption"), tag("div", *cards, cls="gallery looks")), figure


def positions(story: Story) -> tuple[Markup, Pixels | None]:
    """How alike the positions are: one small map for each patch."""
    try:
        alike = position_similarity(story.net)
    except ModelError as error:
        return reason(error), None
    columns = alike.shape[1]
    low = float(alike.min())
    side = max(2, min(12, round(880 / columns**2)))  # twice as fine as it is shown: screens differ
    image = mosaic(alike, side=side, gap=max(side // 2, 3), low=low, high=1.0)
    assert isinstance(story.net, ViT)
    where = ", in its first layer" if len(story.net.positions) > 1 else ""
    kind = story.net.config.position
    note = f"The small map in row i and column j: how alike that patch's position{where} is to every other's, as "
    note += f"{MEANING[kind]}."
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


def patch_filters(story: Story) -> tuple[Markup, Pixels | None]:
    """The main patterns of the patch projection."""
    try:
        patterns, shares = filters(story.net)
    except ModelError as error:
        return reason(error), None
    images = [enlarged(p, 32) for p in filter_images(patterns)]
    sheet = tiles(images, columns=min(len(images), 7), gap=4)
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


def reason(error: ModelError) -> Markup:
    """Why there is nothing to see."""
    text = str(error)
    return tag("p", text[0].upper() + text[1:], cls="quiet")
