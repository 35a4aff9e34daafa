"""A run that is given a longer duration when it goes on.

From the step it goes on with, it is the longer run: the learning rate is what the schedule of the longer duration
has at that step. What was learned before had the shorter schedule, so the rate may jump up (cosine and linear had
come down, a cool-down had begun). With a constant rate and no cool-down nothing jumps, and the extended run ends with
the same bits as one that had the longer duration from the start.
"""

from __future__ import annotations

from vitrail.config import TrainConfig
from vitrail.errors import ConfigError
from vitrail.train.schedule import Schedule
from vitrail.train.state import Progress
from vitrail.train.trainer import Trainer


def check_length(before: TrainConfig, trainer: Trainer, saved: Progress) -> list[str]:
    """What a longer duration means for a run that goes on from there, as sentences; a shorter one is refused.

    The same duration in epochs is another number of steps where the number of images has changed.
    """
    config, total, step = trainer.config, trainer.total, saved.step
    if config.duration == before.duration:
        if saved.total in (None, total) or saved.images == trainer.images:
            return []
        return [
            f"duration={config.duration} was {saved.total:,} steps and is {total:,} with the present number of images; "
            f"{step:,} are done"
        ]
    counted = {"batch_size": trainer.batch, "images": trainer.images}
    old = max(before.duration.to_steps(**counted), 1)
    if total < old:
        raise ConfigError(
            f"duration={config.duration} is {total:,} steps, fewer than the {old:,} of the run ({before.duration}), "
            f"of which {step:,} are done: a run can be made longer when it is resumed, not shorter."
        )
    if total == old:
        return []
    if config.patience is not None and saved.stale >= config.patience:
        return [
            f"the run is not extended: patience={config.patience} is used up at step {step:,}, {saved.stale} "
            "evaluations after the best one; try a larger patience, or none"
        ]
    rate = config.optim.lr
    was = rate * Schedule(before.schedule, total=old, **counted)(max(step - 1, 0))
    parts = [f"schedule.cooldown={config.schedule.cooldown}"] if config.schedule.cooldown else []
    parts += [f"augment.mix_off={config.augment.mix_off}"] if config.augment.mixes and config.augment.mix_off else []
    ends = f"; at its end {' and '.join(parts)}" if parts else ""
    return [
        f"the run is extended from {old:,} to {total:,} steps: from step {step + 1:,} on it has the learning rates of "
        f"the longer run, {rate * trainer.schedule(step):.3g} next after {was:.3g}{ends}"
    ]


def extended(before: TrainConfig, config: TrainConfig) -> TrainConfig:
    """The run's own settings with the length of others: what its folder keeps."""
    return before.replace(
        duration=config.duration,
        schedule=before.schedule.replace(cooldown=config.schedule.cooldown).to_dict(),
        augment=before.augment.replace(mix_off=config.augment.mix_off).to_dict(),
    )
