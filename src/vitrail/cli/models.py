"""`vitrail models`: list the models that can be created and loaded."""

from __future__ import annotations

import difflib
import fnmatch
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, out, print_plain
from vitrail.cli.options import Json
from vitrail.cli.settings import print_settings
from vitrail.config import NetConfig
from vitrail.config.overrides import list_settings
from vitrail.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from vitrail.models.families import Family
    from vitrail.models.published_models import PublishedModel
    from vitrail.weights.shipped import ShippedModel

    Listed = PublishedModel | ShippedModel

WIDE = 100
"""Terminal width from which the list includes complete hub ids."""


def models(
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|PATTERN]",
            help="A name, part of a name, or a pattern such as 'ViT-*@384'; other libraries' names work too.",
        ),
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List the settings of one model with their descriptions.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the models: parameters, FLOPs, public weights, and what each family was verified against.

    The name of a single model also shows its settings and its names in other libraries.
    """
    if settings:
        matching = _matching(pattern)
        if len(matching) > 1:
            raise ConfigError(
                f"--settings needs the name of one model, such as ViT-B/16; {len(matching)} models match."
            )
        title = f"Settings of {matching[0].name}; with --set KEY=VALUE they complete a checkpoint.\n"
        print_settings(_config(matching[0]), title, as_json)
        return
    with err.status("counting parameters"):
        from vitrail.models.families import FAMILIES
        from vitrail.weights.shipped import SHIPPED

        chosen = _matching(pattern)
        rows = [_row(v) for v in chosen]
    families = {v.family: FAMILIES[v.family] for v in chosen}
    if as_json:
        verified = {name: {"title": f.title, "verified_against": f.verified_against} for name, f in families.items()}
        typer.echo(json.dumps({"models": rows, "families": verified}, indent=2))
        return
    wide = out.width >= WIDE or len(rows) == 1
    print_plain(_sizes(rows, wide))
    if not wide:
        out.print(
            f"For the hub ids, widen the window to {WIDE} columns or run vitrail models {rows[0]['name']}", style="dim"
        )
    for model in (m for m in chosen if m.name in SHIPPED):
        out.print(f"{model.name} ships with vitrail; commands use it without --model", style="dim")
    out.print()
    print_plain(_families(families))
    if len(chosen) == 1:
        out.print()
        print_plain(_detail(chosen[0]))


def _matching(pattern: str | None) -> list[Listed]:
    """All models, the one with this name, those that match the pattern, or those whose name contains it."""
    from vitrail.models.model_names import find_published
    from vitrail.models.published_models import PUBLISHED_MODELS
    from vitrail.weights.shipped import SHIPPED

    known: list[Listed] = [*PUBLISHED_MODELS, *SHIPPED.values()]
    if pattern is None:
        return known
    if exact := SHIPPED.get(pattern) or find_published(pattern):
        return [exact]
    glob_pattern = pattern.lower() if any(c in pattern for c in "*?[") else f"*{pattern.lower()}*"
    chosen = [v for v in known if any(fnmatch.fnmatchcase(n.lower(), glob_pattern) for n in _names(v))]
    if not chosen:
        near = difflib.get_close_matches(pattern, sorted(n for v in known for n in _names(v)), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`vitrail models` lists all models."
        raise NotFoundError(f"no model matches {pattern!r}; {hint}")
    return chosen


def _names(listed: Listed) -> list[str]:
    return [n for n in (listed.name, listed.hub_id, *listed.aliases) if n]


def _config(listed: Listed) -> NetConfig:
    from vitrail.models.model_names import parse_name
    from vitrail.weights.shipped import ShippedModel

    return listed.info.config if isinstance(listed, ShippedModel) else parse_name(listed.name)


def _row(listed: Listed) -> dict[str, Any]:
    from vitrail.config import pair
    from vitrail.models.flops import count_flops, count_parameters

    config = _config(listed)
    return {
        "name": listed.name,
        "family": listed.family,
        "parameters": count_parameters(config),
        "flops": count_flops(config),
        "image_size": list(pair(config.image_size)),
        "checkpoint": listed.hub_id or listed.weights_url or None,
        "aliases": list(listed.aliases),
    }


def _sizes(rows: list[dict[str, Any]], wide: bool) -> Table:
    """In a narrow window, the weights column shows only their publisher."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("model", no_wrap=True)
    for title in ("parameters", "GFLOPs", "image"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("weights" if wide else "weights by", overflow="fold")
    for row in rows:
        size = "x".join(map(str, row["image_size"])) if len(set(row["image_size"])) > 1 else str(row["image_size"][0])
        found = row["checkpoint"] and (row["checkpoint"] if wide else row["checkpoint"].split("/")[0])
        weights = Text(found) if found else Text("none public", style="dim")
        table.add_row(row["name"], f"{row['parameters']:,}", f"{row['flops'] / 1e9:,.1f}", size, weights)
    return table


def _families(families: dict[str, Family]) -> Table:
    table = Table("family", "description", "verified against", box=None, header_style="bold", pad_edge=False)
    for name, family in families.items():
        table.add_row(
            name,
            Text(family.title),
            Text(family.verified_against) if family.verified_against else Text("not yet", style="yellow"),
        )
    return table


def _detail(listed: Listed) -> Table:
    """The model's names in other libraries, and all its settings."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("also called", Text("\n".join(listed.aliases) or "-"))
    table.add_row("settings", Text("  ".join(f"{s.name}={s.value}" for s in list_settings(_config(listed)))))
    return table
