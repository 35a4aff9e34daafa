"""Encoded images for tests."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Encode an image as a file of this format: `encoded(image, "PNG")`."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
