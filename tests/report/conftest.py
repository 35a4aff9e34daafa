"""Fixtures: a finished run and a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare import randomized
from report.run_folders import MODEL, write_finished

from vitrail.models import Net, build


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return write_finished(tmp_path / "digits")


@pytest.fixture
def net() -> Net:
    return randomized(build(MODEL))
