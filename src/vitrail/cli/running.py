"""The model that a command is given, and the engine that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import err, note
from vitrail.cli.opening import open_model
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.api import Model

Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="torch, onnxruntime, openvino, or auto: the fastest that agrees.",
        show_default="torch, or an exported file's own",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option("--calibrate", metavar="SPEC", help="Pictures that let --engine auto try int8: a folder, shards, ..."),
]
EXPORTED = (".onnx", ".pt2", ".xml")


def open_running(
    model: str | None,
    engine: str | None,
    *,
    told: dict[str, Any],
    device: str = "auto",
    dtype: str = "float32",
    labels: str | None = None,
    calibrate: str | None = None,
    **options: Any,
) -> Model:
    """The model of `--model` run by `--engine`; with neither, or with torch, as `open_model` gives it."""
    exported = model is not None and model.lower().endswith(EXPORTED) and Path(model).is_file()
    if not exported and engine in (None, "torch"):
        return open_model(model, told=told, device=device, dtype=dtype, labels=labels, **options)
    if dtype != "float32":
        raise ConfigError(f"--dtype {dtype} is for torch alone: another engine, or an exported file, has its own.")
    if exported:
        with err.status(f"loading {model}"):
            from vitrail.api.exporting import running

            assert model is not None
            vit = running(model, engine, labels=labels, **options | told)
        vit.check_classes()
        if vit.labels is None:
            note("the file does not name its classes: pass --labels FILE, or imagenet-1k if that is what they are.")
        return vit
    vit = open_model(model, told=told, labels=labels, **options)
    with err.status("exporting and comparing; the next time it is there" if engine == "auto" else f"starting {engine}"):
        from vitrail.api.exporting import running

        return running(vit, engine, device=device, calibrate=calibrate)
