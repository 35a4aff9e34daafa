"""vitrail's own format: whatever a model is, it comes back as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from strategies import bit_configs, one_in, preprocess_configs, vit_configs
from torch import Tensor

from vitrail.config import BiTConfig, PreprocessConfig, ViTConfig
from vitrail.errors import CheckpointError, FormatError
from vitrail.models import Net, build
from vitrail.models.families import FAMILIES
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo, strip_local_folders
from vitrail.weights.native import NATIVE

SMALL = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=8, num_classes=3)


def saved(path: Path, config: ViTConfig | BiTConfig = SMALL, **options: Any) -> tuple[Net, ModelInfo]:
    net = build(config, seed=0)
    info = ModelInfo(config=config, **{"preprocess": PreprocessConfig(), **options})
    checkpoint.write(net, info, path)
    return net, info


def bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


@st.composite
def infos(draw: st.DrawFn) -> ModelInfo:
    config: ViTConfig | BiTConfig = draw(bit_configs()) if draw(one_in(10)) else draw(vit_configs())
    names = st.lists(st.text(max_size=20), min_size=config.num_classes, max_size=config.num_classes)
    return ModelInfo(
        config=config,
        preprocess=draw(preprocess_configs(config.channels)),
        labels=tuple(draw(names)) if draw(st.booleans()) else None,
        family=draw(st.sampled_from(sorted(FAMILIES))),
        task=draw(st.sampled_from(["classify", "embed"])),
        name=draw(st.text(max_size=10)),
        origin=strip_local_folders(draw(st.text(max_size=30))),
    )


@settings(max_examples=80)
@given(info=infos(), name=st.sampled_from(["model", "model.safetensors"]), seed=st.integers(0, 99))
def test_any_model_comes_back_bit_for_bit(
    info: ModelInfo, name: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("native")
    net = build(info.config, seed=seed)
    checkpoint.write(net, info, folder / name)
    again, heard = checkpoint.read(folder / name)
    assert heard == info
    assert again.config == info.config
    assert list(again.state_dict()) == list(net.state_dict())
    assert bits(again.state_dict()) == bits(net.state_dict())
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_precision_is_kept_where_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    net = build(SMALL, seed=0).to(dtype)
    checkpoint.write(net, ModelInfo(config=SMALL, preprocess=PreprocessConfig()), tmp_path / "model")
    again, info = checkpoint.read(tmp_path / "model", dtype=None)
    assert info.notes == ()
    for name, tensor in again.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, net.state_dict()[name])


def test_the_file_alone_is_complete(tmp_path: Path) -> None:
    _, info = saved(tmp_path / "model", labels=("a", "b", "ç"), origin="somewhere")
    shutil.copy(tmp_path / "model" / "model.safetensors", tmp_path / "alone.safetensors")
    assert checkpoint.read(tmp_path / "alone.safetensors")[1] == info


def test_a_folder_has_the_card_for_people_too(tmp_path: Path) -> None:
    _, info = saved(tmp_path / "model", labels=("a", "b", "ç"))
    text = (tmp_path / "model" / "config.json").read_text(encoding="utf-8")
    assert json.loads(text) == info.to_dict()
    assert "ç" in text
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["vitrail"]) == info.to_dict()


def test_without_its_header_the_card_beside_it_will_do(tmp_path: Path) -> None:
    net, info = saved(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({n: t.clone() for n, t in net.state_dict().items()}, file)
    assert checkpoint.read(tmp_path / "model")[1] == info
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(FormatError, match=r"but no model info; put its config\.json"):
        checkpoint.read(tmp_path / "model")


def rewritten(path: Path, change: Any) -> None:
    """Change the model info in the header."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    values = json.loads(header["vitrail"])
    values = change(values) or values
    save_file(tensors, path, {**header, "vitrail": values if isinstance(values, str) else json.dumps(values)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(version=3), "got version=3, expected at most 2"),
        (lambda info: info.pop("family") and None, "family is missing"),
        (lambda info: info["model"].update(hats=3), "has no field 'hats'; available: "),
        (lambda info: info["model"].update(num_heads=3), "not divisible into num_heads=3"),
        (lambda info: info.update(labels=["a"]), "1 class names were given for 3 outputs"),
        (lambda info: info.update(labels=7), "model.safetensors: read as vitrail"),
        (lambda info: info.update(task="dance"), "task='dance' is not one of"),
        (lambda info: info.update(family="Hats"), "family='Hats' is not one of"),
        (lambda info: "[]", "model.safetensors: read as vitrail"),
        (lambda info: "{", "model.safetensors: read as vitrail"),
        (lambda info: info["model"].update(width=16), "wrong shapes: .*patch.weight .8, 3, 4, 4. for .16, 3, 4, 4."),
        (lambda info: info["model"].update(depth=2), "missing blocks.1.norm1.weight"),
        (lambda info: info["model"].update(num_classes=0), "unexpected head.bias, head.weight"),
    ],
)
def test_a_card_that_does_not_fit_is_one_sentence(change: Any, message: str, tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors")
    rewritten(tmp_path / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.read(tmp_path / "model.safetensors")
    assert "model.safetensors" in str(error.value)


def test_everything_can_be_expressed() -> None:
    assert NATIVE.unsupported_parts(ModelInfo(config=SMALL, preprocess=PreprocessConfig())) == []
    assert NATIVE.inexact_conventions(ModelInfo(config=SMALL, preprocess=PreprocessConfig())) == []


def test_what_is_there_is_replaced_only_when_told(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    before = {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        saved(tmp_path / "model", BiTConfig(layers=(1,), width_factor=0.5, num_classes=2))
    assert {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()} == before
    net = build(SMALL, seed=1)
    checkpoint.write(net, ModelInfo(config=SMALL, preprocess=PreprocessConfig()), tmp_path / "model", overwrite=True)
    assert bits(checkpoint.read(tmp_path / "model")[0].state_dict()) == bits(net.state_dict())
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
