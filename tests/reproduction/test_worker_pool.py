"""Worker processes that are killed, trials that fail, and workers whose main process is killed or interrupted."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reproduction import small_experiment
from training.commands import Commands, RunningCommand

from vitrail.config import steps
from vitrail.errors import TrainError
from vitrail.reproduction import worker
from vitrail.reproduction.arm import Arm, Trial
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.pool import Reply, WorkerPool
from vitrail.reproduction.reproduce import reproduce
from vitrail.reproduction.worker import Task
from vitrail.runs.metrics_log import read_metrics

SCRIPT = Path(small_experiment.__file__)
ENDLESS = 10**6
"""Steps of a run that does not finish within a test."""
TIMEOUT_S = 120.0

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the list of processes from /proc")


def task(folder: Path, key: str, length: int = 2, **changes: Any) -> Task:
    """A task of the small experiment's first arm."""
    arm = small_experiment.arms("tiny")[0]
    trial = Trial(arm=arm, lr=arm.rates[0], seed=0)
    config = trial.config().replace(name=key, duration=steps(length), device="cpu", checkpoint_every=steps(ENDLESS))
    described = {
        "key": key, "arm": arm.name, "lr": trial.lr, "seed": 0, "settings": "", "parent": "",
        "folder": str(folder / key),
        "config": config.to_dict(), "edit": None, "measures": [],
    }  # fmt: skip
    return described | changes


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reply_of(pool: WorkerPool) -> Reply:
    deadline = time.monotonic() + TIMEOUT_S
    while (reply := pool.next_reply(0.1)) is None:
        assert time.monotonic() < deadline
    return reply


def started(folder: Path) -> bool:
    """Whether a run has logged a step."""
    return (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0


def running_workers(parent: int) -> list[int]:
    """Pids of the worker processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            command = stat.with_name("cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if int(ppid) == parent and state != "Z" and b"vitrail.reproduction.worker" in command:
            found.append(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_killed_workers_are_reported_and_the_others_continue(tmp_path: Path):
    with WorkerPool(2, 1, tmp_path / "workers.log") as pool:
        pool.submit(task(tmp_path, "endless", ENDLESS))
        pool.submit(task(tmp_path, "first"))
        assert not pool.has_room
        reply = reply_of(pool)
        assert reply["key"] == "first"
        assert reply["result"]["images"] == 2 * 64
        wait_until(lambda: started(tmp_path / "endless"))
        pool.busy["endless"].kill()
        reply = reply_of(pool)
        assert (reply["key"], reply["error"]) == ("endless", "its process ended with status -9.")
        pool.submit(task(tmp_path, "second"))  # in the idle process
        assert reply_of(pool)["result"]["key"] == "second"
        (idle,) = pool.idle
        idle.kill()
        idle.wait()
        pool.submit(task(tmp_path, "third"))  # before its end has been noticed
        reply = reply_of(pool)
        assert (reply["key"], reply["error"]) == ("third", "its process ended with status -9.")
        assert (pool.busy, pool.idle, pool.has_room) == ({}, [], True)
    assert (tmp_path / "workers.log").read_text() == ""


def test_leaving_the_pool_stops_a_run_with_a_checkpoint(tmp_path: Path):
    with WorkerPool(2, 1, tmp_path / "workers.log") as pool:
        pool.submit(task(tmp_path, "failed", measures=["no such measurement"]))
        reply = reply_of(pool)
        assert reply == {"key": "failed", "error": "KeyError: 'no such measurement'"}
        assert "Traceback" in (tmp_path / "failed" / "log.txt").read_text()
        pool.submit(task(tmp_path, "endless", ENDLESS))  # in the process in which the other failed
        pool.submit(task(tmp_path, "starting"))
        processes = list(pool.busy.values())
        wait_until(lambda: started(tmp_path / "endless"))
    assert [process.poll() is None for process in processes] == [False, False]
    assert saved_step(tmp_path / "endless") == last_step(tmp_path / "endless") > 0


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`failing(**settings)`: register the small experiment with a second arm of these settings."""

    def register(**changes: Any) -> None:
        def arms(scale: Any, data: Any = None) -> list[Arm]:
            good = small_experiment.arms(scale, data)[0]
            config = good.config.replace(duration=steps(1))
            bad = Arm(name="bad", config=config.replace(**changes))
            return [Arm(name="good", config=config), bad]

        small = small_experiment.SMALL
        experiment = Experiment(
            name="small", title="", claim="", source="", arms=arms, analyze=small.analyze, seeds={"tiny": 1}
        )
        monkeypatch.setitem(EXPERIMENTS, "small", experiment)

    return register


def test_a_trial_that_fails_ends_the_experiment_with_its_message_and_its_log(
    failing: Callable[..., None], tmp_path: Path
):
    failing(data={"source": "folder:no/such/photos"})
    with pytest.raises(TrainError) as caught:
        reproduce("small", scale="tiny", device="cpu", out=tmp_path / "out", jobs=1)
    message, log = str(caught.value), tmp_path / "out" / "trials" / "bad-seed0" / "log.txt"
    assert message.startswith("the trial bad-seed0 failed: no folder no/such/photos. Its output")
    assert message.endswith(f". Its output is in {log}.")
    assert ".." not in message
    assert log.exists()
    assert (tmp_path / "out" / "trials" / "good-seed0.json").exists()  # what has finished is kept


def saved_step(folder: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    return max((int(path.parent.name) for path in folder.glob("checkpoint/*/state.json")), default=0)


def last_step(folder: Path) -> int:
    return max(line["step"] for line in read_metrics(folder / "metrics.jsonl"))


@pytest.fixture
def main_process(commands: Commands, tmp_path: Path) -> Iterator[tuple[RunningCommand, list[int]]]:
    """A process that reproduces the small experiment with two endless runs, and its two workers."""
    endless = [f"duration={ENDLESS} steps", f"checkpoint_every={ENDLESS} steps"]
    request = {"out": str(tmp_path / "out"), "overrides": endless, "jobs": 2}
    running = commands.start(json.dumps(request), folder=tmp_path, script=SCRIPT)
    running.wait_until(lambda: sum(started(path) for path in (tmp_path / "out").glob("trials/*")) == 2)
    workers = running_workers(running.pid)
    assert len(workers) == 2
    yield running, workers
    for pid in workers:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_workers_save_checkpoints_and_exit_when_the_main_process_is_stopped(
    main_process: tuple[RunningCommand, list[int]], tmp_path: Path, number: signal.Signals
):
    running, workers = main_process
    trials = list((tmp_path / "out").glob("trials/*"))
    assert [saved_step(trial) for trial in trials] == [0, 0]
    os.kill(running.pid, number)
    assert running.wait().status == 128 + number
    if number == signal.SIGINT:  # which waits for its workers
        assert not any(is_running(pid) for pid in workers)
    wait_until(lambda: not any(is_running(pid) for pid in workers))
    for trial in trials:
        assert saved_step(trial) == last_step(trial) > 0
        assert not trial.with_suffix(".json").exists()


@pytest.mark.slow
def test_trials_of_one_network_are_compiled_once(tmp_path: Path):
    from torch._dynamo.utils import counters

    compiled = []
    for seed in range(3):
        found = task(tmp_path / str(seed), f"seed{seed}")
        found["config"] |= {"seed": seed, "compile": True}
        counters.clear()
        assert "result" in worker._run({**found, "measures": [], "threads": 1})
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] > 0
    assert compiled[1:] == [0, 0]
