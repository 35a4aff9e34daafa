"""Evaluation on a GPU gives the same numbers as on the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from image_source import Images
from small_models import gradient, model, small

from vitrail.evaluation.features import Features, FeatureSpec, extract_features
from vitrail.evaluation.fewshot import predict_few_shot
from vitrail.evaluation.knn import BlockSizes, nearest_neighbors
from vitrail.evaluation.logistic import fit, objective, standardize

pytestmark = pytest.mark.gpu


def gaussian_clusters(count: int, width: int = 48, classes: int = 5, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    targets = torch.arange(count) % classes
    values = centers[targets] + torch.randn(count, width, generator=generator)
    return Features(values, targets, tuple("abcde"[:classes]))


@pytest.mark.parametrize("blocks", [None, BlockSizes(640, 100)])
@pytest.mark.parametrize("bank_device", ["cuda", "cpu"])
def test_neighbors_are_the_same_as_on_the_cpu(bank_device: str, blocks: BlockSizes | None):
    bank, queries = torch.randn(5000, 64), torch.randn(300, 64)
    bank[100] = bank[7]  # ties go to the lower index
    queries[0] = bank[7]
    on_cpu = nearest_neighbors(bank, queries, 20)
    on_gpu = nearest_neighbors(bank.to(bank_device), queries.cuda(), 20, blocks=blocks)
    assert on_gpu.index.device.type == "cuda"
    assert torch.equal(on_cpu.index, on_gpu.index.cpu())
    torch.testing.assert_close(on_cpu.similarity, on_gpu.similarity.cpu())


@pytest.mark.parametrize("allowed", ["older", "newer"])
def test_neighbors_are_the_same_if_tf32_is_allowed(allowed: str):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    bank, queries = torch.randn(20000, 64), torch.randn(500, 64)
    on_cpu = nearest_neighbors(bank, queries, 20)
    try:
        if allowed == "older":
            matmul.allow_tf32 = True
        else:
            matmul.fp32_precision = "tf32"
        on_gpu = nearest_neighbors(bank, queries.cuda(), 20)
        assert matmul.fp32_precision == "tf32"
    finally:
        if allowed == "older":
            matmul.allow_tf32 = False
        matmul.fp32_precision = before
    assert torch.equal(on_cpu.index, on_gpu.index.cpu())


def test_few_shot_predictions_are_the_same_as_on_the_cpu():
    train, test = gaussian_clusters(200), gaussian_clusters(100, seed=1)
    on_cpu, on_gpu = (predict_few_shot(train, test, 5, 0, device=torch.device(d)) for d in ("cpu", "cuda"))
    assert torch.equal(on_cpu, on_gpu)


def test_logistic_regression_reaches_the_same_loss_as_on_the_cpu():
    train = gaussian_clusters(400)
    losses = []
    for device, solver in (("cpu", "scikit-learn"), ("cuda", "torch")):
        classifier = fit(train, 0.1, solver=solver, device=device)
        x = standardize(train.values.to(classifier.mean), classifier.mean, classifier.std)
        losses.append(float(objective(x, train.targets.to(x.device), classifier.weights, classifier.bias, 0.1)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_features_are_the_same_as_on_the_cpu():
    vit = model(small())
    source = Images([np.asarray(gradient(30 + i)) for i in range(13)])
    on_cpu, on_gpu = (
        extract_features(
            net, source, preprocess=vit.preprocess, spec=FeatureSpec(), batch_size=4, device=torch.device(d), workers=0
        )[0]
        for d, net in (("cpu", vit.net), ("cuda", copy.deepcopy(vit.net).cuda()))
    )
    assert torch.equal(on_cpu.targets, on_gpu.targets)
    torch.testing.assert_close(on_cpu.values, on_gpu.values, rtol=1e-4, atol=1e-4)
