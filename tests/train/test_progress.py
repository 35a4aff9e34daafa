"""A run shows how far it is, step by step and inside an evaluation, however rarely it logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.small_runs import at_step, digits, trained

from vitrail.config import steps
from vitrail.train.display import Display


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What the display was told."""
    told: list[tuple[str, int, int]] = []
    measuring = Display.show_evaluation_progress

    def watched(self: Display, done: int, total: int) -> None:
        measuring(self, done, total)
        told.append(("batches", done, total))

    monkeypatch.setattr(Display, "show_evaluation_progress", watched)
    return told


def test_every_step_and_every_batch_of_an_evaluation_is_shown(tmp_path: Path, shown: list[tuple[str, int, int]]):
    config = digits(4, log_every=steps(1000), evaluate_every=steps(4), checkpoint_every=steps(1000))
    with at_step(2, lambda logger: shown.append(("step", logger.display.state.step, logger.display.total_steps))):
        trained(config, tmp_path / "run")
    # 359 images in batches of 64
    assert shown == [("step", 2, 4), *(("batches", done, 6) for done in range(6))]
