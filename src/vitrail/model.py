"""Model: a network with its preprocessing and class names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from vitrail.config import NetConfig, Pair, pair
from vitrail.data.decode import ImageLike
from vitrail.data.preprocess import Preprocess, is_image_list
from vitrail.errors import ConfigError, ImageError, ModelError, NotFoundError, VitrailError
from vitrail.inference import OutputName, Pixels, network_input, run_network, to_cpu
from vitrail.kernels.eight_bit import EIGHT_BIT, is_eight_bit
from vitrail.models import BiT, Net, Output
from vitrail.models.base import eval_mode
from vitrail.models.output import concat_outputs
from vitrail.predictions import Prediction, check_top, class_label, top_predictions
from vitrail.runtime import parse_dtype, pick_device, warn_once
from vitrail.runtime.amx import check_bfloat16
from vitrail.runtime.cores import usable_cores
from vitrail.weights import checkpoint
from vitrail.weights.conversion import convert
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.native import NATIVE

if TYPE_CHECKING:
    from vitrail.explain.explanation import Explanation

TRAINING_ONLY_FIELDS = {"dropout", "attention_dropout", "drop_path", "position_init_std", "head_bias_init"}
"""Config fields that affect training or initialization, but not the outputs of a loaded network."""


class Model:
    """A network with its preprocessing and class names.

    `predict` classifies images, `embed` returns features, `logits` the raw outputs, `explain` an explanation, `save`
    writes the model in any format that can represent it. `net` is the nn.Module.
    """

    def __init__(self, net: Net, info: ModelInfo) -> None:
        """Raise ModelError if the model info does not match the network: classes, channels, sizes or conventions."""
        check_info_matches(net.config, info)
        self._net, self._info = net, info
        self.preprocess = Preprocess(info.preprocess)
        self._check_bfloat16()

    @property
    def net(self) -> Net:
        """The network. A new one must match the model info."""
        return self._net

    @net.setter
    def net(self, net: Net) -> None:
        check_info_matches(net.config, self.info)
        self._net = net
        self._check_bfloat16()

    @property
    def info(self) -> ModelInfo:
        """Config, preprocessing and class names. A new model info must match the network."""
        return self._info

    @info.setter
    def info(self, info: ModelInfo) -> None:
        check_info_matches(self.config, info)
        self._info = info
        self.preprocess = Preprocess(info.preprocess)

    @property
    def config(self) -> NetConfig:
        return self.net.config

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Class names in the order of the head's outputs; None if unknown."""
        return self.info.labels

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    @property
    def precision(self) -> str:
        """float8 for a network with 8-bit layers, else its dtype."""
        return EIGHT_BIT if is_eight_bit(self.net) else str(self.dtype).removeprefix("torch.")

    def to(self, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> Model:
        """Move this model, in place, to a device ("cuda", "mps", "cpu", "auto") or dtype (or `to(torch.bfloat16)`)."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        self.net.to(self.device if device is None else pick_device(device), parse_dtype(dtype) or self.dtype)
        self._check_bfloat16()
        return self

    def _check_bfloat16(self) -> None:
        """Check that bfloat16 works on this CPU before anything is computed."""
        if self.dtype == torch.bfloat16 and self.device.type == "cpu":
            check_bfloat16()

    @overload  # a str is an iterable of str, but also one image
    def predict(  # type: ignore[overload-overlap]
        self, images: ImageLike, top: int = 5, batch_size: int = 32
    ) -> list[Prediction]: ...
    @overload
    def predict(self, images: Iterable[ImageLike], top: int = 5, batch_size: int = 32) -> list[list[Prediction]]: ...
    def predict(self, images: Any, top: int = 5, batch_size: int = 32) -> Any:
        """The `top` most likely classes of an image, best first; for several images, a list of such lists."""
        check_top(top)
        ranked = self.top_predictions(self.logits(images, batch_size), top)
        return ranked if is_image_list(images) else ranked[0]

    def logits(self, images: ImageLike | Iterable[ImageLike], batch_size: int = 32) -> Tensor:
        """The raw outputs, on the CPU: B num_classes."""
        self.check_classes()
        return self._outputs(images, batch_size, "logits")

    def embed(self, images: ImageLike | Iterable[ImageLike], batch_size: int = 32) -> Tensor:
        """Features before the head, on the CPU: B D. For CLIP, the embedding shared with text."""
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
        """Intermediate outputs by name, on the CPU: `net.features` of each batch, concatenated.

        `vit.features("cat.jpg", "patch_maps", layers=[3, 7, 11]).patch_maps` is three times B h w D.
        """
        self.check_has_network()
        _check_batch(batch_size)
        computed = []
        for group in _groups(images if is_image_list(images) else [images], batch_size):  # type: ignore[list-item]
            with torch.no_grad(), eval_mode(self.net):
                pixels = np.stack([self.preprocess.pixels(image) for image in group])
                batched = network_input(self.net, self.preprocess, pixels)
                computed.append(self.net.features(batched, outputs, layers=layers, norm=norm).map(to_cpu))
        return concat_outputs(computed)

    def explain(self, image: ImageLike, **options: Any) -> Explanation:
        """Explain one image: attention, attribution maps and predictions, as arrays and figures.

        Options are those of `vitrail.explain.explanation.explain`: the class to explain (`target`), kinds of
        explanation (`methods`), the query token of the attention maps (`query`), and `faithfulness` curves.
        """
        from vitrail.explain.explanation import explain

        return explain(self.net, self.info, image, **options)

    def stream(
        self, images: Iterable[ImageLike], batch_size: int = 32, output: OutputName = "logits"
    ) -> Iterator[Tensor | VitrailError]:
        """Yield each image's output, or the error if the image cannot be read.

        Threads decode the next batch while the network runs on the current one; only these two are in memory.
        """
        _check_batch(batch_size)
        pool = ThreadPoolExecutor(min(batch_size, usable_cores(), 16), thread_name_prefix="decode")
        pending: list[Future[Pixels | VitrailError]] = []
        try:
            for group in chain(_groups(images, batch_size), [()]):
                decoding = [pool.submit(self._try_pixels, image) for image in group]
                yield from self._run_prepared([future.result() for future in pending], output)
                pending = decoding
        finally:
            pool.shutdown(cancel_futures=True)

    def top_predictions(self, logits: Tensor, top: int = 5) -> list[list[Prediction]]:
        """B num_classes -> the best classes of each image; all scores sum to 1 unless the model is multi-label."""
        return top_predictions(logits, self.info, top)

    def label(self, index: int) -> str:
        """The name of a class; `class {index}` if the names are unknown."""
        return class_label(self.info, index)

    def check_classes(self) -> None:
        """Raise ModelError if the outputs are not classes."""
        if self.info.task != "classify" or not self.config.num_classes:
            raise ModelError(
                f"{self.info.origin or 'this model'} has no classes: it outputs features. "
                "Use embed, or load it with num_classes=... and train the new head."
            )

    def check_has_network(self) -> None:
        """Raise ModelError if there is no nn.Module to explain, modify or train: an engine runs an exported file."""
        _ = self.net

    def save(
        self, path: str | Path, *, to: str = "vitrail", overwrite: bool = False, approximate: bool = False
    ) -> None:
        """Write the model in any format that can represent it.

        Information that another library's format does not store is logged, as by `vitrail convert`. If that library
        would compute slightly different outputs, ConversionError is raised unless `approximate` is true.
        """
        if is_eight_bit(self.net):
            raise ModelError(f"a model in {EIGHT_BIT} cannot be written; load it with another dtype.")
        info = self.info.replace(config=self.net.config)
        if to == NATIVE.name:  # stores everything
            checkpoint.write(self.net, info, path, overwrite=overwrite)
            return
        conversion = convert(self.net, info, path, to=to, overwrite=overwrite, approximate=approximate)
        warn_once(conversion.notes, about=str(path))

    def _outputs(self, images: ImageLike | Iterable[ImageLike], batch_size: int, output: OutputName) -> Tensor:
        if not is_image_list(images):
            return self._run([self.preprocess.pixels(cast(ImageLike, images))], output)
        rows = []
        for row in self.stream(images, batch_size, output):
            if isinstance(row, VitrailError):
                raise row
            rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self._width(output))

    def _try_pixels(self, image: ImageLike) -> Pixels | VitrailError:
        try:
            return self.preprocess.pixels(image)
        except (ImageError, NotFoundError) as error:
            return error

    def _run_prepared(
        self, prepared: Sequence[Pixels | VitrailError], output: OutputName
    ) -> Iterator[Tensor | VitrailError]:
        readable = [pixels for pixels in prepared if not isinstance(pixels, VitrailError)]
        rows = iter(self._run(readable, output)) if readable else iter(())
        for item in prepared:
            yield item if isinstance(item, VitrailError) else next(rows)

    def _run(self, pixels: Sequence[Pixels], output: OutputName) -> Tensor:
        """B arrays H W C, 0 to 255 -> B outputs, on the CPU."""
        self._check_bfloat16()  # the caller may have moved the network
        result = run_network(self.net, self.preprocess, np.stack(pixels), output)
        if output == "logits" and self.config.num_classes not in (0, result.shape[-1]):
            raise ModelError(
                f"the network gives {result.shape[-1]} outputs, but its config has "
                f"num_classes={self.config.num_classes}: its "
                f"head was replaced. Use net.with_classes({result.shape[-1]}), which changes both."
            )
        return result

    def _width(self, output: OutputName) -> int:
        if output == "logits" and self.config.num_classes:
            return self.config.num_classes
        return self.net.norm.weight.shape[0] if isinstance(self.net, BiT) else self.net.config.pooled_width

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.net.parameters()) / 1e6
        outputs = f"{self.config.num_classes} classes" if self.info.task == "classify" else "features"
        name = self.info.origin or self.info.family
        return f"<vitrail.Model {name}: {count:.1f} M parameters, {_format_size(self.config.image_size)}, {outputs}>"


def check_info_matches(config: NetConfig, info: ModelInfo) -> None:
    """Raise ModelError if the model info describes another network than this config."""
    actual, described = ({"type": type(c).__name__, **c.to_dict()} for c in (config, info.config))
    differ = [name for name in actual if actual[name] != described.get(name) and name not in TRAINING_ONLY_FIELDS]
    if "layer_scale" in differ and None not in (actual["layer_scale"], described["layer_scale"]):
        differ.remove("layer_scale")  # only the initial value of a learned parameter
    if "type" in differ:
        differ = ["type"]
    if differ:
        got, expected = (", ".join(f"{name}={c[name]}" for name in differ[:3]) for c in (actual, described))
        also = ", preprocess=..." * bool({"image_size", "channels"} & {*differ}) + ", labels=None" * (
            "num_classes" in differ
        )
        raise ModelError(
            f"the network has {got}, but the model info has {expected}: it describes another network. "
            f"Load the checkpoint with these settings, or pass info.replace(config=net.config{also})."
        )
    if config.channels != info.preprocess.channels:
        raise ModelError(
            f"the network takes images with {config.channels} channels, but its preprocessing gives "
            f"{info.preprocess.channels}; load it with channels={info.preprocess.channels}, or pass a preprocessing "
            f"whose mean and std have {config.channels}."
        )


def _format_size(image_size: Pair) -> str:
    return "x".join(map(str, pair(image_size)))


def _check_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: expected at least 1.")


def _groups(images: Iterable[ImageLike], size: int) -> Iterator[tuple[ImageLike, ...]]:
    remaining = iter(images)
    while group := tuple(islice(remaining, size)):
        yield group
