"""The parts a report is made of: markup, curves, words, choices of images, what weights show."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from compare import randomized
from hypothesis import given
from hypothesis import strategies as st
from report.run_folders import MODEL, Images, Page, evaluated, logged, measured, write_run

from vitrail.config import StemConfig
from vitrail.errors import ModelError
from vitrail.evaluate import SampleResults, Scores
from vitrail.explain import overlays
from vitrail.explain.filters import filter_images, filters
from vitrail.explain.positions import position_similarity
from vitrail.models import Net, build
from vitrail.report import formatting
from vitrail.report.charts import (
    MAX_POINTS,
    Chart,
    Series,
    downsample,
    log_ticks,
    needs_log_scale,
    spread_labels,
    ticks,
    to_svg,
)
from vitrail.report.markup import Markup, tag
from vitrail.report.report_data import class_scores, confused_pairs, most_confident_errors, typical_correct
from vitrail.report.run_record import config_differences, describe_difference, read_run
from vitrail.report.thumbnails import thumbnail
from vitrail.runtime import escape_control

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.text(), st.text())
def test_text_comes_back_as_it_was_but_for_control_characters(body: str, title: str):
    markup = tag("p", body, title=title)
    page = Page(markup)
    assert "".join(page.words) == escape_control(body)
    assert page.tags[0][1]["title"] == escape_control(title)
    assert len(page.tags) == 1


def test_markup_stays_markup_and_nothing_is_left_out_by_mistake():
    assert tag("p", Markup("<b>x</b>"), None, "<") == "<p><b>x</b>&lt;</p>"
    assert tag("img", alt="", width=0, hidden=True, title=None) == '<img alt="" width="0" hidden>'


@given(finite, finite)
def test_ticks_are_few_round_and_inside(a: float, b: float):
    low, high = sorted((a, b))
    if high - low < 1e-3:
        return
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-6 * (high - low) <= t <= high + 1e-6 * (high - low) for t in found)


def test_log_ticks_are_round_and_inside():
    assert log_ticks(0.08, 3) == pytest.approx([0.1, 0.3, 1, 3])
    assert log_ticks(1, 8) == [1, 2, 5]
    assert log_ticks(1e-3, 1e3) == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100, 1000])


@given(st.lists(st.floats(0, 200), max_size=6))
def test_names_keep_their_order_and_their_distance(places: list[float]):
    moved = spread_labels(places, 20, 0, 200)
    order = sorted(range(len(places)), key=lambda i: places[i])
    gaps = [moved[b] - moved[a] for a, b in pairwise(order)]
    assert all(gap >= 20 - 1e-9 for gap in gaps)
    assert not moved or max(moved) <= 200 + 1e-9


def test_a_long_curve_is_thinned_to_its_means_within_its_band():
    x = np.arange(10_000.0)
    y = np.sin(x)
    at, mean, least, most = downsample((x, y))
    assert len(at) == MAX_POINTS
    assert mean.mean() == pytest.approx(y.mean(), abs=1e-3)
    assert (least <= mean).all()
    assert (mean <= most).all()


def test_a_curve_lies_where_its_values_say():
    series = Series("test", (np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.5])))
    svg = to_svg(Chart("Accuracy", (series,), formatting.format_percent, floor=0.0, ceiling=1.0))
    line = next(a["d"] for a in Page(svg).all("path") if a.get("class") == "curve")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, p.split())) for p in line[1:].split("L"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y2 - y1), abs=0.2)
    assert "50.0 %" in Page(svg).text


def test_curves_of_one_point_and_of_none_are_drawn_too():
    one = Series("test", (np.array([3.0]), np.array([0.7])))
    none = Series("training", (np.array([]), np.array([])))
    assert Page(to_svg(Chart("Loss", (one, none), formatting.format_number))).all("circle")
    assert to_svg(Chart("Loss", (none,), formatting.format_number)) == ""


def test_losses_that_fall_far_have_a_log_axis():
    x = np.arange(3.0)
    assert needs_log_scale([(x, np.array([5.0, 1.0, 0.1]))])
    assert not needs_log_scale([(x, np.array([5.0, 1.0, 0.5]))])
    assert not needs_log_scale([(x, np.array([5.0, 1.0, 0.0]))])
    assert not needs_log_scale([])


def test_a_run_is_read_as_it_was_logged(tmp_path: Path):
    lines = [logged(10), logged(20, loss=None), logged(30), evaluated(30, 0.8), evaluated(30, 0.9) | {"ema": True}]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.training_curve("loss")[0].tolist() == [1.0, 3.0]  # epochs; what was not finite is left out
    assert run.evaluation_curve("top1")[1].tolist() == [0.8]
    assert run.evaluation_curve("top1", ema=True)[1].tolist() == [0.9]
    assert run.last_scores["top1"] == 0.9
    assert (run.num_images, run.images_per_second, run.seconds, run.last_step) == (960, 900.0, 3.0, 30)


@pytest.mark.parametrize(
    ("duration", "last", "said"),
    [
        ("20 epochs", 200, None),
        ("20 epochs", 196, None),  # the end fell between two logged steps
        ("20 epochs", 100, ("10", "20 epochs")),
        ("200 steps", 200, None),
        ("1000 steps", 100, ("100", "1000 steps")),
        ("6400 images", 200, None),
        ("64k images", 100, ("3,200", "64000 images")),
    ],
)
def test_how_far_a_run_came_is_told_in_its_own_unit(tmp_path: Path, duration: str, last: int, said: object):
    lines = [logged(step) for step in range(last % 10 or 10, last + 1, 10)]
    assert read_run(write_run(tmp_path / "run", lines, duration=duration)).progress_if_stopped() == said


def test_runs_are_told_apart_by_what_differs(tmp_path: Path):
    first = read_run(write_run(tmp_path / "a", []))
    without = read_run(write_run(tmp_path / "b", [], model=MODEL.replace(position="none").to_dict()))
    faster = read_run(write_run(tmp_path / "c", [], gradient_checkpointing=True, optim={"lr": 0.01}))
    assert config_differences(first.config, without.config) == {"model.position": "none"}
    assert describe_difference(first, without) == "without positions"
    assert describe_difference(first, faster) == "gradient checkpointing on, lr 0.01"
    assert describe_difference(first, read_run(write_run(tmp_path / "d", []))) == "d"


def samples(truth: list[int], said: list[int], score: list[float]) -> SampleResults:
    return SampleResults(
        index=np.arange(len(truth)),
        truth=np.array(truth),
        prediction=np.array(said),
        score=np.array(score),
        truth_score=np.zeros(len(truth)),
    )


def test_the_surest_mistakes_come_first():
    found = most_confident_errors(samples([0, 1, 2, 0], [1, 1, 0, 2], [0.6, 0.99, 0.9, 0.7]), 2)
    assert [(m.row, m.predicted, m.score) for m in found] == [(2, 0, 0.9), (3, 2, 0.7)]


def test_of_several_labels_a_mistake_is_a_class_it_does_not_have():
    found = most_confident_errors(
        SampleResults(
            index=np.arange(3),
            truth=np.array([[True, False], [False, True], [True, True]]),
            prediction=np.array([0, 0, 1]),
            score=np.array([0.9, 0.8, 0.9]),
            truth_score=np.zeros(3),
            scores=np.array([[0.9, 0.7], [0.8, 0.6], [0.9, 0.9]]),
        ),
        5,
    )
    assert [(m.row, m.predicted, m.score) for m in found] == [(1, 0, 0.8), (0, 1, 0.7)]


def test_right_ones_are_of_as_many_classes_as_there_is_room_for():
    truth = [k for k in range(30) for _ in range(3)]
    found = typical_correct(samples(truth, truth, [0.5] * 90), 10)
    assert len({truth[row] for row in found}) == 10
    assert max(truth[row] for row in found) == 29
    assert typical_correct(samples([0, 1], [1, 0], [1.0, 1.0]), 5) == []


def test_classes_and_pairs_are_the_same_with_and_without_the_matrix(net: Net):
    scores = measured(net, Images(200))
    bare = Scores(**{**scores.__dict__, "confusion": None})
    assert class_scores(scores) == class_scores(bare)
    assert sum(n for *_, n in confused_pairs(scores, 99)) == round((1 - scores.top1) * scores.count)
    assert set(confused_pairs(scores, 99)) == set(confused_pairs(bare, 99))
    one = class_scores(scores)[2]
    assert one.value == scores.confusion[2, 2] / scores.confusion[2].sum()


def test_positions_are_alike_by_their_cosine():
    net = randomized(build(MODEL))
    table = net.positions[0].table.detach().numpy()
    alike = position_similarity(net)
    a, b = table[1, 2], table[3, 0]
    assert alike[1, 2, 3, 0] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-5)
    np.testing.assert_allclose(alike[1, 2, 1, 2], 1)


def test_filters_are_the_principal_components():
    net = randomized(build(MODEL.replace(patch_size=4)))
    patterns, shares = filters(net, most=5)
    matrix = net.patch.weight.detach().flatten(1).double().numpy()
    values, vectors = np.linalg.eigh(np.cov(matrix.T))
    assert shares == pytest.approx(values[::-1][:5] / values.sum())
    assert abs(patterns[0].ravel() @ vectors[:, -1]) == pytest.approx(1)
    assert [p.shape for p in filter_images(patterns)] == [(4, 4, 3)] * 5


def test_a_hybrids_filters_are_not_of_patches():
    stem = StemConfig(layers=(1,), width_factor=0.5).to_dict()
    config = MODEL.replace(image_size=32, patch_size=1, stem=stem)
    with pytest.raises(ModelError, match="ResNet"):
        filters(build(config))


def test_a_view_lights_the_patch_it_is_about():
    view = np.zeros((4, 4))
    view[1, 2] = 1.0
    lit = overlays.heat_overlay(np.full((8, 8, 3), 200, np.uint8), view).astype(int)
    bright = lit.sum(2) == lit.sum(2).max()
    assert np.array_equal(np.argwhere(bright), [[2, 4], [2, 5], [3, 4], [3, 5]])


def test_every_map_of_a_mosaic_is_in_its_place():
    maps = np.zeros((2, 3, 2, 2))
    maps[1, 2] = 1.0
    image = overlays.mosaic(maps, side=3, gap=2, low=0.0, high=1.0)
    assert image.shape == (2 * 6 + 2, 3 * 6 + 4, 4)
    assert (image[8:, 16:, :3] == image[-1, -1, :3]).all()
    assert (image[:, 6:8, 3] == 0).all()  # the gap is clear
    assert not np.array_equal(image[0, 0], image[-1, -1])


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_images_of_any_channels_can_be_shown(channels: int):
    assert overlays.as_rgb(np.zeros((5, 6, channels), np.float32)).shape == (5, 6, 3)


def test_large_images_are_shrunk_and_small_ones_kept():
    assert thumbnail(np.zeros((400, 200, 3), np.uint8)).shape == (176, 88, 3)
    assert thumbnail(np.zeros((8, 8, 3), np.uint8)).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.5, "0.5"), (1437.0, "1,437"), (3e-5, "3e-5"), (0.0005, "0.0005"), (None, "–"), (math.nan, "–"), (0.0, "0")],
)
def test_numbers_in_words(value: float | None, said: str):
    assert formatting.format_number(value) == said


def test_times_counts_and_shares_in_words():
    assert [formatting.format_duration(s) for s in (48.2, 200, 8040, None)] == ["48 s", "3 min 20 s", "2 h 14 min", "–"]
    assert [formatting.format_count(n) for n in (900, 102_666, 5_717_416)] == ["900", "103 thousand", "5.72 million"]
    assert formatting.format_percent(0.98765, 360) == "98.8 %"
    assert formatting.format_percent(0.98765, 10_000) == "98.77 %"
