"""Logistic regression: both solvers reach the same optimum, and C is searched as in CLIP."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import logistic
from vitrail.evaluation.features import Features
from vitrail.evaluation.logistic import fit, held_out_mask, objective, search_c, standardize


def overlapping_classes(per_class: int, classes: int, width: int, seed: int = 0) -> Features:
    """Classes that are not linearly separable, with features of very different scales."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, width))
    targets = np.repeat(np.arange(classes), per_class)
    values = (centers[targets] + 1.5 * rng.normal(size=(len(targets), width))) * np.logspace(-2, 2, width) + 5
    labels = tuple(f"class {i}" for i in range(classes))
    return Features(torch.from_numpy(values), torch.from_numpy(targets), labels)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("c", [1e-3, 1.0, 30.0])
def test_both_solvers_reach_the_same_optimum(classes: int, c: float):
    train, test = overlapping_classes(40, classes, 7), overlapping_classes(50, classes, 7, seed=1)
    sklearn_fit, torch_fit = (fit(train, c, solver=s) for s in ("scikit-learn", "torch"))
    losses = []
    for classifier in (sklearn_fit, torch_fit):
        x = standardize(train.values, classifier.mean, classifier.std)
        losses.append(float(objective(x, train.targets, classifier.weights, classifier.bias, c)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1] <= losses[0] + 1e-9
    assert (sklearn_fit.predict(test.values) == torch_fit.predict(test.values)).double().mean() > 0.99


@pytest.mark.parametrize("classes", [2, 4])
def test_the_gradient_is_zero_at_the_optimum(classes: int):
    train = overlapping_classes(30, classes, 5)
    classifier = fit(train, 0.5, solver="torch")
    weights, bias = classifier.weights.clone().requires_grad_(), classifier.bias.clone().requires_grad_()
    x = standardize(train.values, classifier.mean, classifier.std)
    objective(x, train.targets, weights, bias, 0.5).backward()
    assert weights.grad is not None
    assert bias.grad is not None
    assert max(weights.grad.abs().max(), bias.grad.abs().max()) < 1e-6


def test_objective_is_scikit_learns_divided_by_c_n():
    """Half the squared weights plus C times the summed loss, by hand: one feature, two images."""
    x, targets = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([1, 0])
    weights, bias = torch.tensor([[2.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    expected = np.log1p(np.exp(-2.0)) + 2.0**2 / 2 / (3.0 * 2)
    assert float(objective(x, targets, weights, bias, 3.0)) == pytest.approx(expected)


def test_class_indices_are_kept_if_some_classes_are_missing():
    train = overlapping_classes(20, 3, 4)
    train = Features(train.values, train.targets * 3 + 1, tuple(map(str, range(9))))
    assert set(fit(train, 1.0).predict(train.values).tolist()) <= {1, 4, 7}


def test_constant_feature_does_not_change_predictions():
    train = overlapping_classes(20, 3, 4)
    wider = Features(torch.cat([train.values, torch.full((60, 1), 3.0)], 1), train.targets, train.labels)
    assert torch.equal(fit(train, 1.0).predict(train.values), fit(wider, 1.0).predict(wider.values))


def peak_at(monkeypatch: pytest.MonkeyPatch, power: float) -> tuple[Features, list[float]]:
    """Replace `fit` so that accuracy peaks at C = 10**power; returns features and the list of tried values of C."""
    tried: list[float] = []

    class Fake:
        def __init__(self, c: float) -> None:
            self.right = round(2000 - 100 * abs(np.log10(c) - power))

        def predict(self, values: torch.Tensor) -> torch.Tensor:
            return (torch.arange(len(values)) >= self.right).long()  # class 0 is right

    def fake(train: Features, c: float, **options: object) -> Fake:
        tried.append(c)
        return Fake(c)

    monkeypatch.setattr(logistic, "fit", fake)
    return Features(torch.zeros(2000, 1), torch.zeros(2000, dtype=torch.int64), ("a", "b")), tried


def test_search_finds_the_best_c(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """The result is the nearest eighth of a decade."""
    train, tried = peak_at(monkeypatch, 1.3)
    counts: list[int] = []
    c = search_c(train, train, advance=counts.append)
    assert np.log10(c) == pytest.approx(1.25)
    assert not logistic.is_at_range_edge(c)
    assert len(tried) <= logistic.SEARCH_FITS == sum(counts)
    assert sorted(np.log10(tried[:7])) == pytest.approx([-6, -4, -2, 0, 2, 4, 6])
    assert "edge" not in caplog.text


@pytest.mark.parametrize(("power", "edge"), [(-8.0, 1e-6), (8.0, 1e6)])
def test_a_best_c_at_the_edge_of_its_range_is_noted(
    power: float, edge: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("vitrail.runtime.notes._logged", set())
    train, _ = peak_at(monkeypatch, power)
    c = search_c(train, train)
    assert c == pytest.approx(edge)
    assert logistic.is_at_range_edge(c)
    assert f"the best C, {edge:g}, is at the edge of the searched range, 1e-06 to 1e+06" in caplog.text


def test_search_selects_a_small_c_for_few_noisy_images():
    rng = torch.Generator().manual_seed(0)
    values, targets = torch.randn(60, 40, generator=rng), torch.arange(60) % 2
    values[:, 0] += targets * 2.0
    assert search_c(Features(values, targets, ("a", "b"))) < 1.0


def test_a_fifth_of_each_class_is_held_out_and_at_least_one_is_left():
    targets = torch.tensor([0] * 50 + [1] * 10 + [2] * 2)
    held_out = held_out_mask(targets)
    assert torch.bincount(targets[held_out], minlength=3).tolist() == [10, 2, 1]
    assert held_out_mask(torch.tensor([0, 0, 1])).tolist().count(True) == 1
    assert torch.equal(held_out, held_out_mask(targets))


def test_large_inputs_use_the_torch_solver(monkeypatch: pytest.MonkeyPatch):
    train = overlapping_classes(10, 2, 3)
    assert fit(train, 1.0).solver == "scikit-learn"
    monkeypatch.setattr(logistic, "MAX_SKLEARN_VALUES", 10)
    assert fit(train, 1.0).solver == "torch"


def test_a_single_class_is_refused():
    train = overlapping_classes(10, 1, 3)
    with pytest.raises(DataError, match="expected at least two classes"):
        fit(train, 1.0)


def test_search_with_one_image_per_class_gives_c_1_with_a_note(caplog: pytest.LogCaptureFixture):
    counts: list[int] = []
    assert search_c(overlapping_classes(1, 3, 4), advance=counts.append) == 1.0
    assert "none can be held out to select C: C is 1" in caplog.text
    assert sum(counts) == logistic.SEARCH_FITS


def test_c_must_be_positive():
    with pytest.raises(ConfigError, match="C=0: expected a number above 0"):
        fit(overlapping_classes(10, 2, 3), 0.0)
