"""`vitrail train`: train a recipe, with changed settings, into a run folder."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, print_plain
from vitrail.cli.option_groups import RunOptions, with_option_groups
from vitrail.cli.options import Data, Json
from vitrail.cli.settings import is_setting_name, print_settings
from vitrail.config import TrainConfig, override
from vitrail.errors import ConfigError, NotFoundError, did_you_mean
from vitrail.plugins import plugin_names
from vitrail.runtime import is_main_process

if TYPE_CHECKING:
    from vitrail.runs.run_folder import RunFolder
    from vitrail.training.runs import Run

EXIT_STATUS = {"SIGHUP": 129, "SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143, "torchrun": 143}
"""Exit status of a run stopped by a signal, 128 + its number as in shells, or by the end of torchrun."""


@with_option_groups
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE|KEY=VALUE", help="At most one recipe, and settings to change."),
    ] = None,
    data: Data = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Network instead of the recipe's, such as ViT-S/4.")
    ] = None,
    run: RunOptions = RunOptions(),
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes with their results.")] = False,
    as_json: Json = False,
) -> None:
    """Train a network from scratch. The default recipe trains a small ViT on handwritten digits in a minute or two.

    vitrail train cifar10 optim.lr=3e-4 duration='100 epochs'

    Settings also select trackers and plugins of other packages: trackers=tensorboard,wandb,mlflow objective=NAME
    callbacks=NAME data.source=NAME:LOCATION. --settings lists all settings and the installed plugins.
    """
    if list_recipes:
        _list_recipes()
        return
    recipe, overrides = _split_arguments(arguments or [])
    if run.settings:
        name = recipe or "digits"
        print_settings(
            recipe_config(name, overrides), f"Settings of the recipe {name}; change any with KEY=VALUE.\n", as_json
        )
        if not as_json:
            print_plain(_installed_plugins())
        return
    overrides += run.overrides
    if recipe is None and data is not None:
        recipe = _recipe_for(data)
    recipe = recipe or "digits"
    with err.status("starting"):
        from vitrail.training import runs
        from vitrail.training.resuming import resolve_run_folder
    call: dict[str, Any] = {"recipe": recipe, "overrides": overrides, "data": data, "model": model}
    call |= {"report": run.report, "command": command_line()}
    if run.on is not None:
        name = override(runs.resolve_recipe(recipe, None, None), overrides).name if run.out is None else ""
        folder = resolve_run_folder(run.out, name, resume=run.resume, auto_resume=run.auto_resume)
        done = train_on_ray("train", call, run, folder)
    else:
        done = runs.train(**call, out=run.out, resume=run.resume, auto_resume=run.auto_resume)
    print_result(done, as_json)


def train_on_ray(function: str, arguments: dict[str, Any], run: RunOptions, folder: RunFolder) -> Run:
    """The run of `train` or `finetune` on the cluster of --on."""
    from vitrail.training.ray_train import RayRun, run_on_ray

    assert run.on is not None
    if not (run.resume or run.auto_resume):
        folder.check_unused()
    spec = RayRun(
        function=function,
        arguments=arguments,
        out=str(folder.path.absolute()),
        resume=run.resume,
        workers=run.workers,
        max_restarts=RayRun.max_restarts if run.max_restarts is None else run.max_restarts,
        gpu=run.device in (None, "auto", "cuda"),
    )
    return run_on_ray(run.on, spec)


def _installed_plugins() -> str:
    """The plugins of other packages, by the setting that takes their names."""
    settings = {
        "objective": "objectives",
        "callbacks": "callbacks",
        "trackers": "trackers",
        "data.source": "sources",
        "--model": "models",
    }
    found = {setting: plugin_names(group) for setting, group in settings.items()}
    lines = [f"  {setting}: {', '.join(names)}" for setting, names in found.items() if names]
    return "\nNames that installed packages add (docs/extending.md):\n" + ("\n".join(lines) or "  none")


def print_result(done: Run, as_json: bool) -> None:
    """Print the result of a run; if a signal stopped it, exit with the status for that signal."""
    if not is_main_process():
        raise typer.Exit(EXIT_STATUS.get(done.stop_reason or "", 0))
    if as_json:
        typer.echo(json.dumps(result_dict(done), indent=2))
    elif done.scores is not None or done.finished:
        print_plain(_result_table(done))
    if done.stop_reason in EXIT_STATUS or done.stop_reason == "another process":
        saved = f"saved at step {done.resume_step}; " if done.resume_step is not None else ""
        again = f"resume with: vitrail train --resume --out {shlex.quote(str(done.path))}"
        by = "the end of torchrun" if done.stop_reason == "torchrun" else done.stop_reason
        err.print(Text(f"stopped by {by}; {saved}{again}"), soft_wrap=True)
        raise typer.Exit(EXIT_STATUS.get(done.stop_reason, 1))


def result_dict(done: Run) -> dict[str, object]:
    return {
        "run": str(done.path),
        "model": str(done.path / "model") if done.finished else None,
        "report": str(done.report) if done.report.exists() else None,
        "scores": done.scores.to_dict() if done.scores is not None else None,
        "test": done.test_scores.to_dict() if done.test_scores is not None else None,
        "stop_reason": done.stop_reason,
        "comparisons": [
            {"run": str(other.path), "scores": other.scores.to_dict() if other.scores is not None else None}
            for other in done.comparisons
        ],
    }


def command_line() -> str:
    """The command as the user typed it."""
    return shlex.join(["vitrail", *sys.argv[1:]])


def _result_table(done: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, s in (("accuracy", done.scores), ("test accuracy", done.test_scores)):
        if s is None:
            continue
        value, about = s.top1, f"95 % interval {100 * s.low:.2f} to {100 * s.high:.2f}, {s.count} images"
        if s.mean_average_precision is not None:
            name = name.replace("accuracy", "mean average precision")
            value = s.mean_average_precision
            about = f"{s.count} images; top-1 accuracy {100 * s.top1:.2f} % of those with a label"
        table.add_row(name, f"{100 * value:.2f} %", Text(about, style="dim"))
    others = dict(done.baselines)
    others |= {o.path.name.replace("-", "=", 1): o.scores for o in done.comparisons if o.scores is not None}
    for name, scores in others.items():
        table.add_row(f"  {name}", f"{100 * scores.top1:.2f} %", "")
    model = shlex.quote(str(done.path))
    use = f"predict --model {model} IMAGE"
    if done.config.model is not None and not done.config.model.num_classes:  # the model has no head yet
        use = f"finetune --model {model} --data IMAGES"
    table.add_row("model", str(done.path / "model"), Text(f"vitrail {use}", style="dim"))
    if done.report.exists():
        table.add_row("report", str(done.report), "")
    return table


def _split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split into the name of a recipe, at most one, and settings."""
    names = [a for a in arguments if "=" not in a]
    for name in names:
        if is_setting_name(TrainConfig(init_from="MODEL"), name):
            raise ConfigError(f"the setting {name} has no value; settings are written {name}=VALUE.")
    if len(names) > 1:
        raise ConfigError(f"got two recipes, {names[0]} and {names[1]}; settings are written KEY=VALUE.")
    return (names[0] if names else None), [a for a in arguments if "=" in a]


def recipe_config(name: str, overrides: list[str]) -> TrainConfig:
    from vitrail.recipes import RECIPES

    if name not in RECIPES:
        raise NotFoundError(f"unknown recipe {name!r}{did_you_mean(name, RECIPES)}")
    return override(RECIPES[name](), overrides)


def _recipe_for(data: str) -> str:
    from vitrail.recipes import RECIPES

    if data in RECIPES:
        return data
    raise ConfigError(
        f"--data {data} needs a recipe, such as vitrail train deit-s16 --data {data}; with fewer than a million "
        f"images, fine-tune a pretrained model instead: vitrail finetune --model MODEL --data {data}."
    )


def _list_recipes() -> None:
    from vitrail.recipes import RECIPES

    table = Table("recipe", "data", "description", box=None, pad_edge=False)
    for name, make in RECIPES.items():
        config = make()
        about = make.__doc__ or sys.modules[make.__module__].__doc__ or ""
        paragraphs = [" ".join(part.split()) for part in about.split("\n\n")[:2]]
        table.add_row(name, config.data.source, "\n".join(part.partition(" Run: ")[0] for part in paragraphs))
    print_plain(table)


def settings_table(config: TrainConfig) -> Table:
    """The main settings of a fine-tuning run, chosen from the model and the data."""
    table = Table.grid(padding=(0, 2))
    optim = config.optim
    name = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}[optim.kind]
    decay = f", layer-wise decay {optim.layer_decay:g}" if optim.layer_decay else ""
    trainable = {"all": "all parameters", "head": "the head"}.get(
        str(optim.trainable), f"the head and the last {optim.trainable} blocks"
    )
    table.add_row("model", str(config.init_from))
    table.add_row("data", config.data.source)
    table.add_row("trainable", trainable)
    table.add_row("optimizer", f"{name}, learning rate {_format_lr(optim.lr)}{decay}")
    table.add_row("duration", f"{config.duration}, batch size {config.batch_size}")
    table.add_row("image size", "as in the checkpoint" if config.image_size is None else f"{config.image_size} px")
    return table


def _format_lr(lr: float) -> str:
    """Such as 5e-4, or 0.03 from 0.01 on."""
    mantissa, _, exponent = f"{lr:e}".partition("e")
    return f"{lr:g}" if lr >= 0.01 or not lr else f"{float(mantissa):g}e{int(exponent)}"
