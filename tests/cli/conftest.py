"""The command, run in this process or as a person runs it, and something to run it on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_models import gradient, model, small

from vitrail import runtime
from vitrail.cli import main


@dataclass
class Result:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def problems(self) -> list[str]:
        """The sentences on standard error that tell of errors."""
        return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def notes(self) -> list[str]:
        return [line.removeprefix("note: ") for line in self.err.splitlines() if line.startswith("note: ")]


Command = Callable[..., Result]


@pytest.fixture
def vitrail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """`vitrail("predict", path)`, in this process."""
    monkeypatch.setattr(runtime, "_logged", set())
    logger = logging.getLogger("vitrail")
    before = logger.handlers, logger.level, logger.propagate

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        return Result(status, *capsys.readouterr())

    yield run
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(scope="session")
def process() -> Command:
    """The same in a process of its own, as a person runs it."""

    def run(*arguments: object, **options: object) -> Result:
        command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
        environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, **options)  # type: ignore[call-overload]
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of five things, in vitrail's own format."""
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
    """A folder as people have them: subfolders, capitals, other files, what macOS leaves."""
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
