"""Classification losses compared with slow reference code, PyTorch and timm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import import_peer
from hypothesis import given
from hypothesis import strategies as st
from objectives.small_objectives import PREPROCESS, SMALL, make_net
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from vitrail.config import ViTConfig
from vitrail.config.train import ClassifyConfig, TrainConfig
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.objectives import ClassifyObjective, LabelLoss, make_objective
from vitrail.objectives.classify import balanced_weights


def label_loss(classes: int = 5, multi_label: bool = False, counts: Any = None, **options: Any) -> LabelLoss:
    return LabelLoss(ClassifyConfig(**options), classes, multi_label=multi_label, class_counts=counts)


def reference_losses(logits: Tensor, expected: Tensor, loss: str, smoothing: float) -> list[float]:
    """The loss of each image, computed class by class with Python floats."""
    losses = []
    for row, target in zip(logits.tolist(), expected.tolist(), strict=True):
        classes, mass, total = len(row), sum(target), 0.0
        soft = [(1 - smoothing) * t + smoothing * mass / classes for t in target]
        norm = math.log(sum(math.exp(v) for v in row))
        for logit, target_share in zip(row, soft, strict=True):
            if loss == "softmax":
                total -= target_share * (logit - norm)
            else:
                probability = 1 / (1 + math.exp(-logit))
                total -= target_share * math.log(probability) + (1 - target_share) * math.log(1 - probability)
        losses.append(total)
    return losses


@given(
    st.integers(1, 4),
    st.integers(2, 6),
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
)
def test_losses_match_their_definitions(b: int, k: int, loss: str, smoothing: float, mixed: bool) -> None:
    logits, indices = torch.randn(b, k, dtype=torch.float64), torch.randint(k, (b,))
    soft = F.one_hot(indices, k).double()
    if mixed:
        soft = 0.3 * soft + 0.7 * soft.flip(0)
    got = label_loss(k, loss=loss, label_smoothing=smoothing)(logits, soft if mixed else indices)
    # one-hot labels are float32, hence the tolerance
    assert got.tolist() == pytest.approx(reference_losses(logits, soft, loss, smoothing), rel=1e-6)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_hard_labels_equal_one_hot_labels(loss: str) -> None:
    logits, indices = torch.randn(7, 5), torch.randint(5, (7,))
    loss_fn = label_loss(loss=loss, label_smoothing=0.2)
    torch.testing.assert_close(loss_fn(logits, indices), loss_fn(logits, F.one_hot(indices, 5).float()))


def test_smoothing_and_mixing_commute() -> None:
    loss_fn, soft = label_loss(label_smoothing=0.3), F.one_hot(torch.tensor([0, 3]), 5).float()
    mixed = 0.4 * soft + 0.6 * soft.flip(0)
    torch.testing.assert_close(
        loss_fn.smoothed(mixed), 0.4 * loss_fn.smoothed(soft) + 0.6 * loss_fn.smoothed(soft.flip(0))
    )


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4), st.sampled_from([0.0, 0.2]))
def test_multi_label_loss_is_binary_cross_entropy(rows: list[list[bool]], smoothing: float) -> None:
    expected, logits = torch.tensor(rows).float(), torch.randn(len(rows), 4)
    # multi-label targets override loss=softmax
    loss_fn = label_loss(4, multi_label=True, loss="softmax", label_smoothing=smoothing)
    assert loss_fn(logits, expected).tolist() == pytest.approx(
        reference_losses(logits, expected, "sigmoid", smoothing), rel=1e-4
    )
    correct = [
        all((v > 0) == t for v, t in zip(r, ts, strict=True)) for r, ts in zip(logits.tolist(), rows, strict=True)
    ]
    assert loss_fn.correct(logits, expected).tolist() == correct


@pytest.mark.peer
def test_losses_match_timm() -> None:
    import_peer("timm")
    from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    logits, indices = torch.randn(16, 5), torch.randint(5, (16,))
    soft = torch.randn(16, 5).softmax(-1)
    mean = lambda losses: float(losses.mean())  # noqa: E731
    assert mean(label_loss(label_smoothing=0.1)(logits, indices)) == pytest.approx(
        float(LabelSmoothingCrossEntropy(0.1)(logits, indices)), rel=1e-5
    )
    assert mean(label_loss()(logits, soft)) == pytest.approx(float(SoftTargetCrossEntropy()(logits, soft)), rel=1e-5)
    theirs = BinaryCrossEntropy(smoothing=0.1, reduction="none")(logits, indices).sum(-1)
    torch.testing.assert_close(label_loss(loss="sigmoid", label_smoothing=0.1)(logits, indices), theirs)


def test_correct_compares_the_most_likely_classes() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    loss_fn = label_loss(3)
    assert loss_fn.correct(logits, torch.tensor([1, 1, 2])).tolist() == [1, 0, 1]
    mixed = torch.tensor([[0.4, 0.6, 0.0], [0.2, 0.8, 0.0], [0.5, 0.1, 0.4]])
    assert loss_fn.correct(logits, mixed).tolist() == [1, 0, 0]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any))
def test_balanced_weights_have_mean_one_and_make_classes_equal(counts: list[int]) -> None:
    weights = balanced_weights(counts, len(counts)).double().numpy()
    total = np.array(counts) * weights
    assert total.sum() / sum(counts) == pytest.approx(1, rel=1e-6)
    nonempty = total[np.array(counts) > 0]
    np.testing.assert_allclose(nonempty, nonempty[0], rtol=1e-6)
    assert not weights[np.array(counts) == 0].any()


@pytest.mark.peer
def test_balanced_weights_match_scikit_learn() -> None:
    utils = import_peer("sklearn.utils.class_weight")
    y = np.repeat([0, 1, 2], [1, 5, 10])
    expected = utils.compute_class_weight("balanced", classes=np.arange(3), y=y)
    np.testing.assert_allclose(balanced_weights([1, 5, 10], 3), expected, rtol=1e-6)


WEIGHTS = torch.tensor([4.0, 4 / 3, 0.5])
"""Balanced weights of three classes with 1, 3 and 8 images."""


def test_class_weights_match_torch() -> None:
    """Class indices and soft labels are weighted as in `F.cross_entropy(weight=)`."""
    objective = ClassifyObjective(
        make_net(num_classes=3), label_loss(3, counts=[1, 3, 8], class_weights="balanced")
    ).eval()
    images, mixed = torch.randn(3, 3, 16, 16), torch.randn(3, 3).softmax(-1)
    for targets in (torch.tensor([0, 1, 2]), mixed):
        expected = F.cross_entropy(objective.net(images), targets, weight=WEIGHTS, reduction="sum")
        torch.testing.assert_close(objective(images, targets, torch.ones(3))["loss"], expected)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_loss_of_a_mixture_is_the_sum_over_its_labels(loss: str, smoothing: float) -> None:
    logits, mixture = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64).softmax(-1)
    unweighted = label_loss(3, loss=loss, label_smoothing=smoothing)
    weighted = label_loss(3, counts=[1, 3, 8], class_weights="balanced", loss=loss, label_smoothing=smoothing)
    class_losses = [unweighted(logits, torch.full((3,), k)) * WEIGHTS[k].double() for k in range(3)]
    for k in range(3):
        torch.testing.assert_close(weighted(logits, torch.full((3,), k)), class_losses[k], rtol=1e-6, atol=0)
    expected = sum(mixture[:, k] * class_losses[k] for k in range(3))
    torch.testing.assert_close(weighted(logits, mixture), expected, rtol=1e-6, atol=0)


def mixtures(counts: list[int]) -> tuple[Tensor, Tensor]:
    """Every pair of classes mixed in 20 proportions (mixup, alpha 1), and the frequency of each mixture."""
    one_hot, shares = torch.eye(len(counts)).double(), torch.tensor(counts).double() / sum(counts)
    targets, frequencies = [], []
    for first in range(len(counts)):
        for second in range(len(counts)):
            for ratio in (torch.arange(20) + 0.5) / 20:
                targets.append(ratio * one_hot[first] + (1 - ratio) * one_hot[second])
                frequencies.append(shares[first] * shares[second] / 20)
    return torch.stack(targets), torch.stack(frequencies)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_balanced_weights_give_equal_priors_also_with_mixed_images(loss: str, smoothing: float) -> None:
    """Constant logits that minimize the expected loss, found with Newton's method."""
    loss_fn = label_loss(2, counts=[100, 5], class_weights="balanced", loss=loss, label_smoothing=smoothing)
    targets, frequencies = mixtures([100, 5])

    def expected(logits: Tensor) -> Tensor:
        return (loss_fn(logits.expand(len(targets), 2), targets) * frequencies).sum()

    logits = torch.zeros(2, dtype=torch.float64)
    for _ in range(8):
        gradient, curvature = jacobian(expected, logits), hessian(expected, logits)
        logits = logits - torch.linalg.pinv(curvature) @ gradient  # softmax does not change when all logits shift
    prior = logits.softmax(0) if loss == "softmax" else logits.sigmoid()
    assert prior.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


def test_distilled_network_is_trained_on_the_mean_of_its_heads() -> None:
    net = make_net(distilled=True)
    objective, images, targets = ClassifyObjective(net, label_loss()), torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
    class_logits, distillation_logits = net.features(images, outputs="head_logits").head_logits
    torch.testing.assert_close(
        objective(images, targets, torch.ones(4))["loss"],
        F.cross_entropy((class_logits + distillation_logits) / 2, targets, reduction="sum"),
    )


def test_invalid_configurations_are_refused() -> None:
    config = TrainConfig(model=ViTConfig(**SMALL), classify=ClassifyConfig(class_weights="balanced"))
    with pytest.raises(DataError, match="number of images of each class"):
        make_objective(config, make_net(), PREPROCESS)
    with pytest.raises(DataError, match=r"each of 5 classes, got counts of shape \(4,\)"):
        make_objective(config, make_net(), PREPROCESS, class_counts=np.ones(4))
    with pytest.raises(ConfigError, match="got multi-label targets; try none"):
        make_objective(config, make_net(), PREPROCESS, multi_label=True, class_counts=np.ones(5))
    with pytest.raises(ModelError, match="without a head"):
        make_objective(TrainConfig(model=ViTConfig(**SMALL)), make_net(num_classes=0), PREPROCESS)
    for targets in (torch.zeros(3).long(), torch.zeros(4), torch.zeros(4, 3)):
        with pytest.raises(ModelError, match="4 class indices or soft labels"):
            label_loss()(torch.zeros(4, 5), targets)
    with pytest.raises(ModelError, match=r"expected \(4, 5\) labels"):
        label_loss(multi_label=True)(torch.zeros(4, 5), torch.zeros(4).long())
