"""Session fixtures of the training tests, which must not modify them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training.commands import Commands
from training.processes import Processes
from training.small_runs import SMALL, make_photos


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 images in three color classes, one of them rare."""
    return make_photos(tmp_path_factory.mktemp("images") / "photos", {"red": 30, "green": 24, "blue": 6})


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """The command server, started once because the imports take seconds."""
    with Commands() as server:
        yield server


@pytest.fixture(scope="session")
def uninterrupted_run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a `vitrail train` command that was not interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert commands.run("train", "digits", *SMALL, "duration=48 steps", "--out", "run", folder=folder).status == 0
    return folder / "run"


@pytest.fixture(scope="module")
def two_processes() -> Iterator[Processes]:
    with Processes(2) as group:
        yield group


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Processes]:
    with Processes(4) as group:
        yield group
