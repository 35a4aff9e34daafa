"""Small Swin Transformers of timm, torchvision and transformers with random weights, and files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compare import randomized
from conftest import import_peer
from torch import Tensor, nn

DEPTHS, HEADS = (1, 2, 2, 2), (1, 2, 2, 4)
TIMM_SIZES: dict[str, Any] = {"embed_dim": 8, "depths": DEPTHS, "num_heads": HEADS, "num_classes": 5}
PEERS = ("timm v1", "timm v2", "torchvision v1", "torchvision v2", "transformers v1", "transformers v2")
TRAINING_SIZE = {"v1": 224, "v2": 256}


def timm_swin(version: str, **args: Any) -> nn.Module:
    """timm's network, for any image size at run time unless `args` say otherwise."""
    name = "swin_tiny_patch4_window7_224" if version == "v1" else "swinv2_tiny_window8_256"
    return import_peer("timm").create_model(name, **{"strict_img_size": False} | TIMM_SIZES | args)


def torchvision_swin(version: str, window: int = 0, **args: Any) -> nn.Module:
    module = import_peer("torchvision").models.swin_transformer
    parts: dict[str, Any] = {}
    if version == "v2":
        parts = {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": list(DEPTHS), "num_heads": list(HEADS), "num_classes": 5}
    side = window or (7 if version == "v1" else 8)
    return module.SwinTransformer(window_size=[side, side], **sizes | parts | args)


def transformers_swin(version: str, **args: Any) -> nn.Module:
    transformers = import_peer("transformers")
    sizes = {"embed_dim": 8, "depths": list(DEPTHS), "num_heads": list(HEADS), "num_labels": 5, "drop_path_rate": 0.0}
    if version == "v1":
        return transformers.SwinForImageClassification(transformers.SwinConfig(**sizes | args))
    defaults = {"image_size": 256, "window_size": 8}
    return transformers.Swinv2ForImageClassification(transformers.Swinv2Config(**sizes | defaults | args))


MAKERS = {"timm": timm_swin, "torchvision": torchvision_swin, "transformers": transformers_swin}


def peer_swin(peer: str, **args: Any) -> nn.Module:
    library, version = peer.split()
    return randomized(MAKERS[library](version, **args))


def save_peer(model: nn.Module, path: Path, **args: Any) -> Path:
    """Save as the network's library does; `args` are timm's model_args."""
    library = type(model).__module__.partition(".")[0]
    if library == "timm":
        import_peer("timm").models.save_for_hf(model, path, model_args=TIMM_SIZES | args, safe_serialization=True)
    elif library == "transformers":
        model.save_pretrained(path)  # type: ignore[operator]
    else:
        path = path.with_suffix(".pth")
        torch.save(model.state_dict(), path)
    return path


@torch.no_grad()
def peer_logits(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output.logits
