"""Arms and results made up for the tests of the framework: no training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from training.small_runs import digits_config

from vitrail.reproduction.analysis import Analysis, Plot
from vitrail.reproduction.arm import Arm, Scale, Trial
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.planning import Plan
from vitrail.reproduction.results import Results, TrialResult

CONFIG = digits_config(4)


def make_arm(name: str, rates: Iterable[float] = (), **fields: Any) -> Arm:
    """An arm of a tiny run on the digits."""
    return Arm(name=name, learning_rates=tuple(rates), **{"config": CONFIG} | fields)


def make_result(trial: Trial, **values: Any) -> TrialResult:
    """The result that a worker would return for a trial, without the digest of its settings.

    The number of test images is so large that only the seeds contribute to intervals.
    """
    given = {"test": 0.5, "test_count": 10**6, "validation": 0.5, "validation_count": 288, "seconds": 10.0} | values
    if trial.arm.parent is not None:
        given = {"parent": f"{trial.arm.parent}-seed{trial.seed}"} | given
    return TrialResult(key=trial.key, arm=trial.arm.name, lr=trial.lr, seed=trial.seed, **{"settings": ""} | given)


def make_results(arms: Iterable[Arm], tests: dict[str, Iterable[float]], **values: Any) -> Results:
    """Results with the test accuracies of the seeds 0, 1, ... of each arm, all at its first learning rate."""
    by_name = {arm.name: arm for arm in arms}
    found = [
        make_result(Trial(arm=by_name[name], lr=by_name[name].rates[0], seed=seed), test=test, **values)
        for name, of_seed in tests.items()
        for seed, test in enumerate(of_seed)
    ]
    return Results(list(by_name.values()), "tiny", found)


def finish_all(plan: Plan, results: Results, make: Callable[[Trial], TrialResult] = make_result) -> list[Trial]:
    """Run a plan to its end, one trial at a time; returns the trials in the order in which they started."""
    order = []
    while (trial := plan.next_trial(results, ())) is not None:
        results.trials[trial.key] = make(trial)
        order.append(trial)
    return order


def requested_metrics(experiment: Experiment, arms: Sequence[Arm], scale: Scale) -> set[str]:
    """Names of the measurements that an experiment's analysis and figures read."""
    asked: set[str] = set()
    read = TrialResult.value

    def note(self: TrialResult, metric: str) -> float | None:
        asked.add(metric)
        return read(self, metric)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(TrialResult, "value", note)
        known: set[str] = {""}
        while known != asked:
            known = set(asked)
            draw_all(experiment.analyze(random_results(arms, asked, seeds=2, scale=scale)))
    return asked - set(TrialResult.__dataclass_fields__)


def random_results(
    arms: Sequence[Arm], metrics: Iterable[str], *, seeds: int, draw: int = 0, scale: Scale = "tiny"
) -> Results:
    """Results of all trials of an experiment with random numbers; `draw` is the seed of these."""
    rng = random.Random(draw)

    def make(trial: Trial) -> TrialResult:
        of_arm = random.Random(f"{draw} {trial.arm.name}")
        return make_result(
            trial,
            test=rng.uniform(0.3, 0.9),
            test_count=360,
            validation=rng.uniform(0.3, 0.9),
            seconds=rng.uniform(5, 20),
            images=of_arm.randrange(10**5, 10**6),
            flops=of_arm.randrange(10**6, 10**7),
            parameters=of_arm.randrange(10**4, 10**5),
            measures={name: rng.random() for name in sorted(set(metrics) - set(TrialResult.__dataclass_fields__))},
        )

    results = Results(arms, scale, ())
    finish_all(Plan(tuple(arms), seeds), results, make)
    return results


def draw_all(analysis: Analysis) -> None:
    for block in analysis.blocks:
        if isinstance(block, Plot):
            block.draw()
