"""A small learner and a short run of it, alone or in a group of processes: what tests of training compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import OptimConfig, TrainConfig, ViTConfig
from vitrail.models import build
from vitrail.objectives.base import Objective
from vitrail.train.distributed import DistributedContext, full_tensor, gradient_sync, wrap
from vitrail.train.ema import EMA
from vitrail.train.optimizer import Optimizer, freeze, make_optimizer

# 5 classes, 3 registers: counts that no number of processes divides
NET = ViTConfig(
    image_size=16,
    patch_size=4,
    width=24,
    depth=2,
    num_heads=2,
    mlp_dim=40,
    num_classes=5,
    num_registers=3,
    layer_scale=0.1,
)
BATCH = 8
ALONE = DistributedContext(torch.device("cpu"))

State = dict[str, Tensor]


class Learner(Objective):
    """A network and something of the objective's own."""

    def __init__(self, seed: int = 0, config: ViTConfig = NET) -> None:
        super().__init__(build(config, seed=seed))
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            self.net.head.weight.normal_(generator=torch.Generator().manual_seed(seed))

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.net(images) * self.scale
        return {"loss": F.cross_entropy(logits, targets, reduction="sum")}


def settings(parallel: str = "auto", **optim: Any) -> TrainConfig:
    return TrainConfig(model=NET, parallel=parallel, optim=OptimConfig(**{"lr": 1e-3, "weight_decay": 0.1} | optim))


def random_images(step: int, slots: range = range(BATCH)) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 16, 16, dtype=torch.float64, generator=g)
    targets = torch.randint(5, (BATCH,), generator=g)
    return images[slots.start : slots.stop], targets[slots.start : slots.stop]


def backward(wrapped: nn.Module, distributed: DistributedContext, step: int, parts: int = 1) -> float:
    """Gradients of the mean loss over the global batch; that mean."""
    images, targets = random_images(step, distributed.slots(BATCH))
    total = 0.0
    for i, (x, y) in enumerate(zip(images.chunk(parts), targets.chunk(parts), strict=True)):
        with gradient_sync(wrapped, is_last=i == parts - 1):
            loss = wrapped(x, y)["loss"] / BATCH
            (loss * distributed.world_size).backward()
        total += float(loss.detach())
    return float(distributed.all_reduce_tensors({"loss": torch.tensor(total, dtype=torch.float64)})["loss"])


@dataclass
class Run:
    """What is left after some steps."""

    learner: Learner
    wrapped: nn.Module
    optimizer: Optimizer
    ema: EMA
    losses: list[float]

    def tensors(self) -> State:
        """All that a checkpoint holds, sharded where it is."""
        state = {f"learner/{k}": v for k, v in self.learner.state_dict().items()}
        state |= {f"optim/{k}": v for k, v in self.optimizer.state_tensors().items()}
        return state | {f"ema/{k}": v for k, v in self.ema.state_tensors().items()}


def trained(
    distributed: DistributedContext,
    config: TrainConfig,
    steps: range,
    begin: Callable[[Run], object] | None = None,
    decay: float = 0.9,
) -> Run:
    """Steps of a run; `begin` sees it before the first of them."""
    learner = Learner().double()
    freeze(learner, config.optim.trainable)
    wrapped = wrap(learner, config, distributed)
    run = Run(learner, wrapped, make_optimizer(learner, config.optim), EMA(learner, decay), [])
    if begin is not None:
        begin(run)
    for step in steps:
        run.losses.append(backward(wrapped, distributed, step))
        run.optimizer.clip_grad_norm(config.optim.grad_clip)
        run.optimizer.step(1 / (1 + step))
        run.ema.update(step)
    return run


def plain(tensors: dict[str, Any]) -> State:
    return {name: full_tensor(t).detach().clone() for name, t in tensors.items()}


def close(got: State, expected: State, within: float) -> None:
    assert set(got) == set(expected)
    for name in expected:
        torch.testing.assert_close(
            got[name], expected[name], rtol=within, atol=within, msg=lambda m, n=name: f"{n}: {m}"
        )
