"""`vitrail reproduce`: the list, the dry run, results and errors."""

from __future__ import annotations

import json

import pytest

from vitrail.cli.options import parse_time
from vitrail.errors import ConfigError
from vitrail.reproduction.experiments import EXPERIMENTS


def test_list_names_every_experiment_with_claim_cost_and_result(vitrail):
    entries = json.loads(vitrail("reproduce", "--list", "--json").out)
    assert [entry["name"] for entry in entries] == list(EXPERIMENTS)
    assert all(entry[field] for entry in entries for field in ("claim", "source", "cost", "result"))
    table = vitrail("reproduce", "--list").out
    assert all(name in table for name in EXPERIMENTS)
    assert "✓ Positions matter" in table


def test_dry_run_states_the_plan_and_writes_nothing(vitrail, tmp_path):
    options = ("reproduce", "positions", "--scale", "tiny", "--device", "cpu", "--out", tmp_path / "out")
    report = json.loads(vitrail(*options, "--dry-run", "--json").out)
    assert (report["arms"], report["trials"], report["finished"]) == (10, 10 * 3 + 10 * 2, 0)
    assert report["num_images"] == 1438
    assert report["problems"] == []
    assert 0 < report["memory"] < 1e9
    assert not (tmp_path / "out").exists()


def test_dry_run_of_the_papers_scale_fails_for_want_of_the_data(vitrail, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = vitrail("reproduce", "positions", "--scale", "paper", "--dry-run", "--json")
    report = json.loads(result.out)
    assert result.status == 1
    assert report["num_images"] == 14_000_000
    assert report["seconds"] > 30 * 86400
    assert report["problems"] == [
        "no shard imagenet21k-train-0000.tar. The data of this scale is shards:imagenet21k-train-{0000..2047}.tar; "
        "--data names other data."
    ]
    run = vitrail("reproduce", "positions", "--scale", "paper")
    assert run.status == 1
    assert "no shard" in run.err


def test_dry_run_of_the_gpu_scale_needs_a_gpu(vitrail):
    options = ("reproduce", "positions", "--scale", "gpu", "--data", "digits", "--device", "cpu", "--dry-run", "--json")
    result = vitrail(*options)
    assert result.status == 1
    assert json.loads(result.out)["problems"] == [
        "--scale gpu takes hours without a GPU; try --scale tiny, or --device."
    ]


def test_dry_run_of_a_part_that_is_empty_is_refused(vitrail):
    result = vitrail("reproduce", "inside", "--scale", "tiny", "--device", "cpu", "--part", "2/2", "--dry-run")
    assert (result.status, "inside has at most 1 part." in result.err) == (1, True)


def test_result_has_the_verdicts_and_the_page(vitrail, tmp_path):
    options = ("reproduce", "positions", "--scale", "tiny", "--device", "cpu", "--out", tmp_path / "out")
    result = vitrail(*options, "--seeds", "1", "--part", "3/10", "--jobs", "1", "duration=1 step")
    assert result.status == 0, result.err
    assert "1 of 3 runs" in result.err
    assert "undecided" in result.out
    assert "3 of 30 runs; the arms of the other 9 parts" in result.out
    assert (tmp_path / "out" / "index.html").exists()
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (report["finished"], report["total"]) == (3, 30)
    assert report["command"].startswith("vitrail")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected one experiment, got 0"),
        ("positions pooling", "expected one experiment, got 2"),
        ("positons", "unknown experiment 'positons'; did you mean 'positions'?"),
        ("positions --scale small", "unknown scale 'small'; available: gpu, paper, tiny."),
        ("positions --budget 5x", "--budget expects a duration such as 25min or 1.5h, got '5x'."),
        ("positions --budget=-5min", "--budget expects a duration such as 25min or 1.5h, got '-5min'."),
        ("positions --budget 0s", "the budget must be a positive duration, such as 25min."),
        ("positions --part 12/12", "--part 12/12: nothing is left for it; positions has at most 10 parts."),
        ("positions --part 4/3", "--part 4/3: expected I/N with I from 1 to N, such as 2/3."),
        ("positions optim.lr=1", "optim.lr is set by the experiment"),
        ("positions --join nowhere", "nowhere has no finished trials to join."),
        ("positions --budget 1s", "no run fits into the budget of 1 s; the first arm takes about "),
        ("positions modle.width=3", "did you mean 'model.width'?"),
        ("positions --data nowhere", "nowhere"),
        ("positions --scale gpu", "--scale gpu takes hours without a GPU; try --scale tiny, or --device."),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(vitrail, tmp_path, arguments, message):
    scale = () if "--scale" in arguments else ("--scale", "tiny")
    result = vitrail("reproduce", *arguments.split(), *scale, "--device", "cpu", "--out", tmp_path / "out")
    assert result.status == 1
    assert message in result.err
    assert not list(tmp_path.rglob("trials"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("25min", 1500), ("1.5h", 5400), ("1h30min", 5400), ("2 h", 7200), ("1d", 86400)]
)
def test_parse_time(text, seconds):
    assert parse_time(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "5", "min", "5 minutes", "-5min", "5m", "5min extra", "h5"])
def test_parse_time_refuses_other_text(text):
    with pytest.raises(ConfigError, match="--budget expects"):
        parse_time(text, "--budget")
