"""Sizes stated by a file are checked against its tensors before a network is built."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import FORMATS, model, small

import vitrail
from vitrail.config import BiTConfig
from vitrail.errors import FormatError
from vitrail.weights import checkpoint, native

pytestmark = pytest.mark.usefixtures("quick_disk")

BIT = BiTConfig(image_size=32, num_classes=5, layers=(1, 1), width_factor=0.5)
HUGE = 10**7


def check_refused(path: Path, message: str) -> None:
    """Checks that reading is refused with this message before a network is built."""

    def build(config: Any, **options: Any) -> None:
        raise AssertionError("a network was built")

    with pytest.MonkeyPatch.context() as patched:
        for module in (checkpoint, native):
            patched.setattr(module, "build", build)
        with pytest.raises(FormatError, match=message):
            vitrail.load(path)


def save_with_info(path: Path, vit: vitrail.Model, part: str, **changes: Any) -> Path:
    """Saves a model in vitrail's format and changes its stored model info."""
    vit.save(path)
    with safe_open(path, "pt") as file:
        info = json.loads(file.metadata()["vitrail"])
    info[part] |= changes
    save_file(load_file(path), path, {"vitrail": json.dumps(info | {"labels": None})})
    return path


HUGE_SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "depth": ({"depth": HUGE}, r"got depth=10000000, expected at most the file's number of tensors, \d+\."),
    "width": ({"width": 2**40}, r"got depth=2, width=1099511627776 and mlp_dim=256: .* but the file has"),
    "mlp": ({"mlp_dim": 10**18}, r"and mlp_dim=1000000000000000000: at least .* weights"),
    "classes": ({"num_classes": 10**18}, r"got num_classes=1000000000000000000: "),
    "channels": ({"channels": 10**15}, r"got patch_size=8x8 and channels=1000000000000000: "),
    "pre_logits": ({"pre_logits": 10**15}, r"got pre_logits=1000000000000000: "),
    "registers": ({"num_registers": 10**9}, r"got 1,000,000,016 patches and registers, expected at most 1,048,576\."),
    "image": ({"image_size": 4_000_000}, r"got image_size=4000000x4000000, expected at most 67,108,864 pixels\."),
    "a long image": (
        {"image_size": [4_000_000, 8]},
        r"got image_size=4000000x8 of patch_size=8x8: at least 64,000,000 weights",
    ),
    "patch": ({"image_size": 4096, "patch_size": 1}, r"got 16,777,216 patches and registers"),
    "stem": ({"stem": {"layers": [HUGE]}, "patch_size": 2}, r"got stem.layers=\(10000000,\), expected at most"),
    "stem's width": (
        {"stem": {"layers": [1], "width_factor": 1e9}, "patch_size": 2},
        r"got stem.layers=\(1,\) and stem.width_factor=1e\+09",
    ),
}


@pytest.mark.parametrize("name", sorted(HUGE_SIZES))
def test_model_info_with_huge_sizes_is_refused_before_building(name: str, tmp_path: Path) -> None:
    changes, message = HUGE_SIZES[name]
    check_refused(save_with_info(tmp_path / "a.safetensors", model(small()), "model", **changes), message)


@pytest.mark.parametrize("position", ["none", "sincos-2d", "rope-2d"])
@pytest.mark.parametrize("part", ["model", "preprocess"])
def test_huge_image_size_is_refused_without_position_tensors(position: Any, part: str, tmp_path: Path) -> None:
    vit = model(small(position=position, class_token=False, pool="gap"))
    check_refused(
        save_with_info(tmp_path / "a.safetensors", vit, part, image_size=4_000_000),
        "image_size=4000000x4000000, expected at most 67,108,864 pixels",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [HUGE, 1]}, r"got layers=\(10000000, 1\), expected at most the file's number of tensors"),
        ({"layers": [1] * 200}, r"got layers=.*: at least .* weights, but the file has"),
        ({"width_factor": 1e12}, r"and width_factor=1e\+12: "),
        ({"num_classes": 10**12}, r"got num_classes=1000000000000: "),
        ({"channels": 10**12}, r"got channels=1000000000000: "),
    ],
)
def test_resnet_with_huge_sizes_is_refused_before_building(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(save_with_info(tmp_path / "a.safetensors", model(BIT), "model", **changes), message)


BLOCK = re.compile(r"((?:blocks?|layers?|encoderblock|encoder_layer|stages)[._]?)1\b|(/block)1(?=/)")


WRITTEN = [("vit", to) for to in sorted(FORMATS) if to != "big_vision"]
WRITTEN += [("bit", to) for to in ("big_vision", "google", "huggingface", "vitrail")]


@pytest.mark.parametrize(("kind", "to"), WRITTEN)
def test_huge_block_index_is_refused_before_building(kind: str, to: str, tmp_path: Path) -> None:
    """In formats without a config, the depth is inferred from the names."""
    vit, path = model(small() if kind == "vit" else BIT), tmp_path / FORMATS[to]
    vit.save(path, to=to, approximate=True)
    add_block(path / "model.safetensors" if path.is_dir() else path)
    check_refused(path, r"got a tensor '.*10000000.*' among \d+ tensors, expected block indices from 0")


def add_block(path: Path) -> None:
    """Adds a tensor of a block with a huge index to a weights file."""
    metadata = {}
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
    tensors: dict[str, Any]
    if path.suffix == ".npz":
        tensors = dict(np.load(path))
    else:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    name = next(name for name in tensors if BLOCK.search(name))
    tensors[BLOCK.sub(rf"\g<1>\g<2>{HUGE}", name, count=1)] = tensors[name] + 0
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    elif path.suffix == ".safetensors":
        save_file(tensors, path, metadata)
    else:
        torch.save(tensors, path)


@pytest.mark.parametrize(
    ("to", "field"), [("timm", "depth"), ("timm", "embed_dim"), ("huggingface", "num_hidden_layers")]
)
def test_config_json_with_huge_sizes_is_refused_before_building(to: str, field: str, tmp_path: Path) -> None:
    model(small()).save(tmp_path / "model", to=to)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    (config["model_args"] if to == "timm" else config)[field] = HUGE
    path.write_text(json.dumps(config))
    check_refused(tmp_path / "model", f"{field}=10000000")


def test_matching_sizes_are_built(tmp_path: Path) -> None:
    path = save_with_info(tmp_path / "a.safetensors", model(small()), "model")
    assert vitrail.load(path).config == small()
    with pytest.raises(AssertionError, match="a network was built"):
        check_refused(path, "never")
