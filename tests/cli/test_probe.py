"""`vitrail probe`: scores with confidence intervals, from images or from feature files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

COLORS = {"blue": (20, 40, 230), "green": (30, 220, 40), "red": (230, 30, 20)}


def write_images(folder: Path, **counts: int) -> Path:
    """Write a folder of images whose class is their color."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        for name, color in COLORS.items():
            for i in range(count):
                path = folder / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = rng.integers(-20, 20, (32, 32, 3))
                Image.fromarray(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("probe") / "colors", train=12, test=6)


def test_separable_classes_have_full_accuracy(vitrail, weights, colors):
    result = vitrail("probe", "-m", weights, "--data", colors, "--shots", "1,5", "--k", "1,5", "--json")
    report = json.loads(result.out)
    assert (report["num_train"], report["num_test"], report["width"], report["num_classes"]) == (36, 18, 128, 3)
    assert [(s["method"], s["value"]) for s in report["scores"]] == [
        ("fewshot", 1.0), ("fewshot", 1.0), ("knn", 1.0), ("knn", 1.0), ("logistic", 1.0),
    ]  # fmt: skip
    assert all(s["low"] <= s["value"] <= s["high"] for s in report["scores"])
    assert all(s["low"] < 1 for s in report["scores"] if s["method"] != "fewshot")


def test_table_has_the_interval_beside_each_score(vitrail, weights, colors):
    result = vitrail("probe", "-m", weights, "--data", colors, "--method", "knn,fewshot", "--shots", "5", "--k", "3")
    lines = result.out.splitlines()
    assert lines[0] == "36 training images, 18 test images, 3 classes"
    assert [line.split()[0] for line in lines[4:]] == ["k-NN", "few-shot"]
    assert "100.00 %   82.4 to 100.0" in lines[4]
    assert "over 3 seeds" in lines[5]
    assert max(map(len, lines)) <= 80


def test_feature_files_give_the_same_scores(vitrail, weights, colors, tmp_path):
    combined, parts = tmp_path / "all.parquet", [tmp_path / "train.parquet", tmp_path / "test.parquet"]
    vitrail("embed", "-m", weights, "--data", colors, "--out", combined)
    for part in parts:
        vitrail("embed", "-m", weights, "--data", colors, "--out", part, "--split", part.stem)
    options = ("--shots", "1", "--k", "5", "--json", "--layer", "last")
    from_images = json.loads(vitrail("probe", "-m", weights, "--data", colors, *options).out)
    from_one_file = json.loads(vitrail("probe", "--features", combined, *options).out)
    from_two_files = json.loads(vitrail("probe", "--features", parts[0], "--features", parts[1], *options).out)
    assert from_one_file["scores"] == from_two_files["scores"] == from_images["scores"]


def test_features_of_different_models_are_an_error(vitrail, weights, headless, colors, tmp_path):
    for name, model in (("train", weights), ("test", headless)):
        vitrail("embed", "-m", model, "--data", colors, "--out", tmp_path / f"{name}.parquet", "--split", name)
    result = vitrail("probe", "--features", tmp_path / "train.parquet", "--features", tmp_path / "test.parquet")
    assert result.status == 1
    assert "was made with another" in result.errors[0]


def test_max_images_limits_both_splits(vitrail, weights, colors):
    result = vitrail(
        "probe", "-m", weights, "--data", colors, "--method", "knn", "--k", "1", "--max-images", "9", "--json"
    )
    assert (json.loads(result.out)["num_train"], json.loads(result.out)["num_test"]) == (9, 9)
    assert any("using 9 of 36 images" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--method", "fewshot", "--shots", "13"),
            "13 shots need 13 images of each class, and 'blue' has 12 images",
        ),
        (("--method", "knn", "--k", "37"), "k=37 neighbors in a bank of 36 entries; expected 1 to 36."),
        (("--k", "0"), "k=0: expected 1 or more, such as 5 or 1,5."),
        (("--shots", "5,-1"), "shots=5,-1: expected 1 or more, such as 5 or 1,5."),
        (("--c", "0"), "C=0: expected a number above 0."),
        (("--method", "kmn"), "unknown probing method 'kmn'; did you mean 'knn'?"),
        (("--layer", "13"), "there is no layer 13 of 2; expected 0 to 2."),
        (("--vote", "loud"), "--vote expects weighted or uniform, got 'loud'."),
        (("--shots", "many"), "--shots expects whole numbers such as 5 or 1,5,10, got 'many'."),
    ],
)
def test_invalid_options_are_errors_before_features_are_extracted(
    vitrail, weights, colors, options, message, monkeypatch
):
    monkeypatch.setattr("vitrail.evaluation.probing.extract_features", None)
    result = vitrail("probe", "-m", weights, "--data", colors, *options)
    assert result.status == 1
    assert message in result.errors[0]


def test_data_of_one_class_is_an_error(vitrail, weights, tmp_path):
    folder = write_images(tmp_path / "one", train=4, test=2)
    for split in ("train", "test"):
        for name in ("green", "red"):
            for file in (folder / split / name).iterdir():
                file.unlink()
            (folder / split / name).rmdir()
    result = vitrail("probe", "-m", weights, "--data", folder)
    assert result.status == 1
    assert "all 4 images are 'blue' (" in result.errors[0]
    assert "expected at least two classes" in result.errors[0]


def test_impossible_defaults_are_skipped_with_a_note(vitrail, weights, tmp_path):
    folder = write_images(tmp_path / "colors", train=4, test=2)
    result = vitrail("probe", "-m", weights, "--data", folder, "--json")
    scores = json.loads(result.out)["scores"]
    assert [s["shots"] for s in scores if s["method"] == "fewshot"] == [1]
    assert [s["k"] for s in scores if s["method"] == "knn"] == [12]
    assert any("5, 10 and 25 shots are skipped: the class with the fewest images has 4" in n for n in result.notes)
    assert any("all 12 training images vote, because there are fewer than 20" in n for n in result.notes)


def test_class_without_training_images_skips_only_few_shot(vitrail, weights, tmp_path):
    folder = write_images(tmp_path / "colors", train=8, test=2)
    rows = [f"{path.relative_to(folder)},{path.parent.name},{path.parts[-3]}" for path in folder.rglob("*.png")]
    rows = [row for row in rows if not row.endswith("red,train")]
    (folder / "labels.csv").write_text("\n".join(["image,label,split", *rows]))
    result = vitrail("probe", "-m", weights, "--data", folder / "labels.csv", "--k", "1", "--json")
    assert {s["method"] for s in json.loads(result.out)["scores"]} == {"knn", "logistic"}
    assert any("few-shot is skipped: the class with the fewest images has 0" in n for n in result.notes)
    only_fewshot = vitrail("probe", "-m", weights, "--data", folder / "labels.csv", "--method", "fewshot")
    assert "'red' has no images" in only_fewshot.errors[0]


def test_features_without_a_test_split_are_split_with_a_note(vitrail, weights, tmp_path):
    folder = write_images(tmp_path / "colors", train=12)
    vitrail("embed", "-m", weights, "--data", folder / "train", "--out", tmp_path / "f.parquet")
    result = vitrail("probe", "--features", tmp_path / "f.parquet", "--method", "knn", "--k", "1", "--json")
    from_features = json.loads(result.out)
    assert from_features["num_train"] + from_features["num_test"] == 36
    assert any("there are no test images" in n and "held out for testing" in n for n in result.notes)
    from_images = json.loads(
        vitrail("probe", "-m", weights, "--data", folder / "train", "--method", "knn", "--k", "1", "--json").out
    )
    assert from_images["scores"] == from_features["scores"]


def test_unreadable_image_is_an_error_unless_skipped(vitrail, weights, tmp_path):
    folder = write_images(tmp_path / "colors", train=4, test=2)
    (folder / "test" / "red" / "broken.png").write_bytes(b"no image")
    command = ("probe", "-m", weights, "--data", folder, "--method", "knn", "--k", "1", "--json")
    result = vitrail(*command)
    assert result.status == 1
    assert "1 image cannot be read" in result.errors[0]
    assert json.loads(vitrail(*command, "--skip-bad").out)["unreadable"] == 1


def test_probe_needs_data_or_features(vitrail, weights):
    result = vitrail("probe", "-m", weights)
    assert result.status == 1
    assert "probe needs --data SPEC, or --features FILE" in result.errors[0]


@pytest.mark.slow
def test_real_model_scores_above_80_percent_on_cifar10(vitrail, real_checkpoint, shared):
    data = shared / "data" / "cifar10"
    result = vitrail("probe", "-m", real_checkpoint, "--data", data, "--max-images", "500", "--method", "knn", "--json")
    assert json.loads(result.out)["scores"][0]["value"] > 0.8
