"""Data parallelism: the objective wrapped with DDP or FSDP2, and tensors that may be sharded.

An `Objective` is a network together with its loss. With FSDP every process has a shard of each parameter; with hybrid
sharding (HSDP) only the processes of a group share them, and each group has all shards.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vitrail.config import TrainConfig
from vitrail.errors import ConfigError
from vitrail.models.bit import PreActBottleneck
from vitrail.models.hybrid import Bottleneck
from vitrail.models.layers import Block
from vitrail.models.swin_layers import PatchMerging, SwinBlock
from vitrail.runtime import warn_once
from vitrail.runtime.distributed import DistributedContext

FSDP_UNITS = (Block, SwinBlock, PatchMerging, PreActBottleneck, Bottleneck)
"""The modules that FSDP shards and gathers one at a time."""
SHARDED = ("fsdp", "hsdp")
"""The settings of `parallel` with sharded weights."""


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
    if config.parallel in SHARDED:
        mesh = distributed.mesh(_shard_size(config, distributed) if config.parallel == "hsdp" else None)
        return _shard(objective, mesh, bfloat16=config.precision == "bfloat16")
    return DistributedDataParallel(
        objective,
        device_ids=[distributed.device.index] if distributed.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def _shard_size(config: TrainConfig, distributed: DistributedContext) -> int:
    """The number of processes that share one copy of the weights: `shard_size`, or those of a machine."""
    counts = sorted(set(distributed.all_gather_object(distributed.local_world_size)))
    if config.shard_size is None and len(counts) > 1:
        raise ConfigError(
            f"the machines have {' and '.join(map(str, counts))} processes, and parallel=hsdp needs groups of one "
            f"size; try shard_size={math.gcd(*counts)}."
        )
    size = config.shard_size or counts[0]
    if distributed.world_size % size:
        raise ConfigError(
            f"shard_size={size} does not divide the {distributed.world_size} processes; "
            f"try shard_size={math.gcd(size, distributed.world_size)}."
        )
    return size


def _shard(objective: nn.Module, mesh: DeviceMesh, bfloat16: bool) -> nn.Module:
    """Shard each FSDP unit, then the remaining parameters."""
    # The units' weights are gathered as bfloat16, the dtype in which autocast computes with them anyway; the other
    # parameters (positions, tokens, norms, heads) keep their precision. Gradients are reduced in float32 or more.
    lighter = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    for module in objective.modules():
        if isinstance(module, FSDP_UNITS):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=lighter if bfloat16 else exact)
    fully_shard(objective, mesh=mesh, reshard_after_forward=True, mp_policy=exact)
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
    if is_sharded(objective):
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


def is_sharded(objective: nn.Module) -> bool:
    """Whether each process has only shards of the parameters."""
    return isinstance(objective, FSDPModule)


def full_tensor(tensor: Tensor) -> Tensor:
    """A DTensor gathered on every process; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_on_main(tensor: Tensor) -> Tensor | None:
    """A DTensor gathered on the main process, on the CPU; any other tensor on the CPU. None on the other processes.

    Every process calls it; only the main process has room for the full tensor, and with HSDP only its group sends.
    """
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if is_main else None
    mesh = tensor.device_mesh
    if "replicate" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("replicate"):
        return None
    group = mesh.get_group("shard")
    parts = dist.get_world_size(group)
    local, rows = tensor.to_local().detach().cpu(), -(-tensor.shape[0] // parts)
    padded = local.new_zeros(rows, *tensor.shape[1:])  # the last shards may be smaller or empty
    padded[: len(local)] = local
    sent = padded.reshape(-1).view(torch.uint8)  # as bytes, for any dtype
    whole = torch.empty(parts * sent.numel() if is_main else 0, dtype=torch.uint8)
    dist.gather(sent, list(whole.chunk(parts)) if is_main else None, dst=0, group=group)
    return whole.view(local.dtype).view(-1, *tensor.shape[1:])[: tensor.shape[0]] if is_main else None


def shard_like(sharded: Tensor, part: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """A DTensor sharded like `sharded` whose local shard is `part`; `part` itself if `sharded` is not a DTensor.

    `mesh`: another mesh of the same shape, such as one of CPUs.
    """
    if not isinstance(sharded, DTensor):
        return part
    return DTensor.from_local(
        part,
        mesh or sharded.device_mesh,
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
    """Copy `value`, a full tensor or one sharded like `target`, also on another device, into `target`."""
    if isinstance(value, DTensor):
        local_tensor(target).copy_(local_tensor(value))
    else:
        local_tensor(target).copy_(local_shard(target, value))
