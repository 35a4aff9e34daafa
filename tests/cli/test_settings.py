"""`--settings` of train and finetune, and settings that were given as options or without a value."""

from __future__ import annotations

import json

import pytest
from cli.conftest import Command

from vitrail.recipes import RECIPES


def test_settings_of_a_recipe_are_listed_with_their_descriptions(vitrail: Command):
    result = vitrail("train", "cifar10", "--settings")
    assert result.status == 0
    rows = {line.split()[0]: line for line in result.out.splitlines() if line.strip() and line[0] != " "}
    assert "model.depth" in rows
    assert rows["optim.kind"].split()[1] == RECIPES["cifar10"]().optim.kind
    assert "Peak learning rate." in rows["optim.lr"]


def test_listed_settings_include_overrides(vitrail: Command):
    result = vitrail("train", "digits", "optim.lr=0.125", "--settings", "--json")
    values = {setting["name"]: setting["value"] for setting in json.loads(result.out)}
    assert values["optim.lr"] == "0.125"
    assert values["data.source"] == "digits"


def test_settings_of_both_finetuning_recipes_are_listed(vitrail: Command):
    kinds = []
    for recipe in ("finetune", "paper"):
        result = vitrail("finetune", "--recipe", recipe, "--settings", "--json")
        kinds.append({s["name"]: s["value"] for s in json.loads(result.out)}["optim.kind"])
    assert kinds == ["adamw", "sgd"]


def test_settings_are_listed_without_torch(process: Command):
    result = process("train", "--settings", "--json")
    assert result.status == 0
    assert json.loads(result.out)


@pytest.mark.parametrize("arguments", [("train", "cifr", "--settings"), ("finetune", "--recipe", "papr", "--settings")])
def test_settings_of_an_unknown_recipe_are_an_error(vitrail: Command, arguments: tuple[str, ...]):
    result = vitrail(*arguments)
    assert result.status == 1
    assert "did you mean" in result.errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("train", "--epochs", "3"),
            "No such option: --epochs; settings are written duration='3 epochs', without dashes.",
        ),
        (("train", "--epochs=3"), "settings are written duration='3 epochs', without dashes."),
        (("train", "cifar10", "--lr", "3e-4"), "settings are written optim.lr=3e-4, without dashes."),
        (("train", "--learning-rate=3e-4"), "settings are written optim.lr=3e-4, without dashes."),
        (("train", "--batch-size", "32"), "settings are written batch_size=32, without dashes."),
        (("finetune", "--wd", "0.1"), "settings are written optim.weight_decay=0.1, without dashes."),
        (("finetune", "--ema"), "settings are written ema=VALUE, without dashes."),
    ],
)
def test_setting_given_as_an_option_shows_how_it_is_written(vitrail: Command, arguments: tuple[str, ...], message: str):
    result = vitrail(*arguments)
    assert result.status == 2
    assert message in result.errors[0]


def test_other_unknown_options_have_no_hint_about_settings(vitrail: Command):
    assert "settings are written" not in vitrail("train", "--foo").errors[0]
    assert "settings are written" not in vitrail("predict", "--lr", "1", "a.jpg").errors[0]


@pytest.mark.parametrize("name", ["optim.lr", "seed", "optim.anything"])
def test_setting_without_a_value_is_an_error(vitrail: Command, name: str):
    result = vitrail("train", name)
    assert result.status == 1
    assert result.errors == [f"the setting {name} has no value; settings are written {name}=VALUE."]
