"""Estimated memory of a training step, without running it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from vitrail.config import BiTConfig, NetConfig, TrainConfig, ViTConfig, pair
from vitrail.models import build
from vitrail.models.flops import count_parameters

OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4, "muon": 4}
"""Optimizer state per parameter."""


def training_memory(config: TrainConfig, network: NetConfig, *, bfloat16: bool) -> int:
    """Bytes that a run in one process needs: weights, gradients, optimizer state and the tensors saved for backward.

    An estimate for one process without torch.compile, which saves less: for a ViT-B/16 at batch size 256 in bfloat16 it
    gives 16.5 GB (measured, compiled: 15.7), for a ViT-L/16 at 128 24.9 GB (23.0).
    """
    per_parameter = 4 + 4 + OPTIMIZER_BYTES[config.optim.kind] + (4 if config.ema is not None else 0)
    batch = config.batch_size if isinstance(config.batch_size, int) else 256
    images = -(-batch // config.grad_accum_steps)
    activations = saved_bytes(network) * (2 if bfloat16 else 4) // 4
    if config.gradient_checkpointing and isinstance(network, ViTConfig):
        activations //= network.depth
    return per_parameter * count_parameters(network) + images * activations


def saved_bytes(config: NetConfig) -> int:
    """Bytes that the forward pass of one image saves for backward in float32; every block of a ViT saves as much."""
    if isinstance(config, BiTConfig):
        return _count_saved(config)
    first, second = _count_saved(config.replace(depth=1)), _count_saved(config.replace(depth=2))
    return first + (config.depth - 1) * (second - first)


@cache
def _count_saved(config: NetConfig) -> int:
    net = build(config, seed=0).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = net(torch.zeros(1, config.channels, *pair(config.image_size)))
        found = sum(storage.nbytes() for storage in saved.values())
    del output
    return found
