"""Checkpoints in the formats of Facebook's DeiT, DeiT-III, MAE, DINO and DINOv2, with random weights."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.models import ViT
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo

# D width, DEPTH blocks

State = dict[str, Tensor]
D, DEPTH, HEADS = 128, 2, 2


def draw(*shape: int) -> Tensor:
    matrix = len(shape) in (2, 4)
    return torch.randn(shape) / (math.prod(shape[1:]) ** 0.5 if matrix else 3)


def layer(name: str, *shape: int) -> State:
    return {f"{name}.weight": draw(*shape), f"{name}.bias": draw(shape[0])}


def norm(name: str, width: int = D) -> State:
    return {f"{name}.weight": 1 + draw(width), f"{name}.bias": draw(width)}


def block(name: str, width: int = D, swiglu_width: int = 0) -> State:
    """One block; `swiglu_width` is the hidden width of DINOv2's SwiGLU, 0 for an MLP."""
    up, down = ("w12", "w3") if swiglu_width else ("fc1", "fc2")
    hidden = swiglu_width or 4 * width
    return {
        **norm(f"{name}.norm1", width),
        **layer(f"{name}.attn.qkv", 3 * width, width),
        **layer(f"{name}.attn.proj", width, width),
        **norm(f"{name}.norm2", width),
        **layer(f"{name}.mlp.{up}", 2 * hidden if swiglu_width else hidden, width),
        **layer(f"{name}.mlp.{down}", width, hidden),
    }


def encoder(side: int = 4, patch: int = 8, num_prefix_positions: int = 1, **options: Any) -> State:
    """The tensors that all of these models share."""
    blocks = [block(f"blocks.{i}", **options) for i in range(DEPTH)]
    return {
        "cls_token": draw(1, 1, D),
        "pos_embed": draw(1, side * side + num_prefix_positions, D),
        **layer("patch_embed.proj", D, 3, patch, patch),
        **{name: tensor for tensors in blocks for name, tensor in tensors.items()},
        **norm("norm"),
    }


def deit() -> State:
    return {**encoder(), **layer("head", 7, D)}


def deit_distilled() -> State:
    return {
        **encoder(num_prefix_positions=2),
        "dist_token": draw(1, 1, D),
        **layer("head", 7, D),
        **layer("head_dist", 7, D),
    }


def deit3() -> State:
    gammas = {f"blocks.{i}.gamma_{n}": draw(D) for i in range(DEPTH) for n in (1, 2)}
    return {**encoder(num_prefix_positions=0), **gammas, **layer("head", 7, D)}


def dino() -> State:
    return encoder()


def dinov2(registers: int = 0, swiglu_width: int = 0) -> State:
    scales = {f"blocks.{i}.ls{n}.gamma": draw(D) for i in range(DEPTH) for n in (1, 2)}
    tokens = {"register_tokens": draw(1, registers, D)} if registers else {}
    return {**encoder(side=5, patch=14, swiglu_width=swiglu_width), **scales, **tokens, "mask_token": draw(1, D)}


def mae() -> State:
    return {**encoder(), "pos_embed": sincos_positions(4)}


def sincos_positions(side: int) -> Tensor:
    """MAE's fixed positions: sines and cosines of the column and of the row, and zeros for the class token."""
    angles = torch.outer(torch.arange(side), 10000 ** -(torch.arange(D // 4) / (D // 4)))
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # side, D / 2
    table = torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, 0)], dim=1)
    return torch.cat([torch.zeros(1, D), table])[None]


def mae_with_decoder(width: int = 64) -> State:
    return {
        **encoder(),
        "mask_token": draw(1, 1, width),
        "decoder_pos_embed": draw(1, 17, width),
        **layer("decoder_embed", width, D),
        **block("decoder_blocks.0", width),
        **block("decoder_blocks.1", width),
        **norm("decoder_norm", width),
        **layer("decoder_pred", 8 * 8 * 3, width),
    }


def mae_finetuned() -> State:
    state = {**encoder(), **norm("fc_norm"), **layer("head", 7, D)}
    return {name: tensor for name, tensor in state.items() if not name.startswith("norm.")}


def dino_head(name: str = "head") -> State:
    return {
        **layer(f"{name}.mlp.0", 32, D),
        **layer(f"{name}.mlp.2", 32, 32),
        **layer(f"{name}.mlp.4", 16, 32),
        f"{name}.last_layer.weight_g": draw(50, 1),
        f"{name}.last_layer.weight_v": draw(50, 16),
    }


def with_prefix(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def chunked(state: State, chunks: int = 2) -> State:
    """DINOv2's names during training: blocks.CHUNK.LAYER, with layers numbered across chunks."""
    size = DEPTH // chunks
    return {re.sub(r"^blocks\.(\d+)", lambda m: f"blocks.{int(m[1]) // size}.{m[1]}", n): t for n, t in state.items()}


def training_checkpoint(state: State, **args: Any) -> dict[str, Any]:
    """A checkpoint as the training scripts of DeiT and MAE save it."""
    optimizer = {"state": {0: {"exp_avg": draw(3)}}, "param_groups": [{"lr": 0.1}]}
    return {"model": state, "optimizer": optimizer, "epoch": 299, "scaler": {}, "args": argparse.Namespace(**args)}


def save(value: Any, folder: Path, name: str = "weights.pth") -> Path:
    torch.save(value, folder / name)
    return folder / name


def read(value: Any, folder: Path, name: str = "weights.pth", **options: Any) -> tuple[ViT, ModelInfo]:
    net, info = checkpoint.read(save(value, folder, name), overrides={"num_heads": HEADS}, **options)
    assert isinstance(net, ViT)
    return net, info
