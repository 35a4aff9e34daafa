"""What all figures share: colours that every eye tells apart, and how they reach a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vitrail.errors import ConfigError

# Okabe and Ito's colours, darkened where white paper asks for it: told apart by all eyes.
COLOURS = ("#0072b2", "#b84f00", "#00795a", "#a8477f", "#8a6a00")
DASHES = ("-", "--", ":", "-.", "-")
INK, QUIET, FAINT = "#26242e", "#6b6874", "#d8d5ce"
HEAT = "viridis"
"""For amounts, from none to much: its brightness rises evenly, so it reads in grey too."""
SIGNED = "PuOr"
"""For what may be less than nothing: orange below, violet above, white between."""
DPI = 160

Arrays = Mapping[str, npt.ArrayLike]


def blank(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    return Figure(figsize=(width, height), layout="constrained", dpi=DPI)


def title(figure: Figure, text: str, under: str = "") -> None:
    """What is seen, at the upper left; beneath it, smaller, what it was made from."""
    figure.suptitle(text if not under else f"{text}\n", x=0.01, ha="left", fontsize=12, color=INK)
    if under:
        figure.text(0.01, 0.965, under, ha="left", va="top", fontsize=8.5, color=QUIET)


def save(figure: Figure, path: str | Path) -> Path:
    """As PNG, SVG or PDF, by the name's ending; no window system is asked for."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path.name}: a figure is written as .png, .svg or .pdf.")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)  # the same bytes each time
    return path


def save_arrays(arrays: Arrays, path: str | Path) -> Path:
    """The numbers behind a figure, as NPZ."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
    np.savez_compressed(path, **plain)
    return path
