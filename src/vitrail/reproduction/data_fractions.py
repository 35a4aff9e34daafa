"""Settings for runs on fractions of the training images, at equal steps or at equal epochs."""

from __future__ import annotations

from typing import Literal

from vitrail.config import TrainConfig, epochs
from vitrail.reproduction.arm import Scale

Schedule = Literal["equal steps", "equal epochs"]
NUM_EPOCHS: dict[Scale, int] = {"tiny": 20, "gpu": 10, "paper": 90}
"""Epochs over all training images."""
WARMUP_EPOCHS: dict[Scale, int] = {"tiny": 2, "gpu": 1, "paper": 3}
BATCH_SIZES: dict[Scale, int] = {"tiny": 64, "gpu": 256, "paper": 4096}
"""The same for all fractions; at most the number of images of the smallest."""


def on_fraction(config: TrainConfig, scale: Scale, fraction: float, schedule: Schedule = "equal steps") -> TrainConfig:
    """The settings on a fraction of the training images, for as many steps or as many epochs as on all of them."""
    factor = 1 / fraction if schedule == "equal steps" else 1.0
    return config.replace(
        data=config.data.replace(fraction=fraction if fraction < 1 else None).to_dict(),
        batch_size=BATCH_SIZES[scale],
        duration=epochs(round(NUM_EPOCHS[scale] * factor, 3)),
        schedule=config.schedule.replace(warmup=epochs(round(WARMUP_EPOCHS[scale] * factor, 3))).to_dict(),
        checkpoint_every=epochs(max(round(NUM_EPOCHS[scale] * factor / 4), 1)),
    )
