"""`vitrail.export` and models that an engine runs; a trained ViT-Ti/16 and a ViT-B/16 through the engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from compare import randomized
from conftest import import_peer, need_extra
from exports import export_quickly
from small_models import gradient, model, small

import vitrail
from vitrail.api.exporting import export, with_engine
from vitrail.errors import ConfigError, ModelError
from vitrail.export.engines import open_file
from vitrail.models import build
from vitrail.models.model_names import config_from_name

need_extra("export")


@pytest.fixture(autouse=True)
def _soon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a file is does not matter here."""
    if not request.node.get_closest_marker("slow"):
        export_quickly(monkeypatch)


@pytest.fixture(scope="module")
def tiny() -> vitrail.Model:
    return model(small(width=32, depth=1, mlp_dim=48))


def test_an_exported_model_predicts_like_the_model(tiny, tmp_path):
    made = export(tiny, tmp_path / "tiny", to="pt2", image_size=(32, 48), check=[gradient(), gradient(60, 30)])
    assert made.path == tmp_path / "tiny.pt2"
    assert (made.metadata.output_type, made.metadata.image, made.comparison.images) == ("probabilities", (32, 48), 2)
    vit = with_engine(made.path)
    net = tiny.net.resized((32, 48))
    preprocess = tiny.info.preprocess.replace(image_size=(32, 48))
    info = tiny.info.replace(config=net.config, preprocess=preprocess)
    expected = vitrail.Model(net, info).predict([gradient(), gradient(20)])
    for row, predicted in zip(vit.predict([gradient(), gradient(20)]), expected, strict=True):
        assert [p.label for p in row] == [p.label for p in predicted]
        assert [p.score for p in row] == pytest.approx([p.score for p in predicted], abs=1e-5)


def test_what_needs_the_network_is_refused_by_a_file(tiny, tmp_path):
    vit = with_engine(export(tiny, tmp_path / "tiny", to="pt2", check=[gradient()]).path)
    with pytest.raises(ModelError, match="use the checkpoint it was exported from"):
        vit.explain(gradient())
    with pytest.raises(ModelError, match="outputs classes, not features"):
        vit.embed(gradient())
    with pytest.raises(ConfigError, match="image_size cannot be changed any more"):
        with_engine(tmp_path / "tiny.pt2", image_size=64)
    assert "run by torch in float32" in repr(vit)


def test_a_model_without_classes_is_exported_for_its_features(tmp_path):
    vit = model(small(width=32, depth=1, mlp_dim=48, num_classes=0), task="embed", labels=None)
    made = export(vit, tmp_path / "features", to="pt2", check=[gradient()])
    assert (made.metadata.output_type, made.comparison.same) == ("features", None)
    torch.testing.assert_close(with_engine(made.path).embed(gradient()), vit.embed(gradient()))


def test_labeled_images_tell_how_many_answers_are_right(tiny, tmp_path):
    for i, label in enumerate(tiny.labels):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for j in range(2):
            gradient(30 + 7 * i, 30 + 5 * j).rotate(50 * i).save(tmp_path / "photos" / label / f"{j}.png")
    found = export(tiny, tmp_path / "tiny", to="pt2", check=str(tmp_path / "photos")).comparison
    assert found.images == 10
    right = [
        tiny.predict(path, top=1)[0].label == path.parent.name for path in sorted((tmp_path / "photos").glob("*/*"))
    ]
    assert found.top1 == (pytest.approx(np.mean(right)), pytest.approx(np.mean(right)))
    assert (found.change.value, found.change.low, found.change.high) == (0, 0, 0)


def test_int8_without_images_is_refused_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="--calibrate FOLDER"):
        export("no such model", tmp_path / "model.onnx", precision="int8")


# The trained ViT-Ti/16 on real photographs


@pytest.fixture(scope="module")
def trained(real_checkpoint: Path) -> vitrail.Model:
    import_peer("timm")  # has ImageNet's class names
    return vitrail.load(real_checkpoint, labels="imagenet-1k")


def test_twelve_photographs_have_the_same_class_in_float32(trained, imagenet_val, tmp_path):
    photographs = _some(imagenet_val, 12)
    made = export(trained, tmp_path / "ti.onnx", check=photographs)
    assert (made.comparison.same, made.comparison.images) == (12, 12)
    assert made.comparison.relative <= 1e-5
    again = open_file(made.path, "openvino")
    pixels = np.stack([trained.preprocess.pixels(p) for p in photographs[:8]])
    np.testing.assert_allclose(again.outputs(pixels), open_file(made.path).outputs(pixels), atol=1e-5)


def _some(folder: Path, count: int) -> list[bytes]:
    from vitrail.config import DataConfig
    from vitrail.data.sources import open_source_splits

    source = open_source_splits(DataConfig(source=str(folder))).evaluation_source
    return [source[80 * i].image for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("image", [None, (192, 256)])
def test_a_thousand_photographs_have_the_same_class_in_float32(trained, imagenet_val, tmp_path, to, image):
    made = export(trained, tmp_path / "ti", to=to, image_size=image, check=str(imagenet_val))
    assert (made.comparison.same, made.comparison.images) == (1000, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_int8_stays_within_a_point_of_float32(trained, imagenet_val, tmp_path, to):
    spec = str(imagenet_val)
    made = export(trained, tmp_path / "ti", to=to, precision="int8", calibrate=spec, check=spec)
    print(made.comparison.to_dict())
    assert abs(made.comparison.change.value) <= 0.010
    assert made.size < 0.5 * made.weights


@pytest.mark.slow
def test_int8_without_calibration_stays_within_a_point_too(trained, imagenet_val, tmp_path):
    made = export(trained, tmp_path / "ti", to="openvino", precision="int8", check=str(imagenet_val))
    print(made.comparison.to_dict())
    assert abs(made.comparison.change.value) <= 0.010
    assert made.comparison.same >= 970
    assert made.size < 0.4 * made.weights


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "openvino"])
def test_bfloat16_stays_within_half_a_point_of_float32(trained, imagenet_val, tmp_path, to):
    made = export(trained, tmp_path / "ti", to=to, precision="bfloat16", check=str(imagenet_val))
    print(made.comparison.to_dict())
    assert abs(made.comparison.change.value) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino", "pt2"])
def test_a_large_network_has_the_same_numbers(tmp_path, to):
    config = config_from_name("ViT-B/16")
    made = export(reference_engine(config), tmp_path / "b16", to=to)
    assert made.comparison.relative <= 1e-5


def reference_engine(config: vitrail.ViTConfig) -> vitrail.Model:
    from vitrail.weights.model_info import ModelInfo, default_preprocess

    return vitrail.Model(
        randomized(build(config)), ModelInfo(config=config, preprocess=default_preprocess("ViT", config))
    )
