"""Connections to a Ray cluster, or to one started on this machine for the time of a command."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.runtime.cores import usable_cores
from vitrail.runtime.ray_cluster import ray_cluster
from vitrail.storage.scratch_folder import scratch_folder

OBJECT_STORE_BYTES = 128 << 20
"""Size of the object store on this machine: only part numbers and summaries pass through it."""


@contextmanager
def connect(address: str) -> Iterator[list[dict[str, float]]]:
    """Connect to the cluster, or start Ray here, until the end of the block; yields the resources of each node.

    `address` is that of `ray_cluster`. The files of a Ray that is started here are deleted at the end.
    """
    with (
        scratch_folder(_short_temporary_folder() / "vitrail-ray") as folder,
        ray_cluster(
            address, num_cpus=usable_cores(), object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(folder)
        ) as ray,
    ):
        yield [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _short_temporary_folder() -> Path:
    """Ray's sockets lie below it, and their paths may have only 107 characters."""
    return next((path for path in (Path("/tmp"),) if os.access(path, os.W_OK)), Path(tempfile.gettempdir()))
