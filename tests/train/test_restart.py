"""The same command again after any end of a run: killed, interrupted, or restarted by torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train.commands import Commands
from train.small_runs import SMALL, lines, same_bits, saved_steps

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("train", "digits", *SMALL, "device=cpu", "duration=48 steps")

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_a_killed_command_goes_on_when_it_is_given_again(commands: Commands, undisturbed: Path, tmp_path: Path):
    """With SIGKILL, at once: nobody who is left of it keeps the next one out."""
    settings = (*COMMAND, "--auto-resume")
    running = commands.start(*settings, folder=tmp_path)
    run = tmp_path / "runs" / "digits"
    running.until(lambda: (run / "checkpoint").exists() and saved_steps(run))
    os.kill(running.pid, signal.SIGKILL)
    again = commands.start(*settings, folder=tmp_path)
    assert running.ended().status == 137
    done = again.ended()
    assert done.status == 0, done.err
    assert same_bits(run, undisturbed)
    assert lines(run) == lines(undisturbed)
    last = commands.run(*settings, folder=tmp_path)
    assert (last.status, last.err) == (0, "note: the run in runs/digits is finished; there is nothing to do.\n")
    assert last.out.startswith("accuracy")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits"]


# Under torchrun itself


DYING = """
import os, signal
from pathlib import Path
from train.small_runs import at_step
from vitrail.cli import main

def die(journal):
    if os.environ["RANK"] == os.environ["DYING"] and not Path("died").exists():
        Path("died").touch()
        journal.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)

with at_step(25, die):
    raise SystemExit(main())
"""


def torchrun(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "NO_COLOR": "1"} | environment
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, text=True, env=environment, start_new_session=True
        )


def ended(running: subprocess.Popen[str], folder: Path) -> str:
    status = running.wait(300)
    said = (folder / "log.txt").read_text()
    assert status == 0, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("dying", ["0", "1"])
def test_torchrun_restarts_a_run_whose_process_died(tmp_path: Path, dying: str):
    ended(torchrun(tmp_path, "-m", "vitrail", *COMMAND, "--out", "whole"), tmp_path)
    (tmp_path / "dying.py").write_text(DYING)
    again = (*COMMAND, "--auto-resume")
    said = ended(torchrun(tmp_path, "--max-restarts=2", "dying.py", *again, DYING=dying), tmp_path)
    run = tmp_path / "runs" / "digits"
    assert (tmp_path / "died").exists()
    assert same_bits(run, tmp_path / "whole")
    assert lines(run) == lines(tmp_path / "whole")
    assert "is finished" not in said
    said = ended(torchrun(tmp_path, "-m", "vitrail", *again), tmp_path)
    assert said.count("note: the run in runs/digits is finished; there is nothing to do.") == 1


@pytest.mark.slow
def test_processes_whose_torchrun_was_killed_end_and_let_the_next_one_go_on(tmp_path: Path):
    settings = (*COMMAND, "duration=100k steps", "evaluate_every=none", "--auto-resume", "--out", "run")
    running = torchrun(tmp_path, "-m", "vitrail", *settings)
    run = tmp_path / "run"
    while not ((run / "checkpoint").exists() and saved_steps(run)):
        assert running.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.05)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.kill()
    running.wait()
    again = torchrun(tmp_path, "-m", "vitrail", *settings)
    try:
        while not (left := STOPPED.search(said := (tmp_path / "log.txt").read_text())) or not beyond(run, int(left[1])):
            assert again.poll() is None, said
            time.sleep(0.05)
    finally:
        again.send_signal(signal.SIGTERM)
        again.wait(120)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


STOPPED = re.compile(r"stopped by the end of torchrun; saved at step (\d+); resume with: vitrail train --resume")


def beyond(run: Path, step: int) -> bool:
    """Whether the run has gone on from this step, and saved since."""
    return saved_steps(run)[-1] > step
