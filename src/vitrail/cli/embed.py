"""`vitrail embed`: features of every image to a Parquet file, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import print_error, print_plain, progress_bar
from vitrail.cli.model_options import Channels, Device, Dtype, ImageSize, ModelSpec, open_model
from vitrail.cli.options import Family, Json, Section, Settings, parse_settings, parse_size
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.evaluate.features import FeatureSpec

Data = Annotated[
    str | None,
    typer.Option("--data", metavar="SPEC", help="A folder, a table, shards or a built-in name; labels are not needed."),
]
Layer = Annotated[
    str,
    typer.Option(
        "--layer",
        "--layers",
        metavar="N,...",
        help="Blocks to take features after (0: before the first, -1: the last), one after the other; or last.",
    ),
]
Pool = Annotated[
    str, typer.Option("--pool", metavar="HOW", help="pooled (what the head sees), token, mean or token+mean.")
]
Norm = Annotated[bool, typer.Option("--norm/--no-norm", help="Apply the final norm to the layers' tokens.")]
Root = Annotated[str | None, typer.Option("--root", metavar="DIR", help="Where built-in data lies.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out without complaint.")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Images at a time.")]


def embed(
    model: ModelSpec = None,
    data: Data = None,
    to: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The Parquet file: features.parquet.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="train, validation, test, or all that the data has.")
    ] = "all",
    layer: Layer = "last",
    pool: Pool = "pooled",
    norm: Norm = True,
    feature_dtype: Annotated[
        str, typer.Option("--feature-dtype", metavar="TYPE", help="Write float32, or float16: half as much.")
    ] = ("float32"),
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each image's features to length one.")] = (
        False
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    image_size: ImageSize = None,
    channels: Channels = None,
    root: Root = None,
    section: Section = None,
    family: Family = None,
    changes: Settings = None,
    batch_size: Batch = 64,
    device: Device = "auto",
    dtype: Dtype = "float32",
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """Write what a model makes of every image, for search or other tools: one row each, with its key.

    vitrail embed --model MODEL --data photos/ --out features.parquet

    Interrupted or killed, the same command goes on where it stopped.
    """
    for name, value in (("--data SPEC", data), ("--out FILE", to)):
        if value is None:
            raise ConfigError(f"embed needs {name} too: vitrail embed --data photos/ --out features.parquet.")
    assert data is not None
    assert to is not None
    if to.suffix.lower() not in (".parquet", ".pq"):
        raise ConfigError(f"--out {to}: features are written as Parquet; call it {to.with_suffix('.parquet').name}.")
    own: dict[str, Any] = {"image_size": parse_size(image_size), "channels": channels}
    told = parse_settings(changes)
    layers = parse_ints(layer, "--layer")
    own |= {"section": section, "family": family, "device": device, "dtype": dtype}
    vit = open_model(model, overrides=told, require_classes=False, require_network=False, **own)
    from vitrail.api.embedding import IMAGES_PER_PART
    from vitrail.api.embedding import embed as run
    from vitrail.config import DataConfig

    done = 0
    with progress_bar() as bar:
        task = bar.add_task("embedding", total=None)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.advance(task, count)

        try:
            made = run(
                vit,
                DataConfig(source=data, root=root),
                to,
                split=split,
                spec=feature_spec(layers, pool, norm),
                dtype=feature_dtype,
                normalize=normalize,
                batch_size=batch_size,
                overwrite=overwrite,
                started=lambda total, before: bar.update(task, total=total, completed=before),
                advance=advance,
            )
        except KeyboardInterrupt:
            saved = done // IMAGES_PER_PART * IMAGES_PER_PART
            print_error(
                f"stopped after {done:,} more images, {saved:,} of them saved; the same command goes on from there."
            )
            raise typer.Exit(130) from None
    if as_json:
        report = {"file": str(made.path), "num_images": made.num_images, "width": made.width, "features": made.features}
        typer.echo(json.dumps(report | {"unreadable": dict(made.unreadable)}, indent=2))
    else:
        images = f"{made.num_images:,} image{'s' * (made.num_images != 1)}"
        print_plain(f"{made.path}: {images}, {made.width} features each ({made.features}).")
    if made.unreadable and not skip_bad:
        count = len(made.unreadable)
        many = "image could not be read and is" if count == 1 else "images could not be read and are"
        print_error(f"{count:,} {many} not in {made.path}; with --skip-bad that is no error.")
        raise typer.Exit(1)


def parse_ints(text: str, option: str) -> tuple[int, ...]:
    """ "9,10,11,12" -> (9, 10, 11, 12); "last" -> ()."""
    if text == "last":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} wants whole numbers such as 5 or 1,5,10, got {text!r}.") from None


def feature_spec(layers: tuple[int, ...], pool: str, norm: bool) -> FeatureSpec:
    from vitrail.evaluate.features import FeatureSpec

    return FeatureSpec(layers=layers, pool=pool, norm=norm)
