"""The recorded results: the pages of docs/results are those of recorded.json, and the overview has all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT

from vitrail.reproduction.experiment_list import recorded_results
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.results import Results, TrialResult

PAGES = ROOT / "docs" / "results"
RECORDED = recorded_results()


def test_every_experiment_is_recorded():
    assert set(RECORDED) == set(EXPERIMENTS)


def test_there_is_a_page_for_each_recorded_experiment_and_no_other():
    assert {path.stem for path in PAGES.glob("*.md")} == {"README", *RECORDED}


@pytest.mark.parametrize("name", RECORDED)
def test_page_and_overview_have_the_recorded_verdicts(name: str):
    page, overview = (PAGES / f"{name}.md").read_text(), (PAGES / "README.md").read_text()
    found = max(RECORDED[name].values(), key=lambda record: ["tiny", "gpu", "paper"].index(record["scale"]))
    assert found["verdicts"]
    for verdict in found["verdicts"]:
        row = f"| **{verdict['outcome']}** | {verdict['claim']} | {verdict['reason']} |"
        assert row.replace("|", "") in page.replace("\\|", "").replace("|", "")
        assert f"- **{verdict['outcome']}**: {verdict['claim']} {verdict['reason']}" in overview
    assert f"`{found['command']}`" in page


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_are_complete_and_used_the_plain_command(name: str):
    for scale, found in RECORDED[name].items():
        assert found["finished"] == found["total"]
        assert found["command"].startswith(f"vitrail reproduce {name} --scale {scale}")


NEEDS_PREDICTIONS = "A student of a convnet agrees with it more often"
"""How the verdict begins that needs the predicted classes, which are not in the repository."""


@pytest.mark.parametrize("path", sorted(PAGES.glob("runs/*.json")), ids=lambda path: path.stem)
def test_recorded_verdicts_follow_from_the_recorded_runs(path: Path):
    found = json.loads(path.read_text())
    experiment, scale = EXPERIMENTS[found["experiment"]], found["scale"]
    trials = [TrialResult(**trial) for trial in found["trials"]]
    analysis = experiment.analyze(Results(experiment.arms(scale, None), scale, trials))
    verdicts = [
        {"claim": v.claim, "outcome": v.outcome, "reason": v.reason}
        for v in analysis.verdicts
        if not v.claim.startswith(NEEDS_PREDICTIONS)
    ]
    recorded = RECORDED[found["experiment"]][scale]["verdicts"]
    assert verdicts == [v for v in recorded if not v["claim"].startswith(NEEDS_PREDICTIONS)]
