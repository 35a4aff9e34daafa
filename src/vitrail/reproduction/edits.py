"""Changes to a pretrained model before a trial fine-tunes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from vitrail.config import TrainConfig
from vitrail.config.architecture import Resample
from vitrail.errors import ConfigError
from vitrail.model import Model
from vitrail.models import ViT
from vitrail.models.position import LearnedPosition1d
from vitrail.open_model import load
from vitrail.weights.loading import adapt_model

Edit = Callable[[Model, TrainConfig], Model]
RESAMPLES: tuple[str, ...] = get_args(Resample)


def set_resample(model: Model, config: TrainConfig, *, convention: str) -> Model:
    """State which library's interpolation resamples the positions when training changes the image size."""
    assert isinstance(model.net, ViT)
    net = model.net.rebuild(model.net.config.replace(resample=convention), {})
    return Model(net, model.info.replace(config=net.config))


def place_in_corner(model: Model, config: TrainConfig) -> Model:
    """Change the image size; the positions of the first rows and columns stay as they are, all others are zero."""
    return _replace_positions(model, config, _pad_with_zeros)


def renew_positions(model: Model, config: TrainConfig) -> Model:
    """Change the image size; the patches' positions are drawn anew, as at initialization."""
    assert isinstance(model.net, ViT)
    std = model.net.config.position_init_std
    return _replace_positions(model, config, lambda table, like: std * torch.randn_like(like))


def remove_head(model: Model, config: TrainConfig) -> Model:
    """Remove the head; training starts with a new one of zeros, although the classes are the same."""
    return Model(*adapt_model(model.net, model.info, num_classes=0))


EDITS: Mapping[str, Edit] = {
    **{f"resample-{name}": partial(set_resample, convention=name) for name in RESAMPLES},
    "positions-in-corner": place_in_corner,
    "new-positions": renew_positions,
    "without-head": remove_head,
}
"""Name in `Arm.parent_edit` -> a function of the parent's model and the trial's settings that returns the new model."""


def edit_model(name: str, source: Path, out: Path, config: TrainConfig) -> Path:
    """Write the model in `source`, changed, to `out`, unless it is there from before an interruption."""
    if not out.exists():
        torch.manual_seed(config.seed)
        EDITS[name](load(source), config).save(out)
    return out


def _replace_positions(model: Model, config: TrainConfig, make: Callable[[Tensor, Tensor], Tensor]) -> Model:
    """The model at the trial's image size. make: (table of the old grid, resampled table) -> table of the new grid."""
    if config.image_size is None or model.config.position != "learned-1d":  # type: ignore[union-attr]
        raise ConfigError("positions are replaced when the image size of a model with learned 1-D positions changes.")
    net, info = adapt_model(model.net, model.info, config.image_size)
    assert isinstance(net, ViT)
    assert isinstance(model.net, ViT)
    with torch.no_grad():
        for old, new in zip(model.net.positions, net.positions, strict=True):
            assert isinstance(old, LearnedPosition1d)
            assert isinstance(new, LearnedPosition1d)
            new.table.copy_(make(old.table, new.table))
    return Model(net, info.replace(config=net.config))


def _pad_with_zeros(table: Tensor, like: Tensor) -> Tensor:
    """h w D -> h' w' D, where h' >= h and w' >= w."""
    padded = torch.zeros_like(like)
    padded[: table.shape[0], : table.shape[1]] = table
    return padded
