"""`vitrail finetune`: fine-tune a pretrained model on new classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from vitrail.cli.console import err
from vitrail.cli.model_options import ModelSpec
from vitrail.cli.option_groups import RunOptions, with_option_groups
from vitrail.cli.options import Data, ImageSize, Json, parse_size
from vitrail.cli.settings import print_settings
from vitrail.cli.train import command_line, print_result, settings_table, train_on_ray
from vitrail.config import override
from vitrail.errors import ConfigError, NotFoundError, did_you_mean
from vitrail.recipes.finetune import FINETUNE_RECIPES
from vitrail.runtime import is_main_process


@with_option_groups
def finetune(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change, such as optim.lr=1e-4.")
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
    run: RunOptions = RunOptions(),
    as_json: Json = False,
) -> None:
    """Fine-tune a pretrained model on the classes of your data.

    vitrail finetune --model MODEL --data photos/
    """
    if run.settings:
        if recipe not in FINETUNE_RECIPES:
            raise NotFoundError(f"unknown fine-tuning recipe {recipe!r}{did_you_mean(recipe, FINETUNE_RECIPES)}")
        config = FINETUNE_RECIPES[recipe](model or "MODEL", data or "DATA", num_images=1000, device="cuda")
        title = f"Settings of --recipe {recipe} for 1,000 images on a GPU; change any with KEY=VALUE.\n"
        print_settings(override(config, overrides or []), title, as_json)
        return
    if (model is None or data is None) and not (run.resume and run.out is not None):
        raise typer.BadParameter("finetune needs --model and --data, or --resume with --out RUN")
    overrides = [*(overrides or []), *replace(run, device=None).overrides]
    options: dict[str, Any] = {
        "recipe": recipe,
        "trainable": _parse_trainable(trainable),
        "image_size": parse_size(image_size),
    }
    about: dict[str, Any] = {"report": run.report, "command": command_line()}
    where: dict[str, Any] = {"out": run.out, "auto_resume": run.auto_resume, **about}
    with err.status("starting"):
        from vitrail.training.runs import finetune as finetune_model
        from vitrail.training.runs import finetune_config, finetune_folder, train
    if run.on is not None:
        mode = {"resume": run.resume, "auto_resume": run.auto_resume}
        folder = finetune_folder(data or "", recipe, overrides, run.out, **mode)
        overrides += replace(run, skip_bad=False).overrides
        arguments = {"model": model or "", "data": data or "", "overrides": overrides, **options, **about}
        print_result(train_on_ray("finetune", arguments, run, folder), as_json)
        return
    continues = run.resume
    if run.auto_resume and not run.resume:
        continues = finetune_folder(data or "", recipe, overrides, run.out, auto_resume=True).started
    if continues:
        overrides += replace(run, skip_bad=False).overrides
        result = finetune_model(model or "", data or "", overrides=overrides, resume=run.resume, **options, **where)
        print_result(result, as_json)
        return
    assert model is not None
    assert data is not None
    config = finetune_config(model, data, overrides=overrides, device=run.device or "auto", **options)
    if is_main_process():
        err.print(settings_table(config))
    print_result(train(config, **where), as_json)


def _parse_trainable(text: str) -> str | int:
    if text.isdecimal():
        return int(text)
    if text not in ("all", "head"):
        raise ConfigError(f"--trainable expects all, head or a number of blocks, got {text!r}.")
    return text
