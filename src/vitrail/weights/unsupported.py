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


def _family(title: str, architectures: str = "", *tensors: str, shared_with: str = "") -> UnsupportedFamily:
    sets = tuple(tuple(names.split()) for names in tensors)
    return UnsupportedFamily(title=title, architectures=architectures, tensors=sets, shared_with=shared_with)


# fmt: off
UNSUPPORTED = (
    # title, architectures, and sets of tensor names, separated by spaces
    _family("Swin V2-CR, timm's own variant", r"^swinv2_cr_", f"stages.#.{BLOCK}attn.meta_mlp.fc1.weight"),
    _family("Swin-MLP", "", f"layers.#.{BLOCK}spatial_mlp.weight"),
    _family("Swin-MoE", "", f"layers.#.{BLOCK}mlp._moe_layer.experts.batched_fc1_w"),
    _family("MViT", r"^mvitv2_", f"{BLOCK}attn.pool_q.weight", f"{BLOCK}attn.pool_q.pool.weight"),
    _family("TinyViT or LeViT", r"^(tiny_vit|levit)_", f"stages.#.{BLOCK}attn.attention_biases"),
    _family("CoAtNet or MaxViT", r"^coat(net|next)_|^max(x?)vitv?\d?_", f"stages.#.{BLOCK}attn.rel_pos.mlp.fc1.weight"),
    _family("a ConvNeXt (also DINOv3 and EUPE have such networks)", r"^convnext",
        "downsample_layers.#.#.weight stages.#.#.dwconv.weight",
        "stages.#.downsample_layers.#.weight stages.#.layers.#.depthwise_conv.weight"),
    _family("CaiT", r"^cait_", f"{BLOCK}attn.proj_l.weight"),
    _family("Hiera", r"^(sam2_)?hiera_",
        f"{BLOCK}attn.qkv.weight {BLOCK}proj.weight", "encoder.stages.#.layers.#.attn.qkv.weight"),
    _family("SAM's image encoder or ViTDet", r"^samvit_",
        f"{BLOCK}attn.rel_pos_h", "layers.#.attn.rel_pos_h", f"{LAYER}attention.rel_pos_h"),
    _family("NaFlexViT", r"^naflexvit_", "embeds.proj.weight"),
    _family("BEiT-3", r"^beit3_",
        f"{BLOCK}attn.norm.weight {BLOCK}attn.qkv.weight", "self_attn.inner_attn_ln.A.weight"),
    _family("BEiT, BEiT v2 or Data2VecVision", r"^beit(v2)?_",
        f"{BLOCK}attn.relative_position_bias_table !layers.#.{BLOCK}attn.relative_position_bias_table",
        "rel_pos_bias.relative_position_bias_table",
        f"{LAYER}lambda_1 !embeddings.position_embeddings", "relative_position_bias.relative_position_bias_table"),
    _family("InternVL's image encoder", "", f"{LAYER}lambda_1"),
    _family("AIMv2", r"^aimv2_",
        f"{BLOCK}mlp.fc1_g.weight patch_embed.norm.weight", "embeddings.rms_norm.weight embeddings.patch_embed.weight",
        "preprocessor.patchifier.proj.weight"),
    _family("Sapiens 2", "sapiens2",
        f"{BLOCK}attn.q_norm.weight {BLOCK}attn.q_proj.weight", f"{BLOCK}ffn.w12.weight storage_tokens"),
    _family("EVA or EVA-02", r"^eva02_|^eva_giant_",
        f"{BLOCK}attn.q_proj.weight", f"{BLOCK}mlp.ffn_ln.weight", f"{BLOCK}attn.q_bias pos_embed"),
    _family("Perception Encoder", "_pe_(core|lang|spatial)_",
        "norm_pre.weight attn_pool.latent", f"norm_pre.weight {BLOCK}gamma_1",
        f"norm_pre.weight {BLOCK}attn.qkv.weight !norm.weight !fc_norm.weight", "conv1.weight attn_pool.probe",
        "conv1.weight rope.freqs"),
    _family("RoPE-ViT", "_rope_", "rope.freqs", "freqs_t_x",
        f"{BLOCK}gamma_1 {BLOCK}attn.qkv.weight !pos_embed !reg_token",
        f"{BLOCK}gamma_1 {BLOCK}attn.qkv.weight !pos_embed !cls_token"),
    _family("RoPE-ViT with learned positions (timm's vit_*_rope_ape)", "",
        f"{BLOCK}gamma_1 cls_token pos_embed", shared_with="DeiT3"),
    _family("a ViT with relative positions (timm's vit_relpos)", r"^vit_s?relpos_",
        f"{BLOCK}attn.rel_pos.mlp.fc1.weight", "shared_rel_pos.mlp.fc1.weight"),
    _family("a ViT with residual post-norm (timm's vit_*_rpn)", "_rpn_",
        f"fc_norm.weight pos_embed {BLOCK}attn.qkv.weight !cls_token !reg_token "
        f"!{BLOCK}attn.qkv.bias !{BLOCK}ls1.gamma",
        shared_with="ViT"),
    _family("a ViT with differential attention", r"^vit_d(p?wee|little)_",
        f"{BLOCK}attn.lambda_q1", f"{BLOCK}lambda_q1"),
    _family("a ViT with parallel branches (ViT-22B and others)", "_18x2_|_xp_|^vit_pwee_",
        f"{BLOCK}attns.#.attn.qkv.weight", f"{BLOCK}in_proj.weight"),
    _family("a hybrid of MobileCLIP", "_mci_", f"patch_embed.backbone.#.conv.weight {BLOCK}attn.qkv.weight"),
    _family("a hybrid of a ResNet-D", r"_resnet\d+d_", f"patch_embed.backbone.bn1.weight {BLOCK}attn.qkv.weight"),
    _family("a pre-activation ResNet that is not BiT", r"^resnetv2_(?!\d+x\d_bit)",
        f"stages.#.{BLOCK}conv1.weight stages.#.{BLOCK}norm1.weight stem.conv1.weight",
        f"stages.#.{BLOCK}conv1.weight stages.#.{BLOCK}norm1.weight norm.running_mean"),
    _family("a ViT whose attention pool reads its registers (timm's test_vit3)", r"^test_vit3$",
        f"attn_pool.latent reg_token {BLOCK}ls1.gamma", shared_with="ViT"),
    _family("MLCD", "", "class_pos_emb pre_layrnorm.weight"),
)
"""In the order in which they are tried."""
# fmt: on


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
