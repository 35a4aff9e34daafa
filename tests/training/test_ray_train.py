"""`vitrail train --on ray`: the same run as under torchrun, also after a worker was killed; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from conftest import need_extra
from training.small_runs import SMALL, identical_weights, logged_metrics, saved_steps
from training.test_restart import ROOT, start_torchrun, wait_and_read_log

from vitrail.errors import ConfigError, TrainError
from vitrail.training import ray_train
from vitrail.training.ray_train import worker_resources

COMMAND = ("train", "digits", *SMALL, "device=cpu", "duration=48 steps", "checkpoint_every=5 steps")


def machine(**resources: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": {name: float(count) for name, count in resources.items()}}


@pytest.mark.parametrize(
    ("nodes", "workers", "expected"),
    [
        ([machine(CPU=8)], 2, {"workers": 2, "CPU": 4}),
        ([machine(CPU=8)], None, {"workers": 1, "CPU": 8}),
        ([machine(CPU=8), machine(CPU=4)], 3, {"workers": 3, "CPU": 4}),
        ([machine(CPU=8), machine(CPU=4), {"Alive": False, "Resources": {"CPU": 64.0}}], 4, {"workers": 4, "CPU": 2}),
        ([machine(CPU=32, GPU=8), machine(CPU=32, GPU=8)], None, {"workers": 16, "GPU": 1, "CPU": 4}),
        ([machine(CPU=32, GPU=8), machine(CPU=16)], 4, {"workers": 4, "GPU": 1, "CPU": 8}),
        ([machine(CPU=2, GPU=4)], None, {"workers": 4, "GPU": 1, "CPU": 0}),
    ],
)
def test_workers_share_the_cores_of_the_cluster(
    nodes: list[dict[str, Any]], workers: int | None, expected: dict[str, Any]
) -> None:
    assert worker_resources(nodes, workers, gpu=True) == expected


def test_more_workers_than_the_cluster_has_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="--workers 5: the cluster has 4 GPUs; try --workers 4"):
        worker_resources([machine(CPU=32, GPU=4)], 5, gpu=True)
    with pytest.raises(ConfigError, match="--workers 9: the cluster has 8 CPU cores; try --workers 8"):
        worker_resources([machine(CPU=8, GPU=4)], 9, gpu=False)


def test_a_command_deletes_its_own_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second command for a run that is under way ends with an error; the files of the first one stay."""

    def fail(spec: dict[str, Any], resources: dict[str, Any]) -> None:
        message = {"type": "TrainError", "message": "another process is training here"}
        (Path(spec["scratch"]) / "error.json").write_text(json.dumps(message))

    @contextmanager
    def cluster(address: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            nodes=lambda: [machine(CPU=2)],
            remote=lambda **options: lambda function: SimpleNamespace(remote=fail),
            wait=lambda pending, timeout: (pending, []),
            get=lambda pending: None,
        )

    monkeypatch.setattr(ray_train, "ray_cluster", cluster)
    monkeypatch.setattr(ray_train, "check_shared_folder", lambda ray, folder: None)
    first = tmp_path / "run" / "ray" / "0a1b2c3d"
    first.mkdir(parents=True)
    spec = ray_train.RayRun(function="train", arguments={}, out=str(tmp_path / "run"))
    with pytest.raises(TrainError, match="another process is training here"):
        ray_train.run_on_ray("ray", spec)
    assert list((tmp_path / "run" / "ray").iterdir()) == [first]
    first.rmdir()
    with pytest.raises(TrainError):
        ray_train.run_on_ray("ray", spec)
    assert not (tmp_path / "run" / "ray").exists()


class RayCommand:
    """A `vitrail` command with a Ray cluster of its own, in which all processes have a mark."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark, self.log = f"VITRAIL_TEST={uuid4().hex}", folder / "log.txt"
        name, _, value = self.mark.partition("=")
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        environment = os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": paths, "NO_COLOR": "1", name: value}
        command = [sys.executable, "-m", "vitrail", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)

    def processes(self, name: str = "") -> list[int]:
        """The other processes of this command's cluster whose command line has this name."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark in (path / "environ").read_bytes().decode(errors="replace").split("\0")
                if marked and name in (path / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(path.name))
            except OSError:  # it has ended
                continue
        return [pid for pid in found if pid != self.process.pid]

    def workers(self) -> list[int]:
        """The processes of the run, without those that they have started to read images."""
        named = self.processes("ray::RayTrainWorker")
        return sorted(pid for pid in named if int(Path(f"/proc/{pid}/stat").read_text().split()[3]) not in named)

    def wait(self) -> int:
        status = self.process.wait(300)
        deadline = time.monotonic() + 20
        while self.processes() and time.monotonic() < deadline:  # they end after their parent
            time.sleep(0.1)
        assert not self.processes(), "no process of Ray is left"
        return status

    def wait_until_saved(self, run: Path, step: int) -> None:
        while not ((run / "checkpoint").exists() and saved_steps(run)[-1:] >= [step]):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)


Start = Callable[..., RayCommand]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands in `tmp_path`; they end with the test."""
    commands: list[RayCommand] = []

    def start_one(*arguments: str) -> RayCommand:
        commands.append(RayCommand(tmp_path, *arguments))
        return commands[-1]

    yield start_one
    for command in commands:
        command.process.kill()
        command.process.wait()
        for pid in command.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run under torchrun, undisturbed, with as many processes."""
    need_extra("ray")
    folder = tmp_path_factory.mktemp("torchrun")
    wait_and_read_log(start_torchrun(folder, "-m", "vitrail", *COMMAND, "--out", "run"), folder)
    return folder / "run"


@pytest.mark.slow
def test_run_on_ray_is_the_run_under_torchrun(expected: Path, start: Start, tmp_path: Path) -> None:
    command = start(*COMMAND, "--on", "ray", "--workers", "2", "--out", "run", "--json")
    assert command.wait() == 0, command.log.read_text()
    assert identical_weights(tmp_path / "run", expected)
    assert logged_metrics(tmp_path / "run") == logged_metrics(expected)
    log = command.log.read_text()
    assert log.count("step 48/48") == 2, "the metrics and the evaluation, of one process"
    assert json.loads(log[log.index("\n{") :])["scores"]["count"] == 359
    assert not (tmp_path / "run" / "ray").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_run_continues_after_a_worker_was_killed(expected: Path, start: Start, tmp_path: Path, dying: int) -> None:
    command = start(*COMMAND, "--on", "ray", "--workers", "2", "--out", "run")
    command.wait_until_saved(tmp_path / "run", 10)
    workers = command.workers()
    assert len(workers) == 2
    os.kill(workers[dying], signal.SIGKILL)
    assert command.wait() == 0, command.log.read_text()
    assert "a worker failed; the run continues from its last checkpoint" in command.log.read_text()
    assert identical_weights(tmp_path / "run", expected)
    assert logged_metrics(tmp_path / "run") == logged_metrics(expected)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(expected: Path, start: Start, tmp_path: Path) -> None:
    settings = (*COMMAND, "--on", "ray", "--workers", "2", "--auto-resume", "--out", "run")
    command = start(*settings)
    command.wait_until_saved(tmp_path / "run", 5)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 143, command.log.read_text()
    log = command.log.read_text()
    assert "stopped by SIGTERM; saved at step" in log
    assert start(*settings).wait() == 0
    assert identical_weights(tmp_path / "run", expected)


@pytest.mark.slow
def test_errors_of_the_run_are_not_repeated(start: Start) -> None:
    need_extra("ray")
    command = start(*COMMAND, "--on", "ray", "--workers", "2", "--out", "run", "batch_size=33")
    assert command.wait() == 1
    assert [line for line in command.log.read_text().splitlines() if line.startswith("error: ")] == [
        "error: batch_size=33 cannot be divided evenly among 2 processes with 1 parts each; try batch_size=34."
    ]


def test_workers_need_a_cluster() -> None:
    from vitrail.cli.option_groups import RunOptions

    with pytest.raises(ConfigError, match="--workers 2 needs --on ray"):
        RunOptions(workers=2)
    with pytest.raises(ConfigError, match="--max-restarts 2 needs --on ray"):
        RunOptions(max_restarts=2)
