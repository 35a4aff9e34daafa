"""The recognition table's cases of timm: small models with random weights."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compare import randomized
from conftest import import_peer
from recognition_table import Case, Sample
from torch import nn

timm: Any = import_peer("timm")
RESNET = timm.models.resnetv2.ResNetV2

MODULES = (
    "vision_transformer",
    "deit",
    "vision_transformer_hybrid",
    "resnetv2",
    "eva",
    "beit",
    "vision_transformer_relpos",
    "vision_transformer_sam",
    "naflexvit",
    "swin_transformer",
    "swin_transformer_v2",
    "swin_transformer_v2_cr",
)
UNSUPPORTED_NAMES = (
    ("aimv2", "AIMv2"),
    ("beit3", "BEiT-3"),
    ("beit", "BEiT"),
    ("eva02", "EVA-02"),
    ("eva_giant", "EVA"),
    ("sapiens2", "Sapiens"),
    ("_rope_", "RoPE"),
    ("_pe_", "Perception Encoder"),
    ("relpos", "relative position"),
    ("_rpn", "residual post-norm"),
    ("samvit", "SAM"),
    ("naflex", "NaFlex"),
    ("_xp_|_pwee", "parallel"),
    ("_18x2", "parallel"),
    ("_dlittle|_dpwee|_dwee", "differential attention"),
    ("_mci_", "MobileCLIP"),
    (r"_resnet\d", "ResNet"),
    ("resnetv2", "ResNet"),
    ("test_vit3", "test_vit3"),
    ("swinv2_cr", "V2-CR"),
)
"""Pattern of an unsupported architecture, and the name that the error of a refusal must contain."""
ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu-tanh", "QuickGELU": "gelu-quick", "SiLU": "swiglu"}
FAMILIES = (("deit3", "DeiT3"), ("deit", "DeiT"), ("clip", "CLIP"), ("siglip", "SigLIP"), ("dinov2", "DINOv2"))


def is_supported(name: str) -> bool:
    return bool(re.match(r"resnetv2_\w+_bit", name)) or not any(
        re.search(pattern, name) for pattern, _ in UNSUPPORTED_NAMES
    )


def arguments(module: str, name: str) -> dict[str, Any]:
    """Arguments for a small model: two narrow blocks and a few patches."""
    if module == "resnetv2":
        return {"layers": (1, 1, 1, 1)}
    if module.startswith("swin"):
        return {"embed_dim": 8, "depths": (2, 1, 1, 2), "num_heads": (1, 1, 2, 2), "num_classes": 5}
    args: dict[str, Any] = {"depth": 2, "num_classes": 5}
    if module == "vision_transformer_hybrid":
        width_args = {} if "_mci_" in name else {"embed_dim": 128, "num_heads": 2}  # MobileCLIP's stem fixes the width
        return args | {"img_size": 64} | width_args
    match = re.search(r"patch(\d+)", name)
    patch_size = int(match[1]) if match else 16
    args |= {"embed_dim": 128, "num_heads": 2}
    if module != "naflexvit":
        args["img_size"] = 64 if module == "vision_transformer_sam" else 3 * patch_size
    if module == "vision_transformer_sam":
        args["global_attn_indexes"] = (1,)
    if "sapiens2" in name:
        args["num_kv_heads"] = (2, 1)
    return args


def cases() -> list[Case]:
    return [
        Case(
            group=f"timm {module}",
            name=name,
            name_pattern=next(
                (unsupported_name for pattern, unsupported_name in UNSUPPORTED_NAMES if re.search(pattern, name)),
                "never refused",
            ),
            make=partial(make_sample, module, name),
        )
        for module in MODULES
        for name in timm.list_models(module=module)
    ]


def narrow_resnet(layers: tuple[int, ...], width_factor: int = 1, **args: Any) -> nn.Module:
    """timm's ResNetV2 with one unit per stage and the fewest channels that its group norms allow."""
    stages = 2 if width_factor == 3 else len(layers)  # 3 x 32 channels, doubled at every stage
    stem_channels = 32 if width_factor == 3 else 32 // width_factor
    args |= {"stem_chs": stem_channels, "channels": tuple(stem_channels * 4 * 2**stage for stage in range(stages))}
    return RESNET(layers=(1,) * stages, width_factor=width_factor, **args)


def make_sample(module: str, name: str) -> Sample:
    args = arguments(module, name)
    with ExitStack() as stack:
        if is_supported(name) and module in ("resnetv2", "vision_transformer_hybrid"):
            stack.enter_context(patch.object(sys.modules[f"timm.models.{module}"], "ResNetV2", narrow_resnet))
            args.pop("layers", None)  # BiT's layers are not an argument
        if is_supported(name):
            model = randomized(timm.create_model(name, **args))
        else:  # refused for any weights
            with torch.device("meta"):
                model = timm.create_model(name, **args)
            model = model.to_empty(device="cpu").half().eval()
    size = args.get("img_size", 64)
    if module.startswith("swin"):
        size = model.pretrained_cfg["input_size"][-1]
    saved_args = {} if module == "resnetv2" else args  # the tensor shapes determine a BiT

    def save(folder: Path) -> None:
        timm.models.save_for_hf(model, folder, model_args=saved_args, safe_serialization=True)

    return Sample(
        model=model,
        forward=model,
        image_size=(size, size),
        save=save,
        options=known_options(name, model) if is_supported(name) else None,
    )


def known_options(name: str, model: nn.Module) -> dict[str, Any]:
    """Options that reading a bare file may require, taken from timm's modules."""
    family = next((family for pattern, family in FAMILIES if pattern in name), "ViT")
    if name.startswith("swinv2"):
        block = model.layers[0].blocks[0]  # type: ignore[index]
        trained = tuple(layer.blocks[0].attn.pretrained_window_size[0] for layer in model.layers)  # type: ignore
        size = model.pretrained_cfg["input_size"][-1]  # type: ignore[index]
        return {"window_size": block.window_size, "image_size": size, "pretrained_window_sizes": trained}
    if "dinov3" in name or "lingbot" in name:
        return {"pool": {"avg": "gap", "token": "token"}[str(model.global_pool)]}
    if not hasattr(model, "blocks"):
        return {"family": "BiT"}
    block: Any = model.blocks[0]  # type: ignore[index]
    return {
        "family": family,
        "activation": ACTIVATIONS[type(block.mlp.act).__name__],
        "num_heads": block.attn.num_heads,
    }
