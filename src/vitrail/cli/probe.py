"""`vitrail probe`: measure a model's features with simple classifiers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, print_plain, progress_bar
from vitrail.cli.model_options import BatchSize, ModelSpec, open_model
from vitrail.cli.option_groups import DataOptions, FeatureOptions, LoadOptions, with_option_groups
from vitrail.cli.options import Json, parse_ints
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.evaluation.probing import ProbeResult, ProbeScore

TITLES = {"fewshot": "few-shot", "knn": "k-NN", "logistic": "logistic"}


@with_option_groups
def probe(
    model: ModelSpec = None,
    source: DataOptions = DataOptions(),
    features: Annotated[
        list[Path] | None,
        typer.Option(
            "--features",
            metavar="FILE",
            help="Instead of --model and --data: a file written by vitrail embed; give it twice for train and test.",
        ),
    ] = None,
    method: Annotated[str, typer.Option(metavar="NAME,...", help="fewshot, knn, logistic, or all.")] = "all",
    shots: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Few-shot: images per class. Default: 1,5,10,25, if every class has that many."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Few-shot: number of random subsets to average over.")
    ] = 3,
    k: Annotated[
        str | None, typer.Option("--k", metavar="N,...", help="k-NN: number of neighbors. Default: 20, or all images.")
    ] = None,
    vote: Annotated[
        str, typer.Option(metavar="HOW", help="k-NN: weighted by exp(cosine / 0.07), as in DINO, or uniform.")
    ] = "weighted",
    c: Annotated[
        float | None,
        typer.Option(
            "--c", metavar="C", help="Logistic regression: inverse regularization strength C. Default: searched."
        ),
    ] = None,
    spec: FeatureOptions = FeatureOptions(),
    max_images: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Use at most this many images of each split.")
    ] = None,
    batch_size: BatchSize = 64,
    loading: LoadOptions = LoadOptions(),
    as_json: Json = False,
) -> None:
    """Measure frozen features: fit simple classifiers to the training split and test them on the test split.

    vitrail probe --model MODEL --data cifar10 --method knn
    """
    data = source.data
    if (data is None) == (not features):
        got = "neither" if data is None else "both"
        raise ConfigError(f"probe needs --data SPEC, or --features FILE that vitrail embed wrote; got {got}.")
    if vote not in ("weighted", "uniform"):
        raise ConfigError(f"--vote expects weighted or uniform, got {vote!r}.")
    parse_ints(spec.layer, "--layer")  # a wrong option is an error before torch is loaded
    options = loading.load_options
    given = {
        name: None if text is None else parse_ints(text, option)
        for name, text, option in (("shots", shots, "--shots"), ("ks", k, "--k"))
    }
    with err.status("starting"):
        from vitrail.evaluation.probing import METHODS, ProbeSettings, probe_files
        from vitrail.evaluation.probing import probe as run
    methods = METHODS if method == "all" else tuple(part.strip() for part in method.split(","))
    probe_settings = ProbeSettings(methods=methods, num_seeds=seeds, vote=vote, c=c, **given)  # type: ignore[arg-type]
    if features:
        from vitrail.runtime import pick_device

        found = probe_files(
            features, settings=probe_settings, device=pick_device(loading.device), progress=show_progress
        )
    else:
        from vitrail.config import DataConfig

        vit = open_model(model, require_classes=False, **options)
        config = DataConfig(source=str(data), root=source.root, skip_bad=source.skip_bad)
        found = run(
            vit,
            config,
            settings=probe_settings,
            spec=spec.to_spec(),
            max_images=max_images,
            batch_size=batch_size,
            progress=show_progress,
        )
    if as_json:
        named = {"model": model, "data": data} if not features else {"features": [str(f) for f in features]}
        typer.echo(json.dumps(named | found.to_dict(), indent=2))
    else:
        for part in format_probe(found):
            print_plain(part)


@contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar inside the context."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def format_probe(found: ProbeResult) -> Iterator[RenderableType]:
    """The data, then one classifier per row."""
    images = f"{found.num_train:,} training images, {found.num_test:,} test images, {found.num_classes} classes"
    yield Text(f"{images}\n{found.width} features per image, network frozen\n", style="dim")
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("", "", "accuracy", "95 % interval", ""):
        number = name == "accuracy"  # must not be cut off in a narrow window
        table.add_column(name, no_wrap=number, overflow="fold", justify="right" if number else "left")
    before = ""
    for score in found.scores:
        table.add_row(TITLES[score.method] if score.method != before else "", *_row(score))
        before = score.method
    yield table


def _row(score: ProbeScore) -> tuple[str, str, Text, Text]:
    value = score.accuracy
    spread = "" if score.spread is None else f"± {100 * score.spread:.1f} over {score.details['seeds']} seeds"
    if score.details.get("at_edge"):
        spread = "C is at the edge of the searched range; try others with --c"
    interval = Text(f"{100 * value.low:.1f} to {100 * value.high:.1f}", style="dim")
    return score.name, f"{100 * value.value:.2f} %", interval, Text(spread, style="dim")
