"""Snapshots: the weights as they were at moments of a run, each a model that `vitrail.load` loads.

    snapshots/00000000/    before the first step: config.json and model.safetensors, as in model/
    snapshots/00000057/    after 57 steps

Unlike checkpoints they all stay, and hold nothing to go on from: they are there to be looked at.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vitrail.errors import CheckpointError
from vitrail.models import Net
from vitrail.runtime import warn_once
from vitrail.train.trainer import Trainer
from vitrail.weights import checkpoint


class Snapshots:
    """Takes them where the settings ask for it. Every process calls each method; the first one writes.

    In a thread of its own, while training goes on.
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.folder, self.trainer, self.ranks = folder, trainer, trainer.ranks
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self.writing: Future[None] | None = None

    def begin(self, step: int) -> None:
        """A run starts, or goes on from this step: what it will take again is forgotten."""
        if self.ranks.first:
            for left in self.folder.glob(".*"):
                shutil.rmtree(left, ignore_errors=True)
            for later in [path for taken, path in snapshots(self.folder).items() if taken > step or step == 0]:
                shutil.rmtree(later, ignore_errors=True)
        if step == 0:
            self.take(0)

    def take(self, step: int) -> None:
        """The weights as they are measured: averaged where they are; unless they are there already."""
        self.wait()
        if self.trainer.config.snapshot_every is None or self.ranks.told(step in snapshots(self.folder)):
            return
        tensors = self.trainer.model_tensors()  # of a sharded learner, gathered by all
        if self.ranks.first:
            self.writing = self.pool.submit(self._write, self.trainer.model(tensors), self.folder / f"{step:08d}")

    def wait(self) -> None:
        """Until what was taken is on the disk, or said to have found no room there: training goes on without it.

        Before a checkpoint is written, or a run that is killed and goes on from there would leave it out.
        """
        writing, self.writing = self.writing, None
        if writing is None:
            return
        try:
            writing.result()
        except (CheckpointError, OSError) as error:
            warn_once([f"a snapshot could not be written, training goes on: {error}"])

    def close(self) -> None:
        self.wait()
        self.pool.shutdown()

    def _write(self, net: Net, path: Path) -> None:
        checkpoint.write(net, self.trainer.setup.info.replace(config=net.config), path, overwrite=True)


def snapshots(folder: Path) -> dict[int, Path]:
    """Those that are whole, by their steps, first to last."""
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return {int(name): folder / name for name in names if name.isdecimal()}
