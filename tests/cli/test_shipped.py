"""Commands without --model use the bundled model and print a note with its classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_models import gradient, model, small

from vitrail.weights.shipped import DEFAULT_MODEL

CLASSES = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship and truck"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    gradient().save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_predict_notes_the_bundled_model_and_its_classes(vitrail, image):
    result = vitrail("predict", image)
    assert (result.status, result.errors) == (0, [])
    model_note, classes_note = result.notes[-2:]
    assert model_note.startswith("no --model was given: using vitrail/cifar10, which ships with vitrail (")
    assert DEFAULT_MODEL.description in model_note
    assert classes_note.startswith(f"its classes are {CLASSES}; every image is assigned to one of them. ")
    assert "--model" in classes_note


def test_json_has_predictions_of_the_ten_classes(vitrail, image):
    rows = json.loads(vitrail("predict", image, "--json", "--top", 10).out)
    labels = [p["label"] for p in rows[0]["predictions"]]
    assert sorted(labels) == sorted(CLASSES.replace(" and ", ", ").split(", "))


def test_explicit_model_prints_no_note_about_the_bundled_one(vitrail, image, weights):
    for name in (weights, DEFAULT_MODEL.name):
        result = vitrail("predict", image, "-m", name)
        assert result.status == 0
        assert "ships with vitrail" not in result.err


def test_empty_model_name_is_an_error(vitrail, image):
    result = vitrail("predict", image, "-m", "")
    assert result.status == 1
    assert result.errors[0].startswith("got an empty name")


def test_local_folder_of_the_same_name_is_ignored(vitrail, image, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(small()).save("vitrail/cifar10")
    rows = json.loads(vitrail("predict", image, "--json", "--top", 10).out)
    assert len(rows[0]["predictions"]) == 10


def test_image_size_option_applies_to_the_bundled_model(vitrail, image):
    assert vitrail("predict", image, "--image-size", 48).status == 0
    result = vitrail("predict", image, "--image-size", 33)
    assert result.status == 1
    assert "uncovered" in result.errors[0]


def test_bundled_model_works_offline_in_a_subprocess(process, image, tmp_path):
    result = process("predict", image, cwd=tmp_path)
    assert result.status == 0
    assert result.out.startswith(str(image))
    assert result.notes[-2].startswith("no --model was given: using vitrail/cifar10")


def test_models_lists_the_bundled_model(vitrail):
    result = vitrail("models")
    assert "vitrail/cifar10              4,017,802      0.5     32  vitrail/cifar10" in result.out
    assert "vitrail/cifar10 ships with vitrail; commands use it without --model" in result.out


def test_models_omits_the_bundled_model_for_other_patterns(vitrail):
    assert "cifar10" not in vitrail("models", "ViT-*").out


@pytest.mark.parametrize("pattern", ["vitrail/cifar10", "cifar", "*cifar10"])
def test_models_shows_the_settings_of_the_bundled_model(vitrail, pattern):
    result = vitrail("models", pattern)
    assert result.status == 0
    assert "position=rope-2d" in result.out
    [row] = json.loads(vitrail("models", pattern, "--json").out)["models"]
    assert (row["name"], row["checkpoint"], row["family"]) == ("vitrail/cifar10", "vitrail/cifar10", "ViT")
    assert (row["parameters"], row["image_size"]) == (4_017_802, [32, 32])
