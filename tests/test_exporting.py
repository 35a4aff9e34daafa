"""`vitrail.export` and `with_engine`, on small networks, a trained ViT-Ti/16 and a random ViT-B/16."""

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
from vitrail.engines.engine import open_file
from vitrail.errors import ConfigError, ModelError
from vitrail.exporting.export_model import export
from vitrail.exporting.open_engine import with_engine
from vitrail.models import build
from vitrail.models.model_names import config_from_name

need_extra("export")


@pytest.fixture(autouse=True)
def _fast_exports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten exports, except in the slow tests."""
    if not request.node.get_closest_marker("slow"):
        export_quickly(monkeypatch)


@pytest.fixture(scope="module")
def tiny() -> vitrail.Model:
    return model(small(width=32, depth=1, mlp_dim=48))


def test_an_exported_model_predicts_like_the_model_at_the_new_image_size(tiny, tmp_path):
    result = export(tiny, tmp_path / "tiny", to="pt2", image_size=(32, 48), check=[gradient(), gradient(60, 30)])
    assert result.path == tmp_path / "tiny.pt2"
    assert (result.metadata.output_type, result.metadata.image_size, result.comparison.images) == (
        "probabilities",
        (32, 48),
        2,
    )
    vit = with_engine(result.path)
    net = tiny.net.resized((32, 48))
    preprocess = tiny.info.preprocess.replace(image_size=(32, 48))
    info = tiny.info.replace(config=net.config, preprocess=preprocess)
    expected = vitrail.Model(net, info).predict([gradient(), gradient(20)])
    for row, predicted in zip(vit.predict([gradient(), gradient(20)]), expected, strict=True):
        assert [p.label for p in row] == [p.label for p in predicted]
        assert [p.score for p in row] == pytest.approx([p.score for p in predicted], abs=1e-5)


def test_operations_that_need_the_network_are_refused_for_a_file(tiny, tmp_path):
    vit = with_engine(export(tiny, tmp_path / "tiny", to="pt2", check=[gradient()]).path)
    with pytest.raises(ModelError, match="use the checkpoint it was exported from"):
        vit.explain(gradient())
    with pytest.raises(ModelError, match="outputs classes, not features"):
        vit.embed(gradient())
    with pytest.raises(ConfigError, match="image_size cannot be changed"):
        with_engine(tmp_path / "tiny.pt2", image_size=64)
    assert "run by torch in float32" in repr(vit)


def test_a_model_without_classes_is_exported_with_features_as_output(tmp_path):
    vit = model(small(width=32, depth=1, mlp_dim=48, num_classes=0), task="embed", labels=None)
    result = export(vit, tmp_path / "features", to="pt2", check=[gradient()])
    assert (result.metadata.output_type, result.comparison.same_top1) == ("features", None)
    torch.testing.assert_close(with_engine(result.path).embed(gradient()), vit.embed(gradient()))


def test_labeled_images_give_the_top1_accuracy_of_file_and_model(tiny, tmp_path):
    for i, label in enumerate(tiny.labels):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for j in range(2):
            gradient(30 + 7 * i, 30 + 5 * j).rotate(50 * i).save(tmp_path / "photos" / label / f"{j}.png")
    comparison = export(tiny, tmp_path / "tiny", to="pt2", check=str(tmp_path / "photos")).comparison
    assert comparison.images == 10
    correct = [
        tiny.predict(path, top=1)[0].label == path.parent.name for path in sorted((tmp_path / "photos").glob("*/*"))
    ]
    assert comparison.top1 == (pytest.approx(np.mean(correct)), pytest.approx(np.mean(correct)))
    assert (comparison.top1_change.value, comparison.top1_change.low, comparison.top1_change.high) == (0, 0, 0)


def test_int8_without_calibration_images_is_refused_before_loading_the_model(tmp_path):
    with pytest.raises(ConfigError, match="--calibrate FOLDER"):
        export("no such model", tmp_path / "model.onnx", precision="int8")


# A trained ViT-Ti/16 on real photographs


@pytest.fixture(scope="module")
def trained(real_checkpoint: Path) -> vitrail.Model:
    import_peer("timm")  # it contains the class names of ImageNet
    return vitrail.load(real_checkpoint, labels="imagenet-1k")


def test_twelve_photographs_have_the_same_top1_class_in_float32(trained, imagenet_val, tmp_path):
    photographs = _sample_photographs(imagenet_val, 12)
    result = export(trained, tmp_path / "ti.onnx", check=photographs)
    assert (result.comparison.same_top1, result.comparison.images) == (12, 12)
    assert result.comparison.relative_error <= 1e-5
    openvino_file = open_file(result.path, "openvino")
    pixels = np.stack([trained.preprocess.pixels(p) for p in photographs[:8]])
    np.testing.assert_allclose(openvino_file.outputs(pixels), open_file(result.path).outputs(pixels), atol=1e-5)


def _sample_photographs(folder: Path, count: int) -> list[bytes]:
    from vitrail.config import DataConfig
    from vitrail.data.sources import open_source_splits

    source = open_source_splits(DataConfig(source=str(folder))).evaluation_source
    return [source[80 * i].image for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("image_size", [None, (192, 256)])
def test_a_thousand_photographs_have_the_same_top1_class_in_float32(trained, imagenet_val, tmp_path, to, image_size):
    result = export(trained, tmp_path / "ti", to=to, image_size=image_size, check=str(imagenet_val))
    assert (result.comparison.same_top1, result.comparison.images) == (1000, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_calibrated_int8_changes_top1_by_at_most_one_point(trained, imagenet_val, tmp_path, to):
    spec = str(imagenet_val)
    result = export(trained, tmp_path / "ti", to=to, precision="int8", calibrate=spec, check=spec)
    print(result.comparison.to_dict())
    assert abs(result.comparison.top1_change.value) <= 0.010
    assert result.size < 0.5 * result.weight_bytes


@pytest.mark.slow
def test_dynamic_int8_changes_top1_by_at_most_one_point(trained, imagenet_val, tmp_path):
    result = export(trained, tmp_path / "ti", to="openvino", precision="int8", check=str(imagenet_val))
    print(result.comparison.to_dict())
    assert abs(result.comparison.top1_change.value) <= 0.010
    assert result.comparison.same_top1 >= 970
    assert result.size < 0.4 * result.weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "openvino"])
def test_bfloat16_changes_top1_by_at_most_half_a_point(trained, imagenet_val, tmp_path, to):
    result = export(trained, tmp_path / "ti", to=to, precision="bfloat16", check=str(imagenet_val))
    print(result.comparison.to_dict())
    assert abs(result.comparison.top1_change.value) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino", "pt2"])
def test_a_large_network_gives_the_same_outputs(tmp_path, to):
    config = config_from_name("ViT-B/16")
    result = export(random_model(config), tmp_path / "b16", to=to)
    assert result.comparison.relative_error <= 1e-5


def random_model(config: vitrail.ViTConfig) -> vitrail.Model:
    from vitrail.weights.family_defaults import default_preprocess
    from vitrail.weights.model_info import ModelInfo

    return vitrail.Model(
        randomized(build(config)), ModelInfo(config=config, preprocess=default_preprocess("ViT", config))
    )
