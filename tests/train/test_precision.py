"""The precision of a run: chosen by its device unless it was asked for, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.small_learner import ALONE
from train.small_runs import digits, interrupted, resumed

from vitrail.config import TrainConfig
from vitrail.recipes import RECIPES
from vitrail.recipes.finetune import finetune, finetune_paper
from vitrail.runtime import pick_precision
from vitrail.train.run_folder import RunFolder
from vitrail.train.setup import prepare_run
from vitrail.train.trainer import Trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_device_decides_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    for there, chosen in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, there=there: there)
        assert pick_precision("auto", CUDA) == chosen
        assert pick_precision("auto", CPU) == pick_precision("auto", torch.device("mps")) == "float32"
    for name in ("float32", "bfloat16", "float64"):
        assert {pick_precision(name, CPU), pick_precision(name, CUDA)} == {name}


def test_no_recipe_asks_for_one():
    recipes = [
        *(make() for make in RECIPES.values()),
        *(make("x", "y", images=99) for make in (finetune, finetune_paper)),
    ]
    assert {config.precision for config in recipes} == {TrainConfig.from_dict({"init_from": "x"}).precision} == {"auto"}


def test_a_run_keeps_what_was_chosen(tmp_path: Path):
    assert interrupted(digits(6), tmp_path / "run", 3).setup.config.precision == "float32"
    assert RunFolder(tmp_path / "run").read_config().precision == "float32"
    assert resumed(tmp_path / "run").setup.config.precision == "float32"


@pytest.mark.parametrize("times", [6.0, 0.6])
def test_bfloat16_on_a_cpu_is_done_and_said_where_it_is_slower(
    times: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("vitrail.runtime._logged", set())
    monkeypatch.setattr("vitrail.train.trainer.slowdown", lambda device, dtype: times)
    trainer = Trainer(prepare_run(digits(precision="bfloat16"), ALONE), ALONE)
    assert trainer.config.precision == "bfloat16"
    said = "precision=bfloat16 is slow on this CPU: matrix products take 6.0 x as long as float32."
    assert (said in caplog.text) == (times > 1)


@pytest.mark.gpu
def test_a_gpu_that_has_bfloat16_computes_in_it():
    assert pick_precision("auto", CUDA) == ("bfloat16" if torch.cuda.get_device_capability()[0] >= 8 else "float32")
