"""Runs that learn without labels: on any images, measured on those held out, and what is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.small_runs import interrupted, lines, on_photos, photos, resumed, same_bits, trained

import vitrail
from vitrail.config import override
from vitrail.errors import DataError
from vitrail.train.distributed import DistributedContext
from vitrail.train.setup import prepare_run
from vitrail.train.trainer import Trainer

ALONE = DistributedContext(torch.device("cpu"))


pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.mark.parametrize("target", ["mean-color", "pixels"])
def test_masked_patches_train_resume_and_load(images: Path, tmp_path: Path, target: str):
    config = override(on_photos(images, 8), ["objective=masked-patch", f"masked_patch.target={target}"])
    whole = trained(config, tmp_path / "whole")
    interrupted(config, tmp_path / "cut", 3)
    resumed(tmp_path / "cut")
    assert whole.scores is None
    assert same_bits(tmp_path / "whole", tmp_path / "cut")
    loaded = vitrail.load(tmp_path / "whole")
    assert loaded.embed(images / "red" / "000.jpg").shape == (1, 16)
    with pytest.raises(vitrail.VitrailError, match="has no classes"):
        loaded.predict(images / "red" / "000.jpg")
    tuned = trained(on_photos(images, 3, init_from=str(tmp_path / "whole"), model=None), tmp_path / "tuned")
    assert tuned.setup.info.labels == ("blue", "green", "red")


def unlabeled(folder: Path, kind: str) -> str:
    """Images in one folder, alone or named by a table."""
    photos(folder / "flat", {"": 40})
    if kind == "folder":
        return f"folder:{folder / 'flat'}"
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.jpg"))
    (folder / "names.csv").write_text("\n".join(["path", *names]))
    return f"table:{folder / 'names.csv'}"


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_masked_patches_want_no_labels(tmp_path: Path, kind: str):
    source = unlabeled(tmp_path, kind)
    config = override(on_photos(tmp_path, 6), [f"data.source={source}", "optim.lr=1e-2"])
    with pytest.raises(DataError, match=r"no class folders|no label column"):
        trained(config, tmp_path / "classes")
    result = trained(override(config, ["objective=masked-patch"]), tmp_path / "run")
    splits = result.setup.splits
    assert len(splits.train) + len(splits.validation) == 40
    assert vitrail.load(tmp_path / "run").embed(tmp_path / "flat" / "000.jpg").shape == (1, 16)


def test_masked_patches_are_measured_on_what_is_held_out(images: Path, tmp_path: Path):
    settings = ["objective=masked-patch", "optim.lr=1e-2", "evaluate_every=3 steps", "keep=best"]
    result = trained(override(on_photos(images, 12), settings), tmp_path / "run")
    found = {line["step"]: line["evaluation"] for line in lines(tmp_path / "run") if "evaluation" in line}
    assert list(found) == [3, 6, 9, 12]
    assert {f["count"] for f in found.values()} == {len(result.setup.splits.validation)}
    best = min(found, key=lambda step: found[step]["loss"])
    assert (result.progress.best_step, result.progress.best_score) == (best, -found[best]["loss"])


def test_the_same_patches_are_hidden_however_often_and_in_whatever_batches(images: Path):
    config = override(on_photos(images), ["objective=masked-patch"])
    trainer = Trainer(prepare_run(config, ALONE), ALONE)
    torch.nn.init.normal_(trainer.learner.guess.weight)
    first = trainer.evaluate()
    assert trainer.evaluate() == first
    trainer.batch_size = 3
    assert trainer.evaluate().loss == pytest.approx(first.loss, rel=1e-5)
