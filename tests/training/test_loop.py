"""Short complete runs: the files they write, and bit-for-bit identical results after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training.small_runs import (
    LENGTH,
    at_step,
    digits_config,
    file_contents,
    identical_weights,
    interrupt_run,
    logged_metrics,
    make_photos,
    model_weights,
    one_thread,
    photo_config,
    resume_run,
    saved_steps,
    send_sigterm,
    train_run,
)

import vitrail
from vitrail.config import override, steps
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, TrainError
from vitrail.evaluation.scores import Scores
from vitrail.runs.run_folder import RunFolder
from vitrail.training.checkpointing import TENSORS, read_tensors
from vitrail.training.loop import FitResult
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    """An uninterrupted run."""
    with one_thread():
        return train_run(digits_config(keep="best", ema=0.8), tmp_path_factory.mktemp("uninterrupted") / "run")


def test_run_folder_has_the_documented_files(reference_run: FitResult):
    folder = reference_run.run.path
    assert {p.name for p in folder.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint", "model"}
    assert reference_run.run.read_config() == reference_run.setup.config
    assert saved_steps(folder) == [16, 20]
    assert reference_run.run.finished
    assert reference_run.stop_reason is None


def test_steps_and_evaluations_are_logged_once(reference_run: FitResult):
    metrics = logged_metrics(reference_run.run.path)
    assert [line["step"] for line in metrics if "loss" in line] == [3, 6, 9, 12, 15, 18, 20]
    assert [line["step"] for line in metrics if "evaluation" in line] == [5, 10, 15, 20]
    assert all(line["images"] == 64 * line["step"] for line in metrics)
    assert all(line["ema"] for line in metrics if "evaluation" in line)


@pytest.mark.parametrize("step", [1, 10, 19])
def test_resumed_run_is_identical_to_an_uninterrupted_one(reference_run: FitResult, tmp_path: Path, step: int):
    """Also between two logged steps: the averages since the last logged step are restored."""
    folder = tmp_path / "run"
    stopped = interrupt_run(reference_run.setup.config, folder, step)
    assert stopped.resume_step == step
    assert stopped.scores is None
    resumed = resume_run(folder)
    assert resumed.progress.step == LENGTH
    assert logged_metrics(folder) == logged_metrics(reference_run.run.path)
    assert identical_weights(folder, reference_run.run.path)
    assert resumed.scores is not None
    assert reference_run.scores is not None
    assert resumed.scores.top1 == reference_run.scores.top1
    tensors, expected = (
        read_tensors(path / "checkpoint" / f"{LENGTH:08d}") for path in (folder, reference_run.run.path)
    )
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_previous_checkpoint_is_used_if_the_last_is_damaged(
    reference_run: FitResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "run"
    interrupt_run(reference_run.setup.config, folder, 14)
    assert saved_steps(folder) == [12, 14]
    file = folder / "checkpoint" / "00000014" / TENSORS
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert resume_run(folder).progress.step == LENGTH
    assert "00000014 is damaged" in caplog.text
    assert "the previous one is used" in caplog.text
    assert logged_metrics(folder) == logged_metrics(reference_run.run.path)
    assert identical_weights(folder, reference_run.run.path)


def test_run_restarts_without_a_valid_checkpoint(
    reference_run: FitResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "run"
    interrupt_run(reference_run.setup.config, folder, 10)
    for state in folder.glob("checkpoint/*/state.json"):
        state.write_text("{")
    resume_run(folder)
    assert "there is no previous one" in caplog.text
    assert logged_metrics(folder) == logged_metrics(reference_run.run.path)
    assert identical_weights(folder, reference_run.run.path)


def test_partial_files_of_a_killed_run_are_removed(reference_run: FitResult, tmp_path: Path):
    folder = tmp_path / "run"
    interrupt_run(reference_run.setup.config, folder, 14)
    (folder / ".model.1a2b.tmp").mkdir()
    (folder / ".model.1a2b.tmp" / "model.safetensors").write_bytes(b"half")
    (folder / ".config.json.3c4d.tmp").write_bytes(b"half")
    resume_run(folder)
    assert {p.name for p in folder.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint", "model"}


def test_added_images_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    album = make_photos(tmp_path / "album", {"red": 12, "green": 12})
    interrupt_run(photo_config(album), tmp_path / "run", 3)
    old_count = len(open_data(photo_config(album).data).train)
    for name in "abcdefgh":
        shutil.copy(album / "red" / "000.jpg", album / "red" / f"{name}.jpg")
    new_count = len(open_data(photo_config(album).data).train)
    resume_run(tmp_path / "run")
    assert (
        f"the training images of {album} have changed since the start of the run ({old_count} before, {new_count} now)"
        in caplog.text
    )


def test_resuming_a_finished_run_changes_nothing(reference_run: FitResult):
    before = file_contents(reference_run.run.path)
    resumed = resume_run(reference_run.run.path)
    assert resumed.scores is not None
    assert reference_run.scores is not None
    assert resumed.scores.to_dict() == reference_run.scores.to_dict()
    assert file_contents(reference_run.run.path) == before


def test_same_settings_give_identical_weights(reference_run: FitResult, tmp_path: Path):
    settings = RunFolder(reference_run.run.path).read_config()
    train_run(settings, tmp_path / "again")
    assert identical_weights(tmp_path / "again", reference_run.run.path)
    train_run(settings.replace(seed=1), tmp_path / "other")
    assert not identical_weights(tmp_path / "other", reference_run.run.path)


def test_run_folder_loads_as_a_model_with_the_reported_accuracy(reference_run: FitResult):
    model = vitrail.load(reference_run.run.path)
    validation = open_data(reference_run.setup.config.data).validation
    predicted = model.logits([validation[i].image for i in range(len(validation))], batch_size=256).argmax(1)
    accuracy = (predicted == torch.as_tensor(validation.targets)).double().mean()
    assert reference_run.scores is not None
    assert float(accuracy) == reference_run.scores.top1
    assert model.labels == tuple("0123456789")
    assert reference_run.scores.top1 > 0.2  # better than chance, so that the comparison is meaningful


def test_unfinished_run_cannot_be_loaded(reference_run: FitResult, tmp_path: Path):
    interrupt_run(reference_run.setup.config, tmp_path / "run", 2)
    with pytest.raises(vitrail.VitrailError, match=r"not finished and has no model yet; continue it with .*--resume"):
        vitrail.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("keep", "held_out", "best"),
    [("best", None, True), ("last", 0.1, False), ("auto", 0.1, True), ("auto", None, False)],
)
def test_model_has_the_best_or_the_last_weights(tmp_path: Path, keep: str, held_out: float | None, best: bool):
    """keep=auto never chooses the best weights by the test split, which digits have."""
    config = digits_config(30, keep=keep, data={"held_out": held_out, "workers": 0})
    folder = tmp_path / "run"
    with at_step(12, _randomize_head):
        result = train_run(config, folder)
    assert result.setup.splits.eval_split == ("test" if held_out is None else "held out")
    accuracies = {line["step"]: line["evaluation"]["top1"] for line in logged_metrics(folder) if "evaluation" in line}
    assert max(accuracies, key=lambda step: accuracies[step]) == 10
    assert result.scores is not None
    assert result.scores.top1 == accuracies[10 if best else 30]
    assert (folder / "checkpoint" / "best-00000010").is_dir() is best
    if held_out is not None:  # the test images are evaluated once, at the end
        tests = [line for line in logged_metrics(folder) if "test" in line]
        assert [line["model_step"] for line in tests] == [10 if best else 30]
        assert tests[0]["test"]["count"] == 359
        resume_run(folder)
        assert [line for line in logged_metrics(folder) if "test" in line] == tests


def _randomize_head(logger: object) -> None:
    """Replace the head's weights by large random values."""
    trainer = logger.trainer  # type: ignore[attr-defined]
    with torch.no_grad():
        trainer.objective.net.head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(1e3)


def test_patience_stops_early_and_keeps_the_best_weights(tmp_path: Path):
    folder = tmp_path / "run"
    with at_step(12, _randomize_head):
        result = train_run(digits_config(60, keep="best", patience=2), folder)
    assert (result.stop_reason, result.progress.step) == ("patience", 20)
    assert result.progress.best_step == 10
    assert result.scores is not None
    assert result.scores.top1 == result.progress.best_score
    before = model_weights(folder)
    resumed = resume_run(folder)  # patience is still used up
    assert (resumed.stop_reason, resumed.progress.step) == ("patience", 20)
    assert all(torch.equal(before[name], tensor) for name, tensor in model_weights(folder).items())
    extended = train_run(override(RunFolder(folder).read_config(), ["patience=4"]), folder, resume=True)
    assert extended.progress.step == 30


def test_best_weights_of_later_steps_are_ignored_after_a_resume(tmp_path: Path):
    """A run that resumes at an earlier step may find best weights of later steps in its folder."""
    folder = tmp_path / "run"
    interrupt_run(digits_config(30, keep="best", evaluate_every="2 steps"), folder, 3)
    for later in (28, 29):
        shutil.copytree(folder / "checkpoint" / "best-00000002", folder / "checkpoint" / f"best-{later:08d}")
    with at_step(23, _randomize_head):
        result = resume_run(folder)
    accuracies = {line["step"]: line["evaluation"]["top1"] for line in logged_metrics(folder) if "evaluation" in line}
    assert result.progress.best_step in range(4, 23)
    assert result.scores is not None
    assert result.scores.top1 == max(accuracies.values())


@pytest.mark.parametrize(
    ("duration", "expected"), [("30 steps", 30), ("2 epochs", 45), ("1.5 epochs", 34), ("1k images", 16)]
)
def test_durations_have_units(tmp_path: Path, duration: str, expected: int):
    """1,438 images in batches of 64."""
    result = train_run(digits_config(duration=duration, evaluate_every="1 epoch"), tmp_path / "run")
    assert result.progress.step == expected
    evaluated_steps = [line["step"] for line in logged_metrics(tmp_path / "run") if "evaluation" in line]
    assert evaluated_steps == sorted({*range(23, expected, 23), expected})


def test_run_of_one_step(tmp_path: Path):
    result = train_run(digits_config(duration="1 image"), tmp_path / "run")
    assert result.progress.step == 1
    assert result.scores is not None


def test_signal_at_the_last_step_is_reported_as_the_stop_reason(tmp_path: Path):
    with at_step(LENGTH, send_sigterm):
        result = train_run(digits_config(), tmp_path / "run")
    assert result.stop_reason == "SIGTERM"
    resumed = resume_run(tmp_path / "run")
    assert resumed.stop_reason is None
    assert resumed.run.finished


def test_folder_with_a_run_is_refused_before_any_work(reference_run: FitResult, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitrail.training.loop.prepare_run", lambda *a, **k: pytest.fail("the data were opened"))
    with pytest.raises(TrainError, match=r"already contains a run \(unfinished\); resume it with --resume"):
        train_run(reference_run.setup.config, reference_run.run.path)


def test_impossible_batch_sizes_are_refused(tmp_path: Path):
    for settings, message in {
        "batch_size=2000": r"batch_size=2000 is more than the 1,438 training images; try batch_size=719",
        "grad_accum_steps=3": r"batch_size=64 cannot be divided evenly among 1 processes with 3 parts each; try .*=66",
    }.items():
        with pytest.raises(ConfigError, match=message):
            train_run(override(digits_config(), [settings]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_evaluation_time_is_excluded_from_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step takes 1 s of the simulated clock, an evaluation 100 s."""
    now = [0.0]
    monkeypatch.setattr("vitrail.training.run_logger.time", SimpleNamespace(monotonic=lambda: now[0]))
    for name, seconds in (("backward", 1.0), ("evaluate", 100.0)):
        original = getattr(Trainer, name)

        def advance_clock(self, *args, original=original, seconds=seconds, **options):
            now[0] += seconds
            return original(self, *args, **options)

        monkeypatch.setattr(Trainer, name, advance_clock)
    train_run(digits_config(9), tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {line["images_per_s"] for line in metrics if "loss" in line} == {64.0}


def test_lower_loss_breaks_ties_between_equal_scores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    scores = [(0.5, 0.9), (1.0, 0.8), (1.0, 0.3), (1.0, 0.6), (0.9, 0.1)]
    evaluations = [Scores(top1=s, top5=1.0, loss=loss, count=10, low=0.0, high=1.0) for s, loss in scores]
    config = digits_config(10, keep="best", evaluate_every=steps(2), checkpoint_every=steps(2))
    monkeypatch.setattr(Trainer, "evaluate", lambda _: evaluations.pop(0))
    with at_step(7, send_sigterm):
        train_run(config, tmp_path / "run")
    result = train_run(config, tmp_path / "run", resume=True)
    assert (result.progress.best_score, result.progress.best_loss, result.progress.best_step) == (1.0, 0.3, 6)
    assert "the weights of step 6 have the best score and become the model" in caplog.text
