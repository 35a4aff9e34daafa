"""Parts of a job, and the shards that select them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.bulk.parts import plan_parts, whole_batches
from vitrail.bulk.shard_selection import Shard, parse_shard
from vitrail.errors import ConfigError


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 12))
def test_parts_have_every_image_once_and_never_span_splits(counts: list[int], size: int):
    images = {str(i): count for i, count in enumerate(counts)}
    parts = plan_parts(images, size)
    assert [part.number for part in parts] == list(range(len(parts)))
    for split, count in images.items():
        assert [i for part in parts if part.split == split for i in part.indices] == list(range(count))
    assert all(part.indices.start % size == 0 and 0 < len(part) <= size for part in parts)


@pytest.mark.parametrize(("images", "batch", "expected"), [(1024, 64, 1024), (1000, 64, 960), (10, 64, 64), (8, 8, 8)])
def test_parts_are_whole_batches(images: int, batch: int, expected: int):
    assert whole_batches(images, batch) == expected


@given(st.integers(0, 50), st.integers(1, 12))
def test_shards_have_every_part_once(num_parts: int, count: int):
    chosen = [n for number in range(1, count + 1) for n in Shard(number, count).select(num_parts)]
    assert chosen == list(range(num_parts))


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "1/0", "a/b", "-1/2", "1/2/3", "1.5/2", "AUTO"])
def test_invalid_shards_are_refused(text: str):
    with pytest.raises(ConfigError, match="expected I/N with I from 1 to N, such as 2/8, or auto"):
        parse_shard(text)


def slurm(**values: int) -> dict[str, str]:
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (slurm(ID=0, MIN=0, MAX=7, COUNT=8, STEP=1), "1/8"),
        (slurm(ID=8, MIN=1, MAX=8, COUNT=8, STEP=1), "8/8"),
        (slurm(ID=14, MIN=10, MAX=18, COUNT=5, STEP=2), "3/5"),
        (slurm(ID=5, MIN=5, MAX=5, COUNT=1, STEP=1), "1/1"),  # one task again: it computes all that is missing
        ({"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "4"}, "4/4"),
    ],
)
def test_auto_reads_the_variables_of_job_arrays(environment: dict[str, str], expected: str):
    assert str(parse_shard("auto", environment)) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "there is neither SLURM_ARRAY_TASK_ID, .* nor JOB_COMPLETION_INDEX"),
        ({"JOB_COMPLETION_INDEX": "3"}, r"expected a number in JOB_COMPLETIONS, got nothing; set it to the Job's spec"),
        ({"JOB_COMPLETION_INDEX": "4", "JOB_COMPLETIONS": "4"}, "got index 4 of 4 from the environment"),
        ({"JOB_COMPLETION_INDEX": "x", "JOB_COMPLETIONS": "4"}, "expected a number in JOB_COMPLETION_INDEX, got x"),
        (slurm(ID=7, MIN=0, COUNT=3, STEP=1), "got index 7 of 3 from the environment"),
        (slurm(ID=1, MIN=0, STEP=1), "expected a number in SLURM_ARRAY_TASK_COUNT, got nothing"),
    ],
)
def test_auto_without_usable_variables_is_refused(environment: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_shard("auto", environment)
