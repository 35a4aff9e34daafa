"""`vitrail predict`: what is in these pictures."""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import err, note, problem, progress
from vitrail.errors import ConfigError, NotFound, VitrailError

if TYPE_CHECKING:
    from vitrail.api import Model, Prediction

SAID = 10
"""So many unreadable pictures are named one by one on standard error."""


@dataclass
class Row:
    """One picture with its classes, or with the reason it could not be read."""

    path: Path
    classes: list[Prediction] = field(default_factory=list)
    error: str = ""
    logits: list[float] | None = None


def predict(
    pictures: Annotated[
        list[str],
        typer.Argument(metavar="PICTURE", help="Files, folders, or patterns in quotes ('photos/**/*.jpg')."),
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="A name, a file, a folder or a hub id.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="How many classes to show.")] = 5,
    labels: Annotated[
        str | None, typer.Option(metavar="FILE", help="Class names: one on each line, JSON, or the word imagenet-1k.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Another size: 384, or 288x192 (height x width).")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take pictures as grey (1) or with alpha (4).")
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="What a bare file cannot say: DeiT, DINO, MAE, ...")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Pictures at a time.")] = 32,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps.")] = "auto",
    to: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write a CSV here; JSON if it ends in .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    logits: Annotated[bool, typer.Option("--logits", help="With --json: every raw output too.")] = False,
) -> None:
    """Name what is in pictures. Files give a list for people; a folder or a pattern gives a CSV."""
    if model is None:
        raise ConfigError(
            "no model ships with this version: pass --model with a name such as ViT-Ti/16 (see `vitrail models`), "
            "a file of weights, a folder or a hub id."
        )
    as_json = as_json or (to is not None and to.suffix.lower() == ".json")
    if logits and not as_json:
        raise ConfigError("--logits gives every output of every picture: add --json.")
    if to is not None:
        _check_destination(to)
    size = _size(image)
    paths, many = find_pictures(pictures)

    from vitrail.api import load, locate  # imports torch: not before the arguments are known to be good

    found = locate(model)  # has a progress bar of its own where it downloads
    with err.status(f"loading {model}"):
        vit = load(found, labels=labels, image=size, channels=channels, family=family, device=device)
    vit.check_classes()
    if vit.labels is None:
        note(
            "the checkpoint does not name its classes: pass --labels FILE, or imagenet-1k where that is what they are."
        )
    rows = _Rows(vit, paths, batch, top, logits, bar=to is not None or not sys.stdout.isatty())
    top = min(top, vit.config.classes)
    text = _json(rows) if as_json else _csv(rows, top) if many or to is not None else _listing(rows)
    if to is not None:
        _write(to, "".join(text))
        note(f"{to} has {len(paths) - rows.failed} of {len(paths)} pictures.")
    else:
        for piece in text:
            typer.echo(piece, nl=False)
    if rows.failed and len(paths) > 1:
        problem(f"{rows.failed} of {len(paths)} pictures could not be read.")
    if rows.failed:
        raise typer.Exit(1)


class _Rows:
    """The pictures' rows in order, as they are ready; the unreadable are counted and named."""

    def __init__(self, vit: Model, paths: list[Path], batch: int, top: int, logits: bool, bar: bool) -> None:
        self.vit, self.paths, self.batch, self.top, self.logits = vit, paths, batch, top, logits
        self.bar = bar and len(paths) > batch
        self.failed = 0

    def __iter__(self) -> Iterator[Row]:
        with progress(self.bar) as bar:
            task = bar.add_task("predicting", total=len(self.paths))
            for path, answer in zip(self.paths, self.vit.stream(self.paths, self.batch), strict=True):
                if isinstance(answer, VitrailError):
                    yield self._failure(path, str(answer))
                else:
                    ranked = self.vit.ranked(answer[None], self.top)[0]
                    yield Row(path, ranked, logits=answer.tolist() if self.logits else None)
                bar.advance(task)

    def _failure(self, path: Path, reason: str) -> Row:
        self.failed += 1
        if self.failed <= SAID:
            problem(reason)
        elif self.failed == SAID + 1:
            problem("more pictures cannot be read; the rest are counted.")
        return Row(path, error=reason)


def find_pictures(given: Sequence[str]) -> tuple[list[Path], bool]:
    """Files in a stable order, each once, and whether a folder or a pattern was asked for.

    A file that is not there stays in the list, to be named among the unreadable, unless nothing is.
    """
    found: list[Path] = []
    many = False
    for text in given:
        path = Path(text).expanduser()
        if path.is_dir():
            found, many = found + _inside(path), True
        elif not path.exists() and glob.has_magic(text):
            found, many = found + _matching(text), True
        else:
            found.append(path)
    if not any(os.path.lexists(path) for path in found):
        raise NotFound(f"no such picture or folder: {', '.join(map(str, found[:3]))} (looked from {Path.cwd()}).")
    return list(dict.fromkeys(found)), many


def _inside(folder: Path) -> list[Path]:
    """Pictures in a folder and those in it, without hidden ones: macOS leaves ._photo.jpg beside photo.jpg."""
    suffixes = _suffixes()
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
    if not found:
        raise NotFound(
            f"no pictures in the folder {folder}: looked for .jpg, .png, .webp and others, in subfolders too."
        )
    return found


def _matching(pattern: str) -> list[Path]:
    matched = sorted(map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)))
    files = [path for path in matched if path.is_file()]
    if not files:
        raise NotFound(f"{pattern!r} matches {'only folders; name one without the pattern' if matched else 'nothing'}.")
    return files


def _suffixes() -> set[str]:
    """What Pillow opens, alone or with a plugin whose absence decode explains; not programs and films."""
    from PIL import Image

    from vitrail.data.decode import PROGRAMS

    Image.init()
    known = Image.registered_extensions().items()
    return {s for s, kind in known if kind in Image.OPEN and kind not in {"PDF", "MPEG", *PROGRAMS}} | {
        ".heic",
        ".heif",
        ".avif",
        ".jxl",
    }


def _listing(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if not row.error:
            yield f"{row.path}\n" + "".join(f"  {100 * p.score:5.1f} %  {p.label}\n" for p in row.classes)


def _csv(rows: Iterable[Row], top: int) -> Iterator[str]:
    """path, then label, score and index of each class, then the reason where a picture failed."""
    numbers = [""] if top == 1 else [f"_{n}" for n in range(1, top + 1)]
    yield _line(["path", *(f"{what}{n}" for n in numbers for what in ("label", "score", "index")), "error"])
    for row in rows:
        cells = [cell for p in row.classes for cell in (p.label, f"{p.score:.6f}", p.index)]
        yield _line([row.path, *cells, *[""] * (3 * top - len(cells)), row.error])


def _line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _json(rows: Iterable[Row]) -> Iterator[str]:
    """A list, one entry for each picture."""
    before = "[\n"
    for row in rows:
        entry: dict[str, Any] = {"path": str(row.path)}
        if row.error:
            entry["error"] = row.error
        else:
            entry["predictions"] = [asdict(p) for p in row.classes]
        if row.logits is not None:
            entry["logits"] = row.logits
        yield before + json.dumps(entry)
        before = ",\n"
    yield "\n]\n"


def _size(text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(p.isdecimal() and int(p) > 0 for p in parts) or len(parts) > 2:
        raise ConfigError(f"--image wants 384 or 384x288 (height x width), got {text!r}.")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def _check_destination(path: Path) -> None:
    """Before the work, not after it."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; give the name of a file in it.")
    if not path.expanduser().absolute().parent.is_dir():
        raise NotFound(f"--out {path}: there is no folder {path.parent}; make it first.")


def _write(path: Path, text: str) -> None:
    from vitrail.weights.write import write_text

    write_text(path, text, overwrite=True)
