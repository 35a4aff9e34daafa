"""Arrays -> RGB images: inputs, maps overlaid on them, grids of maps."""

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
"""Maps with at least this many patches per side are interpolated; smaller ones are drawn as squares."""
EDGES = (0.05, 0.95)
"""Quantiles of a map that are drawn darkest and brightest, so that outliers do not hide the rest."""
DIM = 0.1
"""Brightness of the image where the mask is darkest."""


def as_rgb(pixels: npt.NDArray[Any]) -> Pixels:
    """H W C values from 0 to 255 -> uint8 H W 3."""
    whole = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    if whole.ndim == 2:
        whole = whole[:, :, None]
    if whole.shape[2] in (1, 2):
        return np.repeat(whole[:, :, :1], 3, axis=2)
    return whole[:, :, :3]


def upscale(pixels: Pixels, least: int) -> Pixels:
    """Repeat pixels until the short side has at least `least`."""
    times = max(-(-least // min(pixels.shape[:2])), 1)
    return pixels.repeat(times, axis=0).repeat(times, axis=1)


def normalize_map(view: Floats) -> Floats:
    """Rescale to 0 ... 1 between the EDGES quantiles."""
    low, high = (float(q) for q in np.quantile(view, EDGES))
    return np.clip((view - low) / max(high - low, 1e-12), 0, 1)


def resize_map(view: Floats, height: int, width: int) -> Floats:
    """h w -> H W: nearest neighbor for small maps, bicubic for larger ones (SMOOTH)."""
    how = Image.Resampling.BICUBIC if min(view.shape) >= SMOOTH else Image.Resampling.NEAREST
    image = Image.fromarray(view.astype(np.float32)).resize((width, height), how)
    return np.clip(np.asarray(image), 0, 1)


def mask_overlay(pixels: Pixels, view: Floats) -> Pixels:
    """The image darkened where the map is low, as in the paper."""
    heat = resize_map(normalize_map(view), *pixels.shape[:2])[..., None]
    return (pixels * (DIM + (1 - DIM) * heat)).astype(np.uint8)


def heat_overlay(pixels: Pixels, view: Floats) -> Pixels:
    """The grayscale image tinted by the map: yellow is high, violet is low."""
    heat = resize_map(normalize_map(view), *pixels.shape[:2])  # H W
    gray = pixels.mean(2, keepdims=True) / 255
    tint = matplotlib.colormaps["plasma"](heat)[..., :3]
    return (255 * np.clip((0.4 + 0.6 * gray) * tint, 0, 1)).astype(np.uint8)


def mosaic(maps: Floats, *, side: int, gap: int, low: float, high: float, colors: str = "viridis") -> Pixels:
    """R Q h w values -> R x Q grid of colored maps, `side` pixels per value, transparent gaps: H W 4."""
    rows, columns, height, width = maps.shape
    tile_h, tile_w = height * side, width * side
    canvas = np.zeros((rows * (tile_h + gap) - gap, columns * (tile_w + gap) - gap, 4), np.uint8)
    painted = matplotlib.colormaps[colors](np.clip((maps - low) / max(high - low, 1e-12), 0, 1), bytes=True)
    for r in range(rows):
        for c in range(columns):
            top, left = r * (tile_h + gap), c * (tile_w + gap)
            canvas[top : top + tile_h, left : left + tile_w] = painted[r, c].repeat(side, 0).repeat(side, 1)
    return canvas


def tile_images(images: list[Pixels], columns: int, *, gap: int = 2) -> Pixels:
    """Images of one size, H W 3, side by side with transparent gaps: H W 4."""
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    canvas = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 4), np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        canvas[top : top + height, left : left + width, :3] = image
        canvas[top : top + height, left : left + width, 3] = 255
    return canvas
