"""`vitrail explain`: what a model looks at in images, as figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import one_line, problem, progress
from vitrail.cli.model_options import Channels, Device, Dtype, ImageSize, LabelFile, ModelSpec, open_model
from vitrail.cli.options import Family, Formats, Json, Section, Settings, parse_list, parse_settings, parse_size
from vitrail.cli.predict import Images, find_images
from vitrail.errors import ImageError, NotFound

if TYPE_CHECKING:
    from vitrail.api.looking import Look


def explain(
    images: Images,
    model: ModelSpec = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the figures go.")] = Path("explained"),
    methods: Annotated[
        str | None,
        typer.Option("--method", metavar="NAMES", help="Some of rollout,gradient,attention,occlusion; else all."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="The class to explain, by name or number.")
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option("--layer", metavar="N", help="Layers whose heads are shown: 12, or 1,6,12, or -1, the last."),
    ] = None,
    query: Annotated[
        str,
        typer.Option(
            "--query", metavar="WHO", help="Whose attention: read, class, 'register 1', or ROW,COLUMN, from 1."
        ),
    ] = "read",
    trust: Annotated[
        bool, typer.Option("--trust", help="Add deletion and insertion curves: which explanation to believe.")
    ] = False,
    formats: Formats = "png",
    labels: LabelFile = None,
    image_size: ImageSize = None,
    channels: Channels = None,
    section: Section = None,
    family: Family = None,
    changes: Settings = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Show what a model looks at: rollout, attention of every head, what speaks for a class, what is missed."""
    kinds, endings, layers = parse_list(methods), parse_list(formats) or (), _numbers(layer or "-1")
    told = parse_settings(changes)
    own: dict[str, Any] = {"image_size": parse_size(image_size), "channels": channels, "labels": labels}
    paths, _ = find_images(images)
    vit = open_model(
        model, overrides=told, require_classes=False, section=section, family=family, device=device, dtype=dtype, **own
    )
    from vitrail.explain.attention import attentive, layer_number, parse_query
    from vitrail.explain.canvas import check_formats

    check_formats(endings)
    if layer is not None:  # before the work, not after it
        for number in layers:
            layer_number(attentive(vit.net), number)

    rows: list[dict[str, Any]] = []
    failed = 0
    with progress(len(paths) > 1 or trust) as bar:
        for path, stem in bar.track([*zip(paths, stems(paths), strict=True)], description="explaining"):
            try:
                look = vit.explain(path, methods=kinds, target=target, query=parse_query(query), trust=trust)
            except (ImageError, NotFound) as error:
                problem(str(error))
                failed += 1
                continue
            written = look.save(out, endings, layers, stem)
            rows.append(_row(path, look, written))
            if not as_json:
                for text in _lines(path, look, written):
                    typer.echo(one_line(text), nl=False)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if failed:
        if len(paths) > 1:
            problem(f"{failed} of {len(paths)} images could not be read.")
        raise typer.Exit(1)


def _row(path: Path, look: Look, written: list[Path]) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(path), "files": [str(f) for f in written]}
    if look.target is not None:
        row |= {"label": look.target.label, "index": look.target.index, "score": look.target.score}
    if look.faithful:
        row["faithfulness"] = {
            kind: {"deletion": both.deletion.area, "insertion": both.insertion.area}
            for kind, both in look.faithful.items()
        }
    return row


def _lines(path: Path, look: Look, written: list[Path]) -> Iterator[str]:
    said = f"  {100 * look.target.score:.1f} % {look.target.label}" if look.target is not None else ""
    yield f"{path}{said}"
    yield from (f"  {file}" for file in written)
    if look.faithful:
        best = max((k for k in look.faithful if k != "random"), key=lambda k: look.faithful[k].gain)
        chance = look.faithful["random"].gain
        most = f"most faithful here: {best}, {look.faithful[best].gain:+.3f} (insertion less deletion)"
        yield f"  {most}; a random order {chance:+.3f}"


def stems(paths: Sequence[Path]) -> list[str]:
    """What the files of each image are called: its name, with as much of its folders as tells it from the others."""
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
        raise typer.BadParameter(f"--layer wants numbers such as 12 or 1,6,12, got {text!r}") from None
