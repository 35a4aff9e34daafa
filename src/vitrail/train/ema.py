"""An average of the weights that forgets slowly: often better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import TrainError, nearest
from vitrail.models.remember import Remembering
from vitrail.train.parallel import copy_into, local


class EMA:
    """After each step average = decay * average + (1 - decay) * weights, for all that learns.

    Made after `wrap`; of a sharded learner each process averages its shards. In the first steps
    the decay is (1 + step) / (10 + step) where that is less, or first values would stay in the
    average for thousands of steps; a pure function of the step, so that nothing more is to be saved.
    """

    def __init__(self, learner: nn.Module, decay: float, *, warmup: bool = True) -> None:
        self.decay, self.warmup = decay, warmup
        self.weights = {name: p.detach() for name, p in learner.named_parameters() if p.requires_grad}
        self.average = {name: p.clone() for name, p in self.weights.items()}
        self._remembering = [m for m in learner.modules() if isinstance(m, Remembering)]
        self._swapped = False

    def decay_at(self, step: int) -> float:
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as they are after this step."""
        averages, weights = ([local(t) for t in ts.values()] for ts in (self.average, self.weights))
        torch._foreach_lerp_(averages, weights, 1 - self.decay_at(step))

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, the learner has the averaged weights; afterwards its own again, to the bit."""
        if self._swapped:
            raise TrainError("the averaged weights are in use already.")
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages themselves, by parameter name."""
        return dict(self.average)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        check_names("the averaged weights", tensors, self.average)
        for name, average in self.average.items():
            copy_into(average, tensors[name])

    @torch.no_grad()
    def _exchange(self) -> None:
        """In place, one tensor at a time: shards, CUDA graphs and DDP's buckets know weights by their address."""
        for name, weight in self.weights.items():
            mine, other = local(weight), local(self.average[name])
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)
        for module in self._remembering:  # what they kept was made from the other weights
            module.train(module.training)
        self._swapped = not self._swapped


def check_names(what: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same names and shapes, or an error about the first that differs."""
    for name in sorted(set(got) ^ set(wanted)):
        if name in wanted:
            raise TrainError(f"{what} in the checkpoint lack {name!r}{nearest(name, got)}")
        raise TrainError(f"{what} in the checkpoint have {name!r}, which this run does not train.")
    for name, tensor in wanted.items():
        if got[name].shape != tensor.shape or got[name].dtype != tensor.dtype:
            raise TrainError(
                f"{what} in the checkpoint have {name!r} as {got[name].dtype} {tuple(got[name].shape)}, "
                f"wanted {tensor.dtype} {tuple(tensor.shape)}."
            )
