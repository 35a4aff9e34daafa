"""`vitrail search`: lists, CSV and JSON, figures, and errors in one sentence."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, need_extra
from PIL import Image

from vitrail.retrieval import feature_index


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for i in range(6):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def features(photos, weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("features") / "f.parquet"
    command = [sys.executable, "-m", "vitrail", "embed", "-m", weights, "--data", photos, "-o", path]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment)
    return path


def test_image_gives_a_list(vitrail, weights, features, photos):
    image = photos / "a" / "0.png"
    result = vitrail("search", image, "--index", features, "-m", weights, "--top", 2)
    lines = result.out.splitlines()
    assert (result.status, len(lines), lines[0]) == (0, 3, str(image))
    assert lines[1] == "   1.000  a  a/0.png  (train)"
    assert any("6 images, searched exactly" in note for note in result.notes)


def test_json_has_every_field(vitrail, weights, features, photos):
    image = photos / "a" / "0.png"
    result = vitrail("search", image, "-i", features, "-m", weights, "--exclude-self", "--json")
    [entry] = json.loads(result.out)
    assert (entry["path"], len(entry["matches"])) == (str(image), 5)
    assert set(entry["matches"][0]) == {"key", "split", "label", "similarity", "row"}


def test_folder_gives_csv_with_unreadable_images(vitrail, weights, features, photos, tmp_path):
    (tmp_path / "1.png").write_bytes((photos / "b" / "1.png").read_bytes())
    (tmp_path / "2.png").write_bytes(b"no image")
    result = vitrail("search", tmp_path, "-i", features, "-m", weights, "--top", 3)
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert (result.status, len(rows)) == (1, 4)
    assert [row["rank"] for row in rows] == ["1", "2", "3", ""]
    assert (rows[0]["key"], rows[0]["label"], float(rows[0]["similarity"])) == ("b/1.png", "b", pytest.approx(1))
    assert "2.png" in rows[3]["error"]
    assert result.errors[-1] == "1 of 2 images could not be read."
    out = tmp_path / "out" / "neighbors.json"
    assert vitrail("search", photos / "a", "-i", features, "-m", weights, "--out", out).out == ""
    assert len(json.loads(out.read_text())) == 3


def test_only_the_image_itself_leaves_no_neighbors(vitrail, weights, photos, tmp_path):
    (tmp_path / "one" / "a").mkdir(parents=True)
    image = tmp_path / "one" / "a" / "0.png"
    image.write_bytes((photos / "a" / "0.png").read_bytes())
    assert vitrail("embed", "-m", weights, "--data", tmp_path / "one", "-o", tmp_path / "f.parquet").status == 0
    result = vitrail("search", image, "-i", tmp_path / "f.parquet", "-m", weights, "--exclude-self")
    assert (result.status, result.out) == (0, f"{image}\n  no similar images\n")


def test_figure_draws_the_images_that_are_found(vitrail, weights, features, photos, tmp_path):
    figure = tmp_path / "figure.png"
    options = ("-i", features, "-m", weights, "--top", 3, "--figure", figure)
    assert vitrail("search", photos / "a" / "0.png", *options, "--data", photos).status == 0
    with Image.open(figure) as image:
        drawn = np.asarray(image.convert("RGB")).astype(int)
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 1000  # noise images, not empty squares
    figure.unlink()
    (tmp_path / "other").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "other" / "x.png")
    result = vitrail("search", photos / "a" / "0.png", *options, "--data", tmp_path / "other")
    assert result.status == 0
    assert any("3 of 3 neighbors are not in" in note for note in result.notes)
    [message] = vitrail("search", photos / "a" / "0.png", *options).errors  # the features name no folder
    assert "--data SPEC" in message


def test_index_is_built_with_settings_and_used(vitrail, weights, photos, tmp_path, monkeypatch):
    need_extra("search")
    monkeypatch.setattr(feature_index, "MIN_INDEXED", 5)
    monkeypatch.setattr("vitrail.retrieval.inverted_lists.VECTORS_PER_CENTROID", 1)
    rng = np.random.default_rng(0)
    for i in range(120):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    features = tmp_path / "f.parquet"
    assert vitrail("embed", "-m", weights, "--data", tmp_path, "-o", features).status == 0
    built = vitrail("search", "--build", "--lists", 2, "-i", features, "--recall", 1)
    assert built.status == 0
    assert any("of 2 lists read for each query, recall@10" in note for note in built.notes)
    assert (tmp_path / "f.parquet.index" / "index.json").exists()
    result = vitrail("search", tmp_path / "7.png", "-i", features, "-m", weights, "--top", 1)
    assert "lists read for each query" in " ".join(result.notes)
    assert result.out.splitlines()[1].split()[1] == "7.png"
    exact = vitrail("search", tmp_path / "7.png", "-i", features, "-m", weights, "--exact", "--top", 1)
    assert "searched exactly" in " ".join(exact.notes)


def test_missing_and_contradicting_options_are_named(vitrail, weights, features, photos, tmp_path):
    def error(*arguments):
        result = vitrail("search", *arguments)
        assert result.status == 1
        return result.errors[0]

    assert error(photos).startswith("search needs --index PATH")
    assert error("-i", features).startswith("search needs an image, or --build")
    assert "--lists needs --build" in error(photos, "-i", features, "--lists", 4)
    assert "recall=2" in error(photos, "-i", features, "--recall", 2)
    assert "there is no file" in error(photos, "-i", tmp_path / "missing.parquet")
    assert "has 6 rows, an index needs 100" in error("--build", "-i", features)
    assert error(photos, "-i", features, "--data", photos).startswith("--data and --root are for the images of")
    figure = tmp_path / "figure.txt"
    assert error(photos, "-i", features, "--figure", figure).startswith(f"--figure {figure}: expected one of the")


def test_wrong_model_is_an_error(vitrail, headless, features, photos):
    result = vitrail("search", photos, "-i", features, "-m", headless)
    assert result.status == 1
    assert "features of different models cannot be compared" in result.errors[0]
    result = vitrail("search", photos, "-i", features)
    assert result.errors[0].endswith("not by the model that ships with vitrail; pass it with --model.")
