"""BiT files: outputs of big_vision's code, the paper's names, and timm's reader."""

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


def written(config: BiTConfig, path: Path, to: str) -> BiT:
    net = randomized(build(config))
    checkpoint.write(net, ModelInfo(config=config, preprocess=FAMILIES["BiT"].preprocess, family="BiT"), path, to=to)
    assert isinstance(net, BiT)
    return net


def same_weights(net: BiT, other: BiT) -> None:
    ours, theirs = net.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(theirs[name], value), name


def test_outputs_are_big_visions() -> None:
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


def test_what_is_written_is_what_was_read(tmp_path: Path) -> None:
    net, info = checkpoint.read(golden("bigvision_bit_small.npz"))
    checkpoint.write(net, info, tmp_path / "again.npz", to="big_vision")
    again, expected = np.load(tmp_path / "again.npz"), np.load(golden("bigvision_bit_small.npz"))
    assert set(again.files) == set(expected.files)
    for name in expected.files:
        np.testing.assert_array_equal(again[name], expected[name], err_msg=name, strict=True)


@pytest.mark.parametrize("to", PADS)
def test_reading_inverts_writing(to: str, tmp_path: Path) -> None:
    net = written(config_from_name(to), tmp_path / "net.npz", to)
    again, info = checkpoint.read(tmp_path / "net.npz")
    assert info.config == net.config
    same_weights(net, again)


def test_between_the_two_formats_only_the_border_of_the_first_pool_differs(tmp_path: Path) -> None:
    net = written(config_from_name("google"), tmp_path / "paper.npz", "google")
    _, info = checkpoint.read(tmp_path / "paper.npz")
    with pytest.raises(ConversionError, match="root_pad='zero'"):
        checkpoint.write(net, info, tmp_path / "big.npz", to="big_vision")
    checkpoint.write(net, info, tmp_path / "big.npz", to="big_vision", approximate=True)
    again, info = checkpoint.read(tmp_path / "big.npz")
    same_weights(net, again)
    checkpoint.write(again, info, tmp_path / "back.npz", to="google", approximate=True)
    first, last = np.load(tmp_path / "paper.npz"), np.load(tmp_path / "back.npz")
    assert set(first.files) == set(last.files)
    assert all(np.array_equal(first[name], last[name]) for name in first.files)


def test_the_papers_names_and_shapes(tmp_path: Path) -> None:
    written(config_from_name("google"), tmp_path / "net.npz", "google")
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


def test_convolutions_with_numbers_in_their_names_are_read(tmp_path: Path) -> None:
    net = written(config_from_name("google"), tmp_path / "net.npz", "google")
    odd = {re.sub(r"/([abc])/stand(\w+)/", r"/\1/stand\2_3/", k): v for k, v in np.load(tmp_path / "net.npz").items()}
    assert any("standardized_conv2d_3" in name for name in odd)
    np.savez(tmp_path / "odd.npz", **odd)
    same_weights(net, checkpoint.read(tmp_path / "odd.npz")[0])


@pytest.mark.parametrize("to", PADS)
def test_other_channels_and_no_head(to: str, tmp_path: Path) -> None:
    net = written(config_from_name(to, channels=1, num_classes=0), tmp_path / "net.npz", to)
    again, info = checkpoint.read(tmp_path / "net.npz")
    assert (info.config, info.task) == (net.config, "embed")
    assert info.preprocess.channels == 1
    same_weights(net, again)


def test_an_optimizer_beside_the_network_is_passed_over(tmp_path: Path) -> None:
    net = written(config_from_name("big_vision"), tmp_path / "net.npz", "big_vision")
    params = dict(np.load(tmp_path / "net.npz"))
    moments = {name.replace("params", "opt/0/mu"): 0 * array for name, array in params.items()}
    np.savez(tmp_path / "all.npz", **params, **moments)
    same_weights(net, checkpoint.read(tmp_path / "all.npz")[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resnet/block2/unit01/b/group_norm/beta": None}, "missing block2/unit01/b/group_norm/beta"),
        ({"resnet/block2/unit01/d/group_norm/beta": np.zeros(3)}, "unexpected block2/unit01/d/group_norm/beta"),
        ({"resnet/head/conv2d/kernel": np.zeros((256, 5))}, "expected 4 dimensions"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_that_says_where(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(config_from_name("google"), tmp_path / "net.npz", "google")
    values = dict(np.load(tmp_path / "net.npz")) | change
    np.savez(tmp_path / "odd.npz", **{k: v for k, v in values.items() if v is not None})
    with pytest.raises(FormatError, match=message):
        checkpoint.read(tmp_path / "odd.npz")


@pytest.mark.parametrize(
    ("options", "part"), [({"norm_eps": 1e-6}, "norm_eps=1e-06"), ({"standardize_eps": 1e-8}, "standardize_eps=1e-08")]
)
def test_a_convention_the_code_has_fixed_is_said(options: dict[str, Any], part: str) -> None:
    for to, form in [("google", google_bit.BIT_GOOGLE), ("big_vision", google_bit.BIT_BIG_VISION)]:
        info = ModelInfo(config=config_from_name(to, **options), preprocess=FAMILIES["BiT"].preprocess)
        assert form.inexact_conventions(info) == [part]
        assert form.unsupported_parts(info) == []


def test_a_vision_transformer_is_no_bit() -> None:
    info = ModelInfo(config=ViTConfig(), preprocess=FAMILIES["ViT"].preprocess)
    assert (
        google_bit.BIT_GOOGLE.unsupported_parts(info)
        == google_bit.BIT_BIG_VISION.unsupported_parts(info)
        == ["a Vision Transformer"]
    )


@pytest.mark.peer
def test_timm_reads_what_is_written(tmp_path: Path) -> None:
    """With timm's epsilon, so that its logits can be compared too."""
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
