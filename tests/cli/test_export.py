"""`vitrail export`, and `vitrail predict` from what it wrote."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from small_models import model, small

for name in ("onnx", "onnxscript", "onnxruntime", "openvino"):
    pytest.importorskip(name, reason="the extra `export` is not installed")


@pytest.fixture(autouse=True)
def _own_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_ENGINES", str(tmp_path / "engines"))
    monkeypatch.setattr("vitrail.export.compare.SECONDS", 0.01)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny"
    model(small(width=32, depth=1, mlp=48)).save(path)
    return path


def test_a_file_predicts_as_the_model_does(vitrail, tiny, photos, tmp_path):
    result = vitrail("export", tiny, tmp_path / "tiny.onnx")
    assert result.status == 0
    assert result.err == ""
    name, about, _, *rest = result.out.splitlines()
    assert name == str(tmp_path / "tiny.onnx")
    assert about == "ONNX, float32, 32 px, any batch, pixels to probabilities"
    text = "\n".join(rest)
    assert "16 of 16" in text
    assert "0.0001 is allowed in float32" in text
    assert f"{tmp_path / 'tiny.json'} has these numbers" in text
    wanted = vitrail("predict", photos, "-m", tiny)
    tables = [
        vitrail("predict", photos, "-m", tmp_path / "tiny.onnx", *more) for more in ([], ["--engine", "openvino"])
    ]
    for table in tables:
        assert (table.status, table.err) == (0, "")
        for got, own in zip(rows(table.out), rows(wanted.out), strict=True):
            assert [got[k] for k in got if "score" not in k] == [own[k] for k in own if "score" not in k]
            assert [float(got[k]) for k in got if "score" in k] == pytest.approx(
                [float(own[k]) for k in own if "score" in k], abs=2e-6
            )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_json_has_everything(vitrail, tiny, photos, tmp_path):
    options = ["--to", "pt2", "--batch", 2, "--raw", "--image", "32x48", "--check", photos, "--json"]
    result = vitrail("export", tiny, tmp_path / "tiny", *options)
    assert result.status == 0
    said = json.loads(result.out)
    assert said["path"] == str(tmp_path / "tiny.pt2")
    assert said["input"] == {"shape": [2, 3, 32, 48], "type": "float32"}
    assert (said["output"], said["comparison"]["pictures"]) == ("logits", 6)
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
            ["--precision", "int8"],
            "int8 needs pictures to calibrate on, like those it will see: pass --calibrate FOLDER.",
        ),
        (["--batch", "many"], "--batch wants a number of pictures such as 8, or dynamic for any number, got 'many'."),
        (["--image", "30"], "patch=8 leaves 6 px of the image's height 30 uncovered; try height 24 or 32."),
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
    assert "tiny.pt2 exists already" in result.problems[0]
    assert vitrail("export", tiny, tmp_path / "tiny.pt2", "--to", "pt2", "--overwrite").status == 0


def test_another_precision_is_for_torch(vitrail, tiny, photos):
    result = vitrail("predict", photos, "-m", tiny, "--engine", "openvino", "--dtype", "bfloat16")
    assert result.status == 1
    assert result.problems[0].startswith("--dtype bfloat16 is for torch alone")
