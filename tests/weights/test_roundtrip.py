"""Every network through every pair of formats: the same tensors, the same numbers, or a refusal by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized
from hypothesis import event, given, settings
from strategies import vit_configs
from torch import Tensor

from vitrail.config import BiTConfig, StemConfig, ViTConfig, pair
from vitrail.errors import Inexpressible
from vitrail.models import Net, build
from vitrail.models.families import FAMILIES
from vitrail.weights import checkpoint
from vitrail.weights.card import Card, preprocess_for
from vitrail.weights.files import open_archive

Config = ViTConfig | BiTConfig

FORMATS = {
    "vitrail": "model",
    "timm": "model",
    "huggingface": "model",
    "torchvision": "model.pth",
    "google": "model.npz",
    "big_vision": "model.npz",
    "facebook": "model.pth",
}
"""Each format that can be written, and what its files are called."""

BASE: dict[str, Any] = {"image": 32, "patch": 8, "width": 128, "depth": 2, "heads": 2, "mlp": 192, "classes": 5}
TORCH = BASE | {"activation": "gelu", "resample": "timm"}
CLIP = {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5, "activation": "gelu-quick"}
DINOV2 = {"image": 70, "patch": 14, "mlp": 512, "classes": 0, "layer_scale": 1e-5}
TIMMS = {"norm_eps": 1e-5, "standardize": "var", "standardize_eps": 1e-8}
TINY = {"depth": 1, "width": 64, "heads": 1}


def vit(**options: Any) -> ViTConfig:
    return ViTConfig(**TORCH | options)


def hybrid(layers: tuple[int, ...], patch: int = 1, **stem: Any) -> ViTConfig:
    image = patch * StemConfig(layers=layers).stride * 2
    return vit(**TINY, stem=StemConfig(layers=layers, **stem), patch=patch, image=image)


def bit(**options: Any) -> BiTConfig:
    return BiTConfig(**{"layers": (1, 1, 1, 1), "width": 0.5, "image": 64, "classes": 5} | options)


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
    "DINOv2 with registers": (vit(**DINOV2, registers=4),            "= = = . . . =", "registers"),
    "DINOv2 g": (vit(**DINOV2 | {"activation": "swiglu", "mlp": 344}), "= = = . . . =", "SwiGLU"),
    "DINOv2 for classes": (vit(**DINOV2 | {"pool": "token+gap", "classes": 5}),
                                                                     "= . = . . . .", "token.gap|side by side"),
    "CLIP": (vit(**CLIP, head_bias=False),                           "= . = . . . .", "norm before|head without bias"),
    "CLIP without projection": (vit(**CLIP, classes=0),              "= = = . . . .", "norm before"),
    "CLIP with a head": (vit(**CLIP),                                "= = . . . . .", "norm before"),
    "SigLIP": (ViTConfig(**BASE | {"class_token": False, "pool": "map", "classes": 0}),
                                                                     "= = = . . = .", "map|attention pool|class token"),
    # One thing changed at a time
    "mean of patches": (vit(class_token=False, pool="gap"),          "= = = . ~ ~ .", "class token"),
    "mean beside a token": (vit(pool="gap"),                         "= = . . . . .", "class token beside|gap|mean"),
    "norm after a token": (vit(pool_norm="after"),                   "= = = = ~ . =", "class token with a position"),
    "no final norm": (vit(pool_norm="none"),                         "= = . . . . .", "without a (final )?norm"),
    "attention pool": (vit(class_token=False, pool="map"),           "= = . . . ~ .", "map|attention pool|class token"),
    "pool beside a token": (vit(pool="map"),                         "= . . . . . .", "attention pool|class token"),
    "tanh layer and head": (vit(pre_logits=24),                      "= . . = ~ . .", "tanh layer|with a position"),
    "tanh layer alone": (vit(pre_logits=24, classes=0),              "= . = . ~ . .", "tanh layer|position|without a h"),
    "no head": (vit(classes=0),                                      "= = = . ~ . =", "without a head|position"),
    "head without bias": (vit(head_bias=False),                      "= . . . . . .", "head without bias"),
    "registers": (vit(registers=3),                                  "= = . . . . .", "registers|head in DINOv2"),
    "registers, token unplaced": (vit(registers=3, position_on_class=False),
                                                                     "= = . . . . .", "registers|without a position"),
    "registers without a token": (vit(registers=3, class_token=False, pool="gap"),
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
    "heads of 32": (vit(heads=4),                                    "= = = ~ ~ . ~", "class token with a position"),
    "one channel": (vit(channels=1),                                 "= = = . ~ . =", "channels|position"),
    "an oblong image": (vit(image=(32, 48)),                         "= = = . . . .", "not square"),
    "oblong patches": (vit(patch=(8, 4)),                            "= = . . . . .", "not square"),
    "oblong patches, square grid": (vit(patch=(8, 4), image=(32, 16)), "= = . . ~ . =", "not square|with a position"),
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
    "a narrow stem": (hybrid((1, 1), 2, width=0.5),                  "= . . . ~ . .", "stem"),
    "BiT, the original's": (bit(),                                   "= . ~ . = ~ .", "BiT"),
    "BiT, big_vision's": (bit(root_pad="none"),                      "= . ~ . ~ = .", "BiT"),
    "BiT, Hugging Face's": (bit(standardize_eps=1e-8),               "= . = . ~ ~ .", "BiT"),
}
LARGE: dict[str, tuple[Config, str]] = {
    "R26 + ViT": (hybrid((2, 2, 2, 2)),                              "= ~ . . ~ . ."),
    "R50 + ViT, three stages": (hybrid((3, 4, 9), **TIMMS),          "= = . . ~ . ."),
    "R50 + ViT, four stages": (hybrid((3, 4, 6, 3), **TIMMS),        "= = . . ~ . ."),
    "BiT R50x1": (bit(layers=(3, 4, 6, 3), width=1.0, standardize_eps=1e-8),
                                                                     "= = = . ~ ~ ."),
}
"""Networks of one size only: too large to go through every pair, they go round once."""
# fmt: on

ROWS = pytest.mark.parametrize(("config", "marks", "named"), TABLE.values(), ids=TABLE.keys())


def model(config: Config) -> tuple[Net, Card]:
    family = "BiT" if isinstance(config, BiTConfig) else "ViT"
    card = Card(
        config=config,
        preprocess=preprocess_for(FAMILIES[family].preprocess, config),
        family=family,
        task="classify" if config.classes else "embed",
    )
    net = randomized(build(config))
    assert isinstance(net, Net)
    return net, card


def write(net: Net, card: Card, folder: Path, to: str) -> Path:
    folder.mkdir()
    checkpoint.write(net, card, folder / FORMATS[to], to=to, approximate=True)
    return folder / FORMATS[to]


def stored(path: Path) -> dict[str, bytes]:
    """The tensors of a file under its own names."""
    tensors = open_archive(path).tensors
    return {name: bits(tensors[name]) for name in tensors}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes() + str(tuple(tensor.shape)).encode()


def ours(net: Net) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in net.state_dict().items()}


def logits(net: Net, config: Config) -> Tensor:
    images = torch.randn(2, config.channels, *pair(config.image), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return net(images)


def fitting(marks: str) -> list[str]:
    return [name for name, mark in zip(FORMATS, marks.split(), strict=True) if mark != "."]


def test_the_table_has_every_format_that_can_be_written() -> None:
    assert set(FORMATS) == {form.name for form in checkpoint.FORMATS if form.write is not None}
    assert all(len(marks.split()) == len(FORMATS) for _, marks, _ in TABLE.values())


@ROWS
def test_a_network_fits_a_format_or_is_refused_by_name(config: Config, marks: str, named: str, tmp_path: Path) -> None:
    net, card = model(config)
    for to, mark in zip(FORMATS, marks.split(), strict=True):
        form = checkpoint.format_for(to, card)
        assert ("." if form.cannot(card) else "~" if form.drift(card) else "=") == mark, to
        if mark == "=":
            continue
        message = named if mark == "." else "Pass --approximate"
        with pytest.raises(Inexpressible, match=message):
            checkpoint.write(net, card, tmp_path / FORMATS[to], to=to, approximate=mark == ".")
        assert list(tmp_path.iterdir()) == [], to


@ROWS
def test_there_and_back_through_every_pair(config: Config, marks: str, named: str, tmp_path: Path) -> None:
    """Written as A, read, written as B, read, written as A: the tensors of the first file, and always ours."""
    net, card = model(config)
    start, said = ours(net), dict(zip(FORMATS, marks.split(), strict=True))
    for first in fitting(marks):
        path = write(net, card, tmp_path / first, first)
        wanted = stored(path)
        read, heard = checkpoint.read(path)
        assert ours(read) == start, first
        if said[first] == "=":
            assert torch.equal(logits(read, config), logits(net, config)), first
            assert alike(heard.config, config), first
        for second in fitting(marks):
            if second == first:
                continue
            away, heard_away = checkpoint.read(write(read, heard, tmp_path / f"{first} {second}", second))
            assert ours(away) == start, (first, second)
            back = write(away, heard_away, tmp_path / f"{first} {second} {first}", first)
            assert stored(back) == wanted, (first, second)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


IRRELEVANT = {
    "resample": "each library resizes in its own way",
    "image": "without learned positions any size will do, and some formats do not store it",
    "position_std": "first values",
    "layer_scale": "first values, where there is one",
    "head_bias": "without a head there is none",
    "head_bias_init": "first values",
    "pool_norm": "one token is the same normalised before or after it is picked",
    "dropout": "training",
    "attention_dropout": "training",
    "path_dropout": "training",
}
"""Settings that may come back otherwise: the bits of the logits have been compared."""


def alike(got: Config, wanted: Config) -> bool:
    """The same settings, but for those that change nothing here."""
    values, others = got.to_dict(), wanted.to_dict()
    differ = {name for name in others if values[name] != others[name]}
    return type(got) is type(wanted) and differ <= set(IRRELEVANT)


@pytest.mark.parametrize(("config", "marks"), LARGE.values(), ids=LARGE.keys())
def test_large_networks_go_round_once(config: Config, marks: str, tmp_path: Path) -> None:
    """From format to format and on to the next, until all that fit have been there and the first is back."""
    net, card = model(config)
    for to, mark in zip(FORMATS, marks.split(), strict=True):
        form = checkpoint.format_for(to, card)
        assert ("." if form.cannot(card) else "~" if form.drift(card) else "=") == mark, to
    start, round_trip = ours(net), fitting(marks)
    wanted = stored(write(net, card, tmp_path / "start", round_trip[0]))
    for step, to in enumerate([*round_trip, round_trip[0]]):
        path = write(net, card, tmp_path / str(step), to)
        net, card = checkpoint.read(path)
        assert ours(net) == start, to
    assert stored(path) == wanted


@pytest.mark.parametrize("to", ["timm", "huggingface"])
@pytest.mark.parametrize(
    "config",
    [
        vit(heads=4),
        vit(activation="gelu-quick"),
        vit(image=(32, 48)),
        vit(distilled=True),
        vit(**DINOV2 | {"heads": 8}, registers=2),
        vit(**CLIP, classes=0),
    ],
    ids=["heads", "activation", "oblong", "distilled", "registers", "CLIP"],
)
def test_one_file_says_as_much_as_a_folder(to: str, config: ViTConfig, tmp_path: Path) -> None:
    """In its header, which their libraries pass over."""
    net, card = model(config.but(classes=3 if config.classes else 0))
    card = card.but(labels=("a", "b", "c")) if net.config.classes else card
    checkpoint.write(net, card, tmp_path / "folder", to=to)
    checkpoint.write(net, card, tmp_path / "alone.safetensors", to=to)
    folder, heard = checkpoint.read(tmp_path / "folder")
    alone, too = checkpoint.read(tmp_path / "alone.safetensors")
    assert too.but(origin="", notes=()) == heard.but(origin="", notes=())
    assert too.labels == card.labels
    assert ours(alone) == ours(folder) == ours(net)
    assert torch.equal(logits(alone, net.config), logits(net, net.config))


@settings(max_examples=120)
@given(config=vit_configs(positions=("learned-1d", "learned-1d", "none"), hybrids=False))
def test_any_network_fits_timm_exactly_or_is_refused(
    config: ViTConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("timm")
    net, card = model(config)
    form = checkpoint.format_for("timm", card)
    if refused := form.cannot(card):
        event("refused")
        with pytest.raises(Inexpressible, match="timm's format has no place for"):
            checkpoint.write(net, card, folder / "model", to="timm", approximate=True)
        assert refused
        assert list(folder.iterdir()) == []
    else:
        exact = not form.drift(card)
        event("exact" if exact else "approximate")
        read, heard = checkpoint.read(write(net, card, folder / "one", "timm"))
        assert ours(read) == ours(net)
        assert stored(write(read, heard, folder / "two", "timm")) == stored(folder / "one" / "model")
        if exact:
            assert torch.equal(logits(read, config), logits(net, config))
            assert alike(heard.config, config)
    shutil.rmtree(folder)
