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
from vitrail.bulk import running


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


def test_second_command_is_rejected_while_one_is_writing(vitrail, process, weights, classes, tmp_path, monkeypatch):
    out, write, second = tmp_path / "f.parquet", running.LocalExecutor.__call__, []

    def write_during_second_command(*arguments):
        second.append(process("embed", "-m", weights, "--data", classes, "-o", out))
        return write(*arguments)

    monkeypatch.setattr(running.LocalExecutor, "__call__", write_during_second_command)
    result = vitrail("embed", "-m", weights, "--data", classes, "--out", out)
    assert (result.status, second[0].status) == (0, 1)
    assert f"another process is writing {out}" in second[0].errors[0]
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
    assert "embed needs --out FILE or DIR:" in vitrail("embed", "-m", weights, "--data", "digits").errors[0]
    result = vitrail("embed", "-m", weights, "--data", "digits", "--out", "features.csv")
    expected = "--out features.csv: expected a .parquet file or a folder; try features.parquet or features."
    assert result.errors == [expected]


def test_killed_embedding_resumes_to_identical_bytes(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "bulk" / "killing.py"), str(tmp_path), "--kills", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "3 kills" in completed.stdout
    assert "the same bytes" in completed.stdout
    assert "files left: features.parquet\n" in completed.stdout


def test_shards_make_the_same_folder_as_one_command(vitrail, weights, classes, tmp_path):
    command = ("embed", "-m", weights, "--data", classes, "--batch-size", "2", "--part-size", "2")
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    assert vitrail(*command, "--out", whole).status == 0
    first = vitrail(*command, "--out", shards, "--shard", "2/3", "--json")
    assert (first.status, json.loads(first.out)["missing_parts"]) == (0, [0, 1, 4, 5])
    assert any("parts 0 to 1, 4 to 5 of 6 are missing: other shards compute them" in note for note in first.notes)
    assert not (shards / "complete.json").exists()
    assert vitrail(*command, "--out", tmp_path / "elsewhere", "--shard", "3/3").status == 0
    assert vitrail(*command, "--out", shards, "--shard", "1/3").status == 0
    joined = vitrail("embed", "--join", shards, "--join", tmp_path / "elsewhere", "--out", tmp_path / "joined")
    assert joined.out == f"{tmp_path / 'joined'}: 11 images, 128 features each (head input).\n"
    for name in ("manifest.json", "complete.json", *(f"part-{n:05d}.parquet" for n in range(6))):
        assert (whole / name).read_bytes() == (tmp_path / "joined" / name).read_bytes()
    assert vitrail(*command, "--out", tmp_path / "whole.parquet").status == 0
    vitrail("embed", "--join", whole, "--out", tmp_path / "joined.parquet")
    assert (tmp_path / "whole.parquet").read_bytes() == (tmp_path / "joined.parquet").read_bytes()


def test_a_complete_folder_is_not_recomputed_and_can_be_probed(vitrail, weights, classes, tmp_path):
    command = ("embed", "-m", weights, "--data", classes, "--out", tmp_path / "f", "--batch-size", "4")
    vitrail(*command)
    before = (tmp_path / "f" / "part-00000.parquet").stat().st_mtime_ns
    result = vitrail(*command)
    assert (result.status, (tmp_path / "f" / "part-00000.parquet").stat().st_mtime_ns) == (0, before)
    assert any("f is already complete" in note for note in result.notes)
    [message] = vitrail(*command, "--layer", "1").errors
    assert message.startswith(f"{tmp_path / 'f'} was made with features=head input, not layer 1, token;")
    assert vitrail(*command, "--layer", "1", "--overwrite").status == 0
    result = vitrail("probe", "--features", tmp_path / "f", "--method", "knn", "--k", "1", "--json")
    assert json.loads(result.out)["num_train"] == 7


def test_unreadable_images_are_listed_again_by_a_later_command(vitrail, weights, classes, tmp_path):
    (classes / "train" / "a" / "broken.png").write_bytes(b"no image")
    command = ("embed", "-m", weights, "--data", classes, "--out", tmp_path / "f")
    for _ in range(2):
        result = vitrail(*command)
        assert result.status == 1
        assert any("train/a/broken.png cannot be used" in note for note in result.notes)
        assert result.errors == ["skipped 1 unreadable image; add --skip-bad to allow this."]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shard 3/2", "--shard 3/2: expected I/N with I from 1 to N, such as 2/8, or auto."),
        ("--shard auto", "--shard auto: there is neither SLURM_ARRAY_TASK_ID"),
        ("--shard 1/2 --out f.parquet", "--shard needs a folder, to which all shards write; try --out f/."),
        ("--shard 1/2 --overwrite", "--overwrite would delete the parts of the other shards"),
        ("--on spark", "--on spark: expected ray (the cluster that ray start has started on this machine, or else"),
        ("--actors 2", "--actors needs --on ray."),
        ("--join nowhere", "--join only joins parts that exist; leave out --model, --data."),
    ],
)
def test_wrong_bulk_options_are_one_sentence_errors(
    vitrail, weights, classes, tmp_path, monkeypatch, options: str, message: str
):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    result = vitrail("embed", "-m", weights, "--data", classes, "--out", "parts", *options.split())
    assert result.status == 1
    assert message in result.errors[0]
    assert not (tmp_path / "parts").exists()


def test_wrong_joins_are_one_sentence_errors(vitrail, weights, classes, tmp_path):
    assert "there is no folder nowhere" in vitrail("embed", "--join", "nowhere", "--out", tmp_path / "a").errors[0]
    assert "--join needs --out" in vitrail("embed", "--join", "nowhere").errors[0]
    vitrail("predict", "-m", weights, "--data", classes, "--out", tmp_path / "classes")
    [message] = vitrail("embed", "--join", tmp_path / "classes", "--out", tmp_path / "a").errors
    assert message == f"{tmp_path / 'classes'} was made by vitrail predict; join it with that command."
