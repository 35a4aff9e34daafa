"""The libraries that are compared, each with the function that builds its network for a config of ours."""

from __future__ import annotations

import importlib
import importlib.metadata
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import NetConfig, ViTConfig, pair
from vitrail.errors import ConfigError, NotFoundError
from vitrail.models import Net, build
from vitrail.models.model_names import config_from_name
from vitrail.weights import checkpoint
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.locate import locate
from vitrail.weights.model_info import ModelInfo

HEAD_STD = 0.02
"""Standard deviation of a random head: with the zeros of a new head, all outputs would be equal."""


@dataclass(frozen=True)
class Library:
    """Another library: its module, and the function that builds its network with the weights of ours."""

    module: str
    build: Callable[[Net, ModelInfo, ViTConfig], nn.Module]
    same_function: bool = True
    """Whether that network computes what ours does."""


def _timm(ours: Net, info: ModelInfo, config: ViTConfig) -> nn.Module:
    import timm

    net = timm.create_model(
        "vit_base_patch16_224", img_size=pair(config.image_size), patch_size=pair(config.patch_size),
        embed_dim=config.width, depth=config.depth, num_heads=config.num_heads, num_classes=config.num_classes,
        mlp_ratio=config.mlp_dim / config.width,
    )  # fmt: skip
    return _with_weights(net, "timm", ours, info)


def _torchvision(ours: Net, info: ModelInfo, config: ViTConfig) -> nn.Module:
    from torchvision.models import VisionTransformer

    net = VisionTransformer(
        image_size=_side(config.image_size), patch_size=_side(config.patch_size), num_layers=config.depth,
        num_heads=config.num_heads, hidden_dim=config.width, mlp_dim=config.mlp_dim, num_classes=config.num_classes,
    )  # fmt: skip
    return _with_weights(net, "torchvision", ours, info)


def _with_weights(net: nn.Module, to: str, ours: Net, info: ModelInfo) -> nn.Module:
    """Load the weights of our network, under the names of another library's format."""
    tensors = checkpoint.format_for(to, info).table(info.config).write(ours.state_dict(), info.config)
    net.load_state_dict(tensors)
    return net


class Logits(nn.Module):
    """A network of transformers with plain logits as its output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images).logits
        return logits


def _transformers(ours: Net, info: ModelInfo, config: ViTConfig) -> nn.Module:
    from transformers import ViTForImageClassification

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write(ours, info, Path(folder) / "model", to="huggingface", approximate=True)
        net = ViTForImageClassification.from_pretrained(
            Path(folder) / "model", attn_implementation="sdpa", dtype=torch.float32
        )
    return Logits(net)


def _vit_pytorch(ours: Net, info: ModelInfo, config: ViTConfig) -> nn.Module:
    from vit_pytorch import ViT

    return ViT(
        image_size=_side(config.image_size), patch_size=_side(config.patch_size), num_classes=config.num_classes,
        dim=config.width, depth=config.depth, heads=config.num_heads, mlp_dim=config.mlp_dim,
        dim_head=config.width // config.num_heads,
    )  # fmt: skip


LIBRARIES: Mapping[str, Library] = {
    "timm": Library("timm", _timm),
    "torchvision": Library("torchvision", _torchvision),
    "transformers": Library("transformers", _transformers),
    "vit-pytorch": Library("vit_pytorch", _vit_pytorch, same_function=False),
}


def _side(size: Any) -> int:
    height, width = pair(size)
    if height != width:
        raise ConfigError(f"got {height} x {width}; this library has square images and patches only.")
    return height


class MissingLibrary(Exception):
    """A library that is not installed, or does not load."""


def import_library(name: str) -> tuple[Library, str]:
    """A library and its version; MissingLibrary if it cannot be imported."""
    library = LIBRARIES[name]
    declare_torchvision_operators()
    try:
        module = importlib.import_module(library.module)
    except ImportError as error:
        root = (error.name or "").partition(".")[0]
        why = "" if root in ("", library.module) else f" ({root} is missing)"
        raise MissingLibrary(f"not installed{why}: pip install 'vitrail[bench]'") from error
    try:
        return library, str(getattr(module, "__version__", None) or importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return library, ""


_DECLARED: list[torch.library.Library] = []
"""Declarations last as long as these objects."""


def declare_torchvision_operators() -> None:
    """Declare the operators without which torchvision (and so timm) does not import beside a CPU-only torch."""
    if _DECLARED or torch.version.cuda is not None:
        return
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


def is_model_name(model: str) -> bool:
    """Whether this is the name of an architecture, and not a checkpoint."""
    try:
        config_from_name(model)
    except NotFoundError:
        return False
    return True


def check_model(model: str) -> None:
    """Raise an error for a name that is neither an architecture nor a checkpoint."""
    if is_model_name(model):
        network_config(model, {})
    else:
        locate(model)


def network_config(model: str, changes: Mapping[str, Any]) -> NetConfig:
    """The config of a name, with the exact GELU, which all peers use."""
    config = config_from_name(model)
    same = {"activation": "gelu"} if isinstance(config, ViTConfig) and config.activation == "gelu-tanh" else {}
    return config.replace(**same, **{key: tuple(v) if isinstance(v, list) else v for key, v in changes.items()})


def random_network(config: NetConfig) -> tuple[Net, ModelInfo]:
    """A network with random weights, the same in every process."""
    net = build(config, seed=0)
    head = getattr(net, "head", None)
    if isinstance(head, nn.Linear):
        nn.init.normal_(head.weight, std=HEAD_STD, generator=torch.Generator().manual_seed(0))
    family = "ViT" if isinstance(config, ViTConfig) else "BiT"
    return net.eval(), ModelInfo(config=config, preprocess=default_preprocess(family, config, "timm"))


def peer_network(library: Library, ours: Net, info: ModelInfo) -> nn.Module:
    """A peer's network with the weights of ours."""
    if not isinstance(info.config, ViTConfig):
        raise ConfigError("the other libraries are compared with ViTs only.")
    torch.manual_seed(0)
    return library.build(ours, info, info.config).eval()
