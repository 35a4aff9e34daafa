"""Failures of a run: signals, losses that are not finite, full disks, deleted folders."""

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
from training.commands import Commands, RunningCommand
from training.small_runs import (
    LENGTH,
    SMALL,
    at_step,
    digits_config,
    identical_weights,
    interrupt_run,
    logged_metrics,
    one_thread,
    resume_run,
    saved_steps,
    send_sigterm,
    train_run,
)

from vitrail.config import override
from vitrail.errors import CheckpointError, TrainError
from vitrail.runs.run_folder import RunFolder
from vitrail.training.loop import FitResult
from vitrail.training.run_logger import RunLogger

pytestmark = pytest.mark.usefixtures("quick_disk")


# Signals sent to the command


def wait_for_step(running: RunningCommand, run: Path, step: int) -> None:
    running.wait_until(
        lambda: (run / "metrics.jsonl").exists() and any(line["step"] >= step for line in logged_metrics(run))
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_a_checkpoint_and_prints_the_resume_command(
    commands: Commands, uninterrupted_run: Path, tmp_path: Path, number: signal.Signals, status: int
):
    """The signal also reaches the process that reads images."""
    settings = ["train", "digits", *SMALL, "duration=48 steps", "--out", "my run"]
    running = commands.start(*settings, folder=tmp_path)
    wait_for_step(running, tmp_path / "my run", 12)
    os.killpg(running.pid, number)  # to the whole process group, as a terminal does
    result = running.wait()
    assert result.status == status
    step = saved_steps(tmp_path / "my run")[-1]
    command = "vitrail train --resume --out 'my run'"
    assert f"stopped by {number.name}; saved at step {step}; resume with: {command}" in result.err
    resumed = commands.run("train", "--resume", "--out", "my run", "--no-report", folder=tmp_path)
    assert resumed.status == 0, resumed.err
    assert identical_weights(tmp_path / "my run", uninterrupted_run)
    assert logged_metrics(tmp_path / "my run") == logged_metrics(uninterrupted_run)


def test_interrupt_during_startup_ends_the_command(commands: Commands, tmp_path: Path):
    """There is nothing to save yet."""
    running = commands.start("train", "digits", *SMALL, "duration=100k steps", "--out", "run", folder=tmp_path)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait().status == 130


# Losses that are not finite


def diverging_config(settings: tuple[str, ...] = ()) -> FitResult:
    return override(digits_config(30), ["optim.kind=sgd", "optim.lr=1e18", "optim.grad_clip=none", *settings])


def test_non_finite_loss_error_names_the_step_the_images_and_the_checkpoint(tmp_path: Path):
    with at_step(9, set_head_bias_to_nan), pytest.raises(TrainError) as caught:
        train_run(digits_config(), tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("the loss of step 10 is not finite; its images were ")
    assert message.count(" and 54 more;") == 1
    assert f"the last good checkpoint is {tmp_path}/run/checkpoint/00000008" in message
    assert "on_nan=skip" in message
    assert saved_steps(tmp_path / "run") == [4, 8]
    names = message.split("its images were ")[1].split(" and 54 more")[0].split(", ")
    assert len(names) == 10
    assert len(set(names)) == 10


def set_head_bias_to_nan(logger: RunLogger) -> None:
    """Make all logits NaN from here on."""
    with torch.no_grad():
        logger.trainer.objective.net.head.bias.fill_(float("nan"))


def test_non_finite_loss_before_the_first_checkpoint(tmp_path: Path):
    with pytest.raises(TrainError, match=r"step \d+ is not finite.*no checkpoint was written yet"):
        train_run(diverging_config(("checkpoint_every=30 steps",)), tmp_path / "run")


def test_steps_with_non_finite_loss_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The loss of two steps is not finite; the run continues without them."""
    with nan_loss_at(6, 11):
        result = train_run(
            digits_config(on_nan="skip", log_every="2 steps", checkpoint_every="3 steps"), tmp_path / "run"
        )
    assert result.progress.skipped_steps == 2
    assert result.scores is not None
    assert result.progress.step == LENGTH
    assert "step 6 was skipped: its loss is not finite" in caplog.text
    loss_lines = [line for line in logged_metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in loss_lines] == list(range(2, LENGTH + 1, 2))
    assert all(line["loss"] is not None for line in loss_lines)
    assert [line.get("skipped", 0) for line in loss_lines] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


@contextmanager
def nan_loss_at(*steps: int) -> Iterator[None]:
    """Make the loss of these steps NaN."""
    from vitrail.training.trainer import Trainer

    backward, sample_seeds = Trainer.backward, Trainer.sample_seeds
    current_step = 0

    def record_step(self: Trainer, batch: object) -> torch.Tensor:
        nonlocal current_step
        current_step = batch.step + 1  # type: ignore[attr-defined]
        return sample_seeds(self, batch)  # type: ignore[arg-type]

    def backward_with_nan(self: Trainer, images: torch.Tensor, *rest: torch.Tensor) -> dict[str, torch.Tensor]:
        return backward(self, images * (float("nan") if current_step in steps else 1.0), *rest)

    Trainer.sample_seeds, Trainer.backward = record_step, backward_with_nan  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.sample_seeds, Trainer.backward = sample_seeds, backward  # type: ignore[method-assign]


def test_skipped_steps_are_the_same_after_a_resume(tmp_path: Path):
    settings = digits_config(on_nan="skip", log_every="7 steps")
    with nan_loss_at(6, 11):
        uninterrupted = train_run(settings, tmp_path / "uninterrupted")
        interrupt_run(settings, tmp_path / "interrupted", 8)
        resumed = resume_run(tmp_path / "interrupted")
    assert resumed.progress.skipped_steps == uninterrupted.progress.skipped_steps == 2
    assert logged_metrics(tmp_path / "interrupted") == logged_metrics(tmp_path / "uninterrupted")
    assert identical_weights(tmp_path / "interrupted", tmp_path / "uninterrupted")


def test_run_without_any_finite_loss_still_ends(tmp_path: Path):
    result = train_run(override(diverging_config(), ["on_nan=skip"]), tmp_path / "run")
    assert result.progress.step == 30
    assert result.progress.skipped_steps > 20


# Full disks, simulated with the kernel's limit of file size


class Disk:
    """A simulated disk: while it is full, no file can grow beyond 100 bytes."""

    def __init__(self) -> None:
        self.original_limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, logger: RunLogger) -> None:
        logger.checkpoints.wait()  # finish the writes that have begun
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, self.original_limits[1]))

    def clear(self, _: RunLogger | None = None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.original_limits)


@pytest.fixture
def disk() -> Iterator[Disk]:
    simulated_disk = Disk()
    yield simulated_disk
    simulated_disk.clear()


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run that the runs below are compared with."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    with one_thread():
        train_run(digits_config(keep="best"), folder)
    return folder


def test_full_disk_loses_no_metrics_and_no_older_checkpoint(
    reference_run: Path, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The disk is full from step 9 to 17: checkpoints 12 and 16 cannot be written, 20 can."""
    steps_while_full: list[int] = []
    with (
        at_step(9, disk.fill),
        at_step(17, disk.clear),
        at_step(16, lambda logger: steps_while_full.extend(saved_steps(logger.run.path))),
    ):
        train_run(digits_config(keep="best"), tmp_path / "run")
    assert steps_while_full == [4, 8]
    assert "a checkpoint could not be written; training continues" in caplog.text
    assert "00000012/tensors.safetensors: the disk or its quota is full" in caplog.text
    assert "its lines are kept in memory" in caplog.text
    assert saved_steps(tmp_path / "run") == [8, 20]
    assert logged_metrics(tmp_path / "run") == logged_metrics(reference_run)
    assert identical_weights(tmp_path / "run", reference_run)


def test_best_weights_are_written_once_the_disk_has_space(disk: Disk, tmp_path: Path):
    """The best step is 10, while the disk is full; the head is randomized after it."""

    def randomize_head(logger: RunLogger) -> None:
        disk.clear()
        with torch.no_grad():
            logger.trainer.objective.net.head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(1e3)

    with at_step(9, disk.fill), at_step(13, randomize_head):
        result = train_run(digits_config(keep="best"), tmp_path / "run")
    assert result.progress.best_step == 10
    assert (tmp_path / "run" / "checkpoint" / "best-00000010" / "state.json").exists()
    assert result.scores is not None
    assert result.scores.top1 == result.progress.best_score


def test_run_stopped_on_a_full_disk_resumes_from_an_older_checkpoint(reference_run: Path, disk: Disk, tmp_path: Path):
    with (
        at_step(9, disk.fill),
        at_step(14, send_sigterm),
        pytest.raises(
            TrainError, match=r"lines of .* could not be written: File too large; free some disk space and resume"
        ),
    ):
        train_run(digits_config(keep="best"), tmp_path / "run")
    disk.clear()
    assert saved_steps(tmp_path / "run") == [4, 8]
    resume_run(tmp_path / "run")
    assert logged_metrics(tmp_path / "run") == logged_metrics(reference_run)
    assert identical_weights(tmp_path / "run", reference_run)


def test_unwritten_metrics_are_stored_in_the_checkpoint(
    reference_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Checkpoints can be written and metrics cannot, then the run is killed: no line is lost."""
    append = "vitrail.runs.metrics_log.MetricsLog._append"

    def raise_no_space(self: object, sync: bool = False) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        monkeypatch.context() as patch,
        at_step(7, lambda _: patch.setattr(append, raise_no_space)),
        at_step(14, _simulate_kill),
        pytest.raises(KeyboardInterrupt),
    ):
        train_run(digits_config(keep="best"), tmp_path / "run")
    resume_run(tmp_path / "run")
    assert logged_metrics(tmp_path / "run") == logged_metrics(reference_run)


def _simulate_kill(logger: RunLogger) -> None:
    logger.checkpoints.wait()
    logger.metrics.unwritten = []  # a kill loses what is only in memory
    raise KeyboardInterrupt


def test_full_disk_at_the_end_is_one_error_and_resume_finishes(
    commands: Commands, uninterrupted_run: Path, tmp_path: Path
):
    settings = ["train", "digits", *SMALL, "duration=48 steps", "--out", "run"]
    running = commands.start(*settings, folder=tmp_path)
    wait_for_step(running, tmp_path / "run", 12)
    limit = (resource.RLIMIT_FSIZE, (16_000, resource.RLIM_INFINITY))
    resource.prlimit(running.pid, *limit)
    result = running.wait()
    assert result.status == 1
    assert len(result.errors) == 1
    assert "could not write run/model/model.safetensors: the disk or its quota is full" in result.errors[0]
    assert "training continues" in result.err
    assert not (tmp_path / "run" / "model").exists()
    resumed = commands.run("train", "--resume", "--out", "run", "--no-report", folder=tmp_path)
    assert resumed.status == 0, resumed.err
    assert identical_weights(tmp_path / "run", uninterrupted_run)
    assert logged_metrics(tmp_path / "run") == logged_metrics(uninterrupted_run)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_run_on_a_disk_that_is_actually_full(reference_run: Path, tiny_disk: Path, caplog: pytest.LogCaptureFixture):
    filler = tiny_disk / "filler"

    def fill(_: RunLogger) -> None:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with at_step(10, fill), at_step(15, lambda _: filler.unlink()):
        train_run(digits_config(keep="best"), tiny_disk / "run")
    assert "could not be written; training continues" in caplog.text
    assert logged_metrics(tiny_disk / "run") == logged_metrics(reference_run)
    assert identical_weights(tiny_disk / "run", reference_run)


# Folders


def test_deleted_run_folder_is_created_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "run"
    train_run(digits_config(keep="best"), tmp_path / "uninterrupted")
    with at_step(10, lambda _: shutil.rmtree(folder)):
        result = train_run(digits_config(keep="best"), folder)
    assert "was deleted and has been created again" in caplog.text
    assert RunFolder(folder).read_config() == result.setup.config
    assert saved_steps(folder) == [16, 20]
    later_lines = [line for line in logged_metrics(folder) if line["step"] > 10]
    assert later_lines == [line for line in logged_metrics(tmp_path / "uninterrupted") if line["step"] > 10]
    assert identical_weights(folder, tmp_path / "uninterrupted")


def test_run_folder_replaced_by_a_file_fails_only_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "run"

    def replace_folder_by_file(_: RunLogger) -> None:
        shutil.rmtree(folder)
        folder.write_text("a file")

    with at_step(10, replace_folder_by_file), pytest.raises((TrainError, CheckpointError), match="run"):
        train_run(digits_config(), folder)
    assert "was deleted and cannot be created again; training continues" in caplog.text


def test_unusable_run_folders_are_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"^cannot create the run folder .*file: Not a directory\.$"):
        train_run(digits_config(), tmp_path / "file")
    with pytest.raises(TrainError, match=r"there is no run to resume in .*file: it has no config\.json\.$"):
        resume_run(tmp_path / "file")
    with pytest.raises(TrainError, match=r"^cannot create the run folder /proc/run: "):
        train_run(digits_config(), Path("/proc/run"))


def test_folder_without_write_permission_is_refused(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can change its user id")
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(TrainError, match=r"cannot create the run folder .*run: Permission denied"):
            train_run(digits_config(), tmp_path / "run")
    finally:
        os.seteuid(0)
