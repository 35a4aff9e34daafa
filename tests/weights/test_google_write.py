"""Writing Google's files: unsupported parts, inexact conventions, and reading with timm."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer

from vitrail.config import BiTConfig, StemConfig, ViTConfig, pair
from vitrail.errors import ConversionError
from vitrail.models import ViT, build
from vitrail.models.families import FAMILIES
from vitrail.weights import checkpoint, google
from vitrail.weights.model_info import ModelInfo

SMALL = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, num_heads=4, mlp_dim=96, num_classes=5)

UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("both", {"num_registers": 2}, "registers"),
    ("both", {"layer_scale": 0.1}, "LayerScale"),
    ("both", {"distilled": True}, "a distillation token"),
    ("both", {"qk_norm": True}, "qk-norm"),
    ("both", {"norm": "rms"}, "RMSNorm"),
    ("both", {"activation": "swiglu"}, "SwiGLU"),
    ("both", {"pre_norm": True}, "a norm before the first block"),
    ("both", {"patch_bias": False}, "a patch projection without bias"),
    ("both", {"qkv_bias": False}, "query, key and value projections without bias"),
    ("both", {"proj_bias": False}, "attention and MLP outputs without bias"),
    ("both", {"head_bias": False}, "a head without bias"),
    ("both", {"position": "learned-2d"}, "learned-2d positions"),
    ("both", {"position": "relative"}, "relative positions"),
    ("both", {"position": "rope-2d"}, "rope-2d positions"),
    ("both", {"position_at": "layers"}, "position embeddings added at every layer"),
    ("both", {"position_at": "shared"}, "position embeddings added at every layer"),
    ("both", {"image_size": (32, 48)}, "a grid of 4x6 patches, which is not square"),
    ("both", {"pool": "gap", "class_token": False, "pool_norm": "after"}, "a norm after pooling"),
    ("both", {"pool_norm": "none"}, "a network without a final norm"),
    ("both", {"pool": "token+gap"}, "pool='token+gap'"),
    ("both", {"pool": "gap"}, "a class token beside pool='gap'"),
    ("google", {"position": "sincos-2d"}, "sincos-2d positions"),
    ("google", {"pool": "map", "class_token": False}, "pool='map'"),
    ("google", {"position_on_class": False}, "a class token without a position"),
    ("big_vision", {}, "a class token with a position"),
    ("big_vision", {"position": "none"}, "a network without positions"),
    ("big_vision", {"stem": StemConfig(layers=(1,), width_factor=0.5), "patch_size": 1}, "a ResNet stem"),
]


@pytest.mark.parametrize(("to", "options", "part"), UNSUPPORTED, ids=lambda value: str(value))
def test_unsupported_part_is_refused_by_name(to: str, options: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = SMALL.replace(**options)
    info = ModelInfo(config=config, preprocess=FAMILIES["ViT"].preprocess)
    for name in ("google", "big_vision") if to == "both" else (to,):
        with pytest.raises(ConversionError, match=re.escape(part)):
            checkpoint.write(build(config), info, tmp_path / "never.npz", to=name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"activation": "gelu"}, "the exact GELU"),
        ({"activation": "gelu-quick"}, "QuickGELU"),
        ({"norm_eps": 1e-12}, "norm_eps=1e-12"),
        (
            {"stem": StemConfig(layers=(1,), width_factor=0.5, norm_eps=1e-5), "patch_size": 1},
            "the stem's norm_eps=1e-05",
        ),
        (
            {"stem": StemConfig(layers=(1,), width_factor=0.5, standardize="var"), "patch_size": 1},
            "weight standardization of the stem",
        ),
    ],
)
def test_inexact_convention_requires_approximate(options: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = SMALL.replace(**options)
    info, net = ModelInfo(config=config, preprocess=FAMILIES["ViT"].preprocess), build(config, seed=0)
    with pytest.raises(ConversionError, match=re.escape(part)):
        checkpoint.write(net, info, tmp_path / "net.npz", to="google")
    checkpoint.write(net, info, tmp_path / "net.npz", to="google", approximate=True)
    reloaded, _ = checkpoint.read(tmp_path / "net.npz")
    for name, value in net.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], value), name


def test_settings_that_do_not_affect_loading_do_not_prevent_writing() -> None:
    config = SMALL.replace(dropout=0.1, drop_path=0.2, resample="timm", pool_norm="after", head_bias_init=-10.0)
    google.GOOGLE.check_writable(ModelInfo(config=config, preprocess=FAMILIES["ViT"].preprocess))


def test_bit_network_is_unsupported() -> None:
    info = ModelInfo(config=BiTConfig(), preprocess=FAMILIES["BiT"].preprocess)
    for form in (google.GOOGLE, google.BIG_VISION):
        assert form.unsupported_parts(info) == ["a BiT ResNet"]


# Reading with timm


def write_random_network(config: ViTConfig, path: Path, to: str, approximate: bool = False) -> ViT:
    net, info = randomized(build(config)), ModelInfo(config=config, preprocess=FAMILIES["ViT"].preprocess)
    checkpoint.write(net, info, path, to=to, approximate=approximate)
    assert isinstance(net, ViT)
    return net


@pytest.mark.peer
@pytest.mark.parametrize(
    ("to", "options", "timm_options"),
    [
        ("google", {}, {}),
        ("google", {"image_size": 48, "channels": 1}, {"img_size": 48, "in_chans": 1}),
        (
            "google",
            {"pool": "gap", "class_token": False},
            {"global_pool": "avg", "class_token": False, "fc_norm": False},
        ),
        ("big_vision", {"position_on_class": False}, {"no_embed_class": True}),
        ("big_vision", {"pool": "map", "class_token": False}, {"global_pool": "map", "class_token": False}),
    ],
)
def test_timm_reads_a_written_file(
    to: str, options: dict[str, Any], timm_options: dict[str, Any], tmp_path: Path
) -> None:
    timm = import_peer("timm")
    config = SMALL.replace(**options)
    net = write_random_network(config, tmp_path / "net.npz", to)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    model = timm.models.VisionTransformer(**sizes | {"num_classes": 5, "act_layer": "gelu_tanh"} | timm_options).eval()
    model.load_pretrained(str(tmp_path / "net.npz"))
    images = torch.randn(2, config.channels, *pair(config.image_size))
    with torch.no_grad():
        assert relative(net(images), model(images)) <= 1e-5


@pytest.mark.peer
def test_timm_reads_a_written_vit_tiny(tmp_path: Path) -> None:
    timm = import_peer("timm")
    net = write_random_network(
        ViTConfig(width=192, num_heads=3, mlp_dim=768, num_classes=10), tmp_path / "net.npz", "google"
    )
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, act_layer="gelu_tanh").eval()
    model.load_pretrained(str(tmp_path / "net.npz"))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert relative(net(images), model(images)) <= 1e-5


@pytest.mark.peer
def test_timm_npz_resampling_matches_timm_on_npz_files(tmp_path: Path) -> None:
    timm = import_peer("timm")
    net = write_random_network(SMALL.replace(resample="timm-npz"), tmp_path / "net.npz", "google")
    sizes = {"img_size": (24, 56), "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    model = timm.models.VisionTransformer(**sizes, num_classes=5, act_layer="gelu_tanh").eval()
    model.load_pretrained(str(tmp_path / "net.npz"))
    images = torch.randn(2, 3, 24, 56)
    with torch.no_grad():
        assert relative(net(images), model(images)) <= 1e-5


@pytest.mark.peer
@pytest.mark.parametrize("layers", [(1, 2), ()], ids=["two stages", "root alone"])
def test_timm_reads_a_written_hybrid(layers: tuple[int, ...], tmp_path: Path) -> None:
    """With timm's conventions in the stem, so that the logits can be compared too."""
    timm = import_peer("timm")
    hybrid = timm.models.vision_transformer_hybrid
    convolution = partial(timm.layers.StdConv2dSame, eps=1e-8)
    if layers:
        backbone = timm.models.ResNetV2(
            layers=layers, channels=(128, 256), stem_chs=32, num_classes=0, global_pool="", preact=False,
            stem_type="same", conv_layer=convolution,
        )  # fmt: skip
    else:
        backbone = hybrid.create_resnetv2_stem(3, 32, stem_type="same", preact=False, conv_layer=convolution)
    embed = partial(hybrid.HybridEmbed, backbone=backbone, proj=True)
    sizes = {"img_size": 64, "patch_size": 2, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    model = timm.models.VisionTransformer(**sizes, num_classes=5, act_layer="gelu_tanh", embed_layer=embed).eval()

    stem = StemConfig(layers=layers, width_factor=0.5, norm_eps=1e-5, standardize="var", standardize_eps=1e-8)
    net = write_random_network(
        SMALL.replace(image_size=64, patch_size=2, stem=stem), tmp_path / "net.npz", "google", approximate=True
    )
    model.load_pretrained(str(tmp_path / "net.npz"))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert relative(net(images), model(images)) <= 1e-5
