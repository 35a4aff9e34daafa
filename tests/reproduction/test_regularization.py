"""The regularization experiment: one treatment at a time, and what augmentation is worth in data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from reproduction.synthetic import make_result

from vitrail.config import ViTConfig
from vitrail.reproduction.analysis import Paragraph
from vitrail.reproduction.arm import SCALES, Scale, Trial
from vitrail.reproduction.experiments.regularization import (
    AUGMENT,
    DECAY,
    DROPOUT,
    FRACTIONS,
    NONE,
    TREATMENTS,
    analyze,
    arm_name,
    arms,
    data_worth,
)
from vitrail.reproduction.results import Results

PLAIN = {0.1: 0.5, 0.3: 0.7, 1.0: 0.8}


def made_up(gain: Callable[[str, float], float], seeds: int = 3, skip: str = "never") -> Results:
    """`gain`: treatment, fraction -> points above no regularization; augmentation varies a little between the seeds."""
    found = []
    for arm in arms("tiny"):
        treatment, fraction = str(arm.factors["regularization"]), arm.config.data.fraction_range[1]
        for seed in range(seeds if skip not in arm.name else 0):
            score = PLAIN[fraction] + gain(treatment, fraction) + 0.001 * seed * (treatment == AUGMENT)
            found.append(make_result(Trial(arm=arm, lr=arm.rates[0], seed=seed), test=score))
    return Results(arms("tiny"), "tiny", found)


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


def papers_gain(treatment: str, fraction: float) -> float:
    """Augmentation at 10 % almost reaches all the data without it, and hurts there."""
    if treatment != AUGMENT:
        return 0.0 if treatment == NONE else 0.05 * (fraction < 1)
    return 0.285 if fraction == 0.1 else -0.02 * (fraction == 1)


@pytest.mark.parametrize("scale", SCALES)
def test_arms_have_one_treatment_each(scale: Scale):
    found = arms(scale)
    assert len(found) == len(TREATMENTS) * len(FRACTIONS[scale])
    for arm in found:
        treatment, config = arm.factors["regularization"], arm.config
        assert isinstance(config.model, ViTConfig)
        assert (config.optim.weight_decay > 0) == (treatment == DECAY)
        assert (config.model.dropout, config.model.drop_path) == ((0.1, 0.1) if treatment == DROPOUT else (0, 0))
        assert (config.augment.policy, config.augment.mixup) == (("rand", 0.2) if treatment == AUGMENT else ("none", 0))
    assert len({arm.rates for arm in found}) == 1
    plain = [arm for arm in found if arm.factors["regularization"] == NONE]
    for arm in found:
        same = next(p.config for p in plain if p.config.data.fraction == arm.config.data.fraction)
        assert (arm.config.duration, arm.config.schedule, arm.config.batch_size) == (
            same.duration,
            same.schedule,
            same.batch_size,
        )


def test_the_worth_of_augmentation_is_read_from_the_plain_curve():
    results = made_up(lambda treatment, fraction: 0.1 * (treatment == AUGMENT), seeds=1)
    worth = data_worth(results, AUGMENT, 10.0)
    assert worth.factor is not None
    assert worth.factor.value == pytest.approx(3**0.5)  # 0.6 is halfway between 10 and 30 % in the logarithm
    assert data_worth(results, DROPOUT, 10.0).factor.value == pytest.approx(1)  # type: ignore[union-attr]


def test_a_score_above_all_the_data_is_a_lower_bound():
    worth = data_worth(made_up(lambda treatment, fraction: 0.35 * (treatment == AUGMENT)), AUGMENT, 10.0)
    assert worth.num_above == 3
    assert worth.text == "at least 10"
    assert worth.factor is not None
    assert worth.factor.value == pytest.approx(10)


def test_a_score_below_the_least_data_is_an_upper_bound():
    worth = data_worth(made_up(lambda treatment, fraction: -0.35 * (treatment == AUGMENT)), AUGMENT, 30.0)
    assert (worth.num_below, worth.text) == (3, "at most 0.33")


def test_seeds_that_agree_by_coincidence_leave_the_error_of_the_images():
    results = made_up(lambda treatment, fraction: 0.1 * (treatment == DROPOUT))
    few = {key: replace(trial, test_count=360) for key, trial in results.trials.items()}
    worth = data_worth(Results(arms("tiny"), "tiny", few.values()), DROPOUT, 10.0).factor
    assert worth is not None
    # 0.6 within 0.0365, the error of two accuracies, is a factor of 1.22 on a curve that gains 0.2 in a factor of 3
    error = math.log(3) * math.sqrt(2 * 0.6 * 0.4 / 364) / 0.2
    assert worth.high / worth.value == pytest.approx(math.exp(4.303 * error / math.sqrt(3)), rel=0.01)


def shifted(gains: Sequence[float]) -> Results:
    """The gain of augmentation with the least data, by seed; the paper's otherwise."""
    results = made_up(papers_gain)
    for key, trial in results.trials.items():
        if trial.arm == arm_name(AUGMENT, 0.1):
            results.trials[key] = replace(trial, test=PLAIN[0.1] + gains[trial.seed])
    return results


def test_seeds_above_and_below_the_curve_give_no_bound():
    results = shifted([-0.1, 0.2, 0.35])
    text = data_worth(results, AUGMENT, 10.0).text
    assert text == "unknown: 1 of 3 seeds above the curve, 1 below"
    verdict = analyze(results).verdicts[1]
    assert verdict.outcome == "undecided"
    assert "at least" not in verdict.reason


@pytest.mark.parametrize("gains", [[0.27, 0.28, 0.35], [0.35, 0.36, 0.37]])
def test_a_capped_seed_leaves_ten_times_the_data_undecided(gains: list[float]):
    verdict = analyze(shifted(gains)).verdicts[1]
    assert verdict.outcome == "undecided"
    assert "takes at least" in verdict.reason


def test_augmentation_that_lowers_the_accuracy_is_worth_no_data():
    verdict = analyze(shifted([-0.08, -0.07, -0.09])).verdicts[1]
    assert verdict.outcome == "does not hold"
    assert verdict.reason.startswith(
        "in every seed, accuracy is lower than without augmentation, so it is worth no data. At 8 px, "
    )


def test_the_paper_s_finding_is_recognized():
    assert outcomes(made_up(papers_gain)) == ["holds"] * 4


def test_verdicts_flip_with_the_results():
    hurts_least_data = made_up(lambda t, fraction: 0.0 if t != AUGMENT else (0.1 if fraction == 1 else -0.1))
    assert outcomes(hurts_least_data) == ["does not hold"] * 4


def test_overfitting_is_mentioned_only_where_a_treatment_helps_with_all_the_data():
    def text(gain: float) -> str:
        blocks = analyze(made_up(lambda t, fraction: gain * (t == AUGMENT))).blocks
        return next(block.text for block in blocks if isinstance(block, Paragraph))

    assert "may still overfit" in text(0.05)
    for gain in (0.0, -0.05):
        assert "overfit" not in text(gain)


@pytest.mark.parametrize("skip", [NONE, AUGMENT, "10 %", "100 %"])
def test_missing_arms_leave_a_page_without_them(skip: str):
    analysis = analyze(made_up(papers_gain, skip=skip))
    assert "undecided" in {verdict.outcome for verdict in analysis.verdicts}
    for block in analysis.blocks:
        if hasattr(block, "draw"):
            block.draw()
