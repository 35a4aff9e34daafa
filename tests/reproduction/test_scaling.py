"""The scaling experiment: what each arm scales, slopes, the Pareto front and the compute ratio from made-up results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from reproduction.synthetic import make_result

from vitrail.config import ViTConfig
from vitrail.models.flops import count_flops, count_parameters
from vitrail.reproduction.analysis import Paragraph, Table
from vitrail.reproduction.arm import SCALES, Arm, Scale, Trial
from vitrail.reproduction.experiments.scaling import (
    DEPTH,
    FIELDS,
    LENGTHS,
    VALUES,
    WIDTH,
    analyze,
    arm_name,
    arms,
    base_name,
    base_network,
    compute_ratio,
    cost,
    family_arms,
    shape_arms,
)
from vitrail.reproduction.network_families import FAMILIES, HYBRID, RESNET, VIT
from vitrail.reproduction.results import Results, SeedMean

WOBBLE = 0.001
"""What the accuracy of a ViT changes from one seed to the next."""


def made_up(score: Callable[[Arm, float], float], seeds: int = 3, skip: str = "never") -> Results:
    """`score`: arm, log2 of its training FLOPs in units of the smallest -> accuracy."""
    costs = {arm.name: flops(arm) * arm.config.duration.count for arm in arms("tiny")}
    found = [
        make_result(
            Trial(arm=arm, lr=arm.rates[0], seed=seed),
            test=score(arm, np.log2(costs[arm.name] / min(costs.values()))) + wobble(arm, seed),
            flops=flops(arm),
            images=round(1000 * arm.config.duration.count),
            seconds=costs[arm.name] / 1e7,
            parameters=count_parameters(arm.config.model.replace(num_classes=10)),  # type: ignore[union-attr]
        )
        for arm in arms("tiny")
        for seed in range(seeds)
        if skip not in arm.name
    ]
    return Results(arms("tiny"), "tiny", found)


def wobble(arm: Arm, seed: int) -> float:
    return WOBBLE * seed * (arm.factors["network"] == VIT) * (1 + (DEPTH in arm.name))


def flops(arm: Arm) -> int:
    assert arm.config.model is not None
    return count_flops(arm.config.model.replace(num_classes=10))


def papers_scores(arm: Arm, doublings: float) -> float:
    """Depth gains most, width nothing; ViTs 3 points above ResNets; hybrids ahead with little compute only."""
    base = 0.3
    if arm.factors["network"] == RESNET:
        return base + 0.03 * doublings - 0.03
    if arm.factors["network"] == HYBRID:
        return base + 0.05 + 0.02 * doublings
    if arm.name.startswith(WIDTH):
        return base + 0.03 * np.log2(3)
    return base + 0.03 * doublings + 0.05 * arm.name.startswith(DEPTH)


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


@pytest.mark.parametrize("scale", SCALES)
def test_each_shape_changes_one_field_of_the_base(scale: Scale):
    by_name = {arm.name: arm for arm in arms(scale)}
    base = by_name[base_name(scale)].config.model
    assert base == base_network(scale)
    for dimension, values in VALUES[scale].items():
        for name, value in zip(shape_arms(scale)[dimension], values, strict=True):
            model = by_name[name].config.model
            assert isinstance(model, ViTConfig)
            expected = (value, value) if dimension == "patch size" else value
            assert getattr(model, FIELDS[dimension]) == expected
            assert model.replace(**{FIELDS[dimension]: getattr(base, FIELDS[dimension])}) == base
            assert by_name[name].config.duration == by_name[base_name(scale)].config.duration


@pytest.mark.parametrize("scale", SCALES)
def test_arms_have_the_same_rates_and_differ_in_model_and_length_only(scale: Scale):
    found = arms(scale)
    assert len({arm.rates for arm in found}) == 1
    lengths = LENGTHS[scale]
    for arm in found:
        assert arm.config.duration.count in lengths
        same = found[0].config.replace(model=None, init_from="none")
        assert arm.config.replace(
            model=None, init_from="none", duration=same.duration.to_dict(), schedule=same.schedule.to_dict()
        ) == same.replace(data=arm.config.data.to_dict())
    assert {name for family in FAMILIES for name in family_arms(scale, family)} <= {arm.name for arm in found}


def test_the_cost_is_that_of_forward_and_backward_pass():
    results = made_up(papers_scores)
    name = arm_name(VIT, "base", LENGTHS["tiny"][1])
    arm = results.arms[name]
    assert cost(results, name, "flops") == pytest.approx(3 * flops(arm) * 30_000 / 1e12)
    assert cost(results, name, "seconds") == pytest.approx(flops(arm) * 30 / 1e7)


def test_the_paper_s_findings_are_recognized():
    assert outcomes(made_up(papers_scores)) == ["holds"] * 6


def test_verdicts_flip_with_the_results():
    names = {DEPTH: WIDTH, WIDTH: DEPTH}

    def opposite(arm: Arm, doublings: float) -> float:
        for ours, theirs in names.items():
            if arm.name.startswith(ours):
                return 0.3 if theirs == WIDTH else 0.5
        if arm.factors["network"] == RESNET:
            return 0.6
        return 0.4 - 0.03 * doublings - (0.1 - 0.02 * doublings) * (arm.factors["network"] == HYBRID)

    assert outcomes(made_up(opposite)) == ["does not hold"] * 6


def test_slopes_agree_with_a_fit():
    results = made_up(papers_scores)
    table = next(b for b in analyze(results).blocks if isinstance(b, Table) and "doubling" in b.columns[1])
    row = next(row for row in table.rows if row[0] == DEPTH)
    names = [base_name("tiny"), *shape_arms("tiny")[DEPTH]]
    x = np.log2([flops(results.arms[name]) for name in names])
    slopes = [np.polyfit(x, [results.values(name)[seed] for name in names], 1)[0] for seed in range(3)]
    assert isinstance(row[1], SeedMean)
    assert row[1].value == pytest.approx(float(np.mean(slopes)))


def test_resnets_that_lag_by_one_doubling_take_twice_the_compute():
    results = made_up(lambda arm, doublings: 0.3 + 0.03 * (doublings - (arm.factors["network"] == RESNET)))
    assert compute_ratio(results, 0) == pytest.approx(2, rel=1e-6)
    text = next(b.text for b in analyze(results).blocks if isinstance(b, Paragraph))
    assert "ResNets take 2" in text


@pytest.mark.parametrize("skip", ["ViT", "ResNet", "30 epochs", DEPTH, "small"])
def test_missing_arms_leave_a_page_without_them(skip: str):
    analysis = analyze(made_up(papers_scores, skip=skip))
    assert "undecided" in {verdict.outcome for verdict in analysis.verdicts}
    for block in analysis.blocks:
        if hasattr(block, "draw"):
            block.draw()
