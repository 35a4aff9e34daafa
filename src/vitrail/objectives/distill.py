"""Knowledge distillation: training on a teacher's outputs as well as on labels (DeiT, arXiv 2012.12877)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import PreprocessConfig, pair
from vitrail.config.train import DistillConfig
from vitrail.errors import ConfigError
from vitrail.models import Net, ViT
from vitrail.objectives.base import Objective, Sums, at_least_float32, weighted_sums
from vitrail.objectives.classify import LabelLoss
from vitrail.runtime import warn_once
from vitrail.weights import checkpoint
from vitrail.weights.locate import locate
from vitrail.weights.model_info import ModelInfo

# b images, C channels, K classes


class Teacher:
    """A frozen model that is applied to the student's images with its own preprocessing.

    Images are renormalized and resized (bilinear, antialiased) to the teacher's image size; mixed images
    stay mixed, as in DeiT. Not an `nn.Module`: it is not trained, saved, averaged or sharded with the
    student, and copies of the student share it.
    """

    def __init__(
        self,
        net: Net,
        info: ModelInfo,
        student: PreprocessConfig,
        *,
        order: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.net = net.to(device, dtype).eval().requires_grad_(False)
        self.size, self.channels = pair(info.preprocess.image_size), info.preprocess.channels
        own = [torch.tensor(values, dtype=torch.float64)[:, None, None] for values in _affine(student, info.preprocess)]
        self.same = bool((own[0] == 1).all() and (own[1] == 0).all())
        self.scale, self.shift = (values.to(device, dtype) for values in own)
        self.order = None if order is None else torch.tensor(order, device=device)

    def __call__(self, images: Tensor) -> Tensor:
        """The student's input, b C H W -> the teacher's logits, b K."""
        with torch.no_grad():
            images = images.to(self.scale.dtype)
            if images.shape[1] != self.channels:
                images = images.expand(-1, self.channels, -1, -1)
            if tuple(images.shape[-2:]) != self.size:
                images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
            if not self.same:
                images = images * self.scale + self.shift
            logits = self.net(images)
            return logits if self.order is None else logits[:, self.order]

    @property
    def checksum(self) -> str:
        """CRC-32 of the weights."""
        crc = 0
        for tensor in self.net.state_dict().values():
            crc = zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy(), crc)
        return f"{crc:08x}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Teacher:
        return self


class DistillObjective(Objective):
    """Distillation loss: (1 - alpha) * label loss + alpha * teacher loss.

    A distilled model has two heads: one is trained on the labels, the other on the teacher. A plain model's
    head is trained on both. Teacher loss: hard, cross-entropy with the teacher's top-1 class; soft, the
    Kullback-Leibler divergence from the teacher's probabilities at temperature T, times T * T / K as in
    DeiT's code. Balanced class weights apply to the labels in the label loss and to the teacher's classes in
    the teacher loss. Additional sums: "teacher_loss"; "agreed", images with the same top-1 class in both.
    """

    def __init__(self, net: Net, labels: LabelLoss, teacher: Teacher, config: DistillConfig) -> None:
        super().__init__(net)
        self.labels, self.teacher, self.config = labels, teacher, config
        self.two_heads = isinstance(net, ViT) and net.config.distilled

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None = None) -> Sums:
        teacher_logits = self.teacher(images)
        if self.two_heads:
            heads = self.net.features(images, outputs="head_logits", sample_seeds=sample_seeds).head_logits
            assert heads is not None
            first, second = heads
            logits = (first + second) / 2
        else:
            logits = first = second = self.net(images, sample_seeds)
        teacher_loss = distillation_loss(second, teacher_logits, self.config, self.labels.class_weights)
        share = self.config.alpha
        loss = (1 - share) * self.labels(first, targets) + share * teacher_loss
        agreed = (second.argmax(-1) == teacher_logits.argmax(-1)).to(torch.float32)
        correct = self.labels.correct(logits, targets)
        return weighted_sums(
            {"loss": loss, "correct": correct, "teacher_loss": teacher_loss, "agreed": agreed}, weights
        )


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, config: DistillConfig, class_weights: Tensor | None = None
) -> Tensor:
    """Logits b K, teacher's logits b K, class weights K -> b. The weights apply before the temperature."""
    logits, teacher_logits = at_least_float32(logits), at_least_float32(teacher_logits)
    weights = None if class_weights is None else class_weights.to(logits.dtype)
    if config.kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(-1), weights, reduction="none")
    t = config.temperature
    scale: Tensor | float = t * t / logits.shape[-1]
    if weights is not None:
        scale = scale * (teacher_logits.softmax(-1) * weights).sum(-1)  # b: the image's weight
        teacher_logits = teacher_logits + weights.log()
    ours, theirs = (logits / t).log_softmax(-1), (teacher_logits / t).log_softmax(-1)
    terms = theirs.exp() * (theirs.clamp(min=torch.finfo(theirs.dtype).min) - ours)  # 0, not NaN, for a weight of 0
    return terms.sum(-1) * scale


def load_teacher(
    config: DistillConfig,
    num_classes: int,
    preprocess: PreprocessConfig,
    *,
    labels: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Teacher:
    """Load the config's teacher and check its classes and channels against the student's."""
    if config.teacher is None:
        raise ConfigError("objective=distill needs distill.teacher: a checkpoint, a model's name or a hub id.")
    found = locate(config.teacher)
    net, info = checkpoint.read(found.path)
    warn_once([*info.notes, *found.notes], about=found.origin or found.path.name)
    if info.task != "classify" or net.config.num_classes != num_classes:
        count = net.config.num_classes if info.task == "classify" else 0
        raise ConfigError(
            f"the teacher {config.teacher} has {count} classes, but the data has {num_classes}. Fine-tune the teacher "
            f"first: vitrail finetune --model {config.teacher} --data DATA."
        )
    if info.preprocess.channels != preprocess.channels and preprocess.channels != 1:
        raise ConfigError(
            f"the teacher {config.teacher} has {info.preprocess.channels} input channels, but the student has "
            f"{preprocess.channels}; try a teacher with {preprocess.channels}."
        )
    order = _order(info.labels, labels, config.teacher)
    return Teacher(net, info, preprocess, order=order, device=device, dtype=dtype)


def _order(theirs: Sequence[str] | None, ours: Sequence[str] | None, teacher: str) -> list[int] | None:
    """Index of each of our classes in the teacher's; None if the order is the same or class names are missing."""
    if theirs is None or ours is None or list(theirs) == list(ours):
        return None
    if sorted(theirs) == sorted(ours) and len(set(ours)) == len(ours):
        warn_once(["the teacher's classes are in a different order; its outputs are reordered"], about=teacher)
        return [list(theirs).index(name) for name in ours]
    i = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
    raise ConfigError(
        f"class {i} is {theirs[i]!r} in the teacher {teacher} and {ours[i]!r} in the data; they must have the same "
        "classes. If only the names differ, set data.class_names."
    )


def _affine(student: PreprocessConfig, teacher: PreprocessConfig) -> tuple[list[float], list[float]]:
    """Scale and shift, per channel, from the student's normalized values to the teacher's."""
    count = teacher.channels
    mean, std = (values * count if len(values) == 1 else values for values in (student.mean, student.std))
    scale = [s / t for s, t in zip(std, teacher.std, strict=True)]
    shift = [(m - t) / s for m, t, s in zip(mean, teacher.mean, teacher.std, strict=True)]
    return scale, shift
