"""Learning-rate schedules compared with rates computed by hand and with big_vision's formula."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vitrail.config import ScheduleConfig, epochs, images, steps
from vitrail.errors import ConfigError
from vitrail.training.lr_schedule import LRSchedule

BATCH, IMAGES = 10, 100


def schedule(total: int, **settings: Any) -> LRSchedule:
    return LRSchedule(ScheduleConfig(**settings), total_steps=total, batch_size=BATCH, num_images=IMAGES)


ROOT_HALF = 1 / math.sqrt(2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "constant"}, [1, 1, 1, 1]),
        ({"kind": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"kind": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
        ({"kind": "cosine"}, [1, (1 + ROOT_HALF) / 2, 0.5, (1 - ROOT_HALF) / 2]),
        ({"kind": "cosine", "min_lr_ratio": 0.5}, [1, (3 + ROOT_HALF) / 4, 0.75, (3 - ROOT_HALF) / 4]),
        ({"kind": "rsqrt", "timescale": steps(1)}, [1, ROOT_HALF, 3**-0.5, 0.5]),
        ({"kind": "rsqrt", "timescale": steps(1), "min_lr_ratio": 0.6}, [1, ROOT_HALF, 0.6, 0.6]),
        ({"kind": "constant", "warmup": steps(4)}, [0.25, 0.5, 0.75, 1]),
        ({"kind": "linear", "warmup": steps(2)}, [0.5, 1, 1, 0.5]),
        ({"kind": "constant", "cooldown": steps(2)}, [1, 1, 1, 0.5]),
        ({"kind": "constant", "cooldown": steps(4), "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
        ({"kind": "rsqrt", "timescale": steps(1), "cooldown": steps(2)}, [1, ROOT_HALF, 3**-0.5, 0.25]),
        ({"kind": "constant", "warmup": steps(2), "cooldown": steps(2)}, [0.5, 1, 1, 0.5]),
        ({"kind": "constant", "warmup": epochs(0.2), "cooldown": images(20)}, [0.5, 1, 1, 0.5]),
    ],
)
def test_four_steps_match_hand_computed_rates(settings: dict[str, Any], expected: list[float]) -> None:
    lr = schedule(4, **settings)
    assert [lr(step) for step in range(4)] == pytest.approx(expected, abs=1e-12)


def big_vision(step: int, kind: str, total: int, warmup: int, cooldown: int, timescale: int, end: float) -> float:
    """big_vision's learning-rate function for a base rate of 1; `end` is its linear_end."""
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    if kind == "linear":
        lr = end + (1 - end) * (1 - progress)
    elif kind == "cosine":
        lr = 0.5 * (1 + math.cos(math.pi * progress))
    elif kind == "rsqrt":
        lr = 1 / math.sqrt(1 + max(step - warmup, 0) / timescale)
    else:
        lr = 1.0
    if warmup:
        lr *= min(1.0, step / warmup)
    if cooldown:
        lr *= min(1.0, (total - step) / cooldown)
    return lr


SCHEDULES: dict[str, Any] = {
    "kind": st.sampled_from(["linear", "cosine", "rsqrt", "constant"]),
    "total": st.integers(1, 300),
    "warmup": st.integers(0, 200),
    "cooldown": st.integers(0, 200),
    "timescale": st.integers(1, 1000),
}


@given(**SCHEDULES, end=st.sampled_from([0.0, 0.01, 0.3]))
def test_schedule_matches_big_vision_after_the_warmup(
    kind: Any, total: int, warmup: int, cooldown: int, timescale: int, end: float
) -> None:
    end = end if kind == "linear" and not cooldown else 0.0  # big_vision has a final rate only here
    assume(warmup < total)
    assume(warmup + cooldown <= total)
    lr = schedule(
        total, kind=kind, warmup=steps(warmup), cooldown=steps(cooldown), timescale=steps(timescale), min_lr_ratio=end
    )
    expected = [big_vision(step, kind, total, warmup, cooldown, timescale, end) for step in range(total + 1)]
    for step in range(total):
        # big_vision's rate is 0 in the first step; ours is one step ahead during the warm-up.
        assert lr(step) == pytest.approx(expected[step + 1 if step < warmup else step], abs=1e-12)


@given(**SCHEDULES, floor=st.floats(0, 1))
def test_schedule_rises_then_falls_to_the_minimum(
    kind: Any, total: int, warmup: int, cooldown: int, floor: float, timescale: int
) -> None:
    assume(warmup + cooldown <= total)
    lr = schedule(
        total, kind=kind, warmup=steps(warmup), cooldown=steps(cooldown), min_lr_ratio=floor, timescale=steps(timescale)
    )
    values = [lr(step) for step in range(total)]
    assert all(0 < value <= 1 + 1e-12 for value in values), "every step has a positive rate"
    up, down = values[:warmup], values[warmup:]
    assert up == sorted(up)
    assert all(a >= b - 1e-12 for a, b in pairwise(down))
    assert all(value >= floor - 1e-12 for value in down)
    if warmup:
        assert up[-1] == 1
    if down:
        assert down[0] == pytest.approx(1, abs=1e-12)
    if down and (cooldown or kind in ("linear", "cosine")):
        assert lr(total) == pytest.approx(floor, abs=1e-12)


@given(kind=st.sampled_from(["linear", "cosine", "rsqrt", "constant"]), floor=st.floats(0, 1))
def test_schedule_has_no_jumps(kind: Any, floor: float) -> None:
    lr = schedule(1000, kind=kind, warmup=steps(100), cooldown=steps(100), min_lr_ratio=floor, timescale=steps(100))
    values = [lr(step) for step in range(1001)]
    assert max(abs(a - b) for a, b in pairwise(values)) < 0.0101


@pytest.mark.parametrize(
    ("total", "settings", "message"),
    [
        (5, {"warmup": steps(6)}, "a warm-up of 6 steps is 6 steps, but the whole run has 5"),
        (5, {"warmup": epochs(1)}, "a warm-up of 1 epoch is 10 steps, but the whole run has 5"),
        (5, {"warmup": steps(3), "cooldown": steps(3)}, "and a cool-down of 3 steps is 6 steps"),
        (5, {"kind": "rsqrt", "timescale": steps(0)}, "timescale=0 steps: rsqrt needs at least one step"),
        (0, {}, "a schedule needs at least one step, got 0"),
    ],
)
def test_invalid_schedules_are_refused(total: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(total, **settings)


def test_schedule_of_one_step() -> None:
    for kind in ("linear", "cosine", "rsqrt", "constant"):
        assert schedule(1, kind=kind)(0) == 1
        assert schedule(1, kind=kind, warmup=steps(1))(0) == 1
