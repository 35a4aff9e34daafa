"""The same numbers on one process and on several: gradients, steps, averages, checkpoints, in float64 over gloo."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from train.processes import Processes
from train.small_learner import (
    ALONE,
    BATCH,
    Learner,
    Run,
    State,
    backward,
    close,
    plain,
    random_images,
    settings,
    trained,
)

from vitrail.config import AugmentConfig, TrainConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.train.distributed import DistributedContext, evaluation_network, unwrap, wrap
from vitrail.train.optimizer import freeze
from vitrail.train.trainer import _check_batch_size

EXACT, STEPPED = 1e-12, 1e-9


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as group:
        yield group


# --- what each process computes ------------------------------------------------------------------


def gradients(config: TrainConfig, parts: int) -> State:
    with DistributedContext.from_env("cpu") as distributed:
        learner = Learner().double()
        freeze(learner, config.optim.trainable)
        learner.net.gradient_checkpointing = config.gradient_checkpointing
        if config.compile:
            warnings.simplefilter("ignore")  # the compiler looks at gradients that are not there
            learner.compile(backend="aot_eager", dynamic=False)
        wrapped = wrap(learner, config, distributed)
        for step in range(2):  # the second time hooks and buckets are as they will stay
            learner.zero_grad()
            backward(wrapped, distributed, step, parts)
        return plain({n: p.grad for n, p in learner.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(("parallel", "world", "parts"), [("ddp", 2, 2), ("ddp", 4, 1), ("fsdp", 2, 1), ("fsdp", 4, 2)])
def test_gradients_are_those_of_one_process(processes: Processes, parallel: str, world: int, parts: int) -> None:
    learner = Learner().double()
    backward(learner, ALONE, 1)
    expected = {n: p.grad for n, p in learner.named_parameters()}
    for got in processes.run(gradients, settings(parallel), parts, world=world):
        close(got, expected, EXACT)


@pytest.mark.parametrize(
    "how", [{"gradient_checkpointing": True}, pytest.param({"compile": True}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_neither_recomputing_nor_compiling_changes_them(
    processes: Processes, parallel: str, how: dict[str, bool]
) -> None:
    learner = Learner().double()
    backward(learner, ALONE, 1)
    expected = {n: p.grad for n, p in learner.named_parameters()}
    close(processes.run(gradients, settings(parallel).replace(**how), 2, world=2)[0], expected, EXACT)


@pytest.mark.parametrize("train", ["head", 1])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_is_frozen_has_no_gradient_and_the_rest_has_the_same(
    processes: Processes, parallel: str, train: str | int
) -> None:
    learner = Learner().double()
    freeze(learner, train)
    backward(learner, ALONE, 1)
    expected = {n: p.grad for n, p in learner.named_parameters() if p.grad is not None}
    assert 0 < len(expected) < len(list(learner.parameters()))
    close(processes.run(gradients, settings(parallel, trainable=train), 1, world=2)[0], expected, EXACT)


def ten_steps(config: TrainConfig) -> tuple[list[float], State]:
    with DistributedContext.from_env("cpu") as distributed:
        run = trained(distributed, config, range(10))
        return run.losses, plain(run.tensors())


SLOWER = {"layer_decay": 0.7, "decay_by": "schedule", "trainable": 1}
SGD = {"kind": "sgd", "lr": 0.1, "decay_by": "schedule"}


@pytest.mark.parametrize(
    ("parallel", "world", "optim"),
    [
        ("ddp", 2, {"grad_clip": 0.5}),
        ("fsdp", 4, {"grad_clip": 0.5}),
        ("fsdp", 2, SLOWER),
        ("ddp", 2, SGD),
        pytest.param("ddp", 4, SLOWER, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, SGD, marks=pytest.mark.slow),
        pytest.param("ddp", 2, {"kind": "muon"}, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, {"kind": "muon"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ten_steps_agree_on_any_number_of_processes(
    processes: Processes, parallel: str, world: int, optim: dict[str, Any]
) -> None:
    config = settings(parallel, **optim)
    alone = trained(ALONE, config, range(10))
    for losses, got in processes.run(ten_steps, config, world=world):
        np.testing.assert_allclose(losses, alone.losses, rtol=STEPPED, atol=0)
        close(got, alone.tensors(), STEPPED)


def measured(run: Run) -> list[Tensor]:
    """Logits with the run's own weights, with their average, and with its own again."""
    net, images = evaluation_network(run.wrapped).eval(), random_images(0)[0]
    with torch.inference_mode():
        own = net(images).clone()
        with run.ema.swap():
            averaged = net(images).clone()
        again = net(images).clone()
    net.train()
    return [own, averaged, again]


def measured_twice(parallel: str) -> tuple[list[Tensor], list[float], bool]:
    found: list[Tensor] = []
    with DistributedContext.from_env("cpu") as distributed:
        # before the first step too: the network alone must not take itself for the whole
        run = trained(distributed, settings(parallel), range(3), begin=lambda r: found.extend(measured(r)), decay=0.5)
        found += measured(run)
        return found, run.losses, any(isinstance(p, DTensor) for p in run.learner.parameters())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_network_is_measured_between_steps_with_its_own_weights_and_with_the_average(
    processes: Processes, parallel: str
) -> None:
    expected: list[Tensor] = []
    alone = trained(ALONE, settings(), range(3), begin=lambda r: expected.extend(measured(r)), decay=0.5)
    expected += measured(alone)
    assert torch.equal(expected[3], expected[5])
    assert not torch.allclose(expected[3], expected[4], rtol=1e-3)
    for got, losses, sharded in processes.run(measured_twice, parallel, world=2):
        assert sharded == (parallel == "fsdp")
        np.testing.assert_allclose(losses, alone.losses, rtol=STEPPED)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=STEPPED, atol=STEPPED)


def first_values(config: TrainConfig) -> State:
    with DistributedContext.from_env("cpu") as distributed:
        learner = Learner(seed=3)
        wrap(learner, config, distributed)
        return plain(learner.state_dict())


def test_first_values_do_not_depend_on_sharding(processes: Processes) -> None:
    expected = Learner(seed=3).state_dict()
    for got in processes.run(first_values, settings("fsdp"), world=4):
        assert all(torch.equal(got[name], value) for name, value in expected.items())


class Headless(Learner):
    """Leaves parameters out, and says so by freezing them, as masked patches do with a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.requires_grad_(False)

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net.features(images, outputs="patches").patches.square().sum() * self.scale.sum()}


def unused(parallel: str) -> State:
    with DistributedContext.from_env("cpu") as distributed:
        learner = Headless().double()
        wrapped = wrap(learner, settings(parallel), distributed)
        for step in range(3):
            learner.zero_grad()
            backward(wrapped, distributed, step)
        return plain({n: p.grad for n, p in learner.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_an_objective_may_leave_parameters_out(processes: Processes, parallel: str) -> None:
    learner = Headless().double()
    backward(learner, ALONE, 2)
    expected = {n: p.grad for n, p in learner.named_parameters() if p.grad is not None}
    assert "net.head.weight" not in expected
    got = processes.run(unused, parallel, world=2)[0]
    close({n: g for n, g in got.items() if n in expected}, expected, EXACT)
    assert not any(g.any() for n, g in got.items() if n not in expected)


def in_bfloat16(parallel: str) -> tuple[State, set[torch.dtype]]:
    with DistributedContext.from_env("cpu") as distributed:
        learner = Learner()
        wrapped = wrap(learner, settings(parallel).replace(precision="bfloat16"), distributed)
        images, targets = random_images(0, distributed.slots(BATCH))
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(images.float(), targets)["loss"] / BATCH
        (loss * distributed.world_size).backward()
        grads = plain({n: p.grad for n, p in learner.named_parameters()})
        with torch.no_grad():
            assert evaluation_network(wrapped)(images.float()).isfinite().all(), "measured in float32 or not"
        return grads, {p.dtype for p in learner.parameters()} | {g.dtype for g in grads.values()}


def test_bfloat16_is_as_near_sharded_as_whole(processes: Processes) -> None:
    exact = Learner().double()
    backward(exact, ALONE, 0)
    length = torch.stack([p.grad.norm() for p in exact.parameters()]).norm()
    errors = []
    for parallel in ("ddp", "fsdp"):
        (grads, kinds), _ = processes.run(in_bfloat16, parallel, world=2)
        assert kinds == {torch.float32}, "weights and gradients stay float32"
        off = torch.stack([(grads[n] - p.grad).norm() for n, p in exact.named_parameters()]).norm()
        errors.append(float(off / length))
    assert max(errors) < 0.05
    assert errors[1] < 2 * errors[0]


# --- what processes tell each other --------------------------------------------------------------


def rows_of(dtype: torch.dtype, shape: tuple[int, ...], slots: range) -> Tensor:
    g = torch.Generator().manual_seed(5)
    every = torch.randint(0, 2 if dtype == torch.bool else 250, (BATCH, *shape), generator=g).to(dtype)
    return every[slots.start : slots.stop]


KINDS = [
    (torch.uint8, (3, 4, 4)),
    (torch.int64, ()),
    (torch.bool, (5,)),
    (torch.bfloat16, (2, 3)),
    (torch.float64, (1,)),
]


def talked() -> dict[str, Any]:
    with DistributedContext.from_env("cpu") as distributed:
        many = torch.tensor([2**40 + distributed.rank, 1])
        sums = distributed.all_reduce_tensors(
            {"counts": many, "small": torch.tensor(0.1), "table": torch.eye(3) * distributed.rank}
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
                distributed.all_gather_rows(rows_of(dtype, shape, range(distributed.rank))) for dtype, shape in KINDS
            ],
            "none": distributed.all_gather_rows(torch.zeros(0, 3)),
            "order": order,
            "stop": (distributed.any(False), distributed.any(distributed.rank == 2)),
            "told": distributed.broadcast_object({"folder": f"run-{distributed.rank}"}),
            "first": distributed.is_main,
            "slots": list(distributed.slots(BATCH)),
        }


def test_sums_votes_and_words_reach_everyone(processes: Processes) -> None:
    answers = processes.run(talked)
    for answer in answers:
        sums = answer["sums"]
        assert sums["counts"].tolist() == [4 * 2**40 + 6, 4], "exact far beyond what float32 holds"
        assert sums["small"].dtype == torch.float32
        assert float(sums["small"]) == pytest.approx(0.4)
        assert torch.equal(sums["table"], torch.eye(3) * 6)
        assert torch.equal(answer["sum"], torch.tensor([6.0, 6.0]))
        for rows, (dtype, shape) in zip(answer["rows"], KINDS, strict=True):
            assert torch.equal(rows, torch.cat([rows_of(dtype, shape, range(rank)) for rank in range(4)]))
        assert answer["none"].shape == (0, 3)
        assert answer["stop"] == (False, True)
        assert answer["told"] == {"folder": "run-0"}
    assert [a["first"] for a in answers] == [True, False, False, False]
    assert all(a["order"][0] >= answers[0]["order"][1] for a in answers[1:]), "the first went ahead"
    assert [slot for a in answers for slot in a["slots"]] == list(range(BATCH))


def test_one_process_has_no_group_and_is_told_what_it_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("vitrail.runtime._logged", set())  # what was said in another test is said again
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
        learner = Learner()
        assert wrap(learner, settings("fsdp"), distributed) is learner
        assert "parallel=fsdp has no effect in a single process; start several with torchrun" in caplog.text
        assert unwrap(torch.compile(learner, backend="eager")) is learner  # type: ignore[arg-type]
        assert evaluation_network(learner) is learner.net
        counts = {"n": torch.tensor(3)}
        assert distributed.all_reduce_tensors(counts)["n"] is not None


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=10 is not a multiple of the 4 processes; try batch_size=12"):
        DistributedContext(torch.device("cpu"), rank=1, world_size=4).slots(10)
    config = settings("ddp").replace(batch_size=24, augment=AugmentConfig(mixup=0.2).to_dict())
    with pytest.raises(
        ConfigError, match=r"each of 4 processes 6 images, .* try batch_size=32, augment.mix_group=2 or"
    ):
        _check_batch_size(config, processes=4, images=100)
    assert _check_batch_size(config, processes=3, images=100) == 24
    assert _check_batch_size(config.replace(augment=AugmentConfig().to_dict()), processes=4, images=100) == 24


def dies(how: str, patience: float) -> None:
    try:
        with DistributedContext.from_env("cpu", timeout=timedelta(seconds=patience)) as distributed:
            wrapped = wrap(Learner().double(), settings("ddp"), distributed)
            for step in range(3):
                if step == 1 and distributed.rank == 1:
                    if how == "killed":
                        os.kill(os.getpid(), 9)
                    if how == "hangs":
                        time.sleep(2 * patience)
                        os._exit(4)
                    raise ValueError("an image is broken")
                backward(wrapped, distributed, step)
    except ValueError:
        os._exit(1)  # as an uncaught error ends a process


@pytest.mark.parametrize(
    ("how", "patience", "code"),
    [("killed", 60, -9), pytest.param("raises", 60, 1, marks=pytest.mark.slow), ("hangs", 2, 4)],
)
def test_when_one_process_goes_the_others_end_with_a_sentence(how: str, patience: float, code: int) -> None:
    with Processes(2) as pair:
        pair.run(talked_once)
        started = time.monotonic()
        survivor, other = pair.run(dies, how, patience, survivors=True)
        assert time.monotonic() - started < 20
    assert isinstance(survivor, TrainError)
    assert "process 0 of 2 lost the connection to another one, which died or did not respond in time" in str(survivor)
    assert "--resume" in str(survivor)
    assert "pytorch" not in str(survivor), "no places in somebody's source"
    assert other == code


def talked_once() -> bool:
    with DistributedContext.from_env("cpu") as distributed:
        return distributed.any(True)
