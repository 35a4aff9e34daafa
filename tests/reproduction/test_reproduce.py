"""`reproduce`: continued after SIGKILL, in parts that are joined, and refused where results would be mixed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reproduction import small_experiment
from reproduction.conftest import run_inline
from reproduction.small_experiment import LENGTH, RATES
from training.commands import Commands

import vitrail
from vitrail.errors import ConfigError, NotFoundError, TrainError
from vitrail.reproduction import worker
from vitrail.reproduction.cost import CostModel
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.reproduce import Reproduction, Status, reproduce
from vitrail.reproduction.session import Request, open_session
from vitrail.runs.run_folder import RunFolder

SCRIPT = Path(small_experiment.__file__)
Run = Callable[..., Reproduction]


def contents(out: Path) -> dict[str, Any]:
    """results.json without measured times."""
    found = json.loads((out / "results.json").read_text())
    for part in (found, *found["trials"]):
        assert part.pop("seconds") > 0
    for trial in found["trials"]:
        assert trial.pop("measure_seconds") >= 0
    return found


def finished(out: Path) -> set[str]:
    """Keys of the trials with a result."""
    return {path.stem for path in (out / "trials").glob("*.json")}


def times(out: Path, keys: set[str]) -> dict[Path, int]:
    """When each file of these trials was written."""
    trials = [path for key in keys for path in [out / "trials" / f"{key}.json", *(out / "trials" / key).rglob("*")]]
    return {path: path.stat().st_mtime_ns for path in trials if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole experiment, run without an interruption."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_inline(monkeypatch)
        return reproduce("small", scale="tiny", device="cpu", out=tmp_path_factory.mktemp("whole") / "out").out


def test_killed_and_continued_experiment_has_the_results_of_an_uninterrupted_one(
    commands: Commands, whole: Path, tmp_path: Path
):
    out = tmp_path / "killed"
    request = json.dumps({"out": str(out)})

    def interrupted_trials() -> list[Path]:
        found = out.glob("trials/*/checkpoint/*/state.json")
        return [path for path in found if path.parents[2].name not in finished(out)]

    before: dict[Path, int] = {}
    for count in (1, 6):
        running = commands.start(request, folder=tmp_path, script=SCRIPT)
        running.wait_until(lambda count=count: len(finished(out)) >= count and interrupted_trials())
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait().status == 128 + signal.SIGKILL
        assert times(out, finished(out)).items() >= before.items()
        before = times(out, finished(out))
    kept = finished(out)
    last = commands.run(request, folder=tmp_path, script=SCRIPT)
    assert last.status == 0, last.err
    run_again = {json.loads(line)["key"] for line in last.out.splitlines()}
    assert run_again == finished(out) - kept
    assert times(out, kept) == before
    assert contents(out) == contents(whole)


def test_finished_trials_are_not_run_again(reproduce_small: Run, whole: Path, tmp_path: Path):
    newest: list[str] = []

    def note(status: Status) -> None:
        newest.extend([status.newest.key] if status.newest else [])

    shutil.copytree(whole, tmp_path / "out")
    before = times(tmp_path / "out", finished(tmp_path / "out"))
    again = reproduce_small("out", on_progress=note)
    assert newest == []
    assert (again.finished, again.total) == (11, 11)
    assert times(again.out, finished(again.out)) == before
    assert contents(again.out) == contents(whole)
    more = reproduce_small("out", seeds=3, on_progress=note)
    assert (more.finished, more.total) == (14, 14)
    assert {key[-5:] for key in newest} == {"seed2"}
    assert times(again.out, finished(whole)) == before


def test_joined_parts_have_the_results_of_the_whole(reproduce_small: Run, whole: Path, tmp_path: Path):
    parts = [reproduce_small(f"part {number}", part=f"{number}/2") for number in (1, 2)]
    assert all(part.finished < part.total == 11 for part in parts)
    assert all(part.left_out == "the arms of the other 1 part" for part in parts)
    keys = [finished(part.out) for part in parts]
    assert set.union(*keys) == finished(whole)
    before = [times(part.out, key) for part, key in zip(parts, keys, strict=True)]
    started: list[float] = []
    joined = reproduce_small(
        "joined", join=[part.out for part in parts], on_progress=lambda status: started.extend(status.running.values())
    )
    assert started == []
    assert contents(joined.out) == contents(whole)
    assert (joined.finished, joined.total, joined.left_out) == (11, 11, None)
    assert [times(part.out, key) for part, key in zip(parts, keys, strict=True)] == before
    again = reproduce_small("part 1", join=[tmp_path / "part 2"])
    assert contents(again.out) == contents(whole)


def test_parts_are_the_same_on_every_machine_and_after_an_interruption(
    small: None, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def parts(out: Path) -> list[list[str]]:
        requests = [Request(name="small", scale="tiny", out=out, part=f"{number}/2") for number in (1, 2)]
        return [[arm.name for arm in open_session(request).plan.arms] for request in requests]

    new = parts(tmp_path)
    assert new == [["base", "no positions", "once"], ["base", "tuned"]]
    for path in whole.glob("trials/*.json"):  # measured durations in which the last arms are the most expensive
        found = json.loads(path.read_text())
        seconds = 1000.0 if found["arm"] in ("tuned", "once") else 0.1
        (tmp_path / "trials").mkdir(exist_ok=True)
        (tmp_path / "trials" / path.name).write_text(json.dumps(found | {"seconds": seconds}))
    assert parts(tmp_path) == new
    monkeypatch.setattr(Request, "estimated_device", "cuda")
    assert parts(tmp_path) == new


def test_results_of_other_settings_are_refused(reproduce_small: Run, tmp_path: Path):
    reproduce_small("out", overrides=["duration=2 steps"], budget_s=10_000.0, seeds=1)
    before = times(tmp_path / "out", finished(tmp_path / "out"))
    with pytest.raises(
        TrainError, match=r"is the result of other settings \(.*\); choose another folder with --out\.$"
    ):
        reproduce_small("out", overrides=["duration=3 steps"])
    assert times(tmp_path / "out", finished(tmp_path / "out")) == before


def test_joined_results_of_other_settings_are_refused_and_not_copied(reproduce_small: Run, tmp_path: Path):
    reproduce_small("other", overrides=["duration=2 steps"], seeds=1)
    mine = reproduce_small("mine", overrides=["duration=1 steps"], seeds=1, part="1/2")
    before = sorted((mine.out / "trials").rglob("*"))
    with pytest.raises(TrainError, match=r"other.*is the result of other settings .*join folders of the same"):
        reproduce_small("mine", overrides=["duration=1 steps"], seeds=1, join=[tmp_path / "other"])
    assert sorted((mine.out / "trials").rglob("*")) == before
    assert reproduce_small("mine", overrides=["duration=1 steps"], seeds=1).finished == 8


def test_a_folder_without_trials_cannot_be_joined(reproduce_small: Run, tmp_path: Path):
    with pytest.raises(NotFoundError, match=r"empty has no finished trials to join"):
        reproduce_small("out", join=[tmp_path / "empty"])


def test_a_second_process_in_the_same_folder_is_refused(
    commands: Commands, reproduce_small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vitrail.reproduction.reproduce.LOCK_TIMEOUT_S", 0.1)
    out = tmp_path / "out"
    request = json.dumps({"out": str(out), "overrides": ["duration=100000 steps"]})
    first = commands.start(request, folder=tmp_path, script=SCRIPT)
    first.wait_until(lambda: list(out.glob("trials/*")))  # before the workers have started
    with pytest.raises(TrainError, match=r"another process is running the experiment in .*out; wait until it ends"):
        reproduce_small("out")
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait().status == 128 + signal.SIGKILL
    assert reproduce_small("out", overrides=["duration=1 steps"], seeds=1).finished == 8  # the lock ended with it


def test_a_budget_leaves_out_and_a_later_call_runs_the_rest(reproduce_small: Run):
    short = ["duration=1 steps"]
    few = reproduce_small("out", overrides=short, budget_s=6.0, jobs=1)
    assert few.left_out is not None
    assert few.left_out.startswith("the budget allows 1 learning rate, 1 seed; without ")
    assert 0 < few.finished < few.total == 11
    assert few.left_out in (few.out / "page.md").read_text()
    rest = reproduce_small("out", overrides=short)
    assert (rest.finished, rest.left_out) == (11, None)


def test_a_budget_compares_arms_by_the_same_number_of_learning_rates(reproduce_small: Run):
    """Also if an earlier call was interrupted while some arms had tried more."""
    done = reproduce_small("out", overrides=["duration=1 steps"], seeds=1)
    for key in ("no-positions-lr0.003-seed0", "tuned-lr0.003-seed0", "once-lr0.003-seed0"):
        (done.out / "trials" / f"{key}.json").unlink()
    path = done.out / "trials" / "base-lr0.003-seed0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"validation": 1.0}))
    few = reproduce_small("out", overrides=["duration=1 steps"], seeds=1, budget_s=1e-3)
    assert (few.left_out or "").startswith("the budget allows 1 of 2 learning rates, 1 of 1 seeds")
    assert {arm: few.results.selected_rate(arm) for arm in few.results.arms} == dict.fromkeys(few.results.arms, 1e-2)
    assert (few.finished, few.total) == (5, 8)


def test_children_start_from_the_model_of_their_parent(whole: Path):
    trials = {key: json.loads((whole / "trials" / f"{key}.json").read_text()) for key in finished(whole)}
    validation = {trial["lr"]: trial["validation"] for key, trial in trials.items() if key.startswith("base-")}
    rate = max(RATES, key=lambda lr: validation[lr])
    for key, trial in trials.items():
        config = RunFolder(whole / "trials" / key).read_config()
        assert (config.seed, config.optim.lr) == (trial["seed"], trial["lr"])
        assert key.endswith(f"-lr{config.optim.lr:g}-seed{config.seed}")
        if trial["arm"] in ("tuned", "once"):
            assert config.init_from == str(whole / "trials" / f"base-lr{rate:g}-seed{config.seed}" / "model")


def test_results_are_those_of_the_runs(whole: Path):
    for key in finished(whole):
        trial, run = json.loads((whole / "trials" / f"{key}.json").read_text()), whole / "trials" / key
        assert trial["images"] == LENGTH * 64
        assert (trial["test_count"], trial["validation_count"]) == (359, 287)
        assert list(trial["measures"]) == (["5-shot"] if trial["arm"] == "base" else [])
        assert not (run / "checkpoint").exists()
        scores = json.loads((run / "result.json").read_text())
        assert trial["validation"] == pytest.approx(scores["scores"]["top1"])
        assert trial["test"] == pytest.approx(scores["test"]["top1"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds=0: expected at least 1"),
        ({"jobs": 0}, "jobs=0: expected at least 1"),
        ({"budget_s": 0.0}, "the budget must be a positive duration"),
        ({"budget_s": 0.5}, "no run fits into the budget"),
        ({"part": "3/2"}, "--part 3/2: expected I/N"),
        ({"overrides": ["optim.lr=1"]}, "optim.lr is set by the experiment"),
        ({"overrides": ["seed=1"]}, "seed is set by the experiment"),
        ({"scale": "gpu"}, "--scale gpu takes hours without a GPU"),
    ],
)
def test_invalid_requests_are_refused_before_anything_runs(
    reproduce_small: Run, tmp_path: Path, options: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        reproduce_small("out", **options)
    assert not list((tmp_path / "out").glob("trials/*/config.json"))


def test_an_unknown_experiment_suggests_a_name(tmp_path: Path):
    with pytest.raises(NotFoundError, match=r"unknown experiment 'position'.*did you mean 'positions'"):
        reproduce("position", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_progress_counts_trials_up_to_the_plan(reproduce_small: Run):
    seen: list[Status] = []
    reproduce_small("out", seeds=1, overrides=["duration=2 steps"], on_progress=seen.append)
    counts = [status.finished for status in seen]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 8)
    assert {status.total for status in seen} == {8}
    assert all(0 <= fraction <= 1 for status in seen for fraction in status.running.values())
    left = [status.seconds_left for status in seen]
    assert all(seconds is not None and seconds >= 0 for seconds in left)
    assert left[-1] == pytest.approx(0.0, abs=1e-6)


def test_models_of_a_superseded_parent_are_trained_again(reproduce_small: Run, tmp_path: Path):
    overrides = ["duration=2 steps"]
    done = reproduce_small("out", seeds=1, overrides=overrides)
    parent = f"base-lr{done.results.selected_rate('base'):g}-seed0"
    before = {t.key: t for t in done.results.trials.values() if t.arm in ("tuned", "once")}
    assert {trial.parent for trial in before.values()} == {parent}
    for path in (tmp_path / "out" / "trials").glob("base-*.json"):
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"validation": 0.0 if path.stem == parent else 1.0}))
    again = reproduce_small("out", seeds=1, overrides=overrides)
    other = f"base-lr{again.results.selected_rate('base'):g}-seed0"
    assert other != parent
    after = {t.key: t for t in again.results.trials.values() if t.arm in ("tuned", "once")}
    assert after.keys() == before.keys()
    assert {trial.parent for trial in after.values()} == {other}
    assert (tmp_path / "out" / "trials" / next(iter(after)) / "parent.txt").read_text() == other


def test_no_trial_is_started_when_the_time_is_over(reproduce_small: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CostModel, "of_unfinished", lambda *_: 0.0)  # everything seems to fit
    done = reproduce_small("out", seeds=1, budget_s=1e-6)
    assert (done.finished, done.left_out) == (0, "the time was over")


def test_a_diverged_run_is_a_result_and_its_learning_rate_is_not_selected(reproduce_small: Run, monkeypatch):
    arms = small_experiment.arms("tiny")
    wild = replace(arms[0], learning_rates=(1e-2, 1e30), measures=())
    monkeypatch.setitem(
        EXPERIMENTS, "small", replace(small_experiment.SMALL, arms=lambda scale, data: [wild, *arms[1:]])
    )
    done = reproduce_small("out")
    assert (done.finished, done.total) == (11, 11)
    diverged = {key: trial for key, trial in done.results.trials.items() if trial.diverged}
    assert list(diverged) == ["base-lr1e+30-seed0"]
    assert diverged["base-lr1e+30-seed0"].test is None
    assert done.results.selected_rate("base") == 1e-2
    assert "| Diverged | base-lr1e+30-seed0;" in (done.out / "page.md").read_text()


def test_results_of_a_gpu_are_joined_on_a_machine_without_one(
    reproduce_small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vitrail.reproduction.session.Request.device_kind", "cuda")
    monkeypatch.setattr("vitrail.reproduction.session.Request.num_jobs", 1)
    trained = reproduce_small("trained", scale="gpu")
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as again:
        again.setitem(EXPERIMENTS, "small", small_experiment.SMALL)
        joined = reproduce("small", scale="gpu", device="cpu", out=tmp_path / "joined", join=[trained.out])
    assert (joined.finished, joined.total) == (11, 11)
    assert contents(joined.out) == contents(trained.out)


def test_an_unfinished_run_that_was_moved_continues_from_its_parents_new_place(tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    config = small_experiment.arms("tiny")[2].config
    run.write_config(config.replace(init_from="/old/place/model"))
    worker._update_paths(run.path, config.replace(init_from="/new/place/model"))
    assert run.read_config() == config.replace(init_from="/new/place/model")


def test_the_page_names_the_versions_that_ran_the_trials(whole: Path):
    installed = f"vitrail {vitrail.__version__}, PyTorch {torch.__version__.partition('+')[0]}"
    assert {trial["versions"] for trial in contents(whole)["trials"]} == {installed}
    assert f"| Versions | {installed}, 20" in (whole / "page.md").read_text()
