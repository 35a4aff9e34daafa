"""`vitrail embed`: write the features of every image to a Parquet file, or to a folder of parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.bulk_options import BulkOptions, join_folders, print_result, show_images
from vitrail.cli.model_options import BatchSize, ModelSpec, model_source, open_model
from vitrail.cli.option_groups import DataOptions, FeatureOptions, LoadOptions, with_option_groups
from vitrail.cli.options import Json, parse_ints
from vitrail.errors import ConfigError


@with_option_groups
def embed(
    model: ModelSpec = None,
    source: DataOptions = DataOptions(),
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE|DIR", help="A file such as features.parquet, or a folder of parts."),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="train, validation, test, or all splits of the data.")
    ] = "all",
    spec: FeatureOptions = FeatureOptions(),
    feature_dtype: Annotated[
        str, typer.Option("--feature-dtype", metavar="TYPE", help="float32, or float16 for half the file size.")
    ] = ("float32"),
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each feature vector to length 1.")] = (False),
    bulk: BulkOptions = BulkOptions(),
    batch_size: BatchSize = 64,
    loading: LoadOptions = LoadOptions(),
    as_json: Json = False,
) -> None:
    """Write the features of every image to a Parquet file, for search or other tools. Labels are not needed.

    vitrail embed --model MODEL --data photos/ --out features.parquet

    If it is interrupted or killed, the same command continues where it stopped. A folder instead of a file keeps the
    parts, so that several machines can compute them: --shard 1/8, or --on ray.
    """
    if bulk.join:
        result = join_folders(bulk, out, "embed", {"--model": model, "--data": source.data})
    else:
        for name, value in (("--data SPEC", source.data), ("--out FILE or DIR", out)):
            if value is None:
                raise ConfigError(f"embed needs {name}: vitrail embed --data photos/ --out features.parquet.")
        assert source.data is not None
        assert out is not None
        check_out(out)
        parse_ints(spec.layer, "--layer")  # a wrong option is an error before torch is loaded
        placed = loading.for_driver() if bulk.on else loading
        vit = open_model(model, require_classes=False, require_network=False, **placed.load_options)
        from vitrail.bulk.running import embed as run
        from vitrail.config import DataConfig

        with show_images("embedding") as progress:
            result = run(
                model_source(model, loading.load_options),
                DataConfig(source=source.data, root=source.root),
                out,
                opened=vit,
                split=split,
                spec=spec.to_spec(),
                dtype=feature_dtype,
                normalize=normalize,
                batch_size=batch_size,
                device=loading.device,
                **bulk.run_options,
                **progress,
            )
    print_result(result, f"{result.width} features each ({result.features})", as_json, source.skip_bad)


def check_out(out: Path) -> None:
    """Raise ConfigError for the name of a file of another kind."""
    if out.suffix and out.suffix.lower() not in (".parquet", ".pq") and not out.is_dir():
        raise ConfigError(
            f"--out {out}: expected a .parquet file or a folder; try {out.with_suffix('.parquet').name} or "
            f"{out.with_suffix('').name}."
        )
