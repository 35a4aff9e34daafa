"""Durations: parsing, conversion to steps, JSON round trip."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import Duration, ScheduleConfig, epochs, images, override, steps
from vitrail.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 epochs", epochs(5)),
        ("1 epoch", epochs(1)),
        ("0.5 epochs", epochs(0.5)),
        ("10k steps", steps(10_000)),
        ("10_000 steps", steps(10_000)),
        ("1e4 steps", steps(10_000)),
        ("1.2m images", images(1_200_000)),
        ("13b images", images(13_000_000_000)),
        ("  2 K  Steps ", steps(2000)),
        ("3steps", steps(3)),
        ("0 steps", steps(0)),
    ],
)
def test_durations_are_parsed(text: str, expected: Duration) -> None:
    assert Duration.from_text(text) == expected


@pytest.mark.parametrize(
    "text", ["5", "epochs", "five epochs", "-1 steps", "5 minutes", "5 epochs more", "", "k steps"]
)
def test_invalid_durations_are_rejected_with_examples(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"expected a duration with a unit, such as 5 epochs, 10k steps or 1\.2m images"
    ):
        Duration.from_text(text)


@pytest.mark.parametrize("text", ["1_ steps", "1__0 steps"])
def test_misplaced_underscores_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        Duration.from_text(text)


@pytest.mark.parametrize("count", [-1, math.inf, math.nan])
def test_negative_and_non_finite_counts_are_rejected(count: float) -> None:
    with pytest.raises(ConfigError, match=r"0 or more|a number"):
        steps(count)


@pytest.mark.parametrize(
    ("duration", "batch", "size", "expected"),
    [
        (steps(7), 32, 100, 7),
        (epochs(1), 32, 96, 3),
        (epochs(1), 32, 97, 4),
        (epochs(3), 10, 30, 9),
        (epochs(0.5), 10, 100, 5),
        (images(64), 32, 1000, 2),
        (images(65), 32, 1000, 3),
        (epochs(90), 1024, 1_281_167, 112_603),
        (epochs(300), 4096, 1_281_167, 93_836),
        (epochs(0), 32, 100, 0),
    ],
)
def test_to_steps_rounds_up(duration: Duration, batch: int, size: int, expected: int) -> None:
    assert duration.to_steps(batch_size=batch, images=size) == expected


@given(count=st.integers(0, 10_000), batch_size=st.integers(1, 10_000), size=st.integers(1, 2_000_000))
def test_whole_epochs_are_counted_exactly(count: int, batch_size: int, size: int) -> None:
    assert epochs(count).to_steps(batch_size=batch_size, images=size) == math.ceil(Fraction(count * size, batch_size))


@pytest.mark.parametrize("duration", [steps(3), images(96)])
def test_steps_and_images_do_not_need_the_dataset_size(duration: Duration) -> None:
    """A plain stream has no known size."""
    assert duration.to_steps(batch_size=32, images=0) == 3


def test_str_has_the_count_and_the_unit() -> None:
    assert [str(d) for d in (steps(1), steps(2), epochs(0.5), images(1_200_000))] == [
        "1 step", "2 steps", "0.5 epochs", "1200000 images"
    ]  # fmt: skip


@given(count=st.floats(0, 1e30), unit=st.sampled_from(["steps", "epochs", "images"]))
def test_json_round_trip_of_any_duration(count: float, unit: str) -> None:
    schedule = ScheduleConfig(warmup=Duration(count=count, unit=unit))  # type: ignore[arg-type]
    assert ScheduleConfig.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


def test_durations_can_be_overridden() -> None:
    changed = override(ScheduleConfig(), ["warmup=5 epochs", "cooldown=2k steps"])
    assert (changed.warmup, changed.cooldown) == (epochs(5), steps(2000))
    with pytest.raises(ConfigError, match="expected a duration with a unit"):
        override(ScheduleConfig(), ["warmup=five"])
    with pytest.raises(ConfigError, match="got '5', expected a duration with a unit"):
        override(ScheduleConfig(), ["warmup=5"])


def test_zero_duration_is_false() -> None:
    assert not steps(0)
    assert epochs(0.1)
