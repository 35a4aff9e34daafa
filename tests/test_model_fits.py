"""A Model's network and info describe one model, whenever either of them is set."""

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


def test_a_network_with_other_classes_than_its_card_is_refused(vit: vitrail.Model) -> None:
    """Its first class would be called what the model info's first class is called."""
    with pytest.raises(ModelError) as caught:
        vitrail.Model(vit.net.with_classes(10), vit.info)
    assert str(caught.value) == (
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
    ("changes", "said"),
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
def test_any_other_difference_that_matters_is_refused(vit: vitrail.Model, changes: dict, said: str) -> None:
    with pytest.raises(ModelError, match=f"the network has {said}, but the model info has"):
        vitrail.Model(build(small(**changes)), vit.info)


def test_a_bit_is_no_vit(vit: vitrail.Model) -> None:
    with pytest.raises(ModelError, match="the network has type=BiTConfig, but the model info has type=ViTConfig"):
        vitrail.Model(model(BIT).net, vit.info)


def test_what_matters_only_in_training_may_differ() -> None:
    info = model(small(layer_scale=0.1)).info
    other = small(dropout=0.1, attention_dropout=0.1, drop_path=0.2, position_init_std=1.0, layer_scale=1e-6)
    assert len(vitrail.Model(model(other).net, info).predict(gradient())) == 5


def test_a_preprocessing_of_other_channels_is_refused(vit: vitrail.Model) -> None:
    gray = PreprocessConfig(image_size=32, mean=(0.5,), std=(0.5,))
    with pytest.raises(ModelError, match=r"takes images with 3 channels, but its preprocessing gives 1; load it with"):
        vitrail.Model(vit.net, vit.info.replace(preprocess=gray))


def test_a_network_and_a_card_set_later_must_fit_too(vit: vitrail.Model) -> None:
    with pytest.raises(ModelError, match="the network has num_classes=10, but the model info has num_classes=5"):
        vit.net = vit.net.with_classes(10)
    other = vit.info.replace(config=vit.config.replace(num_classes=3), labels=None)
    with pytest.raises(ModelError, match="the network has num_classes=5, but the model info has num_classes=3"):
        vit.info = other
    assert len(vit.predict(gradient())) == 5
    again = vit.net.rebuild(vit.config, {})
    vit.net = again
    assert vit.net is again


def test_a_card_set_later_brings_its_preprocessing(vit: vitrail.Model) -> None:
    before = vit.logits(gradient())
    vit.info = vit.info.replace(preprocess=vit.info.preprocess.replace(mean=(0.2, 0.3, 0.4)))
    assert vit.preprocess.config.mean == (0.2, 0.3, 0.4)
    assert not torch.equal(vit.logits(gradient()), before)


@pytest.mark.parametrize("config", [small(), BIT], ids=["ViT", "BiT"])
def test_a_head_replaced_by_hand_names_no_classes(config: object) -> None:
    replaced = model(config)  # type: ignore[arg-type]
    replaced.net.head = nn.Linear(replaced.net.head.in_features, 10)
    for call in (replaced.predict, replaced.logits):
        with pytest.raises(
            ModelError, match=r"gives 10 outputs, but its config has num_classes=5.*net.with_classes\(10\)"
        ):
            call(gradient())


def test_what_changes_both_at_once_fits(vit: vitrail.Model, tmp_path: Path) -> None:
    vit.save(tmp_path / "m")
    for changed in (
        vitrail.load(tmp_path / "m", num_classes=10, image_size=64, channels=1),
        vitrail.Model(*adapt_model(vit.net, vit.info, num_classes=10, image_size=64, channels=1)),
    ):
        assert changed.config == changed.info.config
        assert sorted(p.label for p in changed.predict(gradient(), top=10)) == [f"class {i}" for i in range(10)]
        assert changed.net.config.channels == changed.info.preprocess.channels == 1
