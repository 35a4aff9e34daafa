"""Top-1, top-5, loss and per-image results; exact for any batch size and any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.evaluation.scores import MAX_CONFUSION_CLASSES, SampleResults, Scores, average_precision, wilson_interval
from vitrail.models.base import eval_mode
from vitrail.runtime import autocast

# b images in a batch, N images in this process or in all processes, K classes

Collective = Callable[[Tensor], Tensor]
"""A collective operation: a tensor of this process -> the sum, or the concatenated rows, over all processes."""
TOP_K = 5
"""Number of highest-scoring classes that are kept for each image."""


def measure(
    net: nn.Module,
    batches: Iterable[Batch],
    *,
    preprocess: Preprocess,
    num_classes: int,
    multi_label: bool = False,
    precision: str = "float32",
    loss: Literal["softmax", "sigmoid"] = "softmax",
    reduce: Collective | None = None,
    gather: Collective | None = None,
    flip: bool = False,
    on_batch: Callable[[int], None] | None = None,
) -> Scores:
    """Evaluate a network on every image once. Images with weight 0 or without a label are excluded.

    flip: average the probabilities of each image and its mirror image. `on_batch(n)` is called after each
    batch of n images.

    With several processes, each passes its own batches; `reduce` sums a tensor over the processes and `gather`
    concatenates its rows. Without `gather`, `samples` holds the images of this process only. Multi-label data
    needs `gather`, because average precision cannot be computed from partial sums.
    """
    if multi_label and reduce is not None and gather is None:
        raise ConfigError("multi-label data on several processes needs gather: average precision has no partial sums.")
    own = _Accumulator(multi_label, loss if not multi_label else "sigmoid")
    with eval_mode(net), torch.no_grad():
        dtype = next((p.dtype for p in net.parameters()), torch.float32)
        for batch in batches:
            images = preprocess.normalize(batch.images).to(dtype)
            with autocast(precision, images.device):
                logits = net(images)
                mirrored = net(images.flip(-1)) if flip else None
            if logits.ndim != 2 or logits.shape[1] != num_classes:
                raise ModelError(f"expected {num_classes} outputs per image, got {tuple(logits.shape[1:])}.")
            own.add(
                _to_float64(logits) if mirrored is None else average_probabilities(logits, mirrored, own.loss), batch
            )
            if on_batch is not None:
                on_batch(int((batch.indices >= 0).sum()))
    return _combine_processes(own.joined(num_classes), num_classes, multi_label, reduce, gather)


def _to_float64(logits: Tensor) -> Tensor:
    """Convert to float64, or to float32 on MPS, which has no float64."""
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


def average_probabilities(one: Tensor, other: Tensor, loss: str) -> Tensor:
    """Two sets of logits, b K -> logits of their averaged probabilities, computed in log space to avoid underflow."""
    one, other = _to_float64(one), _to_float64(other)
    if loss == "softmax":
        return torch.logaddexp(one.log_softmax(1), other.log_softmax(1)) - math.log(2)
    yes = torch.logaddexp(F.logsigmoid(one), F.logsigmoid(other))
    return yes - torch.logaddexp(F.logsigmoid(-one), F.logsigmoid(-other))


class _Accumulator:
    """Collects per-image results of the batches on their device, without synchronizing with the GPU."""

    NAMES = ("index", "truth", "prediction", "rank", "score", "truth_score", "loss", "top_classes", "counts")

    def __init__(self, multi_label: bool, loss: str) -> None:
        self.multi_label, self.loss = multi_label, loss
        self.columns: dict[str, list[Tensor]] = {
            name: [] for name in (*self.NAMES, *(["scores"] if multi_label else []))
        }

    def add(self, logits: Tensor, batch: Batch) -> None:
        targets = batch.targets.to(logits.device)
        positive = targets > 0.5 if self.multi_label else F.one_hot(targets.clamp(min=0), logits.shape[1]).bool()  # b K
        if self.loss == "sigmoid":
            losses = F.binary_cross_entropy_with_logits(logits, positive.to(logits), reduction="none").sum(1)
            scores = logits.sigmoid()
        else:
            losses = F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
            scores = logits.softmax(1)
        counts = batch.weights.to(logits.device) > 0
        if not self.multi_label:
            counts = counts & (targets >= 0)
        top_classes = _top_classes(logits)
        prediction = top_classes[:, 0]
        row = {
            "index": batch.indices,
            "truth": positive if self.multi_label else targets,
            "prediction": prediction,
            "rank": _rank(logits, positive),
            "score": scores.gather(1, prediction[:, None])[:, 0].float(),
            "truth_score": _truth_score(scores, positive).float(),
            "loss": losses,
            "top_classes": top_classes,
            "counts": counts,
        }
        if self.multi_label:
            row["scores"] = scores.float().cpu()  # N K may not fit on the device
        for name, value in row.items():
            self.columns[name].append(value)

    def joined(self, num_classes: int) -> dict[str, Tensor]:
        """The concatenated columns on the CPU, without excluded images."""
        if not self.columns["index"]:  # a process may have no images
            return _empty_columns(num_classes, self.multi_label)
        whole = {name: torch.cat(parts).cpu() for name, parts in self.columns.items()}
        counts = whole.pop("counts")
        return {name: value[counts] for name, value in whole.items()}


def _top_classes(logits: Tensor) -> Tensor:
    """b 5: the highest-scoring classes, best first. Ties go to the lower class index, unlike in torch.topk."""
    found = [logits.argmax(1)]
    rest = logits.clone()
    for _ in range(1, min(TOP_K, logits.shape[1])):
        rest.scatter_(1, found[-1][:, None], -math.inf)
        found.append(rest.argmax(1))
    return torch.stack(found, 1)


def _rank(logits: Tensor, positive: Tensor) -> Tensor:
    """b: number of classes ranked before the first correct one. Ties go to the lower class index.

    If no class can be correct (no label, or NaN in the logits), the rank is K + 5.
    """
    num_classes = logits.shape[1]
    best = logits.masked_fill(~positive, -math.inf).argmax(1, keepdim=True)  # the highest-scoring correct class
    value = logits.gather(1, best)
    classes = torch.arange(num_classes, device=logits.device)
    rank = ((logits > value) | ((logits == value) & (classes < best))).sum(1)
    return rank.masked_fill(~positive.any(1) | logits.isnan().any(1), num_classes + 5)


def _truth_score(scores: Tensor, positive: Tensor) -> Tensor:
    lowest = scores.masked_fill(~positive, math.inf).amin(1)
    return lowest.masked_fill(~positive.any(1), math.nan)


def _empty_columns(num_classes: int, multi_label: bool) -> dict[str, Tensor]:
    ints, floats = torch.empty(0, dtype=torch.int64), torch.empty(0)
    row = dict.fromkeys(("index", "truth", "prediction", "rank"), ints)
    row |= {"score": floats, "truth_score": floats, "loss": floats.double()}
    row["top_classes"] = torch.empty(0, min(TOP_K, num_classes), dtype=torch.int64)
    if multi_label:
        row |= {"truth": torch.empty(0, num_classes, dtype=torch.bool), "scores": torch.empty(0, num_classes)}
    return row


def _combine_processes(
    own: dict[str, Tensor], num_classes: int, multi_label: bool, reduce: Collective | None, gather: Collective | None
) -> Scores:
    """Scores over the images of all processes, from the columns of this process."""
    labeled = own["truth"].any(1) if multi_label else torch.ones(len(own["index"]), dtype=torch.bool)
    rank = own["rank"]
    # fsum rounds once, at the end, so the result does not depend on the order or size of the batches.
    total = math.fsum(own["loss"].double().tolist()) if own["loss"].isfinite().all() else math.nan
    sums = torch.tensor([len(rank), total, labeled.sum(), (rank < 1).sum(), (rank < 5).sum()], dtype=torch.float64)
    confusion = (
        _confusion(own["truth"], own["prediction"], num_classes)
        if not multi_label and num_classes <= MAX_CONFUSION_CLASSES
        else None
    )
    if reduce is not None:
        sums = reduce(sums)
        confusion = None if confusion is None else reduce(confusion)
    if gather is not None:
        own = {name: gather(value) for name, value in own.items()}
    samples = _samples(own, multi_label)
    count, total, num_labeled, num_top1, num_top5 = sums.tolist()
    if count == 0:
        raise DataError("there are no labeled images to evaluate; check the data and its labels.")
    low, high = wilson_interval(num_top1, num_labeled)
    return Scores(
        top1=num_top1 / num_labeled if num_labeled else math.nan,
        top5=num_top5 / num_labeled if num_labeled else math.nan,
        loss=total / count,
        count=int(count),
        low=low,
        high=high,
        confusion=None if confusion is None else confusion.cpu().numpy(),
        average_precisions=_precisions(samples) if multi_label else None,
        samples=samples,
    )


def _confusion(truth: Tensor, prediction: Tensor, num_classes: int) -> Tensor:
    """K K: rows are true classes, columns are predictions."""
    return torch.bincount(truth * num_classes + prediction, minlength=num_classes**2).view(num_classes, num_classes)


def _samples(rows: dict[str, Tensor], multi_label: bool) -> SampleResults:
    order = np.argsort(rows["index"].numpy(), kind="stable")

    def sorted_(name: str) -> npt.NDArray[np.generic]:
        return rows[name].numpy()[order]

    columns = ("index", "truth", "prediction", "score", "truth_score", "rank", "loss", "top_classes")
    names = (*columns, *(["scores"] if multi_label else []))
    return SampleResults(**{name: sorted_(name) for name in names})  # type: ignore[arg-type]


def _precisions(samples: SampleResults) -> npt.NDArray[np.float64]:
    assert samples.scores is not None
    columns = zip(samples.truth.T, samples.scores.T, strict=True)
    return np.array([average_precision(truth, score) for truth, score in columns])
