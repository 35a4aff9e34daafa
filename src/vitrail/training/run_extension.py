"""Resuming a run with a longer duration.

From the step it resumes at, the run follows the schedule of the longer duration. The steps before followed the shorter
schedule, so the learning rate may jump up (cosine and linear had decayed further, or a cool-down had begun). With a
constant rate and no cool-down nothing jumps, and the extended run ends with the same bits as a run that had the longer
duration from the start.
"""

from __future__ import annotations

from vitrail.config import TrainConfig
from vitrail.errors import ConfigError
from vitrail.training.checkpointing import Progress
from vitrail.training.lr_schedule import LRSchedule
from vitrail.training.trainer import Trainer


def check_extension(before: TrainConfig, trainer: Trainer, saved: Progress) -> list[str]:
    """Notes about how a changed duration affects the resumed run; raises ConfigError if it is shorter.

    The same duration in epochs is another number of steps if the number of images has changed.
    """
    config, total, step = trainer.config, trainer.total_steps, saved.step
    if config.duration == before.duration:
        if saved.total_steps in (None, total) or saved.num_images == trainer.num_images:
            return []
        return [
            f"duration={config.duration} was {saved.total_steps:,} steps and is {total:,} with the current number of "
            f"images; {step:,} are done"
        ]
    old = max(before.duration.to_steps(batch_size=trainer.batch_size, images=trainer.num_images), 1)
    if total < old:
        raise ConfigError(
            f"duration={config.duration}{'' if config.duration.unit == 'steps' else f' ({total:,} steps)'} is shorter "
            f"than the run ({old:,} steps, of which {step:,} are done); when a run is resumed, its duration can only "
            "be increased."
        )
    if total == old:
        return []
    if config.patience is not None and saved.evaluations_since_best >= config.patience:
        return [
            f"the run is not extended: patience={config.patience} is used up at step {step:,}, "
            f"{saved.evaluations_since_best} evaluations after the best one; try a larger patience, or none"
        ]
    rate = config.optim.lr
    counts = {"batch_size": trainer.batch_size, "num_images": trainer.num_images}
    was = rate * LRSchedule(before.schedule, total_steps=old, **counts)(max(step - 1, 0))
    parts = [f"schedule.cooldown={config.schedule.cooldown}"] if config.schedule.cooldown else []
    parts += [f"augment.mix_off={config.augment.mix_off}"] if config.augment.mixes and config.augment.mix_off else []
    ends = f"; at its end {' and '.join(parts)}" if parts else ""
    return [
        f"the run is extended from {old:,} to {total:,} steps: from step {step + 1:,} on it has the learning rates of "
        f"the longer run, {rate * trainer.schedule(step):.3g} next after {was:.3g}{ends}"
    ]


def extended_config(before: TrainConfig, config: TrainConfig) -> TrainConfig:
    """The run's original config with the durations of `config`, as saved in the run folder."""
    return before.replace(
        duration=config.duration,
        schedule=before.schedule.replace(cooldown=config.schedule.cooldown).to_dict(),
        augment=before.augment.replace(mix_off=config.augment.mix_off).to_dict(),
    )
