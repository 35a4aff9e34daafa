"""The self-supervision experiment: who sees which images and labels, and verdicts from made-up accuracies."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from reproduction.synthetic import make_result

from vitrail.config import TrainConfig, ViTConfig
from vitrail.data.sources import open_data
from vitrail.reproduction.arm import SCALES, Arm, Scale, Trial
from vitrail.reproduction.experiments.self_supervision import (
    COLOR,
    DOWNSIZED,
    PIXELS,
    SCRATCH,
    SHORT,
    STARTS,
    SUPERVISED,
    TARGETS,
    UNTRAINED,
    analyze,
    arm_name,
    arms,
    percents_of,
    pretraining_name,
)
from vitrail.reproduction.results import Results

SPREAD = (-0.001, 0.0, 0.001)
AS_PUBLISHED = {SCRATCH: 0.779, SHORT: 0.7, COLOR: 0.80, DOWNSIZED: 0.799, PIXELS: 0.794, SUPERVISED: 0.84}


def by_name(scale: Scale) -> dict[str, Arm]:
    return {arm.name: arm for arm in arms(scale)}


def made_up(tests: Mapping[str, float]) -> Results:
    """The same accuracy for every part of the labels; pre-training has none."""
    found = []
    for i, arm in enumerate(arms("tiny")):
        for seed in range(3):
            pretraining = arm.name.startswith("pre-training")
            test = None if pretraining else tests[str(arm.factors["start"])] + SPREAD[(seed + i) % 3]
            found.append(make_result(Trial(arm=arm, lr=arm.rates[0], seed=seed), test=test))
    return Results(arms("tiny"), "tiny", found)


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


def images(config: TrainConfig) -> set[str]:
    train = open_data(config.data).train
    return {train.key(i) for i in range(len(train))}


def test_pre_training_and_fine_tuning_see_different_images():
    found = by_name("tiny")
    first = images(found[pretraining_name(SUPERVISED)].config)
    labeled = [images(found[arm_name(SCRATCH, percent)].config) for percent in percents_of("tiny")]
    assert not first & labeled[0]
    assert abs(len(first) - len(labeled[0])) <= 10
    assert labeled[0] > labeled[1] > labeled[2]
    validation = open_data(found[pretraining_name(SUPERVISED)].config.data).validation
    assert not {validation.key(i) for i in range(len(validation))} & (first | labeled[0])


@pytest.mark.parametrize("scale", SCALES)
def test_pre_trainings_see_the_same_images_for_as_many_steps(scale: Scale):
    pretrained = [by_name(scale)[pretraining_name(start)] for start in STARTS if start not in UNTRAINED]
    assert len({arm.config.data for arm in pretrained}) == 1
    assert len({(arm.config.duration, arm.config.batch_size) for arm in pretrained}) == 1
    assert [arm.config.objective for arm in pretrained] == ["masked-patch"] * 3 + ["classify"]
    assert [arm.config.masked_patch.target for arm in pretrained[:3]] == list(TARGETS.values())


@pytest.mark.parametrize("scale", SCALES)
def test_fine_tunings_with_as_many_labels_differ_in_their_start_only(scale: Scale):
    found = by_name(scale)
    for percent in percents_of(scale):
        tuned = [found[arm_name(start, percent)] for start in STARTS if start not in UNTRAINED]
        assert len({arm.config for arm in tuned}) == 1
        assert found[arm_name(SHORT, percent)].config.duration == tuned[0].config.duration
        scratch = found[arm_name(SCRATCH, percent)]
        assert scratch.config.data == tuned[0].config.data
        assert len(scratch.rates) == len(tuned[0].rates)
        pretrained = found[pretraining_name(COLOR)].config.duration.count
        assert scratch.config.duration.count == pretrained + tuned[0].config.duration.count


@pytest.mark.parametrize("scale", SCALES)
def test_the_supervised_head_is_not_kept(scale: Scale):
    for arm in arms(scale):
        assert (arm.parent_edit == "without-head") == (arm.parent == pretraining_name(SUPERVISED))


@pytest.mark.parametrize("scale", SCALES)
def test_patches_are_large_enough_for_4_x_4_colors(scale: Scale):
    for arm in arms(scale):
        assert isinstance(arm.config.model, ViTConfig)
        assert min(arm.config.model.patch_size) >= 4  # type: ignore[type-var]


def test_a_batch_has_at_most_as_many_images_as_there_are():
    for arm in arms("tiny"):
        assert len(open_data(arm.config.data).train) >= arm.config.batch_size  # type: ignore[operator]


def test_the_paper_s_findings_are_recognized():
    assert outcomes(made_up(AS_PUBLISHED)) == ["holds"] * 4


def test_verdicts_flip_with_the_results():
    flipped = {SCRATCH: 0.86, SHORT: 0.5, COLOR: 0.85, DOWNSIZED: 0.6, PIXELS: 0.87, SUPERVISED: 0.84}
    assert outcomes(made_up(flipped)) == ["does not hold", "does not hold", "undecided", "does not hold"]
    assert outcomes(made_up({**AS_PUBLISHED, DOWNSIZED: 0.7}))[2] == "does not hold"


def test_the_analysis_needs_no_finished_run():
    results = Results(arms("tiny"), "tiny", ())
    assert outcomes(results) == ["undecided"] * 4
    analyze(results).blocks[0].draw()  # type: ignore[union-attr]
