"""Model families that vitrail does not read yet, so that each is refused by its own name.

A family is recognized by the name of timm's architecture where a sidecar states it, and in a bare file
by tensors that only it has, or lacks. Where a family shares all of
its tensors with one that vitrail reads, `unless` names the other: the caller has to say which it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vitrail.errors import FormatError


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """One family and the ways to recognize it."""

    title: str
    architectures: str = ""
    """A pattern of timm's names."""
    tensors: tuple[tuple[str, ...], ...] = ()
    """Sets of names; a file that has all names of one set is of this family. `#` stands for any number, a leading
    `!` for a name that must not be there; prefixes do not matter."""
    unless: str = ""
    """The family of FAMILIES that has the same tensors."""


BLOCK = "blocks.#."
LAYER = "encoder.layer.#."

UNSUPPORTED = (
    Unsupported(
        title="Swin Transformer V2",
        architectures=r"^swinv2_",
        tensors=(
            (f"layers.#.{BLOCK}attn.cpb_mlp.#.weight",),
            ("features.#.#.attn.cpb_mlp.#.weight",),
            (f"layers.#.{BLOCK}attention.self.continuous_position_bias_mlp.#.weight",),
        ),
    ),
    Unsupported(
        title="Swin Transformer",
        architectures=r"^swin_",
        tensors=(
            (f"layers.#.{BLOCK}attn.relative_position_bias_table",),
            ("features.#.#.attn.relative_position_bias_table",),
            (f"layers.#.{BLOCK}attention.self.relative_position_bias_table",),
        ),
    ),
    Unsupported(title="MViT", architectures=r"^mvitv2_", tensors=((f"{BLOCK}attn.pool_q.weight",),)),
    Unsupported(
        title="Hiera",
        architectures=r"^(sam2_)?hiera_",
        tensors=((f"{BLOCK}attn.qkv.weight", f"{BLOCK}proj.weight"), ("encoder.stages.#.layers.#.attn.qkv.weight",)),
    ),
    Unsupported(
        title="SAM's image encoder or ViTDet",
        architectures=r"^samvit_",
        tensors=((f"{BLOCK}attn.rel_pos_h",), ("layers.#.attn.rel_pos_h",), (f"{LAYER}attention.rel_pos_h",)),
    ),
    Unsupported(title="NaFlexViT", architectures=r"^naflexvit_", tensors=(("embeds.proj.weight",),)),
    Unsupported(
        title="BEiT-3",
        architectures=r"^beit3_",
        tensors=((f"{BLOCK}attn.norm.weight", f"{BLOCK}attn.qkv.weight"), ("self_attn.inner_attn_ln.A.weight",)),
    ),
    Unsupported(
        title="BEiT, BEiT v2 or Data2VecVision",
        architectures=r"^beit(v2)?_",
        tensors=(
            (f"{BLOCK}attn.relative_position_bias_table",),
            ("rel_pos_bias.relative_position_bias_table",),
            (f"{LAYER}lambda_1", "!embeddings.position_embeddings"),
            ("relative_position_bias.relative_position_bias_table",),
        ),
    ),
    Unsupported(title="InternVL's image encoder", tensors=((f"{LAYER}lambda_1",),)),
    Unsupported(
        title="AIMv2",
        architectures=r"^aimv2_",
        tensors=(
            (f"{BLOCK}mlp.fc1_g.weight", "patch_embed.norm.weight"),
            ("embeddings.rms_norm.weight", "embeddings.patch_embed.weight"),
            ("preprocessor.patchifier.proj.weight",),
        ),
    ),
    Unsupported(
        title="Sapiens 2",
        architectures="sapiens2",
        tensors=(
            (f"{BLOCK}attn.q_norm.weight", f"{BLOCK}attn.q_proj.weight"),
            (f"{BLOCK}ffn.w12.weight", "storage_tokens"),
        ),
    ),
    Unsupported(title="DINOv3", architectures="_dinov3"),
    Unsupported(title="LingBot-Vision", architectures="_lingbot"),
    Unsupported(
        title="DINOv3 or LingBot-Vision",
        tensors=(
            ("storage_tokens",),
            ("rope_embed.periods",),
            ("cls_token", "reg_token", f"{BLOCK}gamma_1", "!pos_embed"),
            ("embeddings.register_tokens", "layer.#.layer_scale1.lambda1", "!embeddings.position_embeddings"),
        ),
    ),
    Unsupported(
        title="EVA or EVA-02",
        architectures=r"^eva02_|^eva_giant_",
        tensors=(
            (f"{BLOCK}attn.q_proj.weight",),
            (f"{BLOCK}mlp.ffn_ln.weight",),
            (f"{BLOCK}attn.q_bias", "pos_embed"),
        ),
    ),
    Unsupported(
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
    Unsupported(
        title="RoPE-ViT",
        architectures="_rope_",
        tensors=(("rope.freqs",), ("freqs_t_x",), (f"{BLOCK}gamma_1", f"{BLOCK}attn.qkv.weight", "!pos_embed")),
    ),
    Unsupported(
        title="RoPE-ViT with learned positions (timm's vit_*_rope_ape)",
        tensors=((f"{BLOCK}gamma_1", "cls_token", "pos_embed"),),
        unless="DeiT3",
    ),
    Unsupported(
        title="a ViT with relative positions (timm's vit_relpos)",
        architectures=r"^vit_s?relpos_",
        tensors=((f"{BLOCK}attn.rel_pos.mlp.fc1.weight",), ("shared_rel_pos.mlp.fc1.weight",)),
    ),
    Unsupported(
        title="a ViT with residual post-norm (timm's vit_*_rpn)",
        architectures="_rpn_",
        tensors=(
            (
                *("fc_norm.weight", "pos_embed", f"{BLOCK}attn.qkv.weight"),
                *("!cls_token", "!reg_token", f"!{BLOCK}attn.qkv.bias", f"!{BLOCK}ls1.gamma"),
            ),
        ),
        unless="ViT",
    ),
    Unsupported(
        title="a ViT with differential attention",
        architectures="^vit_d(p?wee|little)_",
        tensors=((f"{BLOCK}attn.lambda_q1",), (f"{BLOCK}lambda_q1",)),
    ),
    Unsupported(
        title="a ViT with parallel branches (ViT-22B and others)",
        architectures=r"_18x2_|_xp_|^vit_pwee_",
        tensors=((f"{BLOCK}attns.#.attn.qkv.weight",), (f"{BLOCK}in_proj.weight",)),
    ),
    Unsupported(
        title="a hybrid of MobileCLIP",
        architectures="_mci_",
        tensors=(("patch_embed.backbone.#.conv.weight", f"{BLOCK}attn.qkv.weight"),),
    ),
    Unsupported(
        title="a hybrid of a ResNet-D",
        architectures=r"_resnet\d+d_",
        tensors=(("patch_embed.backbone.bn1.weight", f"{BLOCK}attn.qkv.weight"),),
    ),
    Unsupported(
        title="a pre-activation ResNet that is not BiT",
        architectures=r"^resnetv2_(?!\d+x\d_bit)",
        tensors=(
            (f"stages.#.{BLOCK}conv1.weight", f"stages.#.{BLOCK}norm1.weight", "stem.conv1.weight"),
            (f"stages.#.{BLOCK}conv1.weight", f"stages.#.{BLOCK}norm1.weight", "norm.running_mean"),
        ),
    ),
    Unsupported(
        title="a ViT whose attention pool reads its registers (timm's test_vit3)",
        architectures="^test_vit3$",
        tensors=(("attn_pool.latent", "reg_token", f"{BLOCK}ls1.gamma"),),
        unless="ViT",
    ),
    Unsupported(title="TIPSv2 under its own names", tensors=((f"{BLOCK}mlp.c_fc.weight", "register_tokens"),)),
    Unsupported(title="CaiT", architectures="^cait_", tensors=((f"{BLOCK}attn.proj_l.weight",),)),
    Unsupported(title="MLCD", tensors=(("class_pos_emb", "pre_layrnorm.weight"),)),
)
"""In the order they are tried."""


def refuse_architecture(architecture: str) -> None:
    """Raise FormatError for a timm architecture of one of these families."""
    for family in UNSUPPORTED:
        if family.architectures and re.search(family.architectures, architecture):
            raise FormatError(f"timm's {architecture} is {family.title}, which vitrail does not read yet.")


def refuse_tensors(names: Iterable[str], told: str | None = None) -> None:
    """Raise FormatError for a bare file whose tensors are those of one of these families; `told` is the caller's."""
    endings = _endings(names)
    for family in UNSUPPORTED:
        if not any(_fits(wanted, endings) for wanted in family.tensors):
            continue
        if not family.unless:
            raise FormatError(f"this is {family.title}, which vitrail does not read yet.")
        if told is None:
            raise FormatError(
                f"its tensors are those of {family.title}, which vitrail does not read yet, and of {family.unless}; "
                f"if it is {family.unless}, pass family={family.unless!r}."
            )


def _fits(wanted: tuple[str, ...], endings: set[str]) -> bool:
    return all((name[1:] not in endings) if name.startswith("!") else (name in endings) for name in wanted)


def _endings(names: Iterable[str]) -> set[str]:
    """Every name from each of its dots on, with # for numbers: prefixes do not matter."""
    found: set[str] = set()
    for name in {re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in names}:
        parts = name.split(".")
        found.update(".".join(parts[start:]) for start in range(len(parts)))
    return found
