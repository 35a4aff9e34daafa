"""Precision of a run: chosen by device unless it is set, and recorded in the run's config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training.small_objective import SINGLE_PROCESS
from training.small_runs import digits_config, interrupt_run, resume_run

from vitrail.config import TrainConfig
from vitrail.recipes import RECIPES
from vitrail.recipes.finetune import finetune, finetune_paper
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime import resolve_precision
from vitrail.training.setup import prepare_run
from vitrail.training.trainer import Trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_device_decides_precision_unless_it_is_set(monkeypatch: pytest.MonkeyPatch):
    for supported, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True, supported=supported: supported
        )
        assert resolve_precision("auto", CUDA) == expected
        assert resolve_precision("auto", CPU) == resolve_precision("auto", torch.device("mps")) == "float32"
    for name in ("float32", "bfloat16", "float64"):
        assert {resolve_precision(name, CPU), resolve_precision(name, CUDA)} == {name}


def test_recipes_leave_precision_on_auto():
    recipes = [
        *(make() for make in RECIPES.values()),
        *(make("x", "y", num_images=99) for make in (finetune, finetune_paper)),
    ]
    assert {config.precision for config in recipes} == {TrainConfig.from_dict({"init_from": "x"}).precision} == {"auto"}


def test_run_config_records_the_chosen_precision(tmp_path: Path):
    assert interrupt_run(digits_config(6), tmp_path / "run", 3).setup.config.precision == "float32"
    assert RunFolder(tmp_path / "run").read_config().precision == "float32"
    assert resume_run(tmp_path / "run").setup.config.precision == "float32"


@pytest.mark.parametrize("slowdown", [6.0, 0.6])
def test_bfloat16_on_a_cpu_warns_where_it_is_slower(
    slowdown: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("vitrail.runtime.notes._logged", set())
    monkeypatch.setattr("vitrail.training.trainer.slowdown", lambda device, dtype: slowdown)
    trainer = Trainer(prepare_run(digits_config(precision="bfloat16"), SINGLE_PROCESS), SINGLE_PROCESS)
    assert trainer.config.precision == "bfloat16"
    message = "precision=bfloat16 is slow on this CPU: matrix products take 6.0 x as long as float32."
    assert (message in caplog.text) == (slowdown > 1)


@pytest.mark.gpu
def test_gpu_with_bfloat16_uses_it():
    assert resolve_precision("auto", CUDA) == ("bfloat16" if torch.cuda.get_device_capability()[0] >= 8 else "float32")
