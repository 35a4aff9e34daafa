"""The networks of other libraries, with the weights of ours."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import NetConfig, SwinConfig, ViTConfig, pair
from vitrail.errors import ConfigError
from vitrail.models import Net
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo

# B images, D width, K classes


def is_swin(config: NetConfig) -> bool:
    return isinstance(config, SwinConfig)


def is_plain_vit(config: NetConfig) -> bool:
    """Whether this is the paper's network, with learned positions and one class token."""
    return isinstance(config, ViTConfig) and config.position == "learned-1d" and config.layer_scale is None


def is_vit(config: NetConfig) -> bool:
    """Whether this is the paper's network, or a later one such as DINOv3's."""
    return isinstance(config, ViTConfig)


def timm_network(ours: Net, info: ModelInfo) -> nn.Module:
    import timm

    config = info.config
    if not is_plain_vit(config):
        with _written(ours, info, "timm") as folder:
            net: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
        return net
    assert isinstance(config, ViTConfig)
    net = timm.create_model(
        "vit_base_patch16_224", img_size=pair(config.image_size), patch_size=pair(config.patch_size),
        embed_dim=config.width, depth=config.depth, num_heads=config.num_heads, num_classes=config.num_classes,
        mlp_ratio=config.mlp_dim / config.width,
    )  # fmt: skip
    return _with_weights(net, "timm", ours, info)


def timm_fused_network(ours: Net, info: ModelInfo) -> nn.Module:
    """timm's network with its experimental fused attention."""
    from timm.layers import set_fused_attn

    set_fused_attn(True, experimental=True)
    return timm_network(ours, info)


def torchvision_network(ours: Net, info: ModelInfo) -> nn.Module:
    from torchvision.models import VisionTransformer, swin_transformer

    config = info.config
    if isinstance(config, SwinConfig):
        parts: dict[str, Any] = {}
        if config.version == 2:
            parts = {
                "block": swin_transformer.SwinTransformerBlockV2,
                "downsample_layer": swin_transformer.PatchMergingV2,
            }
        net = swin_transformer.SwinTransformer(
            list(pair(config.patch_size)), config.width, list(config.depths), list(config.num_heads),
            list(pair(config.window_size)), config.mlp_ratio, stochastic_depth_prob=0.0,
            num_classes=config.num_classes, **parts,
        )  # fmt: skip
        with _written(ours, info, "torchvision", ".pth") as file:
            net.load_state_dict(torch.load(file, weights_only=True))
        return net
    assert isinstance(config, ViTConfig)
    net = VisionTransformer(
        image_size=_side(config.image_size), patch_size=_side(config.patch_size), num_layers=config.depth,
        num_heads=config.num_heads, hidden_dim=config.width, mlp_dim=config.mlp_dim, num_classes=config.num_classes,
    )  # fmt: skip
    return _with_weights(net, "torchvision", ours, info)


class Logits(nn.Module):
    """A network of transformers with plain logits as its output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images).logits
        return logits


class WithHead(nn.Module):
    """A network of transformers without a classifier, and ours after it."""

    def __init__(self, net: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.net(images).pooler_output)
        return logits


def transformers_network(ours: Net, info: ModelInfo) -> nn.Module:
    import transformers

    if is_swin(info.config) or is_plain_vit(info.config):
        with _written(ours, info, "huggingface") as folder:
            return Logits(_sdpa(transformers.AutoModelForImageClassification, folder))
    head, headless = copy.deepcopy(ours.head), ours.with_classes(0)
    assert isinstance(head, nn.Module)
    with _written(headless, info.replace(config=headless.config, labels=None, task="embed"), "huggingface") as folder:
        return WithHead(_sdpa(transformers.AutoModel, folder), head)


def _sdpa(model_class: Any, folder: Path) -> nn.Module:
    """A network of transformers that runs scaled dot-product attention, where its code can."""
    try:
        net: nn.Module = model_class.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    except ValueError:
        net = model_class.from_pretrained(folder, dtype=torch.float32)
    return net


def vit_pytorch_network(ours: Net, info: ModelInfo) -> nn.Module:
    from vit_pytorch import ViT

    config = info.config
    assert isinstance(config, ViTConfig)
    return ViT(
        image_size=_side(config.image_size), patch_size=_side(config.patch_size), num_classes=config.num_classes,
        dim=config.width, depth=config.depth, heads=config.num_heads, mlp_dim=config.mlp_dim,
        dim_head=config.width // config.num_heads,
    )  # fmt: skip


def _with_weights(net: nn.Module, to: str, ours: Net, info: ModelInfo) -> nn.Module:
    """Load the weights of our network, under the names of another library's format."""
    tensors = checkpoint.format_for(to, info).table(info.config).write(ours.state_dict(), info.config)
    net.load_state_dict(tensors)
    return net


@contextmanager
def _written(ours: Net, info: ModelInfo, to: str, suffix: str = "") -> Iterator[Path]:
    """A temporary file or folder of our network in another library's format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{suffix}"
        checkpoint.write(ours, info, path, to=to, approximate=True)
        yield path


def _side(size: Any) -> int:
    height, width = pair(size)
    if height != width:
        raise ConfigError(f"got {height} x {width}; this library has square images and patches only.")
    return height
