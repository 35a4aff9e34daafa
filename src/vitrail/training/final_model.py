"""The network that a run writes: a whole copy of it, or the shards of all processes, gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vitrail.data.sources.base import Source
from vitrail.evaluation.scores import Scores
from vitrail.models import build
from vitrail.storage.atomic_write import explain_write_errors
from vitrail.training.parallel import gather_on_main, is_sharded
from vitrail.training.trainer import Trainer
from vitrail.weights import checkpoint, native
from vitrail.weights.archive import align_tensor
from vitrail.weights.writers import file_order


class WholeModel:
    """A copy of the network with these weights, on the CPU in float32."""

    def __init__(self, trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
        self.trainer, self.net = trainer, build(trainer.objective.net.config, meta=True)
        # Tensors read from a checkpoint are memory-mapped and may be unaligned; those of the run still change.
        weights = {name: align_tensor(t.detach().to("cpu", torch.float32, copy=True)) for name, t in tensors.items()}
        self.net.load_state_dict(weights, assign=True)
        self.net.eval()

    def evaluate(self, source: Source | None = None) -> Scores:
        """Classification scores, on the validation images by default."""
        return self.trainer.evaluate_classes(source, net=self.net)

    def write(self, path: Path) -> None:
        """Write the model folder."""
        if self.trainer.distributed.is_main:
            info = self.trainer.setup.info.replace(config=self.net.config)
            checkpoint.write(self.net.to("cpu", torch.float32), info, path, overwrite=True)


class ShardedModel:
    """The sharded network as it is now. No process ever holds all of its weights.

    Every process calls each method.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def evaluate(self, source: Source | None = None) -> Scores:
        """Classification scores, on the validation images by default."""
        return self.trainer.evaluate_classes(source)

    def write(self, path: Path) -> None:
        """Write the model folder: the main process gathers one tensor at a time, and writes it."""
        tensors, config = self.trainer.network_tensors(), self.trainer.objective.net.config
        shapes = {n: torch.empty(t.shape, dtype=torch.float32, device="meta") for n, t in tensors.items()}
        names = iter(file_order(shapes))
        if not self.trainer.distributed.is_main:
            for name in names:
                gather_on_main(tensors[name])
            return

        def read(name: str) -> Tensor:
            assert name == next(names)
            gathered = gather_on_main(tensors[name])
            assert gathered is not None
            return gathered.float()

        try:
            info = self.trainer.setup.info.replace(config=config)
            with explain_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            native.write(path, shapes, info, overwrite=True, read=read)
        finally:
            for name in names:  # after an error: the other processes go on
                gather_on_main(tensors[name])


def final_model(trainer: Trainer, best: Mapping[str, Tensor] | None = None) -> WholeModel | ShardedModel:
    """The network with the current weights, or the best ones, which a sharded network has already read.

    To be called, and used, in `trainer.ema_weights()`.
    """
    if is_sharded(trainer.objective):
        return ShardedModel(trainer)
    return WholeModel(trainer, trainer.network_tensors() if best is None else best)
