"""How a step is taken: which parameters learn, how fast each does, what decays, and by which rule.

Parameters are sorted by name. Kernels decay and nothing else does (`learner.decayed()`); with
`layer_decay` each layer below the head learns slower than the one above (`learner.depth_of(name)`); the
head, and what an objective puts beside it, learns `head_lr_factor` times as fast. The rules are
torch's own. Around them stands one object that keeps their memory by parameter name, complete from
the start, so that a checkpoint neither depends on the order of groups nor on a first step.
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
from vitrail.train.distributed import copy_into, local_tensor
from vitrail.train.ema import check_same_tensors
from vitrail.train.muon import Muon

HEAD_MODULES = ("head", "head_distill", "pre_logits")
TOP_PARAMETER = "net.norm.weight"
"""A parameter that stands as high as the head, whether there is one or not."""
FUSED_DEVICES = {"cpu", "cuda", "mps"}
SGD_MOMENTUM, MUON_MOMENTUM = 0.9, 0.95


def freeze(learner: Objective, train: str | int) -> None:
    """Compute gradients only for what learns, and never for what the objective itself has frozen.

    Before `wrap`: DDP waits for every gradient it was promised.
    """
    names = trainable_names(learner, train)
    for name, parameter in learner.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in names)


def trainable_names(learner: Objective, train: str | int) -> set[str]:
    """Names of the parameters that learn.

    "head" is the head (both of them, and a pre-training layer before it); a number adds so many of
    the last blocks, and with them the final norm and pool. What the objective adds always learns.
    """
    names = {name for name, _ in learner.named_parameters()}
    if train == "all":
        return names
    top = learner.depth_of(TOP_PARAMETER)
    if isinstance(train, int) and train >= top:
        raise ConfigError(f"trainable={train} blocks, but the network has {top - 1}; try trainable=all.")
    lowest = top - train if isinstance(train, int) and train > 0 else top + 1
    return {
        name
        for name in names
        if _is_objective_parameter(name) or _is_head_parameter(name) or learner.depth_of(name) >= lowest
    }


def make_optimizer(learner: Objective, config: OptimConfig) -> Optimizer:
    """For what learns of a learner; after `wrap`, whose shards are what is stepped."""
    return Optimizer(learner, config)


class Optimizer:
    """`clip`, then `step(schedule(step))`; or `zero` instead, to leave a step out."""

    def __init__(self, learner: Objective, config: OptimConfig) -> None:
        names = trainable_names(learner, config.trainable)
        self.all_parameters = list(learner.parameters())
        self.parameters = {n: p for n, p in learner.named_parameters() if n in names and p.requires_grad}
        if not self.parameters:
            raise ConfigError("nothing is left to learn: every parameter is frozen; try optim.trainable=all.")
        self.optimizers = _make_optimizers(learner, self.parameters, config)
        for optimizer in self.optimizers:
            _init_state(optimizer)

    def step(self, factor: float) -> None:
        """One step at this share of the highest learning rate; gradients are gone afterwards."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
                if group["apart"]:  # SGD's own decay would go through the momentum
                    _decay_weights(group["params"], group["apart"] * factor)
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.all_parameters:
            parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """The norm of the whole gradient, which is scaled down to `max_norm` where it is more; None only measures.

        Nothing waits for a GPU here. Of a sharded gradient each process measures its part.
        """
        found = [p.grad for p in self.parameters.values() if p.grad is not None]
        grads = [local_tensor(g) for g in found]
        norm = get_total_norm(grads)
        if found and isinstance(found[0], DTensor):
            square = norm.square()
            dist.all_reduce(square, group=found[0].device_mesh.get_group())
            norm = square.sqrt()
        if max_norm is not None and grads:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """All that the rules remember, as "exp_avg/net.blocks.0..."; there before the first step too."""
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            f"{kind}/{names[id(parameter)]}": tensor
            for optimizer in self.optimizers
            for parameter, memory in optimizer.state.items()
            for kind, tensor in memory.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Exactly what `state_tensors` gave, on this many processes or another number."""
        mine = self.state_tensors()
        check_same_tensors("the optimizer's tensors", tensors, mine)
        for name, tensor in mine.items():
            copy_into(tensor, tensors[name])


def _make_optimizers(
    learner: Objective, parameters: dict[str, nn.Parameter], config: OptimConfig
) -> list[torch.optim.Optimizer]:
    groups = _parameter_groups(learner, parameters, config)
    muon, others = ([g for g in groups if g["turned"] == which] for which in (True, False))
    fused = {p.device.type for p in parameters.values()} <= FUSED_DEVICES
    optimizers: list[torch.optim.Optimizer] = []
    if config.kind == "sgd":
        momentum = SGD_MOMENTUM if config.momentum is None else config.momentum
        nesterov = bool(config.nesterov) and momentum > 0
        fused = fused and not any(isinstance(p, DTensor) for p in parameters.values())  # torch has none for shards
        return [torch.optim.SGD(others, momentum=momentum, nesterov=nesterov, fused=fused)]
    if config.kind == "muon":
        if not muon:
            raise ConfigError("optim.kind=muon turns matrices in blocks, and none learns here; try adamw.")
        momentum = MUON_MOMENTUM if config.momentum is None else config.momentum
        # Updates as large as AdamW's, so that one learning rate serves both.
        nesterov = config.nesterov is None or config.nesterov
        optimizers.append(Muon(muon, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"))
    if others:
        optimizers.append(torch.optim.AdamW(others, betas=config.betas, eps=config.eps, fused=fused))
    return optimizers


def _parameter_groups(
    learner: Objective, parameters: dict[str, nn.Parameter], config: OptimConfig
) -> list[dict[str, Any]]:
    """Parameters that are stepped alike, with their highest learning rate and their decay."""
    decayed, top = learner.decayed(), learner.depth_of(TOP_PARAMETER)
    alike: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        depth, decays = learner.depth_of(name), name in decayed
        muon = config.kind == "muon" and decays and parameter.ndim == 2 and 0 < depth < top
        scale = (config.layer_decay or 1.0) ** (top - depth)
        if depth == top and (_is_objective_parameter(name) or _is_head_parameter(name)):
            scale *= config.head_lr_factor
        alike.setdefault((muon, decays, scale), []).append(parameter)
    return [
        {"params": params, "turned": muon, **_lr_and_decay(config, config.lr * scale, decays)}
        for (muon, decays, scale), params in alike.items()
    ]


def _lr_and_decay(config: OptimConfig, peak: float, decays: bool) -> dict[str, float]:
    """Learning rate and decay of a group.

    torch's rules shrink weights by lr * weight_decay. Decay by the schedule alone is the same with
    weight_decay / peak, since lr is peak * schedule; SGD's, which is part of the gradient, is done apart.
    """
    decay = config.weight_decay if decays else 0.0
    by_schedule = config.decay_by == "schedule"
    apart = decay if by_schedule and config.kind == "sgd" else 0.0
    own = 0.0 if apart else decay / peak if by_schedule else decay
    return {"lr": peak, "peak": peak, "weight_decay": own, "apart": apart}


def _init_state(optimizer: torch.optim.Optimizer) -> None:
    """Memory for every parameter now, as torch would make it at the first step.

    SGD's momentum begins as the first gradient there, which is what zeros lead to.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, torch.optim.AdamW):
                count = torch.zeros((), device=parameter.device if group["fused"] else "cpu", dtype=torch.float32)
                memory = {"step": count}
                memory |= {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            elif group["momentum"]:
                memory = {"momentum_buffer": torch.zeros_like(parameter)}
            else:
                continue
            optimizer.state[parameter] = memory


@torch.no_grad()
def _decay_weights(parameters: list[nn.Parameter], share: float) -> None:
    torch._foreach_mul_([local_tensor(p) for p in parameters], 1 - share)


def _is_objective_parameter(name: str) -> bool:
    """Whether a parameter is what the objective adds to the network."""
    return not name.startswith("net.")


def _is_head_parameter(name: str) -> bool:
    return name.split(".")[1] in HEAD_MODULES
