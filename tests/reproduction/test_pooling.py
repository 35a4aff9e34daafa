"""The pooling experiment: what its arms vary, and verdicts from made-up accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from reproduction.synthetic import make_result

from vitrail.config import ViTConfig
from vitrail.reproduction.analysis import Paragraph
from vitrail.reproduction.arm import SCALES, Scale, Trial
from vitrail.reproduction.experiments.pooling import (
    ATTENTION,
    MEAN,
    POOLINGS,
    RATES,
    TOKEN,
    analyze,
    arm_name,
    arms,
    best_rate,
)
from vitrail.reproduction.results import Results

SPREAD = (-0.001, 0.0, 0.001)
"""Deviation of each seed; the mean of the patches has the opposite."""


def made_up(best: Mapping[str, float], tops: Mapping[str, float] | None = None, seeds: int = 3) -> Results:
    """Each pooling reaches its top, by default 0.9, at its best rate, and 0.1 less at every other."""
    found = []
    for arm in arms("tiny"):
        pooling, rate = str(arm.factors["pooling"]), arm.config.optim.lr
        top = (tops or {}).get(pooling, 0.9) - 0.1 * (rate != best[pooling])
        for seed in range(seeds):
            trial = Trial(arm=arm, lr=rate, seed=seed)
            test = top + SPREAD[seed] * (-1 if pooling == MEAN else 1)
            found.append(make_result(trial, test=test, validation=top, measures={"5-shot": top}))
    return Results(arms("tiny"), "tiny", found)


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


@pytest.mark.parametrize("scale", SCALES)
def test_arms_differ_in_pooling_and_learning_rate_only(scale: Scale):
    found = arms(scale)
    assert len(found) == len(POOLINGS) * len(RATES[scale])
    for arm in found:
        model = arm.config.model
        assert isinstance(model, ViTConfig)
        expected = {TOKEN: ("token", True), MEAN: ("gap", False), ATTENTION: ("map", False)}[
            str(arm.factors["pooling"])
        ]
        assert (model.pool, model.class_token) == expected
        assert f"{arm.config.optim.lr:g}" == arm.factors["learning rate"]
    same = {
        arm.config.replace(
            optim=arm.config.optim.replace(lr=1.0).to_dict(),
            model=arm.config.model.replace(pool="gap", class_token=True).to_dict(),  # type: ignore[union-attr]
        )
        for arm in found
    }
    assert len(same) == 1


def test_the_paper_s_finding_is_recognized():
    results = made_up({TOKEN: 1e-2, MEAN: 1e-3, ATTENTION: 3e-3})
    assert {pooling: best_rate(results, pooling) for pooling in POOLINGS} == {TOKEN: 1e-2, MEAN: 1e-3, ATTENTION: 3e-3}
    assert outcomes(results) == ["holds", "holds", "holds"]


def test_poolings_that_differ_are_not_equal():
    results = made_up(dict.fromkeys(POOLINGS, 3e-3), {MEAN: 0.8, ATTENTION: 0.95})
    assert outcomes(results) == ["does not hold", "undecided", "does not hold"]


def test_the_same_best_rate_decides_nothing():
    verdict = analyze(made_up(dict.fromkeys(POOLINGS, 3e-3))).verdicts[1]
    assert verdict.outcome == "undecided"
    assert "a factor of about 3" in verdict.reason


def test_rates_that_a_pooling_has_not_finished_are_not_compared():
    results = made_up({TOKEN: 1e-2, MEAN: 1e-2, ATTENTION: 3e-3})
    for key in [key for key, trial in results.trials.items() if trial.arm == arm_name(MEAN, 1e-2)]:
        del results.trials[key]
    assert 1e-2 not in {best_rate(results, pooling) for pooling in POOLINGS}
    assert "Only 4 of its 5 rates" in analyze(results).verdicts[1].reason


def test_a_rate_at_which_a_seed_diverges_is_compared_and_not_selected():
    results = made_up({TOKEN: 1e-2, MEAN: 1e-2, ATTENTION: 3e-3})
    key = next(k for k, trial in results.trials.items() if trial.arm == arm_name(MEAN, 1e-2) and trial.seed == 1)
    results.trials[key] = replace(results.trials[key], test=None, validation=None, diverged=True)
    assert (best_rate(results, TOKEN), best_rate(results, MEAN)) == (1e-2, RATES["tiny"][0])


def test_runs_that_diverge_are_counted_in_the_remark_on_the_sweep():
    results = made_up({TOKEN: 1e-2, MEAN: 1e-2, ATTENTION: 3e-3})
    for key, trial in results.trials.items():
        if trial.arm == arm_name(MEAN, 3e-2):
            results.trials[key] = replace(trial, test=None, validation=None, diverged=True)
    (remark,) = [block.text for block in analyze(results).blocks if isinstance(block, Paragraph)]
    of_token, of_mean, of_attention = remark.split("best on")[1:]
    assert "varies by 10.00 points, not counting 3 of 3 runs at 0.03, which diverged." in of_mean
    assert "diverged" not in of_token + of_attention


def test_a_small_difference_with_a_wide_interval_is_undecided():
    assert outcomes(made_up(dict.fromkeys(POOLINGS, 3e-3), {MEAN: 0.9099}))[0] == "undecided"


def test_the_rate_is_selected_on_validation_images():
    results = made_up(dict.fromkeys(POOLINGS, 3e-3))
    arm = arm_name(MEAN, 1e-3)
    trial = next(t for t in results.trials.values() if t.arm == arm and t.seed == 0)
    results.trials[trial.key] = make_result(
        Trial(arm=results.arms[arm], lr=1e-3, seed=0), test=1.0, validation=trial.validation
    )
    assert best_rate(results, MEAN) == 3e-3


def test_the_plot_shows_every_rate_of_every_pooling():
    figure = analyze(made_up(dict.fromkeys(POOLINGS, 3e-3))).blocks[0].draw()  # type: ignore[union-attr]
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert set(lines) == set(POOLINGS)
    assert list(lines[MEAN].get_xdata()) == sorted(RATES["tiny"])
    assert list(lines[MEAN].get_ydata()) == pytest.approx([80, 80, 90, 80, 80])


@pytest.mark.parametrize("seeds", [0, 1])
def test_unfinished_runs_decide_nothing(seeds: int):
    results = made_up({TOKEN: 1e-2, MEAN: 1e-3, ATTENTION: 3e-3}, seeds=seeds)
    assert set(outcomes(results)) == {"undecided"}
