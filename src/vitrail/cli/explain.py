"""`vitrail explain`: figures of attention rollout, attention maps, gradients and occlusion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import one_line, print_error, progress_bar
from vitrail.cli.model_options import LabelFile, ModelSpec, open_model
from vitrail.cli.option_groups import LoadOptions, with_option_groups
from vitrail.cli.options import Formats, Json, OutFolder, names_option, parse_list
from vitrail.cli.predict import Images, find_images
from vitrail.errors import ImageError, NotFoundError

if TYPE_CHECKING:
    from vitrail.explain.explanation import Explanation


@with_option_groups
def explain(
    images: Images,
    model: ModelSpec = None,
    out: OutFolder = Path("explained"),
    methods: Annotated[str | None, names_option("--method", "rollout,gradient,attention,occlusion")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--class", metavar="CLASS", help="Class to explain, by name or index. Default: the top prediction."
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option("--layer", metavar="N", help="Layers to draw, counted from 1: 12 or 1,6,12; -1 is the last."),
    ] = None,
    query: Annotated[
        str,
        typer.Option(
            "--query",
            metavar="TOKEN",
            help="Query token: pooled (input of the head), class, 'register 1', or a patch as ROW,COLUMN, counted "
            "from 1.",
        ),
    ] = "pooled",
    faithfulness: Annotated[
        bool, typer.Option("--faithfulness", help="Add deletion and insertion curves, which measure faithfulness.")
    ] = False,
    formats: Formats = "png",
    labels: LabelFile = None,
    loading: LoadOptions = LoadOptions(),
    as_json: Json = False,
) -> None:
    """Explain predictions with attention rollout, attention maps, gradients and occlusion; write figures."""
    kinds, endings, layers = parse_list(methods), parse_list(formats) or (), _numbers(layer or "-1")
    options = loading.load_options
    paths, _ = find_images(images)
    vit = open_model(model, require_classes=False, labels=labels, **options)
    from vitrail.explain.attention import layer_index, parse_query
    from vitrail.explain.canvas import check_formats

    check_formats(endings)
    if layer is not None:  # report a wrong number before any work is done
        for number in layers:
            layer_index(vit.net, number)

    rows: list[dict[str, Any]] = []
    failed = 0
    with progress_bar(len(paths) > 1 or faithfulness) as bar:
        for path, stem in bar.track([*zip(paths, stems(paths), strict=True)], description="explaining"):
            try:
                explanation = vit.explain(
                    path, methods=kinds, target=target, query=parse_query(query), faithfulness=faithfulness
                )
            except (ImageError, NotFoundError) as error:
                print_error(str(error))
                failed += 1
                continue
            written = explanation.save(out, endings, layers, stem)
            rows.append(_row(path, explanation, written))
            if not as_json:
                for text in _lines(path, explanation, written):
                    typer.echo(one_line(text), nl=False)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if failed:
        if len(paths) > 1:
            print_error(f"{failed} of {len(paths)} images could not be read.")
        raise typer.Exit(1)


def _row(path: Path, explanation: Explanation, written: list[Path]) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(path), "files": [str(f) for f in written]}
    if explanation.target is not None:
        row |= {"label": explanation.target.label, "index": explanation.target.index, "score": explanation.target.score}
    if explanation.faithfulness:
        row["faithfulness"] = {
            kind: {"deletion": both.deletion.area, "insertion": both.insertion.area}
            for kind, both in explanation.faithfulness.items()
        }
    return row


def _lines(path: Path, explanation: Explanation, written: list[Path]) -> Iterator[str]:
    prediction = (
        f"  {100 * explanation.target.score:.1f} % {explanation.target.label}" if explanation.target is not None else ""
    )
    yield f"{path}{prediction}"
    yield from (f"  {file}" for file in written)
    if explanation.faithfulness:
        best = max(
            (k for k in explanation.faithfulness if k != "random"), key=lambda k: explanation.faithfulness[k].gain
        )
        random = explanation.faithfulness["random"].gain
        most = f"most faithful: {best}, {explanation.faithfulness[best].gain:+.3f} (insertion minus deletion)"
        yield f"  {most}; random order: {random:+.3f}"


def stems(paths: Sequence[Path]) -> list[str]:
    """A unique file name stem per image: its name, with parent folders where names are ambiguous."""
    names = [path.with_suffix("") for path in paths]
    for parts in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        found = ["-".join(name.parts[-parts:]).replace("/", "") for name in names]
        if len(set(found)) == len(found):
            return found
    return [f"{path.stem}-{path.suffix.removeprefix('.')}-{i + 1}" for i, path in enumerate(paths)]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--layer expects numbers such as 12 or 1,6,12, got {text!r}") from None
