"""Features of query images, made as those of the index were: same weights, preprocessing, layers and pooling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.decode import ImageLike
from vitrail.engine_model import EngineModel
from vitrail.errors import ConfigError, DataError, ImageError, NotFoundError, VitrailError
from vitrail.evaluation.features import FeatureSpec, extract, resolve_features
from vitrail.inference import Pixels, network_input, to_cpu
from vitrail.model import Model
from vitrail.models.base import eval_mode
from vitrail.runtime.cores import usable_cores
from vitrail.weights.checksum import weights_checksum

# B images in a batch, D features


@dataclass(frozen=True)
class QueryEncoder:
    """A model that embeds images as those of some stored features were."""

    model: Model
    spec: FeatureSpec

    @classmethod
    def for_features(cls, model: Model, metadata: Mapping[str, Any], where: object) -> QueryEncoder:
        """Raise ConfigError unless `model` made the features; its preprocessing is taken from them.

        `metadata` describes the features, and `where` names them in errors.
        """
        _check_weights(model, metadata, where)
        try:
            preprocess = PreprocessConfig.from_dict(metadata["preprocess"])
            spec = FeatureSpec.from_text(metadata["features"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{where} does not say how its features were made ({error}); embed it again.") from None
        if isinstance(model, EngineModel):
            if model.info.preprocess != preprocess:
                raise ConfigError(f"{where} was made with another preprocessing than that of {model.info.title}.")
            model.check_features()
            return cls(model, spec)
        if model.info.preprocess != preprocess:
            model = Model(model.net, model.info.replace(preprocess=preprocess))
        return cls(model, resolve_features(spec, model.net))

    def embed(self, images: Iterable[ImageLike], batch_size: int = 32) -> Iterator[Tensor | VitrailError]:
        """Yield the features of each image, D, or the error if it cannot be read."""
        remaining = iter(images)
        with ThreadPoolExecutor(min(batch_size, usable_cores(), 16), thread_name_prefix="decode") as pool:
            while group := list(islice(remaining, batch_size)):
                prepared = list(pool.map(self._pixels, group))
                readable = [pixels for pixels in prepared if not isinstance(pixels, VitrailError)]
                found = iter(self._run(np.stack(readable)) if readable else ())
                yield from (item if isinstance(item, VitrailError) else next(found) for item in prepared)

    def _pixels(self, image: ImageLike) -> Pixels | VitrailError:
        try:
            return self.model.preprocess.pixels(image)
        except (ImageError, NotFoundError) as error:
            return error

    @torch.no_grad()
    def _run(self, pixels: Pixels) -> Tensor:
        """B H W C, 0 to 255 -> B D, on the CPU."""
        if isinstance(self.model, EngineModel):
            return torch.from_numpy(self.model.engine.logits(pixels))
        net = self.model.net
        with eval_mode(net):
            return to_cpu(extract(net, network_input(net, self.model.preprocess, pixels), self.spec))


def _check_weights(model: Model, metadata: Mapping[str, Any], where: object) -> None:
    checksum = model.fingerprint if isinstance(model, EngineModel) else weights_checksum(model.net)
    if checksum == metadata.get("weights"):
        return
    made_by, given = metadata.get("model"), model.info.title
    message = f"{where} was made by {made_by} (weights {metadata.get('weights')}), not by {given} (weights {checksum})"
    size = (metadata.get("preprocess") or {}).get("image_size")
    if made_by == given and size not in (None, model.info.preprocess.to_dict().get("image_size")):
        raise ConfigError(f"{message}: at image size {size}; load the model with that size.")
    raise ConfigError(f"{message}; features of different models cannot be compared, so pass that model.")
