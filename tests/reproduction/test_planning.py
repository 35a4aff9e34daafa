"""Order of trials, selection of the learning rate, parts, budgets, and the digest of a trial's settings."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduction.synthetic import finish_all, make_arm, make_result
from training.small_runs import digits_config

from vitrail.config import TrainConfig, override
from vitrail.errors import ConfigError
from vitrail.reproduction.arm import Arm, Trial
from vitrail.reproduction.planning import Plan, fit_budget, parse_part, select_part, settings_digest
from vitrail.reproduction.results import Results

RATES = (3e-3, 1e-3, 1e-2)


@st.composite
def plans(draw: st.DrawFn, same_rates: bool = False) -> Plan:
    """Up to seven arms, some of which start from another, in any order."""
    count = draw(st.integers(1, 7))
    rates = draw(st.integers(0, 3))
    arms = []
    for i in range(count):
        arms.append(
            make_arm(
                f"arm {i}",
                RATES[: rates if same_rates else draw(st.integers(0, 3))],
                parent=None if i == 0 else draw(st.none() | st.integers(0, i - 1).map("arm {}".format)),
                max_seeds=draw(st.none() | st.integers(1, 3)),
            )
        )
    return Plan(tuple(draw(st.permutations(arms))), seeds=draw(st.integers(1, 4)))


def no_results(plan: Plan) -> Results:
    return Results(plan.arms, "tiny", ())


def keys(trials: list[Trial]) -> list[str]:
    return [trial.key for trial in trials]


def test_every_arm_runs_once_then_with_all_learning_rates_then_with_more_seeds():
    plan = Plan((make_arm("a", (1e-3, 3e-3)), make_arm("b", (1e-3, 3e-3)), make_arm("c")), seeds=3)
    order = finish_all(plan, no_results(plan), lambda t: make_result(t, validation=0.9 if t.lr == 3e-3 else 0.1))
    assert keys(order) == [
        "a-lr0.001-seed0", "b-lr0.001-seed0", "c-seed0", "a-lr0.003-seed0", "b-lr0.003-seed0",
        "a-lr0.003-seed1", "b-lr0.003-seed1", "c-seed1", "a-lr0.003-seed2", "b-lr0.003-seed2", "c-seed2",
    ]  # fmt: skip


@given(plans(), st.integers(1, 4), st.randoms())
def test_every_trial_runs_once_after_its_parent_in_any_order_of_finishing(plan: Plan, jobs: int, rng: Any):
    results, running, started = no_results(plan), {}, []
    while True:
        while len(running) < jobs and (trial := plan.next_trial(results, running)) is not None:
            if trial.arm.parent is not None:
                parent = plan.parent_trial(trial, results)
                assert parent is not None
                assert parent.key in results.trials
                assert parent.seed == (trial.seed if trial.seed < plan.num_seeds(parent.arm) else 0)
                assert parent.lr == results.selected_rate(parent.arm.name)
            running[trial.key] = trial
            started.append(trial.key)
        if not running:
            break
        trial = running.pop(rng.choice(sorted(running)))
        results.trials[trial.key] = make_result(trial, validation=rng.random())
    assert len(set(started)) == len(started) == plan.num_trials
    for arm in plan.arms:
        found = results.of_arm(arm.name)
        assert {t.lr for t in found if t.seed == 0} == set(arm.rates)
        assert [t.seed for t in found if t.lr == results.selected_rate(arm.name)] == list(range(plan.num_seeds(arm)))
        assert len(found) == plan.count_trials(arm)


def test_further_seeds_wait_for_every_learning_rate():
    plan = Plan((make_arm("a", RATES),), seeds=2)
    results = no_results(plan)
    for lr in RATES[:2]:
        trial = Trial(arm=plan.arms[0], lr=lr, seed=0)
        results.trials[trial.key] = make_result(trial)
        assert plan.final_rate(plan.arms[0], results) is None
    assert plan.next_trial(results, ["a-lr0.01-seed0"]) is None


@given(st.lists(st.none() | st.sampled_from([0.1, 0.5, 0.9]), min_size=3, max_size=3), st.permutations(range(3)))
def test_the_rate_with_the_best_validation_is_selected_and_of_equal_ones_the_first(values: list[Any], order: list[int]):
    arm = make_arm("a", RATES)
    found = [make_result(Trial(arm=arm, lr=RATES[i], seed=0), validation=values[i], test=-i) for i in order]
    others = [make_result(Trial(arm=arm, lr=lr, seed=1), validation=1.0) for lr in RATES]
    scores = [-1.0 if value is None else value for value in values]
    assert Results([arm], "tiny", [*others, *found]).selected_rate("a") == RATES[scores.index(max(scores))]


def test_children_of_seeds_that_the_parent_lacks_start_from_its_seed_0():
    parent, child = make_arm("p", max_seeds=1), make_arm("c", parent="p")
    plan = Plan((child, parent), seeds=3)
    results = no_results(plan)
    assert keys(finish_all(plan, results)) == ["p-seed0", "c-seed0", "c-seed1", "c-seed2"]
    assert plan.parent_trial(Trial(arm=child, lr=child.rates[0], seed=2), results).key == "p-seed0"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("names", "parents", "message"),
    [
        (("a", "a"), (None, None), "two arms have the same name"),
        (("1-D, stem", "1-D  stem"), (None, None), "two arms have the same name"),  # the folders would be the same
        (("a", "b"), (None, "c"), "the arm b starts from 'c', which is not an arm"),
    ],
)
def test_invalid_plans_are_refused(names: tuple[str, ...], parents: tuple[str | None, ...], message: str):
    arms = tuple(make_arm(name, parent=parent) for name, parent in zip(names, parents, strict=True))
    with pytest.raises(ConfigError, match=message):
        Plan(arms, seeds=1)


# Parts


@given(plans(), st.integers(1, 5))
def test_the_parts_together_are_all_trials_and_each_has_its_parents(plan: Plan, count: int):
    results = no_results(plan)
    finish_all(plan, results)
    parents = {arm.parent for arm in plan.arms}
    costs = {arm.name: 1.0 + 2 * i for i, arm in enumerate(plan.arms)}
    parts = [select_part(plan, number, count, lambda arm: costs[arm.name]) for number in range(1, count + 1)]
    for part in parts:
        names = {arm.name for arm in part.arms}
        assert all(arm.parent is None or arm.parent in names for arm in part.arms)
        assert [arm for arm in plan.arms if arm.name in names] == list(part.arms)  # in the experiment's order
        assert (part.seeds, part.max_rates) == (plan.seeds, plan.max_rates)
    found = [trial.key for part in parts for trial in part.trials(results)]
    assert set(found) == {trial.key for trial in plan.trials(results)}
    leaves = [[arm.name for arm in part.arms if arm.name not in parents] for part in parts]
    assert sorted(name for names in leaves for name in names) == sorted(
        a.name for a in plan.arms if a.name not in parents
    )
    loads = [sum(costs[name] for name in names) for names in leaves]
    assert max(loads) - min(loads) <= max(costs.values())


def test_one_part_of_one_is_the_whole_plan():
    plan = Plan((make_arm("a"), make_arm("b", parent="a"), make_arm("c")), seeds=2)
    assert select_part(plan, 1, 1, lambda arm: 1.0) == plan


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/", "/2", "-1/2", "1/2/3", "a/b", "1.0/2", "1/0", "²/3"])
def test_invalid_parts_are_refused(text: str):
    with pytest.raises(ConfigError, match=rf"--part {re.escape(text)}: expected I/N with I from 1 to N, such as 2/3"):
        parse_part(text)


def test_a_part_is_a_number_and_a_count():
    assert parse_part("2/3") == (2, 3)


# Budgets


def cost_per_arm(plan: Plan) -> float:
    """Ten seconds for each trial."""
    return 10.0 * plan.num_trials


@given(plans(same_rates=True), st.integers(1, 300))
def test_a_budget_is_never_exceeded_and_keeps_equal_numbers_of_rates(plan: Plan, seconds: int):
    if seconds < 10 * len({"first", *_ancestors_of_first(plan)}):
        with pytest.raises(ConfigError, match="no run fits into the budget"):
            fit_budget(plan, seconds, cost_per_arm)
        return
    fitted, left_out = fit_budget(plan, seconds, cost_per_arm)
    assert cost_per_arm(fitted) <= seconds
    assert len({len(fitted.rates(arm)) for arm in fitted.arms}) == 1
    names = {arm.name for arm in fitted.arms}
    assert all(arm.parent is None or arm.parent in names for arm in fitted.arms)
    assert (left_out is None) == (fitted == plan) == (cost_per_arm(plan) <= seconds)
    if len(fitted.arms) < len(plan.arms):  # arms are left out only when one run of each is too much
        assert cost_per_arm(replace(plan, seeds=1, max_rates=1)) > seconds
        assert (fitted.seeds, fitted.max_rates) == (1, 1)
        assert left_out is not None
        missing = [f"“{arm.name}”" for arm in plan.arms if arm.name not in names]
        assert left_out == f"1 learning rate, 1 seed; without {', '.join(missing)}"
    elif left_out is not None:  # further seeds only with all learning rates
        rates, seeds = len(fitted.rates(fitted.arms[0])), len(plan.rates(plan.arms[0]))
        assert left_out == f"{rates} of {seeds} learning rates, {fitted.seeds} of {plan.seeds} seeds"
        assert fitted.seeds == 1 or rates == seeds


def _ancestors_of_first(plan: Plan) -> list[str]:
    """Names of the arms without which the plan's first arm cannot run."""
    by_name, arm, found = {arm.name: arm for arm in plan.arms}, plan.arms[0], []
    while arm.parent is not None:
        found.append(arm.parent)
        arm = by_name[arm.parent]
    return found


@given(plans(same_rates=True), st.lists(st.integers(1, 300), min_size=2, max_size=2))
def test_a_larger_budget_runs_at_least_the_trials_of_a_smaller_one(plan: Plan, budgets: list[int]):
    counts = []
    for seconds in sorted(budgets):
        try:
            counts.append(fit_budget(plan, seconds, cost_per_arm)[0].num_trials)
        except ConfigError:
            counts.append(0)
    assert counts[0] <= counts[1]


def test_a_budget_allows_all_rates_before_further_seeds():
    plan = Plan((make_arm("a", RATES), make_arm("b", RATES)), seeds=3)  # 6 runs for the rates, 2 for each further seed
    found = [fit_budget(plan, 10.0 * runs, cost_per_arm) for runs in (1, 2, 4, 6, 7, 8, 10)]
    assert [(fitted.num_trials, left_out) for fitted, left_out in found] == [
        (1, "1 learning rate, 1 seed; without “b”"),
        (2, "1 of 3 learning rates, 1 of 3 seeds"),
        (4, "2 of 3 learning rates, 1 of 3 seeds"),
        (6, "3 of 3 learning rates, 1 of 3 seeds"),
        (6, "3 of 3 learning rates, 1 of 3 seeds"),
        (8, "3 of 3 learning rates, 2 of 3 seeds"),
        (10, None),
    ]


# The digest of a trial's settings


def digest(config: Any = None, *, lr: float = 1e-3, seed: int = 0, **fields: Any) -> str:
    """The digest of a trial of an arm with these settings."""
    return settings_digest(Trial(arm=make_arm("a", config=config or digits_config(4), **fields), lr=lr, seed=seed))


@pytest.mark.parametrize(
    "setting",
    [
        "model.depth=1", "model.position=none", "model.dropout=0.2", "data.source=mnist", "data.held_out=0.3",
        "data.fraction=0.5", "preprocess.mean=(0.4,)", "augment.erase=0.1", "optim.weight_decay=0.1",
        "optim.kind=sgd", "schedule.kind=linear", "schedule.warmup=2 steps", "duration=5 steps", "batch_size=32",
        "classify.label_smoothing=0.1", "ema=0.9", "precision=bfloat16", "init_from=a/published-model",
    ],
)  # fmt: skip
def test_a_setting_that_matters_changes_the_digest(setting: str):
    assert digest(override(digits_config(4), [setting])) != digest()


@pytest.mark.parametrize(
    "setting",
    ["device=cuda", "data.workers=3", "data.root=/elsewhere", "name=another", "compile=true", "grad_accum_steps=2"],
)
def test_names_paths_and_how_the_work_is_divided_do_not_change_the_digest(setting: str):
    assert digest(override(digits_config(4), [setting])) == digest()


def test_learning_rate_seed_parent_edit_and_measures_change_the_digest():
    found = [
        digest(), digest(lr=2e-3), digest(seed=1), digest(parent="p"), digest(parent="q"),
        digest(parent="p", parent_edit="none"), digest(measures=("5-shot",)),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert digest(factors={"x": 1}, rates=RATES, max_seeds=2) == found[0]


def distilled(teacher: str) -> TrainConfig:
    config = digits_config(4)
    return config.replace(objective="distill", distill=config.distill.replace(teacher=teacher).to_dict())


def test_a_published_teacher_is_in_the_digest():
    assert digest(distilled("a/teacher")) != digest(distilled("another/teacher"))


def test_the_folder_of_the_parents_model_does_not_change_the_digest():
    for arm in (
        make_arm("a", parent="p"),
        make_arm("a", parent="p", parent_setting="distill.teacher", config=distilled("anything")),
    ):
        trial = Trial(arm=arm, lr=1e-3, seed=0)
        resolved = replace(arm, config=trial.config("somewhere/model"))
        assert resolved.config != trial.config()
        assert settings_digest(Trial(arm=resolved, lr=1e-3, seed=0)) == settings_digest(trial)


IGNORED = {
    "name", "device", "data.root", "data.workers", "checkpoint_every", "compile", "grad_accum_steps",
    "gradient_checkpointing", "kernels", "log_every", "parallel", "trackers", "callbacks",
}  # fmt: skip
"""Settings without an influence on the result but for rounding."""


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, (*path, name))
    else:
        yield path


def test_every_setting_is_in_the_digest():
    arm = make_arm("a")
    settings = Trial(arm=arm, lr=1e-3, seed=0).config().to_dict()

    def digest_of(changed: dict[str, Any]) -> str:
        config = SimpleNamespace(to_dict=lambda: copy.deepcopy(changed))
        return settings_digest(SimpleNamespace(config=lambda: config, arm=arm))  # type: ignore[arg-type]

    before, ignored = digest_of(settings), set()
    paths = list(_leaves(settings))
    assert len(paths) > 80
    for *groups, name in paths:
        changed = copy.deepcopy(settings)
        group = changed
        for inner in groups:
            group = group[inner]
        group[name] = "another value"
        if digest_of(changed) == before:
            ignored.add(".".join([*groups, name]))
    assert {name.removesuffix(".count").removesuffix(".unit") for name in ignored} == IGNORED


def test_the_folder_name_of_a_trial_has_only_harmless_characters():
    trial = Trial(arm=Arm(name="R50 + ViT, 10 %/a", config=digits_config(1)), lr=1e-3, seed=2)
    assert trial.key == "R50-ViT-10-a-seed2"
