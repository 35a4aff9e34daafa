"""Objectives from outside the package: a loss function, or a subclass of Objective."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from vitrail.config.train import OBJECTIVES, SELF_SUPERVISED
from vitrail.errors import ConfigError, ModelError, VitrailError
from vitrail.models import Net
from vitrail.objectives.base import Objective, Sums, weighted_sums

# b images of a micro-batch, C channels, K classes


class LossFunction(Protocol):
    """The simplest objective: a function that computes one loss per image.

    An attribute `requires_labels = False` on it means that it needs no labels: `targets` are then zeros, the network
    has no head, and its own values on the validation images are the scores.
    """

    def __call__(
        self, net: Net, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None
    ) -> dict[str, Tensor]:
        """b C H W normalized; b int64, or b K (mixed images, multi-label); b; b int64 -> name -> per-image values, b.

        "loss" is minimized; "correct" (0 or 1) is logged as the accuracy, others under their names. An image's values
        may depend on this image only. `weights` (0 for unreadable images) are applied to the result. Random numbers
        come from `sample_seeds` (`vitrail.rng`), which `net(images, sample_seeds)` needs too, for dropout.
        """


class FunctionObjective(Objective):
    """A loss function as an Objective. A function that is an nn.Module is trained with the network."""

    def __init__(self, net: Net, function: LossFunction) -> None:
        super().__init__(net)
        self.function = function

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None = None) -> Sums:
        if torch.compiler.is_compiling():
            values = self.function(self.net, images, targets, weights, sample_seeds)
        else:
            values = self._call(images, targets, weights, sample_seeds)
        if not isinstance(values, dict) or not isinstance(values.get("loss"), Tensor):
            found = f"a dict of {', '.join(map(str, values))}" if isinstance(values, dict) else type(values).__name__
            raise ModelError(
                f'{_name(self.function)} returned {found}; expected a dict with "loss", one value per image.'
            )
        for name, value in values.items():
            if value.shape != weights.shape:
                raise ModelError(
                    f"{_name(self.function)} returned {name!r} with shape {tuple(value.shape)}; expected one value for "
                    f"each of the {len(weights)} images, not their mean."
                )
        return weighted_sums(values, weights)

    def _call(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None) -> Any:
        try:
            return self.function(self.net, images, targets, weights, sample_seeds)
        except (VitrailError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(
                f"{_name(self.function)} failed with images {tuple(images.shape)} and targets {tuple(targets.shape)} "
                f"({targets.dtype}): {type(error).__name__}: {error}"
            ) from error


def requires_labels(objective: str, custom: Any = None) -> bool:
    """Whether an objective learns from labels. `custom`: the objective itself, if it is not one of vitrail's."""
    if objective in OBJECTIVES:
        return objective not in SELF_SUPERVISED
    return bool(getattr(_objective_class(custom) or custom, "requires_labels", True))


def make_custom_objective(custom: Any, net: Net) -> Objective:
    """The Objective of a function, or of a subclass of Objective or a functools.partial of one, called with the net."""
    if _objective_class(custom) is not None:
        made = custom(net)
        assert isinstance(made, Objective)
        return made
    if isinstance(custom, type | Objective) or not callable(custom):
        kind = (
            f"an instance of {type(custom).__name__}"
            if not isinstance(custom, type)
            else f"the class {custom.__name__}"
        )
        raise ConfigError(
            f"the objective is {kind}; expected a function (net, images, targets, weights, sample_seeds) -> dict, or a "
            "subclass of vitrail.objectives.Objective."
        )
    return FunctionObjective(net, custom)


def _objective_class(custom: Any) -> type[Objective] | None:
    """The subclass of Objective that this is, or that a functools.partial calls; None for any other function."""
    kind = custom.func if isinstance(custom, functools.partial) else custom
    return kind if isinstance(kind, type) and issubclass(kind, Objective) else None


def _name(function: Any) -> str:
    return f"the objective {getattr(function, '__name__', type(function).__name__)}"
