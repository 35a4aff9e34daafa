"""Distillation against DeiT's formulas, and teachers that see images their own way."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from objectives.learners import SMALL, WAY, distill, net_of, saved, teacher_of

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.config.image import IMAGENET_MEAN, IMAGENET_STD
from vitrail.config.train import DistillConfig, TrainConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, NotFoundError
from vitrail.objectives import DistillObjective, make_objective
from vitrail.objectives.distill import distillation_loss


def deit(logits: torch.Tensor, taught: torch.Tensor, said: torch.Tensor, targets: torch.Tensor, kind: str) -> Any:
    """DeiT's criterion for a batch, as its paper and code state it: alpha 0.5, temperature 3."""
    alpha, tau = 0.5, 3.0
    base = F.cross_entropy(logits, targets, label_smoothing=0.1)
    if kind == "hard":
        other = F.cross_entropy(taught, said.argmax(dim=1))
    else:
        ours, theirs = F.log_softmax(taught / tau, dim=1), F.log_softmax(said / tau, dim=1)
        other = F.kl_div(ours, theirs, reduction="sum", log_target=True) * (tau * tau) / taught.numel()
    return base * (1 - alpha) + other * alpha


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("distilled", [True, False])
def test_the_loss_is_deits(kind: str, distilled: bool) -> None:
    learner = distill(kind, distilled).double().eval()
    images, targets = torch.randn(6, 3, 16, 16, dtype=torch.float64), torch.randint(5, (6,))
    found = learner(images, targets, torch.ones(6))
    said = learner.teacher(images)
    if distilled:
        one, two = learner.net.features(images, outputs="head_logits").head_logits
    else:
        one = two = learner.net(images)
    torch.testing.assert_close(found["loss"] / 6, deit(one, two, said, targets, kind), rtol=1e-6, atol=1e-6)
    assert float(found["correct"]) == float((((one + two) / 2).argmax(1) == targets).sum())
    assert float(found["agreed"]) == float((two.argmax(1) == said.argmax(1)).sum())
    taught = distillation_loss(two, said, learner.config).sum()
    torch.testing.assert_close(found["teacher_loss"], taught)


def test_the_share_is_the_teachers() -> None:
    learner = distill().double().eval()
    images, targets = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.randint(5, (4,))
    found = {}
    for share in (0.0, 0.3, 1.0):
        learner.config = learner.config.replace(alpha=share)
        found[share] = learner(images, targets, torch.ones(4))["loss"]
    torch.testing.assert_close(found[0.3], 0.7 * found[0.0] + 0.3 * found[1.0])


def test_agreeing_with_the_teacher_costs_nothing() -> None:
    said = 50 * torch.eye(5)
    for kind in ("hard", "soft"):
        assert float(distillation_loss(said, said, DistillConfig(kind=kind)).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_balanced_weights_make_the_teachers_classes_equally_likely(kind: str) -> None:
    """A teacher sure of 100 images of one class and 5 of another, and of none of a third."""
    said = torch.tensor([[40.0, 0.0, 0.0]] * 100 + [[0.0, 40.0, 0.0]] * 5, dtype=torch.float64)
    weights = torch.tensor([0.525, 10.5, 0.0])
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    config = DistillConfig(kind=kind, temperature=1.0)
    loss = distillation_loss(logits.expand(105, 3), said, config, weights).sum()
    (slope,) = torch.autograd.grad(loss, logits)
    assert slope[0].item() == pytest.approx(slope[1].item())
    assert slope[0] < 0 < slope[2]
    agreed = distillation_loss(said, said, config, weights)
    assert bool(agreed.isfinite().all())
    assert float(agreed.abs().max()) < 1e-6


def test_labels_and_teacher_are_weighed_each_by_its_own_classes() -> None:
    learner = distill().double().eval()
    weights = torch.tensor([2.0, 1.0, 0.5, 0.25, 4.0], dtype=torch.float64)
    learner.labels.class_weights = weights
    images, targets = torch.randn(6, 3, 16, 16, dtype=torch.float64), torch.randint(5, (6,))
    one, two = learner.net.features(images, outputs="head_logits").head_logits
    hard = learner.teacher(images).argmax(1)
    by_labels = (F.cross_entropy(one, targets, reduction="none", label_smoothing=0.1) * weights[targets]).sum()
    expected = 0.5 * by_labels + 0.5 * F.cross_entropy(two, hard, weights, reduction="sum")
    torch.testing.assert_close(learner(images, targets, torch.ones(6))["loss"], expected)


def test_the_teacher_sees_images_as_it_was_trained_to() -> None:
    """The same bytes prepared for the student and shown to the teacher, or prepared for the teacher."""
    pixels = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    theirs = PreprocessConfig(image_size=16, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    net = net_of(1).eval()
    got = teacher_of(net, theirs, dtype=torch.float32)(Preprocess(WAY).normalize(pixels))
    with torch.no_grad():
        torch.testing.assert_close(got, net(Preprocess(theirs).normalize(pixels)), rtol=1e-4, atol=1e-5)


def test_another_size_is_resized_with_antialias() -> None:
    net, images = net_of(1, image_size=8).eval(), torch.randn(2, 3, 16, 16)
    got = teacher_of(net, WAY.replace(image_size=8), dtype=torch.float32)(images)
    with torch.no_grad():
        torch.testing.assert_close(got, net(F.interpolate(images, (8, 8), mode="bilinear", antialias=True)))
    assert not got.requires_grad


def test_a_gray_student_may_have_a_color_teacher() -> None:
    gray = PreprocessConfig(image_size=16, mean=(0.5,), std=(0.5,))
    net, images = net_of(1).eval(), torch.randn(2, 1, 16, 16)
    teacher = load_like(net, gray)
    with torch.no_grad():
        color = (images * 0.5 + 0.5 - torch.tensor(WAY.mean)[:, None, None]) / torch.tensor(WAY.std)[:, None, None]
        torch.testing.assert_close(teacher(images), net(color), rtol=1e-4, atol=1e-5)


def load_like(net: Any, student: PreprocessConfig) -> Any:
    from vitrail.objectives import Teacher
    from vitrail.weights.model_info import ModelInfo

    return Teacher(net, ModelInfo(config=net.config, preprocess=WAY), student)


def test_the_teacher_is_neither_trained_nor_saved_nor_copied() -> None:
    learner = distill()
    assert not any("teacher" in name for name in learner.state_dict())
    count = sum(p.numel() for p in learner.parameters())
    assert count == sum(p.numel() for p in learner.net.parameters())
    assert copy.deepcopy(learner).teacher is learner.teacher
    learner.train()
    assert not learner.teacher.net.training
    assert not any(p.requires_grad for p in learner.teacher.net.parameters())


NAMES = ("ant", "bee", "cat", "dog", "eel")


def config(teacher: str, **options: Any) -> TrainConfig:
    return TrainConfig(model=ViTConfig(**SMALL), objective="distill", distill=DistillConfig(teacher=teacher, **options))


def test_any_checkpoint_can_teach(tmp_path: Path) -> None:
    net = net_of(1)
    path = saved(net, tmp_path / "teacher", NAMES)
    learner = make_objective(config(path), net_of(), WAY, labels=NAMES)
    assert isinstance(learner, DistillObjective)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(learner.teacher(images), net.eval()(images))


def test_the_same_classes_in_another_order_are_put_in_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = net_of(1)
    path = saved(net, tmp_path / "teacher", NAMES)
    with caplog.at_level(logging.WARNING, "vitrail"):
        learner = make_objective(config(path), net_of(), WAY, labels=NAMES[::-1])
    assert "another order" in caplog.text
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(learner.teacher(images), net.eval()(images).flip(1))


def test_a_teacher_of_something_else_is_refused(tmp_path: Path) -> None:
    path = saved(net_of(1), tmp_path / "teacher", NAMES)
    with pytest.raises(ConfigError, match="has 5 classes, the student 7; they must be the same"):
        make_objective(config(path), net_of(num_classes=7), WAY)
    with pytest.raises(ConfigError, match=r"class 2 is 'cat' in the teacher .* and 'cow' in the data"):
        make_objective(config(path), net_of(), WAY, labels=("ant", "bee", "cow", "dog", "eel"))
    with pytest.raises(ConfigError, match="one label per image"):
        make_objective(config(path), net_of(), WAY, multi_label=True)
    four = WAY.replace(mean=(0.5,) * 4, std=(0.5,) * 4)
    with pytest.raises(ConfigError, match="has 3 input channels, the student 4"):
        make_objective(config(path), net_of(channels=4), four)
    headless = saved(net_of(1, num_classes=0), tmp_path / "features")
    with pytest.raises(ConfigError, match="has 0 classes"):
        make_objective(config(headless), net_of(), WAY)
    with pytest.raises(NotFoundError):
        make_objective(config(str(tmp_path / "nothing.safetensors")), net_of(), WAY)


def test_in_double_precision_the_teacher_is_exact_too(tmp_path: Path) -> None:
    path = saved(net_of(1), tmp_path / "teacher")
    learner = make_objective(config(path, kind="soft").replace(precision="float64"), net_of().double(), WAY)
    assert learner.teacher(torch.randn(1, 3, 16, 16, dtype=torch.float64)).dtype == torch.float64
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    whole = learner.teacher(images)
    np.testing.assert_allclose(whole[:1].numpy(), learner.teacher(images[:1]).numpy(), rtol=1e-12)
