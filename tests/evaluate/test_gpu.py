"""Measuring on a GPU: the same numbers as on the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from image_source import Images
from small_models import gradient, model, small

from vitrail.evaluate.features import Features, FeatureSpec, extract_features
from vitrail.evaluate.fewshot import predict_few_shot
from vitrail.evaluate.knn import BlockSizes, nearest_neighbors
from vitrail.evaluate.logistic import fit, objective, standardize

pytestmark = pytest.mark.gpu


def blobs(count: int, width: int = 48, classes: int = 5, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    targets = torch.arange(count) % classes
    values = centers[targets] + torch.randn(count, width, generator=generator)
    return Features(values, targets, tuple("abcde"[:classes]))


@pytest.mark.parametrize("blocks", [None, BlockSizes(640, 100)])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_the_same_neighbors(where: str, blocks: BlockSizes | None):
    bank, queries = torch.randn(5000, 64), torch.randn(300, 64)
    bank[100] = bank[7]  # of equals the lower number
    queries[0] = bank[7]
    here = nearest_neighbors(bank, queries, 20)
    there = nearest_neighbors(bank.to(where), queries.cuda(), 20, blocks=blocks)
    assert there.index.device.type == "cuda"
    assert torch.equal(here.index, there.index.cpu())
    torch.testing.assert_close(here.similarity, there.similarity.cpu())


@pytest.mark.parametrize("allowed", ["older", "newer"])
def test_the_same_neighbors_where_tf32_is_allowed(allowed: str):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    bank, queries = torch.randn(20000, 64), torch.randn(500, 64)
    here = nearest_neighbors(bank, queries, 20)
    try:
        if allowed == "older":
            matmul.allow_tf32 = True
        else:
            matmul.fp32_precision = "tf32"
        there = nearest_neighbors(bank, queries.cuda(), 20)
        assert matmul.fp32_precision == "tf32"
    finally:
        if allowed == "older":
            matmul.allow_tf32 = False
        matmul.fp32_precision = before
    assert torch.equal(here.index, there.index.cpu())


def test_the_same_few_shots():
    train, test = blobs(200), blobs(100, seed=1)
    here, there = (predict_few_shot(train, test, 5, 0, device=torch.device(d)) for d in ("cpu", "cuda"))
    assert torch.equal(here, there)


def test_the_same_optimum_of_logistic_regression():
    train = blobs(400)
    losses = []
    for device, solver in (("cpu", "scikit-learn"), ("cuda", "torch")):
        found = fit(train, 0.1, solver=solver, device=device)
        x = standardize(train.values.to(found.mean), found.mean, found.deviation)
        losses.append(float(objective(x, train.targets.to(x.device), found.weights, found.bias, 0.1)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_same_features():
    vit = model(small())
    source = Images([np.asarray(gradient(30 + i)) for i in range(13)])
    here, there = (
        extract_features(
            net, source, preprocess=vit.preprocess, spec=FeatureSpec(), batch_size=4, device=torch.device(d), workers=0
        )[0]
        for d, net in (("cpu", vit.net), ("cuda", copy.deepcopy(vit.net).cuda()))
    )
    assert torch.equal(here.targets, there.targets)
    torch.testing.assert_close(here.values, there.values, rtol=1e-4, atol=1e-4)
