"""Means, intervals and differences over seeds, and the files of results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduction.synthetic import make_arm, make_result, make_results
from scipy import stats

from vitrail.errors import TrainError
from vitrail.reproduction.arm import Trial
from vitrail.reproduction.results import (
    ARRAYS_FILE,
    Results,
    SeedMean,
    difference_of_means,
    mean_over_seeds,
    read_result,
)

ARMS = [make_arm("a"), make_arm("b"), make_arm("c")]
ACCURACIES = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6)


def students_interval(values: list[float]) -> tuple[float, float]:
    return stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))


def assert_close(found: SeedMean | None, value: float, low: float, high: float, count: int) -> None:
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((value, low, high), abs=1e-12)
    assert found.count == count


@given(ACCURACIES.filter(lambda values: np.std(values) > 1e-9))
def test_the_interval_over_seeds_is_students(values: list[float]):
    low, high = students_interval(values)
    assert_close(mean_over_seeds(values), float(np.mean(values)), low, high, len(values))
    accuracy = make_results(ARMS, {"a": values}).mean("a")
    assert_close(accuracy, float(np.mean(values)), max(low, 0.0), min(high, 1.0), len(values))


def test_equal_values_have_an_interval_without_width():
    assert_close(mean_over_seeds([0.5, 0.5, 0.5]), 0.5, 0.5, 0.5, 3)


ROUNDED = ACCURACIES.map(lambda values: [round(value, 3) for value in values])


@given(ROUNDED, ROUNDED)
def test_differences_have_welchs_interval(ours: list[float], theirs: list[float]):
    found = make_results(ARMS, {"a": ours, "b": theirs}).difference("a", "b")
    value, count = float(np.mean(ours) - np.mean(theirs)), min(len(ours), len(theirs))
    if min(np.std(ours), np.std(theirs)) < 1e-9:  # where scipy warns
        return
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert_close(found, value, expected.low, expected.high, count)


def test_a_difference_of_constant_values_has_an_interval_without_width():
    assert_close(difference_of_means([0.75, 0.75], [0.5, 0.5, 0.5]), 0.25, 0.25, 0.25, 2)
    found = difference_of_means([0.75, 0.75, 0.75], [0.5, 0.25])
    half = stats.t.ppf(0.975, 1) * 0.125
    assert_close(found, 0.375, 0.375 - half, 0.375 + half, 2)


def test_a_difference_from_a_single_value_has_no_interval():
    found = make_results(ARMS, {"a": [0.5, 0.75], "b": [0.25]}).difference("a", "b")
    assert found is not None
    assert (found.value, found.count, found.has_interval) == (0.375, 1, False)


def test_one_seed_has_wilsons_interval_of_its_images():
    (trial,) = make_results(ARMS, {"a": [0.9]}).trials.values()
    trial = replace(trial, validation=0.75, test_count=360, validation_count=100)
    results = Results(ARMS, "tiny", [trial])
    for metric, correct, count in (("test", 324, 360), ("validation", 75, 100)):
        expected = stats.binomtest(correct, count).proportion_ci(method="wilson")
        assert_close(results.mean("a", metric), correct / count, expected.low, expected.high, 1)


def test_one_seed_of_another_metric_has_no_interval():
    found = Results(ARMS, "tiny", [make_result(Trial(arm=ARMS[0], lr=1e-2, seed=0), measures={"x": 2.0})])
    mean = found.mean("a", "x")
    assert mean is not None
    assert (mean.value, mean.count, mean.has_interval) == (2.0, 1, False)


def test_one_value_among_several_seeds_has_the_interval_of_its_own_images():
    first, second = make_results(ARMS, {"a": [0.9, 0.5]}).trials.values()
    results = Results(ARMS, "tiny", [replace(first, test=None, test_count=0), second])
    expected = stats.binomtest(180, 360).proportion_ci(method="wilson")
    assert_close(results.mean("a"), 0.5, expected.low, expected.high, 1)


def test_values_are_those_of_the_selected_rate():
    arm = make_arm("a", (1e-3, 1e-2))
    trials = [
        make_result(Trial(arm=arm, lr=1e-3, seed=0), test=0.9, validation=0.5),
        make_result(Trial(arm=arm, lr=1e-2, seed=0), test=0.6, validation=0.7),
        make_result(Trial(arm=arm, lr=1e-2, seed=1), test=0.7, validation=0.1),
        make_result(Trial(arm=arm, lr=1e-3, seed=1), test=0.8, validation=0.9),
    ]
    results = Results([arm], "tiny", reversed(trials))
    assert results.selected_rate("a") == 1e-2
    assert results.values("a") == {0: 0.6, 1: 0.7}
    assert results.num_seeds == 2
    assert [t.key for t in results.of_arm("a")] == [trials[i].key for i in (0, 3, 1, 2)]


def test_an_arm_without_results_has_no_estimates():
    results = make_results(ARMS, {"a": [0.5]})
    assert results.finished_arms == ["a"]
    assert results.selected_rate("b") is None
    assert results.mean("b") is None
    assert results.difference("a", "b") is None
    assert results.difference("b", "a") is None
    assert results.values("b") == {}
    assert results.arrays("b") == {}
    assert results.mean("a", "no such metric") is None
    assert make_results(ARMS, {}).num_seeds == 0


def test_measurements_that_are_not_finite_count_as_missing():
    trials = [
        make_result(Trial(arm=ARMS[0], lr=1e-2, seed=seed), measures={"x": value})
        for seed, value in enumerate((1.0, math.nan, 3.0, math.inf))
    ]
    assert Results(ARMS, "tiny", trials).values("a", "x") == {0: 1.0, 2: 3.0}


def test_a_result_is_read_as_it_was_written(tmp_path: Path):
    result = make_result(Trial(arm=ARMS[0], lr=1e-3, seed=4), measures={"x": 0.1}, settings="abc", flops=12, images=3)
    result.write(tmp_path / "a.json")
    assert read_result(tmp_path / "a.json") == result
    assert read_result(tmp_path / "b.json") is None


def test_a_measurement_that_is_not_finite_can_be_stored(tmp_path: Path):
    make_result(Trial(arm=ARMS[0], lr=1e-3, seed=4), measures={"x": math.nan, "y": 1.0}).write(tmp_path / "a.json")
    found = read_result(tmp_path / "a.json")
    assert found is not None
    assert (found.value("x"), found.value("y")) == (None, 1.0)
    assert found.measures == {"y": 1.0}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": "a"}', "null"])
def test_a_damaged_result_names_its_file(tmp_path: Path, text: str):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TrainError, match=r"a\.json is not the result of a trial: .*; remove it to run the trial again"):
        read_result(tmp_path / "a.json")


def test_a_result_with_an_unknown_field_is_refused(tmp_path: Path):
    result = make_result(Trial(arm=ARMS[0], lr=1e-3, seed=0))
    result.write(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**found, "speed": 1}))
    with pytest.raises(TrainError, match="speed"):
        read_result(tmp_path / "a.json")


def test_arrays_are_those_of_the_selected_trial(tmp_path: Path):
    arm = make_arm("a", (1e-3, 1e-2))
    trials = [make_result(Trial(arm=arm, lr=lr, seed=0), validation=lr) for lr in arm.rates]
    for trial, value in zip(trials, (1.0, 2.0), strict=True):
        (tmp_path / trial.key).mkdir()
        np.savez(tmp_path / trial.key / ARRAYS_FILE, x=np.full(3, value))
    results = Results([arm], "tiny", trials, tmp_path)
    assert results.arrays("a")["x"].tolist() == [2.0, 2.0, 2.0]
    assert results.arrays("a", seed=1) == {}
    (tmp_path / trials[1].key / ARRAYS_FILE).unlink()
    assert results.arrays("a") == {}
