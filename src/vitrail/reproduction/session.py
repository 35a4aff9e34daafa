"""One call of `reproduce`: its folder, its plan and the trials that are finished."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch

from vitrail.config import DataConfig, override
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError, NotFoundError, TrainError, VitrailError, did_you_mean
from vitrail.models.flops import training_flops
from vitrail.report.formatting import pluralize
from vitrail.reproduction.arm import Arm, Scale, Trial
from vitrail.reproduction.cost import CostModel, network_of
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.memory import training_memory
from vitrail.reproduction.planning import Plan, fit_budget, leaves, parse_part, select_part, settings_digest
from vitrail.reproduction.pool import Reply
from vitrail.reproduction.results import Results, TrialResult, read_result
from vitrail.reproduction.scales import NOMINAL_IMAGES
from vitrail.runtime import pick_device
from vitrail.runtime.cores import usable_cores
from vitrail.training.resuming import PROPORTIONAL, scale_durations, setting_name

GPU_JOBS = 12
"""Runs at a time on one GPU, at most one per core: twelve ViTs of width 128 kept an H200 busy (docs/log.md)."""
MEMORY_SHARE = 0.8
"""Part of a GPU's free memory that all runs together may need by the estimate."""


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
        if self.part is not None:
            parse_part(self.part)

    @property
    def device_kind(self) -> str:
        """cpu, cuda or mps."""
        return pick_device(self.device).type

    @property
    def estimated_device(self) -> str:
        """The device kind whose speed is assumed: the paper's scale is never run on a CPU."""
        return "cuda" if self.resolved_scale == "paper" and self.device_kind == "cpu" else self.device_kind

    @property
    def resolved_scale(self) -> Scale:
        return self.scale or ("tiny" if self.device_kind == "cpu" else "gpu")

    @property
    def device_problem(self) -> str | None:
        """Why the device is too slow for the scale, if it is."""
        if self.resolved_scale == "gpu" and self.device_kind == "cpu":
            return "--scale gpu takes hours without a GPU; try --scale tiny, or --device."
        return None

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
        if self.jobs is not None or self.resolved_scale == "paper":
            return self.jobs or 1
        if self.device_kind != "cuda":
            return cores
        free = torch.cuda.mem_get_info(pick_device(self.device))[0]
        return max(1, min(cores, GPU_JOBS, int(MEMORY_SHARE * free / self.largest_memory)))

    @property
    def largest_memory(self) -> int:
        """Estimated bytes of the run with the most FLOPs."""
        arms = {arm.name: arm for arm in self.arms()}
        largest = max(arms.values(), key=lambda arm: training_flops(network_of(arm, arms)))
        bfloat16 = self.estimated_device == "cuda"
        return training_memory(largest.config, network_of(largest, arms), bfloat16=bfloat16)

    @property
    def threads(self) -> int:
        """CPU threads of each run."""
        return max(1, usable_cores() // self.num_jobs)

    @property
    def data_workers(self) -> int:
        """Decoding processes of each run, so that all runs together use every core."""
        cores = usable_cores() // self.num_jobs
        return cores if cores > 1 else 0


def find_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise NotFoundError(f"unknown experiment {name!r}{did_you_mean(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]


def _override_arm(arm: Arm, overrides: Sequence[str]) -> Arm:
    if not overrides:
        return arm
    names = [setting_name(text) for text in overrides]
    if forbidden := next((name for name in names if name in ("optim.lr", "seed", "name", "init_from")), None):
        raise ConfigError(f"{forbidden} is set by the experiment; change others, such as duration or batch_size.")
    changed = override(arm.config, overrides)
    return replace_fields(arm, config=scale_durations(arm.config, changed, PROPORTIONAL, set(names)))


@dataclass(kw_only=True)
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
    data_workers: int
    """Decoding processes of each run."""
    data_error: str | None = None
    """Why the data cannot be read, if it cannot."""
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

    @property
    def unfinished(self) -> bool:
        """Whether a trial of the plan is left to run."""
        return self.plan.next_trial(self.results, ()) is not None

    def result_path(self, trial: Trial) -> Path:
        return self.trials_folder / f"{trial.key}.json"

    def _read_finished(self) -> None:
        """Read the results in the folder: first those of all learning rates, which determine the further seeds."""
        added = 1
        while added:
            missing = [trial for trial in self.whole.trials(self.results) if trial.key not in self.results.trials]
            added = sum(self._read(trial) for trial in missing)

    def _read(self, trial: Trial) -> bool:
        result = read_result(self.result_path(trial))
        if result is None:
            return False
        _check_settings(self.result_path(trial), result, self.results.arms)
        self.results.trials[trial.key] = result
        return True

    def task(self, trial: Trial) -> dict[str, Any]:
        """What a worker needs to know."""
        parent = self.plan.parent_trial(trial, self.results) if trial.arm.parent is not None else None
        folder = self.trials_folder / trial.key
        _prepare_folder(folder, "" if parent is None else parent.key)
        model = None if parent is None else str((self.trials_folder / parent.key / "model").absolute())
        data = trial.arm.config.data.replace(workers=self.data_workers)
        config = trial.config(model).replace(device=self.device, data=data.to_dict())
        return {
            "key": trial.key,
            "arm": trial.arm.name,
            "lr": trial.lr,
            "seed": trial.seed,
            "settings": settings_digest(trial),
            "parent": "" if parent is None else parent.key,
            "folder": str(folder.absolute()),
            "config": config.to_dict(),
            "edit": trial.arm.parent_edit,
            "measures": list(trial.arm.measures),
        }

    def finish(self, reply: Reply) -> TrialResult:
        """Store the result of a trial."""
        result = TrialResult(**reply["result"])
        result.write(self.trials_folder / f"{result.key}.json")
        self.results.trials[result.key] = result
        self._drop_outdated()
        self._calibrate()
        return result

    def _drop_outdated(self) -> None:
        """Remove trials whose model started from one that is not the parent arm's any more.

        The parent's learning rate can change when more of its rates are tried, for instance with a larger budget.
        """
        for trial in list(self.plan.trials(self.results)):
            result = self.results.trials.get(trial.key)
            parent = self.plan.parent_trial(trial, self.results) if result is not None and result.parent else None
            if result is not None and parent is not None and parent.key != result.parent:
                del self.results.trials[trial.key]
                self.result_path(trial).unlink(missing_ok=True)
                shutil.rmtree(self.trials_folder / trial.key, ignore_errors=True)

    def _calibrate(self) -> None:
        trials = {trial.key: trial for trial in self.whole.trials(self.results)}
        self.cost.calibrate((trials[key], r) for key, r in self.results.trials.items() if key in trials)

    def seconds_left(self, running: Mapping[str, float]) -> float:
        """Estimated duration of the trials that are not finished. `running`: key -> the fraction that is done."""
        arms = {trial.key: trial.arm for trial in self.plan.trials(self.results)}
        begun = sum(self.cost.seconds(arms[key]) * done for key, done in running.items() if key in arms)
        return max(self.cost.of_unfinished(self.plan, self.results) - begun / self.cost.jobs, 0.0)

    def comparable_results(self) -> Results:
        """The finished trials with the learning rates of the plan: without those that only some arms have tried."""
        found = self.results.trials.values()
        kept = [trial for trial in found if trial.lr in self.plan.rates(self.results.arms[trial.arm])]
        return Results(self.whole.arms, self.scale, kept, self.trials_folder)

    def select(self, part: str | None, budget_s: float | None) -> None:
        """Reduce the plan to a part of it, and to what fits into a budget with the trials that are finished."""
        reasons = []
        if part is not None:
            number, count = parse_part(part)
            nominal = CostModel("cpu", NOMINAL_IMAGES["cifar10"], self.whole.arms)  # the same parts on every machine
            self.plan = select_part(self.plan, number, count, lambda arm: nominal.of_arm(arm, self.whole))
            if not self.plan.arms:
                most = pluralize(len(leaves(self.whole)), "part")
                raise ConfigError(f"--part {part}: nothing is left for it; {self.experiment.name} has at most {most}.")
            if count > 1:
                reasons.append(f"the arms of the other {count - 1} part{'s' * (count > 2)}")
        if budget_s is not None:
            self.plan, cut = fit_budget(self.plan, budget_s, lambda plan: self.cost.of_unfinished(plan, self.results))
            if cut:
                reasons.append(f"the budget allows {cut}")
        self.left_out = "; ".join(reasons) or None
        self._drop_outdated()


def open_session(request: Request, *, require_data: bool = True) -> Session:
    """The session of a request, with the finished trials of its folder.

    Without `require_data`, data that is missing is stated in `data_error`, and its usual number of images is assumed.
    """
    experiment, whole = find_experiment(request.name), request.whole_plan()
    first = whole.arms[0].config.data
    data_error = None
    try:
        splits = open_data(first.replace(fraction=None))
        num_images = len(splits.train) + (len(splits.validation) if first.held_out else 0)
    except VitrailError as error:
        data_error = _describe_missing(error, first.source, request)
        num_images = NOMINAL_IMAGES.get(first.source, 1_000_000)
        if require_data:
            raise DataError(data_error) from error
    out = request.folder
    session = Session(
        experiment=experiment,
        scale=request.resolved_scale,
        out=out,
        plan=whole,
        whole=whole,
        cost=CostModel(request.estimated_device, num_images, whole.arms, request.num_jobs),
        device=request.device,
        data_workers=request.data_workers,
        data_error=data_error,
    )
    session.select(request.part, request.budget_s)
    return session


def _describe_missing(error: VitrailError, source: str, request: Request) -> str:
    """What is wrong with the data; where the scale's own is not built in, also how to name other data."""
    named = request.data is not None or ":" not in source
    return str(error) if named else f"{error} The data of this scale is {source}; --data names other data."


def _prepare_folder(folder: Path, parent: str) -> None:
    """Create the folder of a trial; an unfinished run in it that started from another model is removed."""
    note = folder / "parent.txt"
    if folder.exists() and (note.read_text(encoding="utf-8") if note.exists() else "") != parent:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if parent:
        note.write_text(parent, encoding="utf-8")


def _check_settings(
    path: Path, result: TrialResult, arms: Mapping[str, Arm], remedy: str = "choose another folder with --out"
) -> None:
    arm = arms.get(result.arm)
    if arm is None or result.settings != settings_digest(Trial(arm=arm, lr=result.lr, seed=result.seed)):
        raise TrainError(
            f"{path} is the result of other settings (another version of the experiment, other data or overrides); "
            f"{remedy}."
        )


def join_trials(sources: Sequence[str | Path], folder: Path, arms: Sequence[Arm]) -> None:
    """Copy the finished trials of other folders, with their models. None is copied if one has other settings."""
    found: dict[Path, TrialResult] = {}
    for source in sources:
        paths = sorted((Path(source) / "trials").glob("*.json"))
        if not paths:
            raise NotFoundError(f"{source} has no finished trials to join.")
        found |= {path: result for path in paths if (result := read_result(path)) is not None}
    by_name = {arm.name: arm for arm in arms}
    for path, result in found.items():
        _check_settings(path, result, by_name, "join folders of the same command only")
    for path, result in found.items():
        run, target = path.with_suffix(""), folder / "trials" / path.name
        if not target.exists():
            shutil.rmtree(target.with_suffix(""), ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            if run.is_dir():
                shutil.copytree(run, target.with_suffix(""))
            result.write(target)
