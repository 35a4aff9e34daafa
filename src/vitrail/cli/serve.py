"""`vitrail serve`: a model behind HTTP, with a page to look inside."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import note
from vitrail.cli.opening import Channels, Device, Dtype, Image, Labels, open_model
from vitrail.cli.options import Family, Section, Settings, settings, size
from vitrail.errors import ConfigError, nearest

if TYPE_CHECKING:
    from vitrail.serve.served import Served

LOOPBACK = ("127.", "::1", "localhost")
ENGINES = ("torch", "onnxruntime", "openvino", "auto")
ONE_CORE = (".onnx", ".pt2")
"""Exported files that can be run side by side, a core each; OpenVINO shares out its work itself."""


def serve(
    source: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A name, a file, a folder or a hub id.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same.")] = None,
    host: Annotated[str, typer.Option(metavar="NAME", help="0.0.0.0 to be reached from elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0 for any that is free.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes, each with a model of its own.")] = 1,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="torch, onnxruntime, openvino or auto; else the file's own.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="WHERE", help="A file or an environment variable that holds the token.")
    ] = None,
    max_bytes: Annotated[int, typer.Option(min=1, metavar="N", help="Of a request's body.")] = 16 * 2**20,
    max_pixels: Annotated[int, typer.Option(min=1, metavar="N", help="Of one picture.")] = 50_000_000,
    max_images: Annotated[int, typer.Option(min=1, metavar="N", help="Pictures in one request.")] = 16,
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="Pictures that may wait.")] = 256,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Pictures at a time; left out, a short timing finds it.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, max=1000, metavar="MS", help="How long a batch waits for company.")
    ] = 4.0,
    labels: Labels = None,
    image: Image = None,
    channels: Channels = None,
    section: Section = None,
    family: Family = None,
    changes: Settings = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Serve a model over HTTP: predictions, features, explanations, and a page where one can look inside."""
    if source is not None and model is not None:
        raise ConfigError(f"got {source} and --model {model}, wanted one of them.")
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"no engine is called {engine!r}{nearest(engine, ENGINES)}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: no spinning where others work
    own: dict[str, Any] = {"image": size(image), "channels": channels, "labels": labels, "device": device}
    own |= {"told": settings(changes), "section": section, "family": family, "dtype": dtype}
    modules = _parts()
    from vitrail.serve.limits import Limits
    from vitrail.serve.security import read_token

    cores = max((os.cpu_count() or 1) // workers, 1)
    how = modules.Settings(
        limits=Limits(bytes=max_bytes, pixels=max_pixels, images=max_images),
        work={"queue": queue, "batch": batch, "wait": wait / 1000},
        cores=cores,
        token=None if token is None else read_token(token),
    )
    sock = modules.listening(host, port)
    if token is None and not host.startswith(LOOPBACK):
        note(f"whoever can reach {host} can use this: pass --token, or put something before it that asks who they are.")
    opener = partial(opened, source or model, engine, cores, **own)
    status = modules.serve(opener, sock, how, workers, partial(_started, modules.address(sock)))
    if status:
        raise typer.Exit(status)


def opened(model: str | None, engine: str | None, cores: int, **options: Any) -> Served:
    """The model and the engine that runs it, in the process that will serve it."""
    _log_to_stderr()
    from vitrail.export.engines import open_engine
    from vitrail.export.formats import is_exported
    from vitrail.serve.served import Served

    if model is not None and is_exported(model):
        for name in ("image", "channels", "labels", "section", "family", "told"):
            if options.get(name):
                raise ConfigError(f"{model} is exported already: --{'set' if name == 'told' else name} comes too late.")
        runs = open_engine(model, engine, threads=1 if Path(model).suffix.lower() in ONE_CORE else cores)
        return Served(runs, name=Path(model).stem, alone=Path(model).suffix.lower() in ONE_CORE)
    vit = open_model(model, classes=False, **options)
    alone = engine == "onnxruntime" or (engine in (None, "torch") and vit.device.type == "cpu")
    runs = open_engine(vit, engine, vit.device, threads=1 if alone else cores)
    return Served(runs, vit, alone=alone or (runs.name == "torch" and vit.device.type == "cpu"))


def _started(where: str, name: str) -> None:
    typer.echo(f"{name} at {where}")
    typer.echo(f"  look inside  {where}/\n  the API      {where}/docs\n  to stop      Ctrl-C")
    sys.stdout.flush()


def _parts() -> Any:
    """The server, if what it needs is installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401

        from vitrail.serve import server
    except ImportError as error:
        raise ConfigError(
            f"serving needs {error.name}, which is not installed; try pip install 'vitrail[serve]'."
        ) from None
    return server


def _log_to_stderr() -> None:
    """What nobody foresaw is written down with its traceback."""
    logger = logging.getLogger("vitrail.serve")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
