"""`vitrail finetune`: fine-tune a pretrained model on new classes."""

from __future__ import annotations

from typing import Annotated

import typer

from vitrail.cli.console import err
from vitrail.cli.model_options import ImageSize, ModelSpec
from vitrail.cli.options import Data, Json, SkipBad, parse_size
from vitrail.cli.train import (
    AutoResume,
    Device,
    Out,
    Report,
    Resume,
    command_line,
    print_result,
    settings_table,
)
from vitrail.runtime import is_main_process


def finetune(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as optim.lr=1e-4.")
    ] = None,
    model: ModelSpec = None,
    data: Data = None,
    recipe: Annotated[
        str, typer.Option("--recipe", help="finetune, or paper: SGD at 384 px, as in the ViT paper.")
    ] = "finetune",
    trainable: Annotated[
        str,
        typer.Option(
            "--trainable",
            metavar="all|head|N",
            help="Parameters to train: all, the head, or the head and last N blocks.",
        ),
    ] = "all",
    image_size: ImageSize = None,
    out: Out = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    device: Device = None,
    report: Report = True,
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a pretrained model on your classes: vitrail finetune --model MODEL --data photos/"""
    if (model is None or data is None) and not (resume and out is not None):
        raise typer.BadParameter("finetune needs --model and --data, or --resume with --out RUN")
    overrides = [*(overrides or []), *(["data.skip_bad=true"] if skip_bad else [])]
    trainable_part = int(trainable) if trainable.isdecimal() else trainable
    with err.status("starting"):
        from vitrail import api
        from vitrail.api.training import finetune_config, finetune_folder
    goes_on = resume or auto_resume
    if auto_resume and not resume:
        goes_on = finetune_folder(data or "", recipe, overrides, out, auto_resume=True).started
    if goes_on:
        done = api.finetune(
            model or "",
            data or "",
            recipe=recipe,
            trainable=trainable_part,
            image_size=parse_size(image_size),
            overrides=[*overrides, *([f"device={device}"] if device else [])],
            out=out,
            resume=resume,
            auto_resume=auto_resume,
            report=report,
            command=command_line(),
        )
        print_result(done, as_json)
        return
    assert model is not None
    assert data is not None
    config = finetune_config(
        model,
        data,
        recipe=recipe,
        trainable=trainable_part,
        image_size=parse_size(image_size),
        overrides=overrides,
        device=device or "auto",
    )
    if is_main_process():
        err.print(settings_table(config))
    print_result(api.train(config, out=out, auto_resume=auto_resume, report=report, command=command_line()), as_json)
