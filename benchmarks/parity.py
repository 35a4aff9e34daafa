"""Parity with other libraries: relative error of the logits against their own code.

    python benchmarks/parity.py

Each library builds a model with random weights (including norms and biases) and saves it in its own format; vitrail
loads that folder or file. Both compute the same random images, at the model's own size and, where the library supports
it, at a second, non-square size. Float32, CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import conftest  # noqa: F401 - makes torchvision importable with a CPU-only torch
import timm
import torchvision
import transformers
from compare import randomized, relative

from vitrail.weights import checkpoint

Peer = tuple[nn.Module, Path, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]
"""Model, what it was saved to, its forward pass, and its forward pass at another size, if it has one."""


def build_timm(arch: str, folder: Path, **args: Any) -> Peer:
    net = randomized(timm.create_model(arch, **args))
    timm.models.save_for_hf(net, folder, model_args=args, safe_serialization=True)
    if arch.startswith("resnetv2"):
        return net, folder, net, net
    if "_r" in arch and "_s" in arch and "reg" not in arch:
        return net, folder, net, None
    any_size = {"strict_img_size": False} if arch.startswith("swin") else {"dynamic_img_size": True}
    dynamic = timm.create_model(arch, **args, **any_size).eval()
    dynamic.load_state_dict(net.state_dict())
    return net, folder, net, dynamic


def build_transformers(name: str, folder: Path, output: str, **settings: Any) -> Peer:
    config = getattr(transformers, f"{name.removesuffix('Model').removesuffix('ForImageClassification')}Config", None)
    config = config or {"CLIPVisionModelWithProjection": transformers.CLIPVisionConfig}[name]
    net = randomized(getattr(transformers, name)(config(**settings)))
    net.save_pretrained(folder)

    def run(images: Tensor, **options: Any) -> Tensor:
        return getattr(net(images, **options), output)

    options = {} if name.startswith(("Swin", "DINOv3", "Tips")) else {"interpolate_pos_encoding": True}
    return net, folder, run, lambda images: run(images, **options)


def build_torchvision(name: str, folder: Path) -> Peer:
    net = randomized(getattr(torchvision.models, name)())
    folder.mkdir()
    torch.save(net.state_dict(), folder / "net.pth")
    return net, folder / "net.pth", net, net if name.startswith("swin") else None


B = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
ROWS: list[tuple[str, str, Callable[[Path], Peer]]] = [
    ("ViT-Ti/16", "timm", lambda f: build_timm("vit_tiny_patch16_224", f)),
    ("ViT-S/16", "timm", lambda f: build_timm("vit_small_patch16_224", f)),
    ("ViT-B/16", "timm", lambda f: build_timm("vit_base_patch16_224", f)),
    ("ViT-B/16", "transformers", lambda f: build_transformers("ViTForImageClassification", f, "logits")),
    ("ViT-B/16", "torchvision", lambda f: build_torchvision("vit_b_16", f)),
    ("R26+ViT-S/32", "timm", lambda f: build_timm("vit_small_r26_s32_224", f)),
    ("R50+ViT-B/16", "timm", lambda f: build_timm("vit_base_r50_s16_224", f)),
    ("DeiT-S/16-distilled", "timm", lambda f: build_timm("deit_small_distilled_patch16_224", f)),
    ("DeiT3-S/16", "timm", lambda f: build_timm("deit3_small_patch16_224", f)),
    ("DINOv2-S/14", "timm", lambda f: build_timm("vit_small_patch14_dinov2", f, img_size=224)),
    ("DINOv2-S/14-reg", "timm", lambda f: build_timm("vit_small_patch14_reg4_dinov2", f, img_size=224)),
    ("CLIP-B/32", "timm", lambda f: build_timm("vit_base_patch32_clip_quickgelu_224", f)),
    (
        "CLIP-B/32",
        "transformers",
        lambda f: build_transformers("CLIPVisionModelWithProjection", f, "image_embeds", **B, patch_size=32),
    ),
    ("SigLIP-B/16", "timm", lambda f: build_timm("vit_base_patch16_siglip_224", f)),
    ("DINOv3-S/16", "timm", lambda f: build_timm("vit_small_patch16_dinov3_qkvb", f)),
    (
        "DINOv3-S/16",
        "transformers",
        lambda f: build_transformers("DINOv3ViTModel", f, "pooler_output", num_register_tokens=4),
    ),
    ("TIPSv2-B/14", "timm", lambda f: build_timm("vit_base_patch14_reg1_tipsv2", f, img_size=224)),
    ("TIPSv2-B/14", "transformers", lambda f: build_transformers("Tipsv2VisionModel", f, "pooler_output")),
    ("Swin-T", "timm", lambda f: build_timm("swin_tiny_patch4_window7_224", f)),
    ("Swin-T", "transformers", lambda f: build_transformers("SwinForImageClassification", f, "logits")),
    ("Swin-T", "torchvision", lambda f: build_torchvision("swin_t", f)),
    ("SwinV2-T", "timm", lambda f: build_timm("swinv2_tiny_window8_256", f)),
    (
        "SwinV2-T",
        "transformers",
        lambda f: build_transformers("Swinv2ForImageClassification", f, "logits", image_size=256, window_size=8),
    ),
    ("SwinV2-T", "torchvision", lambda f: build_torchvision("swin_v2_t", f)),
    ("BiT-R50x1", "timm", lambda f: build_timm("resnetv2_50x1_bit", f)),
    ("BiT-R50x1", "transformers", lambda f: build_transformers("BitForImageClassification", f, "logits")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose names contain this")
    only = parser.parse_args().only
    print(f"{'model':22s} {'peer':14s} {'own size':>10s} {'160x192':>10s}   relative error of the logits")
    for name, peer, make in (row for row in ROWS if only in row[0]):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            _, path, run, other = make(Path(folder) / "saved")
            net, _ = checkpoint.read(path)
            images = torch.randn(2, 3, *net.config.image_size)
            own = f"{relative(net(images), run(images)):.1e}"
            resized = "-"
            if other is not None:
                patch = getattr(net.config, "patch_size", (32, 32))[0]
                size = (160, 192) if 160 % patch == 0 else (140, 196)
                images = torch.randn(2, 3, *size)
                try:
                    resized = f"{relative(net(images), other(images)):.1e}"
                except (TypeError, RuntimeError):  # this model has a fixed size, or fails there (transformers' Swin)
                    resized = "-"
        print(f"{name:22s} {peer:14s} {own:>10s} {resized:>10s}")


if __name__ == "__main__":
    main()
