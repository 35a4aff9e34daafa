"""`vitrail.load` and `vitrail.create`: a network with the preprocessing and class names it goes with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from vitrail.config import Pair, PreprocessConfig, ViTConfig, pair
from vitrail.data.decode import Picture
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ModelError, NotFound
from vitrail.models import Net, ViT, build
from vitrail.models.families import FAMILIES
from vitrail.models.variants import config_for, find
from vitrail.runtime import pick_device, say
from vitrail.weights import checkpoint, hub
from vitrail.weights.card import Card, channels_for, preprocess_for
from vitrail.weights.labels import read_labels


@dataclass(frozen=True)
class Prediction:
    """One class and how sure the model is."""

    label: str
    score: float
    index: int


class Model:
    """A network that knows how its pictures are prepared and what its classes are called."""

    def __init__(self, net: Net, card: Card) -> None:
        self.net = net
        self.card = card
        self.preprocess = Preprocess(card.preprocess)

    @property
    def config(self) -> Any:
        return self.net.config

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Class names in the head's order, or None where the checkpoint does not say."""
        return self.card.labels

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    def to(self, device: str | torch.device) -> Model:
        self.net.to(device)
        return self

    @overload
    def predict(self, pictures: Picture, top: int = 5, batch: int = 32) -> list[Prediction]: ...
    @overload
    def predict(self, pictures: list[Picture], top: int = 5, batch: int = 32) -> list[list[Prediction]]: ...
    def predict(self, pictures: Any, top: int = 5, batch: int = 32) -> Any:
        """The likeliest classes of a picture, best first; a list of pictures gives a list of those."""
        if isinstance(pictures, list | tuple):
            return [p for logits in self._batches(pictures, batch) for p in self.ranked(logits, top)]
        return self.ranked(self.logits([pictures]), top)[0]

    def logits(self, pictures: Sequence[Picture]) -> Tensor:
        """Pictures, prepared, through the network: B classes."""
        return self.run(self.preprocess(list(pictures)))

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        """Images that are prepared already, B C H W -> B classes, on this model's device."""
        self._check_classes()
        return self.net(self._here(images))

    def ranked(self, logits: Tensor, top: int = 5) -> list[list[Prediction]]:
        """B classes -> for each picture its best classes."""
        scores, indices = logits.float().softmax(-1).topk(min(top, logits.shape[-1]))
        return [
            [Prediction(self.label(i), s, i) for s, i in zip(row_scores, row, strict=True)]
            for row_scores, row in zip(scores.tolist(), indices.tolist(), strict=True)
        ]

    def embed(self, pictures: Picture | list[Picture], batch: int = 32) -> Tensor:
        """Features before the head, on the CPU: B D (CLIP: in the space its texts share)."""
        several = list(pictures) if isinstance(pictures, list) else [pictures]
        name = "logits" if self.card.task == "embed" and self.config.classes else "pooled"
        parts = [self._output(several[i : i + batch], name).cpu() for i in range(0, len(several), batch)]
        return torch.cat(parts) if parts else torch.empty(0)

    def label(self, index: int) -> str:
        return self.labels[index] if self.labels is not None else f"class {index}"

    def save(
        self, path: str | Path, *, to: str = "vitrail", overwrite: bool = False, approximate: bool = False
    ) -> None:
        """Write in any format that can express this model."""
        checkpoint.write(self.net, self.card, path, to=to, overwrite=overwrite, approximate=approximate)

    def _batches(self, pictures: Sequence[Picture], batch: int) -> Iterator[Tensor]:
        for start in range(0, len(pictures), batch):
            yield self.logits(pictures[start : start + batch])

    @torch.inference_mode()
    def _output(self, pictures: Sequence[Picture], name: str) -> Tensor:
        images = self._here(self.preprocess(list(pictures)))
        result = getattr(self.net.features(images, want=(name,)), name)
        assert isinstance(result, Tensor)
        return result

    def _here(self, images: Tensor) -> Tensor:
        return images.to(self.device, next(self.net.parameters()).dtype)

    def _check_classes(self) -> None:
        if self.card.task != "classify" or not self.config.classes:
            raise ModelError(
                f"{self.card.origin or 'this model'} has no classes: it gives features. "
                "Use embed, or fine-tune it on your classes first."
            )

    def __repr__(self) -> str:
        size = "x".join(map(str, pair(self.config.image)))
        count = sum(p.numel() for p in self.net.parameters()) / 1e6
        what = f"{self.config.classes} classes" if self.card.task == "classify" else "features"
        return f"<vitrail.Model {self.card.origin or self.card.family}: {count:.1f} M parameters, {size}, {what}>"


def load(
    source: str | Path,
    *,
    image: Pair | None = None,
    channels: int | None = None,
    classes: int | None = None,
    labels: str | Path | Sequence[str] | None = None,
    family: str | None = None,
    section: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    finite: bool = True,
    **changes: Any,
) -> Model:
    """A model from a file, a folder, a model's name or a hub id, ready to use.

    It is looked for in this order: an existing file or folder; a model's name, which stands for one
    stated public checkpoint; a hub id. `image` resamples positions for another size, `channels`
    sums or repeats the first filters, `classes` puts a new head of zeros, `labels` names the classes
    ("imagenet-1k", a file, a list), `family` says what a bare file cannot (DeiT, DINO, ...), and
    further keywords override fields of the config (activation="gelu-quick").
    """
    path, said = locate(source)
    net, card = checkpoint.read(path, section=section, family=family, dtype=dtype, finite=finite, changes=changes)
    if str(path) != str(source):
        card = card.but(origin=str(source))
    net, card = _adapted(net, card.noting(*said), image, channels, classes)
    if labels is not None:
        card = card.but(labels=read_labels(labels))
    say(card.notes)
    return Model(net.to(pick_device(device)), card)


def create(name: str, *, seed: int | None = None, device: str = "cpu", **changes: Any) -> Net:
    """A fresh network by name, with the paper's first values: `create("ViT-B/16", classes=10, image=384)`."""
    net = build(config_for(name, **changes), seed)
    return net.to(pick_device(device))


def fresh(name: str, *, seed: int | None = None, **changes: Any) -> Model:
    """An untrained Model by name: `create` with the family's preprocessing."""
    net = create(name, seed=seed, **changes)
    variant = find(name)
    family = (variant.name if variant else name).split("+")[-1].split("-")[0]
    known = next(k for k in FAMILIES if k.lower() == family.lower())
    preprocess = preprocess_for(FAMILIES[known].preprocess, net.config)
    classifies = net.config.classes and known != "CLIP"
    card = Card(config=net.config, preprocess=preprocess, family=known, origin=name)
    return Model(net.eval(), card if classifies else card.but(task="embed"))


def locate(source: str | Path) -> tuple[Path, list[str]]:
    """The file or folder a source stands for, and what to say about it."""
    path = Path(source).expanduser()
    if path.exists():
        return path, []
    text = str(source)
    variant = find(text)
    if variant is not None and not variant.checkpoint:
        raise NotFound(f"{variant.name} has no public weights; vitrail.create({variant.name!r}) builds it untrained.")
    if variant is not None and text.lower() in (
        variant.name.lower(),
        *(a.lower() for a in variant.aliases if "/" not in a),
    ):
        return hub.fetch(variant.checkpoint), [f"{text} stands for {variant.checkpoint}."]
    if "/" in text and not path.suffix and not text.startswith((".", "/", "~")):
        return hub.fetch(text), []
    return path, []  # opening it says what is missing


def _adapted(net: Net, card: Card, image: Pair | None, channels: int | None, classes: int | None) -> tuple[Net, Card]:
    if image is not None and pair(image) != pair(net.config.image):
        net = net.resized(image)
        preprocess = _resized(card.preprocess, pair(image))
        card = card.but(config=net.config, preprocess=preprocess)
        if isinstance(net, ViT) and net.config.position.startswith("learned"):
            card = card.noting(f"positions were resampled to {_size(image)} as {net.config.resample} does it.")
    if channels is not None and channels != net.config.channels:
        had = net.config.channels
        net = net.with_channels(channels)
        how = f"summed over {had} channels" if channels == 1 else f"repeated from {had} to {channels} and scaled"
        card = card.but(config=net.config, preprocess=channels_for(card.preprocess, channels))
        card = card.noting(f"for {channels} channel{'s' * (channels > 1)} the first filters were {how}.")
    if classes is not None and classes != net.config.classes:
        net = net.with_classes(classes)
        card = card.but(config=net.config, labels=None, task="classify" if classes else "embed")
        card = card.noting(f"the head is new: {classes} classes, all zeros until it is trained.")
    return net, card


def _resized(preprocess: PreprocessConfig, image: tuple[int, int]) -> PreprocessConfig:
    """The same share of the picture, at another size."""
    if preprocess.resize_to is None:
        return preprocess.but(image=image)
    scale = preprocess.resize_to / min(pair(preprocess.image))
    return preprocess.but(image=image, resize_to=round(min(image) * scale))


def _size(image: Pair) -> str:
    return "x".join(map(str, pair(image)))


__all__ = ["Model", "Prediction", "ViTConfig", "create", "fresh", "load"]
