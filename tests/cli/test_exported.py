"""Commands on a file that `vitrail export` wrote: what runs it runs, the rest says what to take instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import need_extra
from exports import export_quickly
from PIL import Image
from small_models import model, small

from vitrail.api.exporting import export

need_extra("export")


@pytest.fixture(autouse=True, scope="module")
def _own_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VITRAIL_ENGINES", str(tmp_path_factory.mktemp("engines")))
        export_quickly(patched)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny"
    model(small(width=32, depth=1, mlp_dim=48), origin="somebody/tiny").save(path)
    return path


@pytest.fixture(scope="module")
def exported(tiny: Path) -> Path:
    return export(tiny, tiny.parent / "tiny.onnx").path


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("album") / "album", np.random.default_rng(5)
    for label, count in {"cat": 6, "dog": 4}.items():
        (folder / label).mkdir(parents=True)
        for i in range(count):
            noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((40, 36)).save(folder / label / f"{i}.png")
    return folder


def evaluate_json(vitrail, *arguments: object) -> dict:
    """What `vitrail eval` says of the one size."""
    result = vitrail("eval", *arguments, "--device", "cpu", "--json")
    assert result.status == 0, result.err
    said = json.loads(result.out)
    return said | said["sizes"][0]


def test_eval_measures_the_file_and_what_an_engine_makes_of_a_checkpoint(vitrail, tiny, exported, album):
    expected = evaluate_json(vitrail, "-m", tiny, "--data", album)
    for which, *engine in ([exported], [exported, "openvino"], [tiny, "onnxruntime"]):
        got = evaluate_json(vitrail, "-m", which, "--data", album, *(["--engine", *engine] if engine else []))
        assert (got["model"], got["top1"]) == (which.name, expected["top1"])
        assert got["loss"]["value"] == pytest.approx(expected["loss"]["value"], rel=1e-4)
    assert evaluate_json(vitrail, "-m", tiny, "--engine", "torch", "--data", album)["loss"] == expected["loss"]


def test_eval_reads_well(vitrail, exported, album):
    lines = vitrail("eval", "-m", exported, "--data", album, "--device", "cpu").out.splitlines()
    assert lines[:2] == [f"{exported.name} on album", "10 images, 2 of 5 classes, 32 px"]


CANNOT = "it can be run, but not explained, modified or trained"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "IMAGE", "-m", "FILE"], CANNOT),
        (["figures", "-m", "FILE"], CANNOT),
        (["probe", "-m", "FILE", "--data", "ALBUM"], CANNOT),
        (["export", "FILE", "again.onnx"], CANNOT),
        (["convert", "FILE", "again"], CANNOT),
        (["finetune", "-m", "FILE", "--data", "ALBUM", "--out", "run"], CANNOT),
        (["eval", "-m", "FILE", "--data", "ALBUM", "--image-size", "32,64"], CANNOT),
        (["embed", "-m", "FILE", "--data", "ALBUM", "--out", "f.parquet"], "it outputs classes, not features"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_that_need_more_say_so_in_one_sentence(
    vitrail, exported, album, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    names = {"FILE": exported, "ALBUM": album, "IMAGE": album / "cat" / "0.png"}
    result = vitrail(*[names.get(word, word) for word in arguments])
    assert result.status == 1
    assert len(result.problems) == 1
    assert f"{exported} is an exported model: {words}; " in result.problems[0]
    assert "the checkpoint it was exported from" in result.problems[0]
    assert not [path for path in tmp_path.iterdir() if path.name != "run"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "bfloat16"], "has its precision already"),
        (["--image-size", "64"], "is exported already: image_size cannot be changed any more"),
        (["--engine", "torch"], "is run by onnxruntime or openvino, not by torch"),
    ],
)
def test_predict_refuses_what_comes_too_late(vitrail, exported, album, options, words):
    result = vitrail("predict", album / "cat" / "0.png", "-m", exported, *options)
    assert (result.status, len(result.problems)) == (1, 1)
    assert words in result.problems[0]


def test_a_file_of_features_is_not_asked_for_classes(vitrail, album, headless, tmp_path):
    path = export(headless, tmp_path / "f.pt2", to="pt2").path
    result = vitrail("predict", album / "cat" / "0.png", "-m", path)
    assert result.problems == [f"{path} has no classes: it outputs features; use vitrail embed."]
    made = vitrail("embed", "-m", path, "--data", album, "--out", tmp_path / "f.parquet")
    assert (made.status, made.out.split(": ")[1]) == (0, "10 images, 128 features each (head input).\n")
