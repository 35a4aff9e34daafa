"""Parts on Ray: the same bytes as in one process, also after actors and the driver were killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bulk.folders import numbers_folder
from conftest import ROOT, need_extra
from images import write_noise_folder

import vitrail
from vitrail.bench.process_tree import descendants, part_actors, title
from vitrail.bulk import ray_pipeline
from vitrail.bulk.job import Job, ModelSource
from vitrail.bulk.outputs import PredictionOutput
from vitrail.bulk.ray_pipeline import ActorPlan, RayExecutor, plan_actors
from vitrail.config import DataConfig
from vitrail.errors import ConfigError

need_extra("ray")

CPUS = [{"CPU": 8.0}, {"CPU": 4.0}]


@pytest.mark.parametrize(
    ("nodes", "device", "threads", "count", "expected"),
    [
        (CPUS, "cpu", 1, None, ActorPlan(12, 1)),
        (CPUS, "cpu", 4, None, ActorPlan(3, 4)),
        (CPUS, "cpu", 1, 2, ActorPlan(2, 4)),
        (CPUS, "cpu", 1, 3, ActorPlan(3, 4)),
        (CPUS, "cpu", 1, 1, ActorPlan(1, 8)),
        ([{"CPU": 2.0}], "cpu", 1, 2, ActorPlan(2, 1)),
        ([{"CPU": 16.0, "GPU": 8.0}, {"CPU": 64.0}], "cuda", 1, None, ActorPlan(8, 2, 1)),
        ([{"CPU": 16.0, "GPU": 1.0}], "cuda", 1, 1, ActorPlan(1, 16, 1)),
    ],
)
def test_actors_share_the_cores_of_the_nodes(nodes, device, threads, count, expected):
    assert plan_actors(nodes, device, threads, count) == expected


@pytest.mark.parametrize(
    ("nodes", "device", "threads", "count", "message"),
    [
        (CPUS, "cpu", 1, 13, "--actors 13 with --threads 1: the cluster has 12 CPU cores, enough for 12; try fewer"),
        (CPUS, "cpu", 16, None, "--actors 1 with --threads 16: the cluster has 12 CPU cores, enough for 0; try fewer"),
        (CPUS, "cuda", 1, None, "--actors 1 on GPUs: the cluster has 0; try --device cpu or fewer actors"),
    ],
)
def test_more_actors_than_the_cluster_can_hold_are_refused(nodes, device, threads, count, message):
    with pytest.raises(ConfigError, match=message):
        plan_actors(nodes, device, threads, count)


def test_an_exported_model_has_one_actor_on_each_machine(monkeypatch, tmp_path):
    """Its engine uses all cores of a machine: an actor for each core would start cores x cores threads."""
    plans = []
    monkeypatch.setattr(ray_pipeline, "_rows_through_client", lambda tasks, described, plan: plans.append(plan) or [])
    job = Job(model=ModelSource("m.onnx"), data=DataConfig(source="digits"), output=PredictionOutput())
    for per_machine, actors in ((True, None), (True, 3), (False, None)):
        executor = RayExecutor(job, "ray", actors, "cpu", per_machine)
        executor.nodes, executor.device = CPUS, "cpu"
        executor(numbers_folder(tmp_path / "parts", parts=range(0)), range(100), lambda count: None)
    assert plans == [ActorPlan(2, 4), ActorPlan(3, 4), ActorPlan(12, 1)]


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 images of two classes, one of which cannot be read."""
    folder = write_noise_folder(tmp_path_factory.mktemp("data") / "album", {"cat": 300, "dog": 300})
    (folder / "dog" / "99.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }


@pytest.fixture(autouse=True)
def _nothing_of_ray_is_left() -> Iterator[None]:
    def sessions() -> set[Path]:
        return set(Path("/tmp").glob(".vitrail-ray.*"))

    before = sessions()
    yield
    deadline = time.monotonic() + 30
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        if not any("ray" in title(pid) for pid in left):
            break
        time.sleep(0.1)
    assert not [title(pid) for pid in descendants(os.getpid()) if "ray" in title(pid)]
    ours = [path for path in sessions() - before if path.name.split(".")[2] == str(os.getpid())]
    assert not ours


def embed_command(album: Path, model: Path, out: Path, *options: object) -> list[str]:
    command = [sys.executable, "-m", "vitrail", "embed", "--model", str(model), "--data", str(album), "--out", str(out)]
    return [*command, "--batch-size", "2", "--skip-bad", *map(str, options)]


def same_folders(a: Path, b: Path) -> bool:
    names = [sorted(path.name for path in folder.iterdir() if path.name[0] != ".") for folder in (a, b)]
    return names[0] == names[1] and all((a / name).read_bytes() == (b / name).read_bytes() for name in names[0])


def run(command: list[str], environment: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False, **options
    )  # fmt: skip


def test_ray_writes_the_bytes_of_one_process(album, model_folder, tmp_path, environment):
    options = ("--part-size", 100, "--json")
    plain = run(embed_command(album, model_folder, tmp_path / "plain", *options), environment)
    on_ray = run(embed_command(album, model_folder, tmp_path / "ray", *options, "--on", "ray"), environment)
    assert (plain.returncode, on_ray.returncode) == (0, 0), plain.stderr + on_ray.stderr
    assert json.loads(on_ray.stdout) == json.loads(plain.stdout) | {"folder": str(tmp_path / "ray")}
    [note] = on_ray.stderr.splitlines()
    assert note.startswith("note: dog/99.png cannot be used: ")
    assert same_folders(tmp_path / "plain", tmp_path / "ray")


def wait_for(condition, process: subprocess.Popen[bytes], log: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        ended = process.poll() is not None or time.monotonic() > deadline
        if ended:
            process.kill()
        assert not ended, log.read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_actors_and_drivers_cost_no_row(album, model_folder, tmp_path, environment):
    """Three actors and two drivers are killed while parts appear."""
    options = ("--part-size", 2)
    out, plain = tmp_path / "ray", tmp_path / "plain"
    assert run(embed_command(album, model_folder, plain, *options), environment).returncode == 0
    command = embed_command(album, model_folder, out, *options, "--on", "ray", "--actors", min(2, os.cpu_count() or 1))

    def count() -> int:
        return len(list(out.glob("part-*")))

    sessions, log = set(Path("/tmp").glob(".vitrail-ray.*")), tmp_path / "log.txt"
    for kills in range(3):
        with (
            log.open("ab") as errors,
            subprocess.Popen(command, env=environment, stdout=errors, stderr=errors) as driver,
        ):
            for _ in range(3 if kills == 0 else 0):
                before = count()
                wait_for(lambda: count() >= before + 3 and part_actors(driver.pid), driver, log)  # noqa: B023
                os.kill(part_actors(driver.pid)[0], signal.SIGKILL)
            if kills == 2:
                assert driver.wait(400) == 0, log.read_text()
                break
            before = count()
            wait_for(lambda: count() >= before + 3, driver, log)  # noqa: B023
            processes = descendants(driver.pid)
            driver.kill()
        deadline = time.monotonic() + 180  # Ray's agents look for their parent now and then
        while any("ray" in title(pid) for pid in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [title(pid) for pid in processes if "ray" in title(pid)]
        assert 0 < count() < 300
    assert same_folders(out, plain)
    assert set(Path("/tmp").glob(".vitrail-ray.*")) <= sessions  # the last command removed those of killed ones


@pytest.mark.slow
def test_errors_of_actors_come_back_as_one_sentence(album, model_folder, tmp_path, environment):
    code = """
import sys
from vitrail.bulk import ray_pipeline
from vitrail.cli import main

def fail(self, numbers):
    raise RuntimeError("the disk\\nis on fire")

ray_pipeline.PartActor._write = fail
import ray.cloudpickle
ray.cloudpickle.register_pickle_by_value(ray_pipeline)
sys.exit(main(sys.argv[1:]))
"""
    command = embed_command(album, model_folder, tmp_path / "f", "--on", "ray")
    failed = run([sys.executable, "-c", code, *command[3:]], environment)
    assert failed.returncode == 1
    expected = r"error: an actor failed with RuntimeError: the disk \(<string>, line 7, on \S+\)\.\n"
    assert re.fullmatch(expected, failed.stderr), failed.stderr


@pytest.mark.slow
def test_predictions_on_ray_and_a_cluster_that_is_not_there(album, model_folder, tmp_path, environment):
    command = embed_command(album, model_folder, tmp_path / "classes", "--part-size", 100)
    command[3] = "predict"
    done = run([*command, "--on", "ray", "--actors", "1"], environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'classes'}: 600 images, the 5 best classes of each.\n"
    alone = [tmp_path / "alone" if part == str(tmp_path / "classes") else part for part in command]
    assert run([str(part) for part in alone], environment).returncode == 0
    assert same_folders(tmp_path / "classes", tmp_path / "alone")
    failed = run([*command, "--on", "ray://127.0.0.1:9"], environment)
    assert failed.returncode == 1
    assert "cannot connect to ray://127.0.0.1:9 (" in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_a_missing_ray_names_the_extra(monkeypatch, model_folder, album, tmp_path):
    from vitrail.bulk.running import embed

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=re.escape("try pip install 'vitrail[ray]'.")):
        embed(model_folder, str(album), tmp_path / "f", on="ray")


def test_a_model_in_memory_is_refused(vit: vitrail.Model, album, tmp_path):
    from vitrail.bulk.running import embed

    with pytest.raises(ConfigError, match="Ray's actors load the model themselves"):
        embed(vit, str(album), tmp_path / "f", on="ray")
