"""`vitrail export`, and `vitrail predict` from what it wrote."""

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
def _own_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_ENGINES", str(tmp_path / "engines"))
    export_quickly(monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny"
    model(small(width=32, depth=1, mlp_dim=48)).save(path)
    return path


def test_a_file_predicts_as_the_model_does(vitrail, tiny, photos, tmp_path):
    result = vitrail("export", tiny, tmp_path / "tiny.onnx")
    assert result.status == 0
    assert result.err.splitlines() == ["tracing ...", "writing ...", "comparing ...", "timing ..."]
    name, about, prepared, _, *rest = result.out.splitlines()
    assert name == str(tmp_path / "tiny.onnx")
    assert about == "ONNX, float32, 32 px, any batch, pixels to probabilities"
    text = "\n".join(rest)
    assert "16 of 16" in text
    assert "0.0001 is allowed in float32" in text
    assert prepared.startswith("images: ")
    assert f"{tmp_path / 'tiny.onnx.json'} has these numbers, class names and preprocessing" in text
    assert f"compared in onnxruntime {version('onnxruntime')} on {detect_cpu()}" in " ".join(text.split())
    expected = vitrail("predict", photos, "-m", tiny)
    tables = [
        vitrail("predict", photos, "-m", tmp_path / "tiny.onnx", *more) for more in ([], ["--engine", "openvino"])
    ]
    for table in tables:
        assert (table.status, table.err) == (0, "")
        for got, own in zip(rows(table.out), rows(expected.out), strict=True):
            assert [got[k] for k in got if "score" not in k] == [own[k] for k in own if "score" not in k]
            assert [float(got[k]) for k in got if "score" in k] == pytest.approx(
                [float(own[k]) for k in own if "score" in k], abs=2e-6
            )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_json_has_everything(vitrail, tiny, photos, tmp_path):
    options = ["--batch-size", 2, "--raw", "--image-size", "32x48", "--check", photos, "--json"]
    result = vitrail("export", tiny, tmp_path / "tiny.pt2", *options)
    assert result.status == 0
    said = json.loads(result.out)
    assert said["path"] == str(tmp_path / "tiny.pt2")
    assert said["input"] == {"shape": [2, 3, 32, 48], "type": "float32"}
    assert (said["output"], said["comparison"]["images"]) == ("logits", 6)
    assert said["comparison"]["speed"]["batch"] == 2


def test_an_engine_for_a_checkpoint_is_made_once(vitrail, tiny, photos):
    first = vitrail("predict", photos, "-m", tiny, "--engine", "onnxruntime", "--top", 1)
    assert (first.status, first.err) == (0, "")
    plain = vitrail("predict", photos, "-m", tiny, "--top", 1)
    assert [row["label"] for row in rows(first.out)] == [row["label"] for row in rows(plain.out)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--to", "onix"], "nothing is exported to 'onix'; did you mean 'onnx'?"),
        (
            ["--precision", "i8"],
            "int8 in ONNX needs images to calibrate on, like those it will see: "
            "pass --calibrate FOLDER, or --to openvino, which can do without.",
        ),
        (
            ["--batch-size", "many"],
            "--batch-size expects a number of images such as 8, or dynamic for any number, got 'many'.",
        ),
        (["--image-size", "30"], "patch_size=8 leaves 6 px of the image's height 30 uncovered; try height 24 or 32."),
    ],
)
def test_what_cannot_be_is_one_sentence(vitrail, tiny, tmp_path, options, problem):
    result = vitrail("export", tiny, tmp_path / "tiny.onnx", *options)
    assert (result.status, result.problems) == (1, [problem])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_replaced_unasked(vitrail, tiny, tmp_path):
    (tmp_path / "tiny.pt2").write_text("mine")
    result = vitrail("export", "no such model", tmp_path / "tiny.pt2", "--to", "pt2")
    assert result.status == 1
    assert result.problems[0].endswith("tiny.pt2 exists already; choose another name, or overwrite it (--overwrite).")
    assert vitrail("export", tiny, tmp_path / "tiny.pt2", "--overwrite").status == 0


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("tiny.pt2", ["--to", "onnx"], r"ends in \.onnx; try .*tiny\.onnx, or leave --to out for pt2"),
        ("no/tiny.pt2", [], "there is no folder"),
        ("tiny.pt2", ["--labels", "none.txt"], "no such class names file"),
        ("tiny.pt2", ["--check", "nowhere"], "no data source 'nowhere'"),
        ("tiny.xml", ["--precision", "i8", "--calibrate", "nowhere"], "no data source 'nowhere'"),
    ],
)
def test_a_slip_is_found_before_a_model_is_looked_for(vitrail, tmp_path, name, options, problem):
    result = vitrail("export", "no such model", tmp_path / name, *options)
    assert result.status == 1
    assert re.search(problem, result.problems[0])


def test_names_of_files_are_checked_without_torch(tmp_path):
    code = (
        "import sys; from vitrail.cli import main; "
        "status = main(['export', 'model', 'no/model.onnx']); print(status, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "1 False\n"


def test_classes_without_names_are_told(vitrail, tmp_path):
    model(small(width=32, depth=1, mlp_dim=48), labels=None).save(tmp_path / "nameless")
    result = vitrail("export", tmp_path / "nameless", tmp_path / "n.pt2")
    *_, report, names = result.out.splitlines()
    assert report.endswith("n.pt2.json has these numbers and the preprocessing")
    assert names == "its classes have no names: pass --labels FILE"


def test_the_ratio_of_the_speed_line_is_that_of_the_rounds(vitrail, tiny, tmp_path, monkeypatch):
    from vitrail.export import exporter as exporting
    from vitrail.export.compare import Speed

    speed = Speed(export=7.04, model=9.449, ratio=0.95, batch_size=8)
    monkeypatch.setattr(exporting, "time_alternately", lambda *_: speed)
    lines = vitrail("export", tiny, tmp_path / "t.pt2").out.splitlines()
    [line] = [line for line in lines if line.startswith("images a second")]
    assert re.fullmatch(r"images a second +7\.04 +0\.95 x the model in turns, batches of 8", line)


def test_calibrating_and_comparing_on_the_same_images_is_told(vitrail, tiny, photos, tmp_path):
    options = ["--precision", "int8", "--calibrate", photos, "--check", photos, "--batch-size", 8]
    same = vitrail("export", tiny, tmp_path / "a.onnx", *options)
    assert same.status == 0, same.err  # six images for batches of eight
    assert "calibrated and compared on the same images: others may agree less." in same.notes


@pytest.mark.skipif(os.name != "posix", reason="there are no such signals")
def test_an_export_that_is_asked_to_end_leaves_nothing(tiny, tmp_path):
    code = (
        "import os, signal, sys; from vitrail.export import formats; from vitrail.cli import main\n"
        "formats.write = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "export", str(tiny), str(tmp_path / "t.pt2")]
    assert subprocess.run(command, capture_output=True).returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_another_precision_is_for_torch(vitrail, tiny, photos):
    result = vitrail("predict", photos, "-m", tiny, "--engine", "openvino", "--dtype", "bfloat16")
    assert result.status == 1
    assert result.problems[0].startswith("--dtype bfloat16 is only for torch")
