"""`checkpoint.read`: errors for tensors that do not fit, dtypes, overrides, sidecars; weights are not copied."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import ONE_BLOCK
from torch import Tensor

from vitrail.config import BiTConfig, ViTConfig, pair
from vitrail.errors import CheckpointError, ConfigError, FormatError, NotFoundError, VitrailError
from vitrail.models import Net, build
from vitrail.weights import checkpoint
from vitrail.weights.archive import LazyTensors, open_archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.google import ORIGINAL_POSITION
from vitrail.weights.model_info import ModelInfo

TORCH = ViTConfig(**ONE_BLOCK, activation="gelu")
BIG_VISION = ViTConfig(**ONE_BLOCK, position_on_class=False)
BIT = BiTConfig(layers=(1, 1), width_factor=0.5, num_classes=5, image_size=32)

FORMATS: dict[str, tuple[str, ViTConfig | BiTConfig]] = {
    "vitrail": ("model.safetensors", TORCH),
    "timm": ("model.safetensors", TORCH),
    "huggingface": ("model.safetensors", TORCH),
    "torchvision": ("model.pth", TORCH),
    "google": ("model.npz", ViTConfig(**ONE_BLOCK)),
    "big_vision": ("model.npz", BIG_VISION),
    "vitrail BiT": ("model.safetensors", BIT),
    "huggingface BiT": ("model.safetensors", BIT.replace(standardize_eps=1e-8)),
    "google BiT": ("model.npz", BIT),
    "big_vision BiT": ("model.npz", BIT.replace(root_pad="none")),
}
every_format = pytest.mark.parametrize("kind", FORMATS)


pytestmark = pytest.mark.usefixtures("quick_disk")


def make_model(config: ViTConfig | BiTConfig) -> tuple[Net, ModelInfo]:
    family = "BiT" if isinstance(config, BiTConfig) else "ViT"
    net = randomized(build(config, seed=0))
    assert isinstance(net, Net)
    return net, ModelInfo(config=config, preprocess=default_preprocess(family, config), family=family)


def write_checkpoint(kind: str, folder: Path) -> tuple[Net, Path]:
    name, config = FORMATS[kind]
    net, info = make_model(config)
    checkpoint.write(net, info, folder / name, to=kind.split()[0])
    return net, folder / name


def tensors_of(path: Path) -> dict[str, Tensor]:
    tensors = open_archive(path).tensors
    return {name: tensors[name].clone() for name in tensors}


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Rewrites the file with other tensors, keeping its header."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif path.suffix == ".pth":
        torch.save(tensors, path)
    else:
        with safe_open(path, "pt") as file:
            header = file.metadata()
        save_file(tensors, path, header)
    return path


@contextmanager
def patched_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Lets `checkpoint.read` see other tensors in the file, without writing them."""
    patched_archive = replace(open_archive(path), tensors=LazyTensors.from_tensors(tensors, str(path)), handles=[])
    with patch.object(checkpoint, "open_archive", lambda *_, **__: patched_archive):
        yield


def same_weights(net: Net, expected: Net) -> bool:
    ours, theirs = net.state_dict(), expected.state_dict()
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Tensors that do not fit


@every_format
def test_missing_tensor_error_names_the_tensor_or_its_layer(kind: str, tmp_path: Path) -> None:
    """Each tensor of the file is removed in turn."""
    _, path = write_checkpoint(kind, tmp_path)
    tensors = tensors_of(path)
    for name in tensors:
        rest = {n: t for n, t in tensors.items() if n != name}
        if name in ("params/cls", "params/pos_embedding", ORIGINAL_POSITION):
            with patched_tensors(path, rest):
                checkpoint.read(path)  # a valid network
            continue
        with patched_tensors(path, rest), pytest.raises(FormatError) as error:
            checkpoint.read(path)
        message = str(error.value)
        assert str(path) in message, name
        # The error may name the other parameter of a layer, or a missing token by its positions.
        is_token = name.endswith(("cls", "cls_token", "class_token"))
        assert (
            layer_name(name) in message
            or (is_token and ("grid" in message or "class_token=False" in message))
            or "match no known format" in message
            or UNKNOWN_HUGGINGFACE_MODEL in message
        ), (
            name,
            message,
        )


UNKNOWN_HUGGINGFACE_MODEL = "vitrail reads no huggingface model with these tensor names"


def layer_name(name: str) -> str:
    """The name without weight or bias, and without the prefixes that the rename tables leave out."""
    for prefix in ("vit.", "bit.", "params/", "resnet/"):
        name = name.removeprefix(prefix)
    return re.sub(r"[./]\w+$", "", name)


@every_format
def test_unexpected_tensor_error_names_the_tensor_and_the_format(kind: str, tmp_path: Path) -> None:
    _, path = write_checkpoint(kind, tmp_path)
    replace_tensors(path, tensors_of(path) | {"some.hat": torch.zeros(3), "another.hat": torch.zeros(2)})
    with pytest.raises(FormatError, match=rf"read as {kind.split()[0]}.*unexpected .*hat") as error:
        checkpoint.read(path)
    assert "some.hat" in str(error.value)
    assert "another.hat" in str(error.value)


def doubled(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


@every_format
@pytest.mark.parametrize("change", [doubled, lambda t: t[None], lambda t: t.flatten()[:-1]])
def test_wrong_shape_is_an_error(kind: str, change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """Each tensor of the file in turn: doubled, with another rank, and flattened and cut."""
    net, path = write_checkpoint(kind, tmp_path)
    tensors = tensors_of(path)
    for name in tensors:
        with patched_tensors(path, tensors | {name: change(tensors[name])}):
            if change(tensors[name]).numel() == tensors[name].numel():
                with suppress(FormatError):  # an extra axis of length 1 is accepted for tokens and scales
                    assert same_weights(checkpoint.read(path)[0], net)
            elif change is doubled and name.endswith("embedding/kernel"):
                assert checkpoint.read(path)[0].config.patch_size == (16, 8), (
                    "the patch size is inferred from the shape alone"
                )
            else:
                with pytest.raises(FormatError, match=f"{path}: (read as {kind.split()[0]}|the tensor names)"):
                    checkpoint.read(path)


def test_wrong_shape_error_gives_both_names_of_the_tensor(tmp_path: Path) -> None:
    _, path = write_checkpoint("google", tmp_path)
    replace_tensors(path, tensors_of(path) | {"head/kernel": torch.zeros(127, 5)})
    with pytest.raises(FormatError, match=r"wrong shapes: head\.weight \(5, 127\) for \(5, 128\), from head/kernel"):
        checkpoint.read(path)


def test_long_lists_of_tensors_are_shortened(tmp_path: Path) -> None:
    _, path = write_checkpoint("timm", tmp_path)
    replace_tensors(
        path, {n: t for n, t in tensors_of(path).items() if not n.startswith("blocks.0.norm2")} | unknown_tensors(20)
    )
    with pytest.raises(
        FormatError, match=r"missing blocks\.0\.norm2\.weight, blocks\.0\.norm2\.bias; unexpected .* and 12 more\.$"
    ):
        checkpoint.read(path)


def unknown_tensors(count: int) -> dict[str, Tensor]:
    return {f"hat{i}": torch.zeros(1) for i in range(count)}


def test_unknown_tensor_names_error_lists_the_known_formats(tmp_path: Path) -> None:
    torch.save(unknown_tensors(6), tmp_path / "hats.pth")
    with pytest.raises(FormatError) as error:
        checkpoint.read(tmp_path / "hats.pth")
    assert str(error.value) == (
        f"{tmp_path / 'hats.pth'}: the tensor names (hat0, hat1, hat2, hat3, ... 6 in all) match no known format; "
        "known formats are vitrail, facebook, timm, huggingface, torchvision, microsoft, open_clip, google, big_vision."
    )


# Numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["vitrail", "google", "torchvision"])
def test_non_finite_weights_are_an_error(kind: str, value: float, tmp_path: Path) -> None:
    _, path = write_checkpoint(kind, tmp_path)
    tensors = tensors_of(path)
    name = next(n for n, t in tensors.items() if t.ndim == 1)
    tensors[name][1] = value
    replace_tensors(path, tensors)
    with pytest.raises(
        CheckpointError, match=r"NaN or infinity in .*: the file is damaged or the run diverged; try an earlier"
    ):
        checkpoint.read(path)
    net, _ = checkpoint.read(path, check_finite=False)
    assert sum(not p.isfinite().all() for p in net.parameters()) == 1


def test_only_the_first_non_finite_tensors_are_named(tmp_path: Path) -> None:
    _, path = write_checkpoint("vitrail", tmp_path)
    replace_tensors(path, {name: torch.full_like(t, float("nan")) for name, t in tensors_of(path).items()})
    with pytest.raises(CheckpointError, match=r": NaN or infinity in class_token, \S+, \S+, \S+ and \d\d more: "):
        checkpoint.read(path)


@pytest.mark.parametrize("kind", ["vitrail", "timm", "google"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_converted_with_a_note_or_kept(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    net, path = write_checkpoint(kind, tmp_path)
    tensors = {name: t.to(dtype) for name, t in tensors_of(path).items()}
    if kind == "google" and dtype == torch.bfloat16:  # stored as void, as JAX does: NumPy has no bfloat16
        np.savez(path, **{name: t.contiguous().view(torch.int16).numpy().view("V2") for name, t in tensors.items()})
    else:
        replace_tensors(path, tensors)
    expected = {name: t.to(dtype) for name, t in net.state_dict().items()}
    dtype_name = str(dtype).removeprefix("torch.")
    for options, loaded_dtype, note in (
        ({}, torch.float32, f"stored as {dtype_name}, loaded as float32."),
        ({"dtype": None}, dtype, None),
        ({"dtype": torch.float64}, torch.float64, f"stored as {dtype_name}, loaded as float64."),
    ):
        loaded, info = checkpoint.read(path, **options)
        dtype_notes = [n for n in info.notes if n.startswith("stored as")]
        assert dtype_notes == ([note] if note and loaded_dtype != dtype else [])
        for name, tensor in loaded.state_dict().items():
            assert tensor.dtype == loaded_dtype
            assert torch.equal(tensor, expected[name].to(loaded_dtype)), name


def test_all_stored_dtypes_are_noted(tmp_path: Path) -> None:
    _, path = write_checkpoint("timm", tmp_path)
    replace_tensors(path, {n: t.half() if "norm" in n else t for n, t in tensors_of(path).items()})
    _, info = checkpoint.read(path)
    assert "stored as float16, float32, loaded as float32." in info.notes


# Files


@every_format
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_an_error(kind: str, share: float, tmp_path: Path) -> None:
    _, path = write_checkpoint(kind, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: max(int(share * len(content)), 1)])
    with pytest.raises(CheckpointError, match=r"truncated|damaged|in an unknown format|text file|not weights"):
        checkpoint.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "a PNG image; expected safetensors, npz or a torch.save file"),
        (b"<!DOCTYPE html><html>", "an HTML page, not weights"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"hello", "a text file that starts with 'hello'"),
        (bytes(range(200, 256)) * 9, "in an unknown format"),
    ],
)
def test_file_that_is_not_weights_is_identified(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(tmp_path / "model.safetensors")


def test_missing_file_or_weights_raise_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        checkpoint.read(tmp_path / "model.safetensors")
    with pytest.raises(NotFoundError, match="no weights in the folder"):
        checkpoint.read(tmp_path)


# Overrides


def test_overrides_change_the_config(tmp_path: Path) -> None:
    net, path = write_checkpoint("timm", tmp_path)
    loaded, info = checkpoint.read(path, overrides={"activation": "gelu-quick", "norm_eps": 1e-5})
    assert (info.config.norm_eps, loaded.config.activation) == (1e-5, "gelu-quick")
    assert same_weights(loaded, net)
    with pytest.raises(ConfigError, match="has no field 'activatoin'; did you mean 'activation'"):
        checkpoint.read(path, overrides={"activatoin": "gelu"})
    with pytest.raises(FormatError, match=r"missing .*blocks\.0\.ls1\.gamma"):
        checkpoint.read(path, overrides={"layer_scale": 0.1})


@pytest.mark.parametrize("to", ["timm", "huggingface", "torchvision", "facebook"])
def test_num_heads_can_be_passed_for_a_bare_file(to: str, tmp_path: Path) -> None:
    config = TORCH.replace(width=48, num_heads=6)
    net, info = make_model(config)
    checkpoint.write(net, info, tmp_path / "x", to=to, approximate=True)
    path = save_bare(tmp_path / "x")
    with pytest.raises(FormatError, match=r"number of heads.* width 48.*pass num_heads="):
        checkpoint.read(path)
    loaded, loaded_info = checkpoint.read(path, overrides={"num_heads": 6})
    assert loaded.config.num_heads == loaded_info.config.num_heads == 6
    assert same_weights(loaded, net)
    assert not any("heads" in note for note in loaded_info.notes), "no number of heads was assumed"


def save_bare(path: Path) -> Path:
    """Saves the weights without the header and returns the new path."""
    torch.save(tensors_of(path), path.parent / "bare.pth")
    return path.parent / "bare.pth"


@pytest.mark.parametrize("to", ["timm", "huggingface", "torchvision", "google"])
def test_image_size_can_be_passed_for_a_bare_file(to: str, tmp_path: Path) -> None:
    config = TORCH.replace(image_size=(32, 56))
    net, info = make_model(config)
    tensors = checkpoint.format_for(to, info).table(config).write(net.state_dict(), config)
    torch.save({name: t.clone() for name, t in tensors.items()}, tmp_path / "bare.pth")
    with pytest.raises(FormatError, match=r"pass image_size=\(height, width\)"):
        checkpoint.read(tmp_path / "bare.pth")
    loaded, _ = checkpoint.read(tmp_path / "bare.pth", overrides={"image_size": (32, 56)})
    assert pair(loaded.config.image_size) == (32, 56)
    assert same_weights(loaded, net)
    with pytest.raises(FormatError):
        checkpoint.read(tmp_path / "bare.pth", overrides={"image_size": (64, 64)})


def test_bare_file_without_positions_requires_position_none(tmp_path: Path) -> None:
    net, info = make_model(TORCH.replace(position="none"))
    checkpoint.write(net, info, tmp_path / "model", to="timm")
    assert checkpoint.read(tmp_path / "model")[1].config.position == "none", "config.json states it"
    path = save_bare(tmp_path / "model")
    with pytest.raises(FormatError, match="pass position='none' if this model has no positions at all"):
        checkpoint.read(path)
    assert same_weights(checkpoint.read(path, overrides={"position": "none"})[0], net)


# Sidecars


JUNK = st.sampled_from([None, -1, 0, 3.5, "", "junk", [], [1], {}, {"a": 1}, True, [[]], 10**9])


@settings(max_examples=60)
@given(data=st.data(), to=st.sampled_from(["vitrail", "timm", "huggingface"]))
def test_any_sidecar_content_gives_the_network_or_a_vitrail_error(
    data: st.DataObject, to: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    net, info = make_model(TINY)
    checkpoint.write(net, info, folder / "model", to=to)
    name = data.draw(st.sampled_from(sorted(f.name for f in (folder / "model").glob("*.json"))))
    values = json.loads((folder / "model" / name).read_text())
    node: Any = values
    for _ in range(3):
        key = data.draw(st.sampled_from(sorted(node)))
        if not (isinstance(node[key], dict) and node[key] and data.draw(st.booleans())):
            break
        node = node[key]
    node[key] = data.draw(JUNK)
    (folder / "model" / name).write_text(json.dumps(data.draw(st.sampled_from([values, values, values, [], 7]))))
    if to == "vitrail":  # the header takes precedence over config.json
        remove_header(folder / "model" / "model.safetensors")
    with suppress(VitrailError):
        assert same_weights(checkpoint.read(folder / "model")[0], net)
    shutil.rmtree(folder)


TINY = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=8, num_classes=3, activation="gelu")


def remove_header(path: Path) -> None:
    save_file(tensors_of(path), path)


def test_damaged_header_is_a_checkpoint_error(tmp_path: Path) -> None:
    _, path = write_checkpoint("timm", tmp_path)
    save_file(tensors_of(path), path, {"format": "pt", "config.json": "{"})
    with pytest.raises(CheckpointError, match="its header is damaged"):
        checkpoint.read(path)
    save_file(tensors_of(path), path, {"format": "pt", "config.json": "[1]"})
    checkpoint.read(path)  # metadata that timm does not write is ignored


# Memory


@pytest.mark.parametrize("to", ["vitrail", "timm", "torchvision", "facebook"])
def test_parameters_share_memory_with_the_mapped_file(to: str, tmp_path: Path) -> None:
    """Every parameter lies in a memory mapping of the file."""
    net, info = make_model(TORCH)
    name = "model.safetensors" if to in ("vitrail", "timm") else "model.pth"
    checkpoint.write(net, info, tmp_path / name, to=to)
    loaded, _ = checkpoint.read(tmp_path / name)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    ranges = [line.split()[0] for line in maps.read_text().splitlines() if line.endswith(str(tmp_path / name))]
    spans = [tuple(int(part, 16) for part in span.split("-")) for span in ranges]
    for parameter_name, parameter in loaded.named_parameters():
        start = parameter.data_ptr()
        assert any(low <= start and start + parameter.nbytes <= high for low, high in spans), parameter_name
    before = (tmp_path / name).read_bytes()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert (tmp_path / name).read_bytes() == before, "the mapping is private: writes do not reach the file"
