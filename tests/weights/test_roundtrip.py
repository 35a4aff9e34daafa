"""Every network through every pair of formats: the same tensors, the same numbers, or a refusal by name."""

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
from small_models import FORMATS
from strategies import near, vit_configs
from torch import Tensor, nn

from vitrail.config import BiTConfig, StemConfig, ViTConfig, pair
from vitrail.errors import ConversionError
from vitrail.models import Net, build
from vitrail.weights import checkpoint, facebook
from vitrail.weights.archive import open_archive
from vitrail.weights.model_info import ModelInfo, default_preprocess

Config = ViTConfig | BiTConfig

BASE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "width": 128,
    "depth": 1,
    "num_heads": 2,
    "mlp_dim": 192,
    "num_classes": 5,
}
TORCH = BASE | {"activation": "gelu", "resample": "timm"}
CLIP = {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5, "activation": "gelu-quick"}
DINOV2 = {"image_size": 70, "patch_size": 14, "mlp_dim": 512, "num_classes": 0, "layer_scale": 1e-5}
TIMMS: dict[str, Any] = {"norm_eps": 1e-5, "standardize": "var", "standardize_eps": 1e-8}
TINY = {"depth": 1, "width": 64, "num_heads": 1}


def vit(**options: Any) -> ViTConfig:
    return ViTConfig(**TORCH | options)


def hybrid(layers: tuple[int, ...], patch: int = 1, **stem: Any) -> ViTConfig:
    image = patch * StemConfig(layers=layers).stride * 2
    return vit(**TINY, stem=StemConfig(layers=layers, **stem), patch_size=patch, image_size=image)


def bit(**options: Any) -> BiTConfig:
    small: dict[str, Any] = {"layers": (1, 1), "width_factor": 0.5, "image_size": 64, "num_classes": 5}
    return BiTConfig(**small | options)


# Which network fits which format.
# =  exactly: what is read back computes the same numbers, bit for bit
# ~  the tensors fit, but the format or its code has fixed a convention: only with approximate=True
# .  refused, in a sentence that matches the last column
# fmt: off
TABLE: dict[str, tuple[Config, str, str]] = {
    #                                                                 vitrail
    #                                                                 | timm
    #                                                                 | | huggingface
    #                                                                 | | | torchvision
    #                                                                 | | | | google
    #                                                                 | | | | | big_vision
    #                                                                 | | | | | | facebook
    # The usual ones
    "ViT as PyTorch computes it": (vit(),                            "= = = = ~ . =", "class token with a position"),
    "ViT as the original does": (ViTConfig(**BASE),                  "= = = ~ = . ~", "class token with a position"),
    "big_vision with a token": (ViTConfig(**BASE, position_on_class=False),
                                                                     "= = . . . = ~", "class token without a position"),
    "big_vision": (ViTConfig(**BASE, class_token=False, pool="gap", position="sincos-2d"),
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
    "SigLIP": (ViTConfig(**BASE | {"class_token": False, "pool": "map", "num_classes": 0}),
                                                                     "= = = . . = .", "map|attention pool|class token"),
    # One thing changed at a time
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
    "an edge left out": (vit(image_size=35, uncovered="ignore"),     "= = = ~ ~ . ~", "class token with a position"),
    "oblong patches": (vit(patch_size=(8, 4)),                       "= = . . . . .", "not square"),
    "oblong patches, square grid": (vit(patch_size=(8, 4), image_size=(32, 16)),
                                                                     "= = . . ~ . =", "not square|with a position"),
    "no positions": (vit(position="none"),                           "= = . . ~ . .", "without positions"),
    "learned-2d": (vit(position="learned-2d"),                       "= . . . . . .", "learned-2d positions"),
    "relative": (vit(position="relative"),                           "= . . . . . .", "relative positions"),
    "sin-cos": (vit(position="sincos-2d"),                           "= . . . . ~ .", "sincos-2d positions"),
    "rope": (vit(position="rope-2d"),                                "= . . . . . .", "rope-2d positions"),
    "positions at every layer": (vit(position_at="layers"),          "= . . . . . .", "at (the|every) layer"),
    "one position for all layers": (vit(position_at="shared"),       "= . . . . . .", "at (the|every) layer"),
    # ResNets
    "R + ViT, timm's": (hybrid((), 8, **TIMMS),                      "= = . . ~ . .", "stem"),
    "R + ViT, the original's": (hybrid((), 8),                       "= ~ . . ~ . .", "stem"),
    "a narrow stem": (hybrid((1, 1), 2, width_factor=0.5),           "= . . . ~ . .", "stem"),
    "BiT, the original's": (bit(),                                   "= . ~ . = ~ .", "BiT"),
    "BiT, big_vision's": (bit(root_pad="none"),                      "= . ~ . ~ = .", "BiT"),
    "BiT, Hugging Face's": (bit(standardize_eps=1e-8),               "= . = . ~ ~ .", "BiT"),
}
LARGE: dict[str, tuple[Config, str]] = {
    "R26 + ViT": (hybrid((2, 2, 2, 2)),                              "= ~ . . ~ . ."),
    "R50 + ViT, three stages": (hybrid((3, 4, 9), **TIMMS),          "= = . . ~ . ."),
    "R50 + ViT, four stages": (hybrid((3, 4, 6, 3), **TIMMS),        "= = . . ~ . ."),
    "BiT R50x1": (bit(layers=(3, 4, 6, 3), width_factor=1.0, standardize_eps=1e-8),
                                                                     "= = = . ~ ~ ."),
}
"""Networks of one size only: too large to go through every pair, they go round once."""
SLOW = ("R50 + ViT, four stages", "BiT R50x1")
# fmt: on

ONE_WAY = [
    TABLE[name][0]
    for name in (
        *("ViT as the original does", "another epsilon", "QuickGELU", "one channel", "an edge left out"),
        *("BiT, big_vision's", "BiT, Hugging Face's"),
    )
]
"""Their tensors have the names of the first ViT's or BiT's, which go through every pair."""

ROWS = pytest.mark.parametrize(("config", "marks", "named"), TABLE.values(), ids=TABLE.keys())


pytestmark = pytest.mark.usefixtures("quick_disk")


def model(config: Config) -> tuple[Net, ModelInfo]:
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


def write(net: Net, info: ModelInfo, folder: Path, to: str) -> Path:
    folder.mkdir()
    checkpoint.write(net, info, folder / FORMATS[to], to=to, approximate=True)
    return folder / FORMATS[to]


def stored(path: Path) -> dict[str, Tensor]:
    """The tensors of a file under its own names."""
    tensors = open_archive(path).tensors
    return {name: tensors[name] for name in tensors}


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], shapes: bool = True) -> bool:
    """The same names and the same bits, which tell a zero from its negative."""
    if set(got) != set(expected) or (shapes and any(got[n].shape != expected[n].shape for n in got)):
        return False
    return all(torch.equal(bits(got[n]), bits(expected[n])) for n in got)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.int32)


def logits(net: nn.Module, config: Config) -> Tensor:
    images = torch.randn(2, config.channels, *pair(config.image_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return net(images)


def family(config: Config, to: str) -> str | None:
    """The family to pass when reading: DeiT-III's tensors have the names of a ViT with rotary positions."""
    if to != "facebook" or not isinstance(config, ViTConfig):
        return None
    return "DeiT3" if facebook.codebase_of(config) == "DeiT-III" else None


def fitting(marks: str) -> list[str]:
    return [name for name, mark in zip(FORMATS, marks.split(), strict=True) if mark != "."]


def test_the_table_has_every_format_that_can_be_written() -> None:
    assert set(FORMATS) == {form.name for form in checkpoint.FORMATS if form.write is not None}
    assert all(len(marks.split()) == len(FORMATS) for _, marks, _ in TABLE.values())


@ROWS
def test_a_network_fits_a_format_or_is_refused_by_name(config: Config, marks: str, named: str, tmp_path: Path) -> None:
    net, info = model(config)
    for to, mark in zip(FORMATS, marks.split(), strict=True):
        form = checkpoint.format_for(to, info)
        assert ("." if form.unsupported_parts(info) else "~" if form.inexact_conventions(info) else "=") == mark, to
        if mark == "=":
            continue
        message = named if mark == "." else "Pass --approximate"
        with pytest.raises(ConversionError, match=message):
            checkpoint.write(net, info, tmp_path / FORMATS[to], to=to, approximate=mark == ".")
        assert list(tmp_path.iterdir()) == [], to


@ROWS
def test_there_and_back_through_every_pair(config: Config, marks: str, named: str, tmp_path: Path) -> None:
    """Written as A, read, written as B, read, written as A: the tensors of the first file, and always ours."""
    net, info = model(config)
    start, answer, said = net.state_dict(), logits(net, config), dict(zip(FORMATS, marks.split(), strict=True))
    for first in fitting(marks):
        path = write(net, info, tmp_path / first, first)
        expected = stored(path)
        read, heard = checkpoint.read(path, family=family(config, first))
        assert same(read.state_dict(), start), first
        if said[first] == "=":
            assert torch.equal(logits(read, config), answer), first
            assert alike(heard.config, config), first
        for second in ["vitrail"] if config in ONE_WAY else fitting(marks):
            if second == first:
                continue
            there = write(read, heard, tmp_path / f"{first} {second}", second)
            away, heard_away = checkpoint.read(there, family=family(config, second))
            assert same(away.state_dict(), start), (first, second)
            back = write(away, heard_away, tmp_path / f"{first} {second} {first}", first)
            # Where the number of heads was lost, as said, Google's tensors have it in their shapes.
            kept = getattr(heard_away.config, "num_heads", 0) == getattr(heard.config, "num_heads", 0)
            assert same(stored(back), expected, shapes=kept), (first, second)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


IRRELEVANT = {
    "resample": "each library resizes in its own way",
    "image_size": "without learned positions any size will do, and some formats do not store it",
    "uncovered": "of an image that the patches cover",
    "position_at": "None is the usual place",
    "position_init_std": "first values",
    "layer_scale": "first values, where there is one",
    "head_bias": "without a head there is none",
    "position_on_class": "without a class token or learned positions there is none",
    "rope_base": "without rope-2d there is none",
    "head_bias_init": "first values",
    "pool_norm": "one token is the same normalized before or after it is picked",
    "dropout": "training",
    "attention_dropout": "training",
    "drop_path": "training",
}
"""Settings that may come back otherwise: the bits of the logits have been compared."""


def alike(got: Config, expected: Config) -> bool:
    """The same settings, but for those that change nothing here."""
    values, others = got.to_dict(), expected.to_dict()
    differ = {name for name in others if values[name] != others[name]}
    return type(got) is type(expected) and differ <= set(IRRELEVANT)


@pytest.mark.parametrize(
    ("config", "marks"),
    [pytest.param(*row, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, row in LARGE.items()],
)
def test_large_networks_go_round_once(config: Config, marks: str, tmp_path: Path) -> None:
    """From format to format and on to the next, until all that fit have been there and the first is back."""
    net, info = model(config)
    for to, mark in zip(FORMATS, marks.split(), strict=True):
        form = checkpoint.format_for(to, info)
        assert ("." if form.unsupported_parts(info) else "~" if form.inexact_conventions(info) else "=") == mark, to
    start, round_trip = net.state_dict(), fitting(marks)
    expected = stored(write(net, info, tmp_path / "start", round_trip[0]))
    for step, to in enumerate([*round_trip, round_trip[0]]):
        path = write(net, info, tmp_path / str(step), to)
        net, info = checkpoint.read(path)
        assert same(net.state_dict(), start), to
    assert same(stored(path), expected)


@pytest.mark.parametrize("to", ["timm", "huggingface", "torchvision", "google", "facebook"])
def test_a_token_is_the_same_normalized_before_or_after_it_is_picked(to: str, tmp_path: Path) -> None:
    config = vit(pool_norm="after", activation="gelu-tanh" if to == "google" else "gelu")
    net, info = model(config)
    checkpoint.write(net, info, tmp_path / FORMATS[to], to=to)
    read, _ = checkpoint.read(tmp_path / FORMATS[to])
    assert same(read.state_dict(), net.state_dict())
    assert torch.equal(logits(read, config), logits(net, config))


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
def test_one_file_says_as_much_as_a_folder(to: str, config: ViTConfig, tmp_path: Path) -> None:
    """In its header, which their libraries pass over."""
    net, info = model(config.replace(num_classes=3 if config.num_classes else 0))
    info = info.replace(labels=("a", "b", "c")) if net.config.num_classes else info
    checkpoint.write(net, info, tmp_path / "folder", to=to)
    checkpoint.write(net, info, tmp_path / "alone.safetensors", to=to)
    folder, heard = checkpoint.read(tmp_path / "folder")
    alone, too = checkpoint.read(tmp_path / "alone.safetensors")
    assert too.replace(origin="", notes=()) == heard.replace(origin="", notes=())
    assert too.labels == info.labels
    assert same(alone.state_dict(), net.state_dict())
    assert same(folder.state_dict(), net.state_dict())
    assert torch.equal(logits(alone, net.config), logits(net, net.config))


PUBLISHED = [row[0] for row in list(TABLE.values())[:15] if isinstance(row[0], ViTConfig)]


@settings(max_examples=15)
@given(config=near(PUBLISHED))
def test_any_change_of_a_usual_network_fits_or_is_refused(
    config: ViTConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    net, info = model(config)
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
        path = write(net, info, folder / to, to)
        read, heard = checkpoint.read(path, family=family(config, to))
        assert same(read.state_dict(), net.state_dict()), to
        if exact:
            assert torch.equal(logits(read, config), logits(net, config)), to
            assert alike(heard.config, config), to
            assert same(stored(write(read, heard, folder / f"{to} again", to)), stored(path)), to
    shutil.rmtree(folder)


def nearer(config: ViTConfig) -> ViTConfig:
    """Without what timm never has, so that the rest is tried in all combinations."""
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


PLAIN = vit_configs(positions=("learned-1d", "learned-1d", "none"), hybrids=False).map(nearer)


@settings(max_examples=25)
@given(config=PLAIN)
def test_any_network_fits_timm_exactly_or_is_refused(
    config: ViTConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("timm")
    net, info = model(config)
    form = checkpoint.format_for("timm", info)
    assume(not form.unsupported_parts(info))
    read, heard = checkpoint.read(write(net, info, folder / "one", "timm"))
    assert same(read.state_dict(), net.state_dict())
    assert same(stored(write(read, heard, folder / "two", "timm")), stored(folder / "one" / "model"))
    if not form.inexact_conventions(info):
        assert torch.equal(logits(read, config), logits(net, config))
        assert alike(heard.config, config)
    shutil.rmtree(folder)


@pytest.mark.peer
@settings(max_examples=20)
@given(config=PLAIN)
def test_what_fits_timm_exactly_gives_its_own_code_the_same_numbers(
    config: ViTConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    timm = import_peer("timm")
    folder = tmp_path_factory.mktemp("timm")
    net, info = model(config)
    form = checkpoint.format_for("timm", info)
    assume(not form.unsupported_parts(info) and not form.inexact_conventions(info))
    path = write(net, info, folder / "one", "timm")
    theirs = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    assert relative(logits(net, config), logits(theirs, config)) <= 1e-5
    shutil.rmtree(folder)
