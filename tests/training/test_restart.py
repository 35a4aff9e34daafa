"""Repeating a command after its processes were killed, or restarted by torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training.commands import Commands
from training.small_runs import SMALL, identical_weights, logged_metrics, saved_steps

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("train", "digits", *SMALL, "device=cpu", "duration=48 steps")

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_killed_command_continues_when_it_is_repeated(commands: Commands, uninterrupted_run: Path, tmp_path: Path):
    """Right after SIGKILL: remaining child processes do not keep the run folder locked."""
    settings = (*COMMAND, "--auto-resume")
    running = commands.start(*settings, folder=tmp_path)
    run = tmp_path / "runs" / "digits"
    running.wait_until(lambda: (run / "checkpoint").exists() and saved_steps(run))
    os.kill(running.pid, signal.SIGKILL)
    repeated = commands.start(*settings, folder=tmp_path)
    assert running.wait().status == 137
    result = repeated.wait()
    assert result.status == 0, result.err
    assert identical_weights(run, uninterrupted_run)
    assert logged_metrics(run) == logged_metrics(uninterrupted_run)
    finished = commands.run(*settings, folder=tmp_path)
    assert (finished.status, finished.err) == (0, "note: the run in runs/digits is finished; there is nothing to do.\n")
    assert finished.out.startswith("accuracy")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits"]


# Under torchrun


DYING_SCRIPT = """
import os, signal
from pathlib import Path
from training.small_runs import at_step
from vitrail.cli import main

def die(logger):
    if os.environ["RANK"] == os.environ["DYING"] and not Path("died").exists():
        Path("died").touch()
        logger.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)

with at_step(25, die):
    raise SystemExit(main())
"""


def start_torchrun(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "NO_COLOR": "1"} | environment
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, text=True, env=environment, start_new_session=True
        )


def wait_and_read_log(running: subprocess.Popen[str], folder: Path) -> str:
    status = running.wait(300)
    log = (folder / "log.txt").read_text()
    assert status == 0, log
    return log


@pytest.mark.slow
@pytest.mark.parametrize("dying", ["0", "1"])
def test_torchrun_restarts_a_run_after_a_process_died(tmp_path: Path, dying: str):
    wait_and_read_log(start_torchrun(tmp_path, "-m", "vitrail", *COMMAND, "--out", "uninterrupted"), tmp_path)
    (tmp_path / "dying.py").write_text(DYING_SCRIPT)
    command = (*COMMAND, "--auto-resume")
    log = wait_and_read_log(start_torchrun(tmp_path, "--max-restarts=2", "dying.py", *command, DYING=dying), tmp_path)
    run = tmp_path / "runs" / "digits"
    assert (tmp_path / "died").exists()
    assert identical_weights(run, tmp_path / "uninterrupted")
    assert logged_metrics(run) == logged_metrics(tmp_path / "uninterrupted")
    assert "is finished" not in log
    log = wait_and_read_log(start_torchrun(tmp_path, "-m", "vitrail", *command), tmp_path)
    assert log.count("note: the run in runs/digits is finished; there is nothing to do.") == 1


@pytest.mark.slow
def test_run_continues_after_its_torchrun_was_killed(tmp_path: Path):
    settings = (*COMMAND, "duration=100k steps", "evaluate_every=none", "--auto-resume", "--out", "run")
    running = start_torchrun(tmp_path, "-m", "vitrail", *settings)
    run = tmp_path / "run"
    while not ((run / "checkpoint").exists() and saved_steps(run)):
        assert running.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.05)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.kill()
    running.wait()
    second = start_torchrun(tmp_path, "-m", "vitrail", *settings)
    try:
        while not (stopped := STOP_MESSAGE.search(log := (tmp_path / "log.txt").read_text())) or not has_saved_after(
            run, int(stopped[1])
        ):
            assert second.poll() is None, log
            time.sleep(0.05)
    finally:
        second.send_signal(signal.SIGTERM)
        second.wait(120)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


STOP_MESSAGE = re.compile(r"stopped by the end of torchrun; saved at step (\d+); resume with: vitrail train --resume")


def has_saved_after(run: Path, step: int) -> bool:
    """Whether the run has saved a checkpoint after this step."""
    return saved_steps(run)[-1] > step
