"""`vitrail export`, and `vitrail predict` with exported files and `--engine`."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import need_extra
from exports import export_quickly
from small_models import model, small

from vitrail.runtime.cpu import detect_cpu

need_extra("export")


@pytest.fixture(autouse=True)
def _fast_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_ENGINES", str(tmp_path / "engines"))
    export_quickly(monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny"
    model(small(width=32, depth=1, mlp_dim=48)).save(path)
    return path


def test_an_exported_file_predicts_like_the_model(vitrail, tiny, photos, tmp_path):
    result = vitrail("export", tiny, tmp_path / "tiny.onnx")
    assert result.status == 0
    assert result.err.splitlines() == ["tracing ...", "writing ...", "comparing ...", "timing ..."]
    name, summary, preprocessing, _, *lines = result.out.splitlines()
    assert name == str(tmp_path / "tiny.onnx")
    assert summary == "ONNX, float32, 32 px, any batch size, pixels to probabilities"
    text = "\n".join(lines)
    assert "16 of 16" in text
    assert "0.0001 is allowed in float32" in text
    assert preprocessing.startswith("images: ")
    assert f"{tmp_path / 'tiny.onnx.json'} contains these numbers, class names and preprocessing" in text
    assert f"compared in onnxruntime {version('onnxruntime')} on {detect_cpu()}" in " ".join(text.split())
    expected = vitrail("predict", photos, "-m", tiny)
    tables = [
        vitrail("predict", photos, "-m", tmp_path / "tiny.onnx", *options) for options in ([], ["--engine", "openvino"])
    ]
    for table in tables:
        assert (table.status, table.err) == (0, "")
        for row, expected_row in zip(rows(table.out), rows(expected.out), strict=True):
            assert [row[k] for k in row if "score" not in k] == [
                expected_row[k] for k in expected_row if "score" not in k
            ]
            assert [float(row[k]) for k in row if "score" in k] == pytest.approx(
                [float(expected_row[k]) for k in expected_row if "score" in k], abs=2e-6
            )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_json_output_contains_metadata_and_comparison(vitrail, tiny, photos, tmp_path):
    options = ["--batch-size", 2, "--raw", "--image-size", "32x48", "--check", photos, "--json"]
    result = vitrail("export", tiny, tmp_path / "tiny.pt2", *options)
    assert result.status == 0
    report = json.loads(result.out)
    assert report["path"] == str(tmp_path / "tiny.pt2")
    assert report["input"] == {"shape": [2, 3, 32, 48], "type": "float32"}
    assert (report["output"], report["comparison"]["images"]) == ("logits", 6)
    assert report["comparison"]["speed"]["batch"] == 2


def test_predict_with_another_engine_gives_the_same_labels(vitrail, tiny, photos):
    result = vitrail("predict", photos, "-m", tiny, "--engine", "onnxruntime", "--top", 1)
    assert (result.status, result.err) == (0, "")
    expected = vitrail("predict", photos, "-m", tiny, "--top", 1)
    assert [row["label"] for row in rows(result.out)] == [row["label"] for row in rows(expected.out)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--to", "onix"], "unknown export format 'onix'; did you mean 'onnx'?"),
        (
            ["--precision", "i8"],
            "int8 in ONNX needs calibration images, similar to those in use: "
            "pass --calibrate FOLDER, or --to openvino, which does not need them.",
        ),
        (
            ["--batch-size", "many"],
            "--batch-size expects a number of images such as 8, or dynamic for any number, got 'many'.",
        ),
        (["--image-size", "30"], "patch_size=8 leaves 6 px of the image's height 30 uncovered; try height 24 or 32."),
    ],
)
def test_unsupported_options_are_reported_in_one_sentence(vitrail, tiny, tmp_path, options, problem):
    result = vitrail("export", tiny, tmp_path / "tiny.onnx", *options)
    assert (result.status, result.errors) == (1, [problem])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_with_overwrite(vitrail, tiny, tmp_path):
    (tmp_path / "tiny.pt2").write_text("mine")
    result = vitrail("export", "no such model", tmp_path / "tiny.pt2", "--to", "pt2")
    assert result.status == 1
    assert result.errors[0].endswith("tiny.pt2 already exists; choose another name, or replace it with --overwrite.")
    assert vitrail("export", tiny, tmp_path / "tiny.pt2", "--overwrite").status == 0


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("tiny.pt2", ["--to", "onnx"], r"ends in \.onnx for onnx; try .*tiny\.onnx, or omit --to for pt2"),
        ("no/tiny.pt2", [], "there is no folder"),
        ("tiny.pt2", ["--labels", "none.txt"], "no such class names file"),
        ("tiny.pt2", ["--check", "nowhere"], "unknown data source 'nowhere'"),
        ("tiny.xml", ["--precision", "i8", "--calibrate", "nowhere"], "unknown data source 'nowhere'"),
    ],
)
def test_wrong_options_are_reported_before_the_model_is_loaded(vitrail, tmp_path, name, options, problem):
    result = vitrail("export", "no such model", tmp_path / name, *options)
    assert result.status == 1
    assert re.search(problem, result.errors[0])


def test_file_names_are_checked_without_importing_torch(tmp_path):
    code = (
        "import sys; from vitrail.cli import main; "
        "status = main(['export', 'model', 'no/model.onnx']); print(status, 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout == "1 False\n"


def test_missing_class_names_are_reported(vitrail, tmp_path):
    model(small(width=32, depth=1, mlp_dim=48), labels=None).save(tmp_path / "nameless")
    result = vitrail("export", tmp_path / "nameless", tmp_path / "n.pt2")
    *_, report, names = result.out.splitlines()
    assert report.endswith("n.pt2.json contains these numbers and the preprocessing")
    assert names == "the classes have no names: pass --labels FILE"


def test_the_printed_speed_ratio_is_the_median_of_the_rounds(vitrail, tiny, tmp_path, monkeypatch):
    from vitrail.exporting import exporter
    from vitrail.exporting.compare import Speed

    speed = Speed(export=7.04, model=9.449, ratio=0.95, batch_size=8)
    monkeypatch.setattr(exporter, "time_alternately", lambda *_: speed)
    lines = vitrail("export", tiny, tmp_path / "t.pt2").out.splitlines()
    [line] = [line for line in lines if line.startswith("images/s")]
    assert re.fullmatch(r"images/s +7\.04 +0\.95 x the model, at batch size 8", line)


def test_calibrating_and_comparing_on_the_same_images_prints_a_note(vitrail, tiny, photos, tmp_path):
    options = ["--precision", "int8", "--calibrate", photos, "--check", photos, "--batch-size", 8]
    result = vitrail("export", tiny, tmp_path / "a.onnx", *options)
    assert result.status == 0, result.err  # six images repeat to fill a batch of eight
    assert "calibrated and compared on the same images; the agreement on other images may be lower." in result.notes


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_an_export_stopped_by_sigterm_leaves_no_files(tiny, tmp_path):
    code = (
        "import os, signal, sys; from vitrail.exporting import formats; from vitrail.cli import main\n"
        "formats.write = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "export", str(tiny), str(tmp_path / "t.pt2")]
    assert subprocess.run(command, capture_output=True).returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_dtype_with_another_engine_is_refused(vitrail, tiny, photos):
    result = vitrail("predict", photos, "-m", tiny, "--engine", "openvino", "--dtype", "bfloat16")
    assert result.status == 1
    assert result.errors[0].startswith("--dtype bfloat16 is only for torch")
