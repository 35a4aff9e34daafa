"""Figures: text inside the figure, legible sizes, reproducible files."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from vitrail import runtime
from vitrail.errors import ConfigError
from vitrail.explain import Curve, Faithfulness, canvas, figures
from vitrail.explain.overlays import mask_overlay, normalize_map

TITLE = "What vit_base_patch16_clip_quickgelu_224.openai sees in holiday-2026-07-11-afternoon.jpg: Old English sheepdog"
SUBTITLE = "vit_base_patch16_224; query: what the head reads; on average 3 % to class, 12 % to register 1"
RNG = np.random.default_rng(0)


def pixels(height: int = 48, width: int = 64) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def curve() -> Curve:
    return Curve(np.linspace(0, 1, 5), RNG.random(5))


FIGURES = {
    "overview": lambda: figures.overview(
        pixels(),
        {"rollout": RNG.random((3, 4)), "mine": RNG.random((3, 4))},
        [("cat", 0.9), ("dog", 0.1)],
        TITLE,
        SUBTITLE,
    ),
    "overview without classes": lambda: figures.overview(
        pixels(), {"rollout": RNG.random((3, 4))}, [], TITLE, SUBTITLE
    ),
    "heads": lambda: figures.heads(pixels(), RNG.random((12, 3, 4)), TITLE, SUBTITLE),
    "layers": lambda: figures.layers(RNG.random((12, 3, 14, 14)), TITLE, SUBTITLE),
    "layers of a large network": lambda: figures.layers(RNG.random((24, 16, 24, 24)), TITLE, SUBTITLE),
    "faithfulness": lambda: figures.faithfulness_curves(
        {name: Faithfulness(curve(), curve()) for name in ("rollout", "gradient", "random")}, TITLE, SUBTITLE
    ),
    "rollout grid": lambda: figures.rollout_grid([pixels()] * 5, [RNG.random((3, 4))] * 5, TITLE, SUBTITLE, 4),
    "distances": lambda: figures.distances(100 * RNG.random((24, 16)), 80.0, TITLE, SUBTITLE),
    "positions": lambda: figures.positions(2 * RNG.random((7, 7, 7, 7)) - 1, TITLE, SUBTITLE),
    "many positions": lambda: figures.positions(2 * RNG.random((31, 20, 31, 20)) - 1, TITLE, SUBTITLE),
    "filters": lambda: figures.filters(RNG.normal(size=(28, 8, 8, 3)), RNG.random(28), TITLE, SUBTITLE),
    "gray filters": lambda: figures.filters(RNG.normal(size=(3, 8, 8, 1)), RNG.random(3), TITLE, SUBTITLE),
    "colors": lambda: figures.colors([pixels()] * 7, RNG.random((7, 3, 4, 3)), TITLE, SUBTITLE),
}


def texts(figure: Figure) -> list[Text]:
    """All visible text of a figure: titles, labels, notes, tick labels."""
    items = [*figure.texts]
    for axes in figure.findobj(Axes):
        items += [*axes.texts, axes.title, axes._left_title]
        if axes.get_legend() is not None:
            items += [*axes.get_legend().get_texts(), axes.get_legend().get_title()]
        if axes.axison:
            items += [axes.xaxis.label, axes.yaxis.label]
            low, high = sorted(axes.get_ylim())
            items += [t for t, at in zip(axes.get_yticklabels(), axes.get_yticks(), strict=False) if low <= at <= high]
            low, high = sorted(axes.get_xlim())
            items += [t for t, at in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True) if low <= at <= high]
    return [text for text in items if text.get_text().strip()]


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_inside_the_figure_and_at_least_seven_points(name: str):
    figure = FIGURES[name]()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    visible = texts(figure)
    assert {TITLE, SUBTITLE} <= {t.get_text() for t in visible}
    width, height = figure.get_size_inches() * figure.dpi
    for text in visible:
        box = text.get_window_extent(renderer)
        assert box.x0 >= -2, text
        assert box.x1 <= width + 2, text
        assert box.y0 >= -2, text
        assert box.y1 <= height + 2, text
        assert text.get_fontsize() >= 7


@pytest.mark.parametrize("name", FIGURES)
def test_axes_do_not_overlap_the_subtitle(name: str):
    figure = FIGURES[name]()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    subtitle = next(t for t in texts(figure) if t.get_text() == SUBTITLE).get_window_extent(renderer)
    for axes in figure.findobj(Axes):
        box = axes.get_tightbbox(renderer)
        assert box is None or box.y1 <= subtitle.y0 + 1


def test_extension_sets_the_format_and_files_are_reproducible(tmp_path: Path):
    for extension in ("png", "jpg", "svg", "pdf"):
        path = canvas.save(FIGURES["distances"](), tmp_path / "deep" / f"d.{extension}")
        assert path.stat().st_size > 2000
    with Image.open(tmp_path / "deep" / "d.png") as image:
        assert image.width > 900
    figure = FIGURES["distances"]()
    for extension in ("png", "jpg", "svg", "pdf"):
        first, second = (canvas.save(figure, tmp_path / f"{n}.{extension}").read_bytes() for n in "ab")
        assert first == second
    with pytest.raises(ConfigError, match="expected one of the file extensions png, jpg, svg, pdf"):
        canvas.save(figure, tmp_path / "d.bmp")


def test_saved_arrays_load_unchanged(tmp_path: Path):
    arrays = {"a": np.arange(6).reshape(2, 3), "b": np.float32(0.5)}
    with np.load(canvas.save_arrays(arrays, tmp_path / "x.npz")) as loaded:
        assert set(loaded) == {"a", "b"}
        np.testing.assert_array_equal(loaded["a"], arrays["a"])


def test_unknown_formats_are_an_error():
    with pytest.raises(ConfigError, match="unknown format 'gif'"):
        canvas.check_formats(("png", "gif"))
    with pytest.raises(ConfigError, match="no format was given"):
        canvas.check_formats(())


def test_mask_overlay_is_dark_where_the_map_is_low():
    heatmap = np.zeros((4, 4))
    heatmap[1, 2] = 1
    overlay = mask_overlay(np.full((40, 40, 3), 200, np.uint8), heatmap)
    assert (overlay[10:20, 20:30] == 200).all()
    assert overlay[0, 0].max() <= 20


def test_one_outlier_does_not_compress_the_other_values():
    heatmap = np.linspace(0, 1, 196).reshape(14, 14)
    heatmap[0, 0] = 1000
    assert np.median(normalize_map(heatmap)) == pytest.approx(0.5, abs=0.1)


def test_dollar_signs_in_names_are_not_math(tmp_path):
    scores = [(r"a $\frac x$ b", 0.5), ("$$", 0.2)]
    figure = figures.overview(np.zeros((16, 16, 3), np.uint8), {"rollout": np.ones((2, 2))}, scores, r"$\q$.png", "$^$")
    figure.savefig(tmp_path / "own.png")
    assert canvas.save(figure, tmp_path / "figure.png").exists()


def test_missing_glyphs_are_one_note_and_control_characters_are_escaped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runtime.notes, "_logged", set())
    monkeypatch.setattr(logging.getLogger("vitrail"), "propagate", True)
    scores = [("a \N{PARROT}", 0.5), ("red \x1b[31m", 0.2)]
    figure = figures.overview(np.zeros((16, 16, 3), np.uint8), {"rollout": np.ones((2, 2))}, scores, "\x07.png", "")
    canvas.save(figure, tmp_path / "figure.png")
    texts = {text.get_text() for text in figure.findobj(Text)}
    assert {r"red \x1b[31m", r"\x07.png"} <= texts
    assert [record.note for record in caplog.records] == [
        "the figures' font lacks the characters \N{PARROT}; they are drawn as boxes."
    ]
