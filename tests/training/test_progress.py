"""Progress is displayed after every step and every evaluation batch, independent of log_every."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.small_runs import at_step, digits_config, train_run

from vitrail.config import steps
from vitrail.training.display import Display


@pytest.fixture
def progress_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The progress updates that the display receives."""
    events: list[tuple[str, int, int]] = []
    show_evaluation_progress = Display.show_evaluation_progress

    def record_progress(self: Display, done: int, total: int) -> None:
        show_evaluation_progress(self, done, total)
        events.append(("batches", done, total))

    monkeypatch.setattr(Display, "show_evaluation_progress", record_progress)
    return events


def test_every_step_and_every_evaluation_batch_is_shown(tmp_path: Path, progress_events: list[tuple[str, int, int]]):
    config = digits_config(4, log_every=steps(1000), evaluate_every=steps(4), checkpoint_every=steps(1000))
    with at_step(
        2, lambda logger: progress_events.append(("step", logger.display.state.step, logger.display.state.total_steps))
    ):
        train_run(config, tmp_path / "run")
    # 359 images in batches of 64
    assert progress_events == [("step", 2, 4), *(("batches", done, 6) for done in range(6))]
