"""Arms, the alternatives that an experiment compares, and trials, their training runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vitrail.config import TrainConfig
from vitrail.errors import ConfigError

Scale = Literal["tiny", "gpu", "paper"]
SCALES: tuple[Scale, ...] = ("tiny", "gpu", "paper")
ParentSetting = Literal["init_from", "distill.teacher"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the alternatives that an experiment compares: the settings of its runs."""

    name: str
    config: TrainConfig
    """Its settings; each trial replaces the seed and the learning rate."""
    factors: Mapping[str, str | float] = field(default_factory=dict)
    """What is varied, by column of the result table: {"position": "none"}."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates to select from by validation accuracy, the most likely first; empty: that of the config."""
    parent: str | None = None
    """Name of the arm whose model of the same seed is the checkpoint to start from, or the teacher."""
    parent_setting: ParentSetting = "init_from"
    parent_edit: str | None = None
    """A change to the parent's model before training starts, by its name in `edits.EDITS`."""
    max_seeds: int | None = None
    """Number of seeds if it is less than the experiment's. Its children of other seeds use the model of seed 0."""
    measures: tuple[str, ...] = ()
    """Measurements of the finished model, by their names in `measures.MEASURES`."""

    def __post_init__(self) -> None:
        if self.parent_setting == "distill.teacher" and self.config.objective != "distill":
            raise ConfigError(f"the arm {self.name} has a teacher but objective={self.config.objective}.")
        if self.parent_edit is not None and (self.parent is None or self.parent_setting != "init_from"):
            raise ConfigError(f"the arm {self.name} edits a parent's model but does not start from one.")

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to try, the most likely first."""
        return self.learning_rates or (self.config.optim.lr,)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run: an arm with a learning rate and a seed."""

    arm: Arm
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Name of its folder, unique in the experiment."""
        rate = f"-lr{self.lr:g}" if self.arm.learning_rates else ""
        return f"{slug(self.arm.name)}{rate}-seed{self.seed}"

    def config(self, parent_model: str | None = None) -> TrainConfig:
        """The settings of the run. `parent_model`: the model folder of the parent arm's trial."""
        config = self.arm.config
        changes: dict[str, object] = {
            "name": self.key,
            "seed": self.seed,
            "optim": config.optim.replace(lr=self.lr).to_dict(),
        }
        if self.arm.parent is not None and parent_model is not None:
            if self.arm.parent_setting == "init_from":
                changes["init_from"] = parent_model
            else:
                changes["distill"] = config.distill.replace(teacher=parent_model).to_dict()
        return config.replace(**changes)


def slug(text: str) -> str:
    """A name that can be a folder's: letters, digits, - . and _."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.")
