"""The distillation experiment: its arms, the accuracy of each head, agreement, and verdicts from made-up results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from reproduction.small_models import make_model
from reproduction.synthetic import make_result
from training.small_runs import digits_config

from vitrail.config import BiTConfig, ViTConfig
from vitrail.data.sources import open_source_splits
from vitrail.evaluation.evaluate import evaluate
from vitrail.model import Model
from vitrail.reproduction.analysis import Table
from vitrail.reproduction.arm import SCALES, Arm, Scale, Trial
from vitrail.reproduction.experiments.distillation import (
    BIT,
    CLASS_HEAD,
    DISTILL_HEAD,
    HARD,
    NONE,
    PUBLISHED,
    SOFT,
    STUDENTS,
    TOKEN,
    VIT,
    WEAK_BIT,
    agreement,
    agreement_gain,
    analyze,
    arms,
    student_name,
    teacher_name,
)
from vitrail.reproduction.measures.heads import heads
from vitrail.reproduction.results import ARRAYS_FILE, Results
from vitrail.training.runs import Run

SPREAD = (-0.001, 0.0, 0.001)
AS_PUBLISHED = {
    teacher_name(BIT): 0.82, teacher_name(WEAK_BIT): 0.75, NONE: 0.722, student_name(BIT, SOFT): 0.722,
    student_name(BIT, HARD): 0.735, student_name(BIT, TOKEN): 0.745, student_name(WEAK_BIT, TOKEN): 0.74,
    student_name(VIT, SOFT): 0.722, student_name(VIT, HARD): 0.722, student_name(VIT, TOKEN): 0.723,
}  # fmt: skip
HEADS = {CLASS_HEAD: 0.73, DISTILL_HEAD: 0.744}


def by_name(scale: Scale) -> dict[str, Arm]:
    return {arm.name: arm for arm in arms(scale)}


def made_up(
    tests: Mapping[str, float], measures: Mapping[str, float], folder: Path | None = None, equal: int = 0
) -> Results:
    """`equal`: for how many of 100 test images the students predict the BiT teacher's class."""
    found = []
    for i, arm in enumerate(arms("tiny")):
        for seed in range(3):
            spread, trial = SPREAD[(seed + i) % 3], Trial(arm=arm, lr=arm.rates[0], seed=seed)
            alone = {head: value + spread * j for j, (head, value) in enumerate(measures.items())}
            found.append(make_result(trial, test=tests[arm.name] + spread, measures=alone))
            if folder is not None:
                predicted = np.zeros(100, np.int64) if arm.name == teacher_name(BIT) else np.ones(100, np.int64)
                predicted[: 50 + seed if arm.name == NONE else equal] = 0
                (folder / trial.key).mkdir()
                np.savez(folder / trial.key / ARRAYS_FILE, predicted=predicted)
    return Results(arms("tiny"), "tiny", found, folder)


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


@pytest.mark.parametrize("scale", SCALES)
def test_students_differ_in_loss_and_teacher_only(scale: Scale):
    found = by_name(scale)
    plain = found[NONE].config
    assert isinstance(plain.model, ViTConfig)
    for teacher, loss in STUDENTS:
        arm = found[student_name(teacher, loss)]
        assert arm.parent == teacher_name(teacher)
        assert arm.parent_setting == "distill.teacher"
        assert isinstance(arm.config.model, ViTConfig)
        assert arm.config.model == plain.model.replace(distilled=loss == TOKEN)
        assert arm.config.distill.kind == ("soft" if loss == SOFT else "hard")
        same = arm.config.replace(objective="classify", distill=plain.distill.to_dict(), model=plain.model.to_dict())
        assert same == plain


@pytest.mark.parametrize("scale", SCALES)
def test_all_arms_have_the_same_images_and_as_many_learning_rates(scale: Scale):
    assert len({arm.config.data for arm in arms(scale)}) == 1
    assert len({arm.learning_rates for arm in arms(scale)}) == 1


@pytest.mark.parametrize("scale", SCALES)
def test_the_teachers_are_resnets_and_the_student_itself(scale: Scale):
    full, less = (by_name(scale)[teacher_name(name)].config for name in (BIT, WEAK_BIT))
    assert isinstance(full.model, BiTConfig)
    assert less.duration.count < full.duration.count
    assert less.replace(duration=full.duration, schedule=full.schedule) == full
    assert teacher_name(VIT) == NONE


def test_each_head_is_measured_alone(tmp_path: Path):
    model = make_model(tmp_path / "model", distilled=True)
    run = Run(tmp_path, digits_config(model=model.config.to_dict()))
    found = heads(run)
    images, targets = read_images(model)
    logits = model.net.features(images, outputs="head_logits").head_logits
    assert logits is not None
    for name, values in zip((CLASS_HEAD, DISTILL_HEAD), logits, strict=True):
        assert found[name] == pytest.approx((values.argmax(1) == targets).float().mean().item())
    with np.load(tmp_path / ARRAYS_FILE) as arrays:
        predicted = dict(arrays)
    assert (predicted["predicted_class"] == logits[0].argmax(1).numpy()).all()
    assert (predicted["predicted_distill"] == logits[1].argmax(1).numpy()).all()
    assert (predicted["predicted"] == targets.numpy()).mean() == evaluate(model, "digits").top1.value
    assert (predicted["predicted_class"] != predicted["predicted_distill"]).any()


def test_a_model_with_one_head_has_predictions_only(tmp_path: Path):
    model = make_model(tmp_path / "model")
    assert heads(Run(tmp_path, digits_config(model=model.config.to_dict()))) == {}
    with np.load(tmp_path / ARRAYS_FILE) as arrays:
        assert list(arrays) == ["predicted"]


def test_agreement_is_the_fraction_of_images_with_the_same_class(tmp_path: Path):
    results = made_up(AS_PUBLISHED, HEADS, tmp_path, equal=80)
    token = student_name(BIT, TOKEN)
    mean = agreement(results, token, teacher_name(BIT))
    assert mean is not None
    assert (mean.value, mean.count) == (pytest.approx(0.8), 3)
    gain = agreement_gain(results, token)
    assert gain is not None
    assert gain.value == pytest.approx(0.8 - 0.51)
    assert agreement(results, token, teacher_name(BIT), "predicted_class") is None


def test_metrics_of_an_arm_are_compared_within_each_seed():
    difference = made_up(AS_PUBLISHED, HEADS).change(student_name(BIT, TOKEN), DISTILL_HEAD, CLASS_HEAD)
    assert difference is not None
    assert difference.value == pytest.approx(0.014)


def test_the_published_findings_are_recognized(tmp_path: Path):
    assert outcomes(made_up(AS_PUBLISHED, HEADS, tmp_path, equal=80)) == ["holds"] * 8


def test_verdicts_flip_with_the_results(tmp_path: Path):
    tests = {
        **AS_PUBLISHED, NONE: 0.9, student_name(BIT, SOFT): 0.8, student_name(BIT, HARD): 0.77,
        student_name(VIT, TOKEN): 0.8,
    }  # fmt: skip
    results = made_up(tests, {CLASS_HEAD: 0.78, DISTILL_HEAD: 0.7}, tmp_path, equal=20)
    assert outcomes(results) == ["does not hold"] * 8


def test_the_teachers_accuracies_are_stated_with_the_verdict_on_them():
    reason = analyze(made_up(AS_PUBLISHED, HEADS)).verdicts[5].reason
    assert "BiT 82.00, weaker BiT 75.00, ViT 72.20 %" in reason
    assert "teachers: weaker BiT 75.00, ViT 72.20 %" in analyze(made_up(AS_PUBLISHED, HEADS)).verdicts[6].reason


def test_a_convnet_that_is_far_behind_is_no_teacher_of_deits():
    tests = {**AS_PUBLISHED, teacher_name(WEAK_BIT): 0.5, student_name(VIT, TOKEN): 0.9}
    reason = analyze(made_up(tests, HEADS)).verdicts[6].reason
    assert "is 22.20 points below the ViT's; that of the weakest one in DeiT's Table 2 is 1.8 below." in reason
    tests = {**AS_PUBLISHED, student_name(VIT, TOKEN): 0.9}
    assert "below" not in analyze(made_up(tests, HEADS)).verdicts[6].reason


@pytest.mark.parametrize(("scale", "model"), [("tiny", "DeiT-Ti"), ("gpu", "DeiT-Ti"), ("paper", "DeiT-S")])
def test_deits_own_numbers_are_those_of_the_paper_s_student(scale: Scale, model: str):
    table = analyze(Results(arms(scale), scale, ())).blocks[1]
    assert isinstance(table, Table)
    assert table.columns[-3:] == [f"{model} on ImageNet{head}" for head in ("", ", class head", ", distillation head")]
    shown = {row[0]: tuple(row[-3:]) for row in table.rows}
    assert shown[student_name(BIT, TOKEN)] == PUBLISHED[model][TOKEN]
    assert shown[student_name(VIT, TOKEN)] == (None, None, None)


def test_the_analysis_needs_no_finished_run():
    results = Results(arms("tiny"), "tiny", ())
    assert outcomes(results) == ["undecided"] * 8
    analyze(results).blocks[0].draw()  # type: ignore[union-attr]


def read_images(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits' test images as the network's input, and their classes."""
    source = open_source_splits(digits_config().data).evaluation_source
    pixels = np.stack([model.preprocess.pixels(source[i].image) for i in range(len(source))])  # type: ignore[arg-type]
    images = model.preprocess.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    return images, torch.from_numpy(np.asarray(source.targets))
