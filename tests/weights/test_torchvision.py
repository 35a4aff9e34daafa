"""torchvision's files, compared with torchvision on the same weights."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from torch import Tensor, nn

from vitrail.config import BiTConfig, StemConfig, ViTConfig
from vitrail.errors import ConversionError, FormatError
from vitrail.models import ViT, build
from vitrail.models.families import FAMILIES
from vitrail.weights import checkpoint
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.torchvision import TORCHVISION

SIZES = {
    #           width, depth, heads, mlp
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "small": (64, 2, 1, 96),
}
SMALL = ViTConfig(
    image_size=32, patch_size=8, width=64, depth=2, num_heads=1, mlp_dim=96, num_classes=7, activation="gelu"
)


def torchvision_vit(size: str = "small", image_size: int = 32, patch_size: int = 8, **options: Any) -> nn.Module:
    models = import_peer("torchvision").models
    width, depth, heads, mlp = SIZES[size]
    options = {"num_classes": 7} | options
    return randomized(models.VisionTransformer(image_size, patch_size, depth, heads, width, mlp, **options))


def save(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


def read(model: nn.Module, folder: Path) -> tuple[ViT, ModelInfo]:
    net, info = checkpoint.read(save(model, folder / "weights.pth"))
    assert isinstance(net, ViT)
    return net, info


def info_of(config: ViTConfig | BiTConfig) -> ModelInfo:
    return ModelInfo(config=config, preprocess=FAMILIES["ViT"].preprocess)


# Outputs


@pytest.mark.peer
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("Ti", {"image_size": 224, "patch_size": 16}),
        ("S", {"image_size": 224, "patch_size": 16}),
        ("small", {"representation_size": 24}),
    ],
)
def test_logits_match_torchvision(size: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = torchvision_vit(size, **options)
    net, info = read(model, tmp_path)
    width, depth, heads, mlp = SIZES[size]
    image, patch = options.get("image_size", 32), options.get("patch_size", 8)
    expected = {"width": width, "depth": depth, "num_heads": heads, "mlp_dim": mlp, "num_classes": 7}
    conventions = {"activation": "gelu", "norm_eps": 1e-6, "resample": "torchvision"}
    pre_logits = options.get("representation_size", 0)
    assert info.config == ViTConfig(
        image_size=image, patch_size=patch, pre_logits=pre_logits, **expected, **conventions
    )
    images = torch.randn(1, 3, image, image)
    with torch.no_grad():
        assert relative(net(images), model(images)) <= 1e-5


@pytest.mark.peer
def test_vit_b_16_matches_torchvision_at_full_size(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = import_peer("torchvision").models.vit_b_16()
    model = randomized(model.to_empty(device="cpu"))
    net, info = read(model, tmp_path)
    assert info.config == ViTConfig(activation="gelu", resample="torchvision")
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert relative(net(images), model(images)) <= 1e-5


@pytest.mark.peer
@pytest.mark.parametrize("image", [64, 24])
def test_positions_are_resampled_as_in_torchvision(image: int, tmp_path: Path) -> None:
    model = torchvision_vit()
    net, _ = read(model, tmp_path)
    resize = import_peer("torchvision").models.vision_transformer.interpolate_embeddings
    expected = resize(image, 8, OrderedDict(model.state_dict()))
    resized = net.resized(image)
    written = TORCHVISION.table(resized.config).write(resized.state_dict(), resized.config)
    assert (written["encoder.pos_embedding"] - expected["encoder.pos_embedding"]).abs().max() <= 1e-6
    larger = torchvision_vit(image_size=image)
    larger.load_state_dict(expected)
    images = torch.randn(2, 3, image, image)
    with torch.no_grad():
        assert relative(net(images), larger(images)) <= 1e-5


@pytest.mark.peer
def test_non_square_image_resamples_positions_in_each_direction(tmp_path: Path) -> None:
    """torchvision rejects non-square images; the reference applies its modules to resampled positions."""
    model = torchvision_vit()
    net, _ = read(model, tmp_path)
    images = torch.randn(2, 3, 24, 56)
    with pytest.raises(AssertionError):
        model(images)
    position = model.encoder.pos_embedding
    grid = position[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, (3, 7), mode="bicubic", align_corners=True)
    model.encoder.pos_embedding = nn.Parameter(torch.cat([position[:, :1], grid.flatten(2).mT], dim=1))
    with torch.no_grad():
        patches = model.conv_proj(images).flatten(2).mT
        tokens = torch.cat([model.class_token.expand(2, -1, -1), patches], dim=1)
        assert relative(net(images), model.heads(model.encoder(tokens)[:, 0])) <= 1e-5


@pytest.mark.peer
def test_attention_matches_torchvision(tmp_path: Path) -> None:
    model = torchvision_vit()
    net, _ = read(model, tmp_path)
    images, layer_inputs = torch.randn(2, 3, 32, 32), []
    first_layer = model.encoder.layers[0]
    first_layer.self_attention.register_forward_pre_hook(lambda _, args: layer_inputs.append(args[0]))
    with torch.no_grad():
        model(images)
        self_attention = first_layer.self_attention
        _, weights = self_attention(
            layer_inputs[0], layer_inputs[0], layer_inputs[0], need_weights=True, average_attn_weights=False
        )
        attention = net.features(images, outputs="attention").attention
    assert relative(attention[0], weights) <= 1e-5


# Reading and writing


@pytest.mark.peer
@pytest.mark.parametrize("options", [{}, {"representation_size": 24}])
def test_written_file_loads_strictly_and_equals_the_original(options: dict[str, Any], tmp_path: Path) -> None:
    model = torchvision_vit(**options)
    net, info = read(model, tmp_path)
    checkpoint.write(net, info, tmp_path / "again.pth", to="torchvision")
    state = torch.load(tmp_path / "again.pth", weights_only=True)
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    new_model = torchvision_vit(**options)
    new_model.load_state_dict(state, strict=True)


def test_old_names_of_the_mlp_are_read(tmp_path: Path) -> None:
    net = randomized(build(SMALL))
    checkpoint.write(net, info_of(SMALL), tmp_path / "new.pth", to="torchvision")
    state = torch.load(tmp_path / "new.pth", weights_only=True)
    old_state = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()}
    assert old_state.keys() != state.keys()
    torch.save({"model": old_state, "epoch": 3}, tmp_path / "old.pth")
    reloaded, _ = checkpoint.read(tmp_path / "old.pth")
    assert all(torch.equal(reloaded.state_dict()[name], value) for name, value in net.state_dict().items())


def test_google_file_round_trips_through_torchvision_bit_for_bit(tmp_path: Path) -> None:
    config = SMALL.replace(activation="gelu-tanh", pre_logits=16)
    net = randomized(build(config))
    checkpoint.write(net, info_of(config), tmp_path / "first.npz", to="google")
    net, info = checkpoint.read(tmp_path / "first.npz")
    with pytest.raises(ConversionError, match="the tanh form of GELU"):
        checkpoint.write(net, info, tmp_path / "second.pth", to="torchvision")
    checkpoint.write(net, info, tmp_path / "second.pth", to="torchvision", approximate=True)
    net, info = checkpoint.read(tmp_path / "second.pth")
    assert info.config == config.replace(activation="gelu", resample="torchvision")
    checkpoint.write(net, info, tmp_path / "third.npz", to="google", approximate=True)
    assert (tmp_path / "first.npz").read_bytes() == (tmp_path / "third.npz").read_bytes()


# Values that the file does not store


def inferred_info(config: ViTConfig) -> ModelInfo:
    """The ModelInfo inferred from the names and shapes of this config."""
    state = build(config, meta=True).state_dict()
    names = TORCHVISION.table(config).write(state, config)
    return TORCHVISION.infer_info(Archive("memory", LazyTensors.from_tensors(names)))


@pytest.mark.parametrize(
    ("width", "depth", "mlp", "heads"), [(1280, 32, 5120, 16), (1024, 24, 4096, 16), (128, 1, 64, 2)]
)
def test_num_heads_are_those_of_published_sizes_or_have_width_64(width: int, depth: int, mlp: int, heads: int) -> None:
    info = inferred_info(SMALL.replace(width=width, depth=depth, mlp_dim=mlp, num_heads=heads))
    assert isinstance(info.config, ViTConfig)
    assert info.config.num_heads == heads
    assert any(f"{heads} are assumed" in note for note in info.notes)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_preprocessing_matches_torchvision_for_published_files(name: str) -> None:
    models = import_peer("torchvision").models
    for weights in models.get_model_weights(name):
        if weights.name == "IMAGENET1K_SWAG_LINEAR_V1":
            continue  # not distinguishable from the others by its tensors, as a note says
        with torch.device("meta"):
            state = models.get_model(name, image_size=weights.meta["min_size"][0]).state_dict()
        info = TORCHVISION.infer_info(Archive("memory", LazyTensors.from_tensors(state)))
        transforms, preprocess = weights.transforms(), info.preprocess
        assert (preprocess.resize, preprocess.resize_to, preprocess.image_size) == (
            "short",
            transforms.resize_size[0],
            2 * (transforms.crop_size[0],),
        )
        assert (preprocess.interpolation, preprocess.antialias) == (transforms.interpolation.value, True)
        assert (preprocess.mean, preprocess.std) == (tuple(transforms.mean), tuple(transforms.std))
        assert (info.labels, info.family, info.task) == (None, "ViT", "classify")
        assert "the file does not store class names." in info.notes
        assert any("SWAG" in note for note in info.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.pos_embedding": torch.zeros(1, 16, 64)}, "16 rows, which is not a square grid plus a class token"),
        ({"encoder.pos_embedding": None}, "missing encoder.pos_embedding"),
        ({"encoder.layers.encoder_layer_1.ln_2.bias": None}, "missing encoder.layers.encoder_layer_1.ln_2.bias"),
        ({"heads.tail.weight": torch.zeros(2)}, "unexpected heads.tail.weight"),
    ],
)
def test_mismatched_file_is_an_error_that_names_the_tensor(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    net = randomized(build(SMALL))
    state = TORCHVISION.table(SMALL).write(net.state_dict(), SMALL) | change
    torch.save({name: value for name, value in state.items() if value is not None}, tmp_path / "odd.pth")
    with pytest.raises(FormatError, match=message):
        checkpoint.read(tmp_path / "odd.pth")


def test_num_heads_that_cannot_be_inferred_are_an_error() -> None:
    with pytest.raises(FormatError, match="it cannot be guessed for width 48"):
        inferred_info(SMALL.replace(width=48, num_heads=4))


# Unsupported parts


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"num_registers": 2}, "registers"),
        ({"layer_scale": 0.1}, "LayerScale"),
        ({"distilled": True}, "a distillation token"),
        ({"pool": "gap", "class_token": False}, "a network without a class token"),
        ({"pool": "map", "class_token": False}, "a network without a class token"),
        ({"pool": "map"}, "a class token beside pool='map'"),
        ({"stem": StemConfig(layers=(1,), width_factor=0.5), "patch_size": 1}, "a ResNet stem"),
        ({"position": "sincos-2d"}, "sincos-2d positions"),
        ({"position": "none"}, "a network without positions"),
        ({"position_on_class": False}, "a class token without a position"),
        ({"channels": 1}, "1 channels (torchvision has 3)"),
        ({"patch_size": (8, 4)}, "a patch of 8x4"),
        ({"image_size": (32, 48)}, "a grid of 4x6 patches, which is not square"),
        ({"num_classes": 0}, "a network without a head"),
        ({"head_bias": False}, "a head without bias"),
    ],
)
def test_unsupported_part_is_refused_by_name(options: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = SMALL.replace(**options)
    with pytest.raises(ConversionError, match=re.escape(part)):
        checkpoint.write(build(config), info_of(config), tmp_path / "never.pth", to="torchvision")
    assert list(tmp_path.iterdir()) == []


def test_a_bit_network_is_refused() -> None:
    assert TORCHVISION.unsupported_parts(info_of(BiTConfig())) == ["a BiT ResNet"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"activation": "gelu-tanh"}, "the tanh form of GELU"),
        ({"activation": "gelu-quick"}, "QuickGELU"),
        ({"norm_eps": 1e-12}, "norm_eps=1e-12"),
        ({"num_heads": 4}, "num_heads=4"),
    ],
)
def test_inexact_convention_requires_approximate(options: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = SMALL.replace(**options)
    net = build(config)
    with pytest.raises(ConversionError, match=re.escape(part)):
        checkpoint.write(net, info_of(config), tmp_path / "net.pth", to="torchvision")
    checkpoint.write(net, info_of(config), tmp_path / "net.pth", to="torchvision", approximate=True)
    assert (tmp_path / "net.pth").exists()
