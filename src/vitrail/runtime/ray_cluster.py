"""Connects to a Ray cluster, or starts one on this machine: `--on ray`, `--on ray://HOST:PORT`.

    with ray_cluster("ray") as ray:
        ray.get(ray.remote(function).remote())

A cluster that is started here ends with the block, and so does a connection to another one. Ray itself prints nothing:
no banner, no copies of what workers print; errors of workers are raised as exceptions.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, first_line

LOCAL, AUTO = "ray", "ray://auto"
ADDRESS = re.compile(r"ray://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):([1-9]\d{0,4})")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a cluster of ours reports nothing to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default, whose absence it warns about
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_TRAIN_V2_ENABLED": "1",
}
"""Environment variables of Ray; those that are set already are kept."""
CONNECT_TIMEOUT_S = 1.0
"""Time in which a cluster of this machine has to answer."""


def check_address(address: str) -> str:
    """`ray`, `ray://auto` or `ray://HOST:PORT`; ConfigError for anything else."""
    if address not in (LOCAL, AUTO) and not ADDRESS.fullmatch(address):
        raise ConfigError(
            f"--on {address}: expected ray (the cluster that ray start has started on this machine, or else this "
            "machine) or ray://HOST:PORT (the port of the cluster's Ray Client server, 10001 by default)."
        )
    return address


def import_ray() -> Any:
    """The package ray; ConfigError that names the extra if it is not installed."""
    try:
        with _environment(QUIET):
            import ray
    except ImportError as error:
        raise ConfigError(f"ray is not installed ({first_line(error)}); try pip install 'vitrail[ray]'.") from error
    return ray


@contextmanager
def ray_cluster(address: str = LOCAL, **local: Any) -> Iterator[Any]:
    """Context in which the returned module `ray` is connected to the cluster at an address.

    `ray` is the cluster in RAY_ADDRESS, or the one that `ray start` has started on this machine; if there is neither, a
    cluster of this machine is started (RAY_ADDRESS=local starts one in any case), with the options `local` of
    `ray.init`, such as num_cpus and object_store_memory. `ray://auto` is a cluster that runs on this machine, however
    it was started. If this process is connected already, the connection is used and stays.
    """
    check_address(address)
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    chosen = _choose(address)
    options: dict[str, Any] = {"address": chosen, "logging_level": logging.ERROR, "log_to_driver": False}
    if chosen == "local":
        options |= {"include_dashboard": False} | local
    with _environment(QUIET):
        try:
            with warnings.catch_warnings(), _discard_stderr():
                warnings.simplefilter("ignore")  # about what is raised
                ray.init(**options)
        except Exception as error:  # of many kinds: no such host, no cluster, another version of Ray or Python
            raise ConfigError(_describe_failure(address, chosen, first_line(error))) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _describe_failure(address: str, chosen: str, reason: str) -> str:
    if chosen == "local":
        return f"Ray could not be started on this machine ({reason}); try again, or join a cluster: ray://HOST:10001."
    where = chosen if address == LOCAL else address
    return (
        f"cannot connect to {where} ({reason}); start a cluster with ray start --head, pass ray://HOST:10001 from a "
        "machine outside it, and set RAY_AUTH_MODE=token if it asks for a token."
    )


def _choose(address: str) -> str:
    """Ray's name of the cluster: an address, `auto` or `local`."""
    if address == LOCAL:
        return os.environ.get("RAY_ADDRESS") or started_cluster() or "local"
    return "auto" if address == AUTO else address


def started_cluster(environment: Mapping[str, str] = os.environ) -> str | None:
    """The address of the cluster that `ray start` has started on this machine; None if there is none that answers.

    Ray keeps it in a file. Its address `auto` would also be the private cluster of another command, which ends with it.
    """
    temporary = environment.get("RAY_TMPDIR") or (sys.platform == "linux" and environment.get("TMPDIR")) or "/tmp"
    try:
        address = (Path(temporary) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):  # no file, or the one of a cluster that was killed
        return None
    return address


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
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and remove them at the end."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
