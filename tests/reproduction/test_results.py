"""Means, intervals and differences over seeds, and the files of results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
    mean_difference,
    mean_over_seeds,
    read_result,
)

ARMS = [make_arm("a"), make_arm("b"), make_arm("c")]
ACCURACIES = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6)
NUMBERS = st.lists(st.floats(-100, 100), min_size=2, max_size=6).map(lambda values: [round(v, 3) for v in values])
"""Values of a metric that is no proportion."""


def results_of(metric: str, values: Mapping[str, Sequence[float]], test_count: int = 360) -> Results:
    """Results with values of a metric, by arm and seed."""
    found = [
        make_result(Trial(arm=arm, lr=arm.rates[0], seed=seed), measures={metric: value}, test_count=test_count)
        for arm in ARMS
        for seed, value in enumerate(values.get(arm.name, ()))
    ]
    return Results(ARMS, "tiny", found)


def assert_close(found: SeedMean | None, value: float, low: float, high: float, count: int) -> None:
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((value, low, high), abs=1e-9)
    assert found.count == count


@given(NUMBERS.filter(lambda values: np.std(values) > 1e-9))
def test_the_interval_over_seeds_is_students(values: list[float]):
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert_close(mean_over_seeds(values), float(np.mean(values)), low, high, len(values))
    assert_close(results_of("x", {"a": values}).mean("a", "x"), float(np.mean(values)), low, high, len(values))


@given(NUMBERS, NUMBERS)
def test_differences_have_welchs_interval(ours: list[float], theirs: list[float]):
    found = results_of("x", {"a": ours, "b": theirs}).difference("a", "b", "x")
    value, count = float(np.mean(ours) - np.mean(theirs)), min(len(ours), len(theirs))
    if min(np.std(ours), np.std(theirs)) < 1e-9:  # where scipy warns
        return
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert_close(found, value, expected.low, expected.high, count)


def test_equal_numbers_that_are_no_proportions_have_an_interval_without_width():
    assert_close(mean_over_seeds([0.5, 0.5, 0.5]), 0.5, 0.5, 0.5, 3)
    assert_close(results_of("x", {"a": [0.75, 0.75], "b": [0.5, 0.5, 0.5]}).difference("a", "b", "x"), *[0.25] * 3, 2)
    found = results_of("x", {"a": [0.75, 0.75, 0.75], "b": [0.5, 0.25]}).difference("a", "b", "x")
    half = stats.t.ppf(0.975, 1) * 0.125
    assert_close(found, 0.375, 0.375 - half, 0.375 + half, 2)


# Proportions of images


@given(ACCURACIES)
def test_an_accuracy_s_interval_adds_the_error_of_the_images_to_that_of_the_seeds(values: list[float]):
    mean = float(np.mean(values))
    seeds = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    adjusted = (360 * mean + 2) / 364
    images = stats.norm.ppf(0.975) * math.sqrt(adjusted * (1 - adjusted) / 364)
    half = math.hypot(seeds, images)
    found = make_results(ARMS, {"a": values}, test_count=360).mean("a")
    assert_close(found, mean, max(mean - half, 0), min(mean + half, 1), len(values))


def test_seeds_that_agree_by_coincidence_do_not_hide_the_error_of_the_images():
    results = make_results(ARMS, {"a": [308 / 360] * 3, "b": [300 / 360] * 3, "c": [1.0] * 3}, test_count=360)
    mean, difference, perfect = results.mean("a"), results.difference("a", "b"), results.mean("c")
    assert mean is not None
    assert difference is not None
    assert perfect is not None
    wilson = stats.binomtest(308, 360).proportion_ci(method="wilson")
    assert (mean.low, mean.high) == pytest.approx((wilson.low, wilson.high), abs=0.005)
    assert difference.low < 0 < difference.high  # 8 images of 360 are not significant
    assert perfect.low == pytest.approx(0.99, abs=0.005)
    assert perfect.high == 1


def test_a_difference_s_seeds_vary_by_at_least_the_error_of_the_images():
    close, wide = [0.9, 0.9, 0.9], [0.8, 0.9, 1.0]
    adjusted = (360 * 0.9 + 2) / 364
    least = adjusted * (1 - adjusted) / 364
    half = stats.t.ppf(0.975, 4) * math.sqrt(2 * least / 3)
    assert_close(make_results(ARMS, {"a": close, "b": close}, test_count=360).difference("a", "b"), 0, -half, half, 3)
    seeds = stats.ttest_ind(wide, [0.8, 0.9, 1.0], equal_var=False).confidence_interval(0.95)  # which vary by more
    assert_close(
        make_results(ARMS, {"a": wide, "b": wide}, test_count=360).difference("a", "b"), 0, seeds.low, seeds.high, 3
    )


def test_more_test_images_narrow_an_interval_up_to_those_that_the_metric_uses():
    def width(metric: str, count: int) -> float:
        mean = results_of(metric, {"a": [0.5] * 3}, count).mean("a", metric)
        assert mean is not None
        return mean.high - mean.low

    assert width("start", 40_000) == pytest.approx(width("start", 10_000) / 2, rel=0.01)
    assert width("5-shot", 10_000) == width("5-shot", 5_000) > width("start", 10_000)


def test_a_change_within_a_run_is_paired_and_counts_at_least_the_images_that_it_changes():
    arms, heads = [make_arm("a")], ("class head", "distillation head")

    def change(pairs: Sequence[tuple[float, float]]) -> SeedMean | None:
        found = [
            make_result(
                Trial(arm=arms[0], lr=arms[0].rates[0], seed=seed),
                measures=dict(zip(heads, pair, strict=True)),
                test_count=360,
            )
            for seed, pair in enumerate(pairs)
        ]
        return Results(arms, "tiny", found).change("a", heads[1], heads[0])

    low, high = stats.t.interval(0.95, 2, 0.1, stats.sem([0.0, 0.1, 0.2]))
    assert_close(change([(0.1, 0.1), (0.5, 0.6), (0.7, 0.9)]), 0.1, low, high, 3)
    half = stats.t.ppf(0.975, 2) * math.sqrt(1 / 360**2 / 3)
    assert_close(change([(0.5, 0.5)] * 3), 0, -half, half, 3)
    half = stats.t.ppf(0.975, 2) * math.sqrt(0.1 / 360 / 3)
    assert_close(change([(0.5, 0.6)] * 3), 0.1, 0.1 - half, 0.1 + half, 3)
    assert Results(arms, "tiny", ()).change("a", *heads) is None
    assert Results(arms, "tiny", ()).change("b", *heads) is None


def test_a_contrast_is_the_weighted_sum_of_the_means():
    results = make_results(ARMS, {"a": [0.9, 0.8], "b": [0.5, 0.6, 0.7], "c": [0.2, 0.4]})
    found = results.contrast({"a": 1.0, "b": -0.5, "c": -0.5})
    parts = [0.005 / 2, 0.25 * 0.01 / 3, 0.25 * 0.02 / 2]
    freedom = sum(parts) ** 2 / sum(part**2 / n for part, n in zip(parts, (1, 2, 1), strict=True))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    assert_close(found, 0.4, 0.4 - half, 0.4 + half, 2)
    assert mean_difference(["a"], ["b", "c"]) == {"a": 1.0, "b": -0.5, "c": -0.5}
    wider = results.contrast({"a": 1.0, "b": -1.0}, confidence=0.99)
    assert wider is not None
    assert wider.low < results.difference("a", "b").low  # type: ignore[union-attr]
    assert make_results(ARMS, {"a": [0.9, 0.8]}).contrast({"a": 1.0, "b": -1.0}) is None


def simulate(rng: np.random.Generator, num_images: int, level: float, noise: float, seed_spread: float) -> Results:
    """Three seeds of two equally good arms on the same images, which are easy or hard for all, and a little for one."""
    common = rng.normal(level, 2.0, num_images)
    tests = {}
    for arm in ("a", "b"):
        own = common + rng.normal(0, 0.7, num_images)
        seeds = rng.normal(0, seed_spread, (3, 1)) + rng.normal(0, noise, (3, num_images))
        tests[arm] = (own + seeds > 0).mean(1).tolist()
    return make_results(ARMS, tests, test_count=num_images)


@pytest.mark.parametrize("num_images", [360, 2000])
@pytest.mark.parametrize(("level", "noise"), [(1.0, 1.5), (4.0, 1.5), (4.0, 0.3)])
@pytest.mark.parametrize("seed_spread", [0.0, 0.3])
def test_intervals_cover_the_accuracy_on_all_images(num_images: int, level: float, noise: float, seed_spread: float):
    """The accuracy over all images and seeds is known; images, arms and seeds are drawn anew each time."""
    rng, repeats = np.random.default_rng(0), 400
    truth = stats.norm.cdf(level / math.sqrt(2.0**2 + 0.7**2 + noise**2 + seed_spread**2))
    found = [simulate(rng, num_images, level, noise, seed_spread) for _ in range(repeats)]
    means = [results.mean("a") for results in found]
    differences = [results.difference("a", "b") for results in found]
    for estimates, true in ((means, truth), (differences, 0.0)):
        covered = sum(each is not None and each.low <= true <= each.high for each in estimates) / repeats
        assert covered >= 0.93


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
    results = Results(ARMS, "tiny", [replace(first, test=None, test_count=0), replace(second, test_count=360)])
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


def test_arms_that_start_from_the_same_model_are_compared_seed_by_seed():
    arms = [make_arm("parent"), make_arm("a", parent="parent"), make_arm("b", parent="parent"), make_arm("c")]
    tests = {"a": [0.60, 0.70, 0.80], "b": [0.58, 0.69, 0.77], "c": [0.58, 0.69, 0.77]}
    results = make_results(arms, tests)
    paired, unpaired = results.difference("a", "b"), results.difference("a", "c")
    assert paired is not None
    assert unpaired is not None
    assert paired.value == pytest.approx(0.02)
    assert paired.high - paired.value == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-5)
    assert unpaired.high - unpaired.value > 5 * (paired.high - paired.value)


def test_arms_of_different_teachers_or_models_are_not_pairs():
    arms = [make_arm("p"), make_arm("q"), make_arm("a", parent="p"), make_arm("b", parent="q")]
    tests = {"a": [0.60, 0.70, 0.80], "b": [0.58, 0.69, 0.77]}
    found = make_results(arms, tests).difference("a", "b")
    assert found is not None
    assert found.high - found.value > 0.2
