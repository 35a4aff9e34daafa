"""Masked-patch runs: training without labels, evaluation on held-out images, and the saved model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training.small_objective import SINGLE_PROCESS
from training.small_runs import (
    identical_weights,
    interrupt_run,
    logged_metrics,
    make_photos,
    photo_config,
    resume_run,
    train_run,
)

import vitrail
from vitrail.config import override
from vitrail.errors import DataError
from vitrail.training.setup import prepare_run
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.mark.parametrize("target", ["mean-color", "pixels"])
def test_masked_patch_run_trains_resumes_and_loads(images: Path, tmp_path: Path, target: str):
    config = override(photo_config(images, 8), ["objective=masked-patch", f"masked_patch.target={target}"])
    uninterrupted = train_run(config, tmp_path / "uninterrupted")
    interrupt_run(config, tmp_path / "interrupted", 3)
    resume_run(tmp_path / "interrupted")
    assert uninterrupted.scores is None
    assert identical_weights(tmp_path / "uninterrupted", tmp_path / "interrupted")
    loaded = vitrail.load(tmp_path / "uninterrupted")
    assert loaded.embed(images / "red" / "000.jpg").shape == (1, 16)
    with pytest.raises(vitrail.VitrailError, match="has no classes"):
        loaded.predict(images / "red" / "000.jpg")
    tuned = train_run(
        photo_config(images, 3, init_from=str(tmp_path / "uninterrupted"), model=None), tmp_path / "tuned"
    )
    assert tuned.setup.info.labels == ("blue", "green", "red")


def unlabeled(folder: Path, kind: str) -> str:
    """Data spec of unlabeled images, as a folder or as a table."""
    make_photos(folder / "flat", {"": 40})
    if kind == "folder":
        return f"folder:{folder / 'flat'}"
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.jpg"))
    (folder / "names.csv").write_text("\n".join(["path", *names]))
    return f"table:{folder / 'names.csv'}"


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_masked_patch_run_needs_no_labels(tmp_path: Path, kind: str):
    source = unlabeled(tmp_path, kind)
    config = override(photo_config(tmp_path, 6), [f"data.source={source}", "optim.lr=1e-2"])
    with pytest.raises(DataError, match=r"no class folders|no label column"):
        train_run(config, tmp_path / "classes")
    result = train_run(override(config, ["objective=masked-patch"]), tmp_path / "run")
    splits = result.setup.splits
    assert len(splits.train) + len(splits.validation) == 40
    assert vitrail.load(tmp_path / "run").embed(tmp_path / "flat" / "000.jpg").shape == (1, 16)


def test_masked_patch_run_is_evaluated_on_held_out_images(images: Path, tmp_path: Path):
    settings = ["objective=masked-patch", "optim.lr=1e-2", "evaluate_every=3 steps", "keep=best"]
    result = train_run(override(photo_config(images, 12), settings), tmp_path / "run")
    evaluations = {
        line["step"]: line["evaluation"] for line in logged_metrics(tmp_path / "run") if "evaluation" in line
    }
    assert list(evaluations) == [3, 6, 9, 12]
    assert {evaluation["count"] for evaluation in evaluations.values()} == {len(result.setup.splits.validation)}
    best = min(evaluations, key=lambda step: evaluations[step]["loss"])
    assert (result.progress.best_step, result.progress.best_score) == (best, -evaluations[best]["loss"])


def test_evaluation_masks_do_not_depend_on_repetition_or_batch_size(images: Path):
    config = override(photo_config(images), ["objective=masked-patch"])
    trainer = Trainer(prepare_run(config, SINGLE_PROCESS), SINGLE_PROCESS)
    torch.nn.init.normal_(trainer.objective.guess.weight)
    first = trainer.evaluate()
    assert trainer.evaluate() == first
    trainer.batch_size = 3
    assert trainer.evaluate().loss == pytest.approx(first.loss, rel=1e-5)
