"""Checkpoints: the full training state, written atomically.

    checkpoint/00000500/tensors.safetensors    weights, EMA, optimizer state, states of the random number generators
    checkpoint/00000500/state.json             step, best score, software and hardware, checksums of the tensors
    checkpoint/best-00000400/                  the best weights so far

A background thread writes a checkpoint under a temporary name, syncs it to disk and renames it. The last two are kept:
if the newest is damaged, the one before it is used. With a sharded model every process copies its shards to the CPU,
and its thread writes them through torch.distributed.checkpoint into `shards/`, while training goes on; any number of
processes can read them back. `tensors.safetensors` then holds only the states of the random number generators.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vitrail.config.format_version import VERSION, upgrade
from vitrail.errors import CheckpointError
from vitrail.rng import derive_seed
from vitrail.runtime import warn_once
from vitrail.runtime.distributed import DistributedContext
from vitrail.storage.atomic_write import fsync, fsync_tree, new_folder, report_errors_for, swap_folder, write_json
from vitrail.training.parallel import copy_into
from vitrail.training.sharded_checkpoint import copy_shards_to_cpu, load_sharded, save_sharded, shard_files
from vitrail.weights.writers import write_safetensors

Tensors = dict[str, Tensor]
TENSORS, STATE, SHARDS, BEST, GENERATORS = "tensors.safetensors", "state.json", "shards", "best-", "generators"
CHECKPOINTS_TO_KEEP = 2


@dataclass
class Progress:
    """The training state besides tensors, stored in state.json."""

    step: int = 0
    """Completed steps."""
    best_score: float | None = None
    """The best score so far; higher is better."""
    best_loss: float | None = None
    """The loss of that evaluation, which decides between equal scores."""
    best_step: int | None = None
    evaluations_since_best: int = 0
    """Evaluations since the best one, for `patience`."""
    skipped_steps: int = 0
    """Steps skipped because their loss was not finite."""
    elapsed_seconds: float = 0.0
    """Time spent so far, over all resumptions."""
    metric_sums: dict[str, float] = field(default_factory=dict)
    """Sums since the last logged step, so that a resumed run logs the same averages."""
    stream_states: list[dict[str, Any]] | None = None
    """Reader state of a plain stream in each process; None for all other sources."""
    unwritten_metrics: list[str] = field(default_factory=list)
    """Lines of metrics.jsonl that could not be written yet because the disk was full."""
    unreadable_images: dict[str, str] = field(default_factory=dict)
    """Training images that could not be read, in any process, with the reason for each."""
    model_origin: dict[str, str] = field(default_factory=dict)
    """The family and origin of the network, for its ModelInfo."""
    num_images: int | None = None
    """Number of training images: with another number, their order differs."""
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    """Result of `fingerprint_data`; empty in older checkpoints."""
    teacher_checksum: str | None = None
    """Checksum of the teacher's weights, for distillation."""
    total_steps: int | None = None
    """Steps of the whole run, by its config at that time."""
    evaluation_pending: bool = False
    """Whether the evaluation of this step was interrupted; it is then repeated first when the run resumes."""
    environment: dict[str, Any] = field(default_factory=dict)


def current_environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """The software and hardware that the exact bits of a run depend on, besides its config."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "processes": world_size,
    }


def describe_environment_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A sentence for each entry of the environment that has changed since a checkpoint was written."""
    changed = [name for name in current if name in saved and saved[name] != current[name]]
    return [f"{name} was {saved[name]} and is {current[name]}" for name in changed]


class CheckpointManager:
    """Writes and finds a run's checkpoints. Every process calls each method; the main process writes.

    Of a sharded objective each process writes its shards; their threads communicate in the checkpoint group.
    """

    def __init__(self, folder: Path, distributed: DistributedContext) -> None:
        self.folder, self.distributed = folder, distributed
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None
        self.error: Exception | None = None
        self.unwritten_best: tuple[Tensors, dict[str, Any]] | None = None
        """The best weights until they are on disk."""
        self.cpu_meshes: dict[DeviceMesh, DeviceMesh] = {}

    def save(self, tensors: Tensors, progress: Progress) -> None:
        """Start to write a checkpoint in the background, from a copy of the tensors."""
        self.wait()
        if self.distributed.is_main or has_shards(tensors):
            kept, state = copy_shards_to_cpu(tensors, self.cpu_meshes), asdict(progress)
            self.writing = self.pool.submit(self._write_all, kept, state)

    def save_best(self, tensors: Tensors, progress: Progress) -> None:
        """Start to write the best weights in the background, from a copy of the tensors."""
        self.wait()
        if self.distributed.is_main or has_shards(tensors):
            self.unwritten_best = copy_shards_to_cpu(tensors, self.cpu_meshes), asdict(progress)
            self.writing = self.pool.submit(self._write_best)

    def wait(self) -> None:
        """Wait for the background write. A failure is reported and kept in `error`; training continues."""
        writing, self.writing = self.writing, None
        if writing is not None:
            self._attempt(writing.result)

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
            self.error = None
        except (CheckpointError, OSError) as error:
            self.error = error
            if self.distributed.is_main:
                warn_once([f"a checkpoint could not be written; training continues: {error}"])

    def close(self) -> None:
        self.wait()
        self.pool.shutdown()

    def steps(self, prefix: str = "") -> list[int]:
        """The steps of the checkpoints on disk, oldest first; with `prefix=BEST`, of the best weights."""
        names = [p.parent.name.removeprefix(prefix) for p in self.folder.glob(f"{prefix}*/{STATE}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self) -> tuple[Path, Progress] | None:
        """The newest complete checkpoint, as found by the main process; damaged ones are reported and skipped."""
        found: tuple[Path, Progress] | None = self.distributed.broadcast_object(
            self._latest() if self.distributed.is_main else None
        )
        return found

    def _latest(self) -> tuple[Path, Progress] | None:
        steps = self.steps()
        while steps:
            path = self.path_of(steps.pop())
            try:
                return path, read_progress(path)
            except CheckpointError as error:
                warn_once([f"{error}; {'the previous one is used' if steps else 'there is no previous one'}"])
        return None

    def read(self, path: Path, like: Tensors) -> Tensors:
        """All tensors of a checkpoint; those of a sharded one are read into `like`."""
        whole = read_tensors(path)
        if not (path / SHARDS).is_dir():
            return whole
        load_sharded(path / SHARDS, like, self.distributed)
        return whole | like

    def read_best(self, step: int, like: Tensors) -> Tensors | None:
        """The best weights; None, with a note, if they are missing or damaged.

        `like`: the tensors of the network. If these are sharded, the weights are read into them.
        """
        path, sharded, is_main = self.path_of(step, BEST), has_shards(like), self.distributed.is_main
        kept = self.unwritten_best[0] if self.unwritten_best and self.unwritten_best[1]["step"] == step else None
        where = self.distributed.broadcast_object(("memory" if kept else self._kind_of_best(path)) if is_main else None)
        if where == "shards":
            found = like if sharded else {name: torch.empty_like(t, device="cpu") for name, t in like.items()}
            load_sharded(path / SHARDS, found, self.distributed)
            return found
        if where is None or not sharded:
            return self.distributed.broadcast_tensors((kept or read_tensors(path)) if is_main and where else None)
        for name, tensor in (kept if where == "memory" and kept else read_tensors(path)).items():
            copy_into(like[name], tensor)
        return like

    def _kind_of_best(self, path: Path) -> str | None:
        """Whether a folder has the best weights in "shards" or "whole"; None, with a note, if it has none."""
        try:
            read_progress(path)
        except CheckpointError as error:
            warn_once([f"{error}; the last weights are used instead"])
            return None
        return "shards" if (path / SHARDS).is_dir() else "whole"

    def path_of(self, step: int, prefix: str = "") -> Path:
        return self.folder / f"{prefix}{step:08d}"

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints after this step, which a resumed run will write again."""
        if self.distributed.is_main:
            for prefix in ("", BEST):
                for later in [s for s in self.steps(prefix) if s > step]:
                    shutil.rmtree(self.path_of(later, prefix), ignore_errors=True)

    def _write_all(self, tensors: Tensors, state: dict[str, Any]) -> None:
        self._write(tensors, state)
        self._write_best()

    def _write_best(self) -> None:
        if self.unwritten_best is not None:
            self._write(*self.unwritten_best, BEST)
            self.unwritten_best = None

    def _write(self, tensors: Tensors, state: dict[str, Any], prefix: str = "") -> None:
        if has_shards(tensors):
            self._write_sharded(tensors, state, prefix)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with new_folder(self.path_of(state["step"], prefix), overwrite=True) as temporary:
            if tensors:
                write_safetensors(temporary / TENSORS, tensors)
                state = state | {"checksums": {TENSORS: checksum(temporary / TENSORS)}}
            write_json(temporary / STATE, {"format_version": VERSION, **state})
        self._delete_old(prefix)

    def _write_sharded(self, tensors: Tensors, state: dict[str, Any], prefix: str = "") -> None:
        path = self.path_of(state["step"], prefix)
        temporary = path.with_name(f".{path.name}.tmp")
        shards, first = temporary / SHARDS, self.distributed.is_main
        small = {name: t for name, t in tensors.items() if name.startswith(f"{GENERATORS}/")}
        try:
            with self._all_or_none(temporary, path):
                if first:
                    shutil.rmtree(temporary, ignore_errors=True)
                    shards.mkdir(parents=True)
            with self._all_or_none(temporary, path):
                save_sharded(shards, {name: t for name, t in tensors.items() if name not in small}, self.distributed)
                local = {f"{SHARDS}/{file.name}": checksum(file) for file in shard_files(shards, self.distributed.rank)}
            sums = {file: crc for part in self._exchange(local) for file, crc in part.items()}
            with self._all_or_none(temporary, path):
                if first:
                    write_safetensors(temporary / TENSORS, small)
                    sums[TENSORS] = checksum(temporary / TENSORS)
                    write_json(temporary / STATE, {"format_version": VERSION, **state, "checksums": sums})
                    fsync_tree(temporary)
                    swap_folder(temporary, path, overwrite=True)
                    fsync(self.folder)
                    self._delete_old(prefix)
        finally:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)

    @contextmanager
    def _all_or_none(self, temporary: Path, path: Path) -> Iterator[None]:
        """If the body fails in any process, raise the same error in all of them."""
        message = None
        try:
            with report_errors_for(temporary, path):
                yield
        except (CheckpointError, OSError) as error:
            message = str(error)
        for failure in self._exchange(message):
            if failure is not None:
                raise CheckpointError(failure)

    def _exchange(self, value: Any) -> list[Any]:
        """The values of the writing threads of all processes."""
        return self.distributed.all_gather_object(value, group=self.distributed.checkpoint_group)

    def _delete_old(self, prefix: str = "") -> None:
        """Delete all but the last two checkpoints, and the temporary folders of killed processes."""
        for old in self.steps(prefix)[:-CHECKPOINTS_TO_KEEP]:
            shutil.rmtree(self.path_of(old, prefix), ignore_errors=True)
        for left in self.folder.glob(".*"):
            if left.suffix in (".tmp", ".old"):
                shutil.rmtree(left, ignore_errors=True)


def read_progress(path: Path) -> Progress:
    """Read state.json and verify the checksums of the tensors; raises CheckpointError if anything is damaged."""
    try:
        state = upgrade("checkpoint", json.loads((path / STATE).read_text(encoding="utf-8")))
        expected = state.pop("checksums", {})
        progress = Progress(**state)
        same = all((path / file).exists() and checksum(path / file) == crc for file, crc in expected.items())
    except (AttributeError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged ({error})") from error
    if not expected:
        raise CheckpointError(f"the checkpoint {path} is damaged: it holds no tensors")
    if not same:
        raise CheckpointError(f"the checkpoint {path} is damaged: the checksums of its tensors do not match")
    return progress


def read_tensors(path: Path) -> Tensors:
    """All tensors of a checkpoint, or of the best weights."""
    try:
        return load_file(path / TENSORS)
    except Exception as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error


def checksum(path: Path) -> str:
    """CRC-32 and size of a file."""
    crc = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}:{path.stat().st_size}"


def seed_rngs(seed: int, rank: int, *step: int) -> None:
    """Seed the generators of Python, NumPy and torch from (seed, rank) or (seed, rank, step)."""
    own = derive_seed(seed, rank, *step)
    random.seed(own)
    np.random.seed(own & 0xFFFFFFFF)
    torch.manual_seed(own & 0x7FFFFFFFFFFFFFFF)


def rng_states(device: torch.device, distributed: DistributedContext) -> Tensors:
    """The states of the generators of all processes. Only the dropout inside fused attention draws from them."""
    by_rank = enumerate(distributed.all_gather_object(_local_rng_states(device)))
    return {f"{GENERATORS}/{rank}/{name}": state for rank, states in by_rank for name, state in states.items()}


def _local_rng_states(device: torch.device) -> Tensors:
    _, words, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.array([*words, rest[0], rest[1]], dtype=np.int64)),
        "numpy-gauss": torch.tensor([rest[2]], dtype=torch.float64),
        "python": torch.tensor([version, *internal, int(gauss is not None)], dtype=torch.int64),
        "python-gauss": torch.tensor([gauss or 0.0], dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_rng_states(tensors: Mapping[str, Tensor], device: torch.device, rank: int) -> None:
    """Restore this process's generators from the result of `rng_states`."""
    states = select_prefix(f"{GENERATORS}/{rank}", tensors)
    torch.set_rng_state(states["torch"])
    *words, position, has_gauss = states["numpy"].tolist()
    gauss = states["numpy-gauss"].item()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss))
    version, *internal, has = states["python"].tolist()
    random.setstate((version, tuple(internal), states["python-gauss"].item() if has else None))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{prefix}/{name}": t for name, t in tensors.items()}


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {name.removeprefix(f"{prefix}/"): t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


def has_shards(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any of the tensors is sharded over the processes."""
    return any(isinstance(t, DTensor) for t in tensors.values())
