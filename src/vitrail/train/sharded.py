"""A checkpoint in parts: each process writes its own as safetensors; any number of processes reads them back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.train.parallel import Ranks, reason_of
from vitrail.weights.writers import explain_write_errors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException


def save_sharded(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write tensors, sharded or not, into a folder that is there: a file of safetensors from each process.

    Where one process cannot write its part, all of them raise the same error.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _alone_is_fine():
            save(dict(tensors), storage_writer=writer, process_group=ranks.saving)
    except CheckpointException as error:
        with explain_write_errors(folder):
            raise _inside(error) from None


def shards_of(folder: Path, rank: int) -> list[Path]:
    """The files that a process has written with `save_sharded`: one, or none where it had no part."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*"))


def load_sharded(folder: Path, into: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Fill tensors, sharded in any way or not at all, from what any number of processes wrote."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        _check_complete(folder, into)
        with _alone_is_fine(), torch.no_grad():
            load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), process_group=ranks.saving)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # which one depends on where a file is damaged
        reason = _inside(error) if isinstance(error, CheckpointException) else error
        raise CheckpointError(f"the sharded checkpoint {folder} cannot be read: {reason_of(reason)}") from error


def _check_complete(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Every tensor is there and every part of it: DCP would leave what is missing as it was."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    there: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name in sorted(set(there) ^ set(into)):
        lack = "lacks" if name in into else "has, and the run has no place for,"
        raise CheckpointError(f"the sharded checkpoint {folder} {lack} {name!r}.")
    for name, tensor in into.items():
        found, parts = there[name], sum(math.prod(chunk.sizes) for chunk in there[name].chunks)
        if found.size != tensor.shape or parts != tensor.numel():
            raise CheckpointError(
                f"the sharded checkpoint {folder} holds {parts} numbers of {name!r} in {tuple(found.size)}, "
                f"wanted {tensor.numel()} in {tuple(tensor.shape)}; a process's file may be missing."
            )


def _inside(error: CheckpointException) -> BaseException:
    """What went wrong in one of the processes: DCP's own error, which is no Exception, holds that of each."""
    return next(reason for reason, _ in error.failures.values())


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without torch's warning that there is but one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        yield
