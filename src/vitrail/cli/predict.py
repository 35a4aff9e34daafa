"""`vitrail predict`: classify images."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.bulk_options import BulkOptions, join_folders, print_result, show_images
from vitrail.cli.console import one_line, print_error, print_note, progress_bar
from vitrail.cli.embed import check_out
from vitrail.cli.model_options import BatchSize, LabelFile, ModelSpec, model_source, open_with_engine
from vitrail.cli.option_groups import (
    CheckpointOptions,
    DataOptions,
    DeviceOptions,
    EngineOptions,
    InputOptions,
    with_option_groups,
)
from vitrail.cli.options import Json
from vitrail.errors import ConfigError, NotFoundError, VitrailError
from vitrail.runtime import escape_control

if TYPE_CHECKING:
    from vitrail.model import Model
    from vitrail.predictions import Prediction

MAX_LISTED_ERRORS = 10
"""Unreadable images listed one by one on standard error; further ones are only counted."""


@dataclass
class Row:
    """Predictions for one image, or the error that occurred when reading it."""

    path: Path
    predictions: list[Prediction] = field(default_factory=list)
    error: str = ""
    logits: list[float] | None = None


_IMAGE = typer.Argument(metavar="IMAGE", help="Image files, folders, or quoted patterns ('photos/**/*.jpg').")
Images = Annotated[list[str], _IMAGE]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE|DIR",
        help="Write a CSV file, or JSON if the name ends in .json. With --data: a Parquet file, or a folder of parts.",
    ),
]


@with_option_groups
def predict(
    images: Annotated[list[str] | None, _IMAGE] = None,
    model: ModelSpec = None,
    source: DataOptions = DataOptions(),
    split: Annotated[
        str, typer.Option(metavar="NAME", help="With --data: train, validation, test, or all splits.")
    ] = "all",
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of classes to show.")] = 5,
    labels: LabelFile = None,
    inputs: InputOptions = InputOptions(),
    checkpoint: CheckpointOptions = CheckpointOptions(),
    batch_size: BatchSize = 32,
    device: DeviceOptions = DeviceOptions(),
    engine: EngineOptions = EngineOptions(),
    out: Out = None,
    bulk: BulkOptions = BulkOptions(),
    as_json: Json = False,
    logits: Annotated[bool, typer.Option("--logits", help="With --json: include the logits.")] = False,
) -> None:
    """Classify images. Prints a list for files, and CSV for a folder or a pattern.

    vitrail predict photos/ --model MODEL

    With --data, the best classes of every image of a data set are written to a Parquet file or a folder of parts, which
    several machines can compute: --shard 1/8, or --on ray. The same command continues after an interruption.
    """
    options = {"labels": labels, **inputs.load_options, **checkpoint.load_options}  # checked before the images
    if source.data is not None or bulk != BulkOptions():
        if logits or images:
            raise ConfigError("--data SPEC writes the best classes; leave out IMAGE and --logits.")
        _predict_data(model, source, split, top, batch_size, out, bulk, options, engine, device, as_json)
        return
    if not images:
        raise typer.BadParameter("Missing argument 'IMAGE'.")
    if source.root is not None or split != "all":
        raise ConfigError("--root and --split need --data SPEC; leave them out, or pass the images with --data.")
    as_json = as_json or (out is not None and out.suffix.lower() == ".json")
    if logits and not as_json:
        raise ConfigError("--logits needs --json.")
    if out is not None:
        check_destination(out)
    paths, many = find_images(images)
    vit = open_with_engine(model, engine, device, **options)
    rows = _Rows(vit, paths, batch_size, top, logits, bar=out is not None or not sys.stdout.isatty())
    top = min(top, vit.config.num_classes)
    text = _json(rows) if as_json else _csv(rows, top) if many or out is not None else _listing(rows)
    if out is not None:
        write_output(out, "".join(text))
        print_note(f"wrote predictions for {len(paths) - rows.unreadable.count} of {len(paths)} images to {out}.")
    else:
        print_text(text)
    rows.unreadable.exit_if_any(len(paths), skip_bad=source.skip_bad)


def _predict_data(
    model: str | None,
    source: DataOptions,
    split: str,
    top: int,
    batch_size: int,
    out: Path | None,
    bulk: BulkOptions,
    options: dict[str, Any],
    engine: EngineOptions,
    device: DeviceOptions,
    as_json: bool,
) -> None:
    """Write the best classes of every image of a data set."""
    if bulk.join:
        result = join_folders(bulk, out, "predict", {"--model": model, "--data": source.data})
    else:
        if source.data is None or out is None:
            raise ConfigError("predict needs --data SPEC and --out DIR: vitrail predict --data photos/ --out classes/.")
        check_out(out)
        if bulk.on and engine.engine is not None:
            raise ConfigError(f"--engine {engine.engine} with --on ray: pass the exported file as --model instead.")
        vit = open_with_engine(model, engine, device.for_driver() if bulk.on else device, **options)
        from vitrail.bulk.running import predict as run
        from vitrail.config import DataConfig

        with show_images("predicting") as progress:
            result = run(
                model_source(model, {**options, **device.load_options}),
                DataConfig(source=source.data, root=source.root),
                out,
                opened=vit,
                split=split,
                top=top,
                batch_size=batch_size,
                device=device.device,
                **bulk.run_options,
                **progress,
            )
    print_result(result, f"the {result.width} best classes of each", as_json, source.skip_bad)


class UnreadableImages:
    """Reports images that cannot be read, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def report(self, reason: str) -> None:
        self.count += 1
        if self.count <= MAX_LISTED_ERRORS:
            print_error(reason)
        elif self.count == MAX_LISTED_ERRORS + 1:
            print_error("further unreadable images are counted but not listed.")

    def exit_if_any(self, num_images: int, *, skip_bad: bool = False) -> None:
        """Exit with status 1, after a summary for several images, unless all could be read or `skip_bad` is set."""
        if self.count and num_images > 1:
            print_error(f"{self.count} of {num_images} images could not be read.")
        if self.count and not skip_bad:
            raise typer.Exit(1)


class _Rows:
    """Iterates over the rows in input order as they are computed; reports unreadable images."""

    def __init__(self, vit: Model, paths: list[Path], batch_size: int, top: int, logits: bool, bar: bool) -> None:
        self.vit, self.paths, self.batch_size, self.top, self.logits = vit, paths, batch_size, top, logits
        self.bar = bar and len(paths) > batch_size
        self.unreadable = UnreadableImages()

    def __iter__(self) -> Iterator[Row]:
        with progress_bar(self.bar) as bar:
            task = bar.add_task("predicting", total=len(self.paths))
            for path, answer in zip(self.paths, self.vit.stream(self.paths, self.batch_size), strict=True):
                if isinstance(answer, VitrailError):
                    self.unreadable.report(str(answer))
                    yield Row(path, error=str(answer))
                else:
                    ranked = self.vit.top_predictions(answer[None], self.top)[0]
                    yield Row(path, ranked, logits=answer.tolist() if self.logits else None)
                bar.advance(task)


def find_images(given: Sequence[str]) -> tuple[list[Path], bool]:
    """The image files in a stable order without duplicates, and whether a folder or a pattern was given.

    A missing file stays in the list and is reported as unreadable later; NotFoundError if none of them exists.
    """
    found: list[Path] = []
    many = False
    for text in given:
        path = Path(text).expanduser()
        if path.is_dir():
            found, many = found + _images_in(path), True
        elif not path.exists() and glob.has_magic(text):
            found, many = found + _files_matching(text), True
        else:
            found.append(path)
    if not any(os.path.lexists(path) for path in found):
        raise NotFoundError(f"no such image or folder: {', '.join(map(str, found[:3]))} (in {Path.cwd()}).")
    return list(dict.fromkeys(found)), many


def _images_in(folder: Path) -> list[Path]:
    """Images in a folder and its subfolders, except hidden files (macOS puts ._photo.jpg beside photo.jpg)."""
    suffixes = _suffixes()
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
    if not found:
        raise NotFoundError(
            f"no images in the folder {folder} or its subfolders (.jpg, .png, .webp and other image files)."
        )
    return found


def _files_matching(pattern: str) -> list[Path]:
    matched = sorted(map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)))
    files = [path for path in matched if path.is_file()]
    if not files:
        raise NotFoundError(
            f"{pattern!r} matches {'only folders; name one without the pattern' if matched else 'nothing'}."
        )
    return files


def _suffixes() -> set[str]:
    """Extensions that Pillow opens, also through plugins (decode reports a missing one); no documents or videos."""
    from PIL import Image

    from vitrail.data.decode import SCRIPT_FORMATS

    Image.init()
    known = Image.registered_extensions().items()
    return {s for s, kind in known if kind in Image.OPEN and kind not in {"PDF", "MPEG", *SCRIPT_FORMATS}} | {
        ".heic",
        ".heif",
        ".avif",
        ".jxl",
    }


def _listing(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if not row.error:
            yield one_line(row.path) + "".join(
                one_line(f"  {100 * p.score:5.1f} %  {p.label}") for p in row.predictions
            )


def _csv(rows: Iterable[Row], top: int) -> Iterator[str]:
    """Columns: path; label, score and index of each class; error."""
    from vitrail.data.csv_escape import csv_line

    numbers = [""] if top == 1 else [f"_{n}" for n in range(1, top + 1)]
    yield csv_line(["path", *(f"{what}{n}" for n in numbers for what in ("label", "score", "index")), "error"])
    for row in rows:
        cells = [cell for p in row.predictions for cell in (p.label, f"{p.score:.6f}", p.index)]
        yield csv_line([row.path, *cells, *[""] * (3 * top - len(cells)), row.error])


def _json(rows: Iterable[Row]) -> Iterator[str]:
    """A JSON list with one object per image."""
    return json_list(_entry(row) for row in rows)


def _entry(row: Row) -> dict[str, Any]:
    predictions = {"error": row.error} if row.error else {"predictions": [asdict(p) for p in row.predictions]}
    return {"path": str(row.path)} | predictions | ({} if row.logits is None else {"logits": row.logits})


def json_list(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A JSON list, one object at a time."""
    before = "[\n"
    for entry in entries:
        yield before + json.dumps(entry)
        before = ",\n"
    yield "\n]\n"


def print_text(text: Iterable[str]) -> None:
    """Write text to standard output as it comes; names from files cannot control a terminal."""
    for piece in text:
        # color=True: otherwise click strips escape sequences from names in files and pipes.
        typer.echo(escape_control(piece) if sys.stdout.isatty() else piece, nl=False, color=True)


def check_destination(path: Path) -> None:
    """Raise ConfigError if `path` cannot be written, before any work is done."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; expected a file name.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"--out {path}: {above} is a file, not a folder.")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"--out {path}: no permission to write in {above}; choose another folder.")


def write_output(path: Path, text: str) -> None:
    from vitrail.storage.atomic_write import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text, overwrite=True)
