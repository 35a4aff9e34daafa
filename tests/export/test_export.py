"""From a network to a file: compared before it is called done, complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_models import LABELS, model, small

from vitrail.errors import CheckpointError, ConfigError, FormatError
from vitrail.export import compare, extras, formats
from vitrail.export import export as exporting
from vitrail.export.engines import FileEngine, TorchEngine, open_engine, open_file
from vitrail.export.export import destination, export
from vitrail.export.pictures import samples
from vitrail.export.sheet import Sheet


def test_a_file_says_what_goes_in_and_what_comes_out(onnx_file, tiny):
    graph = onnx.load(str(onnx_file.path)).graph
    [given], [out] = graph.input, graph.output
    shape = [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
    assert (given.name, out.name) == ("pixels", "probabilities")
    assert given.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert shape == ["batch", 32, 48, 3]
    assert Sheet.from_json(onnx_file.sheet.to_json()) == onnx_file.sheet
    assert onnx_file.sheet.card.labels == LABELS


def test_the_report_beside_a_file_has_what_was_found(onnx_file):
    report = json.loads(onnx_file.report.read_text())
    assert report["file"] == "tiny.onnx"
    assert report["card"]["labels"] == list(LABELS)
    assert report["input"] == {"shape": [None, 32, 48, 3], "type": "uint8"}
    found = report["comparison"]
    assert found["pictures"] == found["same_top1"]["count"] == 12
    assert 0 <= found["relative_error"] <= 1e-5 < found["relative_error_allowed"]
    assert found["speed"]["ratio"] > 0
    assert sorted(p.name for p in onnx_file.path.parent.iterdir()) == ["tiny.json", "tiny.onnx"]
    assert report["bytes"] == onnx_file.path.stat().st_size


def test_openvino_is_two_files_and_a_fixed_batch_is_filled_up(openvino_file, own, pictures):
    names = sorted(p.name for p in openvino_file.path.parent.iterdir())
    assert names == ["tiny.bin", "tiny.json", "tiny.xml"]
    engine = open_file(openvino_file.path)
    assert (engine.name, engine.sheet.batch) == ("openvino", 3)
    for count in (1, 3, 4, 7):
        batch = np.stack(pictures[:count])
        np.testing.assert_allclose(engine.logits(batch), own.logits(batch), atol=1e-5)


def test_an_export_that_disagrees_fails_and_leaves_nothing_behind(tiny, pictures, tmp_path, monkeypatch):
    other = model(small(image=(32, 48), width=32, depth=1, mlp=48))
    with torch.no_grad():
        other.net.head.weight.mul_(1.01)
    monkeypatch.setattr(exporting, "model_of", lambda net, sheet: TorchEngine(other.net, other.card))
    sheet = Sheet(card=tiny.card, to="pt2")
    with pytest.raises(CheckpointError, match=r"tiny\.pt2 does not agree .* off by 0\.0\d+ of their size, 0\.0001"):
        export(tiny.net, sheet, tmp_path / "tiny.pt2", pictures)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_what_was_there(tiny, pictures, tmp_path, monkeypatch):
    (tmp_path / "tiny.pt2").write_text("before")
    sheet = Sheet(card=tiny.card, to="pt2")
    with pytest.raises(CheckpointError, match="exists already"):
        export(tiny.net, sheet, tmp_path / "tiny.pt2", pictures)

    def fails(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(formats, "write", fails)
    with pytest.raises(KeyboardInterrupt):
        export(tiny.net, sheet, tmp_path / "tiny.pt2", pictures, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.pt2"]
    assert (tmp_path / "tiny.pt2").read_text() == "before"


@pytest.mark.parametrize(
    ("given", "to", "wanted"),
    [("a", "onnx", "a.onnx"), ("a.xml", "openvino", "a.xml"), (".", "pt2", "model.pt2"), ("v1", "pt2", "v1.pt2")],
)
def test_a_name_gets_the_formats_ending(tmp_path, given, to, wanted):
    assert destination(tmp_path / given, to) == tmp_path / wanted


def test_a_name_with_another_ending_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"ends in \.xml; try .*model\.xml"):
        destination(tmp_path / "model.onnx", "openvino")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "onix"}, "did you mean 'onnx'"),
        ({"precision": "int4"}, "did you mean 'int8'"),
        ({"precision": "bfloat16"}, "no products in bfloat16"),
        ({"to": "pt2", "precision": "int8"}, "try onnx or openvino"),
        ({"batch": 0}, "wanted 1 picture"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_reason(tiny, options, message):
    with pytest.raises(ConfigError, match=message):
        Sheet(**{"card": tiny.card, "to": "onnx"} | options)


def test_a_missing_package_is_one_sentence(monkeypatch):
    with pytest.raises(ConfigError, match=r"^onnx_not_there is not installed; try pip install 'vitrail\[export\]'\.$"):
        extras.need("onnx_not_there.helper")
    assert not extras.installed("onnx_not_there")


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


def test_the_pictures_to_compare_on_are_all_different():
    found = samples()
    assert len(found) == len({picture.tobytes() for picture in found}) == 16
    assert all(picture.dtype == np.uint8 and picture.shape[2] == 3 for picture in found)
    assert samples(1)[0].shape[2] == 1


# What is counted


def engine_of(tiny, precision: str = "float32", **options: object) -> FileEngine:
    to = "onnx" if precision == "int8" else "openvino"
    sheet = Sheet(card=tiny.card, to=to, precision=precision, **options)  # type: ignore[arg-type]
    return FileEngine("openvino", sheet, lambda given: given)


def test_errors_and_agreement_are_counted_by_hand(tiny):
    wanted = np.array([[3.0, 0, 0, 0, 4], [1, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 0, 0, 9]])
    got = wanted.copy()
    got[0] = [4.0, 0, 0, 0, 3]  # another class
    targets = np.array([0, 0, 0, -1])
    found = compare.measured(got, wanted, targets, engine_of(tiny))
    assert (found.pictures, found.same, found.error) == (4, 3, 1.0)
    assert found.relative == pytest.approx(np.sqrt(2 / (25 + 1 + 4 + 81)))
    assert found.top1 == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert found.change.value == pytest.approx(1 / 3)
    assert "off by 0.13 of their size" in found.problem


def test_a_tie_within_the_error_is_no_disagreement_in_float32(tiny):
    wanted = np.array([[1.0, 1.0 + 1e-6, 0, 0, 0]] * 9)
    got = wanted[:, [1, 0, 2, 3, 4]]
    found = compare.measured(got, wanted, None, engine_of(tiny))
    assert (found.same, found.near, found.problem) == (0, 9, "")


def test_too_many_other_answers_are_a_disagreement(tiny):
    wanted = np.tile([1.0, 1.1, 0, 0, 0], (40, 1))
    got = wanted.copy()
    got[:20, :2] = [1.06, 1.04]
    found = compare.measured(got, wanted, None, engine_of(tiny, "int8"))
    assert found.relative < compare.TOLERANCE["int8"]
    assert found.problem == "it names the same class in 20 of 40 pictures, wanted 90 %"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outputs_that_are_no_numbers_never_agree(tiny, bad):
    wanted = np.ones((2, 5))
    got = wanted.copy()
    got[1, 1] = bad
    assert compare.measured(got, wanted, None, engine_of(tiny)).problem


def test_probabilities_of_a_model_are_those_of_its_logits():
    logits = np.random.default_rng(0).normal(0, 30, (4, 6)).astype(np.float32)
    tensor = torch.from_numpy(logits)
    np.testing.assert_allclose(compare.answers(logits, "probabilities", False), tensor.softmax(1), atol=1e-6)
    np.testing.assert_allclose(compare.answers(logits, "probabilities", True), tensor.sigmoid(), atol=1e-6)
    assert compare.answers(logits, "features", False) is logits


def test_a_file_lies_in_a_folder_that_is_there(tiny, pictures, tmp_path: Path):
    with pytest.raises(CheckpointError, match="make it first"):
        export(tiny.net, Sheet(card=tiny.card, to="pt2"), tmp_path / "no" / "tiny.pt2", pictures)
