"""Exports: the files, their metadata and reports, the comparison with the model, and errors."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from small_models import LABELS, gradient, model, small

from vitrail.config import PreprocessConfig
from vitrail.engines import optional_packages
from vitrail.engines.engine import FileEngine, TorchEngine, open_file
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.errors import CheckpointError, ConfigError, FormatError, ModelError
from vitrail.exporting import compare, exporter, formats
from vitrail.exporting.export_options import format_from_path, normalize_precision, target_path
from vitrail.exporting.exporter import calibration_batches, export
from vitrail.exporting.open_engine import open_engine
from vitrail.exporting.sample_images import sample_images
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu


@pytest.fixture(scope="module")
def tiny_metadata(tiny) -> str:
    return ExportMetadata(info=tiny.info, to="onnx", batch_size=3, parameters=9).to_json()


def test_input_and_output_of_the_graph_match_the_metadata(onnx_file, tiny):
    graph = onnx.load(str(onnx_file.path)).graph
    [graph_input], [graph_output] = graph.input, graph.output
    shape = [d.dim_param or d.dim_value for d in graph_input.type.tensor_type.shape.dim]
    assert (graph_input.name, graph_output.name) == ("pixels", "probabilities")
    assert graph_input.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert shape == ["batch", 32, 48, 3]
    assert ExportMetadata.from_json(onnx_file.metadata.to_json()) == onnx_file.metadata
    assert onnx_file.metadata.info.labels == LABELS


def test_the_report_contains_metadata_and_comparison(onnx_file):
    report = json.loads(onnx_file.report.read_text())
    assert report["file"] == "tiny.onnx"
    assert report["model_info"]["labels"] == list(LABELS)
    assert report["input"] == {"shape": [None, 32, 48, 3], "type": "uint8"}
    comparison = report["comparison"]
    assert comparison["images"] == comparison["same_top1"]["count"] == 12
    assert 0 <= comparison["relative_error"] <= 1e-5 < comparison["relative_error_allowed"]
    assert comparison["speed"]["ratio"] > 0
    ran_on = comparison["ran_on"]
    assert (ran_on["cpu"], ran_on["instructions"]) == (detect_cpu().name, list(detect_cpu().instructions))
    assert (ran_on["engine"], ran_on["engine_version"]) == ("onnxruntime", version("onnxruntime"))
    assert ran_on["cores"] == usable_cores()
    assert sorted(p.name for p in onnx_file.path.parent.iterdir()) == ["tiny.onnx", "tiny.onnx.json"]
    assert report["bytes"] == onnx_file.path.stat().st_size


def test_an_openvino_export_has_two_files_and_pads_its_fixed_batch(openvino_file, torch_engine, images):
    names = sorted(p.name for p in openvino_file.path.parent.iterdir())
    assert names == ["tiny.bin", "tiny.xml", "tiny.xml.json"]
    engine = open_file(openvino_file.path)
    assert (engine.name, engine.metadata.batch_size) == ("openvino", 3)
    for count in (1, 3, 4, 7):
        batch = np.stack(images[:count])
        np.testing.assert_allclose(engine.logits(batch), torch_engine.logits(batch), atol=1e-5)


def test_an_export_that_does_not_match_raises_and_leaves_no_files(tiny, images, tmp_path, monkeypatch):
    other_model = model(small(image_size=(32, 48), width=32, depth=1, mlp_dim=48))
    with torch.no_grad():
        other_model.net.head.weight.mul_(1.01)
    monkeypatch.setattr(
        exporter, "reference_engine", lambda net, metadata: TorchEngine(other_model.net, other_model.info)
    )
    metadata = ExportMetadata(info=tiny.info, to="pt2")
    with pytest.raises(
        CheckpointError, match=r"tiny\.pt2 does not match .* relative error 0\.0\d+; 0\.0001 is allowed"
    ):
        export(tiny.net, metadata, tmp_path / "tiny.pt2", images)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_keeps_the_existing_file(tiny, images, tmp_path, monkeypatch):
    (tmp_path / "tiny.pt2").write_text("before")
    metadata = ExportMetadata(info=tiny.info, to="pt2")
    with pytest.raises(CheckpointError, match="already exists"):
        export(tiny.net, metadata, tmp_path / "tiny.pt2", images)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(formats, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(tiny.net, metadata, tmp_path / "tiny.pt2", images, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.pt2"]
    assert (tmp_path / "tiny.pt2").read_text() == "before"


@pytest.mark.parametrize(
    ("name", "to", "expected"),
    [("a", "onnx", "a.onnx"), ("a.xml", "openvino", "a.xml"), (".", "pt2", "model.pt2"), ("v1", "pt2", "v1.pt2")],
)
def test_target_path_adds_the_suffix_of_the_format(tmp_path, name, to, expected):
    assert target_path(tmp_path / name, to) == tmp_path / expected


def test_target_path_refuses_another_suffix(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"ends in \.xml for openvino; try .*model\.xml, or omit --to for onnx\.$"
    ):
        target_path(tmp_path / "model.onnx", "openvino")
    with pytest.raises(CheckpointError, match=r"ends in \.onnx for onnx; try .*model\.onnx; available formats: onnx"):
        target_path(tmp_path / "model.safetensors", "onnx")


@pytest.mark.parametrize(
    ("name", "to", "expected"),
    [
        ("a.pt2", None, "pt2"),
        ("a.XML", None, "openvino"),
        ("a.onnx", None, "onnx"),
        ("a", None, "onnx"),
        ("a.b", None, "onnx"),
        ("a.onnx", "pt2", "pt2"),
    ],
)
def test_the_suffix_selects_the_format_unless_one_is_given(name, to, expected):
    assert format_from_path(Path(name), to) == expected


def test_precisions_have_short_names():
    assert [normalize_precision(name) for name in ("bf16", "BF16", "fp32", "i8")] == [
        "bfloat16",
        "bfloat16",
        "float32",
        "int8",
    ]
    assert normalize_precision("int4") == "int4"


def test_the_snippet_of_the_docs_prepares_images_as_vitrail_does(images, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "export.md").read_text()
    [snippet] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "onnxruntime" in code]
    code, replaced = re.subn(r"^(import vitrail|vitrail\.export.*)$", "", snippet, flags=re.MULTILINE)
    assert (replaced, "vitrail." in code) == (2, False)
    preprocess = PreprocessConfig(image_size=32, resize="short", resize_to=36)
    vit = model(small(image_size=32, width=32, depth=1, mlp_dim=48), preprocess=preprocess)
    metadata = ExportMetadata(info=vit.info, to="onnx", output_type="probabilities")
    monkeypatch.chdir(tmp_path)
    export(
        vit.net, metadata, Path("model.onnx"), [vit.preprocess.pixels(image) for image in sample_images()], timed=False
    )
    for size in ((90, 41), (37, 64), (20, 50)):
        gradient(*size).rotate(20).save("cat.jpg")
        names: dict[str, Any] = {}
        exec(compile(code, "docs/export.md", "exec"), names)
        np.testing.assert_array_equal(names["pixels"][0], vit.preprocess.pixels("cat.jpg"))
        expected = {p.label: p.score for p in vit.predict("cat.jpg", top=5)}
        scores = dict(zip(names["info"]["labels"], names["probabilities"][0], strict=True))
        assert scores == pytest.approx(expected, abs=1e-5)


def test_exports_of_several_formats_can_share_a_name(tiny, images, tmp_path):
    for suffix, to in (("pt2", "pt2"), ("onnx", "onnx")):
        export(tiny.net, ExportMetadata(info=tiny.info, to=to), tmp_path / f"tiny.{suffix}", images, timed=False)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["tiny.onnx", "tiny.onnx.json", "tiny.pt2", "tiny.pt2.json"]


def test_metadata_contain_the_origin_without_its_folder(tiny, images, tmp_path):
    (tmp_path / "mine.safetensors").touch()
    for origin, expected in (
        (str(tmp_path / "mine.safetensors"), "mine.safetensors"),
        ("timm/vit_tiny", "timm/vit_tiny"),
    ):
        metadata = ExportMetadata(info=tiny.info.replace(origin=origin), to="onnx")
        result = export(tiny.net, metadata, tmp_path / "tiny.onnx", images, timed=False, overwrite=True)
        assert open_file(result.path).info.origin == result.metadata.info.origin == expected
        content = result.path.read_bytes() + result.report.read_bytes()
        assert str(tmp_path).encode() not in content
        assert b"tracing.py" not in content


@pytest.mark.parametrize(("to", "names"), [("onnx", ["t.onnx", "t.onnx.data"]), ("openvino", ["t.bin", "t.xml"])])
def test_large_weights_are_stored_in_a_separate_file(tiny, images, torch_engine, tmp_path, monkeypatch, to, names):
    monkeypatch.setattr(formats, "MAX_ONNX_BYTES", 1000)
    path = target_path(tmp_path / "t", to)
    result = export(tiny.net, ExportMetadata(info=tiny.info, to=to), path, images, timed=False)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".json") == names
    assert result.size == sum((tmp_path / name).stat().st_size for name in names) >= result.weight_bytes
    other_folder = tmp_path / "elsewhere"
    other_folder.mkdir()
    for name in names:
        (tmp_path / name).rename(other_folder / name)
    batch = np.stack(images)
    np.testing.assert_allclose(open_file(other_folder / path.name).logits(batch), torch_engine.logits(batch), atol=1e-5)


def test_weight_bytes_is_close_to_the_size_of_the_model(onnx_file, monkeypatch):
    """It is used instead of `ByteSize`, which fails above 2 GB."""
    onnx_model = onnx.load(str(onnx_file.path))
    assert 0.9 * onnx_file.weight_bytes <= formats.weight_bytes(onnx_model) <= onnx_model.ByteSize()


def test_int8_of_a_network_too_large_to_calibrate_is_refused_before_tracing(tiny, images, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_ONNX_BYTES", 1000)
    monkeypatch.setattr(exporter, "trace", lambda *_: pytest.fail("trace"))
    metadata = ExportMetadata(info=tiny.info, to="onnx", precision="int8")
    with pytest.raises(ModelError, match=r"to calibrate int8; .*openvino without calibration images"):
        export(tiny.net, metadata, tmp_path / "t.onnx", images, calibration=images)


@pytest.mark.parametrize(("batch_size", "sizes"), [(8, [8, 8]), (16, [16]), (None, [4, 4, 4])])
def test_fixed_calibration_batches_are_filled_by_repeating_the_first_images(tiny, images, batch_size, sizes):
    metadata = ExportMetadata(info=tiny.info, to="onnx", precision="int8", batch_size=batch_size)
    batches = calibration_batches(metadata, images)
    assert [len(part) for part in batches] == sizes
    calibration_images = np.concatenate(batches)
    np.testing.assert_array_equal(
        calibration_images, np.stack([images[i % 12] for i in range(len(calibration_images))])
    )
    assert calibration_batches(metadata, []) == []


def test_metadata_name_the_prefix_tokens(tiny):
    assert ExportMetadata(info=tiny.info, to="onnx").prefix_tokens == ("class",)
    config = small(image_size=(32, 48), distilled=True, num_registers=2)
    expected = ("class", "distill", "register 1", "register 2")
    assert ExportMetadata(info=tiny.info.replace(config=config), to="onnx").prefix_tokens == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "onix"}, "did you mean 'onnx'"),
        ({"precision": "int4"}, "did you mean 'int8'"),
        ({"precision": "bfloat16"}, "no bfloat16 matrix products"),
        ({"to": "pt2", "precision": "int8"}, "try onnx or openvino"),
        ({"batch_size": 0}, "expected 1 or more"),
    ],
)
def test_unsupported_options_are_refused_with_the_reason(tiny, options, message):
    with pytest.raises(ConfigError, match=message):
        ExportMetadata(**{"info": tiny.info, "to": "onnx"} | options)


def test_a_missing_package_raises_an_error_with_the_pip_command(monkeypatch):
    with pytest.raises(ConfigError, match=r"^onnx_not_there is not installed; try pip install 'vitrail\[export\]'\.$"):
        optional_packages.import_optional("onnx_not_there.helper")
    assert not optional_packages.is_installed("onnx_not_there")


def test_files_not_written_by_vitrail_are_refused(tmp_path, onnx_file):
    foreign = onnx.load(str(onnx_file.path))
    del foreign.metadata_props[:]
    onnx.save(foreign, str(tmp_path / "foreign.onnx"))
    (tmp_path / "broken.onnx").write_bytes(b"no protocol buffer")
    (tmp_path / "broken.pt2").write_bytes(b"no archive")
    for engine in ("onnxruntime", "openvino"):
        with pytest.raises(FormatError, match="not written by vitrail export"):
            open_engine(tmp_path / "foreign.onnx", engine)
    for name in ("broken.onnx", "broken.pt2"):
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read as"):
            open_engine(tmp_path / name)


HEADER = {"format": "vitrail-export", "version": 1}


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", "3", json.dumps(HEADER), json.dumps(HEADER | {"model_info": None})]
)
def test_damaged_metadata_raise_an_error_that_names_the_file(tmp_path, onnx_file, text):
    damaged = onnx.load(str(onnx_file.path))
    damaged.metadata_props[0].value = text
    onnx.save(damaged, str(tmp_path / "damaged.onnx"))
    for engine in ("onnxruntime", "openvino"):
        with pytest.raises(FormatError, match=r"damaged\.onnx: "):
            open_file(tmp_path / "damaged.onnx", engine)


INCONSISTENT = {
    "batch": (
        ("input", "shape", 0),
        10**9,
        r"got input shape \[1000000000, 32, 48, 3\] .* \[None, 32, 48, 3\] in its graph",
    ),
    "image": (
        ("model_info", "model", "image_size"),
        64,
        r"got input shape \[None, 64, 64, 3\] .* \[None, 32, 48, 3\] in its graph",
    ),
    "pixels": (
        ("model_info", "model", "image_size"),
        4_000_000,
        "got image_size=4000000x4000000, expected at most 67,108,864 pixels",
    ),
    "prepared": (("model_info", "preprocess", "image_size"), 4_000_000, "got preprocess.image_size=4000000x4000000"),
    "registers": (
        ("model_info", "model", "num_registers"),
        10**9,
        "got 1,000,000,024 patches and registers, expected at most",
    ),
    "classes": (("model_info", "model", "num_classes"), 10**9, r"got 1000000000 classes .* outputs \[5\]"),
}


@pytest.mark.parametrize("name", sorted(INCONSISTENT))
def test_metadata_that_contradict_the_graph_are_refused(tmp_path, onnx_file, name):
    (*keys, last_key), value, message = INCONSISTENT[name]
    onnx_model = onnx.load(str(onnx_file.path))
    metadata = json.loads(onnx_model.metadata_props[0].value)
    metadata["model_info"]["labels"] = None
    node = metadata
    for key in keys:
        node = node[key]
    node[last_key] = value
    onnx_model.metadata_props[0].value = json.dumps(metadata)
    onnx.save(onnx_model, str(tmp_path / "other.onnx"))
    for engine in ("onnxruntime", "openvino"):
        with pytest.raises(FormatError, match=rf"other\.onnx: {message}"):
            open_file(tmp_path / "other.onnx", engine)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_invalid_metadata_raise_only_format_errors(tiny_metadata, data):
    values = json.loads(tiny_metadata)
    node = values
    while True:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON)
    try:
        metadata = ExportMetadata.from_json(json.dumps(values))
    except FormatError:
        return
    assert ExportMetadata.from_json(metadata.to_json()) == metadata  # accepted metadata are complete


def test_sample_images_exist_for_any_number_of_channels(tmp_path):
    images = sample_images(5)
    assert len({image.tobytes() for image in images}) == 16
    assert all(image.dtype == np.uint8 and image.shape[2] == 5 for image in images)
    bands = images[0].transpose(2, 0, 1)
    assert len({band.tobytes() for band in bands}) == 5


def test_sample_images_contain_the_photographs_of_scikit_learn():
    from sklearn.datasets import load_sample_images

    for image, expected in zip((sample_images()[0], sample_images()[8]), load_sample_images().images, strict=True):
        np.testing.assert_array_equal(image, expected)


def test_sample_images_are_all_different():
    images = sample_images()
    assert len(images) == len({image.tobytes() for image in images}) == 16
    assert all(image.dtype == np.uint8 and image.shape[2] == 3 for image in images)
    assert sample_images(1)[0].shape[2] == 1


# Comparison of outputs


def make_engine(tiny, precision: str = "float32", **options: object) -> FileEngine:
    to = "onnx" if precision == "int8" else "openvino"
    metadata = ExportMetadata(info=tiny.info, to=to, precision=precision, **options)  # type: ignore[arg-type]
    return FileEngine("openvino", metadata, lambda inputs: inputs)


def test_errors_and_agreement_equal_hand_computed_values(tiny):
    expected = np.array([[3.0, 0, 0, 0, 4], [1, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 0, 0, 9]])
    outputs = expected.copy()
    outputs[0] = [4.0, 0, 0, 0, 3]  # another top-1 class
    targets = np.array([0, 0, 0, -1])
    comparison = compare.compare_outputs(outputs, expected, targets, make_engine(tiny))
    assert (comparison.images, comparison.same_top1, comparison.max_error) == (4, 3, 1.0)
    assert comparison.relative_error == pytest.approx(np.sqrt(2 / (25 + 1 + 4 + 81)))
    assert comparison.top1 == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert comparison.top1_change.value == pytest.approx(1 / 3)
    assert "relative error 0.13" in comparison.problem


def test_a_model_with_constant_outputs_gets_a_note(tiny):
    constant = np.tile([0.0, 1, 0, 0, 0], (4, 1))
    assert "shows little" in compare.compare_outputs(constant, constant, None, make_engine(tiny)).notes[0]
    varying = constant + np.eye(4, 5)
    assert compare.compare_outputs(varying, varying, None, make_engine(tiny)).notes == []


def test_a_tie_within_the_error_does_not_count_as_disagreement_in_float32(tiny):
    expected = np.array([[1.0, 1.0 + 1e-6, 0, 0, 0]] * 9)
    outputs = expected[:, [1, 0, 2, 3, 4]]
    comparison = compare.compare_outputs(outputs, expected, None, make_engine(tiny))
    assert (comparison.same_top1, comparison.near_ties, comparison.problem) == (0, 9, "")


def test_too_many_different_top1_classes_fail_the_comparison(tiny):
    expected = np.tile([1.0, 1.1, 0, 0, 0], (40, 1))
    outputs = expected.copy()
    outputs[:20, :2] = [1.06, 1.04]
    comparison = compare.compare_outputs(outputs, expected, None, make_engine(tiny, "int8"))
    assert comparison.relative_error < compare.TOLERANCE["int8"]
    assert comparison.problem == "got the same top-1 class for 20 of 40 images, expected 90 %"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_outputs_fail_the_comparison(tiny, value):
    expected = np.ones((2, 5))
    outputs = expected.copy()
    outputs[1, 1] = value
    assert compare.compare_outputs(outputs, expected, None, make_engine(tiny)).problem


def test_apply_output_type_equals_softmax_and_sigmoid_of_torch():
    logits = np.random.default_rng(0).normal(0, 30, (4, 6)).astype(np.float32)
    tensor = torch.from_numpy(logits)
    np.testing.assert_allclose(compare.apply_output_type(logits, "probabilities", False), tensor.softmax(1), atol=1e-6)
    np.testing.assert_allclose(compare.apply_output_type(logits, "probabilities", True), tensor.sigmoid(), atol=1e-6)
    assert compare.apply_output_type(logits, "features", False) is logits


def test_an_export_into_a_missing_folder_is_refused(tiny, images, tmp_path: Path):
    with pytest.raises(CheckpointError, match="create it first"):
        export(tiny.net, ExportMetadata(info=tiny.info, to="pt2"), tmp_path / "no" / "tiny.pt2", images)
