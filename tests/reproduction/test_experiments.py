"""Every experiment: its arms at each scale, its analysis of any results, and its page after a real, short run."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from reproduction.conftest import run_inline
from reproduction.pages import (
    EMPTY,
    FIELDS,
    Pool,
    Trials,
    estimate,
    join_pools,
    read_html,
    read_markdown,
    wrong_numbers,
)
from reproduction.synthetic import draw_all, random_results, requested_metrics

from vitrail.config import DataConfig, TrainConfig
from vitrail.reproduction.analysis import Plot, Table
from vitrail.reproduction.arm import SCALES, Arm, Scale
from vitrail.reproduction.cost import CostModel
from vitrail.reproduction.edits import EDITS
from vitrail.reproduction.experiment_page import PageInfo, write_page
from vitrail.reproduction.experiments import EXPERIMENTS, lecture, positions, resolution, scaling, self_supervision
from vitrail.reproduction.measures import MEASURES
from vitrail.reproduction.planning import Plan
from vitrail.reproduction.reproduce import reproduce
from vitrail.reproduction.results import Results, TrialResult
from vitrail.reproduction.session import Request, open_session

SHORT = ("duration=4 steps",)
"""Overrides of the real runs."""
SNAPSHOTS = {"lecture": ("snapshot_every=2 steps",)}
SLOW = ("symmetry",)
"""Experiments whose measurements take more than ten seconds."""
CHECKED_ELSEWHERE = ("How many times the data without regularization gives the same accuracy.",)
"""Captions of tables that are computed from interpolated curves, which the experiments' own tests check."""

every_experiment = pytest.mark.parametrize("name", EXPERIMENTS)
every_scale = pytest.mark.parametrize("scale", SCALES)


@cache
def arms_of(name: str, scale: Scale = "tiny") -> tuple[Arm, ...]:
    return tuple(EXPERIMENTS[name].arms(scale, None))


@cache
def metrics_of(name: str, scale: Scale = "tiny") -> frozenset[str]:
    return frozenset(requested_metrics(EXPERIMENTS[name], arms_of(name, scale), scale))


# Arms


@every_scale
@every_experiment
def test_arms_are_valid_and_fairly_tuned(name: str, scale: Scale):
    experiment, arms = EXPERIMENTS[name], arms_of(name, scale)
    plan = Plan(arms, experiment.seeds[scale])  # which refuses equal names and unknown parents
    assert experiment.name == name
    parents = {arm.parent for arm in arms}
    rates = {arm.name: len(arm.rates) for arm in arms}
    assert len({rates[arm.name] for arm in arms if arm.name not in parents}) == 1, rates
    assert all(rates[arm.name] <= max(rates.values()) for arm in arms)
    for arm in arms:
        assert TrainConfig.from_dict(json.loads(json.dumps(arm.config.to_dict()))) == arm.config
        assert len(set(arm.rates)) == len(arm.rates)
        assert all(0 < rate < 10 for rate in arm.rates)
        assert set(arm.measures) <= set(MEASURES)
        assert arm.parent_edit is None or arm.parent_edit in EDITS
        if len(arm.rates) > 1:  # the rate is not selected on the images of the final number
            assert arm.config.data.held_out is not None
        assert arm.config.evaluate_every is None or len(arm.rates) == 1
    for device in ("cpu", "cuda"):
        cost = CostModel(device, 50_000, arms, jobs=2)
        assert all(math.isfinite(cost.seconds(arm)) and cost.seconds(arm) > 0 for arm in arms)
        assert cost.of_plan(plan) > 0


@every_experiment
def test_other_data_replaces_that_of_every_arm(name: str):
    arms = EXPERIMENTS[name].arms("tiny", DataConfig(source="mnist", root="/data"))
    assert {(arm.config.data.source, arm.config.data.root) for arm in arms} == {("mnist", "/data")}
    assert {arm.name for arm in arms} == {arm.name for arm in arms_of(name)}


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
@every_experiment
def test_the_list_names_the_data_of_the_arms(name: str, scale: Scale):
    assert {arm.config.data.source for arm in arms_of(name, scale)} == {EXPERIMENTS[name].data[scale]}


def test_each_experiment_has_a_title_a_claim_and_a_source():
    assert len({experiment.title for experiment in EXPERIMENTS.values()}) == len(EXPERIMENTS)
    assert all(experiment.claim.endswith(".") and experiment.source for experiment in EXPERIMENTS.values())


# The analysis of any results


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def subsets(results: Results) -> Iterator[list[TrialResult]]:
    """Some of the finished trials: none, each alone of the first few, one seed, one arm missing, random ones."""
    trials, rng = list(results.trials.values()), random.Random(0)
    yield []
    yield from ([trial] for trial in trials[:3])
    yield [trial for trial in trials if trial.seed == 0]
    for missing in list(results.arms)[:4]:
        yield [trial for trial in trials if trial.arm != missing]
    for share in (0.2, 0.5, 0.8):
        yield [trial for trial in trials if rng.random() < share]


@every_scale
@every_experiment
def test_any_results_can_be_analyzed(name: str, scale: Scale):
    experiment, arms = EXPERIMENTS[name], arms_of(name, scale)
    whole = random_results(arms, metrics_of(name, scale), seeds=3, scale=scale)
    for found in [*subsets(whole), list(whole.trials.values())]:
        analysis = experiment.analyze(Results(arms, scale, found))
        assert analysis.verdicts
        assert any(isinstance(block, Plot) for block in analysis.blocks)
        assert analysis.differences
        assert all(verdict.claim and verdict.reason for verdict in analysis.verdicts)
        for block in analysis.blocks:
            if isinstance(block, Table):
                assert all(len(row) == len(block.columns) for row in block.rows), block.caption
    assert all(v.outcome == "undecided" for v in experiment.analyze(Results(arms, scale, ())).verdicts)


@every_experiment
def test_equal_and_extreme_results_can_be_drawn(name: str):
    arms = arms_of(name)
    whole = random_results(arms, metrics_of(name), seeds=2)
    for value in (0.0, 0.5, 1.0):
        measures = dict.fromkeys(metrics_of(name), value)
        found = [replace(t, test=value, validation=value, measures=measures) for t in whole.trials.values()]
        draw_all(EXPERIMENTS[name].analyze(Results(arms, "tiny", found)))
    without = [replace(trial, measures={}) for trial in whole.trials.values()]
    draw_all(EXPERIMENTS[name].analyze(Results(arms, "tiny", without)))


# The page


def write(name: str, results: Results, out: Path) -> None:
    """Write the page of made-up results, and the files of their trials."""
    experiment = EXPERIMENTS[name]
    (out / "trials").mkdir(parents=True)
    for key, trial in results.trials.items():
        trial.write(out / "trials" / f"{key}.json")
    info = PageInfo(finished=len(results.trials), total=100, left_out=None, command=None, written=0.0)
    write_page(out, experiment, results, experiment.analyze(results), info)


def constants_of(name: str, arms: tuple[Arm, ...]) -> set[str]:
    """Cells and numbers that are the same whatever the results are."""
    texts = []
    for draw in (1, 2):
        analysis = EXPERIMENTS[name].analyze(random_results(arms, metrics_of(name), seeds=2, draw=draw))
        cells = {cell for b in analysis.blocks if isinstance(b, Table) for row in b.rows for cell in row}
        words = {word.strip(".,;:()%") for verdict in analysis.verdicts for word in verdict.reason.split()}
        texts.append({cell for cell in cells if isinstance(cell, str)} | words)
    return set.intersection(*texts) | {"–"}


def slopes(trials: Trials) -> Pool:
    """Points of accuracy per doubling of the cost, for each scaled dimension, and the difference of two."""
    names, base = scaling.shape_arms("tiny"), scaling.base_name("tiny")
    weights: dict[tuple[str, str], dict[str, float]] = {}
    for dimension, others in names.items():
        for metric in ("flops", "seconds"):
            arms = [base, *others]
            if not all((arm, "test") in trials.series for arm in arms):
                continue
            factors = [trials.series[arm, "images"] if metric == "flops" else 1.0 for arm in arms]
            costs = [np.nanmean(trials.series[arm, metric] * factor) for arm, factor in zip(arms, factors, strict=True)]
            fit = np.linalg.pinv(np.stack([np.log2(costs), np.ones(len(arms))], 1))[0]
            weights[dimension, metric] = dict(zip(arms, fit, strict=True))
    found = [trials.contrast(each) for each in weights.values()]
    if len(weights) > 1:
        depth, width = weights[scaling.DEPTH, "flops"], weights[scaling.WIDTH, "flops"]
        found.append(trials.contrast({arm: depth.get(arm, 0) - width.get(arm, 0) for arm in depth | width}))
    return join_pools([EMPTY, *found])


def family_difference(trials: Trials) -> Pool:
    """The mean of all ViTs minus the mean of all ResNets."""
    vits, resnets = (scaling.family_arms("tiny", family) for family in (scaling.VIT, scaling.RESNET))
    return trials.contrast(dict.fromkeys(vits, 1 / len(vits)) | dict.fromkeys(resnets, -1 / len(resnets)))


def excesses(groups: Sequence[Sequence[str]], large: Mapping[str, float]) -> Callable[[Trials], Pool]:
    """What the differences of the arms of each group exceed a third of a large difference by; and that third."""

    def excess(trials: Trials) -> Pool:
        found = [trials.contrast(large), trials.contrast({arm: weight / 3 for arm, weight in large.items()})]
        for one, other in (pair for group in groups for pair in itertools.permutations(group, 2)):
            weights = {arm: (arm == one) - (arm == other) - large.get(arm, 0) / 3 for arm in {one, other, *large}}
            found.append(trials.contrast(weights))
        return join_pools([EMPTY, *found])

    return excess


def agreements(trials: Trials) -> Pool:
    """How often two models predict the same class, for all pairs of arms and heads; and differences of these."""
    found = []
    arrays = {
        arm: [trials.arrays(arm, seed) for seed in range(trials.num_seeds)] for arm in trials.arms if trials.rates[arm]
    }
    for ours, theirs in itertools.permutations(arrays.values(), 2):
        for head in ("predicted", "predicted_class", "predicted_distill"):
            if all(head in one and "predicted" in other for one, other in zip(ours, theirs, strict=True)):
                pairs = zip(ours, theirs, strict=True)
                found.append([np.mean(one[head] == other["predicted"]) for one, other in pairs])
    values = np.array(found).reshape(-1, trials.num_seeds)
    return estimate(np.concatenate([values, (values[:, None] - values[None]).reshape(-1, trials.num_seeds)]))


EXTRA: dict[str, list[Callable[[Trials], Pool]]] = {
    "positions": [
        excesses(
            [positions.PAPERS_KINDS, [name for name in positions.ENCODINGS if name.startswith("1-D")]],
            {**dict.fromkeys(positions.PAPERS_KINDS, 1 / 3), positions.NONE: -1},
        )
    ],
    "resolution": [excesses([resolution.CONVENTIONS], {resolution.DEFAULT: 1, resolution.CORNER: -1})],
    "self-supervision": [
        excesses(
            [[f"{target}, 100 %" for target in self_supervision.TARGETS]],
            {f"{self_supervision.SUPERVISED}, 100 %": 1, f"{self_supervision.SCRATCH}, 100 %": -1},
        )
    ],
    "lecture": [excesses([[lecture.DEFAULT, lecture.MEAN]], {lecture.DEFAULT: 1, lecture.NO_POSITIONS: -1})],
    "scaling": [slopes, family_difference],
    "distillation": [agreements],
}
"""What an experiment shows besides means, differences, and differences of differences."""


def check_page(name: str, out: Path, arms: tuple[Arm, ...]) -> None:
    """Both files show the same, and every number is that of the trials' files."""
    html, markdown, trials = read_html(out), read_markdown(out), Trials(out, arms)
    assert html.verdicts == markdown.verdicts
    assert html.facts == markdown.facts
    assert [table.columns for table in html.tables] == [table.columns for table in markdown.tables]
    assert html.tables == markdown.tables
    stored = json.loads((out / "results.json").read_text())
    assert stored["trials"] == trials.found
    assert [tuple(verdict.values()) for verdict in stored["verdicts"]] == [
        (claim, outcome, reason) for outcome, claim, reason in html.verdicts
    ]
    text = (out / "page.md").read_text()
    assert all(f"(figures/{figure}.png)" in text for figure in stored["figures"])
    assert all((out / "figures" / f"{figure}.png").stat().st_size > 1000 for figure in stored["figures"])
    extra = {function.__name__: function(trials) for function in EXTRA.get(name, [])}
    html.tables = [table for table in html.tables if table.caption not in CHECKED_ELSEWHERE]
    assert wrong_numbers(html, trials, constants_of(name, arms), extra) == []


@every_experiment
def test_the_page_shows_the_numbers_of_made_up_results(name: str, tmp_path: Path):
    arms = arms_of(name)
    results = random_results(arms, metrics_of(name), seeds=3)
    write(name, results, tmp_path / "all")
    check_page(name, tmp_path / "all", arms)
    first = next(iter(results.trials.values()))
    for out, found in (("one", [first]), ("none", [])):
        write(name, Results(arms, "tiny", found), tmp_path / out)
        html = read_html(tmp_path / out)
        assert html.tables == read_markdown(tmp_path / out).tables
        assert html.facts["Runs"] == f"{len(found)} of 100"
        assert found or {outcome for outcome, _, _ in html.verdicts} == {"undecided"}


def bump(text: str) -> str:
    """The text with the last digit of its first number changed by one."""
    number = re.search(r"\d[\d,]*\.\d+", text)
    assert number is not None
    last = int(number[0][-1])
    return f"{text[: number.end() - 1]}{last + 1 if last < 9 else 8}{text[number.end() :]}"


@pytest.mark.parametrize("name", ["positions", "pooling", "scaling"])
def test_the_check_finds_every_number_that_is_changed_in_its_last_digit(name: str, tmp_path: Path):
    arms = arms_of(name)
    write(name, random_results(arms, metrics_of(name), seeds=3), tmp_path / "out")
    page, trials, constants = read_html(tmp_path / "out"), Trials(tmp_path / "out", arms), constants_of(name, arms)
    extra = {function.__name__: function(trials) for function in EXTRA.get(name, [])}
    cells = [(row, i) for table in page.tables for row in table.rows for i in range(len(row)) if " to " in row[i]]
    assert len(cells) > 10
    for row, i in cells:
        right = row[i]
        row[i] = bump(right)
        assert len(wrong_numbers(page, trials, constants, extra)) == 1, (right, row[i])
        row[i] = right
    for i, (outcome, claim, reason) in enumerate(page.verdicts):
        if re.search(r"\d to [+-]?\d", reason):
            page.verdicts[i] = (outcome, claim, bump(reason))
            assert len(wrong_numbers(page, trials, constants, extra)) == 1, reason
            page.verdicts[i] = (outcome, claim, reason)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in EXPERIMENTS]
)
def test_a_short_run_has_a_page_with_the_numbers_of_its_trials(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_inline(monkeypatch)
    clock = SimpleNamespace(monotonic=lambda: 0.0, time=time.time)  # the budget is for the plan; a busy machine is slow
    monkeypatch.setattr("vitrail.reproduction.reproduce.time", clock)
    overrides = [*SHORT, *SNAPSHOTS.get(name, ())]
    request = Request(name=name, scale="tiny", seeds=1, overrides=overrides, out=tmp_path, device="cpu")
    session = open_session(request)
    once = replace(session.whole, max_rates=1)
    budget = session.cost.of_plan(once) * (1 + 1e-9)
    done = reproduce(
        name, scale="tiny", seeds=1, overrides=overrides, out=tmp_path, device="cpu", jobs=request.num_jobs,
        budget_s=budget,
    )  # fmt: skip
    assert done.finished == len(done.results.arms) == once.num_trials
    measured = {metric for trial in done.results.trials.values() for metric in (*trial.measures, *FIELDS)}
    assert {stem(metric) for metric in metrics_of(name)} <= {stem(metric) for metric in measured}
    check_page(name, tmp_path, request.arms())


def stem(metric: str) -> str:
    """What is measured, without when or where: not every number exists for all of these."""
    return metric.partition(",")[0]
