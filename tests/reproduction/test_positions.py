"""The position experiment: verdicts and the explanation of the difference, from made-up accuracies."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from reproduction.synthetic import make_results

from vitrail.reproduction.analysis import Analysis
from vitrail.reproduction.experiments.positions import DEFAULT, ENCODINGS, NONE, PUBLISHED, analyze, arms

SPREAD = (-0.0005, 0.0, 0.0005)


def analysis(changes: Mapping[str, float], seeds: int = 3) -> Analysis:
    """With the paper's accuracies, some of them changed; encodings that the paper has not are like 1-D."""
    means = {name: PUBLISHED.get(name, PUBLISHED[DEFAULT]) for name in ENCODINGS} | changes
    tests = {name: [mean + spread for spread in SPREAD[:seeds]] for name, mean in means.items()}
    return analyze(make_results(arms("tiny"), tests))


def outcomes(found: Analysis) -> list[str]:
    return [verdict.outcome for verdict in found.verdicts]


def test_the_paper_s_findings_are_recognized():
    assert outcomes(analysis({})) == ["holds"] * 3


def test_verdicts_flip_with_the_results():
    assert outcomes(analysis({NONE: 0.66})) == ["does not hold", "undecided", "undecided"]
    assert outcomes(analysis({"relative, layers": 0.62})) == ["holds", "does not hold", "holds"]
    assert outcomes(analysis({"1-D, layers": 0.67})) == ["holds", "holds", "does not hold"]


@pytest.mark.parametrize(("without", "explained"), [(0.5, True), (0.61382, False), (0.66, False)])
def test_a_difference_is_explained_only_if_it_is_larger_than_the_paper_s(without: float, explained: bool):
    text = analysis({NONE: without}).differences
    kinds = sum(PUBLISHED[name] for name in (DEFAULT, "2-D, stem", "relative, layers")) / 3
    assert f"minus no positions is {100 * (kinds - without):+.1f} points; in the paper it is +2.7." in text
    assert ("a patch of a digit" in text) == explained


def test_one_seed_decides_and_explains_nothing():
    found = analysis({NONE: 0.5}, seeds=1)
    assert set(outcomes(found)) == {"undecided"}
    assert "a patch of a digit" not in found.differences
