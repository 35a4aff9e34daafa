"""File types are detected from content; unsupported types are refused with a one-sentence error that names them."""

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


def torch_bytes(value: object, **options: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def npz_bytes(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def zip_bytes(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return stream.getvalue()


def tar_bytes() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights.bin"), io.BytesIO())
    return stream.getvalue()


def torchscript_bytes() -> bytes:
    names = ("m/data.pkl", "m/constants.pkl", "m/code/__torch__.py")
    return zip_bytes(*names)


def image_bytes(image_format: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, image_format)
    return stream.getvalue()


READABLE = {
    "safetensors": save({"a": torch.ones(2)}),
    "npz": npz_bytes(a=np.ones(2)),
    "torch": torch_bytes({"a": torch.ones(2)}),
    "legacy-torch": torch_bytes({"a": torch.ones(2)}, _use_new_zipfile_serialization=False),
    "torchscript": torchscript_bytes(),
    "index": json.dumps({"weight_map": {}}).encode(),
}

UNSUPPORTED = {
    "empty": b"",
    "Git LFS pointer": LFS,
    "HTML page": b"\n<!DOCTYPE html><html><body>Sign in</body></html>",
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(64),
    "NumPy array": b"\x93NUMPY\x01\x00" + bytes(64),
    "SavedModel": b"\x08\x01\x12\xa0\x05" + bytes(64),
    "TensorFlow Lite": b"\x1c\x00\x00\x00TFL3" + bytes(64),
    "GGUF": b"GGUF\x03\x00\x00\x00" + bytes(64),
    "gzip": gzip.compress(b"weights"),
    "tar": tar_bytes(),
    "JPEG": image_bytes("JPEG"),
    "PNG": image_bytes("PNG"),
    "ONNX": b"\x08\x0e\x12\x07pytorch:3\n\x0c\n\xff",
    "msgpack": b"\x82\xa6params\x81\xa4head\xc7",
    "TensorFlow checkpoint": b"\x00\x01\xff\xfe" * 8 + b"\x57\xfb\x80\x8b\x24\x75\x47\xdb",
    "zip archive": zip_bytes("model.weights.h5", "metadata.json"),
    "not written by torch.save": pickle.dumps({"a": 1}),
    "text file that starts with 'epoch,loss'": b"epoch,loss\n1,0.5\n",
    "JSON": b'{"architecture": "vit_tiny_patch16_224"}',
    "not valid JSON": b'{"weight_map": {',
    "in an unknown format": b"\xfe",
}


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.npz", "weights.pth", "weights"])
def test_file_type_is_detected_from_content_not_name(tmp_path: Path, kind: str, name: str):
    path = tmp_path / name
    path.write_bytes(READABLE[kind])
    assert detect_file_type(path) == kind


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_file_type_is_refused_by_name(tmp_path: Path, kind: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(UNSUPPORTED[kind])
    with pytest.raises(CheckpointError) as caught:
        detect_file_type(path)
    message = str(caught.value)
    assert kind in message
    assert message.startswith(str(path))
    assert message.endswith(".")
    assert "\n" not in message


def test_git_lfs_pointer_error_suggests_git_lfs_pull(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(LFS)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        detect_file_type(tmp_path / "model.safetensors")


def test_real_onnx_file_is_identified(tmp_path: Path):
    onnx = pytest.importorskip("onnx")
    make_value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [make_value("x", 1, [1])], [make_value("y", 1, [1])])
    for producer in ("", "pytorch"):
        path = tmp_path / "weights.bin"
        path.write_bytes(onnx.helper.make_model(graph, producer_name=producer).SerializeToString())
        with pytest.raises(CheckpointError, match="ONNX"):
            detect_file_type(path)


def test_tensorflow_data_file_is_identified_by_its_name(tmp_path: Path):
    path = tmp_path / "model.ckpt.data-00000-of-00001"
    path.write_bytes(np.linspace(-1, 1, 64).tobytes())
    with pytest.raises(CheckpointError, match="TensorFlow checkpoint"):
        detect_file_type(path)


@pytest.mark.parametrize("length", range(1, 40))
def test_random_bytes_raise_checkpoint_error(tmp_path: Path, length: int):
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(length).bytes(length))
    with pytest.raises(CheckpointError):
        detect_file_type(path)


def test_non_ascii_text_is_identified_as_text(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(("vitraux é" * 200).encode())  # the detection buffer ends inside a character
    with pytest.raises(CheckpointError, match="text file"):
        detect_file_type(path)


def test_summarize_names_shortens_long_lists():
    assert summarize_names("abcd") == "a, b, c, d"
    assert summarize_names("abcdefg") == "a, b, c, d and 3 more"
