"""`vitrail serve`: a model behind HTTP, with a page to look inside."""

from __future__ import annotations

import logging
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import note, notes_to_stderr, one_line
from vitrail.cli.model_options import Channels, Device, Dtype, ImageSize, LabelFile, open_model
from vitrail.cli.options import Family, Section, Settings, parse_settings, parse_size
from vitrail.cli.running import Calibrate
from vitrail.errors import ConfigError, nearest
from vitrail.runtime.cores import usable_cores

if TYPE_CHECKING:
    from vitrail.serve.served import Served

LOOPBACK = ("127.", "::1", "localhost")
ENGINES = ("torch", "onnxruntime", "openvino", "auto")


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
    calibrate: Calibrate = None,
    token: Annotated[
        str | None, typer.Option(metavar="WHERE", help="A file or an environment variable that holds the token.")
    ] = None,
    max_bytes: Annotated[int, typer.Option(min=1, metavar="N", help="Of a request's body.")] = 16 * 2**20,
    max_pixels: Annotated[int, typer.Option(min=1, metavar="N", help="Of one image.")] = 50_000_000,
    max_images: Annotated[int, typer.Option(min=1, metavar="N", help="Images in one request.")] = 16,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Another name it is asked by; give it again for more."),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="Images that may wait.")] = 256,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Images at a time; left out, a short timing finds it.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, max=1000, metavar="MS", help="How long a batch waits for company.")
    ] = 4.0,
    labels: LabelFile = None,
    image_size: ImageSize = None,
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
    if engine not in (None, "torch") and dtype != "float32":
        raise ConfigError(f"--dtype {dtype} is for torch alone: {engine} has its own.")
    if calibrate is not None and engine != "auto":
        raise ConfigError("--calibrate lets --engine auto try int8; pass both, or neither.")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: no spinning where others work
    own: dict[str, Any] = {
        "image_size": parse_size(image_size),
        "channels": channels,
        "labels": labels,
        "device": device,
    }
    own |= {
        "overrides": parse_settings(changes),
        "section": section,
        "family": family,
        "dtype": dtype,
        "calibrate": calibrate,
    }
    server, several = _parts()
    from vitrail.export.names import is_exported
    from vitrail.serve.limits import Limits
    from vitrail.serve.security import read_token

    _log_to_stderr()
    cores, near = max(usable_cores() // workers, 1), host.startswith(LOOPBACK)
    how = server.Settings(
        limits=Limits(bytes=max_bytes, pixels=max_pixels, images=max_images),
        work={"queue": queue, "batch_size": batch_size, "wait": wait / 1000},
        cores=cores,
        token=None if token is None else read_token(token),
        hosts=tuple(allow_host or ()) if allow_host or near else None,
    )
    sock = server.listening(host, port)
    if token is None and not near:
        note(f"whoever can reach {host} can use this: pass --token, or put something before it that asks who they are.")
    opener = partial(opened, source or model, engine, cores, **own)
    inside = not is_exported(source or model or "")
    started = partial(_started, server.address(sock), workers, inside, None if near else sock.getsockname()[1])
    several.serve(opener, sock, how, workers, started, _stopping)


def opened(model: str | None, engine: str | None, cores: int, calibrate: str | None = None, **options: Any) -> Served:
    """The model and the engine that runs it, in the process that will serve it."""
    _log_to_stderr()
    notes_to_stderr()  # a worker is a process of its own
    from vitrail.api.exporting import calibration_images
    from vitrail.export.engines import FileEngine, open_engine
    from vitrail.export.names import is_exported
    from vitrail.serve.served import Served
    from vitrail.weights.class_names import read_labels

    if model is not None and is_exported(model):
        _check_unchanged(model, **options | {"calibrate": calibrate})
        found, labels = open_engine(model, engine, threads=cores, lanes=cores), options.get("labels")
        if labels is not None and isinstance(found, FileEngine):
            found = found.named(found.info.replace(labels=read_labels(labels, found.info.config.num_classes)))
        return Served(found, name=Path(model).stem, alone=True)
    vit = open_model(model, require_classes=False, **options)
    alone = vit.device.type == "cpu"
    images = calibration_images(calibrate)
    runs = open_engine(vit, engine, vit.device, threads=cores, calibrate=images, lanes=cores if alone else 1)
    return Served(runs, vit, alone=alone)


def _check_unchanged(model: str, *, device: str = "auto", dtype: str = "float32", **options: Any) -> None:
    """Raise ConfigError where something else is wanted than what was exported."""
    for name in ("image_size", "channels", "section", "family", "overrides", "calibrate"):
        if options.get(name):
            option = "set" if name == "overrides" else name.replace("_", "-")
            raise ConfigError(f"{model} is exported already: --{option} comes too late.")
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"{model} is exported and runs on the CPU; for {device}, serve the checkpoint it was made from."
        )
    if dtype != "float32":
        raise ConfigError(f"{model} has its precision already; for {dtype}, export it anew or serve the checkpoint.")


def _started(where: str, workers: int, inside: bool, open_port: int | None, name: str, how: str) -> None:
    """`inside`: it can be looked into; `open_port`: where it is reached from elsewhere."""
    typer.echo(one_line(f"{name} at {where}"), nl=False)
    typer.echo(f"  runs on      {how}{f'; {workers} such processes' * (workers > 1)}")
    if open_port is not None:
        typer.echo(f"  elsewhere    http://{socket.gethostname()}:{open_port}/")
    typer.echo(f"  {'look inside' if inside else 'the page   '}  {where}/")
    typer.echo(f"  the API      {where}/docs\n  to stop      Ctrl-C")
    sys.stdout.flush()


def _stopping() -> None:
    typer.echo("stopping: answering what is open; once more to end at once", err=True)


def _parts() -> tuple[Any, Any]:
    """The server and its workers, if what they need is installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401

        from vitrail.serve import server, workers
    except ImportError as error:
        raise ConfigError(
            f"serving needs {error.name}, which is not installed; try pip install 'vitrail[serve]'."
        ) from None
    return server, workers


def _log_to_stderr() -> None:
    """What nobody foresaw is written down with its traceback."""
    logger = logging.getLogger("vitrail.serve")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
