"""TrainConfig and its sections: validation, JSON round trip, overrides."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vitrail.config import (
    BiTConfig,
    ClassifyConfig,
    DistillConfig,
    MaskedPatchConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
    ViTConfig,
    epochs,
    override,
    steps,
)
from vitrail.config.base import Config
from vitrail.errors import ConfigError

RUN = TrainConfig(model=ViTConfig(image_size=32, patch_size=4, num_classes=0))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ClassifyConfig, {"label_smoothing": 1.0}, "label_smoothing=1.0: expected a fraction"),
        (ClassifyConfig, {"loss": "hinge"}, "is not a valid value; available: sigmoid, softmax"),
        (MaskedPatchConfig, {"mask_ratio": 0.0}, "mask_ratio must be above 0"),
        (MaskedPatchConfig, {"mask_token_prob": 0.8, "random_patch_prob": 0.3}, "at most 1 in total"),
        (MaskedPatchConfig, {"mask_token_prob": -0.1}, "must be 0 or more"),
        (OptimConfig, {"lr": 0.0}, "lr=0, eps=1e-08, head_lr_factor=1: expected positive numbers"),
        (OptimConfig, {"head_lr_factor": -1.0}, "head_lr_factor=-1: expected positive numbers"),
        (OptimConfig, {"grad_clip": 0.0}, "grad_clip=0.0 must be positive, or none"),
        (OptimConfig, {"layer_decay": 1.5}, "layer_decay=1.5: expected a number above 0 and at most 1"),
        (OptimConfig, {"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        (OptimConfig, {"betas": (0.9, 1.0)}, "betas and momentum must be"),
        (OptimConfig, {"betas": (0.9,)}, "betas expects"),
        (OptimConfig, {"momentum": 1.0}, "betas and momentum must be"),
        (OptimConfig, {"trainable": -1}, "trainable=-1: expected a number of blocks"),
        (OptimConfig, {"trainable": "nothing"}, "is not a valid value"),
        (OptimConfig, {"trainable": True}, "is not a valid value"),
        (OptimConfig, {"kind": "adam"}, "did you mean 'adamw'"),
        (ScheduleConfig, {"min_lr_ratio": 1.1}, "min_lr_ratio=1.1: expected a fraction"),
        (ScheduleConfig, {"kind": "cosin"}, "did you mean 'cosine'"),
    ],
)
def test_invalid_settings_are_rejected(kind: type[Config], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (OptimConfig, "lr", math.nan),
        (OptimConfig, "lr", math.inf),
        (OptimConfig, "weight_decay", math.nan),
        (OptimConfig, "grad_clip", math.nan),
        (DistillConfig, "alpha", 1.5),
        (DistillConfig, "alpha", -0.5),
        (DistillConfig, "temperature", 0.0),
    ],
)
def test_nan_infinite_and_out_of_range_numbers_are_rejected(kind: type[Config], name: str, value: float) -> None:
    with pytest.raises(ConfigError):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "a run needs a model: set model to a network's config, or init_from to a checkpoint"),
        ({"batch_size": 0}, "batch_size=0: expected 1 or more, or auto"),
        ({"batch_size": "largest"}, "is not a valid value; expected a whole number or auto."),
        ({"batch_size": 1.5}, "batch_size=1.5 is not a valid value; expected a whole number or auto."),
        ({"compile": 3}, "expected true, false or graphs."),
        ({"grad_accum_steps": 0}, "grad_accum_steps=0: expected 1 or more"),
        ({"ema": 1.0}, "ema=1.0: expected a number between 0 and 1, or none"),
        ({"objective": "distill"}, "objective=distill needs distill.teacher"),
        ({"objective": "masked-patch", "model": BiTConfig()}, "masked-patch needs a ViT"),
        ({"data": {"source": "stream:a.tar", "order": "balanced"}}, "data.order=balanced is not possible with stream:"),
        ({"precision": "float16"}, "is not a valid value; did you mean"),
        ({"evaluate_every": "often"}, "expected a duration with a unit"),
    ],
)
def test_inconsistent_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RUN.replace(**changes)


@pytest.mark.parametrize("changes", [{"log_every": steps(0)}, {"checkpoint_every": steps(0)}, {"patience": 0}])
def test_zero_intervals_and_patience_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RUN.replace(**changes)


def test_json_round_trip_of_runs() -> None:
    for config in (
        RUN,
        TrainConfig(model=BiTConfig(layers=(1, 2)), seed=7, batch_size="auto", ema=0.999, evaluate_every=None),
        TrainConfig(
            init_from="ViT-B/16",
            image_size=384,
            objective="distill",
            distill=DistillConfig(teacher="x"),
            duration=steps(5),
        ),
        RUN.replace(image_size=(32, 64), compare=("model.position=none", "seed=1"), patience=3),
        RUN.replace(optim=OptimConfig(kind="muon", trainable=2, layer_decay=0.75, grad_clip=None)),
        RUN.replace(optim={"trainable": "head"}, schedule=ScheduleConfig(kind="rsqrt", warmup=epochs(0.25))),
    ):
        text = json.dumps(config.to_dict(), allow_nan=False)
        assert TrainConfig.from_dict(json.loads(text)) == config


def test_json_round_trip_keeps_the_type_of_the_model() -> None:
    loaded = TrainConfig.from_dict(TrainConfig(model=BiTConfig()).to_dict())
    assert isinstance(loaded.model, BiTConfig)
    assert isinstance(TrainConfig.from_dict(RUN.to_dict()).model, ViTConfig)


def test_overrides_reach_every_section() -> None:
    changed = override(
        RUN,
        [
            "optim.lr=3e-4",
            "optim.trainable=2",
            "optim.betas=(0.9, 0.95)",
            "optim.grad_clip=none",
            "schedule.warmup=5 epochs",
            "model.width=192",
            "model.num_heads=3",
            "data.source=cifar10",
            "augment.mixup=0.8",
            "augment.policy=none",
            "batch_size=auto",
            "ema=none",
            "evaluate_every=none",
            "duration=1.5m images",
        ],
    )
    assert (changed.optim.lr, changed.optim.trainable, changed.optim.betas, changed.optim.grad_clip) == (
        3e-4,
        2,
        (0.9, 0.95),
        None,
    )
    assert changed.schedule.warmup == epochs(5)
    assert (changed.model.width, changed.data.source, changed.augment.mixup) == (192, "cifar10", 0.8)
    assert changed.augment.policy == "none"
    assert (changed.batch_size, changed.ema, changed.evaluate_every) == ("auto", None, None)
    assert changed.duration.count == 1_500_000
