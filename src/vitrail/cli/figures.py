"""`vitrail figures`: the paper's figures of a model, or their development over a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.console import err, one_line, progress_bar
from vitrail.cli.model_options import ModelSpec, open_model
from vitrail.cli.option_groups import LoadOptions, with_option_groups
from vitrail.cli.options import Data, Formats, Json, OutFolder, Root, names_option, parse_list
from vitrail.errors import ConfigError


@with_option_groups
def figures(
    model: ModelSpec = None,
    data: Data = None,
    out: OutFolder = Path("figures"),
    what: Annotated[str | None, names_option("--what", "filters,positions,distances,rollout,colors")] = None,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Number of images.")] = 128,
    layer: Annotated[
        int | None, typer.Option(metavar="N", help="Layer of the positions and features: 1 is the first, -1 the last.")
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Color the foreground only.")] = False,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="For a run folder: animate the figures over training (all but colors)."),
    ] = False,
    formats: Formats = "png",
    root: Root = None,
    loading: LoadOptions = LoadOptions(),
    as_json: Json = False,
) -> None:
    """Draw filters, position similarities, attention distances, rollouts and feature colors of a model."""
    names, endings = parse_list(what), parse_list(formats) or ()
    if timeline:
        given: dict[str, Any] = {
            "--data": data,
            "--layer": layer,
            "--image-size": loading.image_size,
            "--channels": loading.channels,
            "--set": loading.changes,
            "--format": None if formats == "png" else formats,
        }
        for option in [name for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"{option} cannot be combined with --timeline, which uses the run's own settings and images."
            )
        written = _timeline(model, out, names)
    else:
        vit = open_model(model, require_classes=False, **loading.load_options)
        with err.status("looking for images"):
            from vitrail.figures.model_figures import FIGURES, NEED_IMAGES, ModelFigures, dataset_images, run_images

            images = dataset_images(data, count, root) if data is not None else run_images(model, count)
            if data is None and images is not None:
                data = "the run's evaluation images"
        with progress_bar() as bar:
            passes = [name for name in names or FIGURES if name in NEED_IMAGES]
            task = bar.add_task("looking", total=max(len(images or (0, 0)) * len(passes), 1))
            model_figures = ModelFigures(
                vit,
                images,
                layer=layer,
                foreground=foreground,
                images_description=f"images from {Path(data.rpartition(':')[2]).name or data}"
                if data is not None
                else "",
                advance=lambda n: bar.advance(task, n),
            )
            written = model_figures.save(out, names, endings)
    if as_json:
        typer.echo(json.dumps([str(f) for f in written], indent=2))
    else:
        for path in written:
            typer.echo(one_line(path), nl=False)


def _timeline(model: str | None, out: Path, names: tuple[str, ...] | None) -> list[Path]:
    if model is None or not Path(model).expanduser().is_dir():
        given = "" if model is None else f", got {model}"
        raise ConfigError(f"--timeline expects a run folder: --model runs/digits{given}.")
    with err.status("loading"):
        from vitrail.figures.run_timeline import draw_timelines
    with progress_bar() as bar:
        task = bar.add_task("drawing", total=None)
        return draw_timelines(
            model, out, names or (), on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
