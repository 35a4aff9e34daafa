"""Snapshots: the weights at intervals during a run, each a model folder that `vitrail.load` reads.

    snapshots/00000000/    before the first step: config.json and model.safetensors, as in model/
    snapshots/00000057/    after 57 steps

Unlike checkpoints, all of them are kept, and a run cannot be resumed from one: they serve to see how a model learns.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vitrail.errors import CheckpointError
from vitrail.models import Net
from vitrail.runtime import warn_once
from vitrail.training.trainer import Trainer
from vitrail.weights import checkpoint


class SnapshotWriter:
    """Writes snapshots if `snapshot_every` is set, in a background thread.

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
        tensors = self.trainer.model_weights()  # by all processes, which gather a sharded objective
        if self.distributed.is_main:
            self.writing = self.pool.submit(self._write, self.trainer.build_model(tensors), self.folder / f"{step:08d}")

    def wait(self) -> None:
        """Wait until the last snapshot is on disk. If it could not be written, training continues without it.

        To be called before a checkpoint is written: a run resumed from it would otherwise skip the snapshot.
        """
        writing, self.writing = self.writing, None
        if writing is None:
            return
        try:
            writing.result()
        except (CheckpointError, OSError) as error:
            warn_once([f"a snapshot could not be written; training continues: {error}"])

    def close(self) -> None:
        self.wait()
        self.pool.shutdown()

    def _write(self, net: Net, path: Path) -> None:
        checkpoint.write(net, self.trainer.setup.info.replace(config=net.config), path, overwrite=True)


def find_snapshots(folder: Path) -> dict[int, Path]:
    """The complete snapshots in a folder by step, in ascending order."""
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return {int(name): folder / name for name in names if name.isdecimal()}
