"""`vitrail predict`: what is in these pictures."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import err, out, problem, progress
from vitrail.errors import ConfigError, ImageError, NotFound

if TYPE_CHECKING:
    from vitrail.api import Model, Prediction

    Row = tuple[Path, list[Prediction], str]


def predict(
    pictures: Annotated[list[str], typer.Argument(help="Files, folders, patterns in quotes ('photos/**/*.jpg').")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="A name, file, folder or hub id.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to show.")] = 5,
    labels: Annotated[str | None, typer.Option(help="Class names: a file, or imagenet-1k.")] = None,
    image: Annotated[str | None, typer.Option(help="Another size: 384, or 384x288.")] = None,
    family: Annotated[str | None, typer.Option(help="What a bare file cannot say: DeiT, DINO, MAE, ...")] = None,
    logits: Annotated[bool, typer.Option(help="Give the raw outputs too (JSON only).")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    to: Annotated[Path | None, typer.Option("--out", "-o", help="Write the CSV or JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Name what is in pictures. Several files give a list; a folder or a pattern gives a CSV."""
    from vitrail.api import load

    if model is None:
        raise ConfigError(
            "no model ships with this version: pass --model with a name such as ViT-Ti/16 (see vitrail models), "
            "a file of weights, a folder or a hub id."
        )
    if logits and not as_json:
        raise ConfigError("--logits prints every output of every picture: add --json.")
    paths, many = find_pictures(pictures)
    with err.status(f"loading {model}"):
        vit = load(model, labels=labels, image=_size(image), family=family, device=device)
    rows = _rows(vit, paths, top, batch, logits)
    if as_json:
        text, failed = _json(rows)
    elif many or to is not None:
        text, failed = _csv(rows, top)
    else:
        text, failed = _listing(rows)
    if to is not None:
        _write(to, text)
        out.print(f"{to}: {len(paths)} pictures.", markup=False)
    else:
        typer.echo(text, nl=False)
    if failed:
        problem(f"{failed} of {len(paths)} pictures could not be read.")
        raise typer.Exit(1)


def find_pictures(given: Sequence[str]) -> tuple[list[Path], bool]:
    """Files in a stable order, and whether a folder or a pattern was asked for."""
    found: list[Path] = []
    many = False
    for text in given:
        path = Path(text).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in _suffixes())
            if not inside:
                raise NotFound(
                    f"no pictures in the folder {path}; looked for {', '.join(sorted(_suffixes())[:8])}, ..."
                )
            found, many = found + inside, True
        elif path.exists():
            found.append(path)
        elif any(c in text for c in "*?["):
            matched = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
            if not matched:
                raise NotFound(f"nothing matches {text!r}.")
            found, many = found + matched, True
        else:
            raise NotFound(f"no such picture or folder: {text}")
    return list(dict.fromkeys(found)), many


def _suffixes() -> set[str]:
    from PIL import Image

    Image.init()
    return {
        s for s, kind in Image.registered_extensions().items() if kind in Image.OPEN and kind not in ("PDF", "MPEG")
    }


def _rows(vit: Model, paths: list[Path], top: int, batch: int, logits: bool) -> Iterator[tuple[Path, Any, str]]:
    """Each picture with its classes, or with the reason it could not be read."""
    import torch

    with progress() as bar:
        task = bar.add_task("predicting", total=len(paths))
        for start in range(0, len(paths), batch):
            group = paths[start : start + batch]
            ready, reasons = [], {}
            for path in group:
                try:
                    ready.append((path, vit.preprocess(path)))
                except (ImageError, NotFound) as error:
                    reasons[path] = str(error)
            answers: dict[Path, Any] = {}
            if ready:
                values = vit.run(torch.cat([images for _, images in ready]))
                for (path, _), ranked, row in zip(ready, vit.ranked(values, top), values, strict=True):
                    answers[path] = (ranked, row.tolist() if logits else None)
            for path in group:
                yield path, answers.get(path, ([], None)), reasons.get(path, "")
            bar.advance(task, len(group))


def _listing(rows: Iterator[tuple[Path, Any, str]]) -> tuple[str, int]:
    lines, failed = [], 0
    for path, (ranked, _), reason in rows:
        if reason:
            problem(reason)
            failed += 1
            continue
        lines.append(str(path))
        lines += [f"  {100 * p.score:5.1f} %  {p.label}" for p in ranked]
    return "".join(f"{line}\n" for line in lines), failed


def _csv(rows: Iterator[tuple[Path, Any, str]], top: int) -> tuple[str, int]:
    """path, then label, score and index of each class, then the reason where a picture failed."""
    text, failed = io.StringIO(), 0
    writer = csv.writer(text, lineterminator="\n")
    number = [""] if top == 1 else [f"_{n}" for n in range(1, top + 1)]
    writer.writerow(["path", *(f"{what}{n}" for n in number for what in ("label", "score", "index")), "error"])
    for path, (ranked, _), reason in rows:
        cells = [c for p in ranked for c in (p.label, f"{p.score:.6f}", p.index)]
        writer.writerow([path, *cells, *[""] * (3 * top - len(cells)), reason])
        failed += bool(reason)
    return text.getvalue(), failed


def _json(rows: Iterator[tuple[Path, Any, str]]) -> tuple[str, int]:
    results: list[dict[str, Any]] = []
    for path, (ranked, values), reason in rows:
        entry: dict[str, Any] = {"path": str(path)}
        if reason:
            entry["error"] = reason
        else:
            entry["predictions"] = [{"label": p.label, "score": p.score, "index": p.index} for p in ranked]
        if values is not None:
            entry["logits"] = values
        results.append(entry)
    return json.dumps(results, indent=2) + "\n", sum("error" in r for r in results)


def _size(text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(p.isdigit() for p in parts) or len(parts) > 2:
        raise ConfigError(f"--image wants 384 or 384x288 (height x width), got {text!r}.")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def _write(path: Path, text: str) -> None:
    from vitrail.weights.write import write_text

    write_text(path, text, overwrite=True)
