"""The optimizer: which parameters are trainable, their learning rates and weight decay, gradient clipping.

Weight decay applies to weight matrices only (`objective.decayed_parameters()`). With `layer_decay` the learning rate
decreases from layer to layer below the head (`objective.layer_id(name)`); the head and the parameters of the objective
itself have `head_lr_factor` times the learning rate. The update rules are torch's. `Optimizer` stores their state by
parameter name and allocates it at the start, so that a checkpoint does not depend on the order of groups or on a first
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from vitrail.config import OptimConfig
from vitrail.errors import ConfigError
from vitrail.objectives.base import Objective
from vitrail.runtime import private_torch
from vitrail.training.ema import check_same_tensors
from vitrail.training.muon import Muon
from vitrail.training.parallel import copy_into, local_tensor

HEAD_MODULES = ("head", "head_distill", "pre_logits")
TOP_PARAMETER = "net.norm.weight"
"""A parameter at the depth of the head, also in a network without a head."""
FUSED_DEVICES = {"cpu", "cuda", "mps"}
SGD_MOMENTUM, MUON_MOMENTUM = 0.9, 0.95


def freeze(objective: Objective, trainable: str | int) -> None:
    """Disable gradients for all parameters that are not trainable, in addition to those the objective has frozen.

    To be called before `parallel.wrap`: DDP waits for the gradients of all parameters that require them.
    """
    names = trainable_names(objective, trainable)
    for name, parameter in objective.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in names)


def trainable_names(objective: Objective, trainable: str | int) -> set[str]:
    """Names of the trainable parameters.

    "head": the head (both heads of a distilled network, and a pre-logits layer); a number N: also the last N blocks,
    the final norm and the pooling. Parameters of the objective itself are always trainable.
    """
    names = {name for name, _ in objective.named_parameters()}
    if trainable == "all":
        return names
    top = objective.layer_id(TOP_PARAMETER)
    if isinstance(trainable, int) and trainable >= top:
        raise ConfigError(f"trainable={trainable} blocks, but the network has {top - 1}; try trainable=all.")
    lowest = top - trainable if isinstance(trainable, int) and trainable > 0 else top + 1
    return {
        name
        for name in names
        if _is_objective_parameter(name) or _is_head_parameter(name) or objective.layer_id(name) >= lowest
    }


def make_optimizer(objective: Objective, config: OptimConfig) -> Optimizer:
    """An optimizer for the trainable parameters. Call it after `parallel.wrap`, which may shard them."""
    return Optimizer(objective, config)


class Optimizer:
    """Call `clip_grad_norm`, then `step(schedule(step))`; to skip a step, call `zero_grad` instead."""

    def __init__(self, objective: Objective, config: OptimConfig) -> None:
        names = trainable_names(objective, config.trainable)
        self.all_parameters = list(objective.parameters())
        self.parameters = {n: p for n, p in objective.named_parameters() if n in names and p.requires_grad}
        if not self.parameters:
            raise ConfigError("every parameter is frozen; try optim.trainable=all.")
        self.optimizers = _make_optimizers(objective, self.parameters, config)
        for optimizer in self.optimizers:
            _init_state(optimizer)

    def step(self, factor: float) -> None:
        """Take one step at `factor` times the peak learning rate, then clear the gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
                if group["decoupled_decay"]:  # the weight decay of torch's SGD would go through the momentum
                    _decay_weights(group["params"], group["decoupled_decay"] * factor)
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.all_parameters:
            parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip the gradients to a total norm of `max_norm` (None: do not clip) and return the norm before clipping.

        Does not synchronize with the GPU. For sharded gradients, each process contributes its shards.
        """
        found = [p.grad for p in self.parameters.values() if p.grad is not None]
        grads = [local_tensor(g) for g in found]
        norm = get_total_norm(grads)
        if found and isinstance(found[0], DTensor):
            square = norm.square()  # of this process's shards; replicas of a shard have the same gradients
            dist.all_reduce(square, group=found[0].device_mesh.get_group("shard"))
            norm = square.sqrt()
        if max_norm is not None and grads:
            private_torch.foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer state by name, such as "exp_avg/net.blocks.0..."; complete before the first step."""
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            f"{kind}/{names[id(parameter)]}": tensor
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for kind, tensor in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned, on any number of processes."""
        mine = self.state_tensors()
        check_same_tensors("the optimizer's tensors", tensors, mine)
        for name, tensor in mine.items():
            copy_into(tensor, tensors[name])


def _make_optimizers(
    objective: Objective, parameters: dict[str, nn.Parameter], config: OptimConfig
) -> list[torch.optim.Optimizer]:
    groups = _parameter_groups(objective, parameters, config)
    muon, others = ([g for g in groups if g["use_muon"] == which] for which in (True, False))
    fused = {p.device.type for p in parameters.values()} <= FUSED_DEVICES
    optimizers: list[torch.optim.Optimizer] = []
    if config.kind == "sgd":
        momentum = SGD_MOMENTUM if config.momentum is None else config.momentum
        nesterov = bool(config.nesterov) and momentum > 0
        fused = fused and not any(isinstance(p, DTensor) for p in parameters.values())  # unsupported for DTensor
        return [torch.optim.SGD(others, momentum=momentum, nesterov=nesterov, fused=fused)]
    if config.kind == "muon":
        if not muon:
            raise ConfigError("optim.kind=muon needs trainable matrices in the blocks, and there are none; try adamw.")
        momentum = MUON_MOMENTUM if config.momentum is None else config.momentum
        # Updates are scaled to the size of AdamW's, so that both use the same learning rate.
        nesterov = config.nesterov is None or config.nesterov
        optimizers.append(Muon(muon, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"))
    if others:
        optimizers.append(torch.optim.AdamW(others, betas=config.betas, eps=config.eps, fused=fused))
    return optimizers


def _parameter_groups(
    objective: Objective, parameters: dict[str, nn.Parameter], config: OptimConfig
) -> list[dict[str, Any]]:
    """torch parameter groups: parameters with the same update rule, peak learning rate and weight decay."""
    decayed, top = objective.decayed_parameters(), objective.layer_id(TOP_PARAMETER)
    grouped: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        depth, decays = objective.layer_id(name), name in decayed
        muon = config.kind == "muon" and decays and parameter.ndim == 2 and 0 < depth < top
        scale = (config.layer_decay or 1.0) ** (top - depth)
        if depth == top and (_is_objective_parameter(name) or _is_head_parameter(name)):
            scale *= config.head_lr_factor
        grouped.setdefault((muon, decays, scale), []).append(parameter)
    return [
        {"params": params, "use_muon": muon, **_lr_and_decay(config, config.lr * scale, decays)}
        for (muon, decays, scale), params in grouped.items()
    ]


def _lr_and_decay(config: OptimConfig, peak_lr: float, decays: bool) -> dict[str, float]:
    """Learning rate and weight decay of a parameter group.

    torch's optimizers multiply weights by 1 - lr * weight_decay. With decay_by=schedule the factor is to be 1 -
    schedule * weight_decay, which is the same with weight_decay / peak_lr, since lr = peak_lr * schedule. SGD's weight
    decay is part of the gradient, so there the decay is applied separately.
    """
    decay = config.weight_decay if decays else 0.0
    by_schedule = config.decay_by == "schedule"
    decoupled = decay if by_schedule and config.kind == "sgd" else 0.0
    coupled = 0.0 if decoupled else decay / peak_lr if by_schedule else decay
    return {"lr": peak_lr, "peak_lr": peak_lr, "weight_decay": coupled, "decoupled_decay": decoupled}


def _init_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of every parameter, which torch does at the first step, with the same result.

    torch initializes SGD's momentum with the first gradient, which is what zeros lead to.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, torch.optim.AdamW):
                count = torch.zeros((), device=parameter.device if group["fused"] else "cpu", dtype=torch.float32)
                state = {"step": count}
                state |= {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            elif group["momentum"]:
                state = {"momentum_buffer": torch.zeros_like(parameter)}
            else:
                continue
            optimizer.state[parameter] = state


@torch.no_grad()
def _decay_weights(parameters: list[nn.Parameter], decay: float) -> None:
    private_torch.foreach_mul_([local_tensor(p) for p in parameters], 1 - decay)


def _is_objective_parameter(name: str) -> bool:
    """Whether a parameter belongs to the objective itself, not to the network."""
    return not name.startswith("net.")


def _is_head_parameter(name: str) -> bool:
    return name.split(".")[1] in HEAD_MODULES
