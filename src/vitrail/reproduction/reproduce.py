"""`vitrail.reproduce`: plans the trials of an experiment, runs those that are not finished, and writes its page."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.config import DataConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.reproduction.analysis import Analysis
from vitrail.reproduction.arm import Scale
from vitrail.reproduction.dry_run import check_feasible
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiment_page import PageInfo, write_page
from vitrail.reproduction.pool import WorkerPool
from vitrail.reproduction.results import Results, TrialResult
from vitrail.reproduction.session import Request, Session, join_trials, open_session
from vitrail.runs.run_folder import RunFolder
from vitrail.storage.locks import lock_within

POLL_S = 0.5
"""Interval of reading the progress of the running trials."""
LOCK_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Status:
    """Progress of an experiment."""

    finished: int
    total: int
    """Number of trials."""
    running: Mapping[str, float]
    """Key of each running trial -> the fraction of it that is done."""
    seconds_left: float | None
    newest: TrialResult | None = None
    """The trial that has just finished, if one has."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """An experiment that has been run, as far as its plan goes."""

    experiment: Experiment
    out: Path
    results: Results
    analysis: Analysis
    page: Path
    seconds: float
    """Duration of all finished trials together, which may have run at the same time or on several machines."""
    finished: int
    total: int
    """Number of trials in the experiment, also those of other parts or beyond the budget."""
    left_out: str | None = None
    """What a budget or a part left out."""

    def to_dict(self) -> dict[str, Any]:
        verdicts = [{"claim": v.claim, "outcome": v.outcome, "reason": v.reason} for v in self.analysis.verdicts]
        return {
            "experiment": self.experiment.name,
            "scale": self.results.scale,
            "finished": self.finished,
            "total": self.total,
            "left_out": self.left_out,
            "seconds": self.seconds,
            "verdicts": verdicts,
            "page": str(self.page),
        }


def reproduce(
    name: str,
    *,
    scale: Scale | None = None,
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    data: DataConfig | None = None,
    part: str | None = None,
    join: Sequence[str | Path] = (),
    budget_s: float | None = None,
    jobs: int | None = None,
    device: str = "auto",
    command: str | None = None,
    on_progress: Callable[[Status], None] = lambda status: None,
) -> Reproduction:
    """Re-run one of the paper's findings: `reproduce("positions", scale="tiny")`.

    scale: "tiny" (minutes on two CPU cores), "gpu" or "paper"; by default the one that fits the device.
    seeds: number of seeds of each arm. overrides: settings of every run, such as "duration=5 epochs".
    out: the folder; trials that are finished there are not run again. data: data in place of the scale's own.
    part: "2/3" runs the second of three parts; join: folders of other parts, whose finished trials are copied.
    budget_s: run the most telling subset that takes at most this long. jobs: number of runs at a time; by default one
    per CPU core, or twelve on a GPU.
    """
    request = Request(
        name=name, scale=scale, seeds=seeds, overrides=overrides, out=out, data=data, part=part, join=join,
        budget_s=budget_s, jobs=jobs, device=device,
    )  # fmt: skip
    arms = request.arms()
    request.folder.mkdir(parents=True, exist_ok=True)
    with _lock(request.folder):
        join_trials(join, request.folder, arms)
        problem = request.device_problem
        if problem is not None and not list((request.folder / "trials").glob("*.json")):
            raise ConfigError(problem)  # before the data is downloaded
        session = open_session(request)
        if problem is not None and session.unfinished:
            raise ConfigError(problem)
        if request.resolved_scale == "paper":
            check_feasible(request)
        _run_trials(session, request, on_progress)
        return _write_results(session, command)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder, so that no other process runs the same trials."""
    with (folder / ".lock").open("a") as file:
        if not lock_within(file.fileno(), LOCK_TIMEOUT_S):
            raise TrainError(
                f"another process is running the experiment in {folder}; wait until it ends, or use --out."
            )
        yield


def _run_trials(session: Session, request: Request, on_progress: Callable[[Status], None]) -> None:
    """Run the trials of the plan that are not finished. A trial that fails ends the experiment with its message.

    When the budget is over, no further trial is started.
    """
    running: dict[str, dict[str, Any]] = {}
    deadline = math.inf if request.budget_s is None else time.monotonic() + request.budget_s
    with WorkerPool(request.num_jobs, request.threads, session.out / "workers.log") as pool:
        while True:
            in_time = time.monotonic() < deadline
            while (
                in_time and pool.has_room and (trial := session.plan.next_trial(session.results, running)) is not None
            ):
                running[trial.key] = task = session.task(trial)
                pool.submit(task)
            on_progress(_status(session, running))
            if not running:
                if not in_time and session.plan.next_trial(session.results, running) is not None:
                    session.left_out = (
                        f"{session.left_out}; the time was over" if session.left_out else "the time was over"
                    )
                return
            reply = pool.next_reply(POLL_S)
            if reply is None:
                continue
            task = running.pop(reply["key"])
            if "stopped" in reply:
                raise KeyboardInterrupt
            if "error" in reply:
                log = Path(task["folder"]) / "log.txt"
                raise TrainError(
                    f"the trial {reply['key']} failed: {reply['error'].rstrip('.')}. Its output is in {log}."
                )
            on_progress(_status(session, running, session.finish(reply)))


def _status(session: Session, running: Mapping[str, Mapping[str, Any]], newest: TrialResult | None = None) -> Status:
    fractions = {key: _fraction_done(Path(task["folder"]), task["config"]) for key, task in running.items()}
    finished = sum(trial.key in session.results.trials for trial in session.plan.trials(session.results))
    return Status(finished, session.plan.num_trials, fractions, session.seconds_left(fractions), newest)


def _fraction_done(folder: Path, config: Mapping[str, Any]) -> float:
    """The fraction of a run that is done, from the last complete line of its metrics."""
    with suppress(OSError, ValueError, IndexError, KeyError, TypeError):
        with RunFolder(folder).metrics.open("rb") as file:
            file.seek(max(file.seek(0, 2) - 4096, 0))
            line = json.loads(file.read().splitlines()[-1])
        duration = config["duration"]
        done = {"epochs": line.get("epoch"), "steps": line["step"], "images": line.get("images")}[duration["unit"]]
        return min(float(done) / duration["count"], 1.0)
    return 0.0


def _write_results(session: Session, command: str | None) -> Reproduction:
    """Analyze the finished trials and write results.json and the page."""
    results = session.comparable_results()
    analysis = session.experiment.analyze(results)
    info = PageInfo(
        finished=len(session.results.trials),
        total=session.whole.num_trials,
        left_out=session.left_out,
        command=command,
        written=time.time(),
    )
    write_page(session.out, session.experiment, results, analysis, info)
    return Reproduction(
        experiment=session.experiment,
        out=session.out,
        results=results,
        analysis=analysis,
        page=session.out / "index.html",
        seconds=session.results.seconds,
        finished=info.finished,
        total=info.total,
        left_out=info.left_out,
    )
