"""DDP and FSDP over NCCL on one GPU match the unwrapped objective, and optimizer steps do not synchronize."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.processes import Processes
from training.small_objective import BATCH_SIZE, SmallObjective, full_tensors, objective_config

from vitrail.config import TrainConfig
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.ema import EMA
from vitrail.training.optimizer import make_optimizer
from vitrail.training.parallel import evaluation_network, wrap
from vitrail.training.sharded_checkpoint import load_sharded, save_sharded

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def process() -> Iterator[Processes]:
    with Processes(1) as group:
        yield group


def random_images(device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(BATCH_SIZE, 3, 16, 16, generator=g).to(device), torch.randint(5, (BATCH_SIZE,), generator=g).to(
        device
    )


def run_steps(wrapped: nn.Module, objective: nn.Module, config: TrainConfig, device: torch.device) -> dict[str, Tensor]:
    """Three steps, the last without GPU synchronization; returns all tensors of a checkpoint."""
    optimizer, ema = make_optimizer(objective, config.optim), EMA(objective, 0.9)
    images, targets = random_images(device)
    for step in range(3):
        with torch.autocast("cuda", torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = wrapped(images, targets)["loss"] / BATCH_SIZE
        loss.backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        optimizer.clip_grad_norm(0.5)
        optimizer.step(0.5)
        ema.update(step)
        torch.cuda.set_sync_debug_mode("default")
    state = {f"learner/{k}": v for k, v in objective.state_dict().items()}
    state |= {f"optim/{k}": v for k, v in optimizer.state_tensors().items()}
    return state | {f"ema/{k}": v for k, v in ema.state_tensors().items()}


def compare_on_gpu(parallel: str, precision: str, compiled: bool, kind: str, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # about TF32, the sync debug mode and compilation
    config = objective_config(parallel, kind=kind).replace(precision=precision)
    with DistributedContext.from_env("cuda") as distributed:
        reference = SmallObjective().to(distributed.device)
        expected = full_tensors(run_steps(reference, reference, config, distributed.device))
        objective = SmallObjective().to(distributed.device)
        wrapped = wrap(objective, config, distributed)
        assert wrapped is not objective or parallel == "fsdp"
        got = run_steps(torch.compile(wrapped) if compiled else wrapped, objective, config, distributed.device)  # type: ignore[arg-type]
        save_sharded(Path(folder), got, distributed)
        reloaded = {name: torch.zeros_like(t) for name, t in got.items()}
        load_sharded(Path(folder), reloaded, distributed)
        reloaded_equal = all(
            torch.equal(a, b) for a, b in zip(full_tensors(reloaded).values(), full_tensors(got).values(), strict=True)
        )
        images = random_images(distributed.device)[0]
        with torch.inference_mode():
            logits = evaluation_network(wrapped).eval()(images), reference.net.eval()(images)
        actual = full_tensors(got)
        # The gradient of a key's bias is 0 up to rounding, which Adam scales to full steps.
        same_arithmetic = precision == "float32" and not compiled
        compared = {n: w for n, w in expected.items() if same_arithmetic or n.startswith("learner/net.head")}
        worst = max((float((actual[n] - w).norm() / w.norm().clamp(min=1e-9)), n) for n, w in compared.items())
        return {
            "worst": worst,
            "logits": float((logits[0] - logits[1]).norm() / logits[1].norm()),
            "reloaded": reloaded_equal,
            "sum": distributed.all_reduce_tensors({"n": torch.ones(2, device=distributed.device)})["n"].tolist(),
        }


@pytest.mark.parametrize(
    ("precision", "compiled", "kind", "tolerance"),
    [
        ("float32", False, "adamw", 1e-4),
        ("bfloat16", False, "adamw", 0.05),
        ("float32", False, "sgd", 1e-4),
        ("float32", False, "muon", 1e-2),
        ("float32", True, "adamw", 1e-3),
    ],
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_group_of_one_gpu_matches_the_unwrapped_objective(
    process: Processes, tmp_path: Path, parallel: str, precision: str, compiled: bool, kind: str, tolerance: float
) -> None:
    result = process.run(compare_on_gpu, parallel, precision, compiled, kind, str(tmp_path))[0]
    assert result["reloaded"]
    assert result["sum"] == [1.0, 1.0]
    assert result["logits"] < tolerance
    assert result["worst"][0] < tolerance, result["worst"]
