"""How the weights of a small ViT develop in training, from the snapshots of its run."""

from __future__ import annotations

import numpy as np

from vitrail.config import ViTConfig
from vitrail.explain import position_similarity
from vitrail.reproduction.measures.evaluation_images import (
    evaluation_images,
    networks_by_step,
    predict,
    training_images,
)
from vitrail.reproduction.measures.saved_arrays import save_arrays
from vitrail.reproduction.measures.weight_structure import (
    all_filters,
    change_components,
    change_numbers,
    filter_numbers,
    overlap_curve,
    patch_components,
    patch_size,
    position_numbers,
)
from vitrail.runs.run_record import read_run
from vitrail.training.runs import Run

# T snapshots; h rows and w columns of patches; n components of p x q pixels and C channels, d = p q C

NUM_TEST_IMAGES = 2000
"""Test images for the accuracy of each snapshot, at most."""
NUM_TRAINING_IMAGES = 1000
"""Training images for the principal components of patches, at most."""


def development(run: Run) -> dict[str, float]:
    """Numbers of `position_numbers`, `filter_numbers` and `change_numbers` and `accuracy`, at three times.

    Without a suffix: the trained model; `, first`: the first snapshot after the start, if it is not the last;
    `, untrained`. Stores arrays: step, epoch, accuracy T; similarity T h w h w; filters, filters_untrained and
    filters_change n p q C; patches d p q C with patch_shares d; overlap, overlap_untrained and overlap_change n.
    """
    networks = networks_by_step(run)
    images, classes, _ = evaluation_images(run, NUM_TEST_IMAGES)
    accuracy = [float((predict(net, images) == classes).double().mean()) for net in networks.values()]
    nets, steps = list(networks.values()), list(networks)
    patches, shares = patch_components(training_images(run, NUM_TRAINING_IMAGES), patch_size(nets[0]))
    times = {"": len(nets) - 1, ", untrained": 0} | ({", first": 1} if len(nets) > 2 else {})
    found: dict[str, float] = {}
    for suffix, index in times.items():
        numbers = {"accuracy": accuracy[index], **position_numbers(nets[index]), **filter_numbers(nets[index], patches)}
        if index:
            numbers |= change_numbers(nets[index], nets[0], patches)
        found |= {name + suffix: value for name, value in numbers.items()}
    per_epoch = read_run(run.path).steps_per_epoch or 1.0
    filters, untrained = all_filters(nets[-1])[0], all_filters(nets[0])[0]
    change, config = change_components(nets[-1], nets[0]), nets[0].config
    if isinstance(config, ViTConfig) and config.position != "none":
        save_arrays(run, similarity=np.stack([position_similarity(net) for net in nets]))
    save_arrays(
        run,
        step=np.array(steps),
        epoch=np.array(steps) / per_epoch,
        accuracy=np.array(accuracy),
        filters=filters,
        filters_untrained=untrained,
        filters_change=change,
        patches=patches,
        patch_shares=shares,
        overlap=overlap_curve(filters, patches),
        overlap_untrained=overlap_curve(untrained, patches),
        overlap_change=overlap_curve(change, patches),
    )
    return found
