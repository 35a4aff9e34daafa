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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.errors import ConfigError, NotFoundError, first_line

LOCAL, CLIENT = "ray", "ray://"
ADDRESS = re.compile(r"ray://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):([1-9]\d{0,4})")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a cluster of ours reports nothing to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default, whose absence it warns about
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_TRAIN_V2_ENABLED": "1",
}
"""Environment variables of Ray; those that are set already are kept."""


def check_address(address: str) -> str:
    """`ray` or `ray://HOST:PORT`; ConfigError for anything else."""
    if address != LOCAL and not ADDRESS.fullmatch(address):
        raise ConfigError(
            f"--on {address}: expected ray (the cluster this machine belongs to, or else this machine) or "
            "ray://HOST:PORT (the port of the cluster's Ray Client server, 10001 by default)."
        )
    return address


def import_ray() -> Any:
    """The module ray; NotFoundError names the extra if it is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise NotFoundError("Ray is not installed; try pip install 'vitrail[ray]'.") from None
    return ray


@contextmanager
def ray_cluster(address: str = LOCAL, **local: Any) -> Iterator[Any]:
    """Context in which the returned module `ray` is connected to the cluster at an address.

    `ray` is the cluster in RAY_ADDRESS, or the one that `ray start` has started on this machine; if there is neither, a
    cluster of this machine is started (RAY_ADDRESS=local starts one in any case), with the options `local` of
    `ray.init`, such as num_cpus and object_store_memory. If this process is connected already, the connection is used
    and stays.
    """
    check_address(address)
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}
    try:
        if address == LOCAL:
            _init_local(ray, options, local)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what is raised
                ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        where = address if address != LOCAL else os.environ.get("RAY_ADDRESS", "on this machine")
        raise NotFoundError(
            f"no Ray cluster answers at {where} ({first_line(error)}); start one with ray start --head, "
            "and pass ray://HOST:10001 from a machine outside it."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _init_local(ray: Any, options: dict[str, Any], local: dict[str, Any]) -> None:
    """Join the cluster of this machine, or start one."""
    address = os.environ.get("RAY_ADDRESS")
    if address in (None, ""):
        try:
            ray.init(address="auto", **options)
            return
        except ConnectionError:  # no cluster here
            address = "local"
    if address == "local":
        ray.init(address="local", include_dashboard=False, **options, **local)
    else:
        ray.init(address=address, **options)
