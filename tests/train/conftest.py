"""What several tests of training look at and none may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from train.commands import Commands
from train.small_runs import SMALL, photos


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images of three colors, one of them rare."""
    return photos(tmp_path_factory.mktemp("images") / "photos", {"red": 30, "green": 24, "blue": 6})


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Starts commands: importing everything, once, takes seconds."""
    with Commands() as started:
        yield started


@pytest.fixture(scope="session")
def undisturbed(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a command that nothing has happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert commands.run("train", "digits", *SMALL, "duration=48 steps", "--out", "run", folder=folder).status == 0
    return folder / "run"
