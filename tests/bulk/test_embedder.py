"""`vitrail.Embedder` gives the same rows for every kind of batch, in any process, in the engines' map functions."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, need_extra
from images import write_noise_folder
from PIL import Image

import vitrail
from vitrail.bulk import embedder as module
from vitrail.errors import ConfigError, ModelError
from vitrail.evaluation.features import FeatureSpec


@pytest.fixture(autouse=True)
def _no_models_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MODELS", {})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = write_noise_folder(tmp_path_factory.mktemp("data") / "photos", {"cat": 7})
    return sorted((folder / "cat").iterdir())


@pytest.fixture
def encoded(photos: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in photos]


@pytest.fixture
def embedder(model_folder: Path) -> vitrail.Embedder:
    return vitrail.Embedder(model_folder, batch_size=4)


def test_features_are_those_of_the_model(vit, embedder, encoded):
    found = embedder(encoded)
    assert found["embedding"] == pytest.approx(vit.embed(encoded).numpy(), abs=1e-5)
    assert found["error"].tolist() == [None] * 7


def test_every_kind_of_batch_gives_the_same_rows(embedder, photos, encoded):
    pandas = pytest.importorskip("pandas")
    expected = embedder(encoded)["embedding"]
    objects = np.array(encoded, object)
    assert (embedder(iter(encoded))["embedding"] == expected).all()
    assert (embedder(photos)["embedding"] == expected).all()
    assert (embedder([str(path) for path in photos])["embedding"] == expected).all()
    assert (embedder(objects)["embedding"] == expected).all()
    mapping = embedder({"bytes": objects, "id": np.arange(7)})
    assert (mapping["embedding"] == expected).all()
    assert list(mapping) == ["id", "embedding", "error"]
    for batch in (pa.table({"id": range(7), "bytes": encoded}), pa.record_batch({"id": range(7), "bytes": encoded})):
        found = embedder(batch)
        assert type(found) is type(batch)
        assert found.schema.names == ["id", "embedding", "error"]
        assert np.array_equal(np.stack(found["embedding"].to_pylist()), expected)
    frame = embedder(pandas.DataFrame({"id": range(7), "image": encoded}))
    assert list(frame.columns) == ["id", "embedding", "error"]
    assert np.array_equal(np.stack(list(frame["embedding"])), expected)


def test_columns_of_the_batch_with_the_names_of_results_are_replaced(embedder, encoded):
    columns = {"error": ["old"] * 2, "embedding": [1, 2], "bytes": encoded[:2], "id": [3, 4]}
    for batch in (pa.table(columns), pa.record_batch(columns)):
        found = embedder(batch)
        assert found.schema.names == ["id", "embedding", "error"]
        assert found["error"].null_count == 2
    assert list(embedder(columns)["error"]) == [None, None]


@pytest.mark.parametrize("output", ["features", "predictions"])
def test_engines_may_pass_empty_batches(model_folder, output):
    pandas = pytest.importorskip("pandas")
    embedder = vitrail.Embedder(model_folder, output=output, batch_size=4)
    empty = pa.table({"id": pa.array([], pa.int64()), "bytes": pa.array([], pa.binary())})
    columns = embedder(empty).schema.names
    assert list(embedder({"id": [], "bytes": []})) == columns
    assert list(embedder(pandas.DataFrame({"id": [], "bytes": []}))) == columns
    batch = embedder(pa.record_batch({"id": pa.array([], pa.int64()), "bytes": pa.array([], pa.binary())}))
    assert (batch.schema.names, batch.num_rows) == (columns, 0)


def test_rows_of_hugging_face_are_images(embedder, photos, encoded):
    expected = embedder(encoded[:2])["embedding"]
    rows = [{"bytes": encoded[0], "path": None}, {"bytes": None, "path": str(photos[1])}]
    assert (embedder({"image": rows})["embedding"] == expected).all()
    found = embedder(pa.table({"image": rows}))
    assert np.array_equal(np.stack(found["embedding"].to_pylist()), expected)
    assert "got dict" in embedder([{"pixels": 1}])["error"][0]


def test_errors_in_pandas_are_none_or_text(embedder, encoded):
    pandas = pytest.importorskip("pandas")
    frame = embedder(pandas.DataFrame({"bytes": [encoded[0], b"no image"]}, index=[7, 9]))
    assert list(frame.index) == [7, 9]
    assert frame["error"][7] is None
    assert "not an image" in frame["error"][9]


def test_an_exported_model_is_sent_as_its_file(vit, tmp_path, encoded):
    need_extra("export")
    vitrail.export(vit, tmp_path / "m.onnx", to="onnx")
    opened = vitrail.Embedder(vitrail.load(tmp_path / "m.onnx"), output="predictions")
    expected = opened(encoded[:2])["top_labels"]
    with pytest.raises(ConfigError, match="cannot be sent to other processes; pass the exported file to Embedder"):
        pickle.dumps(opened)
    copy = pickle.loads(pickle.dumps(vitrail.Embedder(tmp_path / "m.onnx", output="predictions")))
    assert (copy(encoded[:2])["top_labels"] == expected).all()


def test_arrays_are_images(vit, embedder):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 40, 40, 3), dtype=np.uint8)
    assert embedder(pixels)["embedding"] == pytest.approx(vit.embed(list(pixels)).numpy(), abs=1e-5)


def test_rows_do_not_depend_on_how_an_engine_cuts_batches(embedder, encoded):
    whole = embedder(encoded[:4])["embedding"]
    assert np.allclose(whole[:3], embedder(encoded[:3])["embedding"], atol=1e-6)
    assert embedder([])["embedding"].shape == (0, 128)


def test_predictions_have_names_scores_and_indices(vit, model_folder, encoded):
    found = vitrail.Embedder(model_folder, output="predictions", top=2, batch_size=4)(encoded)
    for row, expected in enumerate(vit.predict(encoded, top=2)):
        assert found["top_labels"][row].tolist() == [p.label for p in expected]
        assert found["top_indices"][row].tolist() == [p.index for p in expected]
        assert found["top_scores"][row] == pytest.approx([p.score for p in expected], abs=1e-5)


@pytest.mark.parametrize("output", ["features", "predictions"])
def test_an_unreadable_image_has_an_error_and_no_values(model_folder, encoded, output):
    images = [*encoded[:2], b"no image", None, *encoded[2:]]
    embedder = vitrail.Embedder(model_folder, output=output, batch_size=4)
    found = embedder(images)
    assert [error is not None for error in found["error"]] == [False, False, True, True, *[False] * 5]
    name = "embedding" if output == "features" else "top_scores"
    assert (found[name][2:4] == 0).all()
    assert (found[name][4:] != 0).any(axis=1).all()
    table = embedder(pa.table({"bytes": images}))
    assert [value is None for value in table[name].to_pylist()] == [error is not None for error in found["error"]]


def test_it_is_pickled_without_its_model_and_loads_once_in_a_process(embedder, encoded, monkeypatch):
    expected = embedder(encoded[:2])["embedding"]
    data = pickle.dumps(embedder)
    assert len(data) < 2000
    loads: list[Any] = []
    monkeypatch.setattr(module, "_MODELS", {})
    monkeypatch.setattr(module, "load", lambda *a, **k: loads.append(a) or vitrail.load(*a, **k))
    for _ in range(3):  # an engine unpickles the object for each batch
        assert np.array_equal(pickle.loads(data)(encoded[:2])["embedding"], expected)
    assert len(loads) == 1
    for size in (32, 40, 48):
        pickle.loads(data).__class__(embedder.model, image_size=size)(encoded[:1])
    assert len(module._MODELS) == module.MAX_CACHED


def test_a_loaded_model_is_pickled_with_it(vit, encoded):
    copy = pickle.loads(pickle.dumps(vitrail.Embedder(vit, batch_size=4)))
    assert np.array_equal(copy(encoded)["embedding"], vitrail.Embedder(vit, batch_size=4)(encoded)["embedding"])


def test_layers_normalization_and_options_of_load_are_passed_on(model_folder, encoded):
    spec = FeatureSpec(layers=(1, 2))
    found = vitrail.Embedder(model_folder, spec=spec, normalize=True, image_size=48, dtype="float64")(encoded)
    assert found["embedding"].shape == (7, 256)
    assert np.linalg.norm(found["embedding"], axis=1) == pytest.approx(np.ones(7), abs=1e-5)


def test_without_a_model_the_shipped_one_is_used():
    assert vitrail.Embedder()([Image.new("RGB", (32, 32))])["embedding"].shape == (1, 192)


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({"output": "logits"}, [], "unknown output 'logits'; available: features, predictions"),
        ({"batch_size": 0}, [], "batch_size=0: expected at least 1"),
        ({"threads": 0}, [], "threads=0: expected at least 1"),
        ({}, np.zeros((8, 8, 3), np.uint8), r"got an array of shape \(8, 8, 3\), expected N H W C; try \[image\]"),
        ({"top": 0, "output": "predictions"}, [], "top=0: expected at least 1"),
        ({}, b"...", "got one image .bytes., expected a batch, such as a list of them"),
        ({}, 5, "got int, expected a list of images, an array, columns or a table"),
        ({}, {"a": [1], "b": [2]}, "the batch has the columns a, b, and none of bytes, image, .*column="),
        ({"column": "jpg"}, {"a": [1]}, "the batch has no column 'jpg'; it has a"),
    ],
)
def test_wrong_options_and_batches_are_refused(model_folder, options, batch, message):
    with pytest.raises(ConfigError, match=message):
        vitrail.Embedder(model_folder, **options)(batch)


def test_a_layer_that_is_not_there_is_refused(model_folder, encoded):
    with pytest.raises(ModelError, match="there is no layer 9 of 2"):
        vitrail.Embedder(model_folder, spec=FeatureSpec(layers=(9,)))(encoded)


def test_map_is_the_function_of_mapinpandas_and_mapinarrow(embedder, encoded):
    """Spark calls it with an iterator of batches, and expects one of batches."""
    batches: Iterator[Any] = (pa.record_batch({"id": [n], "bytes": [data]}) for n, data in enumerate(encoded))
    found = list(embedder.map(batches))
    assert [batch["id"].to_pylist() for batch in found] == [[n] for n in range(7)]
    expected = embedder(encoded)["embedding"]
    assert np.allclose(
        np.concatenate([np.stack(batch["embedding"].to_pylist()) for batch in found]), expected, atol=1e-6
    )


def run_example(name: str, *arguments: object) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def check_example(vit: vitrail.Model, photos: list[Path], out: Path) -> None:
    table = pq.read_table(out)
    rows = dict(zip(table["path"].to_pylist(), table["embedding"].to_pylist(), strict=True))
    assert len(rows) == 7
    assert np.stack([rows[str(path)] for path in photos]) == pytest.approx(vit.embed(photos).numpy(), abs=1e-5)


def test_example_for_dask(vit, model_folder, photos, tmp_path):
    pytest.importorskip("dask", reason="dask is not installed; make test installs it")
    run_example("embed_with_dask.py", photos[0].parent, tmp_path / "features", "--model", model_folder)
    check_example(vit, photos, tmp_path / "features")


@pytest.mark.slow
def test_example_for_ray(vit, model_folder, photos, tmp_path):
    need_extra("ray")
    run_example("embed_with_ray.py", photos[0].parent, tmp_path / "features", "--model", model_folder, "--actors", 1)
    check_example(vit, photos, tmp_path / "features")
