"""Configs: validation, JSON round trip, dotted overrides, errors with suggestions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, ViTConfig, override
from vitrail.errors import ConfigError


def test_sizes_may_be_one_number_or_two() -> None:
    assert ViTConfig(image_size=224) == ViTConfig(image_size=(224, 224))
    assert ViTConfig(image_size=[224, 448], patch_size=[16, 32]).grid == (14, 14)  # type: ignore[arg-type]
    assert ViTConfig(image_size=64, stem=StemConfig(), patch_size=1).grid == (4, 4)
    assert ViTConfig(image_size=65, stem=StemConfig(), patch_size=1).grid == (5, 5), "SAME padding rounds up"


@given(
    image_size=st.sampled_from([224, (32, 64), (16, 16)]),
    num_registers=st.integers(0, 8),
    stem=st.sampled_from([None, StemConfig(layers=(1, 2), width_factor=0.5)]),
    layer_scale=st.sampled_from([None, 0.1, 1e-5]),
    norm_eps=st.floats(1e-12, 1e-3),
)
def test_json_round_trip_is_the_identity(**options: object) -> None:
    config = ViTConfig(**options | ({"patch_size": 2} if options["stem"] else {}))  # type: ignore[arg-type]
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_json_round_trip_of_other_configs() -> None:
    for config in (
        BiTConfig(layers=(1, 2), root_pad="none"),
        PreprocessConfig(mean=(0.5,), std=(0.1,), crop_rounding="floor"),
    ):
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_overrides_follow_dotted_paths() -> None:
    config = ViTConfig(stem=StemConfig(), patch_size=1)
    changed = override(
        config,
        ["num_heads=4", "stem.width_factor=2", "layer_scale=none", "pool=gap", "image_size=(64,128)", "norm_eps=1e-5"],
    )
    assert (changed.num_heads, changed.stem.width_factor, changed.layer_scale, changed.pool) == (4, 2.0, None, "gap")
    assert changed.image_size == (64, 128)
    assert changed.norm_eps == 1e-5
    assert config.num_heads == 12, "the original is unchanged"


def test_unknown_fields_from_a_file_are_named() -> None:
    with pytest.raises(ConfigError, match="ViTConfig has no field 'widht'; did you mean 'width'"):
        ViTConfig.from_dict({"widht": 3})


def test_configs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ViTConfig().width = 3  # type: ignore[misc]
