"""Files in the published formats of DeiT, DeiT-III, MAE, DINO and DINOv2, compared with other libraries that read them.

The files have the tensor names of the original code and random weights.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import relative
from conftest import import_peer
from facebook_files import (
    DEPTH,
    HEADS,
    D,
    State,
    chunked,
    deit,
    deit3,
    deit_distilled,
    dino,
    dino_head,
    dinov2,
    draw,
    mae,
    mae_finetuned,
    mae_with_decoder,
    read,
    training_checkpoint,
    with_prefix,
)
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.config import ViTConfig, pair
from vitrail.errors import ConversionError, FormatError
from vitrail.models import ViT
from vitrail.weights import checkpoint
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo

SIZES = {"embed_dim": D, "depth": DEPTH, "num_heads": HEADS}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small are not faster on two cores, and slower if one of them is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outputs_for(net: nn.Module, size: int) -> Tensor:
    with torch.no_grad():
        return net(torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)))


# Outputs


TIMM: dict[str, tuple[Callable[[], State], str, dict[str, Any]]] = {
    "DeiT": (deit, "deit_base_patch16_224", {}),
    "DeiT distilled": (deit_distilled, "deit_base_distilled_patch16_224", {}),
    "DeiT-III": (deit3, "deit3_base_patch16_224", {}),
    "DINO": (dino, "vit_base_patch16_224", {"num_classes": 0}),
    "MAE": (mae, "vit_base_patch16_224", {"num_classes": 0}),
    "MAE fine-tuned": (mae_finetuned, "vit_base_patch16_224", {"global_pool": "avg"}),
    "DINOv2": (dinov2, "vit_base_patch14_dinov2", {}),
    "DINOv2 with registers": (partial(dinov2, registers=4), "vit_base_patch14_reg4_dinov2", {}),
    "DINOv2 g": (partial(dinov2, swiglu_width=344), "vit_giant_patch14_dinov2", {"mlp_ratio": 2 * 344 / D}),
    "DINOv2 g with registers": (
        partial(dinov2, registers=4, swiglu_width=344),
        "vit_giant_patch14_reg4_dinov2",
        {"mlp_ratio": 2 * 344 / D},
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize(("make", "arch", "args"), TIMM.values(), ids=TIMM.keys())
def test_outputs_match_timm_for_the_same_file(
    make: Callable[[], State], arch: str, args: dict[str, Any], tmp_path: Path
) -> None:
    """timm's loader reads the same file."""
    timm = import_peer("timm")
    module = timm.models.deit if arch.startswith("deit") else timm.models.vision_transformer
    adapt = {"adapt_layer_scale": True} if arch.startswith("deit3") else {}
    size = 70 if "dinov2" in arch else 32
    sizes = {**SIZES, "img_size": size, "patch_size": 14 if size == 70 else 8, "num_classes": 7}
    theirs = timm.create_model(arch, **sizes | ({"num_classes": 0} if size == 70 else {}) | args).eval()
    net, info = read({"model": make()}, tmp_path, family="DeiT3" if make is deit3 else None)
    timm.models.load_checkpoint(
        theirs, str(tmp_path / "weights.pth"), strict=True, filter_fn=partial(module.checkpoint_filter_fn, **adapt)
    )
    assert pair(info.config.image_size) == (size, size)
    assert relative(outputs_for(net, size), outputs_for(theirs, size)) <= 1e-5


@pytest.mark.peer
@pytest.mark.parametrize("swiglu_width", [0, 344])
@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_outputs_match_transformers(registers: int, swiglu_width: int, tmp_path: Path) -> None:
    transformers = import_peer("transformers")
    state = dinov2(registers, swiglu_width)
    net, _ = read(state, tmp_path)
    prefix = "Dinov2WithRegisters" if registers else "Dinov2"
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=D,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        image_size=70,
        patch_size=14,
        use_swiglu_ffn=bool(swiglu_width),
        **({"num_register_tokens": registers} if registers else {}),
    )
    config.save_pretrained(tmp_path / "hub")
    save_file(rename_for_transformers(state), tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    theirs = getattr(transformers, f"{prefix}Model").from_pretrained(tmp_path / "hub").eval()
    images = torch.randn(2, 3, 70, 70)
    with torch.no_grad():
        tokens = theirs(images).last_hidden_state
        assert relative(net(images), tokens[:, 0]) <= 1e-5
        assert (
            relative(net.features(images, outputs="patches").patches.flatten(1, 2), tokens[:, 1 + registers :]) <= 1e-5
        )


def rename_for_transformers(state: State) -> State:
    """Renames DINOv2's tensors as in the Hugging Face repositories."""
    names = {
        "cls_token": "embeddings.cls_token",
        "mask_token": "embeddings.mask_token",
        "pos_embed": "embeddings.position_embeddings",
        "register_tokens": "embeddings.register_tokens",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "attn.proj": "attention.output.dense",
        "ls1.gamma": "layer_scale1.lambda1",
        "ls2.gamma": "layer_scale2.lambda1",
        "mlp.w12": "mlp.weights_in",
        "mlp.w3": "mlp.weights_out",
        "blocks.": "encoder.layer.",
    }
    result: State = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        name = re.sub(r"^norm\.", "layernorm.", name)
        if "attn.qkv" in name:
            for part, tensor_part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                result[name.replace("attn.qkv", f"attention.attention.{part}")] = tensor_part.clone()
        else:
            result[name] = tensor
    return result


def original_resampling(position: Tensor, rows: int, columns: int, convention: str) -> Tensor:
    """Resampling in the original code: DINO and DINOv2 pass a scale for 0.1 patches more, the others the size."""
    side = int(math.sqrt(position.shape[1] - 1))
    square = position[:, 1:].float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    options: dict[str, Any] = {"size": (rows, columns)}
    if convention == "scale":
        options = {"scale_factor": ((rows + 0.1) / side, (columns + 0.1) / side)}
    elif convention == "antialias":
        options["antialias"] = True
    resized = F.interpolate(square, mode="bicubic", align_corners=False, **options)
    assert resized.shape[-2:] == (rows, columns)
    return torch.cat([position[:, :1], resized.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)[0]


@pytest.mark.parametrize("grid", [(3, 7), (8, 4)])
@pytest.mark.parametrize(
    ("make", "convention"),
    [
        (dinov2, "scale"),
        (partial(dinov2, registers=4), "antialias"),
        (dino, "scale"),
        (deit, "size"),
        (mae_with_decoder, "size"),
    ],
    ids=["DINOv2", "with registers", "DINO", "DeiT", "MAE"],
)
def test_positions_are_resampled_as_in_the_original_code(
    make: Callable[[], State], convention: str, grid: tuple[int, int], tmp_path: Path
) -> None:
    state = make()
    net, _ = read({"model": state}, tmp_path)
    expected = original_resampling(state["pos_embed"], *grid, convention)  # class token, patches
    positions = net.positions[0](grid, expected)  # class token, registers, patches
    registers = net.config.num_registers
    assert torch.equal(positions[:1], expected[:1])
    assert not positions[1 : 1 + registers].any()
    assert (positions[1 + registers :] - expected[1:]).abs().max() <= 1e-6
    size = tuple(n * side for n, side in zip(grid, pair(net.config.patch_size), strict=True))
    resized = net.resized((size[0], size[1]))
    assert (resized.positions[0].table.flatten(0, 1) - expected[1:]).abs().max() <= 1e-6
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        assert relative(net(images), resized(images)) <= 1e-6


# Checkpoints with more than the weights


def test_deit_training_checkpoint_is_read_with_its_arguments(tmp_path: Path) -> None:
    state = deit()
    net, info = read(training_checkpoint(state, model="deit_tiny_patch16_224", lr=5e-4), tmp_path, "checkpoint.pth")
    assert info.family == "DeiT", "the family comes from the arguments, not the file name"
    assert "read 'model' of model, optimizer" in info.notes
    assert torch.equal(net.head.weight, state["head.weight"])


def test_mae_training_checkpoint_is_read_with_its_arguments(tmp_path: Path) -> None:
    _, info = read(training_checkpoint(mae(), model="mae_vit_base_patch16"), tmp_path, "checkpoint-799.pth")
    assert (info.family, info.task) == ("MAE", "embed")


def test_dino_teacher_is_read_unless_the_section_is_student(tmp_path: Path) -> None:
    teacher, student = dino(), dino()
    training_file = {
        "student": with_prefix("module.", with_prefix("backbone.", student) | dino_head()),
        "teacher": with_prefix("backbone.", teacher) | dino_head(),
        "optimizer": {"state": {0: {"exp_avg": draw(3)}}},
        "epoch": 100,
        "args": argparse.Namespace(arch="deit_small", teacher_temp=0.07),
        "dino_loss": {"center": draw(1, 50)},
    }
    net, info = read(training_file, tmp_path, "full_checkpoint.pth")
    assert torch.equal(net.class_token, teacher["cls_token"].flatten())
    assert (info.family, info.task, info.config.resample) == ("DINO", "embed", "dinov2")
    assert info.notes == (
        "read 'teacher' of student, teacher, optimizer, dino_loss",
        "ignored tensors outside 'backbone.': head.mlp.0.weight, head.mlp.0.bias, head.mlp.2.weight, "
        "head.mlp.2.bias and 4 more.",
    )
    net, info = checkpoint.read(tmp_path / "full_checkpoint.pth", section="student")
    assert torch.equal(net.class_token, student["cls_token"].flatten())
    assert info.family == "DINO"
    assert "removed 'module.' from every name" in info.notes


@pytest.mark.parametrize("make", [dinov2, partial(dinov2, registers=4), partial(dinov2, swiglu_width=344)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_dinov2_training_checkpoint_gives_the_same_network(
    make: Callable[[], State], chunks: int, tmp_path: Path
) -> None:
    state = make()
    released, _ = read(state, tmp_path)
    heads = dino_head("dino_head") | dino_head("ibot_head")
    net, info = read({"teacher": with_prefix("backbone.", chunked(state, chunks)) | heads}, tmp_path, "teacher.pth")
    assert info.family == "DINOv2"
    assert released.config == net.config
    for name, tensor in released.state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor), name


def test_unknown_tensors_outside_the_backbone_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"facebook.*unexpected outside 'backbone\.': projector\.weight"):
        read(with_prefix("backbone.", dinov2()) | {"projector.weight": draw(2, 2)}, tmp_path)


# Writing


WRITTEN = {**{name: make for name, (make, *_) in TIMM.items()}, "MAE with its decoder": mae_with_decoder}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_file_has_the_original_names_and_tensors(name: str, tmp_path: Path) -> None:
    state = WRITTEN[name]()
    net, info = read(state, tmp_path, family="DeiT3" if name == "DeiT-III" else None)
    checkpoint.write(net, info, tmp_path / "again.pth", to="facebook")
    rewritten = torch.load(tmp_path / "again.pth", weights_only=True)
    expected_names = {n for n in state if not n.startswith("decoder_")} - (
        {"mask_token"} if name.startswith("MAE") else set()
    )
    assert set(rewritten) == expected_names
    for tensor_name in expected_names - {"mask_token"}:
        assert torch.equal(rewritten[tensor_name], state[tensor_name]), tensor_name
    if "mask_token" in expected_names:
        assert rewritten["mask_token"].shape == state["mask_token"].shape, "the original code expects the mask token"


PLAIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "width": D,
    "depth": 1,
    "num_heads": 2,
    "mlp_dim": 4 * D,
    "activation": "gelu",
}
DINOV2: dict[str, Any] = PLAIN | {"num_classes": 0, "layer_scale": 1e-5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PLAIN | {"pool": "gap"}, "pool='gap' after the norm"),
        (PLAIN | {"pool_norm": "none"}, "without a final norm"),
        (PLAIN | {"proj_bias": False}, "outputs without bias in MAE, DINO, DeiT"),
        (PLAIN | {"activation": "swiglu"}, "SwiGLU outside DINOv2"),
        (PLAIN | {"distilled": True, "position_on_class": False}, "distillation token without a position"),
        (DINOV2 | {"num_classes": 5}, "a head in DINOv2"),
        (DINOV2 | {"distilled": True}, "a distillation token in DINOv2"),
        (DINOV2 | {"pool": "gap", "pool_norm": "after"}, "pool='gap' in DINOv2"),
        (DINOV2 | {"activation": "swiglu", "mlp_dim": 340}, "SwiGLU of width 340, which is not a multiple of 8"),
        (DINOV2 | {"activation": "swiglu", "position_on_class": False}, "SwiGLU outside DINOv2"),
        (
            DINOV2 | {"num_registers": 2, "position_on_class": False},
            "registers beside a class token without a position",
        ),
        (PLAIN | {"num_heads": 4}, "num_heads=4"),
        (PLAIN | {"norm_eps": 1e-5}, "epsilon of 1e-05"),
    ],
)
def test_config_that_the_original_code_cannot_load_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = ViTConfig(**options)
    info = ModelInfo(config=config, preprocess=default_preprocess("DeiT", config))
    with pytest.raises(ConversionError, match=message):
        checkpoint.write(ViT(config), info, tmp_path / "x.pth", to="facebook")
    assert list(tmp_path.iterdir()) == []


# Files that do not fit


def test_missing_and_unexpected_tensors_are_listed_with_the_codebase(tmp_path: Path) -> None:
    state = dinov2()
    state["blocks.0.hat"] = draw(3)
    del state["blocks.1.norm2.bias"]
    with pytest.raises(FormatError, match=r"facebook \(DINOv2\).*missing blocks.1.norm2.bias; unexpected blocks.0.hat"):
        read(state, tmp_path)


@pytest.mark.parametrize("make", [deit, deit_distilled, deit3, dinov2, mae_with_decoder, mae_finetuned])
def test_each_missing_tensor_is_an_error_that_names_it(make: Callable[[], State], tmp_path: Path) -> None:
    state = make()
    for name in state:
        if name == "mask_token" or name.startswith("decoder_"):
            continue  # not part of the network
        with pytest.raises(FormatError) as error:
            read({n: t for n, t in state.items() if n != name}, tmp_path, family="DeiT3" if make is deit3 else None)
        message = str(error.value)
        is_token = name.endswith("_token") and ("special tokens" in message or "unexpected" in message)
        assert name in message or is_token or (name == "pos_embed" and "this is RoPE-ViT" in message), (name, message)


def test_beit_is_refused_by_name(tmp_path: Path) -> None:
    tables = {f"blocks.{i}.attn.relative_position_bias_table": draw(9, HEADS) for i in range(DEPTH)}
    with pytest.raises(FormatError, match=r"this is BEiT, .* which vitrail does not support"):
        read(deit3() | tables | {"mask_token": draw(1, 1, D)}, tmp_path)


def test_config_json_that_names_another_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    with pytest.raises(FormatError, match=r"config\.json names timm's vit_tiny_patch16_224; if that file belongs"):
        read(dinov2(), tmp_path)
