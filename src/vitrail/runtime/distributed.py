"""The process group of a distributed run: rank, world size and collectives.

Under `torchrun` each process has one device and its part of every batch. A single process creates no process group:
every collective is then the identity. Collectives on CPU tensors use gloo even beside NCCL, so that exchanging small
values never makes a GPU wait.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vitrail.errors import ConfigError, TrainError
from vitrail.runtime import pick_device
from vitrail.runtime.rendezvous import new_store

# W processes, B images in the global batch, b = B / W of them here

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for another process before the run fails."""


@dataclass(frozen=True)
class DistributedContext:
    """The process group, seen from this process: `with DistributedContext.from_env("auto") as distributed:`."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank on this machine."""
    local_world_size: int = 1
    """Number of processes on this machine."""
    object_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """A gloo group for Python objects, also beside NCCL."""
    checkpoint_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """A gloo group of the thread that writes checkpoints, whose collectives must not mix with those of training."""

    @classmethod
    def from_env(
        cls, device: str | torch.device = "auto", *, timeout: timedelta = COLLECTIVE_TIMEOUT
    ) -> DistributedContext:
        """Join the process group described by torchrun's environment variables; without them, a single process."""
        if "RANK" not in os.environ:
            return cls(pick_device(device))
        rank, world_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        chosen = _local_device(device, local_rank)
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        try:
            store = new_store(rank, world_size, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            object_group, checkpoint_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
        except (RuntimeError, ValueError) as error:
            raise TrainError(
                f"process {rank} of {world_size} could not reach the others: {first_sentence(error)}."
            ) from error
        return cls(chosen, rank, world_size, local_rank, local_world_size, object_group, checkpoint_group)

    def close(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> DistributedContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            if isinstance(error, Exception) and is_peer_failure(error):
                raise TrainError(
                    f"process {self.rank} of {self.world_size} lost the connection to another process, which died or "
                    f"did not respond in time ({first_sentence(error)}). See the error of that process, and resume the "
                    "run with --resume."
                ) from error

    @property
    def is_main(self) -> bool:
        """Whether this is the main process (rank 0), which writes files and messages."""
        return self.rank == 0

    def mesh(self, shard_size: int | None = None) -> DeviceMesh:
        """A mesh with the dimension "shard" of all processes.

        With `shard_size`, "replicate" x "shard": groups of `shard_size` processes with consecutive ranks.
        """
        if shard_size is None:
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        shape = self.world_size // shard_size, shard_size
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def slots(self, batch_size: int) -> range:
        """This process's indices in a global batch, which is split contiguously by rank."""
        if batch_size % self.world_size:
            above = -(-batch_size // self.world_size) * self.world_size
            raise ConfigError(
                f"batch_size={batch_size} is not a multiple of the {self.world_size} processes; try batch_size={above}."
            )
        share = batch_size // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. On the CPU: no GPU waits."""
        return self.sum_counts(flag)[0] > 0

    def sum_counts(self, *counts: int) -> list[int]:
        """Each count summed over all processes, in one all-reduce on the CPU: no GPU waits."""
        sums = torch.tensor([int(count) for count in counts])
        if self.world_size > 1:
            dist.all_reduce(sums)
        return [int(total) for total in sums]

    def broadcast_object(self, value: Any) -> Any:
        """The value of the main process."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
        """The values of all processes, by rank. `group`: the `checkpoint_group` in the thread that has it."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=group or self.object_group)
        return values

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
        """The main process's tensors, on the CPU; None if it passes None."""
        local = None if tensors is None else {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        if self.world_size == 1:
            return local
        kinds = self.broadcast_object(local and [(name, t.shape, t.dtype) for name, t in local.items()])
        if kinds is None:
            return None
        found = (
            local if self.is_main and local else {name: torch.empty(shape, dtype=kind) for name, shape, kind in kinds}
        )
        for tensor in found.values():
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)  # as bytes, for any dtype
        return found

    def all_reduce_tensors(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, in one all-reduce, added in float64 and returned in the given dtypes."""
        found = {name: value.detach() for name, value in values.items()}
        if self.world_size == 1 or not found:
            return found
        packed = torch.cat([v.reshape(-1).to(self.device, torch.float64) for v in found.values()])
        dist.all_reduce(packed)
        parts = packed.split([v.numel() for v in found.values()])
        return {name: p.view(v.shape).to(v.dtype) for (name, v), p in zip(found.items(), parts, strict=True)}

    def all_reduce(self, value: Tensor) -> Tensor:
        """One tensor's sum over all processes."""
        return self.all_reduce_tensors({"value": value})["value"]

    def all_gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all processes, concatenated by rank; their numbers of rows may differ."""
        if self.world_size == 1:
            return rows
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(rows)
        dist.all_reduce(counts)
        most = int(counts.max())
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        # As bytes, for any dtype; on the CPU, since this is not part of a training step.
        sent = padded.cpu().contiguous().view(torch.uint8) if rows.ndim else padded.cpu()
        got = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(got, sent)
        parts = [got[r].view(rows.dtype).view(most, *rows.shape[1:])[: int(counts[r])] for r in range(self.world_size)]
        return torch.cat(parts).to(rows.device)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context that the main process passes through before the others, for example to download files once."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()


def is_peer_failure(error: Exception) -> bool:
    """Whether a collective failed because another process died or did not respond."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def _local_device(device: str | torch.device, local_rank: int) -> torch.device:
    chosen = pick_device(device)
    if chosen.type == "mps":
        raise ConfigError("several processes cannot share Apple's MPS; run one process, or use device=cpu.")
    if chosen.type != "cuda":
        return chosen
    there = torch.cuda.device_count()
    if local_rank >= there:
        raise ConfigError(
            f"there is no GPU for local process {local_rank}: this machine has {there}; try --nproc-per-node={there}."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message, without the source location that gloo puts first."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).split(". ")[0].rstrip(". ") or type(error).__name__
