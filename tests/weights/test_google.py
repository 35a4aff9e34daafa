"""Reading Google's files: outputs of the original code, every variant of the tensor names, errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import relative
from conftest import golden

from vitrail.config import StemConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.models import ViT, build
from vitrail.models.families import FAMILIES
from vitrail.models.position import resample
from vitrail.weights import checkpoint, google
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.format import Format
from vitrail.weights.model_info import ModelInfo

Arrays = dict[str, Any]

ORIGINALS = ["google_token", "google_prelogits", "google_gap", "google_hybrid_patch2", "google_hybrid"]
BIG_VISION = ["bigvision_tok", "bigvision_gap_sincos", "bigvision_map", "bigvision_rep"]


def arrays(name: str) -> Arrays:
    return dict(np.load(golden(f"{name}.npz")))


def outputs(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in arrays(f"{name}_io").items()}


def archive(values: Arrays) -> Archive:
    return Archive("memory", LazyTensors.from_tensors({name: torch.as_tensor(value) for name, value in values.items()}))


def read(form: Format, values: Arrays) -> tuple[ViT, ModelInfo]:
    """Reads like `checkpoint.read`, in a given format."""
    stored = archive(values)
    prefix = form.detect(stored)
    assert prefix is not None
    stored = stored.strip_prefix(prefix)
    stored = Archive(stored.source, stored.tensors.rename(form.normalize_name))
    info = form.infer_info(stored)
    net = build(info.config, meta=True)
    net.load_state_dict(form.table(info.config).read(stored.tensors, net, info.config), assign=True)
    assert isinstance(net, ViT)
    return net.eval(), info


def assert_same_arrays(actual: Arrays, expected: Arrays) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name, strict=True)


def assert_same_weights(net: ViT, expected: ViT) -> None:
    assert_same_arrays(
        {k: v.numpy() for k, v in net.state_dict().items()}, {k: v.numpy() for k, v in expected.state_dict().items()}
    )


def save_npz(values: Arrays, path: Path) -> Path:
    np.savez(path, **values)
    return path


# Outputs of the original code


@pytest.mark.parametrize("name", ORIGINALS + BIG_VISION)
def test_outputs_match_the_original_code(name: str) -> None:
    net, info = checkpoint.read(golden(f"{name}.npz"))
    assert isinstance(net, ViT)
    expected = outputs(name)
    images = expected["images_nhwc"].permute(0, 3, 1, 2)
    with torch.no_grad():
        output = net.features(images, outputs=("logits", "pre_logits"))
        encoded = net.norm_before_pool(net.encode(*net.embed(images)))
    assert relative(net(images).detach(), expected["logits"]) <= 1e-5
    assert relative(output.logits, expected["logits"]) <= 1e-5
    if "encoded" in expected:
        assert relative(encoded, expected["encoded"]) <= 1e-5
    if "pre_logits" in expected:
        assert relative(output.pre_logits, expected["pre_logits"]) <= 1e-5
    assert info.labels is None


@pytest.mark.parametrize("name", ORIGINALS)
def test_positions_are_resampled_as_in_the_original_code(name: str) -> None:
    net, info = checkpoint.read(golden(f"{name}.npz"))
    config, expected = info.config, outputs(name)
    assert isinstance(config, ViTConfig)
    rows, columns = expected["resized_grid"].tolist()
    table = resample(net.state_dict()["positions.0.table"], (rows, columns), "google")
    patches = expected["pos_embedding_resized"][0, config.num_positioned_prefix_tokens :]
    assert (table.flatten(0, 1) - patches).abs().max() <= 1e-6
    stride = config.stem.stride if config.stem else 1
    height, width = (n * side * stride for n, side in zip((rows, columns), pair(config.patch_size), strict=True))
    resized = net.resized((height, width))
    written_positions = google.GOOGLE.table(resized.config).write(resized.state_dict(), resized.config)[
        google.ORIGINAL_POSITION
    ]
    assert (written_positions - expected["pos_embedding_resized"]).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ORIGINALS + BIG_VISION)
def test_writing_inverts_reading(name: str, tmp_path: Path) -> None:
    net, info = checkpoint.read(golden(f"{name}.npz"))
    to = "google" if name in ORIGINALS else "big_vision"
    checkpoint.write(net, info, tmp_path / "again.npz", to=to)
    written = np.load(tmp_path / "again.npz", allow_pickle=False)
    assert_same_arrays(dict(written), arrays(name))
    assert all(array.flags.c_contiguous for array in written.values())


# Config, preprocessing and labels


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("google_token", {"image_size": 40, "pool": "token"}),
        ("google_prelogits", {"image_size": 40, "pool": "token", "pre_logits": 32}),
        ("google_gap", {"image_size": 40, "pool": "gap", "class_token": False}),
        (
            "google_hybrid_patch2",
            {"image_size": 64, "patch_size": 2, "stem": StemConfig(layers=(2, 2), width_factor=0.5)},
        ),
        ("google_hybrid", {"image_size": 64, "patch_size": 1, "stem": StemConfig(layers=(2, 2, 2), width_factor=0.5)}),
        ("bigvision_tok", {"image_size": 40, "position_on_class": False}),
        ("bigvision_gap_sincos", {"image_size": 224, "pool": "gap", "class_token": False, "position": "sincos-2d"}),
        ("bigvision_map", {"image_size": 40, "pool": "map", "class_token": False}),
        ("bigvision_rep", {"image_size": 40, "pool": "gap", "class_token": False, "pre_logits": 48}),
    ],
)
def test_config_is_inferred_from_names_and_shapes(name: str, options: dict[str, Any]) -> None:
    _, info = checkpoint.read(golden(f"{name}.npz"))
    expected = {"patch_size": 8, "width": 48, "depth": 3, "num_heads": 4, "mlp_dim": 128, "num_classes": 10} | options
    assert info.config == ViTConfig(activation="gelu-tanh", norm_eps=1e-6, resample="google", **expected)
    family = "ViT" if name in ORIGINALS else "BV"
    assert (info.family, info.task) == (family, "classify")
    default = FAMILIES[family].preprocess
    assert info.preprocess.replace(image_size=224, resize_to=default.resize_to) == default
    assert info.preprocess.image_size == info.config.image_size


def test_missing_image_size_is_assumed_with_a_note() -> None:
    _, info = checkpoint.read(golden("bigvision_gap_sincos.npz"))
    assert info.notes == ("the file stores no position embedding and therefore no image size: 224x224 is assumed.",)
    values = arrays("bigvision_gap_sincos")
    values["params/embedding/kernel"] = np.zeros((13, 9, 3, 48), np.float32)
    _, info = read(google.BIG_VISION, values)
    assert info.config.image_size == (221, 225)


def test_a_file_without_a_head_gives_features() -> None:
    values = {k: v for k, v in arrays("google_token").items() if not k.startswith("head")}
    net, info = read(google.GOOGLE, values)
    assert (info.config.num_classes, info.task) == (0, "embed")
    assert net(torch.zeros(1, 3, 40, 40)).shape == (1, 48)


@pytest.mark.parametrize("zeros", [("kernel", "bias"), ("kernel",)])
def test_zero_head_is_kept_with_a_note(zeros: tuple[str, ...]) -> None:
    values = arrays("google_prelogits")
    for part in zeros:
        values[f"head/{part}"] = np.zeros_like(values[f"head/{part}"])
    net, info = read(google.GOOGLE, values)
    assert not net.head.weight.any()
    assert any("weights of the head are zero" in note for note in info.notes) == (len(zeros) == 2)


def test_file_without_positions_gives_position_none() -> None:
    values = {k: v for k, v in arrays("google_gap").items() if "pos_embedding" not in k}
    _, info = read(google.GOOGLE, values)
    assert isinstance(info.config, ViTConfig)
    assert (info.config.position, info.config.image_size) == ("none", (224, 224))


# Variants of the names


def current_flax_name(name: str) -> str:
    for old, new in [
        ("Attention_1/", "Attention_0/"),
        ("LayerNorm_2/", "LayerNorm_1/"),
        ("MlpBlock_3/", "MlpBlock_0/"),
    ]:
        name = name.replace(old, new)
    return name


def old_flax_group_norms(values: Arrays) -> Arrays:
    return {k: v[None, None, None] if re.search(r"gn(_root|_proj|\d)/", k) else v for k, v in values.items()}


NAME_VARIANTS: dict[str, Callable[[Arrays], Arrays]] = {
    "current flax": lambda values: {current_flax_name(k): v for k, v in values.items()},
    "current flax, under params/": lambda values: {f"params/{current_flax_name(k)}": v for k, v in values.items()},
    "the optimizer's target": lambda values: {f"opt/target/{k}": v for k, v in values.items()},
    "with optimizer state": lambda values: (
        {f"params/{k}": v for k, v in values.items()}
        | {f"opt/0/mu/{k}": 0 * v for k, v in values.items()}
        | {"opt/0/count": np.array(3), "chrono/accum_train_time": np.array(1.5)}
    ),
    "group norms of flax before 0.3.6": old_flax_group_norms,
}


@pytest.mark.parametrize("variant", NAME_VARIANTS)
@pytest.mark.parametrize("name", ["google_token", "google_hybrid_patch2"])
def test_every_name_variant_of_the_original_gives_the_same_network(name: str, variant: str, tmp_path: Path) -> None:
    net, info = checkpoint.read(golden(f"{name}.npz"))
    variant_net, variant_info = checkpoint.read(save_npz(NAME_VARIANTS[variant](arrays(name)), tmp_path / "other.npz"))
    assert variant_info.config == info.config
    assert_same_weights(variant_net, net)


def stack(values: Arrays) -> Arrays:
    """Stack the blocks as big_vision does with `nn.scan`."""
    blocks = [re.fullmatch(r"(.*/encoderblock)_0(/.*)", name) for name in values]
    unstacked = {k: v for k, v in values.items() if "encoderblock_" not in k}
    return unstacked | {m[1] + m[2]: np.stack([values[f"{m[1]}_{i}{m[2]}"] for i in range(3)]) for m in blocks if m}


def before_2022(values: Arrays) -> Arrays:
    """Names before 2022: positions inside the encoder, attention pooling without its own module."""
    return {
        k.removeprefix("params/").replace("MAPHead_0/", "").replace("pos_embedding", "Transformer/pos_embedding"): v
        for k, v in values.items()
    }


BIG_VISION_NAME_VARIANTS: dict[str, tuple[Format, Callable[[Arrays], Arrays]]] = {
    "without a prefix": (google.BIG_VISION, lambda values: {k.removeprefix("params/"): v for k, v in values.items()}),
    "blocks stacked": (google.BIG_VISION_SCAN, stack),
    "before 2022": (google.BIG_VISION, before_2022),
    "with optimizer state": (
        google.BIG_VISION,
        lambda values: values | {k.replace("params", "opt/1/mu"): v for k, v in values.items()},
    ),
}


@pytest.mark.parametrize("variant", BIG_VISION_NAME_VARIANTS)
@pytest.mark.parametrize("name", BIG_VISION)
def test_every_name_variant_of_big_vision_gives_the_same_network(name: str, variant: str) -> None:
    form, rename = BIG_VISION_NAME_VARIANTS[variant]
    values = rename(arrays(name))
    assert [f for f in google.FORMATS if f.detect(archive(values)) is not None] == [form]
    net, info = read(form, values)
    expected, expected_info = checkpoint.read(golden(f"{name}.npz"))
    assert info.config == expected_info.config
    assert_same_weights(net, expected)


@pytest.mark.parametrize("scan", [False, True])
def test_image_tower_of_a_siglip_file_is_read(scan: bool) -> None:
    values = {k: v for k, v in arrays("bigvision_map").items() if "/head/" not in k}
    values = stack(values) if scan else values
    values = {k.replace("params/", "params/img/"): v for k, v in values.items()}
    values |= {"params/txt/Embed_0/embedding": np.zeros((4, 4)), "params/t": np.ones(1), "params/b": np.ones(1)}
    form = google.BIG_VISION_TOWER_SCAN if scan else google.BIG_VISION_TOWER
    assert [f for f in google.FORMATS if f.detect(archive(values)) is not None] == [form]
    net, info = read(form, values)
    assert (info.family, info.task) == ("SigLIP", "embed")
    output = net.features(outputs("bigvision_map")["images_nhwc"].permute(0, 3, 1, 2), outputs="pooled")
    assert output.pooled is not None
    assert relative(output.pooled.detach(), outputs("bigvision_map")["pre_logits"]) <= 1e-5


def test_stacked_blocks_are_written_back_bit_for_bit() -> None:
    values = stack(arrays("bigvision_map"))
    net, info = read(google.BIG_VISION_SCAN, values)
    written = google.BIG_VISION_SCAN.table(info.config).write(net.state_dict(), info.config)
    assert_same_arrays({f"params/{k}": v.numpy() for k, v in written.items()}, values)


def test_bfloat16_stored_as_void_is_read(tmp_path: Path) -> None:
    exact = {k: torch.from_numpy(v) for k, v in arrays("bigvision_tok").items()}
    void = {k: v.bfloat16().view(torch.int16).numpy().view("V2") for k, v in exact.items()}
    net, _ = checkpoint.read(save_npz(void, tmp_path / "half.npz"), dtype=None)
    assert {t.dtype for t in net.state_dict().values()} == {torch.bfloat16}
    expected, _ = checkpoint.read(golden("bigvision_tok.npz"))
    for name, value in expected.state_dict().items():
        assert torch.equal(net.state_dict()[name], value.bfloat16()), name


def test_big_vision_positions_may_include_the_class_token() -> None:
    values = arrays("bigvision_tok")
    values["params/pos_embedding"] = np.random.randn(1, 26, 48).astype(np.float32)
    net, info = read(google.BIG_VISION, values)
    assert isinstance(info.config, ViTConfig)
    assert info.config.position_on_class
    assert info.config.image_size == (40, 40)
    assert torch.equal(
        net.state_dict()["positions.0.prefix"][0], torch.from_numpy(values["params/pos_embedding"][0, 0])
    )


# Errors


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("google_token", {"head/extra": np.zeros(3)}, "unexpected head/extra"),
        ("google_token", {"embedding/bias": None}, "missing embedding/bias"),
        (
            "google_token",
            {"Transformer/encoderblock_1/LayerNorm_2/scale": None},
            "missing Transformer/encoderblock_1/Lay",
        ),
        (
            "google_token",
            {"Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel": None},
            "missing .*MlpBlock_3/Dense_0",
        ),
        (
            "google_token",
            {google.ORIGINAL_POSITION: np.zeros((1, 25, 48), np.float32)},
            "25 rows, which is not a square grid plus a cl",
        ),
        (
            "google_gap",
            {google.ORIGINAL_POSITION: np.zeros((1, 26, 48), np.float32)},
            "26 rows, which is not a square grid, and",
        ),
        ("google_gap", {google.ORIGINAL_POSITION: np.zeros((25, 48), np.float32)}, "expected 3 dimensions"),
        ("google_token", {"head/kernel": np.zeros((47, 10), np.float32)}, "wrong shapes: head.weight"),
        ("bigvision_tok", {"params/MAPHead_0/probe": np.zeros((1, 1, 48), np.float32)}, "missing MAPHead_0/"),
    ],
)
def test_mismatched_file_is_an_error_that_names_the_tensor(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = {k: v for k, v in (arrays(name) | change).items() if v is not None}
    with pytest.raises(FormatError, match=message):
        checkpoint.read(save_npz(values, tmp_path / "odd.npz"))


def test_other_networks_are_not_detected() -> None:
    mixer = {"stem/kernel": np.zeros((8, 8, 3, 48)), "MixerBlock_0/LayerNorm_0/scale": np.zeros(48)}
    flexible = arrays("bigvision_tok") | {"params/embedding/kernel": np.zeros((192, 48))}  # NaFlex: a plain matrix
    for values in (mixer, flexible):
        assert [f for f in google.FORMATS if f.detect(archive(values)) is not None] == []
