"""Round trips through every pair of formats: equal tensors and logits, or a refusal that names the unsupported part."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from hypothesis import assume, event, given, settings
from small_models import FORMATS, ONE_BLOCK
from strategies import variants_of, vit_configs
from torch import Tensor, nn

from vitrail.config import BiTConfig, StemConfig, ViTConfig, pair
from vitrail.errors import ConversionError
from vitrail.models import Net, build
from vitrail.weights import checkpoint, facebook
from vitrail.weights.archive import open_archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo

Config = ViTConfig | BiTConfig

TORCH = ONE_BLOCK | {"activation": "gelu", "resample": "timm"}
CLIP = {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5, "activation": "gelu-quick"}
DINOV2 = {"image_size": 70, "patch_size": 14, "mlp_dim": 512, "num_classes": 0, "layer_scale": 1e-5}
TIMM_STEM: dict[str, Any] = {"norm_eps": 1e-5, "standardize": "var", "standardize_eps": 1e-8}
TINY = {"depth": 1, "width": 64, "num_heads": 1}


def vit(**options: Any) -> ViTConfig:
    return ViTConfig(**TORCH | options)


def hybrid(layers: tuple[int, ...], patch: int = 1, **stem: Any) -> ViTConfig:
    image = patch * StemConfig(layers=layers).stride * 2
    return vit(**TINY, stem=StemConfig(layers=layers, **stem), patch_size=patch, image_size=image)


def bit(**options: Any) -> BiTConfig:
    small: dict[str, Any] = {"layers": (1, 1), "width_factor": 0.5, "image_size": 64, "num_classes": 5}
    return BiTConfig(**small | options)


# Which format supports which network.
# =  exact: the network read back gives the same logits, bit for bit
# ~  the tensors fit, but the format or its code assumes another convention: requires approximate=True
# .  refused, with an error that matches the last column
# fmt: off
TABLE: dict[str, tuple[Config, str, str]] = {
    #                                                                 vitrail
    #                                                                 | timm
    #                                                                 | | huggingface
    #                                                                 | | | torchvision
    #                                                                 | | | | google
    #                                                                 | | | | | big_vision
    #                                                                 | | | | | | facebook
    # Published networks
    "ViT with PyTorch conventions": (vit(),                          "= = = = ~ . =", "class token with a position"),
    "ViT as in the original code": (ViTConfig(**ONE_BLOCK),          "= = = ~ = . ~", "class token with a position"),
    "big_vision with a token": (ViTConfig(**ONE_BLOCK, position_on_class=False),
                                                                     "= = . . . = ~", "class token without a position"),
    "big_vision": (ViTConfig(**ONE_BLOCK, class_token=False, pool="gap", position="sincos-2d"),
                                                                     "= . . . . = .", "sincos-2d positions"),
    "DeiT distilled": (vit(distilled=True),                          "= = = . . . =", "distillation token"),
    "DeiT-III": (vit(layer_scale=1e-6, position_on_class=False),     "= = . . . . =", "LayerScale|without a position"),
    "MAE fine-tuned": (vit(pool="gap", pool_norm="after"),           "= = . . . . =", "after pooling|before the norm"),
    "DINOv2": (vit(**DINOV2),                                        "= = = . . . =", "LayerScale"),
    "DINOv2 with registers": (vit(**DINOV2, num_registers=4),        "= = = . . . =", "registers"),
    "DINOv2 g": (vit(**DINOV2 | {"activation": "swiglu", "mlp_dim": 344}), "= = = . . . =", "SwiGLU"),
    "DINOv2 for classes": (vit(**DINOV2 | {"pool": "token+gap", "num_classes": 5}),
                                                                     "= . = . . . .", "token.gap"),
    "CLIP": (vit(**CLIP, head_bias=False),                           "= . = . . . .", "norm before|head without bias"),
    "CLIP without projection": (vit(**CLIP, num_classes=0),          "= = = . . . .", "norm before"),
    "CLIP with a head": (vit(**CLIP),                                "= = . . . . .", "norm before"),
    "SigLIP": (ViTConfig(**ONE_BLOCK | {"class_token": False, "pool": "map", "num_classes": 0}),
                                                                     "= = = . . = .", "map|attention pool|class token"),
    # One setting changed at a time
    "mean of patches": (vit(class_token=False, pool="gap"),          "= = = . ~ ~ .", "class token"),
    "mean beside a token": (vit(pool="gap"),                         "= = . . . . .", "class token beside|gap|mean"),
    "no final norm": (vit(pool_norm="none"),                         "= = . . . . .", "without a (final )?norm"),
    "attention pool": (vit(class_token=False, pool="map"),           "= = . . . ~ .", "map|attention pool|class token"),
    "pool beside a token": (vit(pool="map"),                         "= . . . . . .", "attention pool|class token"),
    "CoCa's pool": (vit(pool="coca", pool_width=24, pool_heads=3),   "= . . . . . .", "CoCa|coca|attention pool"),
    "tanh layer and head": (vit(pre_logits=24),                      "= . . = ~ . .", "tanh layer|with a position"),
    "tanh layer alone": (vit(pre_logits=24, num_classes=0),          "= . = . ~ . .", "tanh|position|without a head"),
    "no head": (vit(num_classes=0),                                  "= = = . ~ . =", "without a head|position"),
    "head without bias": (vit(head_bias=False),                      "= . . . . . .", "head without bias"),
    "registers": (vit(num_registers=3),                              "= = . . . . .", "registers|head in DINOv2"),
    "registers, token unplaced": (vit(num_registers=3, position_on_class=False),
                                                                     "= = . . . . .", "registers|without a position"),
    "registers without a token": (vit(num_registers=3, class_token=False, pool="gap"),
                                                                     "= = . . . . .", "registers|class token"),
    "LayerScale": (vit(layer_scale=0.1),                             "= = . . . . .", "LayerScale|DINOv2"),
    "SwiGLU": (vit(activation="swiglu"),                             "= = . . . . .", "SwiGLU"),
    "qk-norm": (vit(qk_norm=True),                                   "= = . . . . .", "qk-norm"),
    "RMSNorm": (vit(norm="rms"),                                     "= = . . . . .", "RMSNorm"),
    "norm before the blocks": (vit(pre_norm=True),                   "= . . . . . .", "norm before"),
    "no patch bias": (vit(patch_bias=False),                         "= . . . . . .", "patch projection without bias"),
    "no qkv bias": (vit(qkv_bias=False),                             "= = = . . . =", "without bias"),
    "no output bias": (vit(proj_bias=False),                         "= = . . . . .", "without bias"),
    "another epsilon": (vit(norm_eps=1e-12),                         "= ~ = ~ ~ . ~", "class token with a position"),
    "QuickGELU": (vit(activation="gelu-quick"),                      "= = = ~ ~ . ~", "class token with a position"),
    "heads of 32": (vit(num_heads=4),                                "= = = ~ ~ . ~", "class token with a position"),
    "one channel": (vit(channels=1),                                 "= = = . ~ . =", "channels|position"),
    "an oblong image": (vit(image_size=(32, 48)),                    "= = = . . . .", "not square"),
    "uncovered edge": (vit(image_size=35, uncovered="ignore"),       "= = = ~ ~ . ~", "class token with a position"),
    "oblong patches": (vit(patch_size=(8, 4)),                       "= = . . . . .", "not square"),
    "oblong patches, square grid": (vit(patch_size=(8, 4), image_size=(32, 16)),
                                                                     "= = . . ~ . =", "not square|with a position"),
    "no positions": (vit(position="none"),                           "= = . . ~ . .", "without positions"),
    "learned-2d": (vit(position="learned-2d"),                       "= . . . . . .", "learned-2d positions"),
    "relative": (vit(position="relative"),                           "= . . . . . .", "relative positions"),
    "sin-cos": (vit(position="sincos-2d"),                           "= . . . . ~ .", "sincos-2d positions"),
    "rope": (vit(position="rope-2d"),                                "= . . . . . .", "rope-2d|LayerScale"),
    "positions at every layer": (vit(position_at="layers"),          "= . . . . . .", "at (the|every) layer"),
    "one position for all layers": (vit(position_at="shared"),       "= . . . . . .", "at (the|every) layer"),
    # ResNets
    "R + ViT, timm's": (hybrid((), 8, **TIMM_STEM),                  "= = . . ~ . .", "stem"),
    "R + ViT, the original's": (hybrid((), 8),                       "= ~ . . ~ . .", "stem"),
    "a narrow stem": (hybrid((1, 1), 2, width_factor=0.5),           "= . . . ~ . .", "stem"),
    "BiT, the original's": (bit(),                                   "= . ~ . = ~ .", "BiT"),
    "BiT, big_vision's": (bit(root_pad="none"),                      "= . ~ . ~ = .", "BiT"),
    "BiT, Hugging Face's": (bit(standardize_eps=1e-8),               "= . = . ~ ~ .", "BiT"),
}
LARGE: dict[str, tuple[Config, str]] = {
    "R26 + ViT": (hybrid((2, 2, 2, 2)),                              "= ~ . . ~ . ."),
    "R50 + ViT, three stages": (hybrid((3, 4, 9), **TIMM_STEM),      "= = . . ~ . ."),
    "R50 + ViT, four stages": (hybrid((3, 4, 6, 3), **TIMM_STEM),    "= = . . ~ . ."),
    "BiT R50x1": (bit(layers=(3, 4, 6, 3), width_factor=1.0, standardize_eps=1e-8),
                                                                     "= = = . ~ ~ ."),
}
"""Networks too large for every pair: a single round trip through all formats."""
SLOW = ("R50 + ViT, four stages", "BiT R50x1")
# fmt: on

ONE_WAY = [
    TABLE[name][0]
    for name in (
        *("ViT as in the original code", "another epsilon", "QuickGELU", "one channel", "uncovered edge"),
        *("BiT, big_vision's", "BiT, Hugging Face's"),
    )
]
"""Networks whose tensor names equal those of another ViT or BiT, which is tested with every pair."""

every_row = pytest.mark.parametrize(("config", "marks", "refusal"), TABLE.values(), ids=TABLE.keys())


pytestmark = pytest.mark.usefixtures("quick_disk")


def random_model(config: Config) -> tuple[Net, ModelInfo]:
    family = "BiT" if isinstance(config, BiTConfig) else "ViT"
    info = ModelInfo(
        config=config,
        preprocess=default_preprocess(family, config),
        family=family,
        task="classify" if config.num_classes else "embed",
    )
    net = randomized(build(config, meta=True).to_empty(device="cpu"))
    assert isinstance(net, Net)
    return net, info


def write_file(net: Net, info: ModelInfo, folder: Path, to: str) -> Path:
    folder.mkdir()
    checkpoint.write(net, info, folder / FORMATS[to], to=to, approximate=True)
    return folder / FORMATS[to]


def stored_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by the names in the file."""
    tensors = open_archive(path).tensors
    return {name: tensors[name] for name in tensors}


def same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], shapes: bool = True) -> bool:
    """Whether names and bits are equal; 0.0 and -0.0 differ."""
    if set(actual) != set(expected) or (shapes and any(actual[name].shape != expected[name].shape for name in actual)):
        return False
    return all(torch.equal(bit_pattern(actual[name]), bit_pattern(expected[name])) for name in actual)


def bit_pattern(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.int32)


def logits(net: nn.Module, config: Config) -> Tensor:
    images = torch.randn(2, config.channels, *pair(config.image_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return net(images)


def family_option(config: Config, to: str) -> str | None:
    """The family to pass when reading: DeiT-III's tensor names are also those of a ViT with rotary positions."""
    if to != "facebook" or not isinstance(config, ViTConfig):
        return None
    return "DeiT3" if facebook.codebase_of(config) == "DeiT-III" else None


def supporting_formats(marks: str) -> list[str]:
    return [name for name, mark in zip(FORMATS, marks.split(), strict=True) if mark != "."]


def test_table_has_every_writable_format() -> None:
    of_vits = (form for form in checkpoint.FORMATS if ViTConfig in form.config_types)
    assert set(FORMATS) == {form.name for form in of_vits if form.write is not None}
    assert all(len(marks.split()) == len(FORMATS) for _, marks, _ in TABLE.values())


@every_row
def test_network_is_supported_or_refused_by_name(config: Config, marks: str, refusal: str, tmp_path: Path) -> None:
    net, info = random_model(config)
    for to, mark in zip(FORMATS, marks.split(), strict=True):
        form = checkpoint.format_for(to, info)
        assert ("." if form.unsupported_parts(info) else "~" if form.inexact_conventions(info) else "=") == mark, to
        if mark == "=":
            continue
        message = refusal if mark == "." else "Pass --approximate"
        with pytest.raises(ConversionError, match=message):
            checkpoint.write(net, info, tmp_path / FORMATS[to], to=to, approximate=mark == ".")
        assert list(tmp_path.iterdir()) == [], to


@every_row
def test_round_trip_through_every_pair_of_formats(config: Config, marks: str, refusal: str, tmp_path: Path) -> None:
    """Writes A, reads, writes B, reads, writes A: both files in format A hold equal tensors, as do the networks."""
    net, info = random_model(config)
    state, output, mark_of = net.state_dict(), logits(net, config), dict(zip(FORMATS, marks.split(), strict=True))
    for first in supporting_formats(marks):
        path = write_file(net, info, tmp_path / first, first)
        expected = stored_tensors(path)
        loaded, loaded_info = checkpoint.read(path, family=family_option(config, first))
        assert same_tensors(loaded.state_dict(), state), first
        if mark_of[first] == "=":
            assert torch.equal(logits(loaded, config), output), first
            assert equivalent(loaded_info.config, config), first
        for second in ["vitrail"] if config in ONE_WAY else supporting_formats(marks):
            if second == first:
                continue
            second_path = write_file(loaded, loaded_info, tmp_path / f"{first} {second}", second)
            second_net, second_info = checkpoint.read(second_path, family=family_option(config, second))
            assert same_tensors(second_net.state_dict(), state), (first, second)
            back_path = write_file(second_net, second_info, tmp_path / f"{first} {second} {first}", first)
            # If an inexact format lost the number of heads, the shapes of Google's tensors differ.
            same_heads = getattr(second_info.config, "num_heads", 0) == getattr(loaded_info.config, "num_heads", 0)
            assert same_tensors(stored_tensors(back_path), expected, shapes=same_heads), (first, second)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


IRRELEVANT = {
    "resample": "each library has its own resampling",
    "image_size": "arbitrary without learned positions; some formats do not store it",
    "uncovered": "no effect if the patches cover the image",
    "position_at": "None is the default place",
    "position_init_std": "initialization",
    "layer_scale": "initialization, if there is one",
    "head_bias": "no effect without a head",
    "position_on_class": "no effect without a class token or learned positions",
    "rope_base": "no effect without rope-2d",
    "rope_periods": "no effect without rope-2d",
    "head_bias_init": "initialization",
    "pool_norm": "pooling a single token commutes with the norm",
    "dropout": "training",
    "attention_dropout": "training",
    "drop_path": "training",
}
"""Settings that may differ after a round trip, because the logits are compared bit for bit."""


def equivalent(actual: Config, expected: Config) -> bool:
    """Whether the settings are equal, except for IRRELEVANT ones."""
    actual_values, expected_values = actual.to_dict(), expected.to_dict()
    different = {name for name in expected_values if actual_values[name] != expected_values[name]}
    return type(actual) is type(expected) and different <= set(IRRELEVANT)


@pytest.mark.parametrize(
    ("config", "marks"),
    [pytest.param(*row, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, row in LARGE.items()],
)
def test_large_networks_round_trip_through_all_formats_once(config: Config, marks: str, tmp_path: Path) -> None:
    """Converts through every format that supports the network and back to the first."""
    net, info = random_model(config)
    for to, mark in zip(FORMATS, marks.split(), strict=True):
        form = checkpoint.format_for(to, info)
        assert ("." if form.unsupported_parts(info) else "~" if form.inexact_conventions(info) else "=") == mark, to
    state, formats = net.state_dict(), supporting_formats(marks)
    expected = stored_tensors(write_file(net, info, tmp_path / "start", formats[0]))
    for step, to in enumerate([*formats, formats[0]]):
        path = write_file(net, info, tmp_path / str(step), to)
        net, info = checkpoint.read(path)
        assert same_tensors(net.state_dict(), state), to
    assert same_tensors(stored_tensors(path), expected)


@pytest.mark.parametrize("to", ["timm", "huggingface", "torchvision", "google", "facebook"])
def test_norm_before_or_after_token_pooling_gives_the_same_logits(to: str, tmp_path: Path) -> None:
    config = vit(pool_norm="after", activation="gelu-tanh" if to == "google" else "gelu")
    net, info = random_model(config)
    checkpoint.write(net, info, tmp_path / FORMATS[to], to=to)
    loaded, _ = checkpoint.read(tmp_path / FORMATS[to])
    assert same_tensors(loaded.state_dict(), net.state_dict())
    assert torch.equal(logits(loaded, config), logits(net, config))


@pytest.mark.parametrize("to", ["timm", "huggingface"])
@pytest.mark.parametrize(
    "config",
    [
        vit(num_heads=4),
        vit(activation="gelu-quick"),
        vit(image_size=(32, 48)),
        vit(distilled=True),
        vit(**DINOV2 | {"num_heads": 8}, num_registers=2),
        vit(**CLIP, num_classes=0),
    ],
    ids=["heads", "activation", "oblong", "distilled", "registers", "CLIP"],
)
def test_single_file_has_the_same_info_as_a_folder(to: str, config: ViTConfig, tmp_path: Path) -> None:
    """The info is in the header of the file, which other libraries ignore."""
    net, info = random_model(config.replace(num_classes=3 if config.num_classes else 0))
    info = info.replace(labels=("a", "b", "c")) if net.config.num_classes else info
    checkpoint.write(net, info, tmp_path / "folder", to=to)
    checkpoint.write(net, info, tmp_path / "alone.safetensors", to=to)
    folder_net, folder_info = checkpoint.read(tmp_path / "folder")
    file_net, file_info = checkpoint.read(tmp_path / "alone.safetensors")
    assert file_info.replace(origin="", notes=()) == folder_info.replace(origin="", notes=())
    assert file_info.labels == info.labels
    assert same_tensors(file_net.state_dict(), net.state_dict())
    assert same_tensors(folder_net.state_dict(), net.state_dict())
    assert torch.equal(logits(file_net, net.config), logits(net, net.config))


PUBLISHED = [row[0] for row in list(TABLE.values())[:15] if isinstance(row[0], ViTConfig)]


@settings(max_examples=15)
@given(config=variants_of(PUBLISHED))
def test_any_variant_of_a_published_network_round_trips_or_is_refused(
    config: ViTConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    net, info = random_model(config)
    for to in FORMATS:
        form = checkpoint.format_for(to, info)
        if form.unsupported_parts(info):
            event(f"{to}: refused")
            with pytest.raises(ConversionError, match=f"{to}'s format cannot represent"):
                checkpoint.write(net, info, folder / "model", to=to, approximate=True)
            assert not (folder / "model").exists()
            continue
        exact = not form.inexact_conventions(info)
        event(f"{to}: {'exact' if exact else 'approximate'}")
        path = write_file(net, info, folder / to, to)
        loaded, loaded_info = checkpoint.read(path, family=family_option(config, to))
        assert same_tensors(loaded.state_dict(), net.state_dict()), to
        if exact:
            assert torch.equal(logits(loaded, config), logits(net, config)), to
            assert equivalent(loaded_info.config, config), to
            assert same_tensors(
                stored_tensors(write_file(loaded, loaded_info, folder / f"{to} again", to)), stored_tensors(path)
            ), to
    shutil.rmtree(folder)


def closer_to_timm(config: ViTConfig) -> ViTConfig:
    """Replaces settings that timm never has, so that more examples can be written in its format."""
    pool = "token" if config.class_token and config.pool in ("map", "token+gap") else config.pool
    return config.replace(
        position_at=None,
        pre_logits=0,
        head_bias=True,
        patch_bias=not config.pre_norm,
        pool=pool,
        pool_norm="before" if pool == "map" else config.pool_norm,
        norm_eps=config.norm_eps if config.norm_eps == 1e-5 and config.norm == "layer" else 1e-6,
        norm="layer" if config.activation == "swiglu" else config.norm,
    )


TIMM_LIKE = vit_configs(positions=("learned-1d", "learned-1d", "none"), hybrids=False).map(closer_to_timm)


@settings(max_examples=25)
@given(config=TIMM_LIKE)
def test_any_network_round_trips_through_timm_or_is_refused(
    config: ViTConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("timm")
    net, info = random_model(config)
    form = checkpoint.format_for("timm", info)
    assume(not form.unsupported_parts(info))
    loaded, loaded_info = checkpoint.read(write_file(net, info, folder / "one", "timm"))
    assert same_tensors(loaded.state_dict(), net.state_dict())
    assert same_tensors(
        stored_tensors(write_file(loaded, loaded_info, folder / "two", "timm")),
        stored_tensors(folder / "one" / "model"),
    )
    if not form.inexact_conventions(info):
        assert torch.equal(logits(loaded, config), logits(net, config))
        assert equivalent(loaded_info.config, config)
    shutil.rmtree(folder)


@pytest.mark.peer
@settings(max_examples=20)
@given(config=TIMM_LIKE)
def test_exact_timm_files_give_the_same_logits_in_timm(
    config: ViTConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    timm = import_peer("timm")
    folder = tmp_path_factory.mktemp("timm")
    net, info = random_model(config)
    form = checkpoint.format_for("timm", info)
    assume(not form.unsupported_parts(info) and not form.inexact_conventions(info))
    path = write_file(net, info, folder / "one", "timm")
    theirs = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    assert relative(logits(net, config), logits(theirs, config)) <= 1e-5
    shutil.rmtree(folder)
