"""`vitrail embed`: write the features of every image to a Parquet file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.console import print_error, print_plain, progress_bar
from vitrail.cli.model_options import BatchSize, ModelSpec, open_model
from vitrail.cli.option_groups import DataOptions, FeatureOptions, LoadOptions, with_option_groups
from vitrail.cli.options import Json, parse_ints
from vitrail.errors import ConfigError


@with_option_groups
def embed(
    model: ModelSpec = None,
    source: DataOptions = DataOptions(),
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The Parquet file, such as features.parquet.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="train, validation, test, or all splits of the data.")
    ] = "all",
    spec: FeatureOptions = FeatureOptions(),
    feature_dtype: Annotated[
        str, typer.Option("--feature-dtype", metavar="TYPE", help="float32, or float16 for half the file size.")
    ] = ("float32"),
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each feature vector to length 1.")] = (False),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    batch_size: BatchSize = 64,
    loading: LoadOptions = LoadOptions(),
    as_json: Json = False,
) -> None:
    """Write the features of every image to a Parquet file, for search or other tools. Labels are not needed.

    vitrail embed --model MODEL --data photos/ --out features.parquet

    If it is interrupted or killed, the same command continues where it stopped.
    """
    data = source.data
    for name, value in (("--data SPEC", data), ("--out FILE", out)):
        if value is None:
            raise ConfigError(f"embed needs {name}: vitrail embed --data photos/ --out features.parquet.")
    assert data is not None
    assert out is not None
    if out.suffix.lower() not in (".parquet", ".pq"):
        raise ConfigError(f"--out {out}: expected a .parquet file; try {out.with_suffix('.parquet').name}.")
    parse_ints(spec.layer, "--layer")  # a wrong option is an error before torch is loaded
    vit = open_model(model, require_classes=False, require_network=False, **loading.load_options)
    from vitrail.config import DataConfig
    from vitrail.evaluation.embedding import IMAGES_PER_PART
    from vitrail.evaluation.embedding import embed as run

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
                DataConfig(source=data, root=source.root),
                out,
                split=split,
                spec=spec.to_spec(),
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
    if result.unreadable and not source.skip_bad:
        count = len(result.unreadable)
        images = "image" if count == 1 else "images"
        print_error(f"skipped {count:,} unreadable {images}; add --skip-bad to allow this.")
        raise typer.Exit(1)
