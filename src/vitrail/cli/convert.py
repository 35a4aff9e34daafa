"""`vitrail convert`: any format to any other that can express it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.console import err, note
from vitrail.cli.options import Family, Json, Section, Settings, settings
from vitrail.errors import CheckpointError, NotFound, nearest

if TYPE_CHECKING:
    from vitrail.models import Net
    from vitrail.weights.card import Card

Source = Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder, a model's name or a hub id.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="A folder or a file, as the format has it.")]
To = Annotated[
    str,
    typer.Option(
        "--to", metavar="FORMAT", help="vitrail, timm, huggingface, torchvision, google, big_vision or facebook."
    ),
]


def convert(
    src: Source,
    dst: Target,
    to: To = "vitrail",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is there, once the new one is complete.")
    ] = False,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Write even where the other library computes slightly otherwise.")
    ] = False,
    section: Section = None,
    family: Family = None,
    changes: Settings = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of any format in another, exactly; then read it back and compare every tensor."""
    with err.status(f"reading {src}"):
        from vitrail.config import ViTConfig
        from vitrail.runtime import say
        from vitrail.weights import checkpoint
        from vitrail.weights.locate import locate

    formats = {f.name for f in checkpoint.FORMATS}
    if to not in formats:
        raise NotFound(f"no format is called {to!r}{nearest(to, formats)}")
    if not overwrite and (dst.is_file() or (dst.is_dir() and any(dst.iterdir()))):
        raise CheckpointError(f"{dst} exists already; choose another name, or add --overwrite to replace it.")
    given = settings(changes)
    found = locate(src)  # has a progress bar of its own where it downloads
    with err.status(f"reading {src}"):
        net, card = checkpoint.read(found.path, section=section, family=family, dtype=None, changes=given)
    if found.origin:
        card = card.but(origin=found.origin)
    say([*found.notes, *card.notes])
    with err.status(f"writing {dst}"):
        notes = checkpoint.write(net, card, dst, to=to, overwrite=overwrite, approximate=approximate)
    say(notes)
    with err.status(f"reading {dst} back"):
        told = {"heads": card.config.heads} if isinstance(card.config, ViTConfig) else {}  # a bare file may not say
        again, back = checkpoint.read(dst, dtype=None, changes=told)
    count = _compared(net, again, dst)
    drift, lost = checkpoint.format_for(to, card).drift(card), _lost(card, back)
    for what in drift:
        note(f"{to}'s format cannot state {what}; its library computes slightly different numbers.")
    for what in lost:
        note(f"{to}'s format does not carry {what}; who reads it must be told.")
    if as_json:
        report = {"source": src, "destination": str(dst), "format": to, "tensors": count, "identical": True}
        typer.echo(json.dumps(report | {"drift": drift, "lost": lost}))
    else:
        typer.echo(f"{dst}: {to} format, {count} tensors, identical when read back.")


def _compared(net: Net, again: Net, dst: Path) -> int:
    """How many tensors there are, all of them the same in both."""
    import torch

    ours, back = net.state_dict(), again.state_dict()
    differ = sorted(ours.keys() ^ back.keys())
    for name in ours.keys() & back.keys():
        a, b = ours[name], back[name]
        if a.shape != b.shape or not torch.equal(a, b.to(a.dtype)):
            differ.append(name)
    if differ:
        raise CheckpointError(f"{dst} reads back differently: {', '.join(differ[:8])}; please report this.")
    return len(ours)


def _lost(card: Card, back: Card) -> list[str]:
    """What the file does not tell its next reader, whose guess is another."""
    lost = []
    if card.labels is not None and back.labels != card.labels:
        lost.append("class names")
    ours, theirs = card.preprocess.to_dict(), back.preprocess.to_dict()
    differ = [f"{name}={value}" for name, value in ours.items() if name != "centre" and theirs[name] != value]
    if differ:
        lost.append(f"preprocessing ({', '.join(differ)})")
    before, after = (getattr(c.config, "resample", "") for c in (card, back))
    if before != after and getattr(card.config, "position", "").startswith("learned"):
        lost.append(f"how positions are resampled for other sizes (it was {before}, there {after})")
    return lost
