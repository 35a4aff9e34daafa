"""A small objective and short training runs of it, in one process or in a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from small_models import small
from torch import Tensor, nn

from vitrail.config import OptimConfig, TrainConfig, ViTConfig
from vitrail.models import build
from vitrail.objectives.base import Objective
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.ema import EMA
from vitrail.training.optimizer import Optimizer, freeze, make_optimizer
from vitrail.training.parallel import full_tensor, gradient_sync, wrap

# 5 classes and 3 registers: not divisible by any number of processes used
NET = small(image_size=16, patch_size=4, width=24, mlp_dim=40, num_registers=3, layer_scale=0.1)
BATCH_SIZE = 8
SINGLE_PROCESS = DistributedContext(torch.device("cpu"))

State = dict[str, Tensor]


class SmallObjective(Objective):
    """A network, and one parameter of the objective itself."""

    def __init__(self, seed: int = 0, config: ViTConfig = NET) -> None:
        super().__init__(build(config, seed=seed))
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            self.net.head.weight.normal_(generator=torch.Generator().manual_seed(seed))

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.net(images) * self.scale
        return {"loss": F.cross_entropy(logits, targets, reduction="sum")}


def objective_config(parallel: str = "auto", **optim: Any) -> TrainConfig:
    """hsdp: groups of two processes."""
    size = 2 if parallel == "hsdp" else None
    return TrainConfig(
        model=NET, parallel=parallel, shard_size=size, optim=OptimConfig(**{"lr": 1e-3, "weight_decay": 0.1} | optim)
    )


def random_images(step: int, slots: range = range(BATCH_SIZE)) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH_SIZE, 3, 16, 16, dtype=torch.float64, generator=g)
    targets = torch.randint(5, (BATCH_SIZE,), generator=g)
    return images[slots.start : slots.stop], targets[slots.start : slots.stop]


def backward(wrapped: nn.Module, distributed: DistributedContext, step: int, micro_batches: int = 1) -> float:
    """Compute the gradients of the mean loss over the global batch; returns that mean."""
    images, targets = random_images(step, distributed.slots(BATCH_SIZE))
    total = 0.0
    for i, (x, y) in enumerate(zip(images.chunk(micro_batches), targets.chunk(micro_batches), strict=True)):
        with gradient_sync(wrapped, is_last=i == micro_batches - 1):
            loss = wrapped(x, y)["loss"] / BATCH_SIZE
            (loss * distributed.world_size).backward()
        total += float(loss.detach())
    return float(distributed.all_reduce_tensors({"loss": torch.tensor(total, dtype=torch.float64)})["loss"])


@dataclass
class Run:
    """The objects of a run after some steps."""

    objective: SmallObjective
    wrapped: nn.Module
    optimizer: Optimizer
    ema: EMA
    losses: list[float]

    def tensors(self) -> State:
        """All tensors of a checkpoint, sharded if the run is sharded."""
        state = {f"learner/{k}": v for k, v in self.objective.state_dict().items()}
        state |= {f"optim/{k}": v for k, v in self.optimizer.state_tensors().items()}
        return state | {f"ema/{k}": v for k, v in self.ema.state_tensors().items()}


def train_steps(
    distributed: DistributedContext,
    config: TrainConfig,
    steps: range,
    before_first_step: Callable[[Run], object] | None = None,
    decay: float = 0.9,
) -> Run:
    """Train for some steps; `before_first_step` is called with the run."""
    objective = SmallObjective().double()
    freeze(objective, config.optim.trainable)
    wrapped = wrap(objective, config, distributed)
    run = Run(objective, wrapped, make_optimizer(objective, config.optim), EMA(objective, decay), [])
    if before_first_step is not None:
        before_first_step(run)
    for step in steps:
        run.losses.append(backward(wrapped, distributed, step))
        run.optimizer.clip_grad_norm(config.optim.grad_clip)
        run.optimizer.step(1 / (1 + step))
        run.ema.update(step)
    return run


def full_tensors(tensors: dict[str, Any]) -> State:
    return {name: full_tensor(t).detach().clone() for name, t in tensors.items()}


def assert_tensors_close(got: State, expected: State, tolerance: float) -> None:
    assert set(got) == set(expected)
    for name in expected:
        torch.testing.assert_close(
            got[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
