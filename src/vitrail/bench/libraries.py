"""The libraries that are compared, each with the function that builds its network for a config of ours."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitrail.bench import peer_networks as peers
from vitrail.bench.peer_networks import is_plain_vit, is_swin, is_vit
from vitrail.config import NetConfig, SwinConfig, ViTConfig
from vitrail.errors import ConfigError, NotFoundError
from vitrail.models import Net, build
from vitrail.models.model_names import config_from_name
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.locate import locate
from vitrail.weights.model_info import ModelInfo

HEAD_STD = 0.02
"""Standard deviation of a random head: with the zeros of a new head, all outputs would be equal."""


@dataclass(frozen=True)
class Library:
    """Another library: its module, and the function that builds its network with the weights of ours."""

    module: str
    build: Callable[[Net, ModelInfo], nn.Module]
    has: Callable[[NetConfig], bool] = is_plain_vit
    """Whether the library has such a network, and it is built here."""
    same_function: bool = True
    """Whether that network computes what ours does."""


LIBRARIES: Mapping[str, Library] = {
    "timm": Library("timm", peers.timm_network, lambda config: is_swin(config) or is_vit(config)),
    "timm-fused": Library("timm", peers.timm_fused_network, lambda c: isinstance(c, SwinConfig) and c.version == 1),
    "torchvision": Library("torchvision", peers.torchvision_network, lambda c: is_swin(c) or is_plain_vit(c)),
    "transformers": Library("transformers", peers.transformers_network, lambda c: is_swin(c) or is_vit(c)),
    "vit-pytorch": Library("vit_pytorch", peers.vit_pytorch_network, same_function=False),
}
"""timm-fused: timm with the switch for its experimental fused attention, which its Swin Transformers (V1) need."""


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
    """The config of a name, with the exact GELU, which all peers use, and with a head."""
    config = config_from_name(model)
    same: dict[str, Any] = {}
    if isinstance(config, ViTConfig) and config.activation == "gelu-tanh":
        same["activation"] = "gelu"
    if not config.num_classes:
        same["num_classes"] = 1000
    return config.replace(**same, **{key: tuple(v) if isinstance(v, list) else v for key, v in changes.items()})


@torch.no_grad()
def random_network(config: NetConfig) -> tuple[Net, ModelInfo]:
    """A network with random weights, the same in every process.

    What starts at zero, or almost, would hide differences: heads are random, and the scales of branches are 1.
    """
    net = build(config, seed=0)
    head = getattr(net, "head", None)
    if isinstance(head, nn.Linear):
        nn.init.normal_(head.weight, std=HEAD_STD, generator=torch.Generator().manual_seed(0))
    for name, parameter in net.named_parameters():
        if name.endswith((".scale1", ".scale2", ".norm1.weight", ".norm2.weight")):
            nn.init.ones_(parameter)
    return net.eval(), ModelInfo(config=config, preprocess=default_preprocess(_family(config), config, "timm"))


def _family(config: NetConfig) -> str:
    if isinstance(config, SwinConfig):
        return "Swin" if config.version == 1 else "SwinV2"
    if isinstance(config, ViTConfig):
        return "DINOv3" if config.position == "rope-2d" else "ViT"
    return "BiT"


def libraries_for(model: str) -> tuple[str, ...]:
    """The libraries that have a network of this name; all of them for a checkpoint."""
    if not is_model_name(model):
        return tuple(LIBRARIES)
    config = network_config(model, {})
    return tuple(name for name, library in LIBRARIES.items() if library.has(config))


def peer_network(library: Library, ours: Net, info: ModelInfo) -> nn.Module:
    """A peer's network with the weights of ours."""
    if not library.has(info.config):
        raise ConfigError(f"{library.module} has no such network, or vitrail cannot build it there.")
    torch.manual_seed(0)
    return library.build(ours, info).eval()
