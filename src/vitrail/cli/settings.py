"""`--settings` of train and finetune: all settings and what they mean. Hints for settings given as options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import print_plain
from vitrail.config import Config, TrainConfig
from vitrail.config.overrides import list_settings, suggest_setting


def print_settings(config: Config, title: str, as_json: bool = False) -> None:
    """One row per setting, grouped by section."""
    settings = list(list_settings(config))
    if as_json:
        typer.echo(json.dumps([asdict(setting) for setting in settings], indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left", title_style="")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("description", ratio=1)
    section = ""
    for setting in settings:
        if (now := setting.name.rpartition(".")[0]) != section:
            table.add_section()
            table.add_row()
            section = now
        description = Text(f"{setting.doc} ") + Text(setting.type, style="dim")
        table.add_row(setting.name, Text(setting.value), description)
    print_plain(table)


def is_setting_name(config: Config, text: str) -> bool:
    """Whether an argument without = is the name of a setting, so that its value is missing."""
    return any(
        text == s.name or text.startswith(f"{s.name.rpartition('.')[0] or s.name}.") for s in list_settings(config)
    )


def option_hint(command: str, option: str, arguments: Sequence[str]) -> str:
    """End of the message about an unknown option such as --lr 3e-4 or --epochs=3: the setting that was meant."""
    if command not in ("train", "finetune"):
        return ""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if argument == option and not following.startswith("--"):
            value = following
        elif argument.startswith(f"{option}="):
            value = argument.partition("=")[2]
    return _as_setting(TrainConfig(init_from="MODEL"), option.lstrip("-").replace("-", "_"), value)


def _as_setting(config: TrainConfig, name: str, value: Any) -> str:
    names = [setting.name for setting in list_settings(config)]
    hint = "" if name in names else suggest_setting(config, name, value)
    if match := re.search(r"try (duration='[^']*')", hint):
        return f"; settings are written {match[1]}, without dashes."
    found = name if name in names else next(iter(re.findall(r"mean '([^']*)'", hint)), "")
    return f"; settings are written {found}={value or 'VALUE'}, without dashes." if found else ""
