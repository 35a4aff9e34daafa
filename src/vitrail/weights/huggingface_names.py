"""Rename tables for Hugging Face's names as on the Hub, which every version of transformers reads.

transformers 5 renames some modules in memory and translates when it loads and saves: a plain `state_dict()` has the
newer names, which `normalize_name` turns into the Hub's. A network inside a classifier has a prefix (`vit.`):
`normalize_name` removes it, the tables are without it, and `huggingface.write` adds it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.config import BiTConfig, SwinConfig
from vitrail.weights.huggingface_config import backbone_for, is_projection
from vitrail.weights.renaming import (
    CLASS_TOKEN,
    CONCAT_QKV,
    POSITION,
    POSITION_FLAT,
    POSITION_NAMES,
    TOKENS,
    AnyConfig,
    RenameTable,
    Rule,
    Transform,
    weight_and_bias,
)
from vitrail.weights.swin_names import HUGGINGFACE_NAMES

# B images, D width, R registers


def qkv_rules(theirs: str, *names: str) -> list[Rule]:
    """Rules for separate query, key and value projections <-> one concatenated projection."""
    return [
        Rule(tuple(f"{theirs}.{n}.{part}" for n in names), f"blocks.{{i}}.attention.qkv.{part}", CONCAT_QKV)
        for part in ("weight", "bias")
    ]


def _read_unused_distillation(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    """Read a distillation token without a head as a register; its position embedding is added to it."""
    token, rows = tensors[0][0], tensors[1][0]  # 1 D, T D
    rest = torch.cat([rows[:1], rows[2:]])
    return [token + rows[1:2] if rows[1].any() else token, *POSITION.read([rest[None]], config)]


def _write_unused_distillation(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    register, prefix, table = tensors
    return [register[None], torch.cat([prefix, torch.zeros_like(register), table.flatten(0, 1)])[None]]


def _read_in_proj(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    third = len(tensors[0]) // 3
    return [tensors[0][:third], tensors[0][third:]]


DISTILLATION_AS_REGISTER = Transform(_read_unused_distillation, _write_unused_distillation)
IN_PROJ = Transform(_read_in_proj, lambda t, _: [torch.cat(list(t))])
"""Query, key and value in one matrix <-> query, and key with value."""

TRUNK = [
    Rule("embeddings.cls_token", "class_token", CLASS_TOKEN),
    *weight_and_bias("embeddings.patch_embeddings.projection", "patch"),
    *qkv_rules("encoder.layer.{i}.attention.attention", "query", "key", "value"),
    *weight_and_bias("encoder.layer.{i}.attention.output.dense", "blocks.{i}.attention.out"),
    *weight_and_bias("layernorm", "norm"),
]
POSITION_RULES = [Rule("embeddings.position_embeddings", POSITION_NAMES, POSITION)]
VIT = [
    *TRUNK,
    *weight_and_bias("encoder.layer.{i}.layernorm_before", "blocks.{i}.norm1"),
    *weight_and_bias("encoder.layer.{i}.layernorm_after", "blocks.{i}.norm2"),
    *weight_and_bias("encoder.layer.{i}.intermediate.dense", "blocks.{i}.mlp.up"),
    *weight_and_bias("encoder.layer.{i}.output.dense", "blocks.{i}.mlp.down"),
    *weight_and_bias("pooler.dense", "pre_logits"),
    *weight_and_bias("classifier", "head"),
]
DISTILLED = [
    Rule("embeddings.distillation_token", "distill_token", CLASS_TOKEN),
    *weight_and_bias("cls_classifier", "head"),
    *weight_and_bias("distillation_classifier", "head_distill"),
]
UNUSED_DISTILLATION = [
    Rule(
        ("embeddings.distillation_token", "embeddings.position_embeddings"),
        ("registers", *POSITION_NAMES),
        DISTILLATION_AS_REGISTER,
    )
]
DINOV2 = [
    *TRUNK,
    *POSITION_RULES,
    Rule("embeddings.register_tokens", "registers", TOKENS),
    *weight_and_bias("encoder.layer.{i}.norm1", "blocks.{i}.norm1"),
    Rule("encoder.layer.{i}.layer_scale1.lambda1", "blocks.{i}.scale1"),
    *weight_and_bias("encoder.layer.{i}.norm2", "blocks.{i}.norm2"),
    Rule("encoder.layer.{i}.layer_scale2.lambda1", "blocks.{i}.scale2"),
    *weight_and_bias("classifier", "head"),
]
MLP = [
    *weight_and_bias("encoder.layer.{i}.mlp.fc1", "blocks.{i}.mlp.up"),
    *weight_and_bias("encoder.layer.{i}.mlp.fc2", "blocks.{i}.mlp.down"),
]
GATED = [
    *weight_and_bias("encoder.layer.{i}.mlp.weights_in", "blocks.{i}.mlp.up"),  # the gate first, as in ours
    *weight_and_bias("encoder.layer.{i}.mlp.weights_out", "blocks.{i}.mlp.down"),
]
TOWER = [
    Rule("embeddings.class_embedding", "class_token"),
    *weight_and_bias("embeddings.patch_embedding", "patch"),
    Rule("embeddings.position_embedding.weight", POSITION_NAMES, POSITION_FLAT),
    *weight_and_bias("pre_layrnorm", "pre_norm"),
    *weight_and_bias("encoder.layers.{i}.layer_norm1", "blocks.{i}.norm1"),
    *qkv_rules("encoder.layers.{i}.self_attn", "q_proj", "k_proj", "v_proj"),
    *weight_and_bias("encoder.layers.{i}.self_attn.out_proj", "blocks.{i}.attention.out"),
    *weight_and_bias("encoder.layers.{i}.layer_norm2", "blocks.{i}.norm2"),
    *weight_and_bias("encoder.layers.{i}.mlp.fc1", "blocks.{i}.mlp.up"),
    *weight_and_bias("encoder.layers.{i}.mlp.fc2", "blocks.{i}.mlp.down"),
    *weight_and_bias("post_layernorm", "norm"),
    Rule("head.probe", "pool.probe", CLASS_TOKEN),
    Rule("head.attention.in_proj_weight", ("pool.q.weight", "pool.kv.weight"), IN_PROJ),
    Rule("head.attention.in_proj_bias", ("pool.q.bias", "pool.kv.bias"), IN_PROJ),
    *weight_and_bias("head.attention.out_proj", "pool.out"),
    *weight_and_bias("head.layernorm", "pool.norm"),
    *weight_and_bias("head.mlp.fc1", "pool.mlp.up"),
    *weight_and_bias("head.mlp.fc2", "pool.mlp.down"),
]
PROJECTION = [Rule("visual_projection.weight", "head.weight")]
CLASSIFIER = weight_and_bias("classifier", "head")
UNIT = "encoder.stages.{s}.layers.{u}"
RESNET = [
    Rule("embedder.convolution.weight", "root.weight"),
    *[r for n in "123" for r in weight_and_bias(f"{UNIT}.norm{n}", f"stages.{{s}}.{{u}}.norm{n}")],
    *[Rule(f"{UNIT}.conv{n}.weight", f"stages.{{s}}.{{u}}.conv{n}.weight") for n in "123"],
    Rule(f"{UNIT}.downsample.conv.weight", "stages.{s}.{u}.project.weight"),
    *weight_and_bias("norm", "norm"),
    *weight_and_bias("classifier.1", "head"),
]

IGNORED = {
    "vit": ("embeddings.mask_token", "decoder.*"),
    "deit": ("embeddings.mask_token", "decoder.*", "pooler.*"),
    "dinov2": ("embeddings.mask_token", "embeddings.register_tokens"),  # empty where the model has none
    "dinov2_with_registers": ("embeddings.mask_token",),
    "clip": ("embeddings.position_ids", "text_model.*", "text_projection.weight", "logit_scale"),
    "siglip": ("embeddings.position_ids", "text_model.*", "logit_scale", "logit_bias"),
    "bit": (),
}
"""Tensors in the same file that are not loaded: parts for other tasks."""


@dataclass
class HuggingFaceTable(RenameTable):
    """A table that also reads separate gate and value projections of SwiGLU (transformers 5 in memory).

    A network without a class token is written with SigLIP's names, and can be read from I-JEPA's as well.
    """

    def read(self, theirs: Mapping[str, Tensor], skeleton: nn.Module, config: AnyConfig) -> dict[str, Tensor]:
        if backbone_for(config) == "siglip" and "embeddings.position_embeddings" in theirs:
            return RenameTable(self.name, [*VIT, *POSITION_RULES], IGNORED["vit"]).read(theirs, skeleton, config)
        gates = [n for n in theirs if ".mlp.gate_proj." in n]
        if gates:
            joined = {n: theirs[n] for n in theirs}
            for gate in gates:
                parts = [joined.pop(gate), joined.pop(gate.replace("gate_proj", "up_proj"))]
                joined[gate.replace("gate_proj", "weights_in")] = torch.cat(parts)
            theirs = joined
        return super().read(theirs, skeleton, config)


def table(config: AnyConfig) -> RenameTable:
    if isinstance(config, SwinConfig):
        return HUGGINGFACE_NAMES.table(config)
    backbone = backbone_for(config)
    ignore: tuple[str, ...] = IGNORED[backbone]
    if isinstance(config, BiTConfig):
        rules = RESNET
    elif backbone == "vit":
        rules = [*VIT, *POSITION_RULES]
        ignore = ignore if config.pre_logits else (*ignore, "pooler.*")
    elif backbone == "deit":
        without = [r for r in VIT if r not in CLASSIFIER]
        rules = [*without, *POSITION_RULES, *DISTILLED] if config.distilled else [*VIT, *UNUSED_DISTILLATION]
    elif backbone in ("clip", "siglip"):
        rules = [*TOWER, *(PROJECTION if is_projection(config) else CLASSIFIER)]
        unused = {"clip": ("post_layernorm.*",) if config.pool_norm == "none" else (), "siglip": ("head.*",)}
        ignore = ignore if config.pool == "map" else (*ignore, *unused[backbone])
    else:
        rules = [*DINOV2, *(GATED if config.activation == "swiglu" else MLP)]
    return HuggingFaceTable("huggingface", rules, ignore)


SWIN_BLOCK = r"^(encoder\.layers\.\d+\.blocks\.\d+\.)"
NAME_PATTERNS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(vit|deit|ijepa|dinov2|dinov2_with_registers|vision_model|bit|swin|swinv2)\.", ""),
        # names of transformers 5 in memory -> the Hub's
        (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
        (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
        (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
        (r"^(encoder\.layer\.\d+\.attention\.)q_proj\.", r"\1attention.query."),
        (r"^(encoder\.layer\.\d+\.attention\.)k_proj\.", r"\1attention.key."),
        (r"^(encoder\.layer\.\d+\.attention\.)v_proj\.", r"\1attention.value."),
        (r"^(encoder\.layer\.\d+\.attention\.)o_proj\.", r"\1output.dense."),
        (r"^(encoder\.layer\.\d+\.mlp\.)down_proj\.", r"\1weights_out."),
        (rf"{SWIN_BLOCK}attention\.q_proj\.", r"\1attention.self.query."),
        (rf"{SWIN_BLOCK}attention\.k_proj\.", r"\1attention.self.key."),
        (rf"{SWIN_BLOCK}attention\.v_proj\.", r"\1attention.self.value."),
        (rf"{SWIN_BLOCK}attention\.o_proj\.", r"\1attention.output.dense."),
        (rf"{SWIN_BLOCK}attention\.relative_position_bias\.relative", r"\1attention.self.relative"),
        (rf"{SWIN_BLOCK}mlp\.fc1\.", r"\1intermediate.dense."),
        (rf"{SWIN_BLOCK}mlp\.fc2\.", r"\1output.dense."),
    )
]


def normalize_name(name: str) -> str:
    """A name of any transformers version, with or without prefix -> the Hub's, without prefix."""
    for pattern, replacement in NAME_PATTERNS:
        name = pattern.sub(replacement, name)
    return name
