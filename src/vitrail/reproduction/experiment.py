"""An experiment: a claim, the arms that are compared, and the analysis of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vitrail.config import DataConfig
from vitrail.reproduction.analysis import Analysis
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.results import Results


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A claim, the runs that test it, and the analysis of their results."""

    name: str
    title: str
    claim: str
    """What the source states, in one or two sentences."""
    source: str
    """Where it states it: "ViT paper, Table 8"."""
    arms: Callable[[Scale, DataConfig | None], Sequence[Arm]]
    """The arms at a scale, the most telling first; the data replaces the scale's own."""
    analyze: Callable[[Results], Analysis]
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"tiny": 3, "gpu": 3, "paper": 1})
    """Number of seeds of each arm."""
    data: Mapping[Scale, str] = field(
        default_factory=lambda: {"tiny": "digits", "gpu": "cifar10", "paper": "ImageNet-21k"}
    )
    """The data of each scale, for the list of experiments."""
