"""Images embedded in an HTML page."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from vitrail.explain.overlays import Pixels
from vitrail.report.markup import Markup, tag

MAX_EXACT_SIZE = 64
"""Images up to this size are embedded as PNG and scaled up without blurring."""
THUMBNAIL_SIZE = 176
"""Larger images are downscaled to this size."""


def thumbnail(pixels: Pixels) -> Pixels:
    """Downscale to at most `THUMBNAIL_SIZE` pixels, keeping the aspect ratio."""
    height, width = pixels.shape[:2]
    if max(height, width) <= THUMBNAIL_SIZE:
        return pixels
    scale = THUMBNAIL_SIZE / max(height, width)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def data_uri(pixels: Pixels) -> str:
    """The image as a data URI: PNG if it is small or transparent, else JPEG."""
    out, image = io.BytesIO(), Image.fromarray(pixels)
    kind = "png" if pixels.shape[2] == 4 or max(pixels.shape[:2]) <= MAX_EXACT_SIZE else "jpeg"
    image.save(out, kind, **({"optimize": True} if kind == "png" else {"quality": 84}))
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def png_uri(pixels: Pixels) -> str:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def img(pixels: Pixels, alt: str, *, exact: bool = False) -> Markup:
    """An <img> with its image embedded; `exact` forces PNG and sharp pixels."""
    height, width = pixels.shape[:2]
    sharp = exact or max(height, width) <= MAX_EXACT_SIZE
    source = png_uri(pixels) if exact else data_uri(pixels)
    return tag("img", src=source, alt=alt, width=width, height=height, cls="sharp" if sharp else None)
