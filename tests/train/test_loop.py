"""Whole runs, short ones: what they leave behind, and that they go on where they stopped with the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from train.small_runs import (
    LENGTH,
    at_step,
    contents,
    digits,
    interrupted,
    lines,
    on_photos,
    one_thread,
    photos,
    resumed,
    same_bits,
    saved_steps,
    stop,
    trained,
    weights,
)

import vitrail
from vitrail.config import override, steps
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, TrainError
from vitrail.evaluate.scores import Scores
from vitrail.train.checkpointing import TENSORS, read_tensors
from vitrail.train.loop import FitResult
from vitrail.train.run_folder import RunFolder
from vitrail.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    """A run that nothing disturbed."""
    with one_thread():
        return trained(digits(keep="best", ema=0.8), tmp_path_factory.mktemp("whole") / "run")


def test_a_run_leaves_what_was_promised(whole: FitResult):
    folder = whole.run.path
    assert {p.name for p in folder.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint", "model"}
    assert whole.run.read_config() == whole.setup.config
    assert saved_steps(folder) == [16, 20]
    assert whole.run.finished
    assert whole.stop_reason is None


def test_each_step_is_logged_once_and_so_is_each_evaluation(whole: FitResult):
    found = lines(whole.run.path)
    assert [line["step"] for line in found if "loss" in line] == [3, 6, 9, 12, 15, 18, 20]
    assert [line["step"] for line in found if "evaluation" in line] == [5, 10, 15, 20]
    assert all(line["images"] == 64 * line["step"] for line in found)
    assert all(line["ema"] for line in found if "evaluation" in line)


@pytest.mark.parametrize("step", [1, 10, 19])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(whole: FitResult, tmp_path: Path, step: int):
    """At steps between two logged lines, too: averages since the last line are the same."""
    folder = tmp_path / "run"
    stopped = interrupted(whole.setup.config, folder, step)
    assert stopped.resume_step == step
    assert stopped.scores is None
    again = resumed(folder)
    assert again.progress.step == LENGTH
    assert lines(folder) == lines(whole.run.path)
    assert same_bits(folder, whole.run.path)
    assert again.scores is not None
    assert whole.scores is not None
    assert again.scores.top1 == whole.scores.top1
    one, other = (read_tensors(path / "checkpoint" / f"{LENGTH:08d}") for path in (folder, whole.run.path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    whole: FitResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "run"
    interrupted(whole.setup.config, folder, 14)
    assert saved_steps(folder) == [12, 14]
    file = folder / "checkpoint" / "00000014" / TENSORS
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert resumed(folder).progress.step == LENGTH
    assert "00000014 is damaged" in caplog.text
    assert "the one before it is used" in caplog.text
    assert lines(folder) == lines(whole.run.path)
    assert same_bits(folder, whole.run.path)


def test_without_a_whole_checkpoint_the_run_begins_again(
    whole: FitResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "run"
    interrupted(whole.setup.config, folder, 10)
    for state in folder.glob("checkpoint/*/state.json"):
        state.write_text("{")
    resumed(folder)
    assert "there is none before it" in caplog.text
    assert lines(folder) == lines(whole.run.path)
    assert same_bits(folder, whole.run.path)


def test_what_a_kill_left_half_written_is_swept_away(whole: FitResult, tmp_path: Path):
    folder = tmp_path / "run"
    interrupted(whole.setup.config, folder, 14)
    (folder / ".model.1a2b.tmp").mkdir()
    (folder / ".model.1a2b.tmp" / "model.safetensors").write_bytes(b"half")
    (folder / ".config.json.3c4d.tmp").write_bytes(b"half")
    resumed(folder)
    assert {p.name for p in folder.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint", "model"}


def test_images_that_came_or_went_meanwhile_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    album = photos(tmp_path / "album", {"red": 12, "green": 12})
    interrupted(on_photos(album), tmp_path / "run", 3)
    had = len(open_data(on_photos(album).data).train)
    for name in "abcdefgh":
        shutil.copy(album / "red" / "000.jpg", album / "red" / f"{name}.jpg")
    now = len(open_data(on_photos(album).data).train)
    resumed(tmp_path / "run")
    assert (
        f"the training images of {album} have changed since the start of the run ({had} then, {now} now)" in caplog.text
    )


def test_a_finished_run_is_resumed_without_harm(whole: FitResult):
    before = contents(whole.run.path)
    again = resumed(whole.run.path)
    assert again.scores is not None
    assert whole.scores is not None
    assert again.scores.to_dict() == whole.scores.to_dict()
    assert contents(whole.run.path) == before


def test_the_same_settings_give_the_same_bits_again(whole: FitResult, tmp_path: Path):
    settings = RunFolder(whole.run.path).read_config()
    trained(settings, tmp_path / "again")
    assert same_bits(tmp_path / "again", whole.run.path)
    trained(settings.replace(seed=1), tmp_path / "other")
    assert not same_bits(tmp_path / "other", whole.run.path)


def test_the_run_folder_is_a_model_that_scores_what_was_said(whole: FitResult):
    model = vitrail.load(whole.run.path)
    held = open_data(whole.setup.config.data).validation
    said = model.logits([held[i].image for i in range(len(held))], batch_size=256).argmax(1)
    right = (said == torch.as_tensor(held.targets)).double().mean()
    assert whole.scores is not None
    assert float(right) == whole.scores.top1
    assert model.labels == tuple("0123456789")
    assert whole.scores.top1 > 0.2  # it has learned something, so that the comparison says something


def test_a_run_without_a_model_says_so(whole: FitResult, tmp_path: Path):
    interrupted(whole.setup.config, tmp_path / "run", 2)
    with pytest.raises(vitrail.VitrailError, match=r"not finished and has no model yet; continue it with .*--resume"):
        vitrail.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("keep", "held_out", "best"),
    [("best", None, True), ("last", 0.1, False), ("auto", 0.1, True), ("auto", None, False)],
)
def test_the_best_or_the_last_weights_become_the_model(tmp_path: Path, keep: str, held_out: float | None, best: bool):
    """Digits have a test split: measured on that, choosing the best would be cheating, and auto does not."""
    rising_then_broken = digits(30, keep=keep, data={"held_out": held_out, "workers": 0})
    folder = tmp_path / "run"
    with at_step(12, _forget):
        result = trained(rising_then_broken, folder)
    assert result.setup.splits.eval_split == ("test" if held_out is None else "held out")
    tops = {line["step"]: line["evaluation"]["top1"] for line in lines(folder) if "evaluation" in line}
    assert max(tops, key=lambda step: tops[step]) == 10
    assert result.scores is not None
    assert result.scores.top1 == tops[10 if best else 30]
    assert (folder / "checkpoint" / "best-00000010").is_dir() is best
    if held_out is not None:  # the test images are looked at once, in the end
        tests = [line for line in lines(folder) if "test" in line]
        assert [line["model_step"] for line in tests] == [10 if best else 30]
        assert tests[0]["test"]["count"] == 359
        resumed(folder)
        assert [line for line in lines(folder) if "test" in line] == tests


def _forget(logger: object) -> None:
    """The head answers at random from here on, and never learns again."""
    trainer = logger.trainer  # type: ignore[attr-defined]
    with torch.no_grad():
        trainer.learner.net.head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(1e3)


def test_patience_stops_early_and_keeps_the_best(tmp_path: Path):
    folder = tmp_path / "run"
    with at_step(12, _forget):
        result = trained(digits(60, keep="best", patience=2), folder)
    assert (result.stop_reason, result.progress.step) == ("patience", 20)
    assert result.progress.best_step == 10
    assert result.scores is not None
    assert result.scores.top1 == result.progress.best_score
    before = weights(folder)
    again = resumed(folder)  # patience is still out
    assert (again.stop_reason, again.progress.step) == ("patience", 20)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(folder).items())
    longer = trained(override(RunFolder(folder).read_config(), ["patience=4"]), folder, resume=True)
    assert longer.progress.step == 30


def test_a_best_of_a_future_that_did_not_come_does_not_push_out_the_present(tmp_path: Path):
    """Where a run goes on from an earlier step, best weights of later ones lie there that nobody will ask for."""
    folder = tmp_path / "run"
    interrupted(digits(30, keep="best", evaluate_every="2 steps"), folder, 3)
    for later in (28, 29):
        shutil.copytree(folder / "checkpoint" / "best-00000002", folder / "checkpoint" / f"best-{later:08d}")
    with at_step(23, _forget):
        result = resumed(folder)
    tops = {line["step"]: line["evaluation"]["top1"] for line in lines(folder) if "evaluation" in line}
    assert result.progress.best_step in range(4, 23)
    assert result.scores is not None
    assert result.scores.top1 == max(tops.values())


@pytest.mark.parametrize(
    ("duration", "expected"), [("30 steps", 30), ("2 epochs", 45), ("1.5 epochs", 34), ("1k images", 16)]
)
def test_durations_have_units(tmp_path: Path, duration: str, expected: int):
    """1,438 images in batches of 64."""
    result = trained(digits(duration=duration, evaluate_every="1 epoch"), tmp_path / "run")
    assert result.progress.step == expected
    at = [line["step"] for line in lines(tmp_path / "run") if "evaluation" in line]
    assert at == sorted({*range(23, expected, 23), expected})


def test_one_step_is_a_run(tmp_path: Path):
    result = trained(digits(duration="1 image"), tmp_path / "run")
    assert result.progress.step == 1
    assert result.scores is not None


def test_a_signal_while_it_finishes_lets_it_finish_and_is_told(tmp_path: Path):
    with at_step(LENGTH, stop):
        result = trained(digits(), tmp_path / "run")
    assert result.stop_reason == "SIGTERM"
    again = resumed(tmp_path / "run")
    assert again.stop_reason is None
    assert again.run.finished


def test_a_folder_that_holds_a_run_is_refused_before_any_work(whole: FitResult, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitrail.train.loop.prepare_run", lambda *a, **k: pytest.fail("the data were opened"))
    with pytest.raises(TrainError, match=r"holds a run already \(unfinished\); resume it with --resume"):
        trained(whole.setup.config, whole.run.path)


def test_batches_that_cannot_be(tmp_path: Path):
    for settings, words in {
        "batch_size=2000": r"batch_size=2000 is more than the 1,438 images to learn from; try batch_size=719",
        "grad_accum_steps=3": r"batch_size=64 cannot be shared evenly by 1 processes in 3 parts each; try .*=66",
    }.items():
        with pytest.raises(ConfigError, match=words):
            trained(override(digits(), [settings]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_measuring_is_no_part_of_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step takes a second here, a measurement a hundred."""
    now = [0.0]
    monkeypatch.setattr("vitrail.train.run_logger.time", SimpleNamespace(monotonic=lambda: now[0]))
    for name, seconds in (("backward", 1.0), ("evaluate", 100.0)):
        real = getattr(Trainer, name)

        def slow(self, *args, real=real, seconds=seconds, **named):
            now[0] += seconds
            return real(self, *args, **named)

        monkeypatch.setattr(Trainer, name, slow)
    trained(digits(9), tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {line["images_per_s"] for line in metrics if "loss" in line} == {64.0}


def test_of_equal_scores_the_lower_loss_is_the_best_and_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    scores = [(0.5, 0.9), (1.0, 0.8), (1.0, 0.3), (1.0, 0.6), (0.9, 0.1)]
    found = [Scores(top1=s, top5=1.0, loss=loss, count=10, low=0.0, high=1.0) for s, loss in scores]
    config = digits(10, keep="best", evaluate_every=steps(2), checkpoint_every=steps(2))
    monkeypatch.setattr(Trainer, "evaluate", lambda _: found.pop(0))
    with at_step(7, stop):
        trained(config, tmp_path / "run")
    result = trained(config, tmp_path / "run", resume=True)
    assert (result.progress.best_score, result.progress.best_loss, result.progress.best_step) == (1.0, 0.3, 6)
    assert "the weights of step 6 have the best score and become the model" in caplog.text
