"""Arms and results made up for the tests of the framework: no training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from training.small_runs import digits_config

from vitrail.reproduction.arm import Arm, Trial
from vitrail.reproduction.planning import Plan
from vitrail.reproduction.results import Results, TrialResult

CONFIG = digits_config(4)


def make_arm(name: str, rates: Iterable[float] = (), **fields: Any) -> Arm:
    """An arm of a tiny run on the digits."""
    return Arm(name=name, learning_rates=tuple(rates), **{"config": CONFIG} | fields)


def make_result(trial: Trial, **values: Any) -> TrialResult:
    """The result that a worker would return for a trial, without the digest of its settings."""
    given = {"test": 0.5, "test_count": 360, "validation": 0.5, "validation_count": 288, "seconds": 10.0} | values
    return TrialResult(key=trial.key, arm=trial.arm.name, lr=trial.lr, seed=trial.seed, **{"settings": ""} | given)


def make_results(arms: Iterable[Arm], tests: dict[str, Iterable[float]]) -> Results:
    """Results with the test accuracies of the seeds 0, 1, ... of each arm, all at its first learning rate."""
    by_name = {arm.name: arm for arm in arms}
    found = [
        make_result(Trial(arm=by_name[name], lr=by_name[name].rates[0], seed=seed), test=test)
        for name, values in tests.items()
        for seed, test in enumerate(values)
    ]
    return Results(list(by_name.values()), "tiny", found)


def finish_all(plan: Plan, results: Results, make: Callable[[Trial], TrialResult] = make_result) -> list[Trial]:
    """Run a plan to its end, one trial at a time; returns the trials in the order in which they started."""
    order = []
    while (trial := plan.next_trial(results, ())) is not None:
        results.trials[trial.key] = make(trial)
        order.append(trial)
    return order
