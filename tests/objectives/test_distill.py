"""Distillation losses compared with DeiT's formulas, and teachers with their own preprocessing."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from objectives.small_objectives import PREPROCESS, SMALL, distill, make_net, make_teacher, save_checkpoint

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.config.image import IMAGENET_MEAN, IMAGENET_STD
from vitrail.config.train import DistillConfig, TrainConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, NotFoundError
from vitrail.objectives import DistillObjective, make_objective
from vitrail.objectives.distill import distillation_loss


def deit_loss(
    logits: torch.Tensor,
    distillation_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    kind: str,
) -> Any:
    """DeiT's criterion for a batch, as its paper and code state it: alpha 0.5, temperature 3."""
    alpha, tau = 0.5, 3.0
    base = F.cross_entropy(logits, targets, label_smoothing=0.1)
    if kind == "hard":
        distillation = F.cross_entropy(distillation_logits, teacher_logits.argmax(dim=1))
    else:
        ours, theirs = F.log_softmax(distillation_logits / tau, dim=1), F.log_softmax(teacher_logits / tau, dim=1)
        distillation = (
            F.kl_div(ours, theirs, reduction="sum", log_target=True) * (tau * tau) / distillation_logits.numel()
        )
    return base * (1 - alpha) + distillation * alpha


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("distilled", [True, False])
def test_loss_matches_deit(kind: str, distilled: bool) -> None:
    objective = distill(kind, distilled).double().eval()
    images, targets = torch.randn(6, 3, 16, 16, dtype=torch.float64), torch.randint(5, (6,))
    output = objective(images, targets, torch.ones(6))
    teacher_logits = objective.teacher(images)
    if distilled:
        class_logits, distillation_logits = objective.net.features(images, outputs="head_logits").head_logits
    else:
        class_logits = distillation_logits = objective.net(images)
    torch.testing.assert_close(
        output["loss"] / 6,
        deit_loss(class_logits, distillation_logits, teacher_logits, targets, kind),
        rtol=1e-6,
        atol=1e-6,
    )
    assert float(output["correct"]) == float((((class_logits + distillation_logits) / 2).argmax(1) == targets).sum())
    assert float(output["agreed"]) == float((distillation_logits.argmax(1) == teacher_logits.argmax(1)).sum())
    teacher_loss = distillation_loss(distillation_logits, teacher_logits, objective.config).sum()
    torch.testing.assert_close(output["teacher_loss"], teacher_loss)


def test_alpha_is_the_weight_of_the_teacher() -> None:
    objective = distill().double().eval()
    images, targets = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.randint(5, (4,))
    losses = {}
    for alpha in (0.0, 0.3, 1.0):
        objective.config = objective.config.replace(alpha=alpha)
        losses[alpha] = objective(images, targets, torch.ones(4))["loss"]
    torch.testing.assert_close(losses[0.3], 0.7 * losses[0.0] + 0.3 * losses[1.0])


def test_loss_is_zero_if_the_student_agrees_with_the_teacher() -> None:
    logits = 50 * torch.eye(5)
    for kind in ("hard", "soft"):
        assert float(distillation_loss(logits, logits, DistillConfig(kind=kind)).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_balanced_weights_make_the_teachers_classes_equally_likely(kind: str) -> None:
    """The teacher assigns 100 images to one class, 5 to another and none to a third, each with certainty."""
    teacher_logits = torch.tensor([[40.0, 0.0, 0.0]] * 100 + [[0.0, 40.0, 0.0]] * 5, dtype=torch.float64)
    weights = torch.tensor([0.525, 10.5, 0.0])
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    config = DistillConfig(kind=kind, temperature=1.0)
    loss = distillation_loss(logits.expand(105, 3), teacher_logits, config, weights).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0].item() == pytest.approx(gradient[1].item())
    assert gradient[0] < 0 < gradient[2]
    agreeing_loss = distillation_loss(teacher_logits, teacher_logits, config, weights)
    assert bool(agreeing_loss.isfinite().all())
    assert float(agreeing_loss.abs().max()) < 1e-6


def test_label_and_teacher_losses_use_their_own_class_weights() -> None:
    objective = distill().double().eval()
    weights = torch.tensor([2.0, 1.0, 0.5, 0.25, 4.0], dtype=torch.float64)
    objective.labels.class_weights = weights
    images, targets = torch.randn(6, 3, 16, 16, dtype=torch.float64), torch.randint(5, (6,))
    class_logits, distillation_logits = objective.net.features(images, outputs="head_logits").head_logits
    teacher_classes = objective.teacher(images).argmax(1)
    label_loss = (
        F.cross_entropy(class_logits, targets, reduction="none", label_smoothing=0.1) * weights[targets]
    ).sum()
    expected = 0.5 * label_loss + 0.5 * F.cross_entropy(distillation_logits, teacher_classes, weights, reduction="sum")
    torch.testing.assert_close(objective(images, targets, torch.ones(6))["loss"], expected)


def test_teacher_images_use_the_teachers_normalization() -> None:
    """Pixels normalized for the student and given to the teacher equal pixels normalized for the teacher."""
    pixels = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    teacher_preprocess = PreprocessConfig(image_size=16, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    net = make_net(1).eval()
    got = make_teacher(net, teacher_preprocess, dtype=torch.float32)(Preprocess(PREPROCESS).normalize(pixels))
    with torch.no_grad():
        torch.testing.assert_close(got, net(Preprocess(teacher_preprocess).normalize(pixels)), rtol=1e-4, atol=1e-5)


def test_teacher_images_are_resized_with_antialiasing() -> None:
    net, images = make_net(1, image_size=8).eval(), torch.randn(2, 3, 16, 16)
    got = make_teacher(net, PREPROCESS.replace(image_size=8), dtype=torch.float32)(images)
    with torch.no_grad():
        torch.testing.assert_close(got, net(F.interpolate(images, (8, 8), mode="bilinear", antialias=True)))
    assert not got.requires_grad


def test_gray_student_can_have_a_color_teacher() -> None:
    gray = PreprocessConfig(image_size=16, mean=(0.5,), std=(0.5,))
    net, images = make_net(1).eval(), torch.randn(2, 1, 16, 16)
    teacher = teacher_for(net, gray)
    with torch.no_grad():
        color = (images * 0.5 + 0.5 - torch.tensor(PREPROCESS.mean)[:, None, None]) / torch.tensor(PREPROCESS.std)[
            :, None, None
        ]
        torch.testing.assert_close(teacher(images), net(color), rtol=1e-4, atol=1e-5)


def teacher_for(net: Any, student: PreprocessConfig) -> Any:
    from vitrail.objectives import Teacher
    from vitrail.weights.model_info import ModelInfo

    return Teacher(net, ModelInfo(config=net.config, preprocess=PREPROCESS), student)


def test_teacher_is_neither_trained_nor_saved_nor_copied() -> None:
    objective = distill()
    assert not any("teacher" in name for name in objective.state_dict())
    count = sum(p.numel() for p in objective.parameters())
    assert count == sum(p.numel() for p in objective.net.parameters())
    assert copy.deepcopy(objective).teacher is objective.teacher
    objective.train()
    assert not objective.teacher.net.training
    assert not any(p.requires_grad for p in objective.teacher.net.parameters())


LABELS = ("ant", "bee", "cat", "dog", "eel")


def distill_config(teacher: str, **options: Any) -> TrainConfig:
    return TrainConfig(model=ViTConfig(**SMALL), objective="distill", distill=DistillConfig(teacher=teacher, **options))


def test_any_checkpoint_can_be_the_teacher(tmp_path: Path) -> None:
    net = make_net(1)
    path = save_checkpoint(net, tmp_path / "teacher", LABELS)
    objective = make_objective(distill_config(path), make_net(), PREPROCESS, labels=LABELS)
    assert isinstance(objective, DistillObjective)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(objective.teacher(images), net.eval()(images))


def test_teacher_classes_are_reordered_to_the_students(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = make_net(1)
    path = save_checkpoint(net, tmp_path / "teacher", LABELS)
    with caplog.at_level(logging.WARNING, "vitrail"):
        objective = make_objective(distill_config(path), make_net(), PREPROCESS, labels=LABELS[::-1])
    assert "in a different order" in caplog.text
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(objective.teacher(images), net.eval()(images).flip(1))


def test_incompatible_teachers_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(make_net(1), tmp_path / "teacher", LABELS)
    with pytest.raises(ConfigError, match="has 5 classes, but the data has 7"):
        make_objective(distill_config(path), make_net(num_classes=7), PREPROCESS)
    with pytest.raises(ConfigError, match=r"class 2 is 'cat' in the teacher .* and 'cow' in the data"):
        make_objective(distill_config(path), make_net(), PREPROCESS, labels=("ant", "bee", "cow", "dog", "eel"))
    with pytest.raises(ConfigError, match="one label per image"):
        make_objective(distill_config(path), make_net(), PREPROCESS, multi_label=True)
    four_channels = PREPROCESS.replace(mean=(0.5,) * 4, std=(0.5,) * 4)
    with pytest.raises(ConfigError, match="has 3 input channels, but the student has 4"):
        make_objective(distill_config(path), make_net(channels=4), four_channels)
    headless = save_checkpoint(make_net(1, num_classes=0), tmp_path / "features")
    with pytest.raises(ConfigError, match="has 0 classes"):
        make_objective(distill_config(headless), make_net(), PREPROCESS)
    with pytest.raises(NotFoundError):
        make_objective(distill_config(str(tmp_path / "nothing.safetensors")), make_net(), PREPROCESS)


def test_teacher_is_exact_in_float64(tmp_path: Path) -> None:
    path = save_checkpoint(make_net(1), tmp_path / "teacher")
    objective = make_objective(
        distill_config(path, kind="soft").replace(precision="float64"), make_net().double(), PREPROCESS
    )
    assert objective.teacher(torch.randn(1, 3, 16, 16, dtype=torch.float64)).dtype == torch.float64
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    batch_logits = objective.teacher(images)
    np.testing.assert_allclose(batch_logits[:1].numpy(), objective.teacher(images[:1]).numpy(), rtol=1e-12)
