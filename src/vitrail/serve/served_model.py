"""The served model: an engine, and the network it was made from, if available."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from vitrail.config import ViTConfig, pair
from vitrail.data.preprocess import Preprocess
from vitrail.engines.engine import Engine, FileEngine, TorchEngine
from vitrail.explain.occlusion import GRID, grid_of
from vitrail.explain.steps import supported_methods
from vitrail.inference import run_network
from vitrail.model import Model
from vitrail.models import BiT, ViT
from vitrail.weights.archive import unmap_weights

# B images, H W C pixels

Floats = npt.NDArray[np.float32]


class ServedModel:
    """An engine with its preprocessing and labels. Features and explanations also need the `Model` it came from."""

    def __init__(
        self, engine: Engine, model: Model | None = None, *, name: str | None = None, parallel_batches: bool = False
    ) -> None:
        """parallel_batches: run one batch per core in parallel.

        torch and ONNX Runtime compute each batch in the calling thread; OpenVINO has its own threads and splits a
        batch among those that are free.
        """
        self.engine, self.model, self.info, self.parallel_batches = engine, model, engine.info, parallel_batches
        nets = [engine.net] if isinstance(engine, TorchEngine) else []
        for net in nets if model is None or model.net in nets else [*nets, model.net]:
            unmap_weights(net)
        self.preprocess = Preprocess(self.info.preprocess)
        self.name = name or self.info.title

    @property
    def classifies(self) -> bool:
        return self.info.task == "classify" and bool(self.info.config.num_classes) and not self.outputs_features

    @property
    def outputs_features(self) -> bool:
        """Whether the outputs of the engine are features, as for CLIP, whose head projects into the text space."""
        if isinstance(self.engine, FileEngine) and self.engine.metadata.output_type == "features":
            return True
        return self.info.task == "embed" and bool(self.info.config.num_classes)

    @property
    def has_features(self) -> bool:
        """Whether features are available."""
        return self.model is not None or self.outputs_features

    @property
    def feature_dimension(self) -> int:
        """Number of features of an image; -1 if the config does not state it."""
        config = self.info.config
        if self.outputs_features and config.num_classes:
            return config.num_classes
        if self.model is not None and isinstance(self.model.net, BiT):
            return self.model.net.norm.weight.shape[0]
        return getattr(config, "pooled_width", -1)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """H, W, C of the engine's input."""
        return (*pair(self.info.preprocess.image_size), self.info.preprocess.channels)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches that can be hidden; for a model without patches, of a regular grid."""
        config, (height, width, _) = self.info.config, self.input_shape
        if self.model is not None:
            return grid_of(self.model.net, torch.empty(1, 1, height, width))
        if isinstance(config, ViTConfig):
            return config.grid_of((height, width))
        return min(GRID, height), min(GRID, width)

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        if self.model is None:
            return self.engine.metadata.prefix_tokens if isinstance(self.engine, FileEngine) else ()
        return self.model.net.config.prefix_token_names if isinstance(self.model.net, ViT) else ()

    @property
    def explain_methods(self) -> tuple[str, ...]:
        """Supported explanation methods."""
        if self.model is None:
            return ()
        return supported_methods(self.model.net, self.classifies)

    @property
    def num_parameters(self) -> int | None:
        """Number of parameters; None if an exported file does not state it."""
        if self.model is not None:
            return sum(p.numel() for p in self.model.net.parameters())
        return self.engine.metadata.parameters if isinstance(self.engine, FileEngine) else None

    def computes_like(self, other: ServedModel) -> bool:
        """Whether both have the same architecture, input and engine, so that a batch takes the same time."""
        same = [(one.info.config, one.input_shape, one.engine.name, one.engine.precision) for one in (self, other)]
        return same[0] == same[1]

    def describe_engine(self, cores: int) -> str:
        """Engine, precision and device, such as `openvino in int8, 2 cores`."""
        device = "cpu" if self.model is None else self.model.device.type
        where = f"{cores} core{'s' * (cores > 1)}" if device == "cpu" else f"on {device}"
        return f"{self.engine.name} in {self.engine.precision}, {where}"

    def outputs(self, pixels: npt.NDArray[Any], want: Literal["logits", "features"]) -> Floats:
        """B H W C -> B num_classes logits, or B D features."""
        if want == "logits" or self.outputs_features:
            return self.engine.logits(pixels)
        assert self.model is not None
        return run_network(self.model.net, self.model.preprocess, pixels, "pooled").float().numpy()
