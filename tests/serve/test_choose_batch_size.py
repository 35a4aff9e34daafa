"""Choosing the batch size by timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import vitrail
from vitrail.serve import batch_size
from vitrail.serve.batch_size import choose_batch_size
from vitrail.serve.served_model import ServedModel


class FakeEngine:
    """A fake engine with its own clock; some calls are delayed, as by other processes."""

    def __init__(
        self, seconds: Callable[[int], float], vit: vitrail.Model, delays: Sequence[float] = (), name: str = "torch"
    ) -> None:
        self.seconds, self.info, self.name, self.precision = seconds, vit.info, name, "float32"
        self.delays, self.wall_time, self.cpu_time, self.batches = iter(delays), 0.0, 0.0, []

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        self.batches.append(len(pixels))
        self.cpu_time += 0.001 if self.name == "openvino" else self.seconds(len(pixels))  # openvino has its own threads
        self.wall_time += self.seconds(len(pixels)) + next(self.delays, 0)
        return np.zeros((len(pixels), 5), np.float32)

    def batch_sizes(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float = 1e9, parallel_batches: bool = False
    ) -> tuple[int, int]:
        clocks = {
            "perf_counter": lambda: self.wall_time,
            "monotonic": lambda: self.wall_time,
            "thread_time": lambda: self.cpu_time,
        }
        monkeypatch.setattr(batch_size, "time", SimpleNamespace(**clocks))
        return choose_batch_size(ServedModel(self, parallel_batches=parallel_batches), (1, 2, 4, 8, 16, 32), seconds)  # type: ignore[arg-type]

    def best(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 1e9, parallel_batches: bool = False) -> int:
        return self.batch_sizes(monkeypatch, seconds, parallel_batches)[0]


SLOWER_PAST_8 = {1: 24.1, 2: 21.9, 4: 20.5, 8: 19.7, 16: 21.5, 32: 23.8}
"""Milliseconds per image by batch size: ViT-Ti/16 on one core."""


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        (lambda size: 0.004 * size, 1),  # larger batches save nothing
        (lambda size: 0.02, 32),  # the time does not depend on the size
        (lambda size: 0.01 + 0.02 * max(size - 8, 0), 8),
        (lambda size: SLOWER_PAST_8[size] * size / 1000, 8),  # 4 % faster than 4: enough
        (lambda size: size * (1 if size < 4 else 0.99), 1),  # 1 % is not enough
    ],
)
def test_the_batch_size_is_the_smallest_with_nearly_the_best_throughput(
    vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], best: int
) -> None:
    assert FakeEngine(seconds, vit).best(monkeypatch) == best
    assert FakeEngine(seconds, vit, delays=[0.5] * 7).best(monkeypatch) == best  # the first calls are disturbed
    disturbed = FakeEngine(seconds, vit, delays=[0.5] * 99)  # but not its CPU time
    assert disturbed.best(monkeypatch, parallel_batches=True) == best
    assert FakeEngine(seconds, vit, name="openvino").best(monkeypatch, parallel_batches=True) == best


@pytest.mark.parametrize(
    ("seconds", "batch_sizes"),
    [
        (lambda size: 0.02, (32, 32)),
        (lambda size: SLOWER_PAST_8[size] * size / 1000, (8, 2)),  # 2 take 44 ms, 4 take 82
        (lambda size: 0.3 * size**0.5, (32, 1)),  # even one image exceeds the limit
    ],
)
def test_the_shared_batch_size_is_limited_by_its_duration(
    vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], batch_sizes: tuple[int, int]
) -> None:
    assert FakeEngine(seconds, vit).batch_sizes(monkeypatch) == batch_sizes


def test_choosing_a_batch_size_has_a_time_limit(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = FakeEngine(lambda size: 0.1, vit)
    assert slow.best(monkeypatch, seconds=0.25) == 2
    assert slow.batches == [1, 1, 2]  # one warm-up call
    quadratic = FakeEngine(lambda size: 0.01 * size * size, vit)
    assert quadratic.best(monkeypatch) == 1
    assert (quadratic.batches.count(1), quadratic.batches.count(32)) == (
        1 + batch_size.TIMING_ROUNDS,
        2,
    )  # dropped as too slow
