"""`vitrail embed`: write the features of every image to a Parquet file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import print_error, print_plain, progress_bar
from vitrail.cli.model_options import Channels, Device, Dtype, ImageSize, ModelSpec, open_model
from vitrail.cli.options import Data, Family, Json, Root, Section, Settings, SkipBad, parse_settings, parse_size
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.evaluate.features import FeatureSpec

Layer = Annotated[
    str,
    typer.Option(
        "--layer",
        "--layers",
        metavar="N,...",
        help="Block indices whose outputs are concatenated (0: the first block's input, -1: the last block), or last.",
    ),
]
Pool = Annotated[
    str, typer.Option("--pool", metavar="HOW", help="pooled (the head's input), token, mean or token+mean.")
]
Norm = Annotated[bool, typer.Option("--norm/--no-norm", help="Apply the final norm to the layers' tokens.")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Images per batch.")]


def embed(
    model: ModelSpec = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The Parquet file, such as features.parquet.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="train, validation, test, or all splits of the data.")
    ] = "all",
    layer: Layer = "last",
    pool: Pool = "pooled",
    norm: Norm = True,
    feature_dtype: Annotated[
        str, typer.Option("--feature-dtype", metavar="TYPE", help="float32, or float16 for half the file size.")
    ] = ("float32"),
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each feature vector to length 1.")] = (False),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
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
    """Write the features of every image to a Parquet file, for search or other tools. Labels are not needed.

    vitrail embed --model MODEL --data photos/ --out features.parquet

    If it is interrupted or killed, the same command continues where it stopped.
    """
    for name, value in (("--data SPEC", data), ("--out FILE", out)):
        if value is None:
            raise ConfigError(f"embed needs {name}: vitrail embed --data photos/ --out features.parquet.")
    assert data is not None
    assert out is not None
    if out.suffix.lower() not in (".parquet", ".pq"):
        raise ConfigError(f"--out {out}: expected a .parquet file; try {out.with_suffix('.parquet').name}.")
    own: dict[str, Any] = {"image_size": parse_size(image_size), "channels": channels}
    layers = parse_ints(layer, "--layer")
    own |= {"section": section, "family": family, "device": device, "dtype": dtype}
    overrides = parse_settings(changes)
    vit = open_model(model, overrides=overrides, require_classes=False, require_network=False, **own)
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
            result = run(
                vit,
                DataConfig(source=data, root=root),
                out,
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
                f"stopped after {done:,} more images, of which {saved:,} are saved; the same command continues there."
            )
            raise typer.Exit(130) from None
    if as_json:
        report: dict[str, Any] = {"file": str(result.path), "num_images": result.num_images, "width": result.width}
        report |= {"features": result.features, "unreadable": dict(result.unreadable)}
        typer.echo(json.dumps(report, indent=2))
    else:
        images = f"{result.num_images:,} image{'s' * (result.num_images != 1)}"
        print_plain(f"{result.path}: {images}, {result.width} features each ({result.features}).")
    if result.unreadable and not skip_bad:
        count = len(result.unreadable)
        images = "image" if count == 1 else "images"
        print_error(f"skipped {count:,} unreadable {images}; add --skip-bad to allow this.")
        raise typer.Exit(1)


def parse_ints(text: str, option: str) -> tuple[int, ...]:
    """ "9,10,11,12" -> (9, 10, 11, 12); "last" -> ()."""
    if text == "last":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} expects whole numbers such as 5 or 1,5,10, got {text!r}.") from None


def feature_spec(layers: tuple[int, ...], pool: str, norm: bool) -> FeatureSpec:
    from vitrail.evaluate.features import FeatureSpec

    return FeatureSpec(layers=layers, pool=pool, norm=norm)
