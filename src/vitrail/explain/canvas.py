"""Shared by all figures: color-blind-safe colors, titles, and writing to files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from vitrail.errors import ConfigError, did_you_mean
from vitrail.runtime import escape_control, warn_once

# Okabe and Ito's color-blind-safe palette, darkened for contrast on white.
COLORS = ("#0072b2", "#b84f00", "#00795a", "#a8477f", "#8a6a00")
DASHES = ("-", "--", ":", "-.", "-")
INK, QUIET, FAINT = "#26242e", "#6b6874", "#d8d5ce"
HEAT = "viridis"
"""Colormap for non-negative values; perceptually uniform, so it works in grayscale."""
SIGNED = "PuOr"
"""Diverging colormap for signed values: orange negative, white zero, violet positive."""
DPI = 160
FORMATS = ("png", "jpg", "svg", "pdf", "npz")
"""Supported file formats; npz holds the data of the figure."""

IMAGE_OPTIONS: dict[str, dict[str, Any]] = {"png": {"compress_level": 4}, "jpg": {"quality": 88}}
"""Pillow's encoder options: small files in little time."""

Arrays = Mapping[str, npt.ArrayLike]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained", dpi=DPI)


def set_title(figure: Figure, text: str, under: str = "") -> None:
    """Draw a title at the upper left and a smaller subtitle below it, and reserve space for them."""
    inch = 1 / figure.get_figheight()
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0, 0.06 * inch, 1, 1 - (0.66 if under else 0.42) * inch))
    lines = [figure.text(0, 1 - 0.08 * inch, text, ha="left", va="top", fontsize=12, color=INK)]
    if under:
        lines.append(figure.text(0, 1 - 0.34 * inch, under, ha="left", va="top", fontsize=8.5, color=QUIET))
    _disable_math_text(figure)
    canvas = FigureCanvasAgg(figure)
    with _missing_glyphs():
        longest = max(line.get_window_extent(canvas.get_renderer()).width for line in lines) / figure.dpi
    figure.set_figwidth(max(figure.get_figwidth(), longest + 0.2))
    for line in lines:
        line.set_x(0.1 / figure.get_figwidth())


def _disable_math_text(figure: Figure) -> None:
    """Disable math parsing, since names may contain dollar signs, and escape control characters."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_text(escape_control(text.get_text()))


@contextmanager
def _missing_glyphs() -> Iterator[None]:
    """Report characters that the font lacks in one note instead of one matplotlib warning each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    lacking = [(re.match(r"Glyph (\d+) ", str(each.message)), each) for each in caught]
    for _, other in [pair for pair in lacking if pair[0] is None]:
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    characters = " ".join(sorted({chr(int(found[1])) for found, _ in lacking if found}))
    if characters:
        warn_once([f"the figures' font lacks the characters {characters}; they are drawn as boxes"])


def check_formats(formats: Sequence[str]) -> None:
    """Raise ConfigError for an unknown format."""
    for ending in formats:
        if ending not in FORMATS:
            raise ConfigError(f"unknown format {ending!r}{did_you_mean(ending, FORMATS)}")
    if not formats:
        raise ConfigError(f"no format was given; expected one or more of {', '.join(FORMATS)}.")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, JPEG, SVG or PDF, by the file extension. Needs no display."""
    path = Path(path)
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS[:-1]:
        raise ConfigError(f"got {path.name}, expected one of the file extensions {', '.join(FORMATS[:-1])}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    _disable_math_text(figure)
    FigureCanvasAgg(figure)
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)  # the same bytes each time
    options: dict[str, Any] = (
        {"metadata": undated} if ending in ("svg", "pdf") else {"pil_kwargs": IMAGE_OPTIONS[ending]}
    )
    with matplotlib.rc_context({"svg.hashsalt": "vitrail"}), _missing_glyphs():
        figure.savefig(path, **options)
    return path


def save_arrays(arrays: Arrays, path: str | Path) -> Path:
    """Write the data of a figure as NPZ."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
    np.savez_compressed(path, **plain)
    return path
