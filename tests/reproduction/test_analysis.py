"""Verdicts at their boundaries, and the table of an experiment's arms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from reproduction.synthetic import make_arm, make_result, make_results

from vitrail.reproduction.analysis import PLAIN, Analysis, Metric, Verdict, arm_table, compare, judge, shrinks, similar
from vitrail.reproduction.arm import Trial
from vitrail.reproduction.results import Results, SeedMean

ARMS = [make_arm("a"), make_arm("b"), make_arm("c")]


HOLDS, FAILS, OPEN = "holds", "does not hold", "undecided"


@pytest.mark.parametrize(
    ("low", "high", "limits", "expected"),
    [
        (0.25, 0.5, {"above": 0.0}, HOLDS),
        (-0.5, -0.25, {"above": 0.0}, FAILS),
        (-0.25, 0.25, {"above": 0.0}, OPEN),
        (0.0, 0.25, {"above": 0.0}, OPEN),  # an interval that touches the limit decides nothing
        (-0.25, 0.0, {"above": 0.0}, OPEN),
        (0.0, 0.0, {"above": 0.0}, OPEN),
        (0.25, 0.5, {"above": 0.125}, HOLDS),
        (0.25, 0.5, {"above": 0.25}, OPEN),
        (0.25, 0.5, {"above": 0.75}, FAILS),
        (0.25, 0.5, {"above": -0.125}, HOLDS),
        (-0.5, -0.25, {"below": 0.0}, HOLDS),
        (0.25, 0.5, {"below": 0.0}, FAILS),
        (-0.25, 0.25, {"below": 0.0}, OPEN),
        (-0.25, 0.25, {"above": -0.5, "below": 0.5}, HOLDS),
        (-0.75, 0.25, {"above": -0.5, "below": 0.5}, OPEN),
        (-0.75, 0.75, {"above": -0.5, "below": 0.5}, OPEN),
        (0.625, 0.75, {"above": -0.5, "below": 0.5}, FAILS),
        (-0.75, -0.625, {"above": -0.5, "below": 0.5}, FAILS),
    ],
)
def test_a_claim_is_decided_by_the_whole_interval(low: float, high: float, limits: dict[str, float], expected: str):
    assert judge("claim", SeedMean((low + high) / 2, low, high, 3), "x", **limits).outcome == expected


def test_a_verdict_says_its_numbers():
    why = "The model is small."
    holds = compare("claim", SeedMean(0.02, 0.01, 0.03, 3), "a", "b", why_not=why)
    assert holds.reason == "a minus b: +2.00 points (+1.00 to +3.00, 3 seeds)."
    fails = compare("claim", SeedMean(-0.02, -0.03, -0.01, 4), "a", "b", why_not=why)
    assert fails.reason == "a minus b: -2.00 points (-3.00 to -1.00, 4 seeds). The model is small."
    undecided = compare("claim", SeedMean(0.01, -0.01, 0.03, 3), "a", "b", why_not=why)
    assert undecided.reason == "a minus b: +1.00 points (-1.00 to +3.00, 3 seeds); the interval includes 0.00."
    limits = judge("claim", SeedMean(0.6, 0.3, 1.0, 3), "x", above=0.5, below=2.0, metric=PLAIN)
    assert limits.reason == (
        "x: 0.60 (0.30 to 1.00, 3 seeds); the claim is above 0.50 and below 2.00; the interval includes 0.50."
    )
    pixels = Metric(percent=False, digits=1, unit=" px")
    one = judge("claim", SeedMean(3.0, 2.0, 4.0, 1), "x", above=0.0, metric=pixels)
    assert one.reason == "x: 3.0 px (2.0 to 4.0, 1 seed)."


def test_a_claim_about_one_seed_or_about_missing_runs_is_undecided():
    one = compare("claim", SeedMean(0.02, math.nan, math.nan, 1), "a", "b")
    assert (one.outcome, one.reason) == (OPEN, "a minus b: +2.00 points with one seed, without an interval.")
    missing = compare("claim", None, "a", "b")
    assert (missing.outcome, missing.reason) == (OPEN, "a minus b: too few of the runs are finished.")


def shrinking(first: float, last: float, spread: float = 0.001) -> Verdict:
    """The verdict on an advantage of these sizes."""
    arms = [make_arm(name) for name in "abcd"]
    seeds = (-spread, 0.0, spread)
    levels = {"a": 0.5 + first, "b": 0.5, "c": 0.7 + last, "d": 0.7}
    results = make_results(arms, {name: [level + seed for seed in seeds] for name, level in levels.items()})
    return shrinks("claim", results, "ab", "cd", ("early", "late"))


def test_an_advantage_shrinks_only_if_there_is_one():
    assert shrinking(0.3, 0.1).outcome == HOLDS
    assert shrinking(0.1, 0.3).outcome == FAILS
    assert shrinking(0.2, 0.199).outcome == OPEN
    assert shrinking(-0.1, 0.2).outcome == FAILS
    assert shrinking(-0.1, -0.3).outcome == OPEN
    assert shrinking(0.001, -0.3).outcome == OPEN
    assert shrinking(0.001, -0.3).reason.startswith("There is no certain advantage to shrink: a minus b: +0.10 points")
    assert shrinking(0.3, 0.1).reason.startswith("advantage early minus advantage late: +20.00 points")
    assert shrinks("claim", make_results(ARMS, {}), "ab", "bc", ("", "")).outcome == OPEN


# Arms that are alike

LARGE = {"a": 1.0, "z": -1.0}
"""A difference that the source calls large."""
GROUP = [make_arm(name) for name in "abcdz"]


def similarity(levels: dict[str, float], spread: float = 0.002) -> Verdict:
    seeds = (-spread, 0.0, spread)
    results = make_results(GROUP, {name: [level + seed for seed in seeds] for name, level in levels.items()})
    return similar("claim", results, ["a", "b", "c"], LARGE, why_not="The model is small.")


@pytest.mark.parametrize(
    ("b", "expected"), [(0.8, HOLDS), (0.83, HOLDS), (0.86, FAILS), (0.73, FAILS), (0.77, HOLDS), (0.845, OPEN)]
)
def test_arms_are_alike_if_they_differ_by_less_than_a_third_of_a_large_difference(b: float, expected: str):
    assert similarity({"a": 0.8, "b": b, "c": 0.8, "z": 0.65}).outcome == expected


def test_the_third_is_as_uncertain_as_the_large_difference():
    levels = {"a": 0.8, "b": 0.8, "c": 0.8, "z": 0.65}
    assert similarity(levels).outcome == HOLDS
    results = make_results(GROUP, {name: [level - 0.002, level, level + 0.002] for name, level in levels.items()})
    wide = make_results(GROUP, {"z": [0.45, 0.65, 0.85]}).trials
    assert similar("claim", Results(GROUP, "tiny", (results.trials | wide).values()), "abc", LARGE).outcome == OPEN


def test_similarity_says_its_numbers():
    found = similarity({"a": 0.8, "b": 0.86, "c": 0.81, "z": 0.65})
    assert found.reason.startswith(
        "The largest difference is “b” minus “a”, 6.00 points; less a third of the difference that they are compared "
        "with (5.00), +1.00 points (+0.46"
    )
    assert found.reason.endswith(", 3 seeds), above zero at a level of 5 % / 3 pairs. The model is small.")
    assert similarity({"a": 0.8, "b": 0.8, "c": 0.8, "z": 0.65}).reason.endswith(", and below zero in all pairs.")
    single = make_results(GROUP, {"a": [0.8], "b": [0.7], "z": [0.5]})
    assert similar("claim", single, "ab", LARGE).reason.endswith(
        "(10.00), +0.00 points with one seed, without an interval."
    )


def test_arms_that_are_not_finished_may_still_differ():
    found = similarity({"a": 0.8, "b": 0.8, "z": 0.65})
    assert (found.outcome, found.reason.endswith("; not finished: “c”.")) == (OPEN, True)
    assert similarity({"a": 0.8, "b": 0.9, "z": 0.65}).outcome == FAILS


def test_similarity_of_too_few_arms_or_to_nothing_is_undecided():
    for levels in ({}, {"a": 0.5}, {"a": 0.5, "b": 0.5}, {"a": 0.5, "z": 0.4}):
        found = similarity(levels)
        assert (found.outcome, found.reason) == (OPEN, "Too few of the runs are finished.")
    found = similarity({"a": 0.5, "b": 0.5, "z": 0.6})
    assert (found.outcome, "no difference that theirs could" in found.reason) == (OPEN, True)


@pytest.mark.parametrize(("levels", "wrong"), [((0.8, 0.8, 0.85), HOLDS), ((0.775, 0.8, 0.825), FAILS)])
def test_similarity_is_decided_wrongly_in_less_than_one_of_twenty(levels: tuple[float, float, float], wrong: str):
    """At the limit: one pair differs by exactly a third of 0.15, so that neither outcome is right."""
    rng, repeats = np.random.default_rng(0), 400
    outcomes = []
    for _ in range(repeats):
        means = dict(zip("abcz", (*levels, levels[0] - 0.15), strict=True))
        results = make_results(GROUP, {name: rng.normal(mean, 0.01, 5) for name, mean in means.items()})
        outcomes.append(similar("claim", results, "abc", LARGE).outcome)
    assert outcomes.count(wrong) <= 0.05 * repeats
    assert outcomes.count(HOLDS) + outcomes.count(FAILS) <= 0.075 * repeats


def test_the_summary_counts_outcomes():
    def summary(*outcomes: str) -> str:
        return Analysis([Verdict("c", outcome, "") for outcome in outcomes], []).summary  # type: ignore[arg-type]

    assert summary("holds", "undecided", "holds") == "2 hold, 1 undecided"
    assert summary("does not hold") == "1 does not hold"
    assert summary("does not hold", "holds", "does not hold") == "1 holds, 2 do not hold"
    assert summary() == "no result yet"


def test_the_agreement_names_what_does_not_agree_and_what_is_open():
    verdicts = [Verdict(f"Claim {i}.", outcome, "") for i, outcome in enumerate((HOLDS, FAILS, OPEN, HOLDS, FAILS))]
    assert Analysis(verdicts, []).agreement == (
        "2 of 5 claims agree with the source. These do not: “Claim 1”; “Claim 4”. These runs do not decide: “Claim 2”."
    )
    assert Analysis(verdicts[:1], []).agreement == "1 of 1 claims agrees with the source."


# The table of arms


def table_results() -> Results:
    arms = [
        make_arm("none", (1e-3, 3e-3), factors={"position": "none"}),
        make_arm("1-D", (1e-3, 3e-3), factors={"position": "1-D", "at": 2}),
        make_arm("2-D", (1e-3, 3e-3), factors={"position": "2-D"}),
    ]
    found = [
        make_result(
            Trial(arm=arm, lr=lr, seed=seed), test=test + 0.01 * seed, validation=lr, measures={"5-shot": test / 2}
        )
        for arm, test in zip(arms, (0.5, 0.75), strict=False)
        for lr, seeds in ((1e-3, 1), (3e-3, 2))
        for seed in range(seeds)
    ]
    return Results(arms, "tiny", found)


def test_a_row_has_factors_rate_means_difference_and_published_value():
    results = table_results()
    table = arm_table(
        results,
        "Caption",
        {"test": "accuracy", "5-shot": "few"},
        reference="none",
        published={"paper": {"1-D": "64.2"}},
    )
    assert table.columns == ["position", "at", "learning rate", "accuracy", "few", "minus none", "paper"]
    none, one, two = table.rows
    assert none == ["none", "–", "0.003", results.mean("none"), results.mean("none", "5-shot"), None, None]
    estimates = [results.mean("1-D"), results.mean("1-D", "5-shot"), results.difference("1-D", "none")]
    assert one == ["1-D", "2", "0.003", *estimates, "64.2"]
    assert two == ["2-D", "–", None, None, None, None, None]
    assert one[3].value == pytest.approx(0.755)  # type: ignore[union-attr]
    assert one[5].value == pytest.approx(0.25)  # type: ignore[union-attr]


def test_a_table_of_some_arms_without_a_search_or_factors():
    results = make_results(ARMS, {"a": [0.5], "b": [0.25]})
    table = arm_table(results, "Caption", {"test": "accuracy"}, arms=["b", "a"])
    assert table.columns == ["", "accuracy"]
    assert [row[0] for row in table.rows] == ["b", "a"]
    assert [row[1].value for row in table.rows] == [0.25, 0.5]  # type: ignore[union-attr]
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_numbers_are_shown_as_percentages_or_with_a_unit():
    assert Metric().format(0.98765) == "98.77"
    assert Metric(digits=1).format(-0.5) == "-50.0"
    assert Metric(percent=False, digits=0, unit=" s").format(12345.6) == "12,346 s"
