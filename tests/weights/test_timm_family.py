"""The family of a bare file is inferred from its tensors, sections and script arguments, not from its file name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facebook_files import (
    HEADS,
    D,
    deit,
    deit3,
    deit_distilled,
    dino,
    dinov2,
    draw,
    encoder,
    mae,
    mae_finetuned,
    mae_with_decoder,
    read,
    save,
    training_checkpoint,
    with_prefix,
)

from vitrail.config import pair
from vitrail.config.image import IMAGENET_MEAN, IMAGENET_STD
from vitrail.data.preprocess import Preprocess
from vitrail.errors import FormatError, NotFoundError
from vitrail.weights import checkpoint

NO_PREPROCESSING = "the file does not store preprocessing; "
Maker = Callable[[], dict[str, Any]]
FILES: dict[str, tuple[Maker, str, str, str, str]] = {
    # checkpoint: (maker, family, task, resample, note)
    "DeiT": (lambda: {"model": deit()}, "DeiT", "classify", "huggingface", f"{NO_PREPROCESSING}DeiT's default is used"),
    "DeiT distilled": (deit_distilled, "DeiT", "classify", "huggingface", f"{NO_PREPROCESSING}DeiT's default is used"),
    "DeiT, training": (
        lambda: training_checkpoint(deit(), model="deit_tiny"),
        "DeiT",
        "classify",
        "huggingface",
        f"{NO_PREPROCESSING}DeiT's default is used",
    ),
    "DINO": (dino, "DINO", "embed", "dinov2", f"{NO_PREPROCESSING}DINO's default is used"),
    "DINOv2": (dinov2, "DINOv2", "embed", "dinov2", ""),
    "DINOv2 with registers": (partial(dinov2, registers=4), "DINOv2", "embed", "timm", ""),
    "DINOv2 g": (partial(dinov2, swiglu_width=344), "DINOv2", "embed", "dinov2", ""),
    "MAE": (lambda: {"model": mae()}, "MAE", "embed", "huggingface", f"{NO_PREPROCESSING}MAE's default is used"),
    "MAE, training": (
        lambda: training_checkpoint(mae_with_decoder(), model="mae_vit_base_patch16", norm_pix_loss=True),
        "MAE",
        "embed",
        "huggingface",
        "not loaded: the decoder.",
    ),
    "MAE fine-tuned": (
        lambda: {"model": mae_finetuned()},
        "MAE",
        "classify",
        "huggingface",
        f"{NO_PREPROCESSING}MAE's default is used",
    ),
    "MAE fine-tuned, class token": (
        lambda: training_checkpoint(deit(), model="vit_base_patch16", finetune="/maps/mae_pretrain_vit_base.pth"),
        "MAE",
        "classify",
        "huggingface",
        f"{NO_PREPROCESSING}MAE's default is used",
    ),
    "MAE fine-tuned, another start": (
        lambda: training_checkpoint(deit(), model="vit_base_patch16", finetune="start.pth", blr=5e-4, nb_classes=7),
        "MAE",
        "classify",
        "huggingface",
        f"{NO_PREPROCESSING}MAE's default is used",
    ),
    "MAE with its decoder": (mae_with_decoder, "MAE", "embed", "huggingface", "not loaded: the decoder."),
    "no evidence": (deit, "ViT", "classify", "timm", f"{NO_PREPROCESSING}ViT's default is used"),
}


@pytest.mark.parametrize("kind", FILES)
def test_family_is_inferred_from_the_file_content(kind: str, tmp_path: Path) -> None:
    make, family, task, resample, note = FILES[kind]
    _, info = read(make(), tmp_path)
    assert (info.family, info.task, info.config.resample) == (family, task, resample)
    assert (info.config.norm_eps, info.config.num_heads) == (1e-6, HEADS)
    assert info.config.activation == ("swiglu" if info.config.mlp_dim == 344 else "gelu")
    notes = [line for line in info.notes if not line.startswith("read 'model' of")]
    assert len(notes) == (1 if note else 0), notes
    assert all(line.startswith(note) for line in notes)
    assert not note.startswith(NO_PREPROCESSING) or "Pass --family NAME" in notes[0]
    if family != "ViT":
        assert (info.preprocess.mean, info.preprocess.std) == (IMAGENET_MEAN, IMAGENET_STD)
        assert (info.preprocess.resize, info.preprocess.interpolation) == ("short", "bicubic")
    size = (224, 224) if family == "DINOv2" else (32, 32)  # DINOv2 is trained at 518 and evaluated at 224
    assert pair(info.preprocess.image_size) == size
    expected = {"ViT": 35, "DeiT": 36, "MAE": 36, "DINO": 36, "DINOv2": 256}
    assert info.preprocess.resize_to == expected[family], "crop ratio 0.9, 0.875 or 1, rounded down"


NAMES = (
    "checkpoint1.pth",
    "deit_base_patch16_384-8de9b5d1.pth",
    "deit_3_base_224_21k.pth",
    "dino_deitsmall16_pretrain.pth",
    "dinov2_vits14_pretrain.pth",
    "mae_pretrain_vit_base.pth",
    "IN1K-vit.h.14-300e.pth.tar",
    "siglip_clip_beit_eva02.bin",
)


@pytest.mark.parametrize("kind", FILES)
def test_file_name_does_not_change_the_info(kind: str, tmp_path: Path) -> None:
    file = save(FILES[kind][0](), tmp_path, NAMES[0])
    infos = []
    for name in NAMES:
        renamed = file.rename(tmp_path / name)
        infos.append(checkpoint.read(renamed)[1].replace(origin=""))
        file = renamed
    assert all(info == infos[0] for info in infos)


def test_deit3_requires_the_family_option(tmp_path: Path) -> None:
    """DeiT-III and a RoPE-ViT with learned positions have the same tensor names."""
    state = deit3()
    with pytest.raises(FormatError, match=r"RoPE-ViT with learned positions .* pass family='DeiT3'"):
        read(state, tmp_path, "deit_3_base_224_21k.pth")
    _, info = read(state, tmp_path, family="deit3")
    assert (info.family, info.task, info.config.resample) == ("DeiT3", "classify", "huggingface")
    assert (info.preprocess.mean, info.preprocess.resize_to, info.notes) == (IMAGENET_MEAN, 32, ())


def ijepa() -> dict[str, Any]:
    """A checkpoint of the I-JEPA script: three sections, each with the prefix of DistributedDataParallel."""
    target = {name: tensor for name, tensor in encoder(num_prefix_positions=0).items() if name != "cls_token"}
    predictor = {"predictor_embed.weight": draw(8, D), "mask_token": draw(1, 1, 8)}
    sections = {"encoder": target, "predictor": predictor, "target_encoder": target}
    return {name: with_prefix("module.", state) for name, state in sections.items()} | {"epoch": 300, "lr": 1e-3}


@pytest.mark.parametrize("name", NAMES)
def test_ijepa_is_detected_by_its_sections(name: str, tmp_path: Path) -> None:
    _, info = read(ijepa(), tmp_path, name)
    assert (info.family, info.task, info.config.pool) == ("IJEPA", "embed", "gap")
    assert (info.config.activation, info.config.resample) == ("gelu", "huggingface")
    assert (info.preprocess.mean, info.preprocess.resize_to) == (IMAGENET_MEAN, 36)
    assert "read 'target_encoder' of encoder, predictor, target_encoder" in info.notes


def test_num_heads_of_unpublished_sizes_are_assumed_with_a_note(tmp_path: Path) -> None:
    _, info = checkpoint.read(save(dinov2(), tmp_path))
    assert info.config.num_heads == HEADS
    assert info.notes == (f"{HEADS} heads of width 64 are assumed; pass num_heads=... if that is wrong.",)


def test_family_can_be_passed(tmp_path: Path) -> None:
    net, info = read(mae(), tmp_path, family="DINO")
    assert (info.family, info.config.resample) == ("DINO", "dinov2")
    assert info.preprocess.mean == IMAGENET_MEAN
    assert info.notes == (), "nothing was assumed"
    assert net.config == info.config
    _, info = read(deit(), tmp_path, family="DeiT")
    assert (info.family, info.config.activation, info.config.resample) == ("DeiT", "gelu", "huggingface")
    with pytest.raises(NotFoundError, match="unknown family 'DeiTT'; did you mean 'DeiT'"):
        read(deit(), tmp_path, family="DeiTT")


def test_passing_the_detected_family_changes_nothing(tmp_path: Path) -> None:
    for make in (dinov2, partial(dinov2, registers=4), partial(dinov2, swiglu_width=344), mae_with_decoder):
        state = make()
        _, info = read(state, tmp_path)
        _, passed_info = read(state, tmp_path, family=info.family)
        assert passed_info.config == info.config
        assert (passed_info.family, passed_info.preprocess) == (info.family, info.preprocess)


def test_arguments_of_timms_training_script_are_used_or_refused(tmp_path: Path) -> None:
    kwargs = {"num_heads": 4, "act_layer": "quick_gelu", "fc_norm": False}
    args = {"gp": "avg", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "model_kwargs": kwargs}
    for name in ("vit_base_patch16_224", "hf-hub:timm/vit_base_patch16_224.augreg_in21k"):
        _, info = checkpoint.read(save(training_checkpoint(deit(), model=name, **args), tmp_path))
        assert (info.config.num_heads, info.config.activation, info.config.pool) == (4, "gelu-quick", "gap")
        assert (info.preprocess.mean, info.preprocess.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    as_dict = {"model": deit(), "args": {"model": "vit_base_patch16_224", **args}}
    assert checkpoint.read(save(as_dict, tmp_path))[1].config.num_heads == 4
    unsupported_args = args | {"model_kwargs": {"norm_layer": "simplenorm"}}
    with pytest.raises(FormatError, match="norm_layer='simplenorm' is not supported"):
        read(training_checkpoint(deit(), model="vit_base_patch16_224", **unsupported_args), tmp_path)
    assert read({"state_dict": deit(), "arch": "deit_base_patch16_224"}, tmp_path)[1].family == "DeiT"


@pytest.mark.parametrize(
    ("architecture", "args", "message"),
    [
        ("vit_base_patch16_224", {}, "embed_dim=768"),
        ("vit_base_patch16_224", {"embed_dim": 192}, "embed_dim=192"),
        ("vit_base_patch16_clip_quickgelu_224", {"num_heads": 2}, "pre_norm=True"),
        ("vit_large_patch16_siglip_512", {"num_heads": 2}, "class_token=False"),
        ("vit_base_patch16_224", {"num_heads": 2, "depth": 12}, "depth=12"),
        ("vit_base_patch16_224", {"num_heads": 2, "patch_size": 16}, "patch_size=16"),
        ("vit_base_patch16_224", {"num_heads": 2, "global_pool": "avg", "fc_norm": True}, "fc_norm=True"),
        ("vit_base_patch16_224", {"num_heads": 2, "global_pool": "map"}, r"missing attn_pool\.latent"),
    ],
)
def test_config_json_of_another_timm_model_is_refused(
    architecture: str, args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture, "model_args": args}))
    with pytest.raises(FormatError, match=message):
        checkpoint.read(save(deit(), tmp_path))


def test_config_json_mismatches_in_image_size_head_and_crop_are_noted(tmp_path: Path) -> None:
    preprocess_cfg = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 224, 224], "crop_mode": "border"}
    config = {"architecture": "vit_base_patch16_224", "num_classes": 1000, "pretrained_cfg": preprocess_cfg}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": {"num_heads": 2}}))
    assert checkpoint.read(save(deit(), tmp_path))[1].notes == (
        "the stated image size is 224x224, but the positions are for 32x32: the latter is used.",
        "config.json has num_classes=1000, but the head has 7.",
        "config.json has crop_mode='border', which is not supported and is ignored.",
    )


def test_non_square_image_is_not_padded(tmp_path: Path) -> None:
    """timm resizes to cover such a crop; resizing the short side alone would leave black bars."""
    preprocess_cfg = {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9}
    args = {"num_heads": 2, "img_size": [16, 64]}
    config = {"architecture": "vit_base_patch16_224", "pretrained_cfg": preprocess_cfg, "model_args": args}
    (tmp_path / "config.json").write_text(json.dumps(config))
    infos = [checkpoint.read(save(deit(), tmp_path))[1]]
    assert infos[0].notes == ("config.json has crop_pct=0.9, but the image is not square: crop_pct is ignored.",)
    (tmp_path / "config.json").unlink()
    infos.append(checkpoint.read(save(deit(), tmp_path), overrides={"image_size": (16, 64)}, family="DeiT")[1])
    for info in infos:
        assert (pair(info.preprocess.image_size), info.preprocess.resize_to) == ((16, 64), None)
        assert Preprocess(info.preprocess).pixels(np.full((60, 80, 3), 9, np.uint8)).min() == 9


def test_ambiguous_number_of_positions_is_noted_or_resolved_by_image_size(tmp_path: Path) -> None:
    """3 x 5 patches and a class token have as many positions as 4 x 4 patches."""
    state = deit() | {"pos_embed": draw(1, 16, D)}
    _, info = read(state, tmp_path)
    assert "none for the class token; pass image_size=(height, width) if that is wrong." in info.notes[0]
    _, info = checkpoint.read(save(state, tmp_path), overrides={"num_heads": HEADS, "image_size": (24, 40)})
    assert (info.config.image_size, info.config.position_on_class) == ((24, 40), True)
    assert not any("class token" in note for note in info.notes)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    state = deit() | {"blocks.0.mlp.fc1.weight": torch.ones(4 * D, D, dtype=torch.int8)}
    with pytest.raises(FormatError, match="its weights are quantized \\(int8\\)"):
        read(state, tmp_path)
