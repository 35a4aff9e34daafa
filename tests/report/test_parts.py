"""Parts of a report: markup, charts, formatting, choice of images, figures of the weights."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from compare import randomized
from hypothesis import given
from hypothesis import strategies as st
from report.run_folders import MODEL, Images, Page, compute_scores, evaluation_line, train_line, write_run

from vitrail.config import StemConfig
from vitrail.errors import ModelError
from vitrail.evaluation import SampleResults, Scores
from vitrail.explain import overlays
from vitrail.explain.filters import filter_components, filter_images
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
from vitrail.report.thumbnails import thumbnail
from vitrail.runs.run_record import config_differences, describe_difference, read_run
from vitrail.runtime import escape_control

finite_floats = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.text(), st.text())
def test_escaped_text_round_trips_except_control_characters(body: str, title: str):
    markup = tag("p", body, title=title)
    page = Page(markup)
    assert "".join(page.text_chunks) == escape_control(body)
    assert page.tags[0][1]["title"] == escape_control(title)
    assert len(page.tags) == 1


def test_markup_is_not_escaped_and_falsy_attributes_are_kept():
    assert tag("p", Markup("<b>x</b>"), None, "<") == "<p><b>x</b>&lt;</p>"
    assert tag("img", alt="", width=0, hidden=True, title=None) == '<img alt="" width="0" hidden>'


@given(finite_floats, finite_floats)
def test_ticks_are_few_and_inside_the_range(a: float, b: float):
    low, high = sorted((a, b))
    if high - low < 1e-3:
        return
    values = ticks(low, high)
    assert 2 <= len(values) <= 7
    assert all(low - 1e-6 * (high - low) <= t <= high + 1e-6 * (high - low) for t in values)


def test_log_ticks_are_round_and_inside_the_range():
    assert log_ticks(0.08, 3) == pytest.approx([0.1, 0.3, 1, 3])
    assert log_ticks(1, 8) == [1, 2, 5]
    assert log_ticks(1e-3, 1e3) == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100, 1000])


@given(st.lists(st.floats(0, 200), max_size=6))
def test_spread_labels_keep_their_order_and_distance(positions: list[float]):
    spread = spread_labels(positions, 20, 0, 200)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    gaps = [spread[b] - spread[a] for a, b in pairwise(order)]
    assert all(gap >= 20 - 1e-9 for gap in gaps)
    assert not spread or max(spread) <= 200 + 1e-9


def test_long_curve_is_downsampled_to_means_within_their_range():
    x = np.arange(10_000.0)
    y = np.sin(x)
    at, mean, low, high = downsample((x, y))
    assert len(at) == MAX_POINTS
    assert mean.mean() == pytest.approx(y.mean(), abs=1e-3)
    assert (low <= mean).all()
    assert (mean <= high).all()


def test_curve_points_are_placed_by_their_values():
    series = Series("test", (np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.5])))
    svg = to_svg(Chart("Accuracy", (series,), formatting.format_percent, floor=0.0, ceiling=1.0))
    line = next(a["d"] for a in Page(svg).all("path") if a.get("class") == "curve")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, p.split())) for p in line[1:].split("L"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y2 - y1), abs=0.2)
    assert "50.0 %" in Page(svg).text


def test_curves_of_one_point_and_of_none_are_drawn():
    single = Series("test", (np.array([3.0]), np.array([0.7])))
    empty = Series("training", (np.array([]), np.array([])))
    assert Page(to_svg(Chart("Loss", (single, empty), formatting.format_number))).all("circle")
    assert to_svg(Chart("Loss", (empty,), formatting.format_number)) == ""


def test_losses_with_a_large_range_have_a_log_axis():
    x = np.arange(3.0)
    assert needs_log_scale([(x, np.array([5.0, 1.0, 0.1]))])
    assert not needs_log_scale([(x, np.array([5.0, 1.0, 0.5]))])
    assert not needs_log_scale([(x, np.array([5.0, 1.0, 0.0]))])
    assert not needs_log_scale([])


def test_run_record_has_the_logged_values(tmp_path: Path):
    lines = [
        train_line(10),
        train_line(20, loss=None),
        train_line(30),
        evaluation_line(30, 0.8),
        evaluation_line(30, 0.9) | {"ema": True},
    ]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.training_curve("loss")[0].tolist() == [1.0, 3.0]  # epochs; non-finite values are skipped
    assert run.evaluation_curve("top1")[1].tolist() == [0.8]
    assert run.evaluation_curve("top1", ema=True)[1].tolist() == [0.9]
    assert run.last_scores["top1"] == 0.9
    assert (run.num_images, run.images_per_second, run.seconds, run.last_step) == (960, 900.0, 3.0, 30)


@pytest.mark.parametrize(
    ("duration", "last", "expected"),
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
def test_progress_of_a_stopped_run_is_in_the_unit_of_its_duration(
    tmp_path: Path, duration: str, last: int, expected: object
):
    lines = [train_line(step) for step in range(last % 10 or 10, last + 1, 10)]
    assert read_run(write_run(tmp_path / "run", lines, duration=duration)).progress_if_stopped() == expected


def test_runs_are_described_by_their_differences(tmp_path: Path):
    first = read_run(write_run(tmp_path / "a", []))
    without = read_run(write_run(tmp_path / "b", [], model=MODEL.replace(position="none").to_dict()))
    faster = read_run(write_run(tmp_path / "c", [], gradient_checkpointing=True, optim={"lr": 0.01}))
    assert config_differences(first.config, without.config) == {"model.position": "none"}
    assert describe_difference(first, without) == "without positions"
    assert describe_difference(first, faster) == "gradient checkpointing on, lr 0.01"
    assert describe_difference(first, read_run(write_run(tmp_path / "d", []))) == "d"


def samples(truth: list[int], predicted: list[int], score: list[float]) -> SampleResults:
    return SampleResults(
        index=np.arange(len(truth)),
        truth=np.array(truth),
        prediction=np.array(predicted),
        score=np.array(score),
        truth_score=np.zeros(len(truth)),
    )


def test_most_confident_errors_come_first():
    errors = most_confident_errors(samples([0, 1, 2, 0], [1, 1, 0, 2], [0.6, 0.99, 0.9, 0.7]), 2)
    assert [(m.row, m.predicted, m.score) for m in errors] == [(2, 0, 0.9), (3, 2, 0.7)]


def test_multi_label_error_is_a_predicted_class_that_is_absent():
    errors = most_confident_errors(
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
    assert [(m.row, m.predicted, m.score) for m in errors] == [(1, 0, 0.8), (0, 1, 0.7)]


def test_typical_correct_images_are_of_different_classes():
    truth = [k for k in range(30) for _ in range(3)]
    rows = typical_correct(samples(truth, truth, [0.5] * 90), 10)
    assert len({truth[row] for row in rows}) == 10
    assert max(truth[row] for row in rows) == 29
    assert typical_correct(samples([0, 1], [1, 0], [1.0, 1.0]), 5) == []


def test_class_scores_and_pairs_do_not_need_the_matrix(net: Net):
    scores = compute_scores(net, Images(200))
    without_matrix = Scores(**{**scores.__dict__, "confusion": None})
    assert class_scores(scores) == class_scores(without_matrix)
    assert sum(n for *_, n in confused_pairs(scores, 99)) == round((1 - scores.top1) * scores.count)
    assert set(confused_pairs(scores, 99)) == set(confused_pairs(without_matrix, 99))
    third_class = class_scores(scores)[2]
    assert third_class.value == scores.confusion[2, 2] / scores.confusion[2].sum()


def test_position_similarity_is_the_cosine():
    net = randomized(build(MODEL))
    table = net.positions[0].table.detach().numpy()
    similarity = position_similarity(net)
    a, b = table[1, 2], table[3, 0]
    assert similarity[1, 2, 3, 0] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-5)
    np.testing.assert_allclose(similarity[1, 2, 1, 2], 1)


def test_filters_are_the_principal_components():
    net = randomized(build(MODEL.replace(patch_size=4)))
    patterns, shares = filter_components(net, max_components=5)
    matrix = net.patch.weight.detach().flatten(1).double().numpy()
    values, vectors = np.linalg.eigh(np.cov(matrix.T))
    assert shares == pytest.approx(values[::-1][:5] / values.sum())
    assert abs(patterns[0].ravel() @ vectors[:, -1]) == pytest.approx(1)
    assert [p.shape for p in filter_images(patterns)] == [(4, 4, 3)] * 5


def test_filters_of_a_hybrid_are_an_error():
    stem = StemConfig(layers=(1,), width_factor=0.5).to_dict()
    config = MODEL.replace(image_size=32, patch_size=1, stem=stem)
    with pytest.raises(ModelError, match="ResNet"):
        filter_components(build(config))


def test_heat_overlay_is_brightest_at_its_patch():
    heatmap = np.zeros((4, 4))
    heatmap[1, 2] = 1.0
    overlay = overlays.heat_overlay(np.full((8, 8, 3), 200, np.uint8), heatmap).astype(int)
    bright = overlay.sum(2) == overlay.sum(2).max()
    assert np.array_equal(np.argwhere(bright), [[2, 4], [2, 5], [3, 4], [3, 5]])


def test_mosaic_has_every_map_at_its_row_and_column():
    maps = np.zeros((2, 3, 2, 2))
    maps[1, 2] = 1.0
    image = overlays.mosaic(maps, side=3, gap=2, low=0.0, high=1.0)
    assert image.shape == (2 * 6 + 2, 3 * 6 + 4, 4)
    assert (image[8:, 16:, :3] == image[-1, -1, :3]).all()
    assert (image[:, 6:8, 3] == 0).all()  # the gap is transparent
    assert not np.array_equal(image[0, 0], image[-1, -1])


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_as_rgb_accepts_any_number_of_channels(channels: int):
    assert overlays.as_rgb(np.zeros((5, 6, channels), np.float32)).shape == (5, 6, 3)


def test_thumbnails_shrink_only_large_images():
    assert thumbnail(np.zeros((400, 200, 3), np.uint8)).shape == (176, 88, 3)
    assert thumbnail(np.zeros((8, 8, 3), np.uint8)).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, "0.5"), (1437.0, "1,437"), (3e-5, "3e-5"), (0.0005, "0.0005"), (None, "–"), (math.nan, "–"), (0.0, "0")],
)
def test_numbers_are_formatted(value: float | None, expected: str):
    assert formatting.format_number(value) == expected


def test_durations_counts_and_percentages_are_formatted():
    assert [formatting.format_duration(s) for s in (48.2, 200, 8040, None)] == ["48 s", "3 min 20 s", "2 h 14 min", "–"]
    assert [formatting.format_count(n) for n in (900, 102_666, 5_717_416)] == ["900", "103 thousand", "5.72 million"]
    assert formatting.format_percent(0.98765, 360) == "98.8 %"
    assert formatting.format_percent(0.98765, 10_000) == "98.77 %"
