"""`vitrail convert`: every format, errors, and atomic writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from small_models import model, small

import vitrail as package
from vitrail.config import SwinConfig
from vitrail.weights import checkpoint, writers
from vitrail.weights.torchvision import TORCHVISION

WRITABLE = list(dict.fromkeys(f.name for f in checkpoint.FORMATS if f.write is not None))


def relative_paths(folder: Path) -> list[str]:
    """Relative paths of everything in a folder, hidden files included."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Format -> a checkpoint that the format can represent."""
    folder = tmp_path_factory.mktemp("sources")
    configs = {
        "google": small(activation="gelu-tanh", resample="google"),
        "big_vision": small(activation="gelu-tanh", resample="google", position_on_class=False),
        "microsoft": SwinConfig(
            image_size=32,
            width=8,
            depths=(2, 2),
            num_heads=(1, 2),
            window_size=4,
            num_classes=5,
            window_rule="microsoft",
            uncovered="refuse",
        ),
    }
    for name in WRITABLE:
        model(configs.get(name, small())).save(folder / name)
    return {name: folder / name for name in WRITABLE}


@pytest.mark.parametrize("to", WRITABLE)
def test_each_format_reads_back_identical_tensors(vitrail, sources, tmp_path, to):
    suffix = {
        "google": ".npz",
        "big_vision": ".npz",
        "facebook": ".pth",
        "torchvision": ".pth",
        "microsoft": ".pth",
    }.get(to, "")
    target = tmp_path / f"out{suffix}"
    result = vitrail("convert", sources[to], target, "--to", to)
    assert result.status == 0, result.err
    assert f"{to} format, " in result.out
    assert "identical when read back" in result.out
    source_tensors, converted_tensors = (package.load(path).net.state_dict() for path in (sources[to], target))
    assert source_tensors.keys() == converted_tensors.keys()
    assert all(torch.equal(source_tensors[name], converted_tensors[name]) for name in source_tensors)


def test_help_names_every_format(process):
    words = process("convert", "--help").out.replace("\n", " ").replace("│", " ").split()
    assert set(WRITABLE) <= {word.strip(".,") for word in words}


def test_json_is_the_only_standard_output(vitrail, weights, tmp_path):
    result = vitrail("convert", weights, tmp_path / "out", "--to", "timm", "--json")
    report = json.loads(result.out)
    assert report["format"] == "timm"
    assert report["identical"] is True
    assert report["tensors"] == len(package.load(weights).net.state_dict())
    assert report["drift"] == report["lost"] == []


def test_unsupported_feature_of_a_format_is_named(vitrail, tmp_path):
    model(small(num_registers=4)).save(tmp_path / "registers")
    result = vitrail("convert", tmp_path / "registers", tmp_path / "out.pth", "--to", "torchvision")
    assert (result.status, result.out) == (1, "")
    assert result.errors == ["torchvision's format cannot represent registers."]
    assert relative_paths(tmp_path) == ["registers", "registers/config.json", "registers/model.safetensors"]


def test_approximate_conversion_needs_an_option(vitrail, tmp_path):
    model(small(activation="gelu-tanh")).save(tmp_path / "tanh")
    target = tmp_path / "out.pth"
    result = vitrail("convert", tmp_path / "tanh", target, "--to", "torchvision")
    assert result.status == 1
    assert "Pass --approximate (approximate=True) to write it anyway." in result.errors[0]
    assert not target.exists()
    result = vitrail("convert", tmp_path / "tanh", target, "--to", "torchvision", "--approximate")
    assert result.status == 0
    assert any("cannot state the tanh form of GELU" in note for note in result.notes)


def test_settings_the_written_file_does_not_store_are_noted(vitrail, weights, tmp_path):
    result = vitrail("convert", weights, tmp_path / "out.pth", "--to", "torchvision")
    assert any("does not store class names" in note for note in result.notes)
    assert any("does not store preprocessing (resize=squash, " in note for note in result.notes)
    assert vitrail("convert", weights, tmp_path / "timm", "--to", "timm").err == ""


def test_settings_a_bare_file_does_not_store_can_be_passed(vitrail, tmp_path):
    """torchvision's tensors do not determine a non-square grid or an unusual head width."""
    wide = model(small(image_size=(32, 64), num_heads=4))
    bare = tmp_path / "bare.pth"
    torch.save(TORCHVISION.table(wide.config).write(wide.net.state_dict(), wide.config), bare)
    result = vitrail("convert", bare, tmp_path / "again")
    assert result.status == 1
    assert "pass image_size=(height, width)" in result.errors[0]
    result = vitrail("convert", bare, tmp_path / "again", "--set", "num_heads=4", "--set", "image_size=32x64")
    assert result.status == 0, result.err
    for loaded in (package.load(tmp_path / "again"), package.load(bare, image_size=(32, 64), num_heads=4)):
        assert (loaded.config.num_heads, loaded.config.image_size) == (4, (32, 64))


def test_unusual_num_heads_need_an_option_if_not_stored(vitrail, tmp_path):
    model(small(width=96, num_heads=4)).save(tmp_path / "odd")
    assert vitrail("convert", tmp_path / "odd", tmp_path / "x.pth", "--to", "facebook").status == 1
    result = vitrail("convert", tmp_path / "odd", tmp_path / "x.pth", "--to", "facebook", "--approximate")
    assert result.status == 0, result.err
    assert any("num_heads=4" in note for note in result.notes)


def test_existing_destination_is_not_overwritten(vitrail, weights, tmp_path):
    (tmp_path / "file.pth").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_text("precious")
    for name in ("file.pth", "folder"):
        result = vitrail("convert", weights, tmp_path / name, "--to", "facebook" if "." in name else "timm")
        assert result.status == 1
        assert result.errors[0].endswith("already exists; choose another name, or replace it with --overwrite.")
    assert (tmp_path / "file.pth").read_text() == (tmp_path / "folder" / "model.safetensors").read_text() == "precious"


def test_overwrite_replaces_only_a_checkpoint(vitrail, weights, tmp_path):
    target = tmp_path / "out"
    vitrail("convert", weights, target, "--to", "timm")
    assert vitrail("convert", weights, target, "--to", "huggingface", "--overwrite").status == 0
    assert relative_paths(target) == ["config.json", "model.safetensors", "preprocessor_config.json"]
    (target / "holiday.jpg").write_text("precious")
    result = vitrail("convert", weights, target, "--overwrite")
    assert result.status == 1
    assert "it also contains holiday.jpg" in result.errors[0]
    assert (target / "holiday.jpg").exists()


@pytest.mark.parametrize("to", ["timm", "facebook"])
def test_failed_write_leaves_no_files(vitrail, weights, tmp_path, monkeypatch, to):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writers, "_little_endian", fail)
    monkeypatch.setattr(writers.torch, "save", fail)
    result = vitrail("convert", weights, tmp_path / "out", "--to", to)
    assert result.status == 1
    assert "full" in result.errors[0]
    assert "No partial file was left." in result.errors[0]
    assert relative_paths(tmp_path) == []


@pytest.mark.parametrize("to", ["timm", "facebook"])
def test_interrupted_write_keeps_the_existing_files(vitrail, weights, tmp_path, monkeypatch, to):
    target = tmp_path / "out"
    vitrail("convert", weights, target, "--to", to)
    before = relative_paths(tmp_path)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writers, "_little_endian", interrupt)
    monkeypatch.setattr(writers.torch, "save", interrupt)
    assert vitrail("convert", weights, target, "--to", to, "--overwrite").status == 130
    assert relative_paths(tmp_path) == before


def test_checkpoint_can_be_converted_in_place(vitrail, weights, tmp_path):
    folder = tmp_path / "same"
    shutil.copytree(weights, folder)
    result = vitrail("convert", folder, folder, "--to", "timm", "--overwrite")
    assert result.status == 0, result.err
    assert package.load(folder).labels == package.load(weights).labels


def test_missing_source_is_a_one_sentence_error(vitrail, tmp_path):
    result = vitrail("convert", tmp_path / "nothing.pth", tmp_path / "out")
    assert result.status == 1
    assert "no such file" in result.errors[0]


def test_damaged_source_is_named(vitrail, weights, tmp_path):
    data = (weights / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[: len(data) // 2])
    result = vitrail("convert", tmp_path / "cut.safetensors", tmp_path / "out")
    assert result.status == 1
    assert "cut.safetensors is truncated or damaged" in result.errors[0]
    assert relative_paths(tmp_path) == ["cut.safetensors"]
