"""Detects a loss or gradient that is not finite, names the samples of the step, and stops the run or skips the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.errors import DivergenceError
from vitrail.runtime import log


class NaNGuard:
    """Checks each step's loss and gradient norm before the weights are updated.

    With on_nan="stop" on a GPU the check is read one step later, so that the GPU never waits for the CPU; nothing is
    saved in between.
    """

    def __init__(
        self, device: torch.device, on_nan: str, describe: Callable[[Batch], str], *, single_process: bool = True
    ) -> None:
        self.single_process = single_process
        self.checks_immediately = device.type != "cuda" or on_nan == "skip"
        self.on_nan = on_nan
        self.describe = describe
        self.pending: tuple[Batch, Tensor, torch.cuda.Event] | None = None
        self.skipped = 0

    def check(self, loss: Tensor, norm: Tensor, batch: Batch) -> bool:
        """Whether this step may update the weights."""
        # The norm is the same in all processes. The loss is local, and so decides only if there is one process.
        finite = torch.isfinite(norm) & torch.isfinite(loss.detach() if self.single_process else norm)
        if not self.checks_immediately:
            self.check_pending()
            self.pending = self._start_transfer(batch, finite)
            return True
        if bool(finite):
            return True
        if self.on_nan == "stop":
            raise DivergenceError(self.describe(batch))
        self.skipped += 1
        log.warning("%s", f"step {batch.step + 1} was skipped: its loss is not finite.")
        return False

    def check_pending(self) -> None:
        """Wait for the check of the last step and raise if it failed. To be called before anything is saved."""
        if self.pending is None:
            return
        batch, finite, arrived = self.pending
        self.pending = None
        arrived.synchronize()
        if not bool(finite):
            raise DivergenceError(self.describe(batch))

    def _start_transfer(self, batch: Batch, finite: Tensor) -> tuple[Batch, Tensor, torch.cuda.Event]:
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(finite, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return replace(batch, images=batch.images[:0]), answer, arrived
