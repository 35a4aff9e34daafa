"""Predicted classes on the test images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.evaluation.features import image_batches
from vitrail.models import ViT
from vitrail.models.base import eval_mode
from vitrail.runtime import autocast, pick_device
from vitrail.training.runs import Run
from vitrail.weights.loading import load_checkpoint

Classes = npt.NDArray[np.int64]
UNKNOWN = -1
"""Class of an image that cannot be read or has no label."""


def predict_test_images(run: Run, model: Path, heads: bool = False) -> tuple[dict[str, Classes], Classes]:
    """Predictions of a model on the run's test images, prepared and computed as in the run, and the correct classes.

    Predictions: `model`, those of the model's logits. heads: for a distilled model also `class` and `distill`, those of
    its two heads, whose mean are the logits.
    """
    splits = open_data(run.config.data)
    source = splits.test if splits.test is not None else splits.validation
    device, config = pick_device(run.config.device), run.config
    net = load_checkpoint(model, image_size=config.image_size)[0].to(device)
    preprocess = Preprocess(config.preprocess or run.model.info.preprocess)
    targets = np.asarray(source.targets, dtype=np.int64)
    two_heads = heads and isinstance(net, ViT) and net.config.distilled
    found = {name: np.full_like(targets, UNKNOWN) for name in ["model", *(("class", "distill") if two_heads else ())]}
    with image_batches(source, preprocess, batch_size=500, device=device) as batches:
        for batch in batches:
            with eval_mode(net), torch.no_grad(), autocast(config.precision, device):
                images = preprocess.normalize(batch.images)
                outputs = {"model": net(images)}
                if two_heads:
                    logits = net.features(images, outputs="head_logits").head_logits
                    assert logits is not None
                    outputs |= dict(zip(("class", "distill"), logits, strict=True))
            readable = (batch.weights > 0).cpu()
            for name, output in outputs.items():
                found[name][batch.indices[readable].numpy()] = output.argmax(1).cpu()[readable].numpy()
    return found, targets


def accuracy(predicted: Classes, targets: Classes) -> float:
    """Fraction of correct predictions, without images that cannot be read or have no label."""
    counted = (predicted != UNKNOWN) & (targets != UNKNOWN)
    return float((predicted == targets)[counted].mean())
