"""The recorded results: the pages of docs/results are those of recorded.json, and the overview has all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT

from vitrail.reproduction.analysis import Analysis, Paragraph
from vitrail.reproduction.experiment_list import catalog, recorded_results
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.results import Results, TrialResult

PAGES = ROOT / "docs" / "results"
RECORDED = recorded_results()


def largest_scale(name: str) -> str:
    return next(scale for scale in ("paper", "gpu", "tiny") if scale in RECORDED[name])


def test_every_experiment_is_recorded():
    assert set(RECORDED) == set(EXPERIMENTS)


def test_there_is_a_page_for_each_recorded_experiment_and_no_other():
    assert {path.stem for path in PAGES.glob("*.md")} == {"README", *RECORDED}


@pytest.mark.parametrize("name", RECORDED)
def test_page_and_overview_have_the_recorded_verdicts(name: str):
    page, overview = (PAGES / f"{name}.md").read_text(), (PAGES / "README.md").read_text()
    found = RECORDED[name][largest_scale(name)]
    assert found["verdicts"]
    for verdict in found["verdicts"]:
        row = f"| **{verdict['outcome']}** | {verdict['claim']} | {verdict['reason']} |"
        assert row.replace("|", "") in page.replace("\\|", "").replace("|", "")
        assert f"- **{verdict['outcome']}**: {verdict['claim']} {verdict['reason']}" in overview
    assert f"`{found['command']}`" in page


def test_the_list_has_the_summary_of_each_scale_and_the_verdicts_of_the_largest():
    marks = {"holds": "✓", "does not hold": "✗", "undecided": "?"}
    for entry in catalog():
        found = RECORDED[entry.name]
        largest = found[largest_scale(entry.name)]
        assert entry.result.split("\n") == [
            *(f"{scale}, {record['data']}: {record['summary']}" for scale, record in found.items()),
            *(f"{marks[verdict['outcome']]} {verdict['claim']}" for verdict in largest["verdicts"]),
        ]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_are_complete_and_used_the_plain_command(name: str):
    for scale, found in RECORDED[name].items():
        assert found["finished"] == found["total"]
        assert found["command"].startswith(f"vitrail reproduce {name} --scale {scale}")


NEEDS_PREDICTIONS = "A student of a convnet agrees with it more often"
"""How the verdict begins that needs the predicted classes, which are not in the repository."""


def analyze_runs(path: Path) -> Analysis:
    """The analysis of recorded runs, without their arrays."""
    found = json.loads(path.read_text())
    experiment, scale = EXPERIMENTS[found["experiment"]], found["scale"]
    trials = [TrialResult(**trial) for trial in found["trials"]]
    return experiment.analyze(Results(experiment.arms(scale, None), scale, trials))


@pytest.mark.parametrize("path", sorted(PAGES.glob("runs/*.json")), ids=lambda path: path.stem)
def test_recorded_verdicts_follow_from_the_recorded_runs(path: Path):
    analysis = analyze_runs(path)
    verdicts = [
        {"claim": v.claim, "outcome": v.outcome, "reason": v.reason}
        for v in analysis.verdicts
        if not v.claim.startswith(NEEDS_PREDICTIONS)
    ]
    name, _, scale = path.stem.rpartition("-")
    recorded = RECORDED[name][scale]["verdicts"]
    assert verdicts == [v for v in recorded if not v["claim"].startswith(NEEDS_PREDICTIONS)]


@pytest.mark.parametrize("name", RECORDED)
def test_the_text_of_a_page_is_that_of_its_analysis(name: str):
    page, scale = (PAGES / f"{name}.md").read_text(), largest_scale(name)
    analysis = analyze_runs(PAGES / "runs" / f"{name}-{scale}.json")
    assert analysis.agreement in page
    assert analysis.differences in page
    for block in analysis.blocks:
        text = block.text if isinstance(block, Paragraph) else block.caption
        assert text in page
