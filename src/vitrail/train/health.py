"""A loss that is not a number: found, named by its samples, and stopped or skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.errors import TrainError
from vitrail.runtime import log


class Health:
    """Looks at each step's loss and gradient.

    It looks before the weights move, except on a GPU that is to stop anyway: there it looks one step
    later, so that the GPU never waits for the answer; nothing is saved in between.
    """

    def __init__(
        self, device: torch.device, on_nan: str, describe: Callable[[Batch], str], *, alone: bool = True
    ) -> None:
        self.alone = alone
        self.waits = device.type != "cuda" or on_nan == "skip"
        self.on_nan = on_nan
        self.describe = describe
        self.pending: tuple[Batch, Tensor, torch.cuda.Event] | None = None
        self.skipped = 0

    def ok(self, loss: Tensor, norm: Tensor, batch: Batch) -> bool:
        """Whether this step may change the weights."""
        # By the norm, which all processes share, and by the loss, where it is this process's alone to judge.
        finite = torch.isfinite(norm) & torch.isfinite(loss.detach() if self.alone else norm)
        if not self.waits:
            self.settle()
            self.pending = self._asked(batch, finite)
            return True
        if bool(finite):
            return True
        if self.on_nan == "stop":
            raise TrainError(self.describe(batch))
        self.skipped += 1
        log.warning("%s", f"step {batch.step + 1} was left out: its loss is not finite.")
        return False

    def settle(self) -> None:
        """The answer about the last step, now: before anything is saved."""
        if self.pending is None:
            return
        batch, finite, arrived = self.pending
        self.pending = None
        arrived.synchronize()
        if not bool(finite):
            raise TrainError(self.describe(batch))

    def _asked(self, batch: Batch, finite: Tensor) -> tuple[Batch, Tensor, torch.cuda.Event]:
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(finite, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return replace(batch, images=batch.images[:0]), answer, arrived
