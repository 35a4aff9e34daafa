"""The resolution experiment: what its arms vary, accuracy before fine-tuning, and verdicts from made-up accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from reproduction.small_models import make_model
from reproduction.synthetic import make_result
from training.small_runs import digits_config

from vitrail.config import ViTConfig, pair
from vitrail.evaluation.evaluate import evaluate
from vitrail.models.position import resample
from vitrail.open_model import load
from vitrail.reproduction.arm import SCALES, Arm, Scale, Trial
from vitrail.reproduction.edits import RESAMPLES, edit_model
from vitrail.reproduction.experiments.resolution import (
    CONVENTIONS,
    CORNER,
    DEFAULT,
    PRETRAINED,
    PUBLISHED,
    RENEWED,
    SCRATCH,
    SIZES,
    SMALL,
    analyze,
    arms,
)
from vitrail.reproduction.measures.start import start_accuracy
from vitrail.reproduction.results import Results
from vitrail.reproduction.scales import at_size, base_config
from vitrail.training.runs import Run

SPREAD = (-0.001, 0.0, 0.001)
AS_PUBLISHED = {
    PRETRAINED: 0.95, SMALL: 0.955, CORNER: 0.90, RENEWED: 0.91, SCRATCH: 0.93,
    **{name: 0.97 + 0.0001 * i for i, name in enumerate(CONVENTIONS)},
}  # fmt: skip
STARTS = {**dict.fromkeys(CONVENTIONS, 0.8), "google": 0.79, "timm-npz": 0.7, CORNER: 0.3, RENEWED: 0.4, SMALL: 0.95}


def by_name(scale: Scale) -> dict[str, Arm]:
    return {arm.name: arm for arm in arms(scale)}


def made_up(tests: Mapping[str, float], starts: Mapping[str, float]) -> Results:
    found = []
    for i, arm in enumerate(arms("tiny")):
        for seed in range(3):
            spread = SPREAD[(seed + i) % 3]
            measures = {"start": starts[arm.name] + spread} if arm.name in starts else {}
            trial = Trial(arm=arm, lr=arm.rates[0], seed=seed)
            found.append(make_result(trial, test=tests[arm.name] + spread, measures=measures))
    return Results(arms("tiny"), "tiny", found)


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


@pytest.mark.parametrize("scale", SCALES)
def test_conventions_differ_in_the_resampling_only(scale: Scale):
    found = by_name(scale)
    conventions = [found[name] for name in CONVENTIONS]
    for arm in conventions:
        assert isinstance(arm.config.model, ViTConfig)
        assert arm.config.model.resample == arm.name
        assert arm.parent_edit == f"resample-{arm.name}"
    same = {
        arm.config.replace(model=arm.config.model.replace(resample=DEFAULT).to_dict())  # type: ignore[union-attr]
        for arm in [*conventions, found[CORNER], found[RENEWED]]
    }
    assert len(same) == 1


@pytest.mark.parametrize("scale", SCALES)
def test_a_convention_without_an_arm_is_that_of_another_when_the_grid_grows(scale: Scale):
    found = by_name(scale)
    small, large = (found[name].config.model.grid for name in (PRETRAINED, DEFAULT))  # type: ignore[union-attr]
    table = torch.randn(*small, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    resampled = {name: resample(table, large, name) for name in RESAMPLES}
    for name, result in resampled.items():
        same = [other for other in CONVENTIONS if torch.allclose(resampled[other], result, rtol=1e-9, atol=1e-9)]
        assert len(same) == 1, (name, same)


@pytest.mark.parametrize("scale", SCALES)
def test_all_arms_choose_from_as_many_learning_rates(scale: Scale):
    found = by_name(scale)
    assert len({len(arm.rates) for arm in found.values()}) == 1
    finetuned = [arm for arm in found.values() if arm.parent is not None]
    assert {arm.parent for arm in finetuned} == {PRETRAINED}
    assert {arm.learning_rates for arm in finetuned} == {found[DEFAULT].learning_rates}
    total = found[PRETRAINED].config.duration.count + found[DEFAULT].config.duration.count
    assert found[SCRATCH].config.duration.count == total


@pytest.mark.parametrize("scale", SCALES)
def test_the_larger_image_has_another_grid(scale: Scale):
    small, large = SIZES[scale]
    for name, size in {PRETRAINED: small, SMALL: small, DEFAULT: large, CORNER: large, SCRATCH: large}.items():
        config = by_name(scale)[name].config
        assert isinstance(config.model, ViTConfig)
        assert config.preprocess is not None
        assert config.model.image_size == config.preprocess.image_size == (size, size), name
        assert (config.image_size is not None) == (name in (DEFAULT, CORNER)), name
    grids = [by_name(scale)[name].config.model.grid for name in (PRETRAINED, DEFAULT)]  # type: ignore[union-attr]
    assert grids[0] < grids[1]


def test_random_shifts_and_the_margin_keep_their_proportion():
    assert at_size(base_config("gpu"), 16).augment.pad == 2
    paper = by_name("paper")
    for name in (PRETRAINED, DEFAULT):
        preprocess = paper[name].config.preprocess
        assert preprocess is not None
        assert preprocess.resize_to is not None
        assert pair(preprocess.image_size)[0] / preprocess.resize_to == pytest.approx(224 / 256, abs=0.002)


def test_accuracy_before_fine_tuning_is_that_of_the_edited_model_at_the_larger_size(tmp_path: Path):
    make_model(tmp_path / "parent")
    config = digits_config(2, image_size=12, preprocess=at_size(digits_config(), 12).preprocess)
    found = {}
    for edit in ("resample-google", "positions-in-corner"):
        start = edit_model(edit, tmp_path / "parent", tmp_path / edit, config)
        found[edit] = start_accuracy(Run(tmp_path, config.replace(init_from=str(start))))["start"]
        assert found[edit] == evaluate(load(start, image_size=12), "digits").top1.value
    assert len(set(found.values())) == 2


def test_the_published_findings_are_recognized():
    assert outcomes(made_up(AS_PUBLISHED, STARTS)) == ["holds"] * 7
    assert set(PUBLISHED) <= set(by_name("tiny"))


def test_verdicts_flip_with_the_results():
    tests = {
        **dict.fromkeys(CONVENTIONS, 0.9), "google": 0.92, "huggingface": 0.6,
        SMALL: 0.95, CORNER: 0.97, RENEWED: 0.98, SCRATCH: 0.99, PRETRAINED: 0.95,
    }  # fmt: skip
    starts = {**STARTS, CORNER: 0.9, "huggingface": 0.2}
    found = outcomes(made_up(tests, starts))
    assert found[:5] == ["does not hold"] * 5
    assert found[5] == "undecided"  # there is no loss to compare the spread with
    assert found[6] == "does not hold"


def test_conventions_that_differ_as_much_as_unscaled_positions_are_not_alike():
    assert outcomes(made_up({**AS_PUBLISHED, "dinov2": 0.9}, STARTS))[5] == "does not hold"


def test_the_analysis_needs_no_finished_run():
    results = Results(arms("tiny"), "tiny", ())
    assert outcomes(results) == ["undecided"] * 7
    analyze(results).blocks[0].draw()  # type: ignore[union-attr]
