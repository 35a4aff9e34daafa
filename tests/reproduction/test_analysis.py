"""Verdicts at their boundaries, and the table of an experiment's arms."""

from __future__ import annotations

import math

import pytest
from reproduction.synthetic import make_arm, make_result, make_results

from vitrail.reproduction.analysis import Analysis, Metric, Verdict, arm_table, compare, similar
from vitrail.reproduction.arm import Trial
from vitrail.reproduction.results import Results, SeedMean

ARMS = [make_arm("a"), make_arm("b"), make_arm("c")]


def outcome(low: float, high: float, margin: float = 0.0) -> str:
    difference = SeedMean((low + high) / 2, low, high, 3)
    return compare("claim", difference, "a", "b", margin=margin).outcome


@pytest.mark.parametrize(
    ("low", "high", "margin", "expected"),
    [
        (0.25, 0.5, 0.0, "holds"),
        (-0.5, -0.25, 0.0, "does not hold"),
        (-0.25, 0.25, 0.0, "undecided"),
        (0.0, 0.25, 0.0, "undecided"),  # an interval that touches zero decides nothing
        (-0.25, 0.0, 0.0, "undecided"),
        (0.0, 0.0, 0.0, "undecided"),
        (0.25, 0.5, 0.125, "holds"),
        (0.25, 0.5, 0.25, "undecided"),
        (0.25, 0.5, 0.5, "undecided"),
        (0.25, 0.5, 0.75, "does not hold"),  # better, but not by the margin
        (0.25, 0.5, -0.125, "holds"),
    ],
)
def test_a_comparison_is_decided_by_the_whole_interval(low: float, high: float, margin: float, expected: str):
    assert outcome(low, high, margin) == expected


def test_a_comparison_says_its_numbers():
    why = "The model is small."
    holds = compare("claim", SeedMean(0.02, 0.01, 0.03, 3), "a", "b", why_not=why)
    assert holds.reason == "a minus b: +2.00 points (+1.00 to +3.00, 3 seeds)."
    fails = compare("claim", SeedMean(-0.02, -0.03, -0.01, 4), "a", "b", why_not=why)
    assert fails.reason == "a minus b: -2.00 points (-3.00 to -1.00, 4 seeds). The model is small."
    open_ = compare("claim", SeedMean(0.01, -0.01, 0.03, 3), "a", "b", why_not=why, margin=0.005)
    assert open_.reason == "a minus b: +1.00 points (-1.00 to +3.00, 3 seeds). The interval includes 0.5."


def test_a_comparison_of_one_seed_or_of_missing_runs_is_undecided():
    one = compare("claim", SeedMean(0.02, math.nan, math.nan, 1), "a", "b")
    assert (one.outcome, one.reason) == (
        "undecided",
        "a minus b: +2.00 points with one seed; more seeds give an interval.",
    )
    missing = compare("claim", None, "a", "b")
    assert (missing.outcome, missing.reason) == ("undecided", "a or b has no finished run.")


def similarity(tests: dict[str, list[float]], gap: float | None) -> Verdict:
    return similar("claim", make_results(ARMS, tests), ["a", "b", "c"], gap, why_not="The model is small.")


SPREAD = {"a": [0.75, 0.75], "b": [0.5, 0.5], "c": [0.625, 0.625]}
"""The best and the worst differ by 0.25 with every seed."""


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0.75, "holds"), (0.8, "holds"), (0.7, "does not hold"), (0.0, "undecided"), (-0.5, "undecided")],
)
def test_arms_are_similar_if_they_differ_by_at_most_a_third_of_the_gap(gap: float, expected: str):
    assert similarity(SPREAD, gap).outcome == expected


def test_a_difference_whose_interval_includes_a_third_is_undecided():
    for mean_above_and_below in (0.6, 2.0):
        assert similarity({"a": [0.75, 1.0], "b": [0.5, 0.5]}, mean_above_and_below).outcome == "undecided"
    one_seed = similarity({"a": [0.75], "b": [0.5]}, 2.0)
    assert one_seed.outcome == "undecided"
    assert one_seed.reason.startswith("a and b differ by 25.00 points with one seed;")


def test_similarity_says_its_numbers():
    found = similarity({"a": [0.5, 0.52], "b": [0.5, 0.5], "c": [0.505, 0.505]}, 0.06)
    assert found.outcome == "undecided"
    assert found.reason == (
        "a and b differ by 1.00 points (-11.71 to +13.71); a third of the difference they are compared with is 2.00."
    )
    assert similarity(SPREAD, 0.3).reason.endswith("The model is small.")
    assert not similarity(SPREAD, 0.75).reason.endswith("The model is small.")


def test_similarity_of_too_few_arms_is_undecided():
    for tests, gap in (({}, 0.5), ({"a": [0.5]}, 0.5), (SPREAD, None)):
        found = similarity(tests, gap)
        assert (found.outcome, found.reason) == ("undecided", "Too few of the runs are finished.")


def test_the_summary_counts_outcomes():
    def summary(*outcomes: str) -> str:
        return Analysis([Verdict("c", outcome, "") for outcome in outcomes], []).summary  # type: ignore[arg-type]

    assert summary("holds", "undecided", "holds") == "2 hold, 1 undecided"
    assert summary("does not hold") == "1 does not hold"
    assert summary("does not hold", "holds", "does not hold") == "1 holds, 2 do not hold"
    assert summary() == "no result yet"


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
