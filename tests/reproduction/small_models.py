"""Models with random weights, for tests of edits and measurements without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training.small_runs import digits_config

from vitrail.model import Model
from vitrail.models import build
from vitrail.weights.model_info import ModelInfo


def make_model(path: Path | None = None, seed: int = 3, **fields: Any) -> Model:
    """A model for the digits at 8 px with 2 x 2 patches, saved to `path`; its head and positions are not small."""
    config = digits_config()
    assert config.model is not None
    assert config.preprocess is not None
    network = config.model.replace(num_classes=10, **fields)
    net, generator = build(network, seed).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name.startswith(("head", "positions")):
                value.normal_(generator=generator)
    labels = tuple(map(str, range(10)))
    model = Model(net, ModelInfo(config=network, preprocess=config.preprocess, labels=labels, family="ViT"))
    if path is not None:
        model.save(path)
    return model
