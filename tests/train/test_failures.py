"""What can happen to a run: signals, a full disk, folders that vanish, losses that are not finite."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from train.commands import Commands, Running
from train.small_runs import (
    LENGTH,
    SMALL,
    at_step,
    digits,
    interrupted,
    lines,
    one_thread,
    resumed,
    same_bits,
    saved_steps,
    stop,
    trained,
)

from vitrail.config import override
from vitrail.errors import CheckpointError, TrainError
from vitrail.train.loop import FitResult
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_logger import RunLogger

pytestmark = pytest.mark.usefixtures("quick_disk")


# Signals, to the command as a person runs it


def reached(running: Running, run: Path, step: int) -> None:
    running.until(lambda: (run / "metrics.jsonl").exists() and any(line["step"] >= step for line in lines(run)))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_says_how_to_go_on_and_loses_nothing(
    commands: Commands, undisturbed: Path, tmp_path: Path, number: signal.Signals, status: int
):
    """One that reaches the process which reads images, too."""
    settings = ["train", "digits", *SMALL, "duration=48 steps", "--out", "my run"]
    running = commands.start(*settings, folder=tmp_path)
    reached(running, tmp_path / "my run", 12)
    os.killpg(running.pid, number)  # as a terminal does: to all of its processes
    done = running.ended()
    assert done.status == status
    step = saved_steps(tmp_path / "my run")[-1]
    command = "vitrail train --resume --out 'my run'"
    assert f"stopped by {number.name}; saved at step {step}; resume with: {command}" in done.err
    again = commands.run("train", "--resume", "--out", "my run", "--no-report", folder=tmp_path)
    assert again.status == 0, again.err
    assert same_bits(tmp_path / "my run", undisturbed)
    assert lines(tmp_path / "my run") == lines(undisturbed)


def test_an_interrupt_while_it_starts_ends_it(commands: Commands, tmp_path: Path):
    """There is nothing to save: not even a folder is left, or one that can be resumed."""
    running = commands.start("train", "digits", *SMALL, "duration=100k steps", "--out", "run", folder=tmp_path)
    os.kill(running.pid, signal.SIGINT)
    assert running.ended().status == 130


# Losses that are not finite


def diverging(settings: tuple[str, ...] = ()) -> FitResult:
    return override(digits(30), ["optim.kind=sgd", "optim.lr=1e18", "optim.grad_clip=none", *settings])


def test_a_loss_that_is_not_finite_stops_with_its_step_its_images_and_the_last_checkpoint(tmp_path: Path):
    with at_step(9, poison), pytest.raises(TrainError) as caught:
        trained(digits(), tmp_path / "run")
    words = str(caught.value)
    assert words.startswith("the loss of step 10 is not finite; its images were ")
    assert words.count(" and 54 more;") == 1
    assert f"the last good checkpoint is {tmp_path}/run/checkpoint/00000008" in words
    assert "on_nan=skip" in words
    assert saved_steps(tmp_path / "run") == [4, 8]
    named = words.split("its images were ")[1].split(" and 54 more")[0].split(", ")
    assert len(named) == 10
    assert len(set(named)) == 10


def poison(logger: RunLogger) -> None:
    """From here on the head gives nothing but NaN."""
    with torch.no_grad():
        logger.trainer.learner.net.head.bias.fill_(float("nan"))


def test_before_the_first_checkpoint_there_is_none_to_name(tmp_path: Path):
    with pytest.raises(TrainError, match=r"step \d+ is not finite.*no checkpoint was written yet"):
        trained(diverging(("checkpoint_every=30 steps",)), tmp_path / "run")


def test_steps_without_a_finite_loss_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Two steps of a run have no finite loss: it goes on as if they had not been."""
    with nan_in(6, 11):
        result = trained(digits(on_nan="skip", log_every="2 steps", checkpoint_every="3 steps"), tmp_path / "run")
    assert result.progress.skipped_steps == 2
    assert result.scores is not None
    assert result.progress.step == LENGTH
    assert "step 6 was skipped: its loss is not finite" in caplog.text
    found = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in found] == list(range(2, LENGTH + 1, 2))
    assert all(line["loss"] is not None for line in found)
    assert [line.get("skipped", 0) for line in found] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


@contextmanager
def nan_in(*steps: int) -> Iterator[None]:
    """The loss of these steps is not a number."""
    from vitrail.train.trainer import Trainer

    backward, keys = Trainer.backward, Trainer.sample_seeds
    now = 0

    def noted(self: Trainer, batch: object) -> torch.Tensor:
        nonlocal now
        now = batch.step + 1  # type: ignore[attr-defined]
        return keys(self, batch)  # type: ignore[arg-type]

    def broken(self: Trainer, images: torch.Tensor, *rest: torch.Tensor) -> dict[str, torch.Tensor]:
        return backward(self, images * (float("nan") if now in steps else 1.0), *rest)

    Trainer.sample_seeds, Trainer.backward = noted, broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.sample_seeds, Trainer.backward = keys, backward  # type: ignore[method-assign]


def test_skipping_survives_a_stop(tmp_path: Path):
    settings = digits(on_nan="skip", log_every="7 steps")
    with nan_in(6, 11):
        whole = trained(settings, tmp_path / "whole")
        interrupted(settings, tmp_path / "cut", 8)
        again = resumed(tmp_path / "cut")
    assert again.progress.skipped_steps == whole.progress.skipped_steps == 2
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert same_bits(tmp_path / "cut", tmp_path / "whole")


def test_a_run_that_never_has_a_finite_loss_ends_all_the_same(tmp_path: Path):
    result = trained(override(diverging(), ["on_nan=skip"]), tmp_path / "run")
    assert result.progress.step == 30
    assert result.progress.skipped_steps > 20


# A disk that is full: the kernel itself refuses


class Disk:
    """Refuses to let any file grow beyond a few bytes, while it is full."""

    def __init__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, logger: RunLogger) -> None:
        logger.checkpoints.wait()  # what was begun before is on the disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, self.before[1]))

    def clear(self, _: RunLogger | None = None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs below are held against."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with one_thread():
        trained(digits(keep="best"), folder)
    return folder


def test_a_full_disk_loses_no_line_and_no_older_checkpoint(
    whole: Path, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Full from step 9 to 17: checkpoints 12 and 16 find no room, and 20 does."""
    survived: list[int] = []
    with (
        at_step(9, disk.fill),
        at_step(17, disk.clear),
        at_step(16, lambda j: survived.extend(saved_steps(j.run.path))),
    ):
        trained(digits(keep="best"), tmp_path / "run")
    assert survived == [4, 8]
    assert "a checkpoint could not be written; training continues" in caplog.text
    assert "00000012/tensors.safetensors: the disk or its quota is full" in caplog.text
    assert "its lines are kept in memory" in caplog.text
    assert saved_steps(tmp_path / "run") == [8, 20]
    assert lines(tmp_path / "run") == lines(whole)
    assert same_bits(tmp_path / "run", whole)


def test_best_weights_without_room_are_written_when_there_is(disk: Disk, tmp_path: Path):
    """The best are those of step 10, while the disk is full; later the head forgets everything."""

    def forget(logger: RunLogger) -> None:
        disk.clear()
        with torch.no_grad():
            logger.trainer.learner.net.head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(1e3)

    with at_step(9, disk.fill), at_step(13, forget):
        result = trained(digits(keep="best"), tmp_path / "run")
    assert result.progress.best_step == 10
    assert (tmp_path / "run" / "checkpoint" / "best-00000010" / "state.json").exists()
    assert result.scores is not None
    assert result.scores.top1 == result.progress.best_score


def test_a_run_stopped_while_the_disk_is_full_goes_on_from_what_is_there(whole: Path, disk: Disk, tmp_path: Path):
    with (
        at_step(9, disk.fill),
        at_step(14, stop),
        pytest.raises(
            TrainError, match=r"lines of .* could not be written: File too large; free some disk space and resume"
        ),
    ):
        trained(digits(keep="best"), tmp_path / "run")
    disk.clear()
    assert saved_steps(tmp_path / "run") == [4, 8]
    resumed(tmp_path / "run")
    assert lines(tmp_path / "run") == lines(whole)
    assert same_bits(tmp_path / "run", whole)


def test_lines_that_wait_are_in_the_checkpoint(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Room for a checkpoint, none for a line, then a kill: no line is lost."""
    append = "vitrail.train.metrics_log.MetricsLog._append"

    def no_room(self: object, sync: bool = False) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        monkeypatch.context() as patch,
        at_step(7, lambda _: patch.setattr(append, no_room)),
        at_step(14, _kill),
        pytest.raises(KeyboardInterrupt),
    ):
        trained(digits(keep="best"), tmp_path / "run")
    resumed(tmp_path / "run")
    assert lines(tmp_path / "run") == lines(whole)


def _kill(logger: RunLogger) -> None:
    logger.checkpoints.wait()
    logger.metrics.unwritten = []  # what a kill does to memory
    raise KeyboardInterrupt


def test_no_room_for_the_model_is_one_error_and_resume_finishes(commands: Commands, undisturbed: Path, tmp_path: Path):
    settings = ["train", "digits", *SMALL, "duration=48 steps", "--out", "run"]
    running = commands.start(*settings, folder=tmp_path)
    reached(running, tmp_path / "run", 12)
    room = (resource.RLIMIT_FSIZE, (16_000, resource.RLIM_INFINITY))
    resource.prlimit(running.pid, *room)
    done = running.ended()
    assert done.status == 1
    assert len(done.problems) == 1
    assert "could not write run/model/model.safetensors: the disk or its quota is full" in done.problems[0]
    assert "training continues" in done.err
    assert not (tmp_path / "run" / "model").exists()
    again = commands.run("train", "--resume", "--out", "run", "--no-report", folder=tmp_path)
    assert again.status == 0, again.err
    assert same_bits(tmp_path / "run", undisturbed)
    assert lines(tmp_path / "run") == lines(undisturbed)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(whole: Path, tiny_disk: Path, caplog: pytest.LogCaptureFixture):
    photographs = tiny_disk / "photographs"

    def fill(_: RunLogger) -> None:
        with suppress(OSError), photographs.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with at_step(10, fill), at_step(15, lambda _: photographs.unlink()):
        trained(digits(keep="best"), tiny_disk / "run")
    assert "could not be written; training continues" in caplog.text
    assert lines(tiny_disk / "run") == lines(whole)
    assert same_bits(tiny_disk / "run", whole)


# Folders


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "run"
    trained(digits(keep="best"), tmp_path / "whole")
    with at_step(10, lambda _: shutil.rmtree(folder)):
        result = trained(digits(keep="best"), folder)
    assert "was deleted and has been created again" in caplog.text
    assert RunFolder(folder).read_config() == result.setup.config
    assert saved_steps(folder) == [16, 20]
    kept = [line for line in lines(folder) if line["step"] > 10]
    assert kept == [line for line in lines(tmp_path / "whole") if line["step"] > 10]
    assert same_bits(folder, tmp_path / "whole")


def test_a_folder_that_becomes_a_file_stops_nothing_but_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "run"

    def replace(_: RunLogger) -> None:
        shutil.rmtree(folder)
        folder.write_text("a file")

    with at_step(10, replace), pytest.raises((TrainError, CheckpointError), match="run"):
        trained(digits(), folder)
    assert "was deleted and cannot be created again; training continues" in caplog.text


def test_a_folder_that_may_not_be_written_and_one_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"^cannot create the run folder .*file: Not a directory\.$"):
        trained(digits(), tmp_path / "file")
    with pytest.raises(TrainError, match=r"there is no run to resume in .*file: it has no config\.json\.$"):
        resumed(tmp_path / "file")
    with pytest.raises(TrainError, match=r"^cannot create the run folder /proc/run: "):
        trained(digits(), Path("/proc/run"))


def test_a_folder_of_somebody_else(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(TrainError, match=r"cannot create the run folder .*run: Permission denied"):
            trained(digits(), tmp_path / "run")
    finally:
        os.seteuid(0)
