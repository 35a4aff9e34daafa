"""The communication of one training step, counted in real runs with several gloo processes on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.errors import ConfigError, TrainError

TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What one process gives to the collectives of one kind in a training step."""

    parallel: str
    """ddp, fsdp or hsdp."""
    processes: int
    collective: str
    dimension: str
    """Between which processes: "all"; with hsdp also "shard", those that share the weights, and "replicate", those with
    the same shards."""
    group: int
    """The number of these processes."""
    dtype: str
    calls: float
    bytes: float
    """Of the tensors: all that is gathered or reduced. It is the same in every process."""
    ring_bytes: float
    """Bytes that each process sends if the collective is computed in a ring; by arithmetic."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def count_communication(
    recipe: str = "digits",
    overrides: Sequence[str] = (),
    processes: Sequence[int] = (2, 4),
    parallel: Sequence[str] = ("ddp", "fsdp"),
    progress: Callable[[str], None] = lambda what: None,
    shard_size: int = 2,
) -> list[Collective]:
    """Run some steps of a recipe with each number of processes, and count the bytes by collective and dtype.

    `shard_size`: for hsdp, the number of processes that share the weights.
    """
    if not processes or min(processes) < 2:
        raise ConfigError(f"got {','.join(map(str, processes))} processes, expected two or more: one sends nothing.")
    found = []
    for kind in parallel:
        for world in processes:
            progress(f"{kind} with {world} processes")
            found += _run(recipe, overrides, world, kind, shard_size if kind == "hsdp" else None)
    return found


def ring_bytes(collective: str, size: float, world: int) -> float:
    """Bytes that each of `world` processes sends for a collective on `size` bytes, in a ring."""
    passes = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}
    return size * passes.get(collective, (world - 1) / world)


def _run(recipe: str, overrides: Sequence[str], world: int, parallel: str, shard_size: int | None) -> list[Collective]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = {
            "recipe": recipe,
            "overrides": list(overrides),
            "parallel": parallel,
            "shard_size": shard_size,
            "folder": str(folder / "run"),
            "counts": str(folder / "counts.json"),
        }
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        started = []
        try:
            for rank in range(world):
                environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with (folder / f"{rank}.log").open("wb") as log:
                    command = [sys.executable, "-m", "vitrail.bench.communication_process", json.dumps(task)]
                    started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            for process in started:
                process.wait(TIMEOUT_S)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if not (folder / "counts.json").exists():
            lines = (folder / "0.log").read_text(errors="replace").strip().splitlines() or ["no message"]
            reason = lines[-1].rpartition("Error: ")[2]  # the type of the error comes first
            raise TrainError(f"the run with {world} processes failed: {reason}")
        counts = json.loads((folder / "counts.json").read_text())
    return _sum_up(counts, world, parallel, shard_size or world)


def _sum_up(counts: Sequence[dict[str, Any]], world: int, parallel: str, shard_size: int) -> list[Collective]:
    sizes = {"all": world, "shard": shard_size, "replicate": world // shard_size}
    totals: dict[tuple[str, str, str], tuple[float, float]] = {}
    for entry in counts:
        key = (entry["collective"], entry["dimension"], entry["dtype"])
        size = entry["count"] * entry["elements"] * _itemsize(entry["dtype"])
        calls, whole = totals.get(key, (0.0, 0.0))
        totals[key] = calls + entry["count"], whole + size
    return [
        Collective(
            parallel=parallel,
            processes=world,
            collective=collective,
            dimension=dimension,
            group=sizes[dimension],
            dtype=dtype,
            calls=calls,
            bytes=size,
            ring_bytes=ring_bytes(collective, size, sizes[dimension]),
        )
        for (collective, dimension, dtype), (calls, size) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def _itemsize(dtype: str) -> int:
    kind = getattr(torch, dtype, None)
    return kind.itemsize if isinstance(kind, torch.dtype) else 1


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
