"""Commands without --model: they use the model that ships, and say so and what it can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_models import gradient, model, small

from vitrail.weights.shipped import DEFAULT_MODEL

TEN = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship and truck"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    gradient().save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_predict_says_which_model_it_is_and_what_it_knows(vitrail, image):
    result = vitrail("predict", image)
    assert (result.status, result.problems) == (0, [])
    which, what = result.notes[-2:]
    assert which.startswith("no --model was given: using vitrail/cifar10, which ships with vitrail (")
    assert DEFAULT_MODEL.description in which
    assert what.startswith(f"its classes are {TEN}; every image is assigned to one of them. ")
    assert "--model" in what


def test_the_answer_is_one_of_the_ten_and_stands_alone(vitrail, image):
    rows = json.loads(vitrail("predict", image, "--json", "--top", 10).out)
    named = [p["label"] for p in rows[0]["predictions"]]
    assert sorted(named) == sorted(TEN.replace(" and ", ", ").split(", "))


def test_with_a_model_named_nothing_is_introduced(vitrail, image, weights):
    for named in (weights, DEFAULT_MODEL.name):
        result = vitrail("predict", image, "-m", named)
        assert result.status == 0
        assert "ships with vitrail" not in result.err


def test_an_empty_name_is_not_the_same_as_none(vitrail, image):
    result = vitrail("predict", image, "-m", "")
    assert result.status == 1
    assert result.problems[0].startswith("got an empty name")


def test_a_folder_that_happens_to_have_its_name_is_not_taken(vitrail, image, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(small()).save("vitrail/cifar10")
    rows = json.loads(vitrail("predict", image, "--json", "--top", 10).out)
    assert len(rows[0]["predictions"]) == 10


def test_what_is_asked_of_a_model_is_asked_of_it_too(vitrail, image):
    assert vitrail("predict", image, "--image-size", 48).status == 0
    result = vitrail("predict", image, "--image-size", 33)
    assert result.status == 1
    assert "uncovered" in result.problems[0]


def test_it_works_offline_in_a_process_of_its_own(process, image, tmp_path):
    result = process("predict", image, cwd=tmp_path)
    assert result.status == 0
    assert result.out.startswith(str(image))
    assert result.notes[-2].startswith("no --model was given: using vitrail/cifar10")


def test_models_lists_it(vitrail):
    result = vitrail("models")
    assert "vitrail/cifar10              4,017,802      0.5     32  vitrail/cifar10" in result.out
    assert "vitrail/cifar10 ships with vitrail; commands use it without --model" in result.out


def test_models_says_nothing_of_it_among_others(vitrail):
    assert "cifar10" not in vitrail("models", "ViT-*").out


@pytest.mark.parametrize("pattern", ["vitrail/cifar10", "cifar", "*cifar10"])
def test_models_shows_its_settings(vitrail, pattern):
    result = vitrail("models", pattern)
    assert result.status == 0
    assert "position=rope-2d" in result.out
    [row] = json.loads(vitrail("models", pattern, "--json").out)["models"]
    assert (row["name"], row["checkpoint"], row["family"]) == ("vitrail/cifar10", "vitrail/cifar10", "ViT")
    assert (row["parameters"], row["image_size"]) == (4_017_802, [32, 32])
