"""The service as an application of Ray Serve. This module imports neither Ray nor the service before they are used."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.serve.limits import Limits
    from vitrail.serve.served_model import ServedModel

MAX_ONGOING_REQUESTS = 256
"""Requests that Ray sends to a replica at a time, unless `max_ongoing_requests` is given: as many as its queue holds
images. Ray's own default of 5 would keep batches small."""
WARM_UP_TIMEOUT_S = 60.0
"""Time after which a replica receives requests even if its model is not warmed up; they wait."""


def deployment(
    model: str | None = None,
    *,
    engine: str | None = None,
    limits: Limits | None = None,
    batching: dict[str, Any] | None = None,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    load_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The service as a Ray Serve application, for `ray.serve.run(deployment("runs/photos"))` or `serve build`.

    Each replica loads the model and serves the same routes as `vitrail serve`, with its batching and limits.

    model         a name, a file, a folder or a hub id, which every node must be able to read; None: the shipped model
    engine        torch, onnxruntime, openvino or auto
    limits        limits on a request
    batching      fields of BatchingConfig; threads follow the CPUs of a replica (ray_actor_options["num_cpus"])
    token         a file or environment variable with the token that clients must send, read by each replica
    hosts         accepted host names besides loopback; None: all
    load_options  keyword arguments of vitrail.load, such as device="cuda"
    options       passed to ray.serve.deployment: num_replicas, autoscaling_config, ray_actor_options, ...
    """
    serve = _import_ray_serve()
    cores = max(int((options.get("ray_actor_options") or {}).get("num_cpus", 1)), 1)

    def build() -> Any:
        return _build_app(model, engine, cores, limits, batching or {}, token, hosts, load_options or {})

    chosen = {"name": "vitrail", "max_ongoing_requests": MAX_ONGOING_REQUESTS} | options
    return serve.deployment(**chosen)(serve.ingress(build)()).bind()


def _build_app(
    model: str | None,
    engine: str | None,
    cores: int,
    limits: Limits | None,
    batching: dict[str, Any],
    token: str | None,
    hosts: Sequence[str] | None,
    load_options: dict[str, Any],
) -> Any:
    """The ASGI app, built in the process of a replica."""
    from vitrail.serve.app import create_app
    from vitrail.serve.image_decoder import limit_pillow_pixels
    from vitrail.serve.limits import Limits, divide_cores
    from vitrail.serve.security import read_token
    from vitrail.serve.server import SWITCH_INTERVAL_S

    limits = limits or Limits()
    limit_pillow_pixels(limits.max_pixels)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    served = _load_served_model(model, engine, cores, load_options)
    work = divide_cores(cores, served.parallel_batches, **batching)
    app = create_app(served, limits, work, None if token is None else read_token(token), hosts)
    app.router.lifespan_context = _wait_for_warm_up(app.router.lifespan_context)
    return app


def _wait_for_warm_up(lifespan: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A lifespan that starts like `lifespan` and waits until the model is warmed up, before Ray sends requests."""

    @contextlib.asynccontextmanager
    async def warmed_up(app: Any) -> AsyncIterator[None]:
        async with lifespan(app):
            deadline = time.monotonic() + WARM_UP_TIMEOUT_S
            while not app.state.service.is_ready and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            yield

    return warmed_up


def _load_served_model(model: str | None, engine: str | None, cores: int, options: dict[str, Any]) -> ServedModel:
    from vitrail.engines.exported_files import is_exported
    from vitrail.exporting.open_engine import open_engine
    from vitrail.open_model import load
    from vitrail.serve.served_model import ServedModel
    from vitrail.weights.shipped import DEFAULT_MODEL

    if model is not None and is_exported(model):
        runner = open_engine(model, engine, threads=cores, concurrency=cores)
        return ServedModel(runner, name=Path(model).stem, parallel_batches=True)
    vit = load(DEFAULT_MODEL.name if model is None else model, **options)
    on_cpu = vit.device.type == "cpu"
    runner = open_engine(vit, engine, vit.device, threads=cores, concurrency=cores if on_cpu else 1)
    return ServedModel(runner, vit, parallel_batches=on_cpu)


def _import_ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"{error.name or 'ray'} is not installed; try pip install 'vitrail[ray,serve]'.") from None
    return serve
