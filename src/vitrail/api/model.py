"""`vitrail.load` and `vitrail.create`: a network with the preprocessing and class names it goes with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitrail.config import BiTConfig, Pair, ViTConfig, pair
from vitrail.data.decode import ImageLike
from vitrail.data.preprocess import Preprocess, is_image_list
from vitrail.errors import ConfigError, ImageError, ModelError, NotFoundError, VitrailError
from vitrail.export.names import is_exported
from vitrail.models import Net, Output, ViT, build
from vitrail.models.base import eval_mode
from vitrail.models.families import FAMILIES
from vitrail.models.model_names import config_from_name, find_published
from vitrail.models.output import concat_outputs
from vitrail.runtime import pick_device, pick_dtype, warn_once
from vitrail.runtime.amx import check_bfloat16
from vitrail.runtime.cores import usable_cores
from vitrail.weights import checkpoint, module_reader
from vitrail.weights.class_names import assume_imagenet_labels, read_labels
from vitrail.weights.conversion import convert
from vitrail.weights.loading import adapt_model, load_checkpoint
from vitrail.weights.locate import ModelLocation
from vitrail.weights.model_info import ModelInfo, default_preprocess
from vitrail.weights.native import NATIVE
from vitrail.weights.shipped import SHIPPED

if TYPE_CHECKING:
    from vitrail.api.explanation import Explanation

Pixels = npt.NDArray[Any]
Want = Literal["logits", "pooled"]

TRAINING = {"dropout", "attention_dropout", "drop_path", "position_init_std", "head_bias_init"}
"""Fields of a config that change training or first values, and nothing that a loaded network computes."""


@dataclass(frozen=True)
class Prediction:
    """One class and how sure the model is."""

    label: str
    score: float
    index: int


class Model:
    """A network that knows how its images are prepared and what its classes are called.

    `predict` names what is in images, `embed` gives features to compare them by, `logits` the raw
    outputs, `explain` shows what it looks at, `save` writes it in any format that can express it.
    `net` is the nn.Module.
    """

    def __init__(self, net: Net, info: ModelInfo) -> None:
        """Raise ModelError where the info is of another network: other classes, channels, sizes or conventions."""
        check_info_matches(net.config, info)
        self._net, self._info = net, info
        self.preprocess = Preprocess(info.preprocess)
        self._check_bfloat16()

    @property
    def net(self) -> Net:
        """The network; another one must fit the info."""
        return self._net

    @net.setter
    def net(self, net: Net) -> None:
        check_info_matches(net.config, self.info)
        self._net = net
        self._check_bfloat16()

    @property
    def info(self) -> ModelInfo:
        """The config, preprocessing and class names; another info must fit the network."""
        return self._info

    @info.setter
    def info(self, info: ModelInfo) -> None:
        check_info_matches(self.config, info)
        self._info = info
        self.preprocess = Preprocess(info.preprocess)

    @property
    def config(self) -> ViTConfig | BiTConfig:
        return self.net.config

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Class names in the head's order, or None where the checkpoint does not say."""
        return self.info.labels

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    def to(self, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> Model:
        """This model, moved ("cuda", "mps", "cpu", "auto") or in another precision; `to(torch.bfloat16)` does too."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        self.net.to(self.device if device is None else pick_device(device), pick_dtype(dtype) or self.dtype)
        self._check_bfloat16()
        return self

    def _check_bfloat16(self) -> None:
        """Before anything is computed, whoever computes it."""
        if self.dtype == torch.bfloat16 and self.device.type == "cpu":
            check_bfloat16()

    @overload  # a string is an iterable of strings too, but one image
    def predict(  # type: ignore[overload-overlap]
        self, images: ImageLike, top: int = 5, batch_size: int = 32
    ) -> list[Prediction]: ...
    @overload
    def predict(self, images: Iterable[ImageLike], top: int = 5, batch_size: int = 32) -> list[list[Prediction]]: ...
    def predict(self, images: Any, top: int = 5, batch_size: int = 32) -> Any:
        """The likeliest classes of an image, best first; several images give a list of such lists."""
        _check_top(top)
        ranked = self.top_predictions(self.logits(images, batch_size), top)
        return ranked if is_image_list(images) else ranked[0]

    def logits(self, images: ImageLike | Iterable[ImageLike], batch_size: int = 32) -> Tensor:
        """The raw outputs, on the CPU: B classes."""
        self.check_classes()
        return self._outputs(images, batch_size, "logits")

    def embed(self, images: ImageLike | Iterable[ImageLike], batch_size: int = 32) -> Tensor:
        """Features before the head, on the CPU: B D (CLIP: in the space its texts share)."""
        projects = self.info.task == "embed" and self.config.num_classes
        return self._outputs(images, batch_size, "logits" if projects else "pooled")

    def features(
        self,
        images: ImageLike | Iterable[ImageLike],
        outputs: str | Sequence[str] | None = None,
        *,
        layers: Sequence[int] | None = None,
        norm: bool = False,
        batch_size: int = 32,
    ) -> Output:
        """Named intermediates of images, on the CPU: what `net.features` gives for each batch, put together.

        `vit.features("cat.jpg", "patch_maps", layers=[3, 7, 11]).patch_maps` is three times B h w D.
        """
        self.check_has_network()
        _check_batch(batch_size)
        computed = []
        for group in _groups(images if is_image_list(images) else [images], batch_size):  # type: ignore[list-item]
            with torch.no_grad(), eval_mode(self.net):
                batched = self._normalized([self.preprocess.pixels(image) for image in group])
                computed.append(self.net.features(batched, outputs, layers=layers, norm=norm).map(_on_cpu))
        return concat_outputs(computed)

    def explain(self, image: ImageLike, **options: Any) -> Explanation:
        """What happens inside for one image: `look.rollout`, `look.attention`, `look.figure().savefig(...)`.

        Options are those of `vitrail.api.explanation.explain`: the class to explain (`target`), kinds of
        explanation (`methods`), the query token of the attention maps (`query`), and `faithfulness` curves.
        """
        from vitrail.api.explanation import explain

        return explain(self, image, **options)

    def stream(
        self, images: Iterable[ImageLike], batch_size: int = 32, want: Want = "logits"
    ) -> Iterator[Tensor | VitrailError]:
        """Of each image in turn its output, or the error where it cannot be read.

        Threads decode the next batch while the network is busy with this one; no more than these
        two are in memory, however many images there are.
        """
        _check_batch(batch_size)
        pool = ThreadPoolExecutor(min(batch_size, usable_cores(), 16), thread_name_prefix="decode")
        waiting: list[Future[Pixels | VitrailError]] = []
        try:
            for group in chain(_groups(images, batch_size), [()]):
                coming = [pool.submit(self._pixels, image) for image in group]
                yield from self._answers([future.result() for future in waiting], want)
                waiting = coming
        finally:
            pool.shutdown(cancel_futures=True)

    def top_predictions(self, logits: Tensor, top: int = 5) -> list[list[Prediction]]:
        """B classes -> for each image its best classes; scores sum to 1, unless it may have several of them."""
        _check_top(top)
        chances = logits.float().sigmoid() if self.info.multi_label else logits.float().softmax(-1)
        scores, indices = chances.topk(min(top, logits.shape[-1]))
        return [
            [Prediction(self.label(i), s, i) for s, i in zip(row_scores, row, strict=True)]
            for row_scores, row in zip(scores.tolist(), indices.tolist(), strict=True)
        ]

    def label(self, index: int) -> str:
        """The name of a class, or its number where the checkpoint does not say."""
        if not 0 <= index < self.config.num_classes:
            raise ModelError(f"there is no class {index}: this model has {self.config.num_classes}.")
        return self.labels[index] if self.labels is not None else f"class {index}"

    def check_classes(self) -> None:
        """Raise ModelError where the outputs are not classes."""
        if self.info.task != "classify" or not self.config.num_classes:
            raise ModelError(
                f"{self.info.origin or 'this model'} has no classes: it gives features. "
                "Use embed, or load it with num_classes=... and train the new head."
            )

    def check_has_network(self) -> None:
        """Raise ModelError where there is no network to look into, change or train: an engine runs an exported file."""
        _ = self.net

    def save(
        self, path: str | Path, *, to: str = "vitrail", overwrite: bool = False, approximate: bool = False
    ) -> None:
        """Write in any format that can express this model.

        What another library's format does not carry is logged, as `vitrail convert` prints it. Where that
        library would compute slightly different numbers, ConversionError is raised unless `approximate` is true.
        """
        info = self.info.replace(config=self.net.config)
        if to == NATIVE.name:  # carries all of it
            checkpoint.write(self.net, info, path, overwrite=overwrite)
            return
        found = convert(self.net, info, path, to=to, overwrite=overwrite, approximate=approximate)
        warn_once(found.notes, about=str(path))

    def _outputs(self, images: ImageLike | Iterable[ImageLike], batch_size: int, want: Want) -> Tensor:
        if not is_image_list(images):
            return self._run([self.preprocess.pixels(cast(ImageLike, images))], want)
        rows = []
        for row in self.stream(images, batch_size, want):
            if isinstance(row, VitrailError):
                raise row
            rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self._width(want))

    def _pixels(self, image: ImageLike) -> Pixels | VitrailError:
        try:
            return self.preprocess.pixels(image)
        except (ImageError, NotFoundError) as error:
            return error

    def _answers(self, prepared: Sequence[Pixels | VitrailError], want: Want) -> Iterator[Tensor | VitrailError]:
        good = [p for p in prepared if not isinstance(p, VitrailError)]
        rows = iter(self._run(good, want)) if good else iter(())
        for one in prepared:
            yield one if isinstance(one, VitrailError) else next(rows)

    @torch.no_grad()  # not inference_mode: what it gives cannot be trained on
    def _run(self, pixels: Sequence[Pixels], want: Want) -> Tensor:
        """B times H W C, 0 to 255 -> B outputs, on the CPU."""
        images = self._normalized(pixels)
        with eval_mode(self.net):
            result = self.net(images) if want == "logits" else self.net.features(images, outputs=(want,)).pooled
        assert isinstance(result, Tensor)
        if want == "logits" and self.config.num_classes not in (0, result.shape[-1]):
            raise ModelError(
                f"the network gives {result.shape[-1]} outputs, and its config says "
                f"num_classes={self.config.num_classes}: its "
                f"head was replaced. Use net.with_classes({result.shape[-1]}), which changes both."
            )
        return _on_cpu(result)

    def _normalized(self, pixels: Sequence[Pixels]) -> Tensor:
        """B times H W C, 0 to 255 -> what the network takes, B C H W."""
        batch = torch.from_numpy(np.stack(pixels)).to(self.device).permute(0, 3, 1, 2)
        self._check_bfloat16()  # someone may have moved the network by itself
        return self.preprocess.normalize(batch).to(self.dtype)

    def _width(self, want: Want) -> int:
        if want == "logits" and self.config.num_classes:
            return self.config.num_classes
        return self.net.config.pooled_width if isinstance(self.net, ViT) else self.net.norm.weight.shape[0]

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.net.parameters()) / 1e6
        what = f"{self.config.num_classes} classes" if self.info.task == "classify" else "features"
        name = self.info.origin or self.info.family
        return f"<vitrail.Model {name}: {count:.1f} M parameters, {_size(self.config.image_size)}, {what}>"


def check_info_matches(config: ViTConfig | BiTConfig, info: ModelInfo) -> None:
    """Raise ModelError where a model info describes another network than the one of this config."""
    ours, theirs = ({"kind": type(c).__name__, **c.to_dict()} for c in (config, info.config))
    differ = [name for name in ours if ours[name] != theirs.get(name) and name not in TRAINING]
    if "layer_scale" in differ and None not in (ours["layer_scale"], theirs["layer_scale"]):
        differ.remove("layer_scale")  # the first value of what is learned
    if "kind" in differ:
        differ = ["kind"]
    if differ:
        has, says = (", ".join(f"{name}={of[name]}" for name in differ[:3]) for of in (ours, theirs))
        also = ", preprocess=..." * bool({"image_size", "channels"} & {*differ}) + ", labels=None" * (
            "num_classes" in differ
        )
        raise ModelError(
            f"the network has {has}, and its info says {says}: the info is of another network. Load the checkpoint "
            f"with these settings, or pass info.replace(config=net.config{also})."
        )
    if config.channels != info.preprocess.channels:
        raise ModelError(
            f"the network takes images of {config.channels} channels, and its preprocessing gives "
            f"{info.preprocess.channels}; load it with channels={info.preprocess.channels}, or pass a preprocessing "
            f"whose mean and std have {config.channels}."
        )


def load(
    source: str | Path | ModelLocation | nn.Module,
    *,
    image_size: Pair | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    labels: str | Path | Sequence[str] | None = None,
    family: str | None = None,
    section: str | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = "float32",
    check_finite: bool = True,
    **changes: Any,
) -> Model:
    """A model from a file, a folder, a model's name, a hub id or another library's network, ready to use.

    It is looked for in this order: an existing file or folder; a model that ships with the package
    ("vitrail/cifar10"); a model's name, which stands for one stated public checkpoint; a hub id.
    `image` resamples positions for another size, `channels` sums or repeats the first filters,
    `classes` puts a new head of zeros, `labels` names the classes ("imagenet-1k", a file, a list),
    `family` says what a bare file cannot (DeiT, DINO, ...), `section` chooses a part of a training
    file, `dtype=None` keeps the type that is stored, and further keywords override fields of the
    config (activation="gelu-quick"). A file that `vitrail export` wrote is run by its own engine: it
    predicts as any other model does, and cannot be changed or looked into.

    A network in memory, of timm, transformers, torchvision or open_clip, is converted: the weights are
    copied, preprocessing and labels are those of its config, and its outputs are compared for two images.
    """
    if not isinstance(source, str | Path | ModelLocation | nn.Module):
        raise NotFoundError(
            f"got a {type(source).__name__}, wanted a file, a folder, a model's name, a hub id or an nn.Module."
        )
    size: dict[str, Any] = {"image_size": image_size, "channels": channels, "num_classes": num_classes}
    path = source.path if isinstance(source, ModelLocation) else source
    where = None if isinstance(path, nn.Module) else Path(path).expanduser()
    if where is not None and is_exported(where):
        from vitrail.api.exporting import running  # which needs this module

        asked = size | {"family": family, "section": section}
        return running(where, labels=labels, device=device, dtype=dtype, **asked, **changes)
    target = pick_device(device)
    options: dict[str, Any] = {"family": family, "dtype": pick_dtype(dtype), "check_finite": check_finite}
    if isinstance(source, nn.Module):
        net, info = adapt_model(*module_reader.read_module(source, overrides=changes, **options), **size)
    else:
        net, info = load_checkpoint(source, overrides=changes, section=section, **size, **options)
    info = (
        assume_imagenet_labels(net, info)
        if labels is None
        else info.replace(labels=read_labels(labels, info.config.num_classes))
    )
    if info.origin not in SHIPPED:  # nothing about those had to be assumed
        warn_once(info.notes, about=info.origin or Path(str(where)).name)
    return Model(net.to(target), info)


def create(name: str, *, seed: int | None = None, device: str | torch.device = "cpu", **changes: Any) -> Net:
    """A fresh network by name, with the paper's first values: `create("ViT-B/16", num_classes=10, image_size=384)`."""
    target = pick_device(device)
    return build(config_from_name(name, **changes), seed).to(target)


def create_model(name: str, *, seed: int | None = None, device: str | torch.device = "cpu", **changes: Any) -> Model:
    """An untrained Model by name: `create` with the family's preprocessing."""
    net = create(name, seed=seed, device=device, **changes)
    variant = find_published(name)
    family = (variant.name if variant else name).split("+")[-1].split("-")[0]
    known = next(k for k in FAMILIES if k.lower() == family.lower())
    preprocess = default_preprocess(known, net.config)
    classifies = net.config.num_classes and (known != "CLIP" or "num_classes" in changes)
    info = ModelInfo(config=net.config, preprocess=preprocess, family=known, origin=name)
    return Model(net.eval(), info if classifies else info.replace(task="embed"))


def _size(image_size: Pair) -> str:
    return "x".join(map(str, pair(image_size)))


def _on_cpu(x: Tensor) -> Tensor:
    """In single precision at least."""
    return x.to("cpu", torch.promote_types(x.dtype, torch.float32))


def _check_top(top: int) -> None:
    if top < 1:
        raise ConfigError(f"top={top}: wanted 1 class or more.")


def _check_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: wanted 1 image at a time or more.")


def _groups(images: Iterable[ImageLike], size: int) -> Iterator[tuple[ImageLike, ...]]:
    rest = iter(images)
    while group := tuple(islice(rest, size)):
        yield group


__all__ = ["Model", "Prediction", "create", "create_model", "load"]
