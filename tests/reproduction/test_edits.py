"""Changes to a parent's model: positions resampled, placed in a corner or drawn anew; the head removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reproduction.small_models import make_model
from training.small_runs import digits_config

from vitrail.config import TrainConfig
from vitrail.errors import ConfigError
from vitrail.model import Model
from vitrail.models.position import resample
from vitrail.open_model import load
from vitrail.reproduction.edits import EDITS, RESAMPLES, edit_model

LARGE = 12
TABLE = "positions.0.table"


@pytest.fixture
def model() -> Model:
    return make_model()


def larger(seed: int = 0) -> TrainConfig:
    return digits_config(seed=seed, image_size=LARGE)


def others(model: Model) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.net.state_dict().items() if name != TABLE}


def table(model: Model) -> torch.Tensor:
    return model.net.state_dict()[TABLE]


@pytest.mark.parametrize("convention", RESAMPLES)
def test_the_convention_is_used_when_the_edited_model_is_loaded_at_another_size(model, convention, tmp_path):
    model.save(tmp_path / "parent")
    start = edit_model(f"resample-{convention}", tmp_path / "parent", tmp_path / "start", larger())
    resized = load(start, image_size=LARGE)
    assert torch.equal(table(resized), resample(table(model), (3, 3), convention))


def test_the_conventions_give_different_positions(model, tmp_path):
    tables = [resample(table(model), (3, 3), name) for name in RESAMPLES]
    assert all(not torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


def test_positions_in_the_corner_are_unchanged_and_the_others_are_zero(model):
    placed = table(EDITS["positions-in-corner"](model, larger()))
    assert placed.shape[:2] == (3, 3)
    assert torch.equal(placed[:2, :2], table(model))
    assert not placed[2].any()
    assert not placed[:, 2].any()


def test_new_positions_have_the_scale_of_an_initialization(model):
    torch.manual_seed(0)
    drawn = table(EDITS["new-positions"](model, larger()))
    assert drawn.shape == (3, 3, model.config.width)
    assert drawn.std() == pytest.approx(model.config.position_init_std, rel=0.2)


def test_the_seed_of_the_trial_determines_new_positions(model, tmp_path):
    model.save(tmp_path / "parent")
    drawn = [
        table(load(edit_model("new-positions", tmp_path / "parent", tmp_path / f"start {i}", larger(seed))))
        for i, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("edit", ["positions-in-corner", "new-positions"])
def test_only_the_positions_of_the_patches_change(model, edit):
    edited = EDITS[edit](model, larger())
    assert edited.config == model.config.replace(image_size=LARGE)
    assert edited.labels == model.labels
    for name, value in others(model).items():
        assert torch.equal(others(edited)[name], value), name


@pytest.mark.parametrize("edit", ["positions-in-corner", "new-positions"])
def test_positions_are_replaced_only_with_another_image_size(model, edit):
    with pytest.raises(ConfigError, match="when the image size"):
        EDITS[edit](model, digits_config())


def test_a_model_without_its_head_has_the_same_features(model):
    edited = EDITS["without-head"](model, digits_config())
    assert edited.labels is None
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(edited.net(images), model.net.features(images, outputs="pooled").pooled)


def test_an_edited_model_is_kept_from_before_an_interruption(model, tmp_path: Path):
    model.save(tmp_path / "parent")
    first = table(load(edit_model("new-positions", tmp_path / "parent", tmp_path / "start", larger(0))))
    again = table(load(edit_model("new-positions", tmp_path / "parent", tmp_path / "start", larger(1))))
    assert torch.equal(first, again)
