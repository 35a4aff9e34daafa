"""measure(): scikit-learn's metrics, for any batch size and number of processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, average_precision_score, confusion_matrix, log_loss, top_k_accuracy_score
from torch import Tensor, nn

from vitrail.config import PreprocessConfig
from vitrail.data.batch import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.evaluation import Scores, measure

COUNT, CLASSES = 101, 7
PREPROCESS = Preprocess(PreprocessConfig(image_size=4, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)))
IMAGES = torch.randint(0, 256, (COUNT, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, CLASSES, (COUNT,), generator=torch.Generator().manual_seed(2))
MULTI_HOT = torch.rand(COUNT, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.3


class SmallNet(nn.Module):
    """Dropout, which evaluation must disable, and a linear layer."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(48, classes)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(classes, 48, generator=torch.Generator().manual_seed(0)) / 3)
            self.head.bias.copy_(torch.linspace(-0.3, 0.3, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.drop(images.flatten(1)))


def batches(
    size: int, targets: Tensor = TARGETS, *, first: int = 0, every: int = 1, padded: bool = False
) -> Iterator[Batch]:
    """Batches of every `every`-th image from `first`; `padded` fills the last batch with images of weight 0."""
    selected = torch.arange(first, COUNT, every)
    for indices in selected.split(size):
        weights = torch.ones(len(indices))
        if padded and len(indices) < size:
            fill = size - len(indices)
            indices, weights = torch.cat([indices, indices[:1].expand(fill)]), torch.cat([weights, torch.zeros(fill)])
        yield Batch(0, IMAGES[indices], targets[indices], weights, indices, indices)


def scores(size: int = 16, net: nn.Module | None = None, **options: object) -> Scores:
    values: dict = {"preprocess": PREPROCESS, "num_classes": CLASSES} | options
    targets = values.pop("targets", TARGETS)
    return measure(net or SmallNet(), batches(size, targets, padded=True), **values)


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (PREPROCESS.config.mean, PREPROCESS.config.std))
    images = (IMAGES.numpy() / 255 - mean) / std
    net = SmallNet()
    return images.reshape(COUNT, -1) @ net.head.weight.detach().double().numpy().T + net.head.bias.detach().numpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_metrics_equal_scikit_learns(logits: np.ndarray):
    got, truth, prediction = scores(), TARGETS.numpy(), logits.argmax(1)
    assert got.count == COUNT
    assert got.top1 == accuracy_score(truth, prediction)
    assert got.top5 == top_k_accuracy_score(truth, logits, k=5)
    assert got.loss == pytest.approx(log_loss(truth, softmax(logits)), rel=1e-6)
    assert np.array_equal(got.confusion, confusion_matrix(truth, prediction, labels=range(CLASSES)))


def test_samples_are_reported_in_the_order_of_the_source(logits: np.ndarray):
    got, probability = scores().samples, softmax(logits)
    indices = np.arange(COUNT)
    assert np.array_equal(got.index, indices)
    assert np.array_equal(got.truth, TARGETS.numpy())
    assert np.array_equal(got.prediction, logits.argmax(1))
    np.testing.assert_allclose(got.score, probability.max(1), rtol=1e-5)
    np.testing.assert_allclose(got.truth_score, probability[indices, TARGETS.numpy()], rtol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 101, 128])
def test_batch_size_does_not_change_the_metrics(size: int):
    expected, got = scores(16), scores(size)
    assert (got.top1, got.top5, got.low, got.high) == (expected.top1, expected.top5, expected.low, expected.high)
    assert got.loss == pytest.approx(expected.loss, rel=1e-6)  # a product's rounding depends on its shape
    assert np.array_equal(got.confusion, expected.confusion)
    assert np.array_equal(got.samples.prediction, expected.samples.prediction)


def test_batch_size_does_not_change_the_loss_in_float64():
    net = SmallNet().double()
    assert scores(7, net).loss == pytest.approx(scores(101, net).loss, rel=1e-14)


class FakeProcessGroup:
    """Collective operations of threads that stand in for processes."""

    def __init__(self, count: int) -> None:
        self.parts: list[Tensor | None] = [None] * count
        self.barrier = Barrier(count)

    def all_gather(self, rank: int, part: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.parts[rank] = part
        self.barrier.wait()
        result = combine(list(self.parts))
        self.barrier.wait()
        return result


def on_ranks(count: int, **options: object) -> list[Scores]:
    group = FakeProcessGroup(count)
    targets = options.pop("targets", TARGETS)

    def run_rank(rank: int) -> Scores:
        return measure(
            copy.deepcopy(SmallNet()),
            batches(8, targets, first=rank, every=count, padded=True),
            preprocess=PREPROCESS,
            num_classes=CLASSES,
            reduce=lambda t: group.all_gather(rank, t, lambda parts: torch.stack(parts).sum(0)),
            gather=lambda t: group.all_gather(rank, t, torch.cat),
            **options,
        )

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run_rank, range(count)))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_number_of_processes_does_not_change_the_metrics(count: int):
    expected = scores()
    for got in on_ranks(count):
        assert (got.top1, got.top5, got.count) == (expected.top1, expected.top5, expected.count)
        assert got.loss == pytest.approx(expected.loss, rel=1e-6)
        assert np.array_equal(got.confusion, expected.confusion)
        assert np.array_equal(got.samples.index, expected.samples.index)
        assert np.array_equal(got.samples.prediction, expected.samples.prediction)


def test_average_precision_does_not_depend_on_the_number_of_processes():
    targets = MULTI_HOT.float()
    expected = scores(targets=targets, multi_label=True)
    for got in on_ranks(3, targets=targets, multi_label=True):
        np.testing.assert_allclose(got.average_precisions, expected.average_precisions, rtol=1e-12)


def test_multi_label_data_on_several_processes_requires_gather():
    with pytest.raises(ConfigError, match="gather"):
        measure(SmallNet(), [], preprocess=PREPROCESS, num_classes=CLASSES, multi_label=True, reduce=lambda t: t)


def test_multi_label_metrics_equal_scikit_learns(logits: np.ndarray):
    got = scores(targets=MULTI_HOT.float(), multi_label=True)
    probability, truth = 1 / (1 + np.exp(-logits)), MULTI_HOT.numpy()
    expected = [average_precision_score(truth[:, k], probability[:, k]) for k in range(CLASSES)]
    np.testing.assert_allclose(got.average_precisions, expected, rtol=1e-6)
    assert got.mean_average_precision == pytest.approx(average_precision_score(truth, probability), rel=1e-6)
    losses = -np.where(truth, np.log(probability), np.log1p(-probability)).sum(1)
    assert got.loss == pytest.approx(losses.mean(), rel=1e-6)
    labeled = truth.any(1)
    assert not labeled.all()  # the data includes images without labels
    assert got.top1 == truth[np.arange(COUNT), logits.argmax(1)][labeled].mean()
    assert got.confusion is None


def test_sigmoid_loss_is_a_binary_loss_for_each_class(logits: np.ndarray):
    probability = 1 / (1 + np.exp(-logits))
    truth = np.eye(CLASSES, dtype=bool)[TARGETS.numpy()]
    losses = -np.where(truth, np.log(probability), np.log1p(-probability)).sum(1)
    got = scores(loss="sigmoid")
    assert got.loss == pytest.approx(losses.mean(), rel=1e-6)
    np.testing.assert_allclose(got.samples.score, probability.max(1), rtol=1e-5)


def test_unlabeled_images_are_not_counted(logits: np.ndarray):
    targets = TARGETS.clone()
    targets[::3] = -1
    known = targets.numpy() >= 0
    got = scores(targets=targets)
    assert got.count == known.sum()
    assert got.top1 == accuracy_score(TARGETS.numpy()[known], logits.argmax(1)[known])
    assert np.array_equal(got.samples.index, np.flatnonzero(known))


def test_nan_logits_are_never_correct():
    net = SmallNet()
    nn.init.constant_(net.head.bias, math.nan)
    got = scores(net=net)
    assert (got.top1, got.top5) == (0.0, 0.0)
    assert math.isnan(got.loss)


def test_zero_head_predicts_the_first_class():
    net = SmallNet()
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    got = scores(net=net)
    assert got.top1 == (TARGETS == 0).double().mean()
    assert got.top5 == pytest.approx((TARGETS < 5).double().mean())
    assert got.loss == pytest.approx(math.log(CLASSES))


def test_mode_of_every_module_is_restored():
    net = SmallNet().train()
    net.drop.eval()
    scores(net=net)
    assert net.training
    assert not net.drop.training
    assert net.head.training


def test_mode_is_restored_after_a_failure():
    net = SmallNet().train()
    with pytest.raises(ModelError, match="expected 3 outputs per image"):
        scores(net=net, num_classes=3)
    assert net.training


def test_bfloat16_is_close_and_keeps_the_weights_in_float32():
    net = SmallNet()
    got = scores(4, net, precision="bfloat16")
    assert net.head.weight.dtype == torch.float32
    expected = scores()
    assert got.loss != expected.loss
    assert got.loss == pytest.approx(expected.loss, rel=0.02)


def test_no_gradient_is_computed():
    net = SmallNet()
    scores(net=net)
    assert net.head.weight.grad is None


def test_very_many_classes_have_no_confusion_matrix():
    got = measure(SmallNet(1200), batches(50), preprocess=PREPROCESS, num_classes=1200)
    assert got.confusion is None
    assert len(got.samples) == COUNT


def test_data_without_labeled_images_is_refused():
    with pytest.raises(DataError, match="no labeled image"):
        measure(SmallNet(), [], preprocess=PREPROCESS, num_classes=CLASSES)


def test_a_process_may_have_no_images():
    group = FakeProcessGroup(2)

    def run_rank(rank: int) -> Scores:
        return measure(
            SmallNet(),
            batches(32) if rank == 0 else [],
            preprocess=PREPROCESS,
            num_classes=CLASSES,
            reduce=lambda t: group.all_gather(rank, t, lambda parts: torch.stack(parts).sum(0)),
            gather=lambda t: group.all_gather(rank, t, torch.cat),
        )

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(run_rank, range(2)))
    assert got[0].top1 == got[1].top1 == scores().top1


@pytest.mark.gpu
def test_gpu_gives_the_same_metrics():
    expected = scores()
    moved = [
        Batch(b.step, b.images.cuda(), b.targets.cuda(), b.weights.cuda(), b.slots, b.indices)
        for b in batches(16, padded=True)
    ]
    got = measure(SmallNet().cuda(), moved, preprocess=PREPROCESS, num_classes=CLASSES)
    assert (got.top1, got.top5, got.count) == (expected.top1, expected.top5, expected.count)
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    assert np.array_equal(got.confusion, expected.confusion)


def test_samples_have_a_rank_a_loss_and_the_top_5_classes(logits: np.ndarray):
    got, truth = scores().samples, TARGETS.numpy()
    indices = np.arange(COUNT)
    order = np.argsort(-logits, 1)
    assert np.array_equal(got.top_classes, order[:, :5])
    assert np.array_equal(got.rank, (order == truth[:, None]).argmax(1))
    np.testing.assert_allclose(got.loss, -np.log(softmax(logits)[indices, truth]), rtol=1e-5)


def test_ties_in_the_top_5_go_to_the_lower_class():
    net = SmallNet()
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    assert np.array_equal(scores(net=net).samples.top_classes, np.tile(np.arange(5), (COUNT, 1)))


def test_fewer_than_five_classes_give_fewer_top_classes():
    got = measure(SmallNet(3), batches(50, TARGETS.clamp(max=2)), preprocess=PREPROCESS, num_classes=3)
    assert got.samples.top_classes.shape == (COUNT, 3)
    assert np.array_equal(np.sort(got.samples.top_classes, 1), np.tile(np.arange(3), (COUNT, 1)))


def mirrored_logits() -> np.ndarray:
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (PREPROCESS.config.mean, PREPROCESS.config.std))
    images = (IMAGES.numpy()[..., ::-1] / 255 - mean) / std
    net = SmallNet()
    return images.reshape(COUNT, -1) @ net.head.weight.detach().double().numpy().T + net.head.bias.detach().numpy()


def test_flip_averages_the_probabilities(logits: np.ndarray):
    both = (softmax(logits) + softmax(mirrored_logits())) / 2
    got, truth = scores(flip=True), TARGETS.numpy()
    assert got.top1 == accuracy_score(truth, both.argmax(1))
    assert got.loss == pytest.approx(log_loss(truth, both), rel=1e-6)
    np.testing.assert_allclose(got.samples.score, both.max(1), rtol=1e-5)
    assert got.loss != pytest.approx(scores().loss, rel=1e-3)


def test_flip_averages_multi_label_probabilities(logits: np.ndarray):
    both = (1 / (1 + np.exp(-logits)) + 1 / (1 + np.exp(-mirrored_logits()))) / 2
    got = scores(targets=MULTI_HOT.float(), multi_label=True, flip=True)
    np.testing.assert_allclose(got.samples.scores, both, rtol=1e-4, atol=1e-6)


def test_on_batch_receives_the_size_of_every_batch():
    sizes: list[int] = []
    unpadded = [Batch(0, b.images, b.targets, b.weights, b.slots, b.indices) for b in batches(40)]
    measure(SmallNet(), unpadded, preprocess=PREPROCESS, num_classes=CLASSES, on_batch=sizes.append)
    assert sizes == [40, 40, 21]
