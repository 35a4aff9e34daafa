"""vitrail's own format: every model round-trips unchanged."""

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


def write_model(path: Path, config: ViTConfig | BiTConfig = SMALL, **options: Any) -> tuple[Net, ModelInfo]:
    net = build(config, seed=0)
    info = ModelInfo(config=config, **{"preprocess": PreprocessConfig(), **options})
    checkpoint.write(net, info, path)
    return net, info


def state_bytes(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


@st.composite
def model_infos(draw: st.DrawFn) -> ModelInfo:
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
@given(info=model_infos(), name=st.sampled_from(["model", "model.safetensors"]), seed=st.integers(0, 99))
def test_any_model_round_trips_bit_for_bit(
    info: ModelInfo, name: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("native")
    net = build(info.config, seed=seed)
    checkpoint.write(net, info, folder / name)
    reloaded, reloaded_info = checkpoint.read(folder / name)
    assert reloaded_info == info
    assert reloaded.config == info.config
    assert list(reloaded.state_dict()) == list(net.state_dict())
    assert state_bytes(reloaded.state_dict()) == state_bytes(net.state_dict())
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_stored_dtype_is_kept_with_dtype_none(dtype: torch.dtype, tmp_path: Path) -> None:
    net = build(SMALL, seed=0).to(dtype)
    checkpoint.write(net, ModelInfo(config=SMALL, preprocess=PreprocessConfig()), tmp_path / "model")
    reloaded, info = checkpoint.read(tmp_path / "model", dtype=None)
    assert info.notes == ()
    for name, tensor in reloaded.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, net.state_dict()[name])


def test_single_file_has_the_complete_model_info(tmp_path: Path) -> None:
    _, info = write_model(tmp_path / "model", labels=("a", "b", "ç"), origin="somewhere")
    shutil.copy(tmp_path / "model" / "model.safetensors", tmp_path / "alone.safetensors")
    assert checkpoint.read(tmp_path / "alone.safetensors")[1] == info


def test_folder_has_the_model_info_as_readable_json(tmp_path: Path) -> None:
    _, info = write_model(tmp_path / "model", labels=("a", "b", "ç"))
    text = (tmp_path / "model" / "config.json").read_text(encoding="utf-8")
    assert json.loads(text) == info.to_dict()
    assert "ç" in text
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["vitrail"]) == info.to_dict()


def test_config_json_is_used_if_the_header_is_missing(tmp_path: Path) -> None:
    net, info = write_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({n: t.clone() for n, t in net.state_dict().items()}, file)
    assert checkpoint.read(tmp_path / "model")[1] == info
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(FormatError, match=r"but no model info; put its config\.json"):
        checkpoint.read(tmp_path / "model")


def change_info(path: Path, change: Any) -> None:
    """Changes the model info in the header of the file."""
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
        (lambda info: info["model"].update(num_heads=3), "not divisible by num_heads=3"),
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
def test_invalid_model_info_is_a_one_sentence_error(change: Any, message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.safetensors")
    change_info(tmp_path / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.read(tmp_path / "model.safetensors")
    assert "model.safetensors" in str(error.value)


def test_vitrail_format_supports_everything() -> None:
    assert NATIVE.unsupported_parts(ModelInfo(config=SMALL, preprocess=PreprocessConfig())) == []
    assert NATIVE.inexact_conventions(ModelInfo(config=SMALL, preprocess=PreprocessConfig())) == []


def test_existing_model_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    before = {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()}
    with pytest.raises(CheckpointError, match="already exists"):
        write_model(tmp_path / "model", BiTConfig(layers=(1,), width_factor=0.5, num_classes=2))
    assert {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()} == before
    net = build(SMALL, seed=1)
    checkpoint.write(net, ModelInfo(config=SMALL, preprocess=PreprocessConfig()), tmp_path / "model", overwrite=True)
    assert state_bytes(checkpoint.read(tmp_path / "model")[0].state_dict()) == state_bytes(net.state_dict())
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
