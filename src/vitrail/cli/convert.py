"""`vitrail convert`: any format to any other that can express it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.console import err, out
from vitrail.errors import CheckpointError

Source = Annotated[str, typer.Argument(help="A file, a folder, a model's name or a hub id.")]
Target = Annotated[Path, typer.Argument(help="A folder or a file, as the format has it.")]
To = Annotated[
    str, typer.Option("--to", help="vitrail, timm, huggingface, torchvision, google, big_vision or facebook.")
]


def convert(
    src: Source,
    dst: Target,
    to: To = "vitrail",
    overwrite: Annotated[bool, typer.Option(help="Replace what is there, once the new one is complete.")] = False,
    approximate: Annotated[
        bool, typer.Option(help="Write even where the other library's fixed conventions differ slightly.")
    ] = False,
    section: Annotated[str | None, typer.Option(help="Part of a training file to read, such as teacher.")] = None,
    family: Annotated[str | None, typer.Option(help="What a bare file cannot say: DeiT, DINO, MAE, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Read a checkpoint of any format and write it in another, exactly, then read it back and compare."""
    from vitrail.api import locate
    from vitrail.runtime import say
    from vitrail.weights import checkpoint

    path, notes = locate(src)
    with err.status(f"reading {src}"):
        net, card = checkpoint.read(path, section=section, family=family, dtype=None)
    if str(path) != src:
        card = card.but(origin=src)
    say([*notes, *card.notes])
    with err.status(f"writing {dst}"):
        checkpoint.write(net, card, dst, to=to, overwrite=overwrite, approximate=approximate)
    with err.status(f"reading {dst} back"):
        again, _ = checkpoint.read(dst, dtype=None)
    ours, back = net.state_dict(), again.state_dict()
    differ = [n for n in ours if n not in back or not _same(ours[n], back[n])]
    if differ or len(ours) != len(back):
        raise CheckpointError(f"{dst} reads back differently: {', '.join(differ[:8])}; please report this.")
    if as_json:
        report = {"source": src, "destination": str(dst), "format": to, "tensors": len(ours), "identical": True}
        typer.echo(json.dumps(report))
        return
    out.print(f"{dst}: {to} format, {len(ours)} tensors, identical when read back.", markup=False)


def _same(a: object, b: object) -> bool:
    import torch

    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    return a.shape == b.shape and torch.equal(a, b.to(a.dtype))
