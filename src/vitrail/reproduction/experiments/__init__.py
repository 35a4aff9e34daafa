"""The experiments by name, one module each."""

from __future__ import annotations

from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiments.data_size import DATA_SIZE
from vitrail.reproduction.experiments.distillation import DISTILLATION
from vitrail.reproduction.experiments.inside import INSIDE
from vitrail.reproduction.experiments.lecture import LECTURE
from vitrail.reproduction.experiments.pooling import POOLING
from vitrail.reproduction.experiments.positions import POSITIONS
from vitrail.reproduction.experiments.regularization import REGULARIZATION
from vitrail.reproduction.experiments.resolution import RESOLUTION
from vitrail.reproduction.experiments.scaling import SCALING
from vitrail.reproduction.experiments.self_supervision import SELF_SUPERVISION
from vitrail.reproduction.experiments.symmetry import SYMMETRY

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        POSITIONS,
        POOLING,
        DATA_SIZE,
        REGULARIZATION,
        SCALING,
        DISTILLATION,
        RESOLUTION,
        SELF_SUPERVISION,
        LECTURE,
        SYMMETRY,
        INSIDE,
    )
}
