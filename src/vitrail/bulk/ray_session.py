"""Connections to a Ray cluster, or to one started on this machine for the time of a command."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, first_line
from vitrail.runtime.cores import usable_cores
from vitrail.storage.scratch_folder import scratch_folder

OBJECT_STORE_BYTES = 128 << 20
"""Size of the object store on this machine: only part numbers and summaries pass through it."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}
"""Environment of a Ray that is started here: no usage statistics, and no messages of its processes."""


def import_ray() -> Any:
    """The package ray; ConfigError that names the extra if it is not installed."""
    try:
        with _environment(QUIET):
            import ray
    except ImportError as error:
        raise ConfigError(f"ray is not installed ({first_line(error)}); try pip install 'vitrail[ray]'.") from error
    return ray


@contextmanager
def connect(address: str) -> Iterator[list[dict[str, float]]]:
    """Connect to the cluster, or start Ray here, until the end of the block; yields the resources of each node.

    `ray` is a connection that the caller has made, the cluster of RAY_ADDRESS, or Ray on this machine; `ray://auto` the
    cluster that this machine belongs to; `ray://HOST:PORT` another cluster, through its Ray Client server.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield _nodes(ray)
        return
    with ExitStack() as stack:
        stack.enter_context(_environment(QUIET))
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if address == "ray" and not os.environ.get("RAY_ADDRESS"):
            options |= _local_options(stack.enter_context(scratch_folder(_short_temporary_folder() / "vitrail-ray")))
        elif address != "ray":
            options["address"] = "auto" if address == "ray://auto" else address
        try:
            with warnings.catch_warnings(), _discard_stderr():
                warnings.simplefilter("ignore")
                ray.init(**options)
        except Exception as error:  # of many kinds: no such host, no cluster, another version of Ray or Python
            raise ConfigError(
                f"cannot connect to {address} ({first_line(error)}); is a Ray cluster running there?"
            ) from error
        stack.callback(ray.shutdown)
        yield _nodes(ray)


def _local_options(folder: Path) -> dict[str, Any]:
    """Options of `ray.init` for Ray on this machine."""
    return {
        "address": "local",
        "num_cpus": usable_cores(),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": str(folder),
    }


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _short_temporary_folder() -> Path:
    """Ray's sockets lie below it, and their paths may have only 107 characters."""
    return next((path for path in (Path("/tmp"),) if os.access(path, os.W_OK)), Path(tempfile.gettempdir()))


@contextmanager
def _discard_stderr() -> Iterator[None]:
    """Discard what C++ code writes to standard error: that it was told to be quiet."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and remove them at the end."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            with suppress(KeyError):
                del os.environ[name]
