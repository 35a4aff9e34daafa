"""One call of `reproduce`: its folder, its plan and the trials that are finished."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from vitrail.config import DataConfig, override
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, NotFoundError, TrainError, did_you_mean
from vitrail.reproduction.cost import CostModel
from vitrail.reproduction.experiment import Arm, Experiment, Scale, Trial
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.planning import Plan, fit_budget, parse_part, select_part, settings_digest
from vitrail.reproduction.pool import Reply
from vitrail.reproduction.results import Results, TrialResult, read_result
from vitrail.runtime import pick_device
from vitrail.runtime.cores import usable_cores
from vitrail.training.resuming import PROPORTIONAL, scale_durations, setting_name

GPU_JOBS = 8
"""Runs at a time on one GPU, each limited by its own host thread; at most one per core."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call of `reproduce` asks for; see there."""

    name: str
    scale: Scale | None = None
    seeds: int | None = None
    overrides: Sequence[str] = ()
    out: str | Path | None = None
    data: DataConfig | None = None
    part: str | None = None
    join: Sequence[str | Path] = ()
    budget_s: float | None = None
    jobs: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError(f"seeds={self.seeds}: expected at least 1.")
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs={self.jobs}: expected at least 1.")
        if self.budget_s is not None and self.budget_s <= 0:
            raise ConfigError("the budget must be a positive duration, such as 25min.")

    @property
    def device_kind(self) -> str:
        """cpu, cuda or mps."""
        return pick_device(self.device).type

    @property
    def resolved_scale(self) -> Scale:
        return self.scale or ("tiny" if self.device_kind == "cpu" else "gpu")

    @property
    def folder(self) -> Path:
        if self.out is not None:
            return Path(self.out)
        return Path("runs") / "reproduce" / f"{self.name}-{self.resolved_scale}"

    def arms(self) -> tuple[Arm, ...]:
        """The experiment's arms with the overrides applied."""
        arms = find_experiment(self.name).arms(self.resolved_scale, self.data)
        return tuple(_override_arm(arm, self.overrides) for arm in arms)

    def whole_plan(self) -> Plan:
        """All trials, without a budget or parts."""
        return Plan(self.arms(), self.seeds or find_experiment(self.name).seeds[self.resolved_scale])

    @property
    def num_jobs(self) -> int:
        cores = usable_cores()
        return self.jobs or (cores if self.device_kind == "cpu" else min(cores, GPU_JOBS))

    @property
    def threads(self) -> int:
        """CPU threads of each run; 0: torch's default."""
        return max(1, usable_cores() // self.num_jobs) if self.device_kind == "cpu" else 0

    @property
    def data_workers(self) -> int:
        """Decoding processes of each run, so that all runs together use every core."""
        cores = usable_cores() // self.num_jobs
        return cores if cores > 1 else 0


def find_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise NotFoundError(f"no experiment is called {name!r}{did_you_mean(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]


def _override_arm(arm: Arm, overrides: Sequence[str]) -> Arm:
    if not overrides:
        return arm
    names = [setting_name(text) for text in overrides]
    if forbidden := next((name for name in names if name in ("optim.lr", "seed", "name", "init_from")), None):
        raise ConfigError(f"{forbidden} is set by the experiment; change others, such as duration or batch_size.")
    changed = override(arm.config, overrides)
    return replace_fields(arm, config=scale_durations(arm.config, changed, PROPORTIONAL, set(names)))


@dataclass
class Session:
    """One call of `reproduce`."""

    experiment: Experiment
    scale: Scale
    out: Path
    plan: Plan
    """The trials to run."""
    whole: Plan
    """The plan without budget and part."""
    cost: CostModel
    device: str
    data_root: str | None
    data_workers: int
    """Decoding processes of each run."""
    left_out: str | None = None
    """What a budget or a part leaves out."""
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = Results(self.whole.arms, self.scale, (), self.trials_folder)
        self._read_finished()
        self._calibrate()

    @property
    def trials_folder(self) -> Path:
        return self.out / "trials"

    def result_path(self, trial: Trial) -> Path:
        return self.trials_folder / f"{trial.key}.json"

    def _read_finished(self) -> None:
        """Read the results in the folder: first those of all learning rates, which determine the further seeds."""
        while any([self._read(t) for t in list(self.whole.trials(self.results)) if t.key not in self.results.trials]):
            pass

    def _read(self, trial: Trial) -> bool:
        result = read_result(self.result_path(trial))
        if result is None:
            return False
        if result.settings != settings_digest(trial):
            raise TrainError(
                f"{self.result_path(trial)} is the result of other settings (another version of the experiment, other "
                "data or overrides); choose another folder with --out."
            )
        self.results.trials[trial.key] = result
        return True

    def task(self, trial: Trial) -> dict[str, Any]:
        """What a worker needs to know."""
        parent = self.plan.parent_trial(trial, self.results) if trial.arm.parent is not None else None
        model = None if parent is None else str((self.trials_folder / parent.key / "model").absolute())
        data = trial.arm.config.data.replace(workers=self.data_workers)
        if self.data_root is not None:
            data = data.replace(root=self.data_root)
        config = trial.config(model).replace(device=self.device, data=data.to_dict())
        return {
            "key": trial.key,
            "arm": trial.arm.name,
            "lr": trial.lr,
            "seed": trial.seed,
            "settings": settings_digest(trial),
            "folder": str((self.trials_folder / trial.key).absolute()),
            "config": config.to_dict(),
            "edit": trial.arm.parent_edit,
            "measures": list(trial.arm.measures),
        }

    def finish(self, reply: Reply) -> TrialResult:
        """Store the result of a trial."""
        result = TrialResult(**reply["result"])
        result.write(self.trials_folder / f"{result.key}.json")
        self.results.trials[result.key] = result
        self._calibrate()
        return result

    def _calibrate(self) -> None:
        trials = {trial.key: trial for trial in self.whole.trials(self.results)}
        self.cost.calibrate((trials[key], r) for key, r in self.results.trials.items() if key in trials)

    def seconds_left(self, running: Mapping[str, float]) -> float:
        """Estimated duration of the trials that are not finished. `running`: key -> the fraction that is done."""
        finished = sum(trial.key in self.results.trials for trial in self.plan.trials(self.results))
        left = 1 - (finished + sum(running.values())) / max(self.plan.num_trials, 1)
        return max(self.cost.of_plan(self.plan) * left, 0.0)


def open_session(request: Request) -> Session:
    """The session of a request, with the finished trials of its folder and of those to join."""
    experiment, whole = find_experiment(request.name), request.whole_plan()
    first = whole.arms[0].config.data
    root = None if request.data is None else request.data.root
    splits = open_data((first if root is None else first.replace(root=root)).replace(fraction=None))
    num_images = round(len(splits.train) / (1 - (first.held_out or 0.0)))
    cost = CostModel(request.device_kind, num_images, request.num_jobs)
    out = request.folder
    (out / "trials").mkdir(parents=True, exist_ok=True)
    for other in request.join:
        _copy_trials(Path(other), out)
    session = Session(
        experiment, request.resolved_scale, out, whole, whole, cost, request.device, root, request.data_workers
    )
    session.plan, session.left_out = _select(request, whole, cost)
    return session


def _select(request: Request, whole: Plan, cost: CostModel) -> tuple[Plan, str | None]:
    """The part of the plan to run, and what it leaves out."""
    plan, reasons = whole, []
    if request.part is not None:
        number, count = parse_part(request.part)
        plan = select_part(whole, number, count, lambda arm: cost.of_arm(arm, whole))
        if count > 1:
            reasons.append(f"the arms of the other {count - 1} part{'s' * (count > 2)}")
    if request.budget_s is not None:
        plan, cut = fit_budget(plan, request.budget_s, cost.of_plan)
        if cut:
            reasons.append(f"the budget allows {cut}")
    return plan, "; ".join(reasons) or None


def _copy_trials(source: Path, folder: Path) -> None:
    """Copy the finished trials of another folder, with their models."""
    found = sorted((source / "trials").glob("*.json"))
    if not found:
        raise NotFoundError(f"{source} has no finished trials to join.")
    for path in found:
        if (folder / "trials" / path.name).exists():
            continue
        run, copy = path.with_suffix(""), folder / "trials" / path.stem
        if run.is_dir():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy)
        shutil.copy2(path, folder / "trials" / path.name)
