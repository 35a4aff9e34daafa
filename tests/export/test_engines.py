"""Engines: asked in the same way, from several threads, chosen for the user by what was measured."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vitrail.errors import CheckpointError, ConfigError
from vitrail.export import choose, engines
from vitrail.export.engines import open_engine
from vitrail.runtime import tiles


def test_torch_is_the_default_and_gives_the_networks_logits(tiny, pictures):
    engine = open_engine(tiny, device="cpu")
    assert (engine.name, engine.precision, engine.card) == ("torch", "float32", tiny.card)
    np.testing.assert_allclose(engine.logits(np.stack(pictures)), tiny._run(pictures, "logits"), atol=1e-6)


def test_a_checkpoint_by_its_path_is_opened(tiny, own, pictures, tmp_path):
    tiny.save(tmp_path / "tiny")
    batch = np.stack(pictures)
    np.testing.assert_array_equal(open_engine(tmp_path / "tiny", device="cpu").logits(batch), own.logits(batch))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_probabilities_come_back_as_logits_with_the_same_softmax(onnx_file, own, pictures, engine):
    batch = np.stack(pictures)
    opened = open_engine(onnx_file.path, engine)
    got, wanted = (np.exp(x - x.max(1, keepdims=True)) for x in (opened.logits(batch), own.logits(batch)))
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
    assert (opened.name, opened.precision) == (engine, "float32")


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_threads_that_ask_at_once_get_their_own_answers(onnx_file, own, pictures, engine):
    opened = open_engine(onnx_file.path, engine)
    wanted = opened.logits(np.stack(pictures))
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(opened.logits, pictures[i % 12][None]) for i in range(120)]
        for i, job in enumerate(jobs):
            np.testing.assert_allclose(job.result()[0], wanted[i % 12], atol=1e-4)


@pytest.mark.parametrize(
    ("engine", "message"),
    [("torch", "run by onnxruntime or openvino, not by torch"), ("tensorrt", "no engine 'tensorrt'")],
)
def test_an_engine_that_cannot_is_refused(onnx_file, engine, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(onnx_file.path, engine)


def test_threads_are_counted_from_one(tiny):
    with pytest.raises(ConfigError, match="threads=0"):
        open_engine(tiny, threads=0)


def test_auto_takes_what_was_fastest_says_so_and_remembers(tiny, own, pictures, monkeypatch, caplog):
    speeds = {"torch": 50.0, "onnxruntime": 120.0, "openvino": 80.0}
    monkeypatch.setattr(choose, "rate", lambda engine, batch, seconds: speeds[engine.name])
    monkeypatch.setattr(choose, "_candidates", lambda calibrated: [("onnxruntime", "float32")])
    engine = open_engine(tiny, "auto", device="cpu")
    assert (engine.name, engine.precision) == ("onnxruntime", "float32")
    assert "takes onnxruntime in float32: 120 pictures a second (torch 50)" in caplog.text
    batch = np.stack(pictures)
    np.testing.assert_allclose(engine.logits(batch), own.logits(batch), atol=1e-4)
    monkeypatch.setattr(choose, "_raced", None)  # not again
    assert open_engine(tiny, "auto", device="cpu").name == "onnxruntime"
    assert open_engine(tiny, "onnxruntime", device="cpu").name == "onnxruntime"  # the file is there, too
    [choice] = Path(os.environ["VITRAIL_ENGINES"]).glob("*/choice.json")
    assert json.loads(choice.read_text())["pictures_per_second"] == {"torch float32": 50, "onnxruntime float32": 120}


def test_auto_takes_nothing_that_does_not_agree(tiny, monkeypatch, caplog):
    def disagrees(*arguments: object, **options: object) -> None:
        raise CheckpointError("float32.xml does not agree with the model: its logits are off.")

    monkeypatch.setattr(choose, "export", disagrees)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "did not agree with the model" in caplog.text


def test_auto_without_other_engines_is_torch(tiny, monkeypatch, caplog):
    monkeypatch.setattr(choose, "installed", lambda name: False)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "pip install 'vitrail[export]'" in caplog.text


def test_int8_is_a_candidate_only_with_pictures_to_calibrate_on():
    assert not any(precision == "int8" for _, precision in choose._candidates(False))
    assert sum(precision == "int8" for _, precision in choose._candidates(True)) == 2


def test_another_model_has_another_digest(tiny):
    plain = choose.digest(tiny.net, tiny.card, None)
    assert plain == choose.digest(tiny.net, tiny.card.but(origin="elsewhere"), None)
    assert plain != choose.digest(tiny.net, tiny.card, 2)
    assert plain != choose.digest(tiny.net, tiny.card.but(labels=None), None)
    other = tiny.net.with_classes(5)
    assert plain != choose.digest(other, tiny.card, None)


def test_openvino_is_told_of_a_cpu_without_tiles_even_where_torch_has_begun(monkeypatch):
    def too_late() -> None:
        raise ConfigError("products in bfloat16 end with an illegal instruction")

    monkeypatch.setattr(engines, "check_bfloat16", too_late)
    monkeypatch.setenv(tiles.SETTING, "")
    monkeypatch.delenv(tiles.SETTING)
    engines.openvino_core()
    assert os.environ[tiles.SETTING] == tiles.WITHOUT_TILES
