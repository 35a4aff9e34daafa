"""Recipes: networks build, JSON round-trips, and docstrings state a result or that the recipe was not run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from vitrail.config import Duration, TrainConfig, epochs
from vitrail.models import build
from vitrail.recipes import RECIPES
from vitrail.recipes.finetune import finetune, finetune_paper, train_only
from vitrail.training.lr_schedule import LRSchedule

EXPECTED_RECIPES = {
    "digits", "mnist", "fashion-mnist", "cifar10", "imagenet1k-s16", "imagenet21k-b16", "deit-s16", "masked-patch",
}  # fmt: skip
IMAGES = {"digits": 1_438, "mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}


def test_expected_recipes_exist():
    assert set(RECIPES) >= EXPECTED_RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_config_name_is_the_recipe_name(name: str):
    assert RECIPES[name]().name == name


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip_is_the_identity(name: str):
    config = RECIPES[name]()
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", RECIPES)
def test_network_builds_and_matches_the_preprocessing(name: str):
    config = RECIPES[name]()
    assert config.model is not None
    net = build(config.model.replace(num_classes=10), meta=True)
    assert sum(p.numel() for p in net.parameters()) > 1000
    assert config.preprocess is not None
    assert config.preprocess.image_size == config.model.image_size
    assert config.preprocess.channels == config.model.channels


@pytest.mark.parametrize("name", RECIPES)
def test_schedule_fits_the_duration(name: str):
    config, images = RECIPES[name](), IMAGES.get(name, 1_281_167)
    assert isinstance(config.batch_size, int)
    total = config.duration.to_steps(batch_size=config.batch_size, images=images)
    schedule = LRSchedule(config.schedule, total_steps=total, batch_size=config.batch_size, num_images=images)
    assert max(schedule(step) for step in (0, schedule.warmup, total // 2)) == 1.0


def docstrings_of(name: str) -> str:
    make = RECIPES[name]
    return f"{make.__doc__ or ''}\n{sys.modules[make.__module__].__doc__}"


@pytest.mark.parametrize("name", RECIPES)
def test_docstring_states_a_result_or_that_it_was_not_run(name: str):
    text = " ".join(docstrings_of(name).split())
    has_result = re.search(r"\d+(\.\d+)? %", text) and re.search(r"Run: vitrail train", text)
    assert has_result or re.search(r"[Nn]ot (yet )?(been )?run\b|has been run by this project", text), text


README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("name", RECIPES)
def test_readme_states_the_same_accuracy_and_interval(name: str):
    command = "vitrail train" if name == "digits" else f"vitrail train {name}"
    row = re.search(rf"^\| `{command}` \|.*?\*\*(\S+ %)\*\* \((\S+ to \S+)\)", README.read_text(encoding="utf-8"), re.M)
    if row is None:
        pytest.skip("the README has no row for it")
    docstring = RECIPES[name].__doc__ or ""
    claim = " ".join((docstring if " % " in docstring else docstrings_of(name)).split())
    assert row[1] in claim
    assert row[2] in claim


@pytest.mark.parametrize("images", [1, 5, 20, 100, 3_000, 60_000, 2_000_000])
@pytest.mark.parametrize("make", [finetune, finetune_paper])
def test_fine_tuning_recipes_fit_any_number_of_images(make, images: int):
    for device in ("cpu", "cuda"):
        config = make("start", "photos", num_images=images, device=device)
        assert 1 <= config.batch_size <= images
        total = config.duration.to_steps(batch_size=config.batch_size, images=images)
        LRSchedule(config.schedule, total_steps=total, batch_size=config.batch_size, num_images=images)
        assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_paper_recipe_has_the_papers_settings():
    """Table 4 and appendix B.1.1 of the paper."""
    config = finetune_paper("start", "photos", num_images=1_281_167)
    optim = config.optim
    assert (optim.kind, optim.momentum, optim.grad_clip, optim.weight_decay) == ("sgd", 0.9, 1.0, 0.0)
    # the image size comes from `paper_image_size`
    assert (config.image_size, config.batch_size, str(config.duration)) == (None, 512, "20000 steps")
    assert config.schedule.kind == "cosine"
    assert finetune_paper("start", "cifar", num_images=50_000).duration == Duration(count=10_000, unit="steps")
    assert finetune_paper("start", "pets", num_images=3_680).duration == Duration(count=500, unit="steps")


def test_training_can_be_restricted_to_the_last_layers():
    config = finetune("start", "photos", num_images=1000)
    assert config.optim.layer_decay == 0.75
    assert epochs(5).count <= config.duration.count <= 50
    head = train_only(config, "head").optim
    assert (head.trainable, head.layer_decay) == ("head", None)
    assert head.lr > config.optim.lr
    assert train_only(config, 2).optim == config.optim.replace(trainable=2)
