"""The bits of a row depend neither on the number of cores nor on which process computes its part, nor when."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from images import encoded, write_noise_folder
from PIL import Image
from small_models import model, small

import vitrail
from vitrail.bulk.job import Job, ModelSource, OpenJob
from vitrail.bulk.joining import join
from vitrail.bulk.outputs import FeatureOutput, PredictionOutput
from vitrail.bulk.running import embed, predict
from vitrail.config import DataConfig
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.evaluation.features import FeatureSpec


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of two classes, one of which cannot be read."""
    folder = write_noise_folder(tmp_path_factory.mktemp("data") / "photos", {"cat": 21, "dog": 19})
    (folder / "cat" / "7.png").write_bytes(b"no image")
    return folder


def open_job(vit: vitrail.Model, photos: Path, **options: object) -> OpenJob:
    values = {"output": FeatureOutput(), "batch_size": 4, "images_per_part": 8} | options
    return Job(model=None, data=DataConfig(source=str(photos)), **values).open(vit)  # type: ignore[arg-type]


def tables(job: OpenJob, numbers, cores: int, readers: int) -> dict[int, pa.Table]:
    parts = [job.parts[n] for n in numbers]
    return {each.part.number: each.table for each in job.computer(cores, readers).compute(parts)}


@pytest.mark.parametrize("output", [FeatureOutput(normalize=True), PredictionOutput(top=2)])
def test_rows_are_the_same_bits_for_any_cores_order_and_division(vit, photos, output):
    job = open_job(vit, photos, output=output)
    expected = tables(job, range(5), cores=1, readers=0)
    assert list(expected) == [0, 1, 2, 3, 4]
    others = [
        tables(job, range(5), cores=3, readers=2),
        tables(job, [4, 1, 3], cores=2, readers=0),
        {n: table for n in (3, 0) for n, table in tables(job, [n], cores=2, readers=0).items()},
    ]
    for found in others:
        assert all(table.equals(expected[number], check_metadata=True) for number, table in found.items())


def test_features_are_those_of_the_model(vit, photos, tmp_path):
    result = embed(vit, str(photos), tmp_path / "f", batch_size=4, images_per_part=8)
    assert (result.num_images, result.num_parts, list(result.unreadable)) == (39, 5, ["cat/7.png"])
    table = pa.concat_tables(pq.read_table(path) for path in sorted((tmp_path / "f").glob("part-*")))
    expected = vit.embed([photos / key for key in table["key"].to_pylist()])
    assert np.stack(table["embedding"].to_pylist()) == pytest.approx(expected.numpy(), abs=1e-5)


def test_torchs_number_of_threads_is_restored(vit, photos, tmp_path):
    before = torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        embed(vit, str(photos), tmp_path / f"{number}.parquet", batch_size=4)
        assert torch.get_num_threads() == number
    torch.set_num_threads(before)
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()


def test_predictions_have_a_row_for_every_image(vit, photos, tmp_path):
    result = predict(vit, str(photos), tmp_path / "p.parquet", top=2, batch_size=4, images_per_part=8)
    assert (result.num_images, result.width) == (40, 2)
    rows = pq.read_table(tmp_path / "p.parquet").to_pylist()
    [bad] = [row for row in rows if row["error"]]
    assert (bad["key"], bad["top_labels"], bad["label"]) == ("cat/7.png", None, "cat")
    assert "7.png" in bad["error"]
    for row in rows[:3]:
        expected = vit.predict(photos / row["key"], top=2)
        assert row["top_labels"] == [p.label for p in expected]
        assert row["top_indices"] == [p.index for p in expected]
        assert row["top_scores"] == pytest.approx([p.score for p in expected], abs=1e-5)


def test_images_of_the_same_name_are_told_apart(vit, tmp_path):
    """Parquet files of the same name in two folders; the row of one cannot be read, that of the other can."""
    good = [encoded(Image.new("RGB", (8, 8), color), "PNG") for color in ("red", "green", "blue", "gray")]
    for folder, images in (("a", good), ("b", [good[0], b"bad", b"bad", good[3]]), ("c", [*good[:2], b"bad", good[3]])):
        (tmp_path / "data" / folder).mkdir(parents=True)
        rows = [{"image": {"bytes": data, "path": None}, "label": n % 2} for n, data in enumerate(images)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / folder / "0.parquet")
    result = predict(vit, str(tmp_path / "data"), tmp_path / "p", batch_size=4, images_per_part=8)
    rows = [row for path in sorted((tmp_path / "p").glob("part-*")) for row in pq.read_table(path).to_pylist()]
    bad = [5, 6, 10]
    assert [n for n, row in enumerate(rows) if row["error"]] == bad
    assert [n for n, row in enumerate(rows) if row["top_labels"] is None] == bad
    assert list(result.unreadable) == ["b/0.parquet:1", "b/0.parquet:2", "c/0.parquet:2"]
    assert json.loads((tmp_path / "p" / "complete.json").read_text())["num_unreadable"] == 3
    joined = join([tmp_path / "p"], tmp_path / "p.parquet")
    assert joined.unreadable == result.unreadable


def test_a_file_that_a_table_lists_twice_counts_twice(vit, photos, tmp_path):
    names = [str(photos / "cat" / name) for name in ("1.png", "7.png", "7.png")]
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{name},cat\n" for name in names))
    result = embed(vit, str(tmp_path / "t.csv"), tmp_path / "f.parquet", batch_size=4)
    assert (result.num_images, list(result.unreadable)) == (1, [names[1], f"{names[1]} (image 2)"])


def test_a_part_without_a_readable_image_is_written(vit, tmp_path):
    folder = write_noise_folder(tmp_path / "photos", {"cat": 4, "dog": 4})
    for path in (folder / "cat").iterdir():
        path.write_bytes(b"no image")
    assert embed(vit, str(folder), tmp_path / "f", batch_size=4, images_per_part=4).num_images == 4
    assert pq.read_metadata(tmp_path / "f" / "part-00000.parquet").num_rows == 0
    assert predict(vit, str(folder), tmp_path / "p", batch_size=4, images_per_part=4).num_images == 8
    assert pq.read_table(tmp_path / "p" / "part-00000.parquet")["top_labels"].null_count == 4


def test_names_that_are_not_utf8_are_written_with_escapes(vit, tmp_path):
    folder = write_noise_folder(tmp_path / "photos", {"cat": 2})
    (folder / "cat" / "0.png").rename(folder / "cat" / "\udcff.png")
    embed(vit, str(folder), tmp_path / "f.parquet")
    assert "cat/\\udcff.png" in pq.read_table(tmp_path / "f.parquet")["key"].to_pylist()


def test_settings_name_what_determines_the_rows(vit, photos):
    job = open_job(vit, photos)
    settings = job.settings("cpu")
    assert (settings["engine"], settings["device"], settings["threads"]) == ("torch float32", "cpu", 1)
    assert json.loads(json.dumps(settings)) == settings
    assert job.settings("cuda")["threads"] is None
    changes = {"batch_size": 8, "threads": 2, "split": "train", "output": FeatureOutput(spec=FeatureSpec(layers=(1,)))}
    for name, value in changes.items():
        other = open_job(vit, photos, **{name: value})
        assert other.manifest().digest != job.manifest().digest


def test_an_actor_with_another_model_other_images_or_versions_is_refused(vit, photos, tmp_path, monkeypatch):
    manifest = open_job(vit, photos).manifest()
    other_model = model(small())
    with torch.no_grad():
        other_model.net.norm.weight.add_(1)
    with pytest.raises(ConfigError, match=r"node7 has weights=\w{8}, and the manifest weights=\w{8}; give it"):
        open_job(other_model, photos).check_same(manifest, "cpu", "node7")
    other = write_noise_folder(tmp_path / "photos", {"cat": 21, "dog": 20})
    with pytest.raises(ConfigError, match="node7 has images="):
        open_job(vit, other).check_same(manifest, "cpu", "node7")
    monkeypatch.chdir(photos.parent)
    open_job(vit, Path(photos.name)).check_same(manifest, "cpu", "node7")  # under another name
    monkeypatch.setattr("vitrail.bulk.job.version", lambda name: "0.0.1")
    with pytest.raises(ConfigError, match=r"node7 has vitrail=0\.0\.1, and the manifest vitrail="):
        open_job(vit, photos).check_same(manifest, "cpu", "node7")


def test_the_processor_of_other_machines_is_not_guessed(vit, photos):
    job = open_job(vit, photos)
    assert job.manifest().processor == job.processor("cpu") != ""
    assert job.manifest("cuda").processor == ""


def test_a_job_is_small_and_independent_of_the_folder(model_folder, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(photos.parent)
    data = DataConfig(source="folder:photos", root="root")
    source = ModelSource(model_folder.name, {"labels": f"{model_folder.name}/config.json", "image_size": 48})
    job = Job(model=source, data=data, output=FeatureOutput())
    monkeypatch.chdir(model_folder.parent)
    expected = ModelSource(model_folder, {"labels": model_folder / "config.json", "image_size": 48})
    assert job.for_other_processes().model == expected
    monkeypatch.chdir(photos.parent)
    assert job.for_other_processes().data.source == f"folder:{photos}"
    assert job.for_other_processes().data.root == str(photos.parent / "root")
    assert len(pickle.dumps(job)) < 5000
    remote = replace(job, data=DataConfig(source="shards:s3://bucket/train.tar")).for_other_processes()
    assert remote.data.source == "shards:s3://bucket/train.tar"


def test_wrong_options_are_refused(vit, photos, tmp_path):
    for options, message in (
        ({"split": "tset"}, "unknown split 'tset'; did you mean 'test'"),
        ({"split": "test"}, "has no test split; it has train"),
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"threads": 0}, "threads=0: expected at least 1"),
        ({"images_per_part": -1}, "images_per_part=-1: expected at least 1"),
        ({"shard": "0/2"}, "--shard 0/2: expected I/N"),
        ({"on": "dask"}, "--on dask: expected ray"),
        ({"on": "ray", "actors": 0}, "--actors 0: expected at least 1"),
        ({"on": "ray"}, "Ray's actors load the model themselves; pass its file, folder or name"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            embed(vit, str(photos), tmp_path / "f", **options)
    with pytest.raises(ConfigError, match="top=0: expected at least 1"):
        predict(vit, str(photos), tmp_path / "f", top=0)
    with pytest.raises(ModelError, match="has no classes"):
        predict(model(small(num_classes=0), task="embed"), str(photos), tmp_path / "f")
    assert not (tmp_path / "f").exists()
