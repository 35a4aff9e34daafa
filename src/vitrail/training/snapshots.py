"""Snapshots: the weights at intervals during a run, each a model folder that `vitrail.load` reads.

    snapshots/00000000/    before the first step: config.json and model.safetensors, as in model/
    snapshots/00000057/    after 57 steps

Unlike checkpoints, all of them are kept, and a run cannot be resumed from one: they serve to see how a model learns.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vitrail.errors import CheckpointError
from vitrail.runtime import warn_once
from vitrail.training.final_model import final_model
from vitrail.training.parallel import is_sharded
from vitrail.training.trainer import Trainer


class SnapshotWriter:
    """Writes snapshots if `snapshot_every` is set, in a background thread; of a sharded objective at once.

    Every process calls each method; the main process writes.
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.folder, self.trainer, self.distributed = folder, trainer, trainer.distributed
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self.writing: Future[None] | None = None

    def start(self, step: int) -> None:
        """Delete the snapshots after this step, which the run will take again, and take the one of step 0."""
        if self.distributed.is_main:
            for left in self.folder.glob(".*"):
                shutil.rmtree(left, ignore_errors=True)
            for later in [path for taken, path in find_snapshots(self.folder).items() if taken > step or step == 0]:
                shutil.rmtree(later, ignore_errors=True)
        if step == 0:
            self.take(0)

    def take(self, step: int) -> None:
        """Start to write the weights (the EMA, if there is one) unless this step has a snapshot already."""
        self.wait()
        if self.trainer.config.snapshot_every is None or self.distributed.broadcast_object(
            step in find_snapshots(self.folder)
        ):
            return
        path = self.folder / f"{step:08d}"
        with self.trainer.ema_weights():
            if is_sharded(self.trainer.objective):  # all processes send their shards, before these change
                self._attempt(lambda: final_model(self.trainer).write(path))
            elif self.distributed.is_main:
                self.writing = self.pool.submit(final_model(self.trainer).write, path)

    def wait(self) -> None:
        """Wait until the last snapshot is on disk. If it could not be written, training continues without it.

        To be called before a checkpoint is written: a run resumed from it would otherwise skip the snapshot.
        """
        writing, self.writing = self.writing, None
        if writing is not None:
            self._attempt(writing.result)

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (CheckpointError, OSError) as error:
            warn_once([f"a snapshot could not be written; training continues: {error}"])

    def close(self) -> None:
        self.wait()
        self.pool.shutdown()


def find_snapshots(folder: Path) -> dict[int, Path]:
    """The complete snapshots in a folder by step, in ascending order."""
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return {int(name): folder / name for name in names if name.isdecimal()}
