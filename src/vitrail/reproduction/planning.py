"""Which trials an experiment needs, in which order, and which of them a part or a budget leaves out."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem

from vitrail.errors import ConfigError
from vitrail.report.formatting import format_duration
from vitrail.reproduction.arm import Arm, Trial, slug
from vitrail.reproduction.results import Results

WITHOUT_EFFECT = (
    "name", "device", "data.root", "data.workers", "checkpoint_every", "compile", "grad_accum_steps",
    "gradient_checkpointing", "kernels", "log_every", "parallel", "trackers", "callbacks",
)  # fmt: skip
"""Settings that may differ between two trials with the same result up to rounding."""


@dataclass(frozen=True)
class Plan:
    """The arms to run, and for each the number of learning rates and seeds."""

    arms: tuple[Arm, ...]
    seeds: int
    max_rates: int | None = None
    """Try at most this many learning rates of each arm; None: all."""

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len({slug(name).casefold() for name in names}) < len(names):
            raise ConfigError(f"two arms have the same name, or names of the same folder, among {', '.join(names)}.")
        for arm in self.arms:
            if arm.parent is not None and arm.parent not in names:
                raise ConfigError(f"the arm {arm.name} starts from {arm.parent!r}, which is not an arm.")

    def rates(self, arm: Arm) -> tuple[float, ...]:
        return arm.rates[: self.max_rates]

    def num_seeds(self, arm: Arm) -> int:
        return min(self.seeds, arm.max_seeds or self.seeds)

    @property
    def num_trials(self) -> int:
        return sum(self.count_trials(arm) for arm in self.arms)

    def count_trials(self, arm: Arm) -> int:
        return len(self.rates(arm)) + self.num_seeds(arm) - 1

    def trials(self, results: Results) -> Iterator[Trial]:
        """The trials that can be named so far, the most telling first: every arm once, all rates, then more seeds.

        The learning rate of the seeds after the first is known once all rates of the arm are finished.
        """
        for i in range(max((len(self.rates(arm)) for arm in self.arms), default=0)):
            for arm in self.arms:
                if i < len(self.rates(arm)):
                    yield Trial(arm=arm, lr=self.rates(arm)[i], seed=0)
        for seed in range(1, self.seeds):
            for arm in self.arms:
                rate = self.final_rate(arm, results)
                if rate is not None and seed < self.num_seeds(arm):
                    yield Trial(arm=arm, lr=rate, seed=seed)

    def final_rate(self, arm: Arm, results: Results) -> float | None:
        """The selected learning rate; None while a rate of the plan is not finished."""
        tried = {trial.lr for trial in results.of_arm(arm.name) if trial.seed == 0}
        return results.selected_rate(arm.name, self.rates(arm)) if tried.issuperset(self.rates(arm)) else None

    def parent_trial(self, trial: Trial, results: Results) -> Trial | None:
        """The trial whose model this one starts from; None while its learning rate is not known."""
        parent = next(arm for arm in self.arms if arm.name == trial.arm.parent)
        rate = self.final_rate(parent, results)
        if rate is None:
            return None
        return Trial(arm=parent, lr=rate, seed=trial.seed if trial.seed < self.num_seeds(parent) else 0)

    def is_ready(self, trial: Trial, results: Results) -> bool:
        """Whether the model that it starts from is finished."""
        if trial.arm.parent is None:
            return True
        parent = self.parent_trial(trial, results)
        return parent is not None and parent.key in results.trials

    def next_trial(self, results: Results, running: Collection[str]) -> Trial | None:
        """The first trial that is neither finished nor running and can start."""
        for trial in self.trials(results):
            if trial.key not in results.trials and trial.key not in running and self.is_ready(trial, results):
                return trial
        return None


def settings_digest(trial: Trial) -> str:
    """Digest of everything that determines a trial's result, without names, paths and how the work is divided."""
    config = trial.config().to_dict()
    for name in WITHOUT_EFFECT:
        *parents, last = name.split(".")
        reduce(getitem, parents, config).pop(last)
    if trial.arm.parent is not None:  # whose model has a path that is not the same in every folder
        config.pop("init_from") if trial.arm.parent_setting == "init_from" else config["distill"].pop("teacher")
    described = {
        "config": config,
        "parent": trial.arm.parent,
        "edit": trial.arm.parent_edit,
        "measures": list(trial.arm.measures),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def parse_part(text: str) -> tuple[int, int]:
    """`2/3` -> (2, 3)."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part {text}: expected I/N with I from 1 to N, such as 2/3.")
    return int(number), int(count)


def leaves(plan: Plan) -> list[Arm]:
    """The arms from which no other starts: what parts divide."""
    parents = {arm.parent for arm in plan.arms}
    return [arm for arm in plan.arms if arm.name not in parents]


def select_part(plan: Plan, number: int, count: int, cost: Callable[[Arm], float]) -> Plan:
    """Part `number` of `count`: whole arms with the arms that they start from, balanced by cost."""
    loads, chosen = [0.0] * count, [set[str]() for _ in range(count)]
    for arm in sorted(leaves(plan), key=cost, reverse=True):
        part = loads.index(min(loads))
        loads[part] += cost(arm)
        chosen[part] |= {arm.name, *_ancestors(arm, plan.arms)}
    names = chosen[number - 1]
    return replace(plan, arms=tuple(arm for arm in plan.arms if arm.name in names))


def _ancestors(arm: Arm, arms: Sequence[Arm]) -> list[str]:
    by_name = {other.name: other for other in arms}
    found = []
    while arm.parent is not None:
        found.append(arm.parent)
        arm = by_name[arm.parent]
    return found


def fit_budget(plan: Plan, seconds: float, cost: Callable[[Plan], float]) -> tuple[Plan, str | None]:
    """The most telling plan that takes at most this long, and what it leaves out.

    First every arm with one learning rate, then all learning rates, then further seeds. All arms keep the same number
    of learning rates. If not even the first fits, the last arms are left out.
    """
    most_rates = max((len(plan.rates(arm)) for arm in plan.arms), default=1)
    candidates = [replace(plan, seeds=1, max_rates=rates) for rates in range(1, most_rates + 1)]
    candidates += [replace(plan, seeds=seeds) for seeds in range(2, plan.seeds + 1)]
    fitting = [candidate for candidate in candidates if cost(candidate) <= seconds]
    if fitting:
        best = fitting[-1]
        if best == candidates[-1]:
            return plan, None
        rates = best.max_rates or most_rates
        return best, f"{rates} of {most_rates} learning rates, {best.seeds} of {plan.seeds} seeds"
    for count in range(len(plan.arms) - 1, 0, -1):
        fewer = replace(candidates[0], arms=_with_parents(plan.arms[:count], plan.arms))
        if cost(fewer) <= seconds:
            names = {arm.name for arm in fewer.arms}
            without = ", ".join(f"“{arm.name}”" for arm in plan.arms if arm.name not in names)
            return fewer, f"1 learning rate, 1 seed; without {without}"
    first = replace(candidates[0], arms=_with_parents(plan.arms[:1], plan.arms))
    raise ConfigError(
        f"no run fits into the budget of {format_duration(seconds)}; the first arm takes about "
        f"{format_duration(math.ceil(cost(first)))}."
    )


def _with_parents(chosen: Sequence[Arm], arms: Sequence[Arm]) -> tuple[Arm, ...]:
    names = {arm.name for arm in chosen} | {name for arm in chosen for name in _ancestors(arm, arms)}
    return tuple(arm for arm in arms if arm.name in names)
