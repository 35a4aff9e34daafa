"""From a network to a file: compared before it is called done, complete or not there at all."""

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
from vitrail.errors import CheckpointError, ConfigError, FormatError, ModelError
from vitrail.export import compare, formats, optional_packages
from vitrail.export import exporter as exporting
from vitrail.export.engines import FileEngine, TorchEngine, open_engine, open_file
from vitrail.export.export_metadata import ExportMetadata
from vitrail.export.export_options import format_from_path, normalize_precision, target_path
from vitrail.export.exporter import calibration_batches, export
from vitrail.export.sample_images import sample_images
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu


@pytest.fixture(scope="module")
def tiny_metadata(tiny) -> str:
    return ExportMetadata(info=tiny.info, to="onnx", batch_size=3, parameters=9).to_json()


def test_a_file_says_what_goes_in_and_what_comes_out(onnx_file, tiny):
    graph = onnx.load(str(onnx_file.path)).graph
    [given], [out] = graph.input, graph.output
    shape = [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
    assert (given.name, out.name) == ("pixels", "probabilities")
    assert given.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert shape == ["batch", 32, 48, 3]
    assert ExportMetadata.from_json(onnx_file.metadata.to_json()) == onnx_file.metadata
    assert onnx_file.metadata.info.labels == LABELS


def test_the_report_beside_a_file_has_what_was_found(onnx_file):
    report = json.loads(onnx_file.report.read_text())
    assert report["file"] == "tiny.onnx"
    assert report["model_info"]["labels"] == list(LABELS)
    assert report["input"] == {"shape": [None, 32, 48, 3], "type": "uint8"}
    found = report["comparison"]
    assert found["images"] == found["same_top1"]["count"] == 12
    assert 0 <= found["relative_error"] <= 1e-5 < found["relative_error_allowed"]
    assert found["speed"]["ratio"] > 0
    here = found["ran_on"]
    assert (here["cpu"], here["instructions"]) == (detect_cpu().name, list(detect_cpu().instructions))
    assert (here["engine"], here["engine_version"]) == ("onnxruntime", version("onnxruntime"))
    assert here["cores"] == usable_cores()
    assert sorted(p.name for p in onnx_file.path.parent.iterdir()) == ["tiny.onnx", "tiny.onnx.json"]
    assert report["bytes"] == onnx_file.path.stat().st_size


def test_openvino_is_two_files_and_a_fixed_batch_is_filled_up(openvino_file, own, images):
    names = sorted(p.name for p in openvino_file.path.parent.iterdir())
    assert names == ["tiny.bin", "tiny.xml", "tiny.xml.json"]
    engine = open_file(openvino_file.path)
    assert (engine.name, engine.metadata.batch_size) == ("openvino", 3)
    for count in (1, 3, 4, 7):
        batch = np.stack(images[:count])
        np.testing.assert_allclose(engine.logits(batch), own.logits(batch), atol=1e-5)


def test_an_export_that_disagrees_fails_and_leaves_nothing_behind(tiny, images, tmp_path, monkeypatch):
    other = model(small(image_size=(32, 48), width=32, depth=1, mlp_dim=48))
    with torch.no_grad():
        other.net.head.weight.mul_(1.01)
    monkeypatch.setattr(exporting, "reference_engine", lambda net, metadata: TorchEngine(other.net, other.info))
    metadata = ExportMetadata(info=tiny.info, to="pt2")
    with pytest.raises(CheckpointError, match=r"tiny\.pt2 does not agree .* off by 0\.0\d+ of their size, 0\.0001"):
        export(tiny.net, metadata, tmp_path / "tiny.pt2", images)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_what_was_there(tiny, images, tmp_path, monkeypatch):
    (tmp_path / "tiny.pt2").write_text("before")
    metadata = ExportMetadata(info=tiny.info, to="pt2")
    with pytest.raises(CheckpointError, match="exists already"):
        export(tiny.net, metadata, tmp_path / "tiny.pt2", images)

    def fails(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(formats, "write", fails)
    with pytest.raises(KeyboardInterrupt):
        export(tiny.net, metadata, tmp_path / "tiny.pt2", images, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.pt2"]
    assert (tmp_path / "tiny.pt2").read_text() == "before"


@pytest.mark.parametrize(
    ("given", "to", "expected"),
    [("a", "onnx", "a.onnx"), ("a.xml", "openvino", "a.xml"), (".", "pt2", "model.pt2"), ("v1", "pt2", "v1.pt2")],
)
def test_a_name_gets_the_formats_ending(tmp_path, given, to, expected):
    assert target_path(tmp_path / given, to) == tmp_path / expected


def test_a_name_with_another_ending_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"ends in \.xml; try .*model\.xml, or leave --to out for onnx\.$"):
        target_path(tmp_path / "model.onnx", "openvino")
    with pytest.raises(CheckpointError, match=r"ends in \.onnx; try .*model\.onnx\.$"):
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
def test_an_ending_tells_the_format_unless_one_is_asked_for(name, to, expected):
    assert format_from_path(Path(name), to) == expected


def test_precisions_go_by_their_short_names_too():
    assert [normalize_precision(name) for name in ("bf16", "BF16", "fp32", "i8")] == [
        "bfloat16",
        "bfloat16",
        "float32",
        "int8",
    ]
    assert normalize_precision("int4") == "int4"


def test_the_pages_snippet_prepares_images_as_vitrail_does(images, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "export.md").read_text()
    [snippet] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "onnxruntime" in code]
    code, replaced = re.subn(r"^(import vitrail|vitrail\.export.*)$", "", snippet, flags=re.MULTILINE)
    assert (replaced, "vitrail." in code) == (2, False)
    how = PreprocessConfig(image_size=32, resize="short", resize_to=36)
    vit = model(small(image_size=32, width=32, depth=1, mlp_dim=48), preprocess=how)
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
        found = dict(zip(names["info"]["labels"], names["probabilities"][0], strict=True))
        assert found == pytest.approx(expected, abs=1e-5)


def test_formats_of_one_name_lie_side_by_side(tiny, images, tmp_path):
    for suffix, to in (("pt2", "pt2"), ("onnx", "onnx")):
        export(tiny.net, ExportMetadata(info=tiny.info, to=to), tmp_path / f"tiny.{suffix}", images, timed=False)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["tiny.onnx", "tiny.onnx.json", "tiny.pt2", "tiny.pt2.json"]


def test_a_file_says_what_it_was_made_from_and_not_where_that_lay(tiny, images, tmp_path):
    (tmp_path / "mine.safetensors").touch()
    for origin, expected in (
        (str(tmp_path / "mine.safetensors"), "mine.safetensors"),
        ("timm/vit_tiny", "timm/vit_tiny"),
    ):
        metadata = ExportMetadata(info=tiny.info.replace(origin=origin), to="onnx")
        made = export(tiny.net, metadata, tmp_path / "tiny.onnx", images, timed=False, overwrite=True)
        assert open_file(made.path).info.origin == made.metadata.info.origin == expected
        everything = made.path.read_bytes() + made.report.read_bytes()
        assert str(tmp_path).encode() not in everything
        assert b"tracing.py" not in everything


@pytest.mark.parametrize(("to", "parts"), [("onnx", ["t.onnx", "t.onnx.data"]), ("openvino", ["t.bin", "t.xml"])])
def test_a_network_too_large_for_one_file_gets_two(tiny, images, own, tmp_path, monkeypatch, to, parts):
    monkeypatch.setattr(formats, "MAX_ONNX_BYTES", 1000)
    path = target_path(tmp_path / "t", to)
    made = export(tiny.net, ExportMetadata(info=tiny.info, to=to), path, images, timed=False)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".json") == parts
    assert made.size == sum((tmp_path / name).stat().st_size for name in parts) >= made.weights
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in parts:
        (tmp_path / name).rename(moved / name)
    batch = np.stack(images)
    np.testing.assert_allclose(open_file(moved / path.name).logits(batch), own.logits(batch), atol=1e-5)


def test_size_is_told_by_the_weights_where_protobuf_cannot(onnx_file, monkeypatch):
    """Above two gigabytes `ByteSize` fails."""
    found = onnx.load(str(onnx_file.path))
    assert 0.9 * onnx_file.weights <= formats.weight_bytes(found) <= found.ByteSize()


def test_int8_of_a_network_that_cannot_be_calibrated_is_refused_before_the_work(tiny, images, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_ONNX_BYTES", 1000)
    monkeypatch.setattr(exporting, "trace", lambda *_: pytest.fail("trace"))
    metadata = ExportMetadata(info=tiny.info, to="onnx", precision="int8")
    with pytest.raises(ModelError, match=r"to calibrate int8; .*openvino without calibration images"):
        export(tiny.net, metadata, tmp_path / "t.onnx", images, calibration=images)


@pytest.mark.parametrize(("batch", "shapes"), [(8, [8, 8]), (16, [16]), (None, [4, 4, 4])])
def test_a_fixed_batch_to_calibrate_on_is_filled_with_the_first_images_again(tiny, images, batch, shapes):
    metadata = ExportMetadata(info=tiny.info, to="onnx", precision="int8", batch_size=batch)
    found = calibration_batches(metadata, images)
    assert [len(part) for part in found] == shapes
    given = np.concatenate(found)
    np.testing.assert_array_equal(given, np.stack([images[i % 12] for i in range(len(given))]))
    assert calibration_batches(metadata, []) == []


def test_the_tokens_that_are_no_patches_are_known(tiny):
    assert ExportMetadata(info=tiny.info, to="onnx").special_tokens == ("class",)
    config = small(image_size=(32, 48), distilled=True, num_registers=2)
    expected = ("class", "distill", "register 1", "register 2")
    assert ExportMetadata(info=tiny.info.replace(config=config), to="onnx").special_tokens == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "onix"}, "did you mean 'onnx'"),
        ({"precision": "int4"}, "did you mean 'int8'"),
        ({"precision": "bfloat16"}, "no products in bfloat16"),
        ({"to": "pt2", "precision": "int8"}, "try onnx or openvino"),
        ({"batch_size": 0}, "expected 1 image"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_reason(tiny, options, message):
    with pytest.raises(ConfigError, match=message):
        ExportMetadata(**{"info": tiny.info, "to": "onnx"} | options)


def test_a_missing_package_is_one_sentence(monkeypatch):
    with pytest.raises(ConfigError, match=r"^onnx_not_there is not installed; try pip install 'vitrail\[export\]'\.$"):
        optional_packages.import_optional("onnx_not_there.helper")
    assert not optional_packages.is_installed("onnx_not_there")


def test_somebody_elses_file_is_refused(tmp_path, onnx_file):
    stranger = onnx.load(str(onnx_file.path))
    del stranger.metadata_props[:]
    onnx.save(stranger, str(tmp_path / "stranger.onnx"))
    (tmp_path / "broken.onnx").write_bytes(b"no protocol buffer")
    (tmp_path / "broken.pt2").write_bytes(b"no archive")
    for engine in ("onnxruntime", "openvino"):
        with pytest.raises(FormatError, match="not written by vitrail export"):
            open_engine(tmp_path / "stranger.onnx", engine)
    for name in ("broken.onnx", "broken.pt2"):
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read as"):
            open_engine(tmp_path / name)


HEADER = {"format": "vitrail-export", "version": 1}


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", "3", json.dumps(HEADER), json.dumps(HEADER | {"model_info": None})]
)
def test_damaged_metadata_are_a_sentence_about_the_file(tmp_path, onnx_file, text):
    damaged = onnx.load(str(onnx_file.path))
    damaged.metadata_props[0].value = text
    onnx.save(damaged, str(tmp_path / "damaged.onnx"))
    for engine in ("onnxruntime", "openvino"):
        with pytest.raises(FormatError, match=r"damaged\.onnx: "):
            open_file(tmp_path / "damaged.onnx", engine)


TAMPERED = {
    "batch": (("input", "shape", 0), 10**9, r"got images of \[1000000000, 32, 48, 3\] .* takes \[None, 32, 48, 3\]"),
    "image": (
        ("model_info", "model", "image_size"),
        64,
        r"got images of \[None, 64, 64, 3\] .* takes \[None, 32, 48, 3\]",
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
    "classes": (("model_info", "model", "num_classes"), 10**9, r"got 1000000000 classes .* gives \[5\]"),
}


@pytest.mark.parametrize("name", sorted(TAMPERED))
def test_metadata_of_other_sizes_than_the_graphs_are_refused(tmp_path, onnx_file, name):
    (*way, last), value, message = TAMPERED[name]
    other = onnx.load(str(onnx_file.path))
    metadata = json.loads(other.metadata_props[0].value)
    metadata["model_info"]["labels"] = None
    part = metadata
    for key in way:
        part = part[key]
    part[last] = value
    other.metadata_props[0].value = json.dumps(metadata)
    onnx.save(other, str(tmp_path / "other.onnx"))
    for engine in ("onnxruntime", "openvino"):
        with pytest.raises(FormatError, match=rf"other\.onnx: {message}"):
            open_file(tmp_path / "other.onnx", engine)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_part_of_a_sheet_may_be_wrong(tiny_metadata, data):
    values = json.loads(tiny_metadata)
    where = values
    while True:
        key = data.draw(st.sampled_from(sorted(where)))
        if not isinstance(where[key], dict) or data.draw(st.booleans()):
            break
        where = where[key]
    where[key] = data.draw(JSON)
    try:
        found = ExportMetadata.from_json(json.dumps(values))
    except FormatError:
        return
    assert ExportMetadata.from_json(found.to_json()) == found  # what is taken is whole


def test_networks_for_other_channels_have_images_to_compare_on(tmp_path):
    found = sample_images(5)
    assert len({image.tobytes() for image in found}) == 16
    assert all(image.dtype == np.uint8 and image.shape[2] == 5 for image in found)
    bands = found[0].transpose(2, 0, 1)
    assert len({band.tobytes() for band in bands}) == 5


def test_the_photographs_are_scikit_learns():
    from sklearn.datasets import load_sample_images

    for found, expected in zip((sample_images()[0], sample_images()[8]), load_sample_images().images, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_images_to_compare_on_are_all_different():
    found = sample_images()
    assert len(found) == len({image.tobytes() for image in found}) == 16
    assert all(image.dtype == np.uint8 and image.shape[2] == 3 for image in found)
    assert sample_images(1)[0].shape[2] == 1


# What is counted


def engine_of(tiny, precision: str = "float32", **options: object) -> FileEngine:
    to = "onnx" if precision == "int8" else "openvino"
    metadata = ExportMetadata(info=tiny.info, to=to, precision=precision, **options)  # type: ignore[arg-type]
    return FileEngine("openvino", metadata, lambda given: given)


def test_errors_and_agreement_are_counted_by_hand(tiny):
    expected = np.array([[3.0, 0, 0, 0, 4], [1, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 0, 0, 9]])
    got = expected.copy()
    got[0] = [4.0, 0, 0, 0, 3]  # another class
    targets = np.array([0, 0, 0, -1])
    found = compare.compare_outputs(got, expected, targets, engine_of(tiny))
    assert (found.images, found.same, found.error) == (4, 3, 1.0)
    assert found.relative == pytest.approx(np.sqrt(2 / (25 + 1 + 4 + 81)))
    assert found.top1 == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert found.change.value == pytest.approx(1 / 3)
    assert "off by 0.13 of their size" in found.problem


def test_a_model_that_says_the_same_of_every_image_proves_little(tiny):
    same = np.tile([0.0, 1, 0, 0, 0], (4, 1))
    assert "shows little" in compare.compare_outputs(same, same, None, engine_of(tiny)).notes[0]
    other = same + np.eye(4, 5)
    assert compare.compare_outputs(other, other, None, engine_of(tiny)).notes == []


def test_a_tie_within_the_error_is_no_disagreement_in_float32(tiny):
    expected = np.array([[1.0, 1.0 + 1e-6, 0, 0, 0]] * 9)
    got = expected[:, [1, 0, 2, 3, 4]]
    found = compare.compare_outputs(got, expected, None, engine_of(tiny))
    assert (found.same, found.near, found.problem) == (0, 9, "")


def test_too_many_other_answers_are_a_disagreement(tiny):
    expected = np.tile([1.0, 1.1, 0, 0, 0], (40, 1))
    got = expected.copy()
    got[:20, :2] = [1.06, 1.04]
    found = compare.compare_outputs(got, expected, None, engine_of(tiny, "int8"))
    assert found.relative < compare.TOLERANCE["int8"]
    assert found.problem == "it names the same class in 20 of 40 images, expected 90 %"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outputs_that_are_no_numbers_never_agree(tiny, bad):
    expected = np.ones((2, 5))
    got = expected.copy()
    got[1, 1] = bad
    assert compare.compare_outputs(got, expected, None, engine_of(tiny)).problem


def test_probabilities_of_a_model_are_those_of_its_logits():
    logits = np.random.default_rng(0).normal(0, 30, (4, 6)).astype(np.float32)
    tensor = torch.from_numpy(logits)
    np.testing.assert_allclose(compare.apply_output_type(logits, "probabilities", False), tensor.softmax(1), atol=1e-6)
    np.testing.assert_allclose(compare.apply_output_type(logits, "probabilities", True), tensor.sigmoid(), atol=1e-6)
    assert compare.apply_output_type(logits, "features", False) is logits


def test_a_file_lies_in_a_folder_that_is_there(tiny, images, tmp_path: Path):
    with pytest.raises(CheckpointError, match="make it first"):
        export(tiny.net, ExportMetadata(info=tiny.info, to="pt2"), tmp_path / "no" / "tiny.pt2", images)
