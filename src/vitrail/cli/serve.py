"""`vitrail serve`: serve a model over HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import notes_to_stderr, one_line, print_note
from vitrail.cli.model_folder_options import ModelFolderOptions
from vitrail.cli.model_options import LabelFile, open_model
from vitrail.cli.option_groups import AccessOptions, EngineOptions, LoadOptions, with_option_groups
from vitrail.errors import ConfigError
from vitrail.runtime.cores import usable_cores

if TYPE_CHECKING:
    from vitrail.serve.served_model import ServedModel
    from vitrail.serve.server import ServerConfig

LOOPBACK = ("127.", "::1", "localhost")
ENGINES = ("torch", "onnxruntime", "openvino", "auto")


@with_option_groups
def serve(
    source: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A name, a file, a folder or a hub id.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="Same as the argument.")] = None,
    host: Annotated[
        str,
        typer.Option(envvar="VITRAIL_HOST", metavar="NAME", help="Address to listen on; 0.0.0.0 for all interfaces."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="VITRAIL_PORT", metavar="N", help="Port; 0 for any free port.")
    ] = 8000,
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of processes, each with its own copy of the model.")
    ] = 1,
    engine: EngineOptions = EngineOptions(),
    token: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|VARIABLE", help="File or environment variable with the token that clients must send."
        ),
    ] = None,
    max_bytes: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum size of a request body, in bytes.")] = 16
    * 2**20,
    max_pixels: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of pixels in an image.")
    ] = 50_000_000,
    max_images: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of images in a request.")] = 16,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME", help="Additional host name to accept, such as example.org; repeatable."
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of queued images.")] = 256,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Maximum number of images per batch; default: measured at startup."),
    ] = None,
    batch_delay: Annotated[
        float,
        typer.Option(
            min=0, max=1000, metavar="MS", help="Maximum time a batch waits for more images, in milliseconds."
        ),
    ] = 4.0,
    labels: LabelFile = None,
    folder: ModelFolderOptions = ModelFolderOptions(),
    loading: LoadOptions = LoadOptions(),
    access: AccessOptions = AccessOptions(),
) -> None:
    """Serve a model over HTTP: predictions, features, explanations, and the explorer page."""
    if source is not None and model is not None:
        raise ConfigError(f"got {source} and --model {model}, expected one of them.")
    folder.check(source or model)
    engine.check(loading)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: idle threads must not spin
    options: dict[str, Any] = {"labels": labels, "calibrate": engine.calibrate}
    options |= loading.load_options
    server, supervisor = _import_server()
    from vitrail.engines.exported_files import is_exported
    from vitrail.serve.limits import Limits
    from vitrail.serve.security import read_token

    log_to_stderr()
    cores, on_loopback = max(usable_cores() // workers, 1), host.startswith(LOOPBACK)
    config = server.ServerConfig(
        limits=Limits(max_bytes=max_bytes, max_pixels=max_pixels, max_images=max_images),
        batching={"max_queue": max_queue, "batch_size": batch_size, "batch_delay": batch_delay / 1000},
        cores=cores,
        token=None if token is None else read_token(token),
        hosts=tuple(allow_host or ()) if allow_host or on_loopback else None,
        access=access.config(),
        models=folder.config(partial(load_folder_model, engine.engine, cores, options), engine.engine),
    )
    _check_admin_token(config)
    sock = server.bind_socket(host, port)
    if token is None and access.tokens is None and not on_loopback:
        print_note(
            f"everyone who can reach {host} can use this server; pass --token, or put an authenticating proxy in front."
        )
    loader = partial(load_served_model, source or model, engine.engine, cores, **options)
    inside = not is_exported(source or model or "")
    open_port = None if on_loopback else sock.getsockname()[1]
    started = partial(_print_started, server.url_of(sock), workers, inside, open_port)
    if access.log_to_stdout:
        started = partial(_on_stderr, started)
    supervisor.serve(loader, sock, config, workers, started, _print_stopping)


def _check_admin_token(config: ServerConfig) -> None:
    """Raise ConfigError if clients have the token of operators."""
    from vitrail.serve.token_store import TokenStore

    admin_token = None if config.models is None else config.models.admin_token
    if admin_token is not None and TokenStore(config.token, config.access.tokens).find(admin_token.encode()):
        raise ConfigError(
            "the token of --admin-token is one of the clients', who could change the models with it; try another one, "
            "made by: openssl rand -hex 32"
        )


def load_folder_model(engine: str | None, cores: int, options: dict[str, Any], path: str) -> ServedModel:
    """Load a version of `--models`; options that an exported file has no use for do not apply to it."""
    from vitrail.engines.exported_files import is_exported

    fixed = {"labels": options.get("labels")} if is_exported(path) else options
    return load_served_model(path, engine, cores, **fixed)


def load_served_model(
    model: str | None, engine: str | None, cores: int, calibrate: str | None = None, **options: Any
) -> ServedModel:
    """Load the model and its engine; runs in the process that serves them."""
    log_to_stderr()
    notes_to_stderr()  # a worker is a separate process
    from vitrail.engines.engine import FileEngine
    from vitrail.engines.exported_files import is_exported
    from vitrail.exporting.export_model import calibration_images
    from vitrail.exporting.open_engine import open_engine
    from vitrail.serve.served_model import ServedModel
    from vitrail.weights.class_names import read_labels

    if model is not None and is_exported(model):
        _check_unchanged(model, **options | {"calibrate": calibrate})
        found, labels = open_engine(model, engine, threads=cores, concurrency=cores), options.get("labels")
        if labels is not None and isinstance(found, FileEngine):
            found = found.with_info(found.info.replace(labels=read_labels(labels, found.info.config.num_classes)))
        return ServedModel(found, name=Path(model).stem, parallel_batches=True)
    vit = open_model(model, require_classes=False, **options)
    parallel = vit.device.type == "cpu"
    images = calibration_images(calibrate)
    runner = open_engine(vit, engine, vit.device, threads=cores, calibrate=images, concurrency=cores if parallel else 1)
    return ServedModel(runner, vit, parallel_batches=parallel)


def _check_unchanged(
    model: str, *, device: str = "auto", dtype: str = "float32", compile: bool = False, **options: Any
) -> None:
    """Raise ConfigError if an option would change what was exported."""
    for name in ("image_size", "channels", "section", "family", "overrides", "calibrate"):
        if options.get(name):
            option = "set" if name == "overrides" else name.replace("_", "-")
            raise ConfigError(
                f"{model} is an exported file: --{option} has no effect; serve the checkpoint it was made from."
            )
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"{model} is exported and runs on the CPU only; for {device}, serve the checkpoint it was made from."
        )
    if dtype != "float32":
        raise ConfigError(f"{model} has a fixed precision; for {dtype}, export it again or serve the checkpoint.")
    if compile:
        raise ConfigError(f"{model} is exported: --compile has no effect; serve the checkpoint it was made from.")


def _print_started(where: str, workers: int, inside: bool, open_port: int | None, name: str, how: str) -> None:
    """inside: whether the page can show explanations; open_port: port on which other machines reach it."""
    typer.echo(one_line(f"{name} at {where}"), nl=False)
    typer.echo(f"  engine    {how}{f', {workers} processes' * (workers > 1)}")
    if open_port is not None:
        typer.echo(f"  network   http://{socket.gethostname()}:{open_port}/")
    typer.echo(f"  {'explorer' if inside else 'page    '}  {where}/")
    typer.echo(f"  API       {where}/docs\n  stop      Ctrl-C")
    sys.stdout.flush()


def _on_stderr(print_: Callable[..., None], *words: str) -> None:
    """Print to stderr what is usually printed to stdout, which has the access log."""
    with contextlib.redirect_stdout(sys.stderr):
        print_(*words)


def _print_stopping() -> None:
    typer.echo("stopping: finishing open requests; press Ctrl-C again to stop immediately", err=True)


def _import_server() -> tuple[Any, Any]:
    """The server and supervisor modules, if their dependencies are installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401

        from vitrail.serve import server, supervisor
    except ImportError as error:
        raise ConfigError(
            f"serving needs {error.name}, which is not installed; try pip install 'vitrail[serve]'."
        ) from None
    return server, supervisor


def log_to_stderr() -> None:
    """Log changes of models, warnings and errors, with tracebacks and the ids of requests, to stderr."""
    from vitrail.serve.request_record import RequestIdFilter

    logger = logging.getLogger("vitrail.serve")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s%(request)s"))
        handler.addFilter(RequestIdFilter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
