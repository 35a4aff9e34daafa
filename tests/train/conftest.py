"""What several tests of training look at and none may change."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.small_runs import photos


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pictures of three colours, one of them rare."""
    return photos(tmp_path_factory.mktemp("pictures") / "photos", {"red": 30, "green": 24, "blue": 6})
