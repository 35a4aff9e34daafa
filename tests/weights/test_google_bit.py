"""BiT files: outputs of big_vision's code, the paper's tensor names, and reading with timm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import randomized, relative
from conftest import golden, import_peer

from vitrail.config import BiTConfig, ViTConfig
from vitrail.errors import ConversionError, FormatError
from vitrail.models import BiT, build
from vitrail.models.families import FAMILIES
from vitrail.weights import checkpoint, google_bit
from vitrail.weights.model_info import ModelInfo

SMALL = BiTConfig(layers=(1, 2), width_factor=0.5, num_classes=5)
PADS = {"google": "zero", "big_vision": "none"}


def config_from_name(to: str, **changes: Any) -> BiTConfig:
    return SMALL.replace(root_pad=PADS[to], **changes)


def write_random_network(config: BiTConfig, path: Path, to: str) -> BiT:
    net = randomized(build(config))
    checkpoint.write(net, ModelInfo(config=config, preprocess=FAMILIES["BiT"].preprocess, family="BiT"), path, to=to)
    assert isinstance(net, BiT)
    return net


def assert_same_weights(expected: BiT, actual: BiT) -> None:
    expected_state, actual_state = expected.state_dict(), actual.state_dict()
    assert expected_state.keys() == actual_state.keys()
    for name, value in expected_state.items():
        assert torch.equal(actual_state[name], value), name


def test_outputs_match_big_vision() -> None:
    net, info = checkpoint.read(golden("bigvision_bit_small.npz"))
    values = np.load(golden("bigvision_bit_small_io.npz"))
    assert info.config == BiTConfig(
        layers=(1, 1, 1, 1), width_factor=0.5, num_classes=10, image_size=224, root_pad="none"
    )
    assert (info.family, info.task, info.labels) == ("BiT", "classify", None)
    assert info.notes == ("the file does not store an image size: 224 is assumed; BiT accepts any size.",)
    with torch.no_grad():
        logits = net(torch.from_numpy(values["images_nhwc"]).permute(0, 3, 1, 2))
    assert relative(logits, torch.from_numpy(values["logits"])) <= 1e-5


def test_writing_inverts_reading(tmp_path: Path) -> None:
    net, info = checkpoint.read(golden("bigvision_bit_small.npz"))
    checkpoint.write(net, info, tmp_path / "again.npz", to="big_vision")
    reloaded, expected = np.load(tmp_path / "again.npz"), np.load(golden("bigvision_bit_small.npz"))
    assert set(reloaded.files) == set(expected.files)
    for name in expected.files:
        np.testing.assert_array_equal(reloaded[name], expected[name], err_msg=name, strict=True)


@pytest.mark.parametrize("to", PADS)
def test_reading_inverts_writing(to: str, tmp_path: Path) -> None:
    net = write_random_network(config_from_name(to), tmp_path / "net.npz", to)
    reloaded, info = checkpoint.read(tmp_path / "net.npz")
    assert info.config == net.config
    assert_same_weights(net, reloaded)


def test_google_and_big_vision_formats_differ_only_in_root_padding(tmp_path: Path) -> None:
    net = write_random_network(config_from_name("google"), tmp_path / "paper.npz", "google")
    _, info = checkpoint.read(tmp_path / "paper.npz")
    with pytest.raises(ConversionError, match="root_pad='zero'"):
        checkpoint.write(net, info, tmp_path / "big.npz", to="big_vision")
    checkpoint.write(net, info, tmp_path / "big.npz", to="big_vision", approximate=True)
    reloaded, info = checkpoint.read(tmp_path / "big.npz")
    assert_same_weights(net, reloaded)
    checkpoint.write(reloaded, info, tmp_path / "back.npz", to="google", approximate=True)
    first, last = np.load(tmp_path / "paper.npz"), np.load(tmp_path / "back.npz")
    assert set(first.files) == set(last.files)
    assert all(np.array_equal(first[name], last[name]) for name in first.files)


def test_google_files_have_the_papers_names_and_shapes(tmp_path: Path) -> None:
    write_random_network(config_from_name("google"), tmp_path / "net.npz", "google")
    shapes = {name: array.shape for name, array in np.load(tmp_path / "net.npz").items()}
    expected = {
        "resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 32),
        "resnet/block1/unit01/a/group_norm/gamma": (32,),
        "resnet/block1/unit01/a/standardized_conv2d/kernel": (1, 1, 32, 32),
        "resnet/block1/unit01/a/proj/standardized_conv2d/kernel": (1, 1, 32, 128),
        "resnet/block2/unit02/b/group_norm/beta": (64,),
        "resnet/block2/unit02/c/standardized_conv2d/kernel": (1, 1, 64, 256),
        "resnet/group_norm/gamma": (256,),
        "resnet/head/conv2d/kernel": (1, 1, 256, 5),
        "resnet/head/conv2d/bias": (5,),
    }
    assert expected.items() <= shapes.items()
    assert len(shapes) == 1 + 3 * 9 + 2 + 2 + 2  # root, units, projections, norm, head


def test_numbered_convolution_names_are_read(tmp_path: Path) -> None:
    net = write_random_network(config_from_name("google"), tmp_path / "net.npz", "google")
    numbered = {
        re.sub(r"/([abc])/stand(\w+)/", r"/\1/stand\2_3/", k): v for k, v in np.load(tmp_path / "net.npz").items()
    }
    assert any("standardized_conv2d_3" in name for name in numbered)
    np.savez(tmp_path / "odd.npz", **numbered)
    assert_same_weights(net, checkpoint.read(tmp_path / "odd.npz")[0])


@pytest.mark.parametrize("to", PADS)
def test_one_channel_without_a_head_round_trips(to: str, tmp_path: Path) -> None:
    net = write_random_network(config_from_name(to, channels=1, num_classes=0), tmp_path / "net.npz", to)
    reloaded, info = checkpoint.read(tmp_path / "net.npz")
    assert (info.config, info.task) == (net.config, "embed")
    assert info.preprocess.channels == 1
    assert_same_weights(net, reloaded)


def test_optimizer_state_is_ignored(tmp_path: Path) -> None:
    net = write_random_network(config_from_name("big_vision"), tmp_path / "net.npz", "big_vision")
    params = dict(np.load(tmp_path / "net.npz"))
    moments = {name.replace("params", "opt/0/mu"): 0 * array for name, array in params.items()}
    np.savez(tmp_path / "all.npz", **params, **moments)
    assert_same_weights(net, checkpoint.read(tmp_path / "all.npz")[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resnet/block2/unit01/b/group_norm/beta": None}, "missing block2/unit01/b/group_norm/beta"),
        ({"resnet/block2/unit01/d/group_norm/beta": np.zeros(3)}, "unexpected block2/unit01/d/group_norm/beta"),
        ({"resnet/head/conv2d/kernel": np.zeros((256, 5))}, "expected 4 dimensions"),
    ],
)
def test_mismatched_file_is_an_error_that_names_the_tensor(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_random_network(config_from_name("google"), tmp_path / "net.npz", "google")
    values = dict(np.load(tmp_path / "net.npz")) | change
    np.savez(tmp_path / "odd.npz", **{k: v for k, v in values.items() if v is not None})
    with pytest.raises(FormatError, match=message):
        checkpoint.read(tmp_path / "odd.npz")


@pytest.mark.parametrize(
    ("options", "part"), [({"norm_eps": 1e-6}, "norm_eps=1e-06"), ({"standardize_eps": 1e-8}, "standardize_eps=1e-08")]
)
def test_inexact_convention_is_named(options: dict[str, Any], part: str) -> None:
    for to, form in [("google", google_bit.BIT_GOOGLE), ("big_vision", google_bit.BIT_BIG_VISION)]:
        info = ModelInfo(config=config_from_name(to, **options), preprocess=FAMILIES["BiT"].preprocess)
        assert form.inexact_conventions(info) == [part]
        assert form.unsupported_parts(info) == []


def test_vision_transformer_is_unsupported() -> None:
    info = ModelInfo(config=ViTConfig(), preprocess=FAMILIES["ViT"].preprocess)
    assert (
        google_bit.BIT_GOOGLE.unsupported_parts(info)
        == google_bit.BIT_BIG_VISION.unsupported_parts(info)
        == ["a Vision Transformer"]
    )


@pytest.mark.peer
def test_timm_reads_a_written_file(tmp_path: Path) -> None:
    """With timm's epsilon, so that the logits can be compared too."""
    timm = import_peer("timm")
    config = config_from_name("google", standardize_eps=1e-8)
    net, info = randomized(build(config)), ModelInfo(config=config, preprocess=FAMILIES["BiT"].preprocess)
    checkpoint.write(net, info, tmp_path / "net.npz", to="google", approximate=True)
    model = timm.models.ResNetV2(
        layers=(1, 2),
        channels=(128, 256),
        stem_chs=32,
        num_classes=5,
        preact=True,
        stem_type="fixed",
        conv_layer=lambda *args, **options: timm.layers.StdConv2d(*args, eps=1e-8, **options),
    ).eval()
    model.load_pretrained(str(tmp_path / "net.npz"))
    images = torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        assert relative(net(images), model(images)) <= 1e-5
