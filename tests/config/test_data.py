"""Settings of data and augmentation."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import AugmentConfig, DataConfig, override
from vitrail.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 0.0}, r"fraction=0.0: expected 0.1, or a range such as 0.5,1"),
        ({"fraction": 1.5}, r"fraction=1.5: expected 0.1"),
        ({"fraction": (0.5, 0.5)}, r"fraction=\(0.5, 0.5\): expected 0.1"),
        ({"fraction": (-0.1, 0.5)}, r"fraction=\(-0.1, 0.5\): expected 0.1"),
        ({"fraction": math.nan}, r"fraction"),
        ({"held_out": 0.0}, "held_out=0.0: expected a fraction of the images, between 0 and 1"),
        ({"held_out": 1.0}, "held_out=1.0: expected a fraction"),
        ({"max_bad_fraction": 1.5}, "max_bad_fraction=1.5: expected a fraction"),
        ({"repeats": 0}, "repeats=0: expected 1 or more"),
        ({"workers": -1}, "workers=-1: expected 0 or more"),
        ({"order": "random"}, "is not a valid value"),
        ({"source": 3}, "DataConfig.source expects text, got 3"),
    ],
)
def test_invalid_data_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flip": 1.5}, "flip=1.5: expected a probability"),
        ({"erase": -0.1}, "erase=-0.1: expected a probability"),
        ({"mix_prob": 2.0}, "mix_prob=2.0: expected a probability"),
        ({"scale": (0.0, 1.0)}, "scale=0.0, 1.0: expected two positive numbers"),
        ({"scale": (0.9, 0.5)}, "the smaller one first"),
        ({"scale": (0.5, 1.5)}, "fractions of the area, at most 1"),
        ({"erase_scale": (0.5, 1.5)}, "fractions of the area, at most 1"),
        ({"ratio": (2.0, 1.0)}, "the smaller one first"),
        ({"color_jitter": (0.4, 0.4, 0.4, 0.6)}, "hue 0.6: expected at most 0.5"),
        ({"color_jitter": (-0.1, 0.0, 0.0, 0.0)}, "must be 0 or more"),
        ({"color_jitter": (0.1, 0.1)}, "color_jitter expects"),
        ({"mixup": -1.0}, "must be 0 or more"),
        ({"pad": -1}, "must be 0 or more"),
        ({"magnitude": 11.0}, "magnitude=11.0: expected 0 to 10"),
        ({"policy": "auto"}, "is not a valid value"),
    ],
)
def test_invalid_augmentation_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AugmentConfig(**settings)


@pytest.mark.parametrize("name", ["mixup", "cutmix", "magnitude_std"])
def test_nan_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError):
        AugmentConfig(**{name: math.nan})


@pytest.mark.parametrize(
    ("settings", "mixes"),
    [
        ({}, False),
        ({"mixup": 0.8}, True),
        ({"cutmix": 1.0}, True),
        ({"mixup": 0.8, "mix_prob": 0.0}, False),
        ({"mix_prob": 0.5}, False),
    ],
)
def test_mixing_is_on_with_mixup_or_cutmix(settings: dict[str, Any], mixes: bool) -> None:
    assert AugmentConfig(**settings).mixes == mixes


@given(
    source=st.text(max_size=20),
    held_out=st.none() | st.floats(0.01, 0.99),
    fraction=st.none() | st.floats(0.01, 1.0) | st.tuples(st.floats(0.0, 0.49), st.floats(0.5, 1.0)),
    class_names=st.none() | st.lists(st.text(max_size=5), max_size=3).map(tuple),
    resident=st.sampled_from([None, True, False]),
    workers=st.none() | st.integers(0, 64),
)
def test_json_round_trip_of_data_settings(**settings: Any) -> None:
    config = DataConfig(**settings)
    assert DataConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(
    scale=st.tuples(st.floats(0.01, 0.5), st.floats(0.5, 1.0)),
    color_jitter=st.tuples(*[st.floats(0, 0.5)] * 4),
    mixup=st.floats(0, 10),
    num_ops=st.integers(0, 5),
)
def test_json_round_trip_of_augmentation_settings(**settings: Any) -> None:
    config = AugmentConfig(**settings)
    assert AugmentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("text", "selected"), [("0.1", (0.0, 0.1)), ("0.5,1", (0.5, 1.0)), ("(0.25, 0.75)", (0.25, 0.75)), ("none", (0, 1))]
)
def test_a_fraction_is_a_share_or_a_range(text: str, selected: tuple[float, float]) -> None:
    assert override(DataConfig(fraction=0.3), [f"fraction={text}"]).fraction_range == selected


def test_overrides_of_data_and_augmentation() -> None:
    data = override(
        DataConfig(), ["source=folder:my photos/", "held_out=0.2", "class_names=('cat', 'dog')", "resident=true"]
    )
    assert (data.source, data.held_out, data.class_names, data.resident) == (
        "folder:my photos/",
        0.2,
        ("cat", "dog"),
        True,
    )
    augment = override(
        AugmentConfig(), ["scale=(0.05, 1)", "color_jitter=(0.4, 0.4, 0.4, 0)", "policy=three", "crop=none"]
    )
    assert augment.scale == (0.05, 1.0)
    assert augment.color_jitter == (0.4, 0.4, 0.4, 0.0)
    assert (augment.policy, augment.crop) == ("three", "none")
