"""Names, values and docstrings of settings, and what is suggested for names that do not exist."""

from __future__ import annotations

from dataclasses import fields

import pytest

import vitrail.config
from vitrail.config import Config, Duration, StemConfig, TrainConfig, ViTConfig, override
from vitrail.config.overrides import field_docs, format_type, format_value, list_settings, parse_value, suggest_setting
from vitrail.config.sizes import SIZES, vit_config
from vitrail.errors import ConfigError
from vitrail.recipes import RECIPES

EXPORTED = [c for c in vars(vitrail.config).values() if isinstance(c, type) and issubclass(c, Config)]
CONFIGS = [c for c in EXPORTED if c not in (Config, TrainConfig, Duration)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_setting_has_a_docstring(config: type[Config]):
    assert set(field_docs(config)) == {field.name for field in fields(config)}
    assert all(field_docs(config).values())


def test_every_setting_of_a_run_is_listed_with_a_docstring():
    settings = list(list_settings(RECIPES["cifar10"]()))
    names = [setting.name for setting in settings]
    assert len(set(names)) == len(names)
    assert {"optim.lr", "model.depth", "data.source", "duration", "augment.mix_prob"} <= set(names)
    assert [setting.name for setting in settings if not setting.doc] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_listed_values_give_the_same_config_as_overrides(recipe: str):
    config = RECIPES[recipe]()
    settings = [f"{s.name}={s.value}" for s in list_settings(config) if s.value not in ("()", "none")]
    assert override(config, settings) == config


@pytest.mark.parametrize("value", [None, True, 3, 0.25, 3e-4, 1e-8, 5e7, 1e22, (224, 192), ("a", "b"), "gelu-tanh"])
def test_formatted_values_are_parsed_to_the_same_value(value: object):
    assert parse_value(format_value(value)) == value


def test_types_are_described_for_readers():
    annotations = {setting.name: setting.type for setting in list_settings(RECIPES["cifar10"]())}
    assert annotations["optim.lr"] == "number"
    assert annotations["optim.kind"] == "adamw | sgd | muon"
    assert annotations["optim.momentum"] == "number | none"
    assert annotations["duration"] == "duration"
    assert annotations["model.class_token"] == "true | false"
    assert format_type(tuple[float, ...]) == "(number, ...)"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rate", "; did you mean 'optim.lr'?"),
        ("lr", "; did you mean 'optim.lr'?"),
        ("optim.learning_rate", "; did you mean 'optim.lr'?"),
        ("wd", "; did you mean 'optim.weight_decay'?"),
        ("batch", "; did you mean 'batch_size'?"),
        ("optimizer", "; did you mean 'optim.kind'?"),
        ("heads", "; did you mean 'model.num_heads'?"),
        ("mixup", "; did you mean 'augment.mixup'?"),
        ("optm.lr", "; did you mean 'optim.lr'?"),
        ("model.dropuot", "; did you mean 'model.dropout'?"),
        ("epochs", "; try duration='3 epochs'."),
        ("max_steps", "; try duration='3 steps'."),
        ("flavor", ""),
    ],
)
def test_unknown_setting_suggests_the_one_that_was_meant(name: str, hint: str):
    assert suggest_setting(RECIPES["cifar10"](), name) == hint


def test_error_about_an_unknown_setting_names_it_and_the_suggestion():
    with pytest.raises(ConfigError, match=r"unknown setting 'optim.learning_rate'; did"):
        override(TrainConfig(init_from="x"), ["optim.learning_rate=1"])
    with pytest.raises(ConfigError, match=r"unknown setting 'epochs'.*; try duration='7 epochs'"):
        override(TrainConfig(init_from="x"), ["epochs=7"])


@pytest.mark.parametrize("name", SIZES)
def test_variant_has_the_published_size(name: str):
    config = vit_config(f"{name}/14" if name in ("SO400M", "H", "g", "G") else f"{name}/16", num_classes=7)
    assert (config.width, config.depth, config.num_heads, config.mlp_dim) == SIZES[name]
    assert config.num_classes == 7


def test_variant_with_changes_keeps_the_rest():
    assert vit_config("S/16", depth=3) == ViTConfig(width=384, depth=3, num_heads=6, mlp_dim=1536)


@pytest.mark.parametrize("name", ["S", "S/x", "M/16", "ViT-S/16"])
def test_unknown_variant_is_an_error(name: str):
    with pytest.raises(ConfigError, match="expected SIZE/PATCH, such as S/16"):
        vit_config(name)


VIT = ViTConfig(stem=StemConfig(), patch_size=1)
RUN = TrainConfig(model=ViTConfig(image_size=32, patch_size=4, num_classes=0))


@pytest.mark.parametrize(
    ("config", "assignment", "message"),
    [
        (VIT, "num_head=4", "unknown setting 'num_head'; did you mean 'num_heads'"),
        (VIT, "stem.widht_factor=2", "did you mean 'stem.width_factor'"),
        (VIT, "num_heads.x=2", "'num_heads' is 12, a single value"),
        (VIT, "num_heads", "expected key=value"),
        (VIT, "num_heads=four", "num_heads expects a whole number, got 'four'"),
        (VIT, "num_heads=true", "expects a whole number"),
        (VIT, "activation=relu", "is not a valid value"),
        (VIT, "activation=gelu_tanh", "did you mean 'gelu-tanh'"),
        (VIT, "num_heads=5", "width=768 is not divisible by num_heads=5"),
        (RUN, "augment.flip=2", "^augment.flip=2.0: expected a probability"),
        (RUN, "optim.lrr=1", "did you mean 'optim.lr'"),
        (RUN, "optimizer.lr=1", "did you mean 'optim.lr'"),
        (RUN, "schedule.warm=1 step", "did you mean 'schedule.warmup'"),
        (RUN, "optim=3", "OptimConfig"),
        (RUN, "seed=1.5", "seed expects a whole number, got 1.5"),
        (RUN, "optim.trainable=last", "is not a valid value; expected a whole number, all or head."),
    ],
)
def test_invalid_overrides_are_errors_with_suggestions(config: Config, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(config, [assignment])


def test_a_word_for_a_group_of_settings_is_explained() -> None:
    with pytest.raises(
        ConfigError, match=r"model is a group of settings such as model\.image_size=\.\.\., got 'Swin-T'"
    ):
        override(RECIPES["digits"](), ["model=Swin-T"])
