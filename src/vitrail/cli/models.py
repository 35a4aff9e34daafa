"""`vitrail models`: what can be built and loaded."""

from __future__ import annotations

import fnmatch
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vitrail.cli.console import out
from vitrail.errors import NotFound, nearest

if TYPE_CHECKING:
    from vitrail.models.published import Variant


def models(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name, or a pattern such as 'ViT-*@384'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the models: size, arithmetic, public checkpoint, and what each family was checked against."""
    from vitrail.models.families import FAMILIES
    from vitrail.models.published import VARIANTS

    chosen = [v for v in VARIANTS if pattern is None or _matches(v, pattern)]
    if not chosen:
        raise NotFound(f"no model matches {pattern!r}{nearest(str(pattern), [v.name for v in VARIANTS])}")
    rows = [_row(v) for v in chosen]
    families = {v.family: FAMILIES[v.family] for v in chosen}
    if as_json:
        checked = {name: {"title": f.title, "checked": f.checked} for name, f in families.items()}
        typer.echo(json.dumps({"models": rows, "families": checked}, indent=2))
        return
    table = Table("model", box=None, header_style="bold", pad_edge=False)
    for title in ("parameters", "GFLOPs", "image"):
        table.add_column(title, justify="right")
    table.add_column("weights", overflow="fold")
    for row in rows:
        size = "x".join(map(str, row["image"])) if len(set(row["image"])) > 1 else str(row["image"][0])
        weights = row["checkpoint"] or "[dim]none public[/]"
        table.add_row(row["name"], f"{row['parameters']:,}", f"{row['flops'] / 1e9:,.1f}", size, weights)
    out.print(table)
    out.print()
    listed = Table("family", "what", "checked against", box=None, header_style="bold", pad_edge=False)
    for name, family in families.items():
        listed.add_row(name, family.title, family.checked or "[yellow]not yet[/]")
    out.print(listed)
    if len(chosen) == 1:
        out.print()
        _detail(chosen[0])


def _matches(variant: Variant, pattern: str) -> bool:
    names = [n.lower() for n in (variant.name, variant.checkpoint, *variant.aliases)]
    pattern = pattern.lower()
    if pattern in names:
        return True
    if any(c in pattern for c in "*?["):
        return any(fnmatch.fnmatchcase(n, pattern) for n in names)
    return any(pattern in n for n in names)


def _row(variant: Variant) -> dict[str, Any]:
    from vitrail.config import pair
    from vitrail.models.flops import flops, parameters
    from vitrail.models.variants import parse

    config = parse(variant.name)
    return {
        "name": variant.name,
        "family": variant.family,
        "parameters": parameters(config),
        "flops": flops(config),
        "image": list(pair(config.image)),
        "checkpoint": variant.checkpoint or None,
        "aliases": list(variant.aliases),
    }


def _detail(variant: Variant) -> None:
    from vitrail.models.variants import parse

    out.print(f"also known as  {', '.join(variant.aliases) or '-'}", markup=False)
    values = parse(variant.name).to_dict()
    shown = "  ".join(f"{k}={v}" for k, v in values.items())
    out.print(f"config         {shown}", markup=False)
