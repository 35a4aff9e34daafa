"""Estimated durations: steps as in training, jobs, finished trials, and the correction by measured durations."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduction.synthetic import finish_all, make_arm, make_result
from training.small_runs import digits_config

from vitrail.config import DataConfig, epochs, steps
from vitrail.config.duration import Duration
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError
from vitrail.reproduction.arm import Arm, Trial
from vitrail.reproduction.cost import CostModel, network_of
from vitrail.reproduction.planning import Plan
from vitrail.reproduction.results import Results

DIGITS = 1438
"""Training images of the digits, with those held out."""


def cost_of(*arms: Arm, jobs: int = 1, device: str = "cpu") -> CostModel:
    return CostModel(device, DIGITS, arms, jobs)


@pytest.mark.parametrize("fraction", [None, 0.1, (0.25, 0.75)])
@pytest.mark.parametrize("held_out", [0.2, 0.5])
@pytest.mark.parametrize("duration", [epochs(10), epochs(0.5), steps(7), Duration(count=1000, unit="images")])
def test_the_number_of_steps_is_that_of_training(duration: Duration, held_out: float, fraction: object):
    data = DataConfig(source="digits", held_out=held_out, fraction=fraction)  # type: ignore[arg-type]
    config = digits_config(1, data=data.to_dict(), duration=duration, batch_size=64)
    expected = duration.to_steps(batch_size=64, images=len(open_data(data).train))
    assert cost_of().num_steps(config) == pytest.approx(expected, rel=0.02, abs=1)  # each class is rounded on its own


def test_longer_and_larger_runs_take_longer():
    config = digits_config(100)
    base, longer, larger = (
        make_arm("a", config=changed)
        for changed in (config, digits_config(200), config.replace(model=config.model.replace(depth=12).to_dict()))
    )
    cost = cost_of(base, longer, larger)
    assert 0 < cost.seconds(base) < cost.seconds(longer)
    assert cost.seconds(base) < cost.seconds(larger)


def test_a_plan_takes_the_sum_of_its_trials_divided_by_the_jobs():
    a, b = make_arm("a", (1e-3, 3e-3)), make_arm("b", config=digits_config(50), max_seeds=1)
    plan = Plan((a, b), seeds=3)
    one = cost_of(a, b)
    assert one.of_plan(plan) == pytest.approx(4 * one.seconds(a) + one.seconds(b))
    assert cost_of(a, b, jobs=4).of_plan(plan) == pytest.approx(one.of_plan(plan) / 4)


def test_finished_trials_cost_nothing():
    a, b = make_arm("a", (1e-3, 3e-3)), make_arm("b", config=digits_config(50))
    plan, results = Plan((a, b), seeds=2), Results((a, b), "tiny", ())
    cost = cost_of(a, b, jobs=2)
    left = [cost.of_unfinished(plan, results)]
    while (trial := plan.next_trial(results, ())) is not None:
        results.trials[trial.key] = make_result(trial)
        left.append(cost.of_unfinished(plan, results))
        assert left[-2] - left[-1] == pytest.approx(cost.seconds(trial.arm) / 2)
    assert left[0] == pytest.approx(cost.of_plan(plan))
    assert left[-1] == pytest.approx(0.0)


@given(st.lists(st.floats(0.5, 500.0), min_size=1, max_size=5))
def test_the_correction_is_the_median_ratio_of_measured_and_estimated_seconds(measured: list[float]):
    arms = [make_arm(f"a{i}", config=digits_config(10 * i + 1)) for i in range(len(measured))]
    cost = cost_of(*arms)
    nominal = [cost.seconds(arm) for arm in arms]
    finished = [
        (trial := Trial(arm=arm, lr=1e-3, seed=0), make_result(trial, seconds=seconds))
        for arm, seconds in zip(arms, measured, strict=True)
    ]
    for _ in range(2):  # it replaces an earlier correction
        cost.calibrate(finished)
        correction = statistics.median(m / n for m, n in zip(measured, nominal, strict=True))
        assert [cost.seconds(arm) for arm in arms] == pytest.approx([correction * n for n in nominal])
    cost.calibrate([])
    assert cost.correction == 1.0


def test_an_arm_without_a_network_costs_that_of_the_arm_it_starts_from():
    parent = make_arm("p")
    child = make_arm("c", parent="p", config=digits_config(4).replace(model=None, init_from="p", image_size=16))
    grandchild = make_arm("g", parent="c", config=child.config.replace(image_size=None))
    arms = {arm.name: arm for arm in (parent, child, grandchild)}
    assert network_of(parent, arms) == parent.config.model
    assert network_of(child, arms) == parent.config.model.replace(image_size=16)  # type: ignore[union-attr]
    assert cost_of(*arms.values()).seconds(child) > cost_of(*arms.values()).seconds(parent)
    orphan = replace(child, parent=None)
    with pytest.raises(ConfigError, match="the arm c has neither a model nor a parent"):
        network_of(orphan, {"c": orphan})


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_every_kind_of_device_has_an_estimate(device: str):
    arm = make_arm("a")
    assert cost_of(arm, device=device).seconds(arm) > 0


def test_all_trials_of_a_plan_finished_cost_nothing_with_any_correction():
    arms = (make_arm("a", (1e-3, 3e-3)), make_arm("b", (1e-3, 3e-3), config=digits_config(50)))
    plan, results = Plan(arms, seeds=3), Results(arms, "tiny", ())
    trials = finish_all(plan, results)
    cost = cost_of(*arms, jobs=3)
    cost.calibrate((trial, results.trials[trial.key]) for trial in trials)
    assert cost.correction != 1.0
    assert cost.of_unfinished(plan, results) == pytest.approx(0.0, abs=1e-9)
