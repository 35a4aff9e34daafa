"""Data parallelism: the objective wrapped with DDP or FSDP2, and tensors that may be sharded.

An `Objective` is a network together with its loss.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vitrail.config import TrainConfig
from vitrail.models.bit import PreActBottleneck
from vitrail.models.hybrid import Bottleneck
from vitrail.models.layers import Block
from vitrail.runtime import warn_once
from vitrail.runtime.distributed import DistributedContext

FSDP_UNITS = (Block, PreActBottleneck, Bottleneck)
"""The modules that FSDP shards and gathers one at a time."""


def wrap(objective: nn.Module, config: TrainConfig, distributed: DistributedContext) -> nn.Module:
    """The objective wrapped with DDP or FSDP2; the objective itself for a single process.

    Gradients are averaged over processes, so each process multiplies its loss by `distributed.world_size`. Parameters
    must be frozen before and the optimizer created after, since sharding replaces the parameters. Every process builds
    the same objective from the seed and keeps its shard: the initial values do not depend on the number of processes.
    """
    if distributed.checkpoint_group is None:
        if config.parallel != "auto":
            warn_once([f"parallel={config.parallel} has no effect in a single process; start several with torchrun"])
        return objective
    if config.parallel == "fsdp":
        return _shard(objective, distributed, bfloat16=config.precision == "bfloat16")
    return DistributedDataParallel(
        objective,
        device_ids=[distributed.device.index] if distributed.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def _shard(objective: nn.Module, distributed: DistributedContext, bfloat16: bool) -> nn.Module:
    """Shard each FSDP unit, then the remaining parameters."""
    # The units' weights are gathered as bfloat16, the dtype in which autocast computes with them anyway; the other
    # parameters (positions, tokens, norms, heads) keep their precision. Gradients are reduced in float32 or more.
    lighter = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    for module in objective.modules():
        if isinstance(module, FSDP_UNITS):
            fully_shard(
                module, mesh=distributed.mesh, reshard_after_forward=True, mp_policy=lighter if bfloat16 else exact
            )
    fully_shard(objective, mesh=distributed.mesh, reshard_after_forward=True, mp_policy=exact)
    # Evaluation calls the network without the loss; FSDP must gather the weights for that call too. It computes in
    # the dtype in which the units are gathered, in any requested precision.
    objective.predict = MethodType(_predict_bfloat16 if bfloat16 else _predict, objective)  # type: ignore[assignment]
    register_fsdp_forward_method(objective, "predict")
    return objective


def _predict(objective: nn.Module, images: Tensor) -> Tensor:
    assert isinstance(objective.net, nn.Module)
    logits: Tensor = objective.net(images)
    return logits


def _predict_bfloat16(objective: nn.Module, images: Tensor) -> Tensor:
    with torch.autocast(images.device.type, torch.bfloat16):
        return _predict(objective, images)


class ShardedNetwork(nn.Module):
    """The network of a sharded objective, for evaluation: FSDP gathers its weights during the forward pass.

    It never runs in inference mode: the next training step could not write to tensors created there.
    """

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective
        self.config = objective.net.config  # type: ignore[union-attr]

    def forward(self, images: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            logits: Tensor = self.objective.predict(images)  # type: ignore[operator]
        return logits


def unwrap(module: nn.Module) -> nn.Module:
    """The objective inside DDP and `torch.compile`."""
    while True:
        inside = getattr(module, "_orig_mod", None) or (
            module.module if isinstance(module, DistributedDataParallel) else None
        )
        if inside is None:
            return module
        module = inside


def evaluation_network(wrapped: nn.Module) -> nn.Module:
    """The network to evaluate: the objective's `net`, as a ShardedNetwork if it is sharded."""
    objective = unwrap(wrapped)
    if isinstance(objective, FSDPModule):
        return ShardedNetwork(objective)
    assert isinstance(objective.net, nn.Module)
    return objective.net


def gradient_sync(wrapped: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Context for one micro-batch of gradient accumulation: DDP reduces gradients only in the last one.

    FSDP reduces them in every micro-batch: otherwise each process would have to hold the full gradient.
    """
    inside = getattr(wrapped, "_orig_mod", wrapped)
    if is_last or not isinstance(inside, DistributedDataParallel):
        return nullcontext()
    return inside.no_sync()


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A DTensor gathered on every process; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(sharded: Tensor, part: Tensor) -> Tensor:
    """A DTensor sharded like `sharded` whose local shard is `part`; `part` itself if `sharded` is not a DTensor."""
    if not isinstance(sharded, DTensor):
        return part
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def local_shard(sharded: Tensor, value: Tensor) -> Tensor:
    """This process's shard of the full tensor `value`, sharded like `sharded`; needs no communication."""
    if not isinstance(sharded, DTensor):
        return value
    value = value.to(sharded.device)
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy `value`, a full tensor or one sharded like `target`, into `target`."""
    if isinstance(value, DTensor):
        target.copy_(value)
    else:
        local_tensor(target).copy_(local_shard(target, value))
