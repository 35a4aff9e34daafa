"""A process that runs trials, one after another: `python -m vitrail.reproduction.worker`.

It reads tasks from standard input and writes replies to standard output, each a line of JSON. What a run prints goes to
log.txt in its folder. When standard input is closed, for instance because the main process was killed, the current run
saves a checkpoint and the process exits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from vitrail.config import TrainConfig

MAX_COMPILED = 256
"""Networks and losses that one process compiles at most."""

Task = dict[str, Any]
"""key, arm, lr, seed, settings, parent, folder, config, edit, measures, threads."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything that prints to standard output would be taken for a reply
    # A forked process closes its copy of sys.stdin, and would wait for a thread that reads from it in this process.
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    threading.Thread(target=_read_tasks, args=(lines, tasks), daemon=True, name="tasks").start()
    while (task := tasks.get()) is not None:
        with _log_to(Path(task["folder"]) / "log.txt"):
            reply = _run(task)
        _send(replies, {"key": task["key"], **reply})
        if "stopped" in reply:
            break


def _read_tasks(lines: TextIO, tasks: SimpleQueue[Task | None]) -> None:
    for line in lines:
        tasks.put(json.loads(line))
    tasks.put(None)
    os.kill(os.getpid(), signal.SIGTERM)  # a run in progress saves a checkpoint and stops


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the main process was killed
        print(json.dumps(reply), file=replies, flush=True)


def _run(task: Task) -> dict[str, Any]:
    """The reply: `result`, `stopped` (the name of the signal) or `error`."""
    import traceback

    from vitrail.errors import VitrailError

    try:
        return _train_and_measure(task)
    except VitrailError as error:
        return {"error": str(error)}
    except KeyboardInterrupt:
        return {"stopped": "SIGINT"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _train_and_measure(task: Task) -> dict[str, Any]:
    import shutil
    from dataclasses import asdict, replace

    import torch

    from vitrail.config import TrainConfig
    from vitrail.errors import DivergenceError
    from vitrail.models.flops import count_flops, count_parameters
    from vitrail.reproduction.edits import edit_model
    from vitrail.reproduction.measures import measure
    from vitrail.reproduction.results import TrialResult
    from vitrail.runs.run_record import read_run
    from vitrail.runtime import private_torch
    from vitrail.training.runs import train

    if task["threads"]:
        torch.set_num_threads(task["threads"])
    folder, config = Path(task["folder"]), TrainConfig.from_dict(task["config"])
    if config.compile:  # trials of one network share what is compiled
        private_torch.raise_recompile_limit(MAX_COMPILED)
    if task["edit"] is not None:
        assert config.init_from is not None
        start = edit_model(task["edit"], Path(config.init_from), folder / "start", config)
        config = config.replace(init_from=str(start))
    _update_paths(folder, config)
    result = TrialResult(
        **{name: task[name] for name in ("key", "arm", "lr", "seed", "settings", "parent")},
        device=_device_name(config.device),
        versions=f"vitrail {_version('vitrail')}, PyTorch {_version('torch')}",
    )
    try:
        run = train(config, out=folder, auto_resume=True, report=False)
    except DivergenceError:  # a learning rate that is too high: a result, and no reason to stop the others
        return {"result": asdict(replace(result, diverged=True))}
    if run.stop_reason not in (None, "patience"):
        return {"stopped": run.stop_reason}
    record, network = read_run(folder), run.config.model
    assert network is not None
    scores, test = run.scores, run.test_scores
    started = time.perf_counter()
    measured = measure(task["measures"], run)
    result = replace(
        result,
        test=None if test is None else test.top1,
        test_count=0 if test is None else test.count,
        validation=None if scores is None else scores.top1,
        validation_count=0 if scores is None else scores.count,
        measures=measured,
        seconds=record.seconds or 0.0,
        measure_seconds=time.perf_counter() - started,
        images=record.num_images or 0,
        flops=count_flops(network),
        parameters=count_parameters(network),
    )
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # the trial is finished; its checkpoints are large
    return {"result": asdict(result)}


def _update_paths(folder: Path, config: TrainConfig) -> None:
    """Replace the paths of parents' models in an unfinished run, which may have been moved with its parents."""
    from vitrail.runs.run_folder import RunFolder

    run = RunFolder(folder)
    if run.started and not run.finished:
        distill = run.read_config().distill.replace(teacher=config.distill.teacher)
        run.reopen(run.read_config().replace(init_from=config.init_from, distill=distill.to_dict()))


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "from source"


def _device_name(device: str) -> str:
    import torch

    from vitrail.runtime import pick_device
    from vitrail.runtime.cores import usable_cores
    from vitrail.runtime.cpu import detect_cpu

    picked = pick_device(device)
    if picked.type == "cuda":
        return torch.cuda.get_device_name(picked)
    return f"{usable_cores()} cores of {detect_cpu().name}" if picked.type == "cpu" else picked.type


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Append the standard error of this process to a file, also that of native code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.dup2(before, 1)
            os.close(before)


if __name__ == "__main__":
    main()
