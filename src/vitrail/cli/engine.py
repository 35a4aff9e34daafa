"""The --engine option, and opening a model with the engine that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import err
from vitrail.cli.model_options import open_model
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.api import Model

Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="torch, onnxruntime, openvino, or auto: the fastest whose outputs match torch.",
        show_default="torch, or an exported file's own",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="SPEC",
        help="Images to calibrate the int8 scales of --engine auto: a folder, shards, ...",
    ),
]


def open_with_engine(
    model: str | None,
    engine: str | None,
    *,
    overrides: dict[str, Any],
    device: str = "auto",
    dtype: str = "float32",
    calibrate: str | None = None,
    **options: Any,
) -> Model:
    """The model of `--model`, a checkpoint or an exported file, run by `--engine`; `options` are `open_model`'s."""
    uses_torch = engine in (None, "torch")
    if not uses_torch and dtype != "float32":
        raise ConfigError(f"--dtype {dtype} is only for torch; {engine} has a fixed dtype.")
    vit = open_model(
        model,
        overrides=overrides,
        require_network=False,
        device=device if uses_torch else "cpu",
        dtype=dtype,
        **options,
    )
    if engine is None:
        return vit
    from vitrail.api.exporting import EngineModel, with_engine

    if engine == "torch" and not isinstance(vit, EngineModel):
        return vit
    with err.status("exporting and comparing (only the first time)" if engine == "auto" else f"starting {engine}"):
        return with_engine(vit, engine, device=device, calibrate=calibrate)
