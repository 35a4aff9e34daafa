"""Images for tests, as files would hold them."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """An image as the bytes of a file of this kind."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
