"""The experiments by name, one module each."""

from __future__ import annotations

from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiments.positions import POSITIONS

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (POSITIONS,)}
