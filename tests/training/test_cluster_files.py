"""The files in examples/cluster: valid, in step with the command line, and the SLURM script run with stand-ins."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from training.small_runs import SMALL, identical_weights, saved_steps
from training.test_restart import ROOT

from vitrail.cli.train import _split_arguments, recipe_config

FOLDER = ROOT / "examples" / "cluster"
SCRIPT = FOLDER / "train.sbatch"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "train-job.yaml").read_text()))


def test_kubernetes_files_match_the_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents():
        validate.validate(document, "1.31", strict=True)


def test_pods_meet_at_the_first_through_the_headless_service() -> None:
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    arguments = dict(a.partition("=")[::2] for a in pod["containers"][0]["args"] if a.startswith("--"))
    name, port = job["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert arguments["--rdzv-endpoint"] == f"{name}-0.{pod['subdomain']}:{port}"
    assert int(arguments["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(arguments["--nproc-per-node"]) == gpus
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_settings_in_the_files_exist() -> None:
    arguments = documents()[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    given = [a for a in arguments[arguments.index("train") + 1 :] if not a.startswith("--")]
    recipe, overrides = _split_arguments(given)
    assert recipe_config(str(recipe), overrides).parallel == "hsdp"
    assert "set -- imagenet21k-b16 parallel=hsdp" in SCRIPT.read_text()


def test_slurm_script_is_clean() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", SCRIPT], check=True)


def write_stand_ins(folder: Path) -> None:
    """srun and scontrol for one machine: srun runs the command here, requeue is written to a file."""
    folder.mkdir()
    commands = {
        "srun": "shift\nexec " + sys.executable + ' -m torch.distributed.run "${@:2}"\n',
        "scontrol": '[ "$1" = requeue ] && echo "$@" > requeued\n[ "$1" != show ] || echo 127.0.0.1\n',
    }
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)


def start_job(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "this",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }
    settings = [a for a in SMALL if not a.startswith("--")]
    command = ["bash", str(SCRIPT), "digits", *settings, "device=cpu", *arguments]
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=os.environ | environment)


@pytest.mark.slow
def test_slurm_job_saves_and_is_queued_again_before_its_time_limit(tmp_path: Path) -> None:
    write_stand_ins(tmp_path / "bin")
    run = tmp_path / "runs" / f"job-{os.getpid()}"
    job = start_job(tmp_path, "duration=48 steps", "checkpoint_every=1 step")
    while not ((run / "checkpoint").exists() and saved_steps(run)):
        assert job.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 0
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    assert not (run / "result.json").exists()
    assert start_job(tmp_path, "duration=48 steps", "checkpoint_every=1 step").wait(200) == 0
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "bin", tmp_path / "other" / "bin")
    assert start_job(tmp_path / "other", "duration=48 steps", "checkpoint_every=1 step").wait(200) == 0
    assert identical_weights(run, tmp_path / "other" / "runs" / run.name)
