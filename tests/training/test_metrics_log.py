"""metrics.jsonl contains each step once, also after a resume or a failed write."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vitrail.errors import TrainError
from vitrail.runs.metrics_log import MetricsLog, read_metrics


def test_lines_are_read_in_order(tmp_path: Path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(3):
        metrics.write({"step": step, "loss": 1 / (step + 1)})
    assert [line["step"] for line in read_metrics(metrics.path)] == [0, 1, 2]


def test_rewind_drops_later_steps_and_a_partial_line(tmp_path: Path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (10, 20, 30):
        metrics.write({"step": step})
    with metrics.path.open("a") as file:
        file.write('{"step": 40, "lo')
    metrics.rewind(20)
    metrics.write({"step": 30, "again": 1})
    assert read_metrics(metrics.path) == [{"step": 10}, {"step": 20}, {"step": 30, "again": 1}]
    assert all(json.loads(line) for line in metrics.path.read_text().splitlines())


def test_non_finite_values_are_written_as_null(tmp_path: Path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1, "loss": math.nan, "evaluation": {"top1": math.inf}})
    assert read_metrics(metrics.path) == [{"step": 1, "loss": None, "evaluation": {"top1": None}}]


def test_lines_are_kept_in_memory_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    append = MetricsLog._append

    def raise_disk_full(self: MetricsLog) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsLog, "_append", raise_disk_full)
    metrics.write({"step": 2})
    assert "kept in memory" in caplog.text
    with pytest.raises(TrainError, match=r"1 lines of .* could not be written: No space left"):
        metrics.close()
    monkeypatch.setattr(MetricsLog, "_append", append)
    metrics.write({"step": 3})
    assert [line["step"] for line in read_metrics(metrics.path)] == [1, 2, 3]


def test_failed_write_keeps_the_line_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes to /dev/full fail with the actual error of a full disk."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    metrics = MetricsLog(full)
    monkeypatch.setattr("os.truncate", lambda path, length: None)
    metrics.write({"step": 1})
    assert len(metrics.unwritten) == 1
