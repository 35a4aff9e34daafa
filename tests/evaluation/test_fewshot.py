"""The few-shot probe against two direct solutions and a hand calculation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import fewshot
from vitrail.evaluation.features import Features
from vitrail.evaluation.fewshot import decompose, pick_shots, predict_few_shot

CPU = torch.device("cpu")


def gaussian_clusters(per_class: int, classes: int, width: int, seed: int = 0, spread: float = 1.0) -> Features:
    """Gaussian clusters, one for each class."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, width)) * 3
    targets = np.repeat(np.arange(classes), per_class)
    values = centers[targets] + spread * rng.normal(size=(len(targets), width))
    return Features(torch.from_numpy(values), torch.from_numpy(targets), tuple(f"class {i}" for i in range(classes)))


def reference_scores(train: Features, test: Features, dual: bool, ridge: float = 1024.0) -> np.ndarray:
    """Scores from the regularized normal equations, solved directly: Q K."""
    x, z, y = train.values.double().numpy(), test.values.double().numpy(), train.targets.numpy()
    mean, std = x.mean(0), x.std(0) + 1e-5
    x, z = ((a - mean) / std for a in (x, z))
    x, z = (np.hstack([a, np.full((len(a), 1), 100.0)]) for a in (x, z))
    signed_targets = np.where(y[:, None] == np.arange(len(train.labels)), 1.0, -1.0)
    if dual:
        weights = x.T @ np.linalg.solve(x @ x.T + ridge * np.eye(len(x)), signed_targets)
    else:
        weights = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ signed_targets)
    return z @ weights


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize(("per_class", "width"), [(3, 40), (30, 8)], ids=["wide", "tall"])
def test_scores_match_a_direct_solution(per_class: int, width: int, dual: bool):
    train, test = gaussian_clusters(per_class, 4, width), gaussian_clusters(11, 4, width, seed=1)
    fit = decompose(train.values, train.targets, 4).solve()
    assert fit.scores(test.values).numpy() == pytest.approx(reference_scores(train, test, dual), abs=1e-9)


@given(st.floats(-8, 20))
@settings(max_examples=20)
def test_one_decomposition_is_valid_for_every_ridge(power: float):
    train, test = gaussian_clusters(5, 3, 12), gaussian_clusters(4, 3, 12, seed=1)
    fit = decompose(train.values, train.targets, 3).solve(2.0**power)
    assert fit.scores(test.values).numpy() == pytest.approx(reference_scores(train, test, True, 2.0**power), abs=1e-6)


def test_two_points_match_the_hand_calculation():
    """Features -1 and 1 are already standardized. X is (-1, 100), (1, 100), y is +-1: w = 2 / (2 + 1024), b = 0."""
    fit = decompose(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1]), 2).solve()
    weight = 2 / (1 + 1e-5) / (2 / (1 + 1e-5) ** 2 + 1024)
    assert fit.weights.numpy() == pytest.approx(np.array([[-weight, weight], [0, 0]]), abs=1e-12)


@given(st.floats(0.1, 50), st.floats(-100, 100), st.integers(0, 20))
@settings(max_examples=30)
def test_scaling_and_shifting_features_does_not_change_predictions(scale: float, shift: float, seed: int):
    train, test = gaussian_clusters(6, 3, 10, seed), gaussian_clusters(8, 3, 10, seed + 1)

    def transformed(f: Features) -> Features:
        return Features(f.values * scale + shift, f.targets, f.labels)

    expected = predict_few_shot(train, test, 5, 0, device=CPU)
    assert torch.equal(expected, predict_few_shot(transformed(train), transformed(test), 5, 0, device=CPU))


def test_one_shot_suffices_for_well_separated_classes():
    train, test = gaussian_clusters(5, 6, 30, spread=0.1), gaussian_clusters(20, 6, 30, seed=1, spread=0.1)
    assert torch.equal(predict_few_shot(train, test, 1, 0, device=CPU), test.targets)


def test_constant_feature_does_not_change_predictions():
    train, test = gaussian_clusters(6, 3, 10), gaussian_clusters(8, 3, 10, seed=1)
    wider = [
        Features(torch.cat([f.values, torch.full((len(f), 1), 7.0)], 1), f.targets, f.labels) for f in (train, test)
    ]
    assert torch.equal(predict_few_shot(train, test, 5, 0, device=CPU), predict_few_shot(*wider, 5, 0, device=CPU))


@given(st.lists(st.integers(0, 3), min_size=40, max_size=80), st.integers(0, 5))
@settings(max_examples=40)
def test_shots_are_balanced_and_nested(targets: list[int], seed: int):
    all_targets = torch.tensor(targets + [0, 1, 2, 3] * 5)
    few, many = pick_shots(all_targets, 2, 4, seed), pick_shots(all_targets, 5, 4, seed)
    assert torch.bincount(all_targets[many]).tolist() == [5] * 4
    assert set(few.tolist()) <= set(many.tolist())
    assert torch.equal(many, pick_shots(all_targets, 5, 4, seed))


def test_a_classs_shots_do_not_depend_on_other_classes():
    targets = torch.tensor([0, 1, 0, 1, 0, 1, 2, 2, 0, 1])
    both = pick_shots(targets, 2, 3, seed=4)
    fewer = pick_shots(targets.masked_fill(targets == 2, 1), 2, 3, seed=4)
    assert both[:2].tolist() == fewer[:2].tolist()


def test_another_seed_picks_other_shots():
    targets = torch.zeros(1000, dtype=torch.int64)
    assert set(pick_shots(targets, 5, 1, 0).tolist()) != set(pick_shots(targets, 5, 1, 1).tolist())


def test_too_few_images_of_a_class_are_refused():
    train = gaussian_clusters(4, 3, 6)
    train = train.subset(torch.arange(len(train) - 2))
    with pytest.raises(
        DataError, match="5 shots need 5 images of each class, and 'class 2' has 2 images \\(features\\); try --shots 2"
    ):
        predict_few_shot(train, train, 5, 0, device=CPU)


def test_a_single_class_is_refused():
    train = gaussian_clusters(9, 1, 6)
    with pytest.raises(DataError, match="all 9 images are 'class 0' \\(features\\); expected at least two classes"):
        predict_few_shot(train, train, 5, 0, device=CPU)


def test_zero_shots_are_refused():
    with pytest.raises(ConfigError, match="shots=0"):
        predict_few_shot(gaussian_clusters(4, 2, 3), gaussian_clusters(4, 2, 3), 0, 0, device=CPU)


def test_default_shots_are_the_papers():
    assert fewshot.SHOTS == (1, 5, 10, 25)
