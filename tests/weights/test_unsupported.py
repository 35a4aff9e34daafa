"""Unsupported families: the error names the family, for the original tensor names and for timm's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from vitrail.errors import FormatError
from vitrail.models.families import FAMILIES
from vitrail.weights import checkpoint
from vitrail.weights.unsupported import UNSUPPORTED, reject_architecture

BLOCK = "norm1.weight norm1.bias attn.qkv.weight attn.proj.weight attn.proj.bias norm2.weight mlp.fc1.weight"
TRUNK = "cls_token patch_embed.proj.weight patch_embed.proj.bias"
FILES = {
    # codebase: (name in the error, tensors outside the blocks, tensors of a block)
    "BEiT, pre-training": ("BEiT", f"{TRUNK} mask_token rel_pos_bias.relative_position_bias_table", f"{BLOCK} gamma_1"),
    "EVA-02, its authors'": (
        "EVA-02",
        f"{TRUNK} pos_embed rope.freqs_cos norm.weight",
        "norm1.weight attn.q_proj.weight attn.k_proj.weight attn.q_bias mlp.w1.weight mlp.ffn_ln.weight",
    ),
    "EVA-02's CLIP": (
        "EVA-02",
        "visual.cls_token visual.pos_embed visual.patch_embed.proj.weight text.token_embedding.weight",
        "norm1.weight attn.q_proj.weight attn.inner_attn_ln.weight mlp.w1.weight",
    ),
    "AIMv2, Apple's": (
        "AIMv2",
        "preprocessor.patchifier.proj.weight preprocessor.pos_embed",
        "norm_1.weight attn.qkv.weight",
    ),
    "PE, Meta's": (
        "Perception Encoder",
        "visual.conv1.weight visual.class_embedding visual.positional_embedding visual.ln_pre.weight "
        "visual.ln_post.weight visual.attn_pool.probe visual.proj logit_scale",
        "ln_1.weight attn.in_proj_weight mlp.c_fc.weight",
    ),
    "Swin-MLP, Microsoft's": (
        "Swin-MLP",
        "patch_embed.proj.weight patch_embed.norm.weight layers.0.blocks.0.spatial_mlp.weight "
        "layers.0.blocks.0.norm1.weight layers.0.downsample.reduction.weight norm.weight head.weight",
        "",
    ),
    "Swin-MoE, Microsoft's": (
        "Swin-MoE",
        "patch_embed.proj.weight layers.0.blocks.0.attn.qkv.weight "
        "layers.0.blocks.1.mlp._moe_layer.experts.batched_fc1_w",
        "",
    ),
    "TinyViT, timm's": (
        "TinyViT",
        "patch_embed.conv1.conv.weight head.fc.weight stages.1.blocks.0.attn.norm.weight "
        "stages.1.blocks.0.attn.qkv.weight stages.1.blocks.0.attn.attention_biases",
        "",
    ),
    "CoAtNet, timm's": ("CoAtNet", "stem.conv1.weight stages.2.blocks.0.attn.rel_pos.mlp.fc1.weight", ""),
    "DINOv3's ConvNeXt": (
        "ConvNeXt",
        "downsample_layers.0.0.weight downsample_layers.1.0.weight stages.0.0.dwconv.weight norm.weight",
        "",
    ),
    "DINOv3's ConvNeXt, transformers'": (
        "ConvNeXt",
        "stages.0.downsample_layers.0.weight stages.0.layers.0.depthwise_conv.weight layer_norm.weight",
        "",
    ),
    "CaiT, its authors'": ("CaiT", f"{TRUNK} pos_embed norm.weight", f"{BLOCK} gamma_1 attn.proj_l.weight"),
    "MViT V2, torchvision's": (
        "MViT",
        "conv_proj.weight pos_encoding.class_token norm.weight head.1.weight",
        "norm1.weight attn.rel_pos_h attn.qkv.weight attn.pool_q.pool.weight attn.project.0.weight mlp.0.weight",
    ),
}


@pytest.mark.parametrize("section", ["", "model"])
@pytest.mark.parametrize("kind", FILES)
def test_file_of_an_unsupported_family_is_refused_by_name(kind: str, section: str, tmp_path: Path) -> None:
    family, outside, inside = FILES[kind]
    blocks = (
        "visual.transformer.resblocks" if kind.startswith("PE") else "visual.blocks" if "CLIP" in kind else "blocks"
    )
    names = [*outside.split(), *(f"{blocks}.{i}.{name}" for i in range(2) for name in inside.split())]
    state = {name: torch.zeros(2, 2) for name in names}
    torch.save({section: state} if section else state, tmp_path / "deit_base_patch16_224.pth")
    with pytest.raises(FormatError) as error:
        checkpoint.read(tmp_path / "deit_base_patch16_224.pth")
    message = str(error.value).partition(": ")[2]
    assert family in message
    assert not re.search(r"pass |family=|activation=|num_heads=", message), (
        "the error must not suggest an option that gives another family"
    )


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("swinv2_cr_tiny_224", "Swin V2-CR"),
        ("beitv2_base_patch16_224", "BEiT"),
        ("eva02_base_patch14_448", "EVA-02"),
        ("aimv2_large_patch14_224", "AIMv2"),
        ("vit_pe_core_base_patch16_224", "Perception Encoder"),
        ("tiny_vit_5m_224", "TinyViT"),
        ("convnext_tiny", "ConvNeXt"),
        ("maxxvitv2_rmlp_base_rw_224", "MaxViT"),
    ],
)
def test_unsupported_timm_architecture_is_refused_by_name(architecture: str, family: str) -> None:
    with pytest.raises(FormatError, match=f"timm's {architecture} is .*{family}"):
        reject_architecture(architecture)


def test_shared_with_names_a_known_family() -> None:
    assert {family.shared_with for family in UNSUPPORTED} <= {"", *FAMILIES}
