"""`vitrail embed`: features of every image in one Parquet file, also after interruptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from PIL import Image

import vitrail as package
from vitrail.evaluation import embedding


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A folder of images of two classes, with a training and a test split."""
    folder, rng = tmp_path / "data", np.random.default_rng(0)
    for split, count in (("train", 7), ("test", 4)):
        for i in range(count):
            path = folder / split / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    return folder


def test_every_image_has_a_row(vitrail, weights, classes, tmp_path):
    out = tmp_path / "features.parquet"
    result = vitrail("embed", "-m", weights, "--data", classes, "--out", out)
    assert (result.status, result.out) == (0, f"{out}: 11 images, 128 features each (head input).\n")
    table = pq.read_table(out)
    assert table.column_names == ["key", "split", "label", "target", "embedding"]
    assert table["split"].to_pylist() == ["train"] * 7 + ["test"] * 4
    assert table["key"].to_pylist()[0] == "train/a/0.png"
    assert set(zip(table["label"].to_pylist(), table["target"].to_pylist(), strict=True)) == {("a", 0), ("b", 1)}
    keys = table["key"].to_pylist()
    expected = package.load(weights).embed([classes / key for key in keys])
    assert np.stack(table["embedding"].to_pylist()) == pytest.approx(expected.numpy(), abs=1e-5)
    metadata = json.loads(table.schema.metadata[b"vitrail"])
    assert (metadata["features"], metadata["vitrail"], metadata["data"]) == ("head input", package.__version__, "data")


def test_options_select_split_layers_pooling_and_dtype(vitrail, weights, classes, tmp_path):
    out = tmp_path / "f.parquet"
    options = (
        "--split",
        "test",
        "--layers",
        "1,2",
        "--pool",
        "token+mean",
        "--feature-dtype",
        "float16",
        "--normalize",
        "--json",
    )
    result = vitrail("embed", "-m", weights, "--data", classes, "--out", out, *options)
    summary = json.loads(result.out)
    assert (summary["num_images"], summary["width"], summary["features"]) == (4, 512, "layer 1+2, token+mean")
    rows = np.stack(pq.read_table(out)["embedding"].to_pylist()).astype(np.float64)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(4), abs=1e-3)


def test_layer_minus_one_is_the_last_layer(vitrail, weights, classes, tmp_path):
    for name, layer in (("a.parquet", "-1"), ("b.parquet", "2")):
        result = vitrail(
            "embed", "-m", weights, "--data", classes, "--out", tmp_path / name, "--layer", layer, "--json"
        )
        assert json.loads(result.out)["features"] == "layer 2, token"
    assert pq.read_table(tmp_path / "a.parquet").equals(pq.read_table(tmp_path / "b.parquet"))


def test_second_command_is_rejected_while_one_is_writing(vitrail, weights, classes, tmp_path, monkeypatch):
    out, write, processes = tmp_path / "f.parquet", embedding._write_missing_parts, []

    def write_during_second_command(*arguments, **options):
        command = [sys.executable, "-m", "vitrail", "embed", "-m", str(weights), "--data", str(classes), "-o", str(out)]
        processes.append(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False))
        return write(*arguments, **options)

    monkeypatch.setattr(embedding, "_write_missing_parts", write_during_second_command)
    result = vitrail("embed", "-m", weights, "--data", classes, "--out", out)
    assert (result.status, processes[0].returncode) == (0, 1)
    assert f"another process is writing {out}" in " ".join(processes[0].stderr.split())
    assert pq.read_metadata(out).num_rows == 11


def test_folder_without_labels_is_embedded(vitrail, weights, photos, tmp_path):
    out = tmp_path / "f.parquet"
    assert vitrail("embed", "-m", weights, "--data", photos, "--out", out).status == 0
    table = pq.read_table(out)
    assert table["label"].to_pylist() == [None] * len(table)
    assert {"a.jpg", "holiday/deep/x.bmp"} <= set(table["key"].to_pylist())


def test_complete_file_is_not_recomputed(vitrail, weights, classes, tmp_path):
    out = tmp_path / "f.parquet"
    command = ("embed", "-m", weights, "--data", classes, "--out", out)
    vitrail(*command)
    before = out.stat().st_mtime_ns
    result = vitrail(*command)
    assert (result.status, out.stat().st_mtime_ns) == (0, before)
    assert any("already complete" in note for note in result.notes)
    [message] = vitrail(*command, "--layer", "1").errors
    assert message.startswith(f"{out} was made with features=head input, not layer 1, token;")
    assert vitrail(*command, "--layer", "1", "--overwrite").status == 0
    assert pq.read_table(out).schema.field("embedding").type.list_size == 128


def test_unreadable_images_are_named_and_skipped(vitrail, weights, classes, tmp_path):
    (classes / "train" / "a" / "broken.png").write_bytes(b"no image")
    out = tmp_path / "f.parquet"
    result = vitrail("embed", "-m", weights, "--data", classes, "--out", out)
    assert (result.status, pq.read_metadata(out).num_rows) == (1, 11)
    assert any("train/a/broken.png" in note for note in result.notes)
    assert result.errors == ["skipped 1 unreadable image; add --skip-bad to allow this."]
    allowed = vitrail("embed", "-m", weights, "--data", classes, "--out", out, "--skip-bad")
    assert (allowed.status, allowed.errors) == (0, [])


def test_missing_split_is_a_one_sentence_error(vitrail, weights, classes, tmp_path):
    result = vitrail(
        "embed", "-m", weights, "--data", classes, "--out", tmp_path / "f.parquet", "--split", "validation"
    )
    assert result.errors == [f"{classes} has no validation split; it has train, test."]


def test_missing_options_are_named(vitrail, weights):
    result = vitrail("embed", "-m", weights)
    assert result.status == 1
    assert "embed needs --data SPEC:" in result.errors[0]
    assert "embed needs --out FILE:" in vitrail("embed", "-m", weights, "--data", "digits").errors[0]
    result = vitrail("embed", "-m", weights, "--data", "digits", "--out", "features.csv")
    assert result.errors == ["--out features.csv: expected a .parquet file; try features.parquet."]


def test_killed_embedding_resumes_to_identical_bytes(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "evaluation" / "killing.py"), str(tmp_path), "--kills", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "3 kills" in completed.stdout
    assert "the same bytes" in completed.stdout
    assert "files left: features.parquet\n" in completed.stdout
