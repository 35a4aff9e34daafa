"""Model families that vitrail does not support, with errors that name them.

A family is detected by timm's architecture name where a sidecar states it, else by tensors that only this family has
or lacks. Where a family has the same tensors as a supported one, `shared_with` names the supported one, and the caller
has to pass `family=...`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vitrail.errors import FormatError


@dataclass(frozen=True, kw_only=True)
class UnsupportedFamily:
    """One family and how to detect it."""

    title: str
    architectures: str = ""
    """Regular expression for timm's architecture names."""
    tensors: tuple[tuple[str, ...], ...] = ()
    """Sets of tensor names; a file that has all names of one set is of this family. `#` stands for any number, a
    leading `!` for a name that must be absent; prefixes are ignored."""
    shared_with: str = ""
    """The supported family (a key of FAMILIES) that has the same tensors."""


BLOCK = "blocks.#."
LAYER = "encoder.layer.#."

UNSUPPORTED = (
    UnsupportedFamily(
        title="Swin Transformer V2",
        architectures=r"^swinv2_",
        tensors=(
            (f"layers.#.{BLOCK}attn.cpb_mlp.#.weight",),
            ("features.#.#.attn.cpb_mlp.#.weight",),
            (f"layers.#.{BLOCK}attention.self.continuous_position_bias_mlp.#.weight",),
        ),
    ),
    UnsupportedFamily(
        title="Swin Transformer",
        architectures=r"^swin_",
        tensors=(
            (f"layers.#.{BLOCK}attn.relative_position_bias_table",),
            ("features.#.#.attn.relative_position_bias_table",),
            (f"layers.#.{BLOCK}attention.self.relative_position_bias_table",),
        ),
    ),
    UnsupportedFamily(title="MViT", architectures=r"^mvitv2_", tensors=((f"{BLOCK}attn.pool_q.weight",),)),
    UnsupportedFamily(
        title="Hiera",
        architectures=r"^(sam2_)?hiera_",
        tensors=((f"{BLOCK}attn.qkv.weight", f"{BLOCK}proj.weight"), ("encoder.stages.#.layers.#.attn.qkv.weight",)),
    ),
    UnsupportedFamily(
        title="SAM's image encoder or ViTDet",
        architectures=r"^samvit_",
        tensors=((f"{BLOCK}attn.rel_pos_h",), ("layers.#.attn.rel_pos_h",), (f"{LAYER}attention.rel_pos_h",)),
    ),
    UnsupportedFamily(title="NaFlexViT", architectures=r"^naflexvit_", tensors=(("embeds.proj.weight",),)),
    UnsupportedFamily(
        title="BEiT-3",
        architectures=r"^beit3_",
        tensors=((f"{BLOCK}attn.norm.weight", f"{BLOCK}attn.qkv.weight"), ("self_attn.inner_attn_ln.A.weight",)),
    ),
    UnsupportedFamily(
        title="BEiT, BEiT v2 or Data2VecVision",
        architectures=r"^beit(v2)?_",
        tensors=(
            (f"{BLOCK}attn.relative_position_bias_table",),
            ("rel_pos_bias.relative_position_bias_table",),
            (f"{LAYER}lambda_1", "!embeddings.position_embeddings"),
            ("relative_position_bias.relative_position_bias_table",),
        ),
    ),
    UnsupportedFamily(title="InternVL's image encoder", tensors=((f"{LAYER}lambda_1",),)),
    UnsupportedFamily(
        title="AIMv2",
        architectures=r"^aimv2_",
        tensors=(
            (f"{BLOCK}mlp.fc1_g.weight", "patch_embed.norm.weight"),
            ("embeddings.rms_norm.weight", "embeddings.patch_embed.weight"),
            ("preprocessor.patchifier.proj.weight",),
        ),
    ),
    UnsupportedFamily(
        title="Sapiens 2",
        architectures="sapiens2",
        tensors=(
            (f"{BLOCK}attn.q_norm.weight", f"{BLOCK}attn.q_proj.weight"),
            (f"{BLOCK}ffn.w12.weight", "storage_tokens"),
        ),
    ),
    UnsupportedFamily(title="DINOv3", architectures="_dinov3"),
    UnsupportedFamily(title="LingBot-Vision", architectures="_lingbot"),
    UnsupportedFamily(
        title="DINOv3 or LingBot-Vision",
        tensors=(
            ("storage_tokens",),
            ("rope_embed.periods",),
            ("cls_token", "reg_token", f"{BLOCK}gamma_1", "!pos_embed"),
            ("embeddings.register_tokens", "layer.#.layer_scale1.lambda1", "!embeddings.position_embeddings"),
        ),
    ),
    UnsupportedFamily(
        title="EVA or EVA-02",
        architectures=r"^eva02_|^eva_giant_",
        tensors=(
            (f"{BLOCK}attn.q_proj.weight",),
            (f"{BLOCK}mlp.ffn_ln.weight",),
            (f"{BLOCK}attn.q_bias", "pos_embed"),
        ),
    ),
    UnsupportedFamily(
        title="Perception Encoder",
        architectures="_pe_(core|lang|spatial)_",
        tensors=(
            ("norm_pre.weight", "attn_pool.latent"),
            ("norm_pre.weight", f"{BLOCK}gamma_1"),
            ("norm_pre.weight", "blocks.#.attn.qkv.weight", "!norm.weight", "!fc_norm.weight"),
            ("conv1.weight", "attn_pool.probe"),
            ("conv1.weight", "rope.freqs"),
        ),
    ),
    UnsupportedFamily(
        title="RoPE-ViT",
        architectures="_rope_",
        tensors=(("rope.freqs",), ("freqs_t_x",), (f"{BLOCK}gamma_1", f"{BLOCK}attn.qkv.weight", "!pos_embed")),
    ),
    UnsupportedFamily(
        title="RoPE-ViT with learned positions (timm's vit_*_rope_ape)",
        tensors=((f"{BLOCK}gamma_1", "cls_token", "pos_embed"),),
        shared_with="DeiT3",
    ),
    UnsupportedFamily(
        title="a ViT with relative positions (timm's vit_relpos)",
        architectures=r"^vit_s?relpos_",
        tensors=((f"{BLOCK}attn.rel_pos.mlp.fc1.weight",), ("shared_rel_pos.mlp.fc1.weight",)),
    ),
    UnsupportedFamily(
        title="a ViT with residual post-norm (timm's vit_*_rpn)",
        architectures="_rpn_",
        tensors=(
            (
                *("fc_norm.weight", "pos_embed", f"{BLOCK}attn.qkv.weight"),
                *("!cls_token", "!reg_token", f"!{BLOCK}attn.qkv.bias", f"!{BLOCK}ls1.gamma"),
            ),
        ),
        shared_with="ViT",
    ),
    UnsupportedFamily(
        title="a ViT with differential attention",
        architectures="^vit_d(p?wee|little)_",
        tensors=((f"{BLOCK}attn.lambda_q1",), (f"{BLOCK}lambda_q1",)),
    ),
    UnsupportedFamily(
        title="a ViT with parallel branches (ViT-22B and others)",
        architectures=r"_18x2_|_xp_|^vit_pwee_",
        tensors=((f"{BLOCK}attns.#.attn.qkv.weight",), (f"{BLOCK}in_proj.weight",)),
    ),
    UnsupportedFamily(
        title="a hybrid of MobileCLIP",
        architectures="_mci_",
        tensors=(("patch_embed.backbone.#.conv.weight", f"{BLOCK}attn.qkv.weight"),),
    ),
    UnsupportedFamily(
        title="a hybrid of a ResNet-D",
        architectures=r"_resnet\d+d_",
        tensors=(("patch_embed.backbone.bn1.weight", f"{BLOCK}attn.qkv.weight"),),
    ),
    UnsupportedFamily(
        title="a pre-activation ResNet that is not BiT",
        architectures=r"^resnetv2_(?!\d+x\d_bit)",
        tensors=(
            (f"stages.#.{BLOCK}conv1.weight", f"stages.#.{BLOCK}norm1.weight", "stem.conv1.weight"),
            (f"stages.#.{BLOCK}conv1.weight", f"stages.#.{BLOCK}norm1.weight", "norm.running_mean"),
        ),
    ),
    UnsupportedFamily(
        title="a ViT whose attention pool reads its registers (timm's test_vit3)",
        architectures="^test_vit3$",
        tensors=(("attn_pool.latent", "reg_token", f"{BLOCK}ls1.gamma"),),
        shared_with="ViT",
    ),
    UnsupportedFamily(title="TIPSv2 under its own names", tensors=((f"{BLOCK}mlp.c_fc.weight", "register_tokens"),)),
    UnsupportedFamily(title="CaiT", architectures="^cait_", tensors=((f"{BLOCK}attn.proj_l.weight",),)),
    UnsupportedFamily(title="MLCD", tensors=(("class_pos_emb", "pre_layrnorm.weight"),)),
)
"""In the order in which they are tried."""


def reject_architecture(architecture: str) -> None:
    """Raise FormatError for a timm architecture of one of these families."""
    for family in UNSUPPORTED:
        if family.architectures and re.search(family.architectures, architecture):
            raise FormatError(f"timm's {architecture} is {family.title}, which vitrail does not support.")


def reject_tensors(names: Iterable[str], stated_family: str | None = None) -> None:
    """Raise FormatError for a bare file with the tensors of one of these families. `stated_family`: the caller's."""
    endings = _endings(names)
    for family in UNSUPPORTED:
        if not any(_fits(expected, endings) for expected in family.tensors):
            continue
        if not family.shared_with:
            raise FormatError(f"this is {family.title}, which vitrail does not support.")
        if stated_family is None:
            raise FormatError(
                f"the tensors fit both {family.title}, which vitrail does not support, and {family.shared_with}; "
                f"pass family={family.shared_with!r} if it is {family.shared_with}."
            )


def _fits(expected: tuple[str, ...], endings: set[str]) -> bool:
    return all((name[1:] not in endings) if name.startswith("!") else (name in endings) for name in expected)


def _endings(names: Iterable[str]) -> set[str]:
    """All dot-separated suffixes of the names, with # for numbers, so that prefixes are ignored."""
    endings: set[str] = set()
    for name in {re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in names}:
        parts = name.split(".")
        endings.update(".".join(parts[start:]) for start in range(len(parts)))
    return endings
