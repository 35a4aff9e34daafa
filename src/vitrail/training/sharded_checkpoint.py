"""Sharded checkpoints: each process writes its shards as safetensors; any number of processes can read them back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vitrail.errors import CheckpointError
from vitrail.runtime.distributed import DistributedContext, first_sentence
from vitrail.storage.atomic_write import explain_write_errors
from vitrail.training.parallel import local_tensor, shard_like

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException


def save_sharded(folder: Path, tensors: Mapping[str, Tensor], distributed: DistributedContext) -> None:
    """Write tensors, sharded or not, into an existing folder, one safetensors file per process.

    If one process cannot write its file, all of them raise the same error. All communication is in the checkpoint
    group: another thread may be training.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _ignore_single_process_warning(distributed):
            save(dict(tensors), storage_writer=writer, process_group=distributed.checkpoint_group)
    except CheckpointException as error:
        with explain_write_errors(folder):
            raise _cause_of(error) from None


def copy_shards_to_cpu(tensors: Mapping[str, Tensor], cpu_meshes: dict[DeviceMesh, DeviceMesh]) -> dict[str, Tensor]:
    """Copies on the CPU, this process's shards only, which `save_sharded` can write while training changes the tensors.

    `cpu_meshes`: an empty dictionary that is passed again the next time.
    """
    copies = {}
    for name, tensor in tensors.items():
        copy = local_tensor(tensor).detach().to("cpu", copy=True).contiguous()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in cpu_meshes:
                on_cpu = mesh.device_type == "cpu"
                cpu_meshes[mesh] = mesh if on_cpu else DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
            copy = shard_like(tensor, copy, cpu_meshes[mesh])
        copies[name] = copy
    return copies


def shard_files(folder: Path, rank: int) -> list[Path]:
    """The files that a process wrote with `save_sharded`: one, or none if it had no shard."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*"))


def load_sharded(folder: Path, into: Mapping[str, Tensor], distributed: DistributedContext) -> None:
    """Read a sharded checkpoint into existing tensors; the number of processes and the sharding may differ."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        _check_complete(folder, into)
        with _ignore_single_process_warning(distributed), torch.no_grad():
            load(
                dict(into),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                process_group=distributed.checkpoint_group,
            )
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # the type depends on where a file is damaged
        reason = _cause_of(error) if isinstance(error, CheckpointException) else error
        raise CheckpointError(f"the sharded checkpoint {folder} cannot be read: {first_sentence(reason)}") from error


def _check_complete(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Raise unless every tensor is complete: torch.distributed.checkpoint leaves missing parts unchanged."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    there: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name in sorted(set(there) ^ set(into)):
        lack = "lacks" if name in into else "has the unexpected tensor"
        raise CheckpointError(f"the sharded checkpoint {folder} {lack} {name!r}.")
    for name, tensor in into.items():
        found, parts = there[name], sum(math.prod(chunk.sizes) for chunk in there[name].chunks)
        if found.size != tensor.shape or parts != tensor.numel():
            raise CheckpointError(
                f"the sharded checkpoint {folder} holds {parts} numbers of {name!r} in {tuple(found.size)}, "
                f"expected {tensor.numel()} in {tuple(tensor.shape)}; a process's file may be missing."
            )


def _cause_of(error: CheckpointException) -> BaseException:
    """The error of one of the processes. A CheckpointException (not an Exception) holds those of all of them."""
    return next(reason for reason, _ in error.failures.values())


@contextmanager
def _ignore_single_process_warning(distributed: DistributedContext) -> Iterator[None]:
    """Suppress torch's warning that there is only one process. With several, another thread may change the filters."""
    if distributed.checkpoint_group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        yield
