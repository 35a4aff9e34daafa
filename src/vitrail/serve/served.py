"""What is served: an engine, the network beside it where there is one, and what both are called."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from vitrail.api import Model
from vitrail.api.looking import METHODS, NEEDS_CLASSES
from vitrail.config import ViTConfig, pair
from vitrail.data.preprocess import Preprocess
from vitrail.explain.attention import special_names
from vitrail.explain.occlusion import GRID, grid_of
from vitrail.export.engines import Engine, FileEngine, TorchEngine
from vitrail.models import BiT, ViT
from vitrail.models.base import evaluating
from vitrail.weights.archive import unmap_weights

# B images, H W C pixels

Floats = npt.NDArray[np.float32]


class Served:
    """An engine, and the Model it came from; without that, it gives what its file gives and no more."""

    def __init__(
        self, engine: Engine, model: Model | None = None, *, name: str | None = None, alone: bool = False
    ) -> None:
        """`alone`: as many calls are made side by side as there are cores.

        torch and ONNX Runtime compute each on the core it is made from; OpenVINO has threads of its own, and
        shares a call out among those that are free.
        """
        self.engine, self.model, self.info, self.alone = engine, model, engine.info, alone
        nets = [engine.net] if isinstance(engine, TorchEngine) else []
        for net in nets if model is None or model.net in nets else [*nets, model.net]:
            unmap_weights(net)
        self.preprocess = Preprocess(self.info.preprocess)
        self.name = name or self.info.title

    @property
    def classifies(self) -> bool:
        return self.info.task == "classify" and bool(self.info.config.num_classes) and not self.gives_features

    @property
    def gives_features(self) -> bool:
        """Whether the engine's own outputs are features: CLIP's head leads into the space its texts share."""
        if isinstance(self.engine, FileEngine) and self.engine.sheet.answer == "features":
            return True
        return self.info.task == "embed" and bool(self.info.config.num_classes)

    @property
    def embeds(self) -> bool:
        """Whether there is something before the head to be had."""
        return self.model is not None or self.gives_features

    @property
    def shape(self) -> tuple[int, int, int]:
        """H W C of what the engine takes."""
        return (*pair(self.info.preprocess.image_size), self.info.preprocess.channels)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the parts that can be hidden: patches, or a fair grid where there are none."""
        config, (height, width, _) = self.info.config, self.shape
        if self.model is not None:
            return grid_of(self.model.net, torch.empty(1, 1, height, width))
        if isinstance(config, ViTConfig):
            return config.grid_of((height, width))
        return min(GRID, height), min(GRID, width)

    @property
    def special(self) -> tuple[str, ...]:
        if self.model is None:
            return self.engine.sheet.special if isinstance(self.engine, FileEngine) else ()
        return special_names(self.model.net.config) if isinstance(self.model.net, ViT) else ()

    @property
    def methods(self) -> tuple[str, ...]:
        """Kinds of explanation it can give."""
        if self.model is None:
            return ()
        able = (m for m in METHODS if m == "occlusion" or not isinstance(self.model.net, BiT))
        return tuple(m for m in able if self.classifies or m not in NEEDS_CLASSES)

    @property
    def parameters(self) -> int | None:
        """How many, where the network is here or its file says."""
        if self.model is not None:
            return sum(p.numel() for p in self.model.net.parameters())
        return self.engine.sheet.parameters if isinstance(self.engine, FileEngine) else None

    def how(self, cores: int) -> str:
        """What runs it, in words: `openvino in int8, 2 cores`."""
        device = "cpu" if self.model is None else self.model.device.type
        where = f"{cores} core{'s' * (cores > 1)}" if device == "cpu" else f"on {device}"
        return f"{self.engine.name} in {self.engine.precision}, {where}"

    def outputs(self, pixels: npt.NDArray[Any], want: Literal["logits", "features"]) -> Floats:
        """B H W C -> B outputs, or B features."""
        if want == "logits" or self.gives_features:
            return self.engine.logits(pixels)
        assert self.model is not None
        return features(self.model, pixels)


@torch.no_grad()  # not inference_mode: positions that are remembered must serve gradients too
def features(model: Model, pixels: npt.NDArray[Any]) -> Floats:
    """B H W C -> B D: what the head reads."""
    with evaluating(model.net):
        pooled = model.net.features(images_of(model, pixels), want=("pooled",)).pooled
    assert pooled is not None
    return np.asarray(pooled.float().cpu().numpy())


def images_of(model: Model, pixels: npt.NDArray[Any]) -> torch.Tensor:
    """B H W C, 0 to 255 -> B C H W as the network takes them."""
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).to(model.device).permute(0, 3, 1, 2)
    return model.preprocess.normalize(batch).to(model.dtype)
