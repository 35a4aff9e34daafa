"""The model that a command is given: its options, and how it is opened."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import err, note
from vitrail.errors import ConfigError, ModelError
from vitrail.runtime import silent

if TYPE_CHECKING:
    from vitrail.api import Model
    from vitrail.weights.shipped import Shipped

Source = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="A name, a file, a folder or a hub id.")
]
Labels = Annotated[
    str | None, typer.Option(metavar="FILE", help="Class names: one on each line, JSON, or the word imagenet-1k.")
]
Image = Annotated[str | None, typer.Option(metavar="SIZE", help="Another size: 384, or 288x192 (height x width).")]
Channels = Annotated[int | None, typer.Option(min=1, metavar="N", help="Take images as gray (1) or with alpha (4).")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Images at a time.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32, or bfloat16 for speed on a GPU.")]


def open_model(
    model: str | None,
    *,
    told: dict[str, Any] | None = None,
    classes: bool = True,
    inside: bool = True,
    **options: Any,
) -> Model:
    """The model of `--model`, or the one that ships; `options` are those of `vitrail.load`, `told` what `--set` gave.

    classes: refuse a model that has none, and say where they have no names.
    inside: refuse an exported file, which can be run and not looked into.
    A command without `labels` makes no use of class names: what was assumed about them is not noted.
    """
    told = told or {}
    for name in told.keys() & options.keys():
        raise ConfigError(f"--set {name}={told[name]}: pass --{name.replace('_', '-')} instead.")
    with err.status(f"loading {model or 'the model that ships with vitrail'}"):
        from vitrail.api import load  # and torch: not before the arguments are known to be good
        from vitrail.weights.labels import ASSUMED
        from vitrail.weights.locate import Found, locate
        from vitrail.weights.shipped import DEFAULT
    found = Found(DEFAULT.path, DEFAULT.name) if model is None else locate(model)  # which shows how far a download is
    with err.status(f"loading {model or DEFAULT.name}"):
        with nullcontext() if "labels" in options else silent(ASSUMED):
            vit = load(found, **options, **told)
        if inside:
            vit.check_inside()
    if model is None:
        _introduce(DEFAULT)
    if classes:
        _check_classes(vit, model or DEFAULT.name)
    return vit


def _introduce(shipped: Shipped) -> None:
    """What was taken where no model was named, and what it can and cannot recognize."""
    *labels, last = shipped.info.labels or ("nothing",)
    note(f"no --model, so this is {shipped.name}, which ships with vitrail: {shipped.about}.")
    note(
        f"it knows {', '.join(labels)} and {last}, and calls everything else one of these as well; "
        "for more, pass --model with a name that `vitrail models` lists, a file, a folder or a hub id."
    )


def _check_classes(vit: Model, model: str) -> None:
    try:
        vit.check_classes()
    except ModelError:
        from vitrail.export.names import is_exported

        if is_exported(model):
            raise ModelError(f"{model} has no classes: it gives features, which vitrail embed writes.") from None
        teach = f"vitrail finetune --model {shlex.quote(model)} --data DATA"
        raise ModelError(f"{model} has no classes yet; teach it some: {teach}.") from None
    if vit.labels is None:
        from vitrail.weights.labels import imagenet_1k

        unknown = vit.config.num_classes == 1000 and not vit.info.trained_here and imagenet_1k() is None
        timm = ", or install timm, which has ImageNet's names" if unknown else ""
        note(f"the checkpoint does not name its classes: pass --labels FILE{timm}.")
