"""The experiment inside: its models, the numbers of the inspection figures, verdicts from made-up numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from reproduction.synthetic import make_result

from vitrail.config import ScheduleConfig, ViTConfig, steps
from vitrail.explain import attention_distance
from vitrail.reproduction.analysis import Plot, Verdict
from vitrail.reproduction.arm import SCALES, Scale, Trial
from vitrail.reproduction.experiments.inside import PAPERS, RECIPE, analyze, arms
from vitrail.reproduction.measures.evaluation_images import evaluation_images
from vitrail.reproduction.measures.inspection import distance_numbers, inspection
from vitrail.reproduction.results import Results
from vitrail.training.runs import train


@pytest.mark.parametrize("scale", SCALES)
def test_the_first_model_has_the_paper_s_positions_and_class_token(scale: Scale):
    found = {arm.name: arm.config.model for arm in arms(scale)}
    model = found[PAPERS]
    assert isinstance(model, ViTConfig)
    assert (model.position, model.pool, model.class_token) == ("learned-1d", "token", True)
    assert (RECIPE in found) == (scale == "gpu")
    assert all(arm.config.snapshot_every is not None for arm in arms(scale))


def test_the_numbers_of_the_attention_distance():
    by_head = np.array([[2.0, 4.0], [5.0, 7.0], [4.0, 6.0]])
    found = distance_numbers(by_head, uniform=8.0)
    assert [found[f"distance, layer {i}"] for i in (1, 2, 3)] == [3, 6, 5]
    assert (found["distance, first layer"], found["distance, last layer"]) == (3, 5)
    assert found["widest first head"] == 0.5
    assert found["deepening"] == pytest.approx(0.5)


def test_inspection_measures_the_trained_and_the_untrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[inspection.__module__], "NUM_DELETED", 2)
    (arm,) = arms("tiny")
    config = arm.config.replace(duration=steps(3), schedule=ScheduleConfig())
    run = train(config, out=tmp_path / "trial-seed0", report=False)
    found = inspection(run)
    images = evaluation_images(run, 128)[0]
    assert found["distance, layer 2"] == pytest.approx(float(attention_distance(run.model.net, images)[1].mean()))
    for name in ("distance, first layer", "row and column share", "leading filters"):
        assert found[name] != found[f"{name}, untrained"]
    trial = Trial(arm=arm, lr=arm.rates[0], seed=0)
    (tmp_path / "trial-seed0").rename(tmp_path / trial.key)
    results = Results([arm], "tiny", [make_result(trial, test=0.3, measures=found)], tmp_path)
    plots = [block for block in analyze(results).blocks if isinstance(block, Plot)]
    assert len(plots) == 6
    for plot in plots:
        plot.draw()


AS_CLAIMED = {
    "distance, first layer": 10.0, "distance, last layer": 14.0, "widest first head": 1.0,
    "widest first head, untrained": 0.95, "position-distance correlation": -0.6,
    "position-distance correlation, untrained": 0.3,
    "row and column share": 0.7, "row and column share, untrained": 0.2, "leading filters": 0.8,
    "leading filters, untrained": 0.4, "rollout gain": 0.1,
}  # fmt: skip
AGAINST = {
    "distance, last layer": 8.0, "widest first head": 0.5, "position-distance correlation": 0.1,
    "row and column share": 0.1, "leading filters": 0.3, "rollout gain": -0.1,
}  # fmt: skip


def made_up(changes: dict[str, float]) -> list[Verdict]:
    """The verdicts from the numbers of the claims, some of them changed, with a little noise between seeds."""
    found = []
    for seed in range(3):
        values = {
            name: value + 0.001 * seed * (i % 3) for i, (name, value) in enumerate((AS_CLAIMED | changes).items())
        }
        found.append(make_result(Trial(arm=arms("tiny")[0], lr=3e-3, seed=seed), test=0.9, measures=values))
    return list(analyze(Results(arms("tiny"), "tiny", found)).verdicts)


def outcomes(changes: dict[str, float]) -> list[str]:
    return [verdict.outcome for verdict in made_up(changes)]


def test_the_paper_s_observations_are_recognized():
    assert outcomes({}) == ["holds"] * 6


@pytest.mark.parametrize(("index", "name"), list(enumerate(AGAINST)))
def test_one_number_against_an_observation_changes_its_verdict_only(index: int, name: str):
    expected = ["holds"] * 6
    expected[index] = "does not hold"
    assert outcomes({name: AGAINST[name]}) == expected


def test_a_positive_correlation_is_no_similarity_of_close_patches_even_if_it_fell():
    correlation = {"position-distance correlation": 0.1, "position-distance correlation, untrained": 0.5}
    assert outcomes(correlation)[2] == "does not hold"


def test_the_verdict_on_the_widest_head_states_the_limit_and_the_untrained_value():
    reason = made_up({})[1].reason
    assert "; the claim is above 0.90." in reason
    assert "Before training: 0.95." in reason


def test_nothing_is_decided_without_results():
    for scale in SCALES:
        analysis = analyze(Results(arms(scale), scale, []))
        assert {verdict.outcome for verdict in analysis.verdicts} == {"undecided"}
        for block in analysis.blocks:
            if isinstance(block, Plot):
                block.draw()
