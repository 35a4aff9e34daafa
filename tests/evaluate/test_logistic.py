"""Logistic regression: both solvers at the one optimum, and C chosen as CLIP does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.errors import ConfigError, DataError
from vitrail.evaluate import logistic
from vitrail.evaluate.features import Features
from vitrail.evaluate.logistic import fit, held_out_mask, objective, search_c, standardize


def overlapping(each: int, classes: int, width: int, seed: int = 0) -> Features:
    """Classes that no line parts, on features of very different sizes."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, width))
    targets = np.repeat(np.arange(classes), each)
    values = (centers[targets] + 1.5 * rng.normal(size=(len(targets), width))) * np.logspace(-2, 2, width) + 5
    labels = tuple(f"class {i}" for i in range(classes))
    return Features(torch.from_numpy(values), torch.from_numpy(targets), labels)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("c", [1e-3, 1.0, 30.0])
def test_both_solvers_reach_the_same_optimum(classes: int, c: float):
    train, test = overlapping(40, classes, 7), overlapping(50, classes, 7, seed=1)
    one, other = (fit(train, c, solver=s) for s in ("scikit-learn", "torch"))
    losses = []
    for found in (one, other):
        x = standardize(train.values, found.mean, found.std)
        losses.append(float(objective(x, train.targets, found.weights, found.bias, c)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1] <= losses[0] + 1e-9
    assert (one.predict(test.values) == other.predict(test.values)).double().mean() > 0.99


@pytest.mark.parametrize("classes", [2, 4])
def test_the_gradient_is_zero_at_the_optimum(classes: int):
    train = overlapping(30, classes, 5)
    found = fit(train, 0.5, solver="torch")
    weights, bias = found.weights.clone().requires_grad_(), found.bias.clone().requires_grad_()
    x = standardize(train.values, found.mean, found.std)
    objective(x, train.targets, weights, bias, 0.5).backward()
    assert weights.grad is not None
    assert bias.grad is not None
    assert max(weights.grad.abs().max(), bias.grad.abs().max()) < 1e-6


def test_the_objective_is_scikit_learns_over_c_n():
    """Half the squared weights plus C times the summed loss, by hand: one feature, two images."""
    x, targets = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([1, 0])
    weights, bias = torch.tensor([[2.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    expected = np.log1p(np.exp(-2.0)) + 2.0**2 / 2 / (3.0 * 2)
    assert float(objective(x, targets, weights, bias, 3.0)) == pytest.approx(expected)


def test_classes_keep_their_numbers_where_some_do_not_occur():
    train = overlapping(20, 3, 4)
    train = Features(train.values, train.targets * 3 + 1, tuple(map(str, range(9))))
    assert set(fit(train, 1.0).predict(train.values).tolist()) <= {1, 4, 7}


def test_a_feature_that_never_changes_does_no_harm():
    train = overlapping(20, 3, 4)
    wider = Features(torch.cat([train.values, torch.full((60, 1), 3.0)], 1), train.targets, train.labels)
    assert torch.equal(fit(train, 1.0).predict(train.values), fit(wider, 1.0).predict(wider.values))


def peak_at(monkeypatch: pytest.MonkeyPatch, power: float) -> tuple[Features, list[float]]:
    """Features whose accuracies rise to one peak, at this power of ten of C, and a list of the C that are tried."""
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


def test_the_search_for_c_finds_the_best_of_all_it_could_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The nearest eighth of a decade is found."""
    some, tried = peak_at(monkeypatch, 1.3)
    seen: list[int] = []
    c = search_c(some, some, advance=seen.append)
    assert np.log10(c) == pytest.approx(1.25)
    assert not logistic.is_at_range_edge(c)
    assert len(tried) <= logistic.SEARCH_FITS == sum(seen)
    assert sorted(np.log10(tried[:7])) == pytest.approx([-6, -4, -2, 0, 2, 4, 6])
    assert "edge" not in caplog.text


@pytest.mark.parametrize(("power", "edge"), [(-8.0, 1e-6), (8.0, 1e6)])
def test_a_best_c_at_the_edge_of_its_range_is_noted(
    power: float, edge: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("vitrail.runtime._logged", set())
    some, _ = peak_at(monkeypatch, power)
    c = search_c(some, some)
    assert c == pytest.approx(edge)
    assert logistic.is_at_range_edge(c)
    assert f"the best C, {edge:g}, is at the edge of the searched range, 1e-06 to 1e+06" in caplog.text


def test_few_noisy_images_want_a_small_c():
    rng = torch.Generator().manual_seed(0)
    values, targets = torch.randn(60, 40, generator=rng), torch.arange(60) % 2
    values[:, 0] += targets * 2.0
    assert search_c(Features(values, targets, ("a", "b"))) < 1.0


def test_what_is_held_out_is_a_fifth_of_each_class_and_leaves_one():
    targets = torch.tensor([0] * 50 + [1] * 10 + [2] * 2)
    aside = held_out_mask(targets)
    assert torch.bincount(targets[aside], minlength=3).tolist() == [10, 2, 1]
    assert held_out_mask(torch.tensor([0, 0, 1])).tolist().count(True) == 1
    assert torch.equal(aside, held_out_mask(targets))


def test_many_features_go_to_torch(monkeypatch: pytest.MonkeyPatch):
    train = overlapping(10, 2, 3)
    assert fit(train, 1.0).solver == "scikit-learn"
    monkeypatch.setattr(logistic, "MAX_SKLEARN_VALUES", 10)
    assert fit(train, 1.0).solver == "torch"


def test_one_class_is_one_sentence():
    train = overlapping(10, 1, 3)
    with pytest.raises(DataError, match="expected at least two classes"):
        fit(train, 1.0)


def test_one_image_of_each_class_leaves_c_at_one_and_says_so(caplog: pytest.LogCaptureFixture):
    seen: list[int] = []
    assert search_c(overlapping(1, 3, 4), advance=seen.append) == 1.0
    assert "none can be held out to select C: C is 1" in caplog.text
    assert sum(seen) == logistic.SEARCH_FITS


def test_c_is_above_zero():
    with pytest.raises(ConfigError, match="C=0: expected a number above 0"):
        fit(overlapping(10, 2, 3), 0.0)
