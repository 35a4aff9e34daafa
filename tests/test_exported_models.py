"""Exported files load, predict and evaluate like other models, and raise clear errors for what they cannot do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import need_extra
from exports import export_quickly
from PIL import Image
from small_models import LABELS, gradient, model, small

import vitrail
from vitrail.bulk.running import embed
from vitrail.errors import ConfigError, FormatError, ModelError
from vitrail.evaluation.features import FeatureSpec
from vitrail.exporting.export_model import export
from vitrail.exporting.open_engine import with_engine

need_extra("export")


@pytest.fixture(autouse=True, scope="module")
def _fast_exports() -> Any:
    """Shorten the exports of this module."""
    with pytest.MonkeyPatch.context() as patched:
        export_quickly(patched)
        yield


@pytest.fixture(scope="module")
def vit() -> vitrail.Model:
    """A small classifier whose probabilities differ clearly and whose images are not square."""
    return model(small(image_size=(32, 40), width=32, depth=1, mlp_dim=48), origin="somebody/small")


@pytest.fixture(scope="module")
def files(vit: vitrail.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of ONNX (pixels to probabilities), pt2 (normalized images to logits, batch size 4) and OpenVINO exports."""
    folder = tmp_path_factory.mktemp("exported")
    results = {
        "onnx": export(vit, folder / "a.onnx", check=[gradient()]),
        "pt2": export(vit, folder / "b.pt2", to="pt2", raw=True, batch_size=4, check=[gradient()]),
        "xml": export(vit, folder / "c.xml", to="openvino", check=[gradient()]),
    }
    return {kind: result.path for kind, result in results.items()}


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> tuple[vitrail.Model, Path]:
    vit = model(small(width=32, depth=1, mlp_dim=48, num_classes=0), task="embed", labels=None)
    return vit, export(vit, tmp_path_factory.mktemp("exported") / "f.onnx", check=[gradient()]).path


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ten images of three of the model's five classes."""
    folder, rng = tmp_path_factory.mktemp("album") / "album", np.random.default_rng(5)
    for label, count in {"bird": 3, "cat": 5, "dog": 2}.items():
        (folder / label).mkdir(parents=True)
        for i in range(count):
            noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((40, 36)).save(folder / label / f"{i}.png")
    return folder


@pytest.mark.parametrize("kind", ["onnx", "pt2", "xml"])
def test_a_loaded_file_predicts_like_the_model(vit, files, kind):
    exported = vitrail.load(str(files[kind]))
    images = [gradient(), gradient(30, 60), gradient(20), gradient(70), gradient(33)]
    for predictions, expected in zip(exported.predict(images), vit.predict(images), strict=True):
        assert [p.label for p in predictions] == [p.label for p in expected]
        assert [p.score for p in predictions] == pytest.approx([p.score for p in expected], abs=1e-5)
    assert exported.labels == LABELS
    assert exported.predict([]) == []


def test_a_home_directory_is_expanded(files, monkeypatch):
    monkeypatch.setenv("HOME", str(files["pt2"].parent))
    assert vitrail.load("~/b.pt2").predict(gradient(), top=1)


def test_class_names_can_be_replaced(files):
    exported = vitrail.load(files["onnx"], labels=list("abcde"))
    assert exported.labels == tuple("abcde")
    assert with_engine(exported, "openvino").labels == tuple("abcde")


@pytest.mark.parametrize("kind", ["onnx", "pt2", "xml"])
@pytest.mark.parametrize("flip", [False, True])
def test_evaluate_gives_the_same_scores_for_file_and_model(vit, files, album, kind, flip):
    options: dict[str, Any] = {"workers": 0, "batch_size": 3, "flip": flip}
    evaluation = vitrail.evaluate(str(files[kind]), str(album), device="cpu", **options)
    expected = vitrail.evaluate(vit, str(album), **options)
    samples, expected_samples = evaluation.first.samples, expected.first.samples
    np.testing.assert_array_equal(samples.prediction, expected_samples.prediction)
    np.testing.assert_allclose(samples.score, expected_samples.score, atol=1e-5)
    assert evaluation.top1.value == expected.top1.value
    assert evaluation.loss.value == pytest.approx(expected.loss.value, rel=1e-4)
    assert evaluation.first.throughput.network > 0


def test_float_pixels_are_not_rounded_before_the_file(tmp_path, album):
    antialiased = model(small(width=32, depth=1, mlp_dim=48))
    info = antialiased.info.replace(preprocess=antialiased.info.preprocess.replace(antialias=False))
    vit = vitrail.Model(antialiased.net, info)
    path = export(vit, tmp_path / "a.onnx", check=[gradient()]).path
    options: dict[str, Any] = {"workers": 0, "device": "cpu"}
    evaluation, expected = (vitrail.evaluate(source, str(album), **options) for source in (path, vit))
    assert evaluation.loss.value == pytest.approx(expected.loss.value, rel=1e-5)


def test_another_image_size_is_refused_before_the_evaluation_starts(files, album):
    started: list[str] = []

    def progress(name: str, total: int) -> Any:
        started.append(name)

    with pytest.raises(ModelError, match="is an exported model: it can be run, but not explained, modified"):
        vitrail.evaluate(files["onnx"], str(album), image_size=[(32, 40), 64], device="cpu", progress=progress)
    assert started == []


def test_a_file_with_features_as_output_embeds(features, album, tmp_path):
    vit, path = features
    exported = vitrail.load(path)
    images = [gradient(), gradient(30, 60)]
    torch.testing.assert_close(exported.embed(images), vit.embed(images), atol=1e-4, rtol=1e-4)
    assert exported.embed([]).shape == (0, 32)
    result = embed(exported, str(album), tmp_path / "f.parquet", batch_size=4)
    assert (result.num_images, result.width) == (10, 32)
    table = pq.read_table(result.path)
    expected = vit.embed([album / key for key in table["key"].to_pylist()])
    assert np.stack(table["embedding"].to_pylist()) == pytest.approx(expected.numpy(), abs=1e-4)
    with pytest.raises(ModelError, match="has no classes"):
        exported.predict(gradient())
    with pytest.raises(ModelError, match="use the checkpoint it was exported from"):
        embed(exported, str(album), tmp_path / "layer.parquet", spec=FeatureSpec(layers=(1,)))


def test_fingerprint_depends_on_all_files_of_the_export(files, tmp_path):
    for part in files["xml"].parent.glob("c.*"):
        shutil.copy(part, tmp_path)
    assert vitrail.load(files["xml"]).fingerprint == vitrail.load(tmp_path / "c.xml").fingerprint
    assert vitrail.load(files["xml"]).fingerprint != vitrail.load(files["onnx"]).fingerprint
    weights = tmp_path / "c.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")  # OpenVINO stores the weights separately
    assert vitrail.load(files["xml"]).fingerprint != vitrail.load(tmp_path / "c.xml").fingerprint


def test_operations_that_need_the_network_name_the_checkpoint_to_load(files, tmp_path):
    exported = vitrail.load(files["onnx"])
    message = (
        r"^\S+/a\.onnx is an exported model: it can be run, but not explained, modified or trained; "
        r"use the checkpoint it was exported from \(somebody/small\)\.$"
    )
    for operation in (
        lambda: exported.explain(gradient()),
        lambda: exported.save(tmp_path / "again"),
        lambda: exported.to("cpu"),
        lambda: export(exported, tmp_path / "again.onnx"),
        lambda: export(files["onnx"], tmp_path / "again.onnx"),
    ):
        with pytest.raises(ModelError, match=message):
            operation()
    with pytest.raises(ModelError, match="it outputs classes, not features; use the checkpoint it was exported from"):
        exported.embed(gradient())
    with pytest.raises(ModelError, match=r"^torch runs somebody/small: .*; load it without an engine\.$"):
        with_engine(model(small(), origin="somebody/small"), device="cpu").explain(gradient())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 64}, "is an exported file: image_size cannot be changed"),
        ({"num_classes": 3, "channels": 1}, "channels, num_classes cannot be changed"),
        ({"activation": "gelu-quick"}, "activation cannot be changed"),
        ({"device": "cuda"}, "runs on the CPU only; for cuda"),
        ({"dtype": "bfloat16"}, "has a fixed precision; for bfloat16"),
    ],
)
def test_options_fixed_by_the_export_cannot_be_changed(files, options, message):
    with pytest.raises(ConfigError, match=message):
        vitrail.load(files["pt2"], **options)


def test_a_loaded_file_can_be_run_by_another_engine(vit, files):
    openvino_model = with_engine(vitrail.load(files["onnx"]), "openvino")
    assert "run by openvino" in repr(openvino_model)
    torch.testing.assert_close(
        openvino_model.logits(gradient()).softmax(-1), vit.logits(gradient()).softmax(-1), atol=1e-5, rtol=1e-4
    )


def test_a_file_not_written_by_vitrail_is_refused_by_name(tmp_path):
    import onnx

    value_info = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [value_info("x", 1, [1])], [value_info("y", 1, [1])])
    onnx_model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    onnx.save_model(onnx_model, str(tmp_path / "foreign.onnx"))
    with pytest.raises(FormatError, match=r"foreign\.onnx was not written by vitrail export"):
        vitrail.load(tmp_path / "foreign.onnx")
