"""One process and several compute the same gradients, steps and averages, in float64 over gloo."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from training.processes import Processes
from training.small_objective import (
    BATCH_SIZE,
    SINGLE_PROCESS,
    Run,
    SmallObjective,
    State,
    assert_tensors_close,
    backward,
    full_tensors,
    objective_config,
    random_images,
    train_steps,
)

from vitrail.config import AugmentConfig, TrainConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.optimizer import freeze
from vitrail.training.parallel import evaluation_network, unwrap, wrap
from vitrail.training.trainer import _check_batch_size

STEP_TOLERANCE, RUN_TOLERANCE = 1e-12, 1e-9


# Computation


def gradients(config: TrainConfig, micro_batches: int) -> State:
    with DistributedContext.from_env("cpu") as distributed:
        objective = SmallObjective().double()
        freeze(objective, config.optim.trainable)
        objective.net.gradient_checkpointing = config.gradient_checkpointing
        if config.compile:
            warnings.simplefilter("ignore")  # the compiler warns about missing gradients
            objective.compile(backend="aot_eager", dynamic=False)
        wrapped = wrap(objective, config, distributed)
        for step in range(2):  # hooks and buckets are final from the second step on
            objective.zero_grad()
            backward(wrapped, distributed, step, micro_batches)
        return full_tensors({n: p.grad for n, p in objective.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    ("parallel", "world", "micro_batches"),
    [("ddp", 2, 2), ("ddp", 4, 1), ("fsdp", 2, 1), ("fsdp", 4, 2), ("hsdp", 4, 2)],
)
def test_gradients_match_a_single_process(
    four_processes: Processes, parallel: str, world: int, micro_batches: int
) -> None:
    objective = SmallObjective().double()
    backward(objective, SINGLE_PROCESS, 1)
    expected = {n: p.grad for n, p in objective.named_parameters()}
    for got in four_processes.run(gradients, objective_config(parallel), micro_batches, world=world):
        assert_tensors_close(got, expected, STEP_TOLERANCE)


@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, pytest.param({"compile": True}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_checkpointing_and_compilation_do_not_change_gradients(
    four_processes: Processes, parallel: str, options: dict[str, bool]
) -> None:
    objective = SmallObjective().double()
    backward(objective, SINGLE_PROCESS, 1)
    expected = {n: p.grad for n, p in objective.named_parameters()}
    assert_tensors_close(
        four_processes.run(gradients, objective_config(parallel).replace(**options), 2, world=2)[0],
        expected,
        STEP_TOLERANCE,
    )


@pytest.mark.parametrize("trainable", ["head", 1])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_frozen_parameters_have_no_gradient_and_the_others_match(
    four_processes: Processes, parallel: str, trainable: str | int
) -> None:
    objective = SmallObjective().double()
    freeze(objective, trainable)
    backward(objective, SINGLE_PROCESS, 1)
    expected = {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}
    assert 0 < len(expected) < len(list(objective.parameters()))
    assert_tensors_close(
        four_processes.run(gradients, objective_config(parallel, trainable=trainable), 1, world=2)[0],
        expected,
        STEP_TOLERANCE,
    )


def run_ten_steps(config: TrainConfig) -> tuple[list[float], State]:
    with DistributedContext.from_env("cpu") as distributed:
        run = train_steps(distributed, config, range(10))
        return run.losses, full_tensors(run.tensors())


LAYER_DECAY = {"layer_decay": 0.7, "decay_by": "schedule", "trainable": 1}
SGD = {"kind": "sgd", "lr": 0.1, "decay_by": "schedule"}


@pytest.mark.parametrize(
    ("parallel", "world", "optim"),
    [
        ("ddp", 2, {"grad_clip": 0.5}),
        ("fsdp", 4, {"grad_clip": 0.5}),
        ("hsdp", 4, {"grad_clip": 0.5}),
        ("fsdp", 2, LAYER_DECAY),
        ("ddp", 2, SGD),
        pytest.param("ddp", 4, LAYER_DECAY, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, SGD, marks=pytest.mark.slow),
        pytest.param("ddp", 2, {"kind": "muon"}, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, {"kind": "muon"}, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, LAYER_DECAY, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, SGD, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, {"kind": "muon"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ten_steps_match_a_single_process(
    four_processes: Processes, parallel: str, world: int, optim: dict[str, Any]
) -> None:
    config = objective_config(parallel, **optim)
    reference = train_steps(SINGLE_PROCESS, config, range(10))
    for losses, got in four_processes.run(run_ten_steps, config, world=world):
        np.testing.assert_allclose(losses, reference.losses, rtol=RUN_TOLERANCE, atol=0)
        assert_tensors_close(got, reference.tensors(), RUN_TOLERANCE)


def evaluate_logits(run: Run) -> list[Tensor]:
    """Logits with the current weights, with the averaged weights, and with the current weights again."""
    net, images = evaluation_network(run.wrapped).eval(), random_images(0)[0]
    with torch.inference_mode():
        current = net(images).clone()
        with run.ema.swap():
            averaged = net(images).clone()
        restored = net(images).clone()
    net.train()
    return [current, averaged, restored]


def evaluate_before_and_after(parallel: str) -> tuple[list[Tensor], list[float], bool]:
    logits: list[Tensor] = []
    with DistributedContext.from_env("cpu") as distributed:
        # also before the first step: FSDP must not make the network alone the root module
        run = train_steps(
            distributed,
            objective_config(parallel),
            range(3),
            before_first_step=lambda r: logits.extend(evaluate_logits(r)),
            decay=0.5,
        )
        logits += evaluate_logits(run)
        return logits, run.losses, any(isinstance(p, DTensor) for p in run.objective.parameters())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_evaluation_between_steps_matches_a_single_process(four_processes: Processes, parallel: str) -> None:
    expected: list[Tensor] = []
    reference = train_steps(
        SINGLE_PROCESS,
        objective_config(),
        range(3),
        before_first_step=lambda r: expected.extend(evaluate_logits(r)),
        decay=0.5,
    )
    expected += evaluate_logits(reference)
    assert torch.equal(expected[3], expected[5])
    assert not torch.allclose(expected[3], expected[4], rtol=1e-3)
    for got, losses, sharded in four_processes.run(evaluate_before_and_after, parallel, world=2):
        assert sharded == (parallel == "fsdp")
        np.testing.assert_allclose(losses, reference.losses, rtol=RUN_TOLERANCE)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=RUN_TOLERANCE, atol=RUN_TOLERANCE)


def initial_values(config: TrainConfig) -> State:
    with DistributedContext.from_env("cpu") as distributed:
        objective = SmallObjective(seed=3)
        wrap(objective, config, distributed)
        return full_tensors(objective.state_dict())


def test_initial_values_do_not_depend_on_sharding(four_processes: Processes) -> None:
    expected = SmallObjective(seed=3).state_dict()
    for got in four_processes.run(initial_values, objective_config("fsdp"), world=4):
        assert all(torch.equal(got[name], value) for name, value in expected.items())


class Headless(SmallObjective):
    """An objective that does not use the head and freezes it, as masked-patch does with a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.requires_grad_(False)

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net.features(images, outputs="patches").patches.square().sum() * self.scale.sum()}


def gradients_without_head(parallel: str) -> State:
    with DistributedContext.from_env("cpu") as distributed:
        objective = Headless().double()
        wrapped = wrap(objective, objective_config(parallel), distributed)
        for step in range(3):
            objective.zero_grad()
            backward(wrapped, distributed, step)
        return full_tensors({n: p.grad for n, p in objective.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_objective_may_leave_parameters_unused(four_processes: Processes, parallel: str) -> None:
    objective = Headless().double()
    backward(objective, SINGLE_PROCESS, 2)
    expected = {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}
    assert "net.head.weight" not in expected
    got = four_processes.run(gradients_without_head, parallel, world=2)[0]
    assert_tensors_close({n: g for n, g in got.items() if n in expected}, expected, STEP_TOLERANCE)
    assert not any(g.any() for n, g in got.items() if n not in expected)


def bfloat16_gradients(parallel: str) -> tuple[State, set[torch.dtype]]:
    with DistributedContext.from_env("cpu") as distributed:
        objective = SmallObjective()
        wrapped = wrap(objective, objective_config(parallel).replace(precision="bfloat16"), distributed)
        images, targets = random_images(0, distributed.slots(BATCH_SIZE))
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(images.float(), targets)["loss"] / BATCH_SIZE
        (loss * distributed.world_size).backward()
        grads = full_tensors({n: p.grad for n, p in objective.named_parameters()})
        with torch.no_grad():
            assert evaluation_network(wrapped)(images.float()).isfinite().all(), "evaluation works without autocast"
        return grads, {p.dtype for p in objective.parameters()} | {g.dtype for g in grads.values()}


def test_bfloat16_error_is_similar_for_ddp_and_fsdp(four_processes: Processes) -> None:
    reference = SmallObjective().double()
    backward(reference, SINGLE_PROCESS, 0)
    reference_norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    errors = []
    for parallel in ("ddp", "fsdp"):
        (grads, dtypes), _ = four_processes.run(bfloat16_gradients, parallel, world=2)
        assert dtypes == {torch.float32}, "weights and gradients stay float32"
        error_norm = torch.stack([(grads[n] - p.grad).norm() for n, p in reference.named_parameters()]).norm()
        errors.append(float(error_norm / reference_norm))
    assert max(errors) < 0.05
    assert errors[1] < 2 * errors[0]


# Communication


def random_rows(dtype: torch.dtype, shape: tuple[int, ...], slots: range) -> Tensor:
    g = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 2 if dtype == torch.bool else 250, (BATCH_SIZE, *shape), generator=g).to(dtype)
    return rows[slots.start : slots.stop]


ROW_TYPES = [
    (torch.uint8, (3, 4, 4)),
    (torch.int64, ()),
    (torch.bool, (5,)),
    (torch.bfloat16, (2, 3)),
    (torch.float64, (1,)),
]


def communicate() -> dict[str, Any]:
    with DistributedContext.from_env("cpu") as distributed:
        counts = torch.tensor([2**40 + distributed.rank, 1])
        sums = distributed.all_reduce_tensors(
            {"counts": counts, "small": torch.tensor(0.1), "table": torch.eye(3) * distributed.rank}
        )
        order = []
        with distributed.main_process_first():
            order.append(time.monotonic())
            time.sleep(0.05 * distributed.is_main)
            order.append(time.monotonic())
        return {
            "sums": sums,
            "sum": distributed.all_reduce(torch.tensor([distributed.rank, 1.5])),
            "rows": [
                distributed.all_gather_rows(random_rows(dtype, shape, range(distributed.rank)))
                for dtype, shape in ROW_TYPES
            ],
            "none": distributed.all_gather_rows(torch.zeros(0, 3)),
            "order": order,
            "any": (distributed.any(False), distributed.any(distributed.rank == 2)),
            "broadcast": distributed.broadcast_object({"folder": f"run-{distributed.rank}"}),
            "is_main": distributed.is_main,
            "slots": list(distributed.slots(BATCH_SIZE)),
        }


def test_collectives_give_the_same_result_on_every_process(four_processes: Processes) -> None:
    results = four_processes.run(communicate)
    for result in results:
        sums = result["sums"]
        assert sums["counts"].tolist() == [4 * 2**40 + 6, 4], "exact far beyond what float32 holds"
        assert sums["small"].dtype == torch.float32
        assert float(sums["small"]) == pytest.approx(0.4)
        assert torch.equal(sums["table"], torch.eye(3) * 6)
        assert torch.equal(result["sum"], torch.tensor([6.0, 6.0]))
        for rows, (dtype, shape) in zip(result["rows"], ROW_TYPES, strict=True):
            assert torch.equal(rows, torch.cat([random_rows(dtype, shape, range(rank)) for rank in range(4)]))
        assert result["none"].shape == (0, 3)
        assert result["any"] == (False, True)
        assert result["broadcast"] == {"folder": "run-0"}
    assert [result["is_main"] for result in results] == [True, False, False, False]
    assert all(result["order"][0] >= results[0]["order"][1] for result in results[1:]), "the main process ran first"
    assert [slot for result in results for slot in result["slots"]] == list(range(BATCH_SIZE))


def test_single_process_has_no_group_and_collectives_are_identities(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("vitrail.runtime.notes._logged", set())  # repeats messages that other tests have logged
    with DistributedContext.from_env("cpu") as distributed:
        assert not torch.distributed.is_initialized()
        assert (distributed.rank, distributed.world_size, distributed.is_main, distributed.checkpoint_group) == (
            0,
            1,
            True,
            None,
        )
        assert distributed.broadcast_object("x") == "x"
        assert distributed.any(True)
        assert not distributed.any(False)
        objective = SmallObjective()
        assert wrap(objective, objective_config("fsdp"), distributed) is objective
        assert "parallel=fsdp has no effect in a single process; start several with torchrun" in caplog.text
        assert unwrap(torch.compile(objective, backend="eager")) is objective  # type: ignore[arg-type]
        assert evaluation_network(objective) is objective.net
        counts = {"n": torch.tensor(3)}
        assert distributed.all_reduce_tensors(counts)["n"] is not None


def test_indivisible_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=10 is not a multiple of the 4 processes; try batch_size=12"):
        DistributedContext(torch.device("cpu"), rank=1, world_size=4).slots(10)
    config = objective_config("ddp").replace(batch_size=24, augment=AugmentConfig(mixup=0.2).to_dict())
    with pytest.raises(
        ConfigError, match=r"each of 4 processes 6 images, .* try batch_size=32, augment.mix_group=2 or"
    ):
        _check_batch_size(config, processes=4, images=100)
    assert _check_batch_size(config, processes=3, images=100) == 24
    assert _check_batch_size(config.replace(augment=AugmentConfig().to_dict()), processes=4, images=100) == 24


def fail_on_rank_1(failure: str, timeout_s: float) -> None:
    try:
        with DistributedContext.from_env("cpu", timeout=timedelta(seconds=timeout_s)) as distributed:
            wrapped = wrap(SmallObjective().double(), objective_config("ddp"), distributed)
            for step in range(3):
                if step == 1 and distributed.rank == 1:
                    if failure == "killed":
                        os.kill(os.getpid(), 9)
                    if failure == "hangs":
                        time.sleep(2 * timeout_s)
                        os._exit(4)
                    raise ValueError("an image is broken")
                backward(wrapped, distributed, step)
    except ValueError:
        os._exit(1)  # exit status of an uncaught error


@pytest.mark.parametrize(
    ("failure", "timeout_s", "expected_code"),
    [("killed", 60, -9), pytest.param("raises", 60, 1, marks=pytest.mark.slow), ("hangs", 2, 4)],
)
def test_failure_of_one_process_ends_the_others_with_one_message(
    failure: str, timeout_s: float, expected_code: int
) -> None:
    with Processes(2) as pair:
        pair.run(communicate_once)
        started = time.monotonic()
        survivor, exit_code = pair.run(fail_on_rank_1, failure, timeout_s, allow_failures=True)
        assert time.monotonic() - started < 20
    assert isinstance(survivor, TrainError)
    assert "process 0 of 2 lost the connection to another process, which died or did not respond in time" in str(
        survivor
    )
    assert "--resume" in str(survivor)
    assert "pytorch" not in str(survivor), "no source locations"
    assert exit_code == expected_code


def communicate_once() -> bool:
    with DistributedContext.from_env("cpu") as distributed:
        return distributed.any(True)
