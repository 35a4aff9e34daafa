"""Losses for labels against slow transcriptions, PyTorch's and timm's own."""

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
from objectives.learners import SMALL, WAY, net_of
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from vitrail.config import ViTConfig
from vitrail.config.train import ClassifyConfig, TrainConfig
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.objectives import ClassifyObjective, LabelLoss, make_objective
from vitrail.objectives.classify import balanced_weights


def labels(classes: int = 5, several: bool = False, counts: Any = None, **options: Any) -> LabelLoss:
    return LabelLoss(ClassifyConfig(**options), classes, multi_label=several, class_counts=counts)


def by_hand(logits: Tensor, expected: Tensor, loss: str, smoothing: float) -> list[float]:
    """Image by image, class by class, in Python's floats."""
    found = []
    for row, target in zip(logits.tolist(), expected.tolist(), strict=True):
        classes, mass, total = len(row), sum(target), 0.0
        soft = [(1 - smoothing) * t + smoothing * mass / classes for t in target]
        norm = math.log(sum(math.exp(v) for v in row))
        for value, share in zip(row, soft, strict=True):
            if loss == "softmax":
                total -= share * (value - norm)
            else:
                chance = 1 / (1 + math.exp(-value))
                total -= share * math.log(chance) + (1 - share) * math.log(1 - chance)
        found.append(total)
    return found


@given(
    st.integers(1, 4),
    st.integers(2, 6),
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
)
def test_the_losses_are_their_definitions(b: int, k: int, loss: str, smoothing: float, mixed: bool) -> None:
    logits, numbers = torch.randn(b, k, dtype=torch.float64), torch.randint(k, (b,))
    soft = F.one_hot(numbers, k).double()
    if mixed:
        soft = 0.3 * soft + 0.7 * soft.flip(0)
    got = labels(k, loss=loss, label_smoothing=smoothing)(logits, soft if mixed else numbers)
    assert got.tolist() == pytest.approx(by_hand(logits, soft, loss, smoothing), rel=1e-6)  # one-hots are float32


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_hard_labels_are_soft_ones_of_one_class(loss: str) -> None:
    logits, numbers = torch.randn(7, 5), torch.randint(5, (7,))
    goal = labels(loss=loss, label_smoothing=0.2)
    torch.testing.assert_close(goal(logits, numbers), goal(logits, F.one_hot(numbers, 5).float()))


def test_smoothing_and_mixing_may_come_in_either_order() -> None:
    goal, soft = labels(label_smoothing=0.3), F.one_hot(torch.tensor([0, 3]), 5).float()
    mixed = 0.4 * soft + 0.6 * soft.flip(0)
    torch.testing.assert_close(goal.smoothed(mixed), 0.4 * goal.smoothed(soft) + 0.6 * goal.smoothed(soft.flip(0)))


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4), st.sampled_from([0.0, 0.2]))
def test_several_labels_are_a_yes_or_no_each(rows: list[list[bool]], smoothing: float) -> None:
    expected, logits = torch.tensor(rows).float(), torch.randn(len(rows), 4)
    goal = labels(4, several=True, loss="softmax", label_smoothing=smoothing)  # softmax is no choice here
    assert goal(logits, expected).tolist() == pytest.approx(by_hand(logits, expected, "sigmoid", smoothing), rel=1e-4)
    right = [all((v > 0) == t for v, t in zip(r, ts, strict=True)) for r, ts in zip(logits.tolist(), rows, strict=True)]
    assert goal.correct(logits, expected).tolist() == right


@pytest.mark.peer
def test_timm_computes_the_same() -> None:
    import_peer("timm")
    from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    logits, numbers = torch.randn(16, 5), torch.randint(5, (16,))
    soft = torch.randn(16, 5).softmax(-1)
    mean = lambda each: float(each.mean())  # noqa: E731
    assert mean(labels(label_smoothing=0.1)(logits, numbers)) == pytest.approx(
        float(LabelSmoothingCrossEntropy(0.1)(logits, numbers)), rel=1e-5
    )
    assert mean(labels()(logits, soft)) == pytest.approx(float(SoftTargetCrossEntropy()(logits, soft)), rel=1e-5)
    theirs = BinaryCrossEntropy(smoothing=0.1, reduction="none")(logits, numbers).sum(-1)
    torch.testing.assert_close(labels(loss="sigmoid", label_smoothing=0.1)(logits, numbers), theirs)


def test_correct_counts_the_likeliest_class() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    goal = labels(3)
    assert goal.correct(logits, torch.tensor([1, 1, 2])).tolist() == [1, 0, 1]
    mixed = torch.tensor([[0.4, 0.6, 0.0], [0.2, 0.8, 0.0], [0.5, 0.1, 0.4]])
    assert goal.correct(logits, mixed).tolist() == [1, 0, 0]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any))
def test_balanced_weights_have_mean_one_and_make_classes_equal(counts: list[int]) -> None:
    weights = balanced_weights(counts, len(counts)).double().numpy()
    total = np.array(counts) * weights
    assert total.sum() / sum(counts) == pytest.approx(1, rel=1e-6)
    there = total[np.array(counts) > 0]
    np.testing.assert_allclose(there, there[0], rtol=1e-6)
    assert not weights[np.array(counts) == 0].any()


@pytest.mark.peer
def test_scikit_learn_balances_the_same() -> None:
    utils = import_peer("sklearn.utils.class_weight")
    y = np.repeat([0, 1, 2], [1, 5, 10])
    expected = utils.compute_class_weight("balanced", classes=np.arange(3), y=y)
    np.testing.assert_allclose(balanced_weights([1, 5, 10], 3), expected, rtol=1e-6)


WEIGHTS = torch.tensor([4.0, 4 / 3, 0.5])
"""Of three classes of 1, 3 and 8 images."""


def test_weights_are_those_of_torch() -> None:
    """Class numbers and mixtures, as `F.cross_entropy(weight=)` weighs them."""
    learner = ClassifyObjective(net_of(num_classes=3), labels(3, counts=[1, 3, 8], class_weights="balanced")).eval()
    images, mixed = torch.randn(3, 3, 16, 16), torch.randn(3, 3).softmax(-1)
    for targets in (torch.tensor([0, 1, 2]), mixed):
        expected = F.cross_entropy(learner.net(images), targets, weight=WEIGHTS, reduction="sum")
        torch.testing.assert_close(learner(images, targets, torch.ones(3))["loss"], expected)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_weighted_mixture_is_the_sum_of_its_weighted_labels(loss: str, smoothing: float) -> None:
    logits, share = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64).softmax(-1)
    plain = labels(3, loss=loss, label_smoothing=smoothing)
    goal = labels(3, counts=[1, 3, 8], class_weights="balanced", loss=loss, label_smoothing=smoothing)
    each = [plain(logits, torch.full((3,), k)) * WEIGHTS[k].double() for k in range(3)]
    for k in range(3):
        torch.testing.assert_close(goal(logits, torch.full((3,), k)), each[k], rtol=1e-6, atol=0)
    expected = sum(share[:, k] * each[k] for k in range(3))
    torch.testing.assert_close(goal(logits, share), expected, rtol=1e-6, atol=0)


def mixtures(counts: list[int]) -> tuple[Tensor, Tensor]:
    """Every pair of classes mixed in every proportion (mixup, alpha 1), and how often each comes."""
    own, shares = torch.eye(len(counts)).double(), torch.tensor(counts).double() / sum(counts)
    targets, often = [], []
    for one in range(len(counts)):
        for other in range(len(counts)):
            for keep in (torch.arange(20) + 0.5) / 20:
                targets.append(keep * own[one] + (1 - keep) * own[other])
                often.append(shares[one] * shares[other] / 20)
    return torch.stack(targets), torch.stack(often)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_balanced_classes_are_equally_likely_also_where_images_are_mixed(loss: str, smoothing: float) -> None:
    """The constant logits at which the expected loss is lowest, by Newton's method."""
    goal = labels(2, counts=[100, 5], class_weights="balanced", loss=loss, label_smoothing=smoothing)
    targets, often = mixtures([100, 5])

    def expected(logits: Tensor) -> Tensor:
        return (goal(logits.expand(len(targets), 2), targets) * often).sum()

    logits = torch.zeros(2, dtype=torch.float64)
    for _ in range(8):
        slope, bend = jacobian(expected, logits), hessian(expected, logits)
        logits = logits - torch.linalg.pinv(bend) @ slope  # softmax has a direction without any slope
    prior = logits.softmax(0) if loss == "softmax" else logits.sigmoid()
    assert prior.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


def test_a_distilled_network_is_trained_on_what_it_answers_with() -> None:
    net = net_of(distilled=True)
    learner, images, targets = ClassifyObjective(net, labels()), torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
    one, two = net.features(images, outputs="head_logits").head_logits
    torch.testing.assert_close(
        learner(images, targets, torch.ones(4))["loss"], F.cross_entropy((one + two) / 2, targets, reduction="sum")
    )


def test_what_cannot_be_is_said_at_once() -> None:
    config = TrainConfig(model=ViTConfig(**SMALL), classify=ClassifyConfig(class_weights="balanced"))
    with pytest.raises(DataError, match="number of images of each class"):
        make_objective(config, net_of(), WAY)
    with pytest.raises(DataError, match=r"each of 5 classes, got counts of shape \(4,\)"):
        make_objective(config, net_of(), WAY, class_counts=np.ones(4))
    with pytest.raises(ConfigError, match="got multi-label targets; try none"):
        make_objective(config, net_of(), WAY, multi_label=True, class_counts=np.ones(5))
    with pytest.raises(ModelError, match="without a head"):
        make_objective(TrainConfig(model=ViTConfig(**SMALL)), net_of(num_classes=0), WAY)
    for targets in (torch.zeros(3).long(), torch.zeros(4), torch.zeros(4, 3)):
        with pytest.raises(ModelError, match="4 class indices or soft labels"):
            labels()(torch.zeros(4, 5), targets)
    with pytest.raises(ModelError, match=r"expected \(4, 5\) labels"):
        labels(several=True)(torch.zeros(4, 5), torch.zeros(4).long())
