"""Files of format version 1 load and resume; newer versions are rejected."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from vitrail.config import (
    AugmentConfig,
    BiTConfig,
    DataConfig,
    PreprocessConfig,
    StemConfig,
    TrainConfig,
    ViTConfig,
    format_version,
)
from vitrail.config.format_version import RENAMED, upgrade
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.errors import FormatError, VitrailError
from vitrail.weights.model_info import ModelInfo

V1 = Path(__file__).parents[1] / "golden" / "format_v1"


def read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((V1 / name).read_text())
    return values


@pytest.mark.parametrize(
    ("section", "config"),
    [
        ("run", TrainConfig),
        ("run.data", DataConfig),
        ("run.augment", AugmentConfig),
        *((f"run.{name}", type(getattr(TrainConfig(model=ViTConfig()), name)))
          for name in ("classify", "masked_patch", "distill", "optim", "schedule")),
        ("preprocess", PreprocessConfig),
        ("vit", ViTConfig),
        ("stem", StemConfig),
        ("bit", BiTConfig),
    ],
)  # fmt: skip
def test_every_renamed_field_exists(section: str, config: type) -> None:
    names = {field.name for field in fields(config)}
    assert set(RENAMED[section].values()) <= names
    assert not set(RENAMED[section]) & names


def test_multi_label_model_gives_the_recorded_scores() -> None:
    """Ignoring `several`, the old name of `multi_label`, would replace the sigmoid with a softmax."""
    vit, recorded = vitrail.load(V1 / "multi-label"), read("record.json")["multi-label"]
    assert vit.info.multi_label
    assert (vit.config.num_registers, vit.config.patch_size, vit.config.drop_path) == (1, (8, 16), 0.1)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(vit.net.eval()(images), torch.tensor(recorded["logits"]), rtol=1e-5, atol=1e-6)
    pixels = (images[0].permute(1, 2, 0).numpy() * 255).astype("uint8")
    predictions = vit.predict([pixels])[0]
    assert [p.label for p in predictions] == [label for label, _ in recorded["predict"]]
    assert [p.score for p in predictions] == pytest.approx([score for _, score in recorded["predict"]], rel=1e-4)


@pytest.mark.parametrize(("name", "width_factor"), [("hybrid", 0.5), ("bit", 0.5)])
def test_configs_of_hybrid_and_bit_are_upgraded(name: str, width_factor: float) -> None:
    info = ModelInfo.from_dict(read(f"{name}/config.json"))
    config = info.config.stem if isinstance(info.config, ViTConfig) else info.config
    assert config is not None
    assert config.width_factor == width_factor
    assert (info.config.num_classes, info.preprocess.image_size, info.preprocess.crop_rounding) == (
        2,
        (32, 32),
        "floor",
    )
    assert ModelInfo.from_dict(info.to_dict()).to_dict() == info.to_dict()


def test_resumed_run_reaches_the_recorded_weights(tmp_path: Path) -> None:
    """Up to rounding, which Adam amplifies where gradients are close to zero: the recording is of another machine."""
    folder = tmp_path / "run"
    shutil.copytree(V1 / "run", folder)
    vitrail.train(out=folder, resume=True, report=False)
    weights, recorded = load_file(folder / "model" / "model.safetensors"), load_file(V1 / "finished.safetensors")
    assert weights.keys() == recorded.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, recorded[name], rtol=0, atol=2e-3)


def test_overrides_of_comparison_runs_are_upgraded() -> None:
    old = read("run/config.json") | {"compare": ["model.heads=1", "batch=8", "optim.clip=none", "data.bad_share=0.5"]}
    config = TrainConfig.from_dict(upgrade("run", old))
    assert config.compare == ("model.num_heads=1", "batch_size=8", "optim.grad_clip=none", "data.max_bad_fraction=0.5")


@pytest.mark.parametrize("document", ["run", "model", "checkpoint", "result", "export", "features", "index", "parts"])
def test_newer_version_is_rejected(document: format_version.Document) -> None:
    with pytest.raises(FormatError, match="=3, expected at most 2; a newer vitrail wrote this file"):
        upgrade(document, {format_version.KEYS[document]: 3})


def test_newer_run_is_a_one_sentence_error(tmp_path: Path) -> None:
    shutil.copytree(V1 / "run", tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(read("run/config.json") | {"format_version": 3}))
    with pytest.raises(VitrailError, match="a newer vitrail wrote this file"):
        vitrail.train(out=tmp_path / "run", resume=True, report=False)


@pytest.mark.parametrize("version", [1, 2])
def test_export_metadata_with_the_old_model_info_key_are_read(version: int) -> None:
    info = ModelInfo(config=ViTConfig(), preprocess=PreprocessConfig())
    values = ExportMetadata(info=info, to="onnx").to_dict()
    old = {"card" if name == "model_info" else name: value for name, value in values.items()} | {"version": version}
    assert ExportMetadata.from_json(json.dumps(old)) == ExportMetadata(info=info, to="onnx")
    assert upgrade("export", old) == upgrade("export", values)
