"""A Model's network and info must agree, also when either of them is assigned later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import gradient, model, small
from torch import nn

import vitrail
from vitrail.config import BiTConfig, PreprocessConfig
from vitrail.errors import ModelError
from vitrail.models import build
from vitrail.weights.loading import adapt_model

BIT = BiTConfig(image_size=32, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5)


@pytest.fixture
def vit() -> vitrail.Model:
    return model(small())


def test_network_with_other_classes_than_its_info_is_refused(vit: vitrail.Model) -> None:
    """Otherwise the network's outputs would get the class names of the model info."""
    with pytest.raises(ModelError) as error:
        vitrail.Model(vit.net.with_classes(10), vit.info)
    assert str(error.value) == (
        "the network has num_classes=10, but the model info has num_classes=5: it describes another network. "
        "Load the checkpoint with these settings, or pass info.replace(config=net.config, labels=None)."
    )
    net = vit.net.with_classes(10)
    assert (
        vitrail.Model(net, vit.info.replace(config=net.config, labels=None))
        .predict(gradient())[0]
        .label.startswith("class ")
    )


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"num_classes": 3}, "num_classes=3"),
        ({"channels": 1}, "channels=1"),
        ({"image_size": 64}, r"image_size=\[64, 64\]"),
        ({"width": 64, "mlp_dim": 128}, "width=64, mlp_dim=128"),
        ({"depth": 1}, "depth=1"),
        ({"activation": "gelu-quick"}, "activation=gelu-quick"),
        ({"norm_eps": 1e-12}, "norm_eps=1e-12"),
        ({"resample": "google"}, "resample=google"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"num_classes": 0}, "num_classes=0"),
    ],
)
def test_differences_that_change_the_outputs_are_refused(vit: vitrail.Model, changes: dict, setting: str) -> None:
    with pytest.raises(ModelError, match=f"the network has {setting}, but the model info has"):
        vitrail.Model(build(small(**changes)), vit.info)


def test_bit_with_the_info_of_a_vit_is_refused(vit: vitrail.Model) -> None:
    with pytest.raises(ModelError, match="the network has type=BiTConfig, but the model info has type=ViTConfig"):
        vitrail.Model(model(BIT).net, vit.info)


def test_settings_that_matter_only_in_training_may_differ() -> None:
    info = model(small(layer_scale=0.1)).info
    training_config = small(dropout=0.1, attention_dropout=0.1, drop_path=0.2, position_init_std=1.0, layer_scale=1e-6)
    assert len(vitrail.Model(model(training_config).net, info).predict(gradient())) == 5


def test_preprocessing_for_other_channels_is_refused(vit: vitrail.Model) -> None:
    gray = PreprocessConfig(image_size=32, mean=(0.5,), std=(0.5,))
    with pytest.raises(ModelError, match=r"takes images with 3 channels, but its preprocessing gives 1; load it with"):
        vitrail.Model(vit.net, vit.info.replace(preprocess=gray))


def test_assigned_network_and_info_are_checked(vit: vitrail.Model) -> None:
    with pytest.raises(ModelError, match="the network has num_classes=10, but the model info has num_classes=5"):
        vit.net = vit.net.with_classes(10)
    other_info = vit.info.replace(config=vit.config.replace(num_classes=3), labels=None)
    with pytest.raises(ModelError, match="the network has num_classes=5, but the model info has num_classes=3"):
        vit.info = other_info
    assert len(vit.predict(gradient())) == 5
    rebuilt = vit.net.rebuild(vit.config, {})
    vit.net = rebuilt
    assert vit.net is rebuilt


def test_assigning_info_updates_the_preprocessing(vit: vitrail.Model) -> None:
    before = vit.logits(gradient())
    vit.info = vit.info.replace(preprocess=vit.info.preprocess.replace(mean=(0.2, 0.3, 0.4)))
    assert vit.preprocess.config.mean == (0.2, 0.3, 0.4)
    assert not torch.equal(vit.logits(gradient()), before)


@pytest.mark.parametrize("config", [small(), BIT], ids=["ViT", "BiT"])
def test_manually_replaced_head_is_refused_at_prediction(config: object) -> None:
    replaced = model(config)  # type: ignore[arg-type]
    replaced.net.head = nn.Linear(replaced.net.head.in_features, 10)
    for call in (replaced.predict, replaced.logits):
        with pytest.raises(
            ModelError, match=r"gives 10 outputs, but its config has num_classes=5.*net.with_classes\(10\)"
        ):
            call(gradient())


def test_load_and_adapt_model_change_network_and_info_together(vit: vitrail.Model, tmp_path: Path) -> None:
    vit.save(tmp_path / "m")
    for changed in (
        vitrail.load(tmp_path / "m", num_classes=10, image_size=64, channels=1),
        vitrail.Model(*adapt_model(vit.net, vit.info, num_classes=10, image_size=64, channels=1)),
    ):
        assert changed.config == changed.info.config
        assert sorted(p.label for p in changed.predict(gradient(), top=10)) == [f"class {i}" for i in range(10)]
        assert changed.net.config.channels == changed.info.preprocess.channels == 1
