"""Folders, shards, and the JSON sidecars of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import CheckpointError, NotFoundError
from vitrail.weights.archive import Archive, open_archive

TENSORS = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(5)}
CONFIG = {"architecture": "vit_tiny_patch16_224"}


def assert_all_tensors(archive: Archive) -> None:
    assert set(archive.tensors) == set(TENSORS)
    assert all(torch.equal(archive.tensors[n], t) and archive.shape(n) == t.shape for n, t in TENSORS.items())


def write_shards(folder: Path, kind: str = "safetensors", count: int = 2) -> Path:
    """Writes `TENSORS` in `count` files with an index, as transformers does; returns the index."""
    stem, suffix = {"safetensors": ("model", "safetensors"), "torch": ("pytorch_model", "bin")}[kind]
    write: Callable[[dict[str, Tensor], Path], None] = save_file if kind == "safetensors" else torch.save
    weight_map = {}
    for number in range(count):
        file = f"{stem}-{number + 1:05}-of-{count:05}.{suffix}"
        tensors = dict(list(TENSORS.items())[number::count])
        write(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("source", ["index", "folder"])
def test_shards_are_read_as_one_archive(tmp_path: Path, kind: str, source: str):
    index = write_shards(tmp_path, kind)
    archive = open_archive(index if source == "index" else tmp_path)
    assert_all_tensors(archive)
    assert archive.metadata == {"total_size": "60"}
    assert archive.notes == ["read 2 shards"]


def test_a_missing_shard_is_named(tmp_path: Path):
    index = write_shards(tmp_path, count=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not in its folder: model-00002-of-00003\.safetensors; download"):
        open_archive(index)


def test_a_shard_without_its_tensor_is_named(tmp_path: Path):
    index = write_shards(tmp_path)
    save_file({"t0": TENSORS["t0"]}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lists t2, t4 in model-00001-of-00002\.safetensors, which does not contain them"
    ):
        open_archive(index)


def test_a_truncated_shard_is_named(tmp_path: Path):
    index = write_shards(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated"):
        open_archive(index)


def test_single_shard_without_its_index_is_refused(tmp_path: Path):
    write_shards(tmp_path, "safetensors")
    write_shards(tmp_path, "torch")
    for name in ("model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"):
        with pytest.raises(CheckpointError, match=r"one shard of 2; pass the folder or its \.index\.json"):
            open_archive(tmp_path / name)
    save_file(TENSORS, tmp_path / "model-00001-of-00001.safetensors")
    assert_all_tensors(open_archive(tmp_path / "model-00001-of-00001.safetensors"))


def test_tensor_missing_from_the_index_is_ignored_with_a_note(tmp_path: Path):
    index = write_shards(tmp_path, count=1)
    save_file(TENSORS | {"more": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    archive = open_archive(index)
    assert_all_tensors(archive)
    assert archive.notes[-1] == "ignored more, which model.safetensors.index.json does not list"


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_outside_its_folder(tmp_path: Path, file: object):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="a file name in the same folder"):
        open_archive(tmp_path)


def test_index_that_lists_an_index_is_refused(tmp_path: Path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": index.name}}))
    with pytest.raises(CheckpointError, match="not a shard"):
        open_archive(index)


def test_folder_without_weights_error_lists_the_expected_files(tmp_path: Path):
    with pytest.raises(NotFoundError, match=r"contains nothing; expected model.safetensors, .*pytorch_model.bin"):
        open_archive(tmp_path)
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(NotFoundError, match=r"contains tf_model\.h5"):
        open_archive(tmp_path)


def test_folder_with_several_weight_files_is_refused_with_their_names(tmp_path: Path):
    for name in ("a.pth", "b.pth"):
        torch.save(TENSORS, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"several .*\(a\.pth, b\.pth\); pass the path of one") as caught:
        open_archive(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert_all_tensors(open_archive(tmp_path / "b.pth"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "mae_pretrain.pth"]
)
def test_sidecars_of_a_repository_are_read(tmp_path: Path, name: str):
    (save_file if name.endswith(".safetensors") else torch.save)(TENSORS, tmp_path / name)
    for sidecar in ("config.json", "preprocessor_config.json", "open_clip_config.json", "tokenizer.json"):
        (tmp_path / sidecar).write_text(json.dumps(CONFIG))
    for path in (tmp_path, tmp_path / name):
        archive = open_archive(path)
        assert_all_tensors(archive)
        assert archive.source == str(path)
        assert archive.sidecars == dict.fromkeys(
            ("config.json", "preprocessor_config.json", "open_clip_config.json"), CONFIG
        )
        assert archive.notes == []


def test_run_folder_opens_its_model(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "config.json").write_text('{"recipe": 1}')
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, model / "model.safetensors")
    archive = open_archive(tmp_path)
    assert_all_tensors(archive)
    assert archive.sidecars == {"config.json": CONFIG}
    assert archive.notes == [f"read the model of the training run in {tmp_path}"]


def test_config_json_beside_several_files_applies_to_the_standard_name(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("model.safetensors", "other.safetensors"):
        save_file(TENSORS, tmp_path / name)
    (tmp_path / "optimizer.pt").touch()
    assert open_archive(tmp_path / "model.safetensors").sidecars == {"config.json": CONFIG}
    other = open_archive(tmp_path / "other.safetensors")
    assert other.sidecars == {}
    assert other.notes == [
        "config.json not read: the folder holds other weights besides other.safetensors (model.safetensors)"
    ]
    (tmp_path / "model.safetensors").unlink()
    assert open_archive(tmp_path / "other.safetensors").sidecars == {"config.json": CONFIG}


def test_invalid_sidecar_is_named(tmp_path: Path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    for text in (b'{"architecture": ', b"\xff\xfe\x00"):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
            open_archive(tmp_path)


def test_symlinks_into_a_cache_use_the_sidecars_beside_the_link(tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(TENSORS, tmp_path / "blobs" / "0a1b")
    (tmp_path / "blobs" / "2c3d").write_text(json.dumps(CONFIG))
    for name, blob in (("model.safetensors", "0a1b"), ("config.json", "2c3d")):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{blob}")
    for path in (tmp_path / "snapshot", tmp_path / "snapshot" / "model.safetensors"):
        archive = open_archive(path)
        assert_all_tensors(archive)
        assert archive.sidecars == {"config.json": CONFIG}
