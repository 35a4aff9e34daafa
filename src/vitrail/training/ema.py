"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import TrainError, did_you_mean
from vitrail.models.cached_module import CachedModule
from vitrail.runtime import private_torch
from vitrail.training.parallel import copy_into, local_tensor


class EMA:
    """After each step, average = decay * average + (1 - decay) * weights, for all trainable parameters.

    Created after `parallel.wrap`: for a sharded objective each process averages its shards. With `warmup` the decay is
    at most (1 + step) / (10 + step): the initial values would otherwise stay in the average for thousands of steps.
    """

    def __init__(self, objective: nn.Module, decay: float, *, warmup: bool = True) -> None:
        self.decay, self.warmup = decay, warmup
        self.weights = {name: p.detach() for name, p in objective.named_parameters() if p.requires_grad}
        self.average = {name: p.clone() for name, p in self.weights.items()}
        self._cached_modules = [m for m in objective.modules() if isinstance(m, CachedModule)]
        self.swapped = False
        """Whether the objective has the averaged weights at the moment."""

    def decay_at(self, step: int) -> float:
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after this step."""
        averages, weights = ([local_tensor(t) for t in ts.values()] for ts in (self.average, self.weights))
        private_torch.foreach_lerp_(averages, weights, 1 - self.decay_at(step))

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Context in which the objective has the averaged weights; on exit its own are restored exactly."""
        if self.swapped:
            raise TrainError("the averaged weights are already in use.")
        self._swap_in_place()
        try:
            yield
        finally:
            self._swap_in_place()

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(self.average)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        check_same_tensors("the averaged weights", tensors, self.average)
        for name, average in self.average.items():
            copy_into(average, tensors[name])

    @torch.no_grad()
    def _swap_in_place(self) -> None:
        """Swap in place, one tensor at a time: FSDP, CUDA graphs and DDP refer to the weights by address."""
        for name, parameter in self.weights.items():
            weight, average = local_tensor(parameter), local_tensor(self.average[name])
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)
        for module in self._cached_modules:  # what they cached was computed from the other weights
            module.train(module.training)
        self.swapped = not self.swapped


def check_same_tensors(what: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise TrainError unless both have the same names, shapes and dtypes."""
    for name in sorted(set(got) ^ set(expected)):
        if name in expected:
            raise TrainError(f"{what} in the checkpoint lack {name!r}{did_you_mean(name, got)}")
        raise TrainError(f"{what} in the checkpoint include {name!r}, which this run does not train.")
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape or got[name].dtype != tensor.dtype:
            raise TrainError(
                f"{what} in the checkpoint have {name!r} as {got[name].dtype} {tuple(got[name].shape)}, "
                f"expected {tensor.dtype} {tuple(tensor.shape)}."
            )
