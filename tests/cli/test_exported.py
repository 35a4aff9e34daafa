"""Commands on exported files: those that need the network fail and name what to use instead."""

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

from vitrail.exporting.export_model import export

need_extra("export")


@pytest.fixture(autouse=True, scope="module")
def _fast_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
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
    """The JSON report of `vitrail eval`, merged with that of its only image size."""
    result = vitrail("eval", *arguments, "--device", "cpu", "--json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    return report | report["sizes"][0]


def test_eval_gives_the_same_scores_for_files_and_other_engines(vitrail, tiny, exported, album):
    expected = evaluate_json(vitrail, "-m", tiny, "--data", album)
    for model_path, *engine in ([exported], [exported, "openvino"], [tiny, "onnxruntime"]):
        report = evaluate_json(vitrail, "-m", model_path, "--data", album, *(["--engine", *engine] if engine else []))
        assert (report["model"], report["top1"]) == (model_path.name, expected["top1"])
        assert report["loss"]["value"] == pytest.approx(expected["loss"]["value"], rel=1e-4)
    assert evaluate_json(vitrail, "-m", tiny, "--engine", "torch", "--data", album)["loss"] == expected["loss"]


def test_eval_prints_the_file_name_and_the_number_of_images(vitrail, exported, album):
    lines = vitrail("eval", "-m", exported, "--data", album, "--device", "cpu").out.splitlines()
    assert lines[:2] == [f"{exported.name} on album", "10 images, 2 of 5 classes, 32 px"]


NEEDS_NETWORK = "it can be run, but not explained, modified or trained"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "IMAGE", "-m", "FILE"], NEEDS_NETWORK),
        (["figures", "-m", "FILE"], NEEDS_NETWORK),
        (["probe", "-m", "FILE", "--data", "ALBUM"], NEEDS_NETWORK),
        (["export", "FILE", "again.onnx"], NEEDS_NETWORK),
        (["convert", "FILE", "again"], NEEDS_NETWORK),
        (["finetune", "-m", "FILE", "--data", "ALBUM", "--out", "run"], NEEDS_NETWORK),
        (["eval", "-m", "FILE", "--data", "ALBUM", "--image-size", "32,64"], NEEDS_NETWORK),
        (["embed", "-m", "FILE", "--data", "ALBUM", "--out", "f.parquet"], "it outputs classes, not features"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_that_need_the_network_fail_with_one_sentence(
    vitrail, exported, album, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    names = {"FILE": exported, "ALBUM": album, "IMAGE": album / "cat" / "0.png"}
    result = vitrail(*[names.get(argument, argument) for argument in arguments])
    assert result.status == 1
    assert len(result.errors) == 1
    assert f"{exported} is an exported model: {message}; " in result.errors[0]
    assert "the checkpoint it was exported from" in result.errors[0]
    assert not [path for path in tmp_path.iterdir() if path.name != "run"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "bfloat16"], "has a fixed precision"),
        (["--image-size", "64"], "is an exported file: image_size cannot be changed"),
        (["--engine", "torch"], "is run by onnxruntime or openvino, not by torch"),
    ],
)
def test_predict_refuses_options_that_would_change_the_exported_model(vitrail, exported, album, options, message):
    result = vitrail("predict", album / "cat" / "0.png", "-m", exported, *options)
    assert (result.status, len(result.errors)) == (1, 1)
    assert message in result.errors[0]


def test_predict_refuses_a_file_of_features_and_embed_accepts_it(vitrail, album, headless, tmp_path):
    path = export(headless, tmp_path / "f.pt2", to="pt2").path
    result = vitrail("predict", album / "cat" / "0.png", "-m", path)
    assert result.errors == [f"{path} has no classes: it outputs features; use vitrail embed."]
    made = vitrail("embed", "-m", path, "--data", album, "--out", tmp_path / "f.parquet")
    assert (made.status, made.out.split(": ")[1]) == (0, "10 images, 128 features each (head input).\n")
