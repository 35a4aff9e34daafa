"""Encoded images for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Encode an image as a file of this format: `encoded(image, "PNG")`."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write_noise_folder(folder: Path, counts: dict[str, int]) -> Path:
    """Write a folder with this many noise images of each class: `write_noise_folder(tmp_path / "a", {"cat": 6})`."""
    rng = np.random.default_rng(5)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((40, 36)).save(folder / name / f"{i}.png")
    return folder
