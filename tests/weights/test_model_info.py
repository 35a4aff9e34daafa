"""ModelInfo: titles, and removal of local folders from the origin."""

from __future__ import annotations

import pytest

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.weights.model_info import ModelInfo, strip_local_folders

SMALL = ViTConfig(image_size=16, patch_size=8, num_classes=3, width=16, depth=1, num_heads=2, mlp_dim=16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/me/tiny.npz", "tiny.npz"),
        ("fine-tuned from /home/me/my files/tiny.safetensors", "fine-tuned from tiny.safetensors"),
        ("fine-tuned from fine-tuned from /home/me/a.pth", "fine-tuned from fine-tuned from a.pth"),
        ("trained on folder:/home/me/photos/", "trained on folder:photos"),
        ("~/photos", "photos"),
        ("../photos", "photos"),
        (r"C:\Users\me\photos", "photos"),
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("trained on hf:user/data", "trained on hf:user/data"),
        ("runs/photos", "runs/photos"),
        ("", ""),
    ],
)
def test_local_folders_are_removed_from_paths(text: str, expected: str):
    assert strip_local_folders(text) == strip_local_folders(strip_local_folders(text)) == expected
    info = ModelInfo(config=SMALL, preprocess=PreprocessConfig(image_size=16), origin=text)
    assert info.to_dict()["origin"] == expected


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({"name": "finetune-photos", "origin": "fine-tuned from tiny.safetensors"}, "finetune-photos"),
        ({"origin": "fine-tuned from /home/me/tiny.safetensors"}, "fine-tuned tiny"),
        ({"origin": "trained on digits"}, "ViT trained on digits"),
        ({"origin": "/home/me/tiny.safetensors"}, "tiny"),
        ({"origin": "timm/vit_tiny"}, "timm/vit_tiny"),
        ({"family": "DeiT"}, "DeiT"),
    ],
)
def test_title_is_the_models_own_name_not_its_origins(fields: dict[str, str], title: str):
    info = ModelInfo(config=SMALL, preprocess=PreprocessConfig(image_size=16), **fields)
    assert info.title == title
    assert ModelInfo.from_dict(info.to_dict()).title == title
