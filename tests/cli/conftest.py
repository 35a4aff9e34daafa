"""Fixtures that run the `vitrail` command in this process or in a subprocess, and inputs for it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_models import gradient, model, small
from training.commands import CommandResult

from vitrail import runtime
from vitrail.cli import main

Command = Callable[..., CommandResult]


@pytest.fixture
def vitrail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run the command in this process: `vitrail("predict", path)`."""
    monkeypatch.setattr(runtime.notes, "_logged", set())
    logger = logging.getLogger("vitrail")
    before = logger.handlers, logger.level, logger.propagate

    def run(*arguments: object) -> CommandResult:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        return CommandResult(status, *capsys.readouterr())

    yield run
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(scope="session")
def process() -> Command:
    """Run the command in a subprocess: `process("predict", path)`."""

    def run(*arguments: object, **options: object) -> CommandResult:
        command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
        environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
        completed = subprocess.run(command, capture_output=True, text=True, env=environment, **options)  # type: ignore[call-overload]
        return CommandResult(completed.returncode, completed.stdout, completed.stderr)

    return run


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small classifier of five classes, in vitrail's own format."""
    path = tmp_path_factory.mktemp("weights") / "small"
    model(small()).save(path)
    return path


@pytest.fixture(scope="session")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "headless"
    model(small(num_classes=0), task="embed").save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of images with subfolders, uppercase names, other files and macOS metadata files."""
    folder = tmp_path / "photos"
    for name in ("b.png", "a.jpg", "C.JPG", "holiday/2.webp", "holiday/10.png", "holiday/deep/x.bmp"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        gradient(40 + len(name)).save(file)
    (folder / "notes.txt").write_text("not an image, and not called one")
    (folder / "._a.jpg").write_bytes(b"\0\5\x16\7")
    (folder / ".thumbnails").mkdir()
    gradient().save(folder / ".thumbnails" / "a.png")
    (folder / "album.jpg").mkdir()
    return folder
