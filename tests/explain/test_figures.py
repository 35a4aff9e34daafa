"""Figures: everything drawn, nothing outside the paper, the same bytes each time."""

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

LONG = "What vit_base_patch16_clip_quickgelu_224.openai sees in holiday-2026-07-11-afternoon.jpg: Old English sheepdog"
UNDER = "vit_base_patch16_224; asked by what the head reads; on average 3 % to class, 12 % to register 1"
RANDOM = np.random.default_rng(0)


def pixels(height: int = 48, width: int = 64) -> np.ndarray:
    return RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8)


def curve() -> Curve:
    return Curve(np.linspace(0, 1, 5), RANDOM.random(5))


FIGURES = {
    "overview": lambda: figures.overview(
        pixels(),
        {"rollout": RANDOM.random((3, 4)), "mine": RANDOM.random((3, 4))},
        [("cat", 0.9), ("dog", 0.1)],
        LONG,
        UNDER,
    ),
    "overview without classes": lambda: figures.overview(pixels(), {"rollout": RANDOM.random((3, 4))}, [], LONG, UNDER),
    "heads": lambda: figures.heads(pixels(), RANDOM.random((12, 3, 4)), LONG, UNDER),
    "layers": lambda: figures.layers(RANDOM.random((12, 3, 14, 14)), LONG, UNDER),
    "layers of a large network": lambda: figures.layers(RANDOM.random((24, 16, 24, 24)), LONG, UNDER),
    "faithfulness": lambda: figures.faithfulness_curves(
        {name: Faithfulness(curve(), curve()) for name in ("rollout", "gradient", "random")}, LONG, UNDER
    ),
    "sheet": lambda: figures.rollout_grid([pixels()] * 5, [RANDOM.random((3, 4))] * 5, LONG, UNDER, 4),
    "distances": lambda: figures.distances(100 * RANDOM.random((24, 16)), 80.0, LONG, UNDER),
    "positions": lambda: figures.positions(2 * RANDOM.random((7, 7, 7, 7)) - 1, LONG, UNDER),
    "many positions": lambda: figures.positions(2 * RANDOM.random((31, 20, 31, 20)) - 1, LONG, UNDER),
    "filters": lambda: figures.filters(RANDOM.normal(size=(28, 8, 8, 3)), RANDOM.random(28), LONG, UNDER),
    "gray filters": lambda: figures.filters(RANDOM.normal(size=(3, 8, 8, 1)), RANDOM.random(3), LONG, UNDER),
    "colors": lambda: figures.colors([pixels()] * 7, RANDOM.random((7, 3, 4, 3)), LONG, UNDER),
}


def texts(figure: Figure) -> list[Text]:
    """All that is written and seen: titles, labels, notes, numbers on axes."""
    found = [*figure.texts]
    for axes in figure.findobj(Axes):
        found += [*axes.texts, axes.title, axes._left_title]
        if axes.get_legend() is not None:
            found += [*axes.get_legend().get_texts(), axes.get_legend().get_title()]
        if axes.axison:
            found += [axes.xaxis.label, axes.yaxis.label]
            low, high = sorted(axes.get_ylim())
            found += [t for t, at in zip(axes.get_yticklabels(), axes.get_yticks(), strict=False) if low <= at <= high]
            low, high = sorted(axes.get_xlim())
            found += [t for t, at in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True) if low <= at <= high]
    return [text for text in found if text.get_text().strip()]


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_and_small_type_is_legible(name: str):
    figure = FIGURES[name]()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    found = texts(figure)
    assert {LONG, UNDER} <= {t.get_text() for t in found}
    width, height = figure.get_size_inches() * figure.dpi
    for text in found:
        box = text.get_window_extent(renderer)
        assert box.x0 >= -2, text
        assert box.x1 <= width + 2, text
        assert box.y0 >= -2, text
        assert box.y1 <= height + 2, text
        assert text.get_fontsize() >= 7


@pytest.mark.parametrize("name", FIGURES)
def test_the_title_stands_clear_of_what_is_drawn(name: str):
    figure = FIGURES[name]()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    under = next(t for t in texts(figure) if t.get_text() == UNDER).get_window_extent(renderer)
    for axes in figure.findobj(Axes):
        box = axes.get_tightbbox(renderer)
        assert box is None or box.y1 <= under.y0 + 1


def test_a_figure_is_written_by_its_ending_and_the_same_each_time(tmp_path: Path):
    for ending in ("png", "jpg", "svg", "pdf"):
        path = canvas.save(FIGURES["distances"](), tmp_path / "deep" / f"d.{ending}")
        assert path.stat().st_size > 2000
    with Image.open(tmp_path / "deep" / "d.png") as image:
        assert image.width > 900
    figure = FIGURES["distances"]()
    for ending in ("png", "jpg", "svg", "pdf"):
        first, second = (canvas.save(figure, tmp_path / f"{n}.{ending}").read_bytes() for n in "ab")
        assert first == second
    with pytest.raises(ConfigError, match="expected a file extension out of png, jpg, svg, pdf"):
        canvas.save(figure, tmp_path / "d.bmp")


def test_arrays_come_back_as_they_were(tmp_path: Path):
    arrays = {"a": np.arange(6).reshape(2, 3), "b": np.float32(0.5)}
    with np.load(canvas.save_arrays(arrays, tmp_path / "x.npz")) as back:
        assert set(back) == {"a", "b"}
        np.testing.assert_array_equal(back["a"], arrays["a"])


def test_unknown_formats_are_refused_before_anything_is_drawn():
    with pytest.raises(ConfigError, match="no format 'gif'"):
        canvas.check_formats(("png", "gif"))
    with pytest.raises(ConfigError, match="no format was given"):
        canvas.check_formats(())


def test_a_mask_is_dark_where_the_view_is_not():
    view = np.zeros((4, 4))
    view[1, 2] = 1
    dark = mask_overlay(np.full((40, 40, 3), 200, np.uint8), view)
    assert (dark[10:20, 20:30] == 200).all()
    assert dark[0, 0].max() <= 20


def test_one_bright_patch_hides_no_others():
    view = np.linspace(0, 1, 196).reshape(14, 14)
    view[0, 0] = 1000
    assert np.median(normalize_map(view)) == pytest.approx(0.5, abs=0.1)


def test_names_with_dollar_signs_are_no_formulas(tmp_path):
    scores = [(r"a $\frac x$ b", 0.5), ("$$", 0.2)]
    drawn = figures.overview(np.zeros((16, 16, 3), np.uint8), {"rollout": np.ones((2, 2))}, scores, r"$\q$.png", "$^$")
    drawn.savefig(tmp_path / "own.png")
    assert canvas.save(drawn, tmp_path / "figure.png").exists()


def test_characters_that_the_font_lacks_are_one_note_and_control_characters_are_visible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runtime, "_logged", set())
    monkeypatch.setattr(logging.getLogger("vitrail"), "propagate", True)
    scores = [("a \N{PARROT}", 0.5), ("red \x1b[31m", 0.2)]
    drawn = figures.overview(np.zeros((16, 16, 3), np.uint8), {"rollout": np.ones((2, 2))}, scores, "\x07.png", "")
    canvas.save(drawn, tmp_path / "figure.png")
    texts = {text.get_text() for text in drawn.findobj(Text)}
    assert {r"red \x1b[31m", r"\x07.png"} <= texts
    assert [record.note for record in caplog.records] == [
        "the figures' font lacks the characters \N{PARROT}; they are drawn as boxes."
    ]
