"""The paper's inspection of a trained ViT as numbers and arrays: its Fig. 6, 7 and 11."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.explain import (
    attention_distance,
    faithfulness,
    feature_colors,
    filter_components,
    patch_features,
    position_similarity,
    rollout_map,
    uniform_distance,
)
from vitrail.explain.faithfulness import RANDOM
from vitrail.models import Net, ViT
from vitrail.reproduction.measures.evaluation_images import (
    evaluation_images,
    predict,
    training_images,
    untrained_network,
)
from vitrail.reproduction.measures.saved_arrays import save_arrays
from vitrail.reproduction.measures.weight_structure import (
    change_numbers,
    filter_numbers,
    patch_components,
    patch_size,
    position_numbers,
)
from vitrail.training.runs import Run

# L layers, H heads, h rows and w columns of patches; B images

Floats = npt.NDArray[np.floating[Any]]

NUM_IMAGES = 128
"""Test images for the attention distance, as in the paper."""
NUM_SHOWN, NUM_COLORED = 24, 12
"""Images in the figures of rollout and of feature colors."""
NUM_DELETED = 32
"""Images for the deletion curves of the rollout."""
NUM_TRAINING_IMAGES = 1000
"""Training images for the principal components of patches, at most."""
BATCH_SIZE = 32


def inspection(run: Run) -> dict[str, float]:
    """Numbers of the trained model, and with the suffix `, untrained` those of its initial weights.

    distance, layer I    mean attention distance of the heads of a layer in pixels; `first layer`, `last layer`
    deepening            rank correlation of a layer's mean attention distance with its depth
    widest first head    largest attention distance of a head of the first layer / that of uniform attention
    rollout gain         area under the deletion curve of random orders minus that of rollout (trained model only)

    and those of `position_numbers`, `filter_numbers` and `change_numbers`. Stores arrays for the figures.
    """
    net, untrained = run.model.net, untrained_network(run)
    images, _, pixels = evaluation_images(run, NUM_IMAGES)
    patches, _ = patch_components(training_images(run, NUM_TRAINING_IMAGES), patch_size(net))
    found: dict[str, float] = {}
    for suffix, each in (("", net), (", untrained", untrained)):
        distances, uniform = _distances(each, images)
        numbers = {**distance_numbers(distances, uniform), **position_numbers(each), **filter_numbers(each, patches)}
        found |= {name + suffix: value for name, value in numbers.items()}
        save_arrays(run, **{f"distances{suffix.replace(', ', '_')}": distances, "uniform": np.array(uniform)})
    found |= change_numbers(net, untrained, patches)
    found["rollout gain"] = rollout_gain(net, images[:NUM_DELETED])
    _save_figure_arrays(run, net, images, pixels)
    return found


def _distances(net: Net, images: Tensor) -> tuple[Floats, float]:
    """L H in pixels, and the distance of uniform attention."""
    assert isinstance(net, ViT)
    size = (images.shape[2], images.shape[3])
    return attention_distance(net, images.split(BATCH_SIZE)).numpy(), uniform_distance(net.config.grid_of(size), size)


def distance_numbers(by_head: Floats, uniform: float) -> dict[str, float]:
    """Attention distances L H -> a number for each layer, and their trend with depth."""
    means = by_head.mean(1)
    found = {f"distance, layer {i}": float(mean) for i, mean in enumerate(means, start=1)}
    found |= {"distance, first layer": float(means[0]), "distance, last layer": float(means[-1])}
    found["widest first head"] = float(by_head[0].max() / uniform)
    if len(means) > 1 and np.ptp(means) > 0:
        ranks = means.argsort().argsort()
        found["deepening"] = float(np.corrcoef(ranks, np.arange(len(means)))[0, 1])
    return found


def rollout_gain(net: Net, images: Tensor) -> float:
    """How much faster the class probability falls when patches are masked by rollout instead of at random."""
    gains = []
    for image, target in zip(images, predict(net, images).tolist(), strict=True):
        maps = {"rollout": rollout_map(net, image[None])[0]}
        curves = faithfulness(net, image, maps, target, steps=8)
        gains.append(curves[RANDOM].deletion.area - curves["rollout"].deletion.area)
    return float(np.mean(gains))


@torch.no_grad()
def _save_figure_arrays(run: Run, net: Net, images: Tensor, pixels: list[npt.NDArray[np.uint8]]) -> None:
    patterns, shares = filter_components(net)
    config = net.config
    if isinstance(config, ViTConfig) and config.position != "none":
        save_arrays(run, similarity=position_similarity(net))
    save_arrays(
        run,
        patterns=patterns,
        shares=shares,
        images=np.stack(pixels[:NUM_SHOWN]),
        rollout=rollout_map(net, images[:NUM_SHOWN]).float().cpu().numpy(),
        colors=feature_colors(patch_features(net, images[:NUM_COLORED]).float().cpu()).numpy(),
    )
