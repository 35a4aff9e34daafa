"""Preprocessing stated by a checkpoint, and defaults where it states none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compare import randomized
from conftest import import_peer
from PIL import Image
from sklearn.datasets import load_sample_image

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.data.preprocess import Preprocess
from vitrail.models import ViT
from vitrail.models.model_names import parse_name
from vitrail.weights import checkpoint, timm_config
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.timm import TIMM_FORMAT
from vitrail.weights.writers import write_torch

# (family, image size) -> (resize_to, interpolation, mean of the first channel), from each project's evaluation code.
# DeiT: int(size / 0.875). DeiT-III: crop ratio 1. MAE: 0.875 up to 224, then 1. DINO, DINOv2: 256, 224.
# CLIP: crop ratio 1. big_vision: resize_small(256), central_crop(224).
DEFAULTS = {
    ("DeiT", 224): (256, "bicubic", 0.485),
    ("DeiT", 384): (438, "bicubic", 0.485),
    ("DeiT3", 224): (224, "bicubic", 0.485),
    ("DeiT3", 384): (384, "bicubic", 0.485),
    ("MAE", 224): (256, "bicubic", 0.485),
    ("MAE", 448): (448, "bicubic", 0.485),
    ("DINO", 224): (256, "bicubic", 0.485),
    ("CLIP", 224): (224, "bicubic", 0.48145466),
    ("CLIP", 336): (336, "bicubic", 0.48145466),
    ("BV", 224): (256, "area", 0.5),
    ("ViT", 384): (None, "bilinear", 0.5),
    ("SigLIP", 384): (None, "bicubic", 0.5),
}


@pytest.mark.parametrize(("family", "size"), DEFAULTS)
def test_default_preprocessing_matches_the_code_of_each_family(family: str, size: int) -> None:
    preprocess = default_preprocess(family, ViTConfig(image_size=size, patch_size=16 if size % 16 == 0 else 14))
    assert (preprocess.resize_to, preprocess.interpolation, preprocess.mean[0]) == DEFAULTS[family, size]
    assert preprocess.image_size == (size, size)


def test_dinov2_default_image_size_is_224() -> None:
    preprocess = default_preprocess("DINOv2", parse_name("DINOv2-S/14"))
    assert (preprocess.image_size, preprocess.resize_to) == ((224, 224), 256)


def test_timm_default_crop_ratio_is_0_9_at_224_and_1_at_384() -> None:
    assert default_preprocess("ViT", ViTConfig(image_size=224), "timm").resize_to == 248
    assert default_preprocess("ViT", ViTConfig(image_size=384), "timm").resize_to == 384


@pytest.mark.peer
def test_preprocessing_matches_timm_for_every_tag() -> None:
    """Every distinct preprocessing among timm's ViT tags, on a real image."""
    timm = import_peer("timm")
    image = Image.fromarray(load_sample_image("china.jpg")[:301, :400])
    seen = set()
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit")
    names = [n for m in modules for n in timm.list_models(module=m, pretrained=True)]
    for name in [*names, *timm.list_models("resnetv2*_bit*", pretrained=True)]:
        cfg = timm.models.get_pretrained_cfg(name)
        data = timm.data.resolve_data_config({}, pretrained_cfg=cfg.to_dict())
        settings = tuple(sorted((k, str(v)) for k, v in data.items()))
        if settings in seen:
            continue
        seen.add(settings)
        size = data["input_size"][1:]
        config = SimpleNamespace(image_size=size, channels=3)
        timm_cfg = timm_config.TimmConfig(arch=name, pretrained_cfg=cfg.to_dict())
        ours, from_file = timm_cfg.preprocess(config, PreprocessConfig())  # type: ignore[arg-type]
        assert from_file, name
        theirs = timm.data.create_transform(**data)(image)
        assert torch.allclose(Preprocess(ours).prepare(image), theirs, atol=1e-6), name
    assert len(seen) > 15


def test_area_interpolation_averages_the_source_area_of_each_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 37, 3), dtype=np.uint8)
    config = PreprocessConfig(
        image_size=(16, 16), resize="short", resize_to=20, interpolation="area", crop_rounding="floor"
    )
    resized = Preprocess(config).pixels(pixels)
    height, width = round(20 * 50 / 37), 20
    full = np.zeros((height, width, 3))
    for y in range(height):
        for x in range(width):
            top, left = y * 50 / height, x * 37 / width
            total = np.zeros(3)
            for j in range(int(top), min(int(np.ceil(top + 50 / height)), 50)):
                for i in range(int(left), min(int(np.ceil(left + 37 / width)), 37)):
                    overlap_y = min(j + 1, top + 50 / height) - max(j, top)
                    overlap_x = min(i + 1, left + 37 / width) - max(i, left)
                    total += overlap_y * overlap_x * pixels[j, i]
            full[y, x] = total / (50 / height * 37 / width)
    start = (height - 16) // 2, (width - 16) // 2
    expected = full[start[0] : start[0] + 16, start[1] : start[1] + 16]
    assert resized.dtype == np.uint8
    assert np.abs(resized - np.floor(expected + 1e-4)).max() <= 1
    assert (resized == np.floor(expected + 1e-4)).mean() > 0.99


def test_passing_the_detected_family_changes_nothing(tmp_path: Path) -> None:
    config = ViTConfig(
        image_size=224, patch_size=16, width=192, depth=1, num_heads=3, mlp_dim=768, num_classes=5, activation="gelu"
    )
    net, path = randomized(ViT(config)), tmp_path / "bare.pth"
    write_torch(path, TIMM_FORMAT.table(config).write(net.state_dict(), config))  # timm's names, without sidecars
    detected, passed = checkpoint.read(path)[1], checkpoint.read(path, family="vit")[1]
    assert detected.preprocess.resize_to == 248
    assert detected.replace(notes=()) == passed
    assert len(detected.notes) == 1
    assert "Pass --family NAME" in detected.notes[0]
    deit = checkpoint.read(path, family="DeiT")[1]
    assert (deit.preprocess.mean[0], deit.preprocess.resize_to, deit.config.resample) == (0.485, 256, "huggingface")


def test_fine_tuned_clip_keeps_its_classes_in_timm_format(tmp_path: Path) -> None:
    config = parse_name("CLIP-B/32").replace(
        width=64, num_heads=1, mlp_dim=64, depth=1, num_classes=3, head_bias=True, image_size=64
    )
    info = ModelInfo(
        config=config,
        preprocess=default_preprocess("CLIP", config),
        labels=("a", "b", "c"),
        family="CLIP",
        task="classify",
    )
    checkpoint.write(randomized(ViT(config)), info, tmp_path / "clip", to="timm")
    reloaded = checkpoint.read(tmp_path / "clip")[1]
    assert (reloaded.task, reloaded.labels) == ("classify", ("a", "b", "c"))
