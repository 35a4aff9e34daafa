"""Rename tables of Swin Transformers: Microsoft's names, and those of timm, torchvision and transformers.

Microsoft and transformers store the merging of patches with the stage before it, timm with the stage after it,
torchvision as a module of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from vitrail.config import SwinConfig
from vitrail.weights.renaming import AnyConfig, RenameTable, Rule, Transform, single_tensor, weight_and_bias

OUR_BLOCK, OUR_MERGE = "stages.{s}.blocks.{i}.", "stages.{s}.merge."
BUFFERS = ("*.relative_position_index", "*.relative_coords_table", "*.attn_mask")
"""Tensors that the libraries compute from the config, and some files store."""


def join(parts: int) -> Transform:
    """Separate projections <-> concatenated along the output dimension."""
    return Transform(lambda t, _: [torch.cat(list(t))], lambda t, _: t[0].chunk(parts))


def _with_key_bias(tensors: Sequence[Tensor], _: AnyConfig) -> list[Tensor]:
    queries, values = tensors[0].chunk(2)
    return [torch.cat([queries, torch.zeros_like(queries), values])]


SCALE = single_tensor(lambda t: t.flatten(), lambda t: t[:, None, None])
"""H 1 1 <-> H."""
IGNORED_KEY_BIAS = Transform(lambda t, _: [torch.cat(t[0].chunk(3)[::2])], _with_key_bias)
"""torchvision's biases of queries, keys and values, of which it ignores the keys' <-> those of queries and values."""


@dataclass(frozen=True, kw_only=True)
class SwinNaming:
    """The names of one library. `{s}` is the stage, `{before}` the stage before it, `{i}` the block in its stage;
    torchvision numbers stages and merges together: `{odd}` and `{even}`."""

    library: str
    patch: str = "patch_embed.proj"
    patch_norm: str = "patch_embed.norm"
    block: str = "layers.{s}.blocks.{i}."
    norm1: str = "norm1"
    qkv: Literal["joint", "joint with key bias", "separate"] = "joint"
    """How queries, keys and values are stored, and in version 2 their biases."""
    attention: str = "attn."
    """The attention's part of the names that follow the block's."""
    proj: str = "attn.proj"
    cpb: str = "attn.cpb_mlp."
    """The MLP of the position biases (version 2)."""
    norm2: str = "norm2"
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    merge: str = "layers.{before}.downsample."
    norm: str = "norm"
    head: str = "head"
    ignored: tuple[str, ...] = (*BUFFERS, "mask_token", "decoder.*")
    """Buffers, and tensors of SimMIM's pre-training."""

    def block_name(self, stage: int, block: int) -> str:
        """What the names of a block's tensors begin with."""
        return self.block.format(s=stage, i=block, odd=2 * stage + 1)

    def table(self, config: AnyConfig) -> RenameTable:
        """The rename table of a network of this config."""
        assert isinstance(config, SwinConfig)
        theirs = partial("{}{}".format, self.block)
        ours = partial("{}{}".format, OUR_BLOCK)
        rules = [
            *weight_and_bias(self.patch, "patch"),
            *weight_and_bias(self.patch_norm, "patch_norm"),
            *weight_and_bias(theirs(self.norm1), ours("norm1")),
            *self._qkv(theirs(self.attention), config.version),
            *weight_and_bias(theirs(self.proj), ours("attention.out")),
            Rule(theirs(f"{self.attention}relative_position_bias_table"), ours("attention.bias.table")),
            Rule(theirs(f"{self.attention}logit_scale"), ours("attention.log_scale"), SCALE),
            *weight_and_bias(theirs(f"{self.cpb}0"), ours("attention.bias.up")),
            Rule(theirs(f"{self.cpb}2.weight"), ours("attention.bias.down.weight")),
            *weight_and_bias(theirs(self.norm2), ours("norm2")),
            *weight_and_bias(theirs(self.up), ours("mlp.up")),
            *weight_and_bias(theirs(self.down), ours("mlp.down")),
            *weight_and_bias(f"{self.merge}norm", f"{OUR_MERGE}norm"),
            Rule(f"{self.merge}reduction.weight", f"{OUR_MERGE}reduction.weight"),
            *weight_and_bias(self.norm, "norm"),
            *weight_and_bias(self.head, "head"),
        ]
        return RenameTable(f"{self.library} (Swin)", rules, self.ignored)

    def _qkv(self, attention: str, version: int) -> list[Rule]:
        ours = f"{OUR_BLOCK}attention.qkv"
        weight, bias = weight_and_bias(f"{attention}qkv", ours)
        if self.qkv == "separate":
            weights, biases = (
                tuple(f"{attention}{name}.{part}" for name in ("query", "key", "value")) for part in ("weight", "bias")
            )
            biases = biases[::2] if version == 2 else biases
            return [Rule(weights, f"{ours}.weight", join(3)), Rule(biases, f"{ours}.bias", join(len(biases)))]
        if version == 1:
            return [weight, bias]
        if self.qkv == "joint with key bias":
            return [weight, Rule(bias.theirs, bias.ours, IGNORED_KEY_BIAS)]
        return [weight, Rule((f"{attention}q_bias", f"{attention}v_bias"), bias.ours, join(2))]


MICROSOFT_NAMES = SwinNaming(library="microsoft")
TIMM_NAMES = SwinNaming(library="timm", merge="layers.{s}.downsample.", head="head.fc")
TORCHVISION_NAMES = SwinNaming(
    library="torchvision",
    patch="features.0.0",
    patch_norm="features.0.2",
    block="features.{odd}.{i}.",
    qkv="joint with key bias",
    up="mlp.0",
    down="mlp.3",
    merge="features.{even}.",
)
HUGGINGFACE_NAMES = SwinNaming(
    library="huggingface",
    patch="embeddings.patch_embeddings.projection",
    patch_norm="embeddings.norm",
    block="encoder.layers.{s}.blocks.{i}.",
    norm1="layernorm_before",  # in version 2 it follows the attention
    qkv="separate",
    attention="attention.self.",
    proj="attention.output.dense",
    cpb="attention.self.continuous_position_bias_mlp.",
    norm2="layernorm_after",
    up="intermediate.dense",
    down="output.dense",
    merge="encoder.layers.{before}.downsample.",
    norm="layernorm",
    head="classifier",
    ignored=(*BUFFERS, "embeddings.mask_token", "decoder.*"),
)
