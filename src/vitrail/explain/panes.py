"""Arrays -> pixels: what a network sees, maps laid over it, mosaics of maps."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image

# H x W pixels, C channels, h x w patches

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating[Any]]

SMOOTH = 10
"""From so many patches a side on, a map is drawn smoothly; below that as the panes it is made of."""
EDGES = (0.05, 0.95)
"""Quantiles of a map that are drawn as dark and as bright as can be: a few odd patches hide no others."""
DIM = 0.1
"""How much of an image is left where a mask is darkest."""


def shown(pixels: npt.NDArray[Any]) -> Pixels:
    """H W C of any kind, 0 to 255 -> uint8 H W 3."""
    whole = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    if whole.ndim == 2:
        whole = whole[:, :, None]
    if whole.shape[2] in (1, 2):
        return np.repeat(whole[:, :, :1], 3, axis=2)
    return whole[:, :, :3]


def enlarged(pixels: Pixels, least: int) -> Pixels:
    """Every pixel repeated until the short side has `least`."""
    times = max(-(-least // min(pixels.shape[:2])), 1)
    return pixels.repeat(times, axis=0).repeat(times, axis=1)


def scaled(view: Floats) -> Floats:
    """To 0 ... 1: all of what differs, but no single patch so bright that the rest goes dark."""
    low, high = (float(q) for q in np.quantile(view, EDGES))
    return np.clip((view - low) / max(high - low, 1e-12), 0, 1)


def stretched(view: Floats, height: int, width: int) -> Floats:
    """h w -> H W: panes for few patches, smooth for many."""
    how = Image.Resampling.BICUBIC if min(view.shape) >= SMOOTH else Image.Resampling.NEAREST
    image = Image.fromarray(view.astype(np.float32)).resize((width, height), how)
    return np.clip(np.asarray(image), 0, 1)


def masked(pixels: Pixels, view: Floats) -> Pixels:
    """The image in its own colors, dark where the view is not: the paper's way."""
    heat = stretched(scaled(view), *pixels.shape[:2])[..., None]
    return (pixels * (DIM + (1 - DIM) * heat)).astype(np.uint8)


def lit(pixels: Pixels, view: Floats) -> Pixels:
    """The image through colored glass: pale yellow where the view is, violet where it is not."""
    heat = stretched(scaled(view), *pixels.shape[:2])  # H W
    gray = pixels.mean(2, keepdims=True) / 255
    glass = matplotlib.colormaps["plasma"](heat)[..., :3]
    return (255 * np.clip((0.4 + 0.6 * gray) * glass, 0, 1)).astype(np.uint8)


def mosaic(maps: Floats, *, side: int, gap: int, low: float, high: float, colors: str = "viridis") -> Pixels:
    """R Q h w values -> R x Q maps in color, `side` pixels a value, transparent gaps: H W 4."""
    rows, columns, height, width = maps.shape
    tile_h, tile_w = height * side, width * side
    canvas = np.zeros((rows * (tile_h + gap) - gap, columns * (tile_w + gap) - gap, 4), np.uint8)
    painted = matplotlib.colormaps[colors](np.clip((maps - low) / max(high - low, 1e-12), 0, 1), bytes=True)
    for r in range(rows):
        for c in range(columns):
            top, left = r * (tile_h + gap), c * (tile_w + gap)
            canvas[top : top + tile_h, left : left + tile_w] = painted[r, c].repeat(side, 0).repeat(side, 1)
    return canvas


def tiles(images: list[Pixels], columns: int, *, gap: int = 2) -> Pixels:
    """Images of one size, H W 3, side by side with transparent gaps: H W 4."""
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    canvas = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 4), np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        canvas[top : top + height, left : left + width, :3] = image
        canvas[top : top + height, left : left + width, 3] = 255
    return canvas
