"""One process of a training run whose communication is counted: `python -m vitrail.bench.communication_process`.

The process gets torchrun's environment variables, and one argument: JSON with the recipe, its overrides, the run folder
and the file for the counts. The main process records the collectives of some steps of the ordinary training loop.
torch's profiler sees all of them, but not between which processes: for that, calls of `all_reduce` are recorded.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vitrail.training.callbacks import RunView
from vitrail.training.runs import train

FIRST_STEP, STEPS = 3, 2
"""The counted steps: the first ones also exchange what is needed only once."""

COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
}
NO_DATA = {"c10d::barrier", "c10d::monitored_barrier_"}
DTYPES = {
    "float": "float32",
    "double": "float64",
    "long int": "int64",
    "int": "int32",
    "unsigned char": "uint8",
    "c10::BFloat16": "bfloat16",
    "bool": "bool",
}
"""The profiler's name -> torch's."""


class CollectiveRecorder:
    """A callback of a run: counts the collectives between two steps."""

    def __init__(self, path: Path, shard_size: int | None) -> None:
        self.path, self.shard_size = path, shard_size
        self.groups = ReductionGroups(shard_size)
        self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def on_step(self, run: RunView) -> None:
        if run.step == FIRST_STEP:
            self.groups.start()
            self.profiler.start()
        elif run.step == FIRST_STEP + STEPS:
            self.profiler.stop()
            self.groups.stop()
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                self.profiler.export_chrome_trace(str(trace))
                events = json.loads(trace.read_text())["traceEvents"]
            counts = Counter((kind, dtype, n, self.groups.dimension(kind, n)) for kind, dtype, n in collectives(events))
            found = [
                {"collective": kind, "dtype": dtype, "elements": n, "dimension": dimension, "count": c / STEPS}
                for (kind, dtype, n, dimension), c in sorted(counts.items())
            ]
            self.path.write_text(json.dumps(found))


class ReductionGroups:
    """The dimension of the mesh in which each all_reduce of this process runs: "all", "shard" or "replicate".

    `shard_size`: of hybrid sharding; without it all collectives are between all processes. Everything but an all_reduce
    is then between the processes that share the weights.
    """

    def __init__(self, shard_size: int | None) -> None:
        self.shard_size = shard_size
        self.by_elements: dict[int, list[str]] = {}
        self.original = dist.all_reduce

    def start(self) -> None:
        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.by_elements.setdefault(tensor.numel(), []).append(self._name(kwargs.get("group")))
            return self.original(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce

    def stop(self) -> None:
        dist.all_reduce = self.original

    def _name(self, group: dist.ProcessGroup | None) -> str:
        ranks = dist.get_process_group_ranks(group or dist.GroupMember.WORLD)
        if len(ranks) == dist.get_world_size():
            return "all"
        is_shard = len(ranks) == self.shard_size and ranks[-1] - ranks[0] == len(ranks) - 1
        return "shard" if is_shard else "replicate"

    def dimension(self, kind: str, elements: int) -> str:
        """Of the next collective of this kind and number of elements, in the order of the calls."""
        if self.shard_size is None:
            return "all"
        if kind != "all_reduce":
            return "shard"
        calls = self.by_elements.get(elements)
        return calls.pop(0) if calls else "all"


def collectives(events: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, int]]:
    """Collective, dtype and number of elements in one process, for each call in a trace of the profiler.

    An all_gather counts the elements that are gathered from all processes, a reduce_scatter those that are reduced.
    The calls have no dtypes; the operations of gloo, which run them, do.
    """
    dtypes: dict[tuple[int, ...], list[str]] = {}
    for event in events:
        if str(event.get("name")).startswith("gloo:"):
            for shape, dtype in zip(event["args"]["Input Dims"], event["args"]["Input type"], strict=True):
                dtypes.setdefault(tuple(shape), []).append(DTYPES.get(dtype, dtype))
    for event in sorted(events, key=lambda event: float(event.get("ts", 0))):
        name = str(event.get("name"))
        if not name.startswith("c10d::") or name in NO_DATA:
            continue
        kind = COLLECTIVES.get(name, name)
        shapes = sorted((shape for entry in event["args"]["Input Dims"] for shape in _shapes(entry)), key=math.prod)
        elements = math.prod(shapes[-1])
        if name == "c10d::allgather_":  # its outputs are not recorded
            elements *= torch.distributed.get_world_size()
        given = dtypes.get(shapes[0] if kind == "all_gather" else shapes[-1])
        yield kind, given.pop() if given else "unknown", elements


def _shapes(entry: Any) -> Iterator[tuple[int, ...]]:
    """The shapes in an argument: a tensor's, or those of a list of tensors; other arguments have none."""
    if entry and isinstance(entry[0], list):
        for part in entry:
            yield from _shapes(part) if part and isinstance(part[0], list) else (tuple(part),)
    elif entry:
        yield tuple(entry)


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    overrides = [
        *task["overrides"],
        f"duration={FIRST_STEP + STEPS + 1} steps",
        "schedule.warmup=0 steps",
        "evaluate_every=none",
        "snapshot_every=none",
        "checkpoint_every=100 steps",
        "log_every=100 steps",
        "compare=()",
        f"parallel={task['parallel']}",
        "device=cpu",
    ]
    if task["shard_size"] is not None:
        overrides.append(f"shard_size={task['shard_size']}")
    recorder = CollectiveRecorder(Path(task["counts"]), task["shard_size"])
    train(task["recipe"], overrides=overrides, out=task["folder"], callbacks=[recorder], report=False)


if __name__ == "__main__":
    main()
