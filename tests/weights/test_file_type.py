"""A file is what its bytes say: each foreign kind is refused in one sentence that names it."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from vitrail.errors import CheckpointError
from vitrail.weights.file_type import detect_file_type, summarize_names

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 346\n"


def of_torch(value: object, **options: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def of_numpy(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def of_zip(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return stream.getvalue()


def of_tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights.bin"), io.BytesIO())
    return stream.getvalue()


def of_script() -> bytes:
    names = ("m/data.pkl", "m/constants.pkl", "m/code/__torch__.py")
    return of_zip(*names)


def of_image(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, kind)
    return stream.getvalue()


READABLE = {
    "safetensors": save({"a": torch.ones(2)}),
    "npz": of_numpy(a=np.ones(2)),
    "torch": of_torch({"a": torch.ones(2)}),
    "legacy-torch": of_torch({"a": torch.ones(2)}, _use_new_zipfile_serialization=False),
    "torchscript": of_script(),
    "index": json.dumps({"weight_map": {}}).encode(),
}

FOREIGN = {
    "empty": b"",
    "Git LFS pointer": LFS,
    "HTML page": b"\n<!DOCTYPE html><html><body>Sign in</body></html>",
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(64),
    "NumPy array": b"\x93NUMPY\x01\x00" + bytes(64),
    "SavedModel": b"\x08\x01\x12\xa0\x05" + bytes(64),
    "TensorFlow Lite": b"\x1c\x00\x00\x00TFL3" + bytes(64),
    "GGUF": b"GGUF\x03\x00\x00\x00" + bytes(64),
    "gzip": gzip.compress(b"weights"),
    "tar": of_tar(),
    "JPEG": of_image("JPEG"),
    "PNG": of_image("PNG"),
    "ONNX": b"\x08\x0e\x12\x07pytorch:3\n\x0c\n\xff",
    "msgpack": b"\x82\xa6params\x81\xa4head\xc7",
    "TensorFlow checkpoint": b"\x00\x01\xff\xfe" * 8 + b"\x57\xfb\x80\x8b\x24\x75\x47\xdb",
    "zip archive": of_zip("model.weights.h5", "metadata.json"),
    "not written by torch.save": pickle.dumps({"a": 1}),
    "text file that starts with 'epoch,loss'": b"epoch,loss\n1,0.5\n",
    "JSON": b'{"architecture": "vit_tiny_patch16_224"}',
    "not valid JSON": b'{"weight_map": {',
    "in an unknown format": b"\xfe",
}


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.npz", "weights.pth", "weights"])
def test_the_content_decides_and_not_the_name(tmp_path: Path, kind: str, name: str):
    path = tmp_path / name
    path.write_bytes(READABLE[kind])
    assert detect_file_type(path) == kind


@pytest.mark.parametrize("what", FOREIGN)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, what: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(FOREIGN[what])
    with pytest.raises(CheckpointError) as caught:
        detect_file_type(path)
    message = str(caught.value)
    assert what in message
    assert message.startswith(str(path))
    assert message.endswith(".")
    assert "\n" not in message


def test_a_git_lfs_pointer_says_what_to_run(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(LFS)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        detect_file_type(tmp_path / "model.safetensors")


def test_a_real_onnx_file_is_named(tmp_path: Path):
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, [1])], [value("y", 1, [1])])
    for producer in ("", "pytorch"):
        path = tmp_path / "weights.bin"
        path.write_bytes(onnx.helper.make_model(graph, producer_name=producer).SerializeToString())
        with pytest.raises(CheckpointError, match="ONNX"):
            detect_file_type(path)


def test_a_data_file_of_tensorflow_is_known_by_its_name_alone(tmp_path: Path):
    path = tmp_path / "model.ckpt.data-00000-of-00001"
    path.write_bytes(np.linspace(-1, 1, 64).tobytes())
    with pytest.raises(CheckpointError, match="TensorFlow checkpoint"):
        detect_file_type(path)


@pytest.mark.parametrize("length", range(1, 40))
def test_any_first_bytes_give_an_answer(tmp_path: Path, length: int):
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(length).bytes(length))
    with pytest.raises(CheckpointError):
        detect_file_type(path)


def test_text_of_any_language_is_text(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(("vitraux é" * 200).encode())  # a letter is cut where the reading stops
    with pytest.raises(CheckpointError, match="text file"):
        detect_file_type(path)


def test_long_lists_are_shortened():
    assert summarize_names("abcd") == "a, b, c, d"
    assert summarize_names("abcdefg") == "a, b, c, d and 3 more"
