"""The `--model` option and those beside it, and the function that loads the model they name."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import err, print_note
from vitrail.cli.option_groups import DeviceOptions, EngineOptions
from vitrail.errors import ConfigError, ModelError
from vitrail.runtime import suppress_note

if TYPE_CHECKING:
    from vitrail.bulk.job import ModelSource
    from vitrail.model import Model
    from vitrail.weights.shipped import ShippedModel

ModelSpec = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="A name, a file, a folder or a hub id.")
]
LabelFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Class names: a text file with one per line, JSON, or imagenet-1k.")
]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Images per batch.")]


def open_model(
    model: str | None,
    *,
    overrides: dict[str, Any] | None = None,
    require_classes: bool = True,
    require_network: bool = True,
    **options: Any,
) -> Model:
    """Load the model of `--model`, or the shipped model if there is none.

    `options` are those of `vitrail.load`; `overrides` are the settings given with `--set`. With `require_classes`, a
    model without classes is an error, and classes without names give a note. With `require_network`, an exported file
    is an error: only its inputs and outputs are accessible. A command without `labels` does not use class names, so
    assumptions about them are not reported.
    """
    overrides = overrides or {}
    for name in overrides.keys() & options.keys():
        raise ConfigError(f"--set {name}={overrides[name]}: pass --{name.replace('_', '-')} instead.")
    with err.status(f"loading {model or 'the model that ships with vitrail'}"):
        from vitrail.open_model import load  # imports torch, so only after the arguments are checked
        from vitrail.weights.class_names import ASSUMED_IMAGENET
        from vitrail.weights.locate import ModelLocation, locate
        from vitrail.weights.shipped import DEFAULT_MODEL
    location = (
        ModelLocation(DEFAULT_MODEL.path, DEFAULT_MODEL.name) if model is None else locate(model)
    )  # may download, with its own progress bar
    with err.status(f"loading {model or DEFAULT_MODEL.name}"):
        with nullcontext() if "labels" in options else suppress_note(ASSUMED_IMAGENET):
            vit = load(location, **options, **overrides)
        if require_network:
            vit.check_has_network()
    if model is None:
        _introduce(DEFAULT_MODEL)
    if require_classes:
        _check_classes(vit, model or DEFAULT_MODEL.name)
    return vit


def model_source(model: str | None, options: dict[str, Any]) -> ModelSource:
    """The model that `open_model` loads with these options, for other processes to load."""
    from vitrail.bulk.job import ModelSource
    from vitrail.weights.shipped import DEFAULT_MODEL

    named = {name: value for name, value in options.items() if name not in ("device", "overrides")}
    return ModelSource(model or DEFAULT_MODEL.name, named | (options.get("overrides") or {}))


def open_with_engine(model: str | None, engine: EngineOptions, device: DeviceOptions, **options: Any) -> Model:
    """The model of `--model`, a checkpoint or an exported file, run by `--engine`; `options` are `open_model`'s."""
    engine.check(device)
    name = engine.engine
    placed = device if name in (None, "torch") else replace(device, device="cpu")
    vit = open_model(model, require_network=False, **options, **placed.load_options)
    if name is None:
        return vit
    from vitrail.engine_model import EngineModel
    from vitrail.exporting.open_engine import with_engine

    if name == "torch" and not isinstance(vit, EngineModel):
        return vit
    with err.status("exporting and comparing (only the first time)" if name == "auto" else f"starting {name}"):
        return with_engine(vit, name, device=device.device, calibrate=engine.calibrate)


def _introduce(shipped: ShippedModel) -> None:
    """Say which model is used without `--model`, and which classes it has."""
    *labels, last = shipped.info.labels or ("nothing",)
    print_note(f"no --model was given: using {shipped.name}, which ships with vitrail ({shipped.description}).")
    print_note(
        f"its classes are {', '.join(labels)} and {last}; every image is assigned to one of them. "
        "For other classes, pass --model: a name from `vitrail models`, a file, a folder or a hub id."
    )


def _check_classes(vit: Model, model: str) -> None:
    try:
        vit.check_classes()
    except ModelError:
        from vitrail.engines.exported_files import is_exported

        if is_exported(model):
            raise ModelError(f"{model} has no classes: it outputs features; use vitrail embed.") from None
        train = f"vitrail finetune --model {shlex.quote(model)} --data DATA"
        raise ModelError(f"{model} has no classes; train a classifier with {train}.") from None
    if vit.labels is None:
        from vitrail.weights.class_names import imagenet_1k

        unknown = vit.config.num_classes == 1000 and not vit.info.trained_by_vitrail and imagenet_1k() is None
        timm = ", or install timm, which has the ImageNet names" if unknown else ""
        print_note(f"the checkpoint has no class names: pass --labels FILE{timm}.")
