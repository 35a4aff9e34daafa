"""Dotted `key=value` overrides of a config; its settings with their docstrings; hints for names that do not exist."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from vitrail.config.base import Config, field_types
from vitrail.errors import ConfigError, did_you_mean

SYNONYMS = {
    "batch": "batch_size",
    "bs": "batch_size",
    "classes": "num_classes",
    "dataset": "source",
    "heads": "num_heads",
    "img_size": "image_size",
    "learning_rate": "lr",
    "num_workers": "workers",
    "optimizer": "kind",
    "patch": "patch_size",
    "path_dropout": "drop_path",
    "resolution": "image_size",
    "scheduler": "kind",
    "smoothing": "label_smoothing",
    "tensorboard": "trackers",
    "warmup_epochs": "warmup",
    "warmup_steps": "warmup",
    "wd": "weight_decay",
}
"""Other libraries' names of settings -> ours, the last part of the dotted path."""
SECTIONS = {"optimizer": "optim.kind", "scheduler": "schedule.kind", "dataset": "data.source"}
"""Names that stand for one setting only."""


def override(config: Config, assignments: Iterable[str]) -> Any:
    """Apply `key=value` strings by dotted path: `override(cfg, ["num_heads=4", "stem.width_factor=0.5"])`.

    All are applied at once: settings that depend on each other may come in any order.
    """
    changes: list[Change] = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"got {assignment!r}, expected key=value, such as num_heads=4.")
        changes.append((path.strip().split("."), parse_value(text.strip())))
    return _apply_overrides(config, changes, root=config)


Change = tuple[list[str], Any]
"""Path within a section, and the value."""


def _apply_overrides(config: Config, changes: Iterable[Change], root: Config, section: str = "") -> Config:
    known = field_types(type(config))
    values: dict[str, Any] = {}
    inner: dict[str, list[Change]] = {}
    for (name, *rest), value in changes:
        whole = f"{section}{'.'.join((name, *rest))}"
        if name not in known:
            hint = suggest_setting(root, whole, value) or did_you_mean(name, known)
            raise ConfigError(f"unknown setting {whole!r}{hint}")
        part = getattr(config, name)
        if not rest:
            values[name] = value
        elif isinstance(part, Config):
            inner.setdefault(name, []).append((rest, value))
        else:
            raise ConfigError(f"unknown setting {whole!r}: {name!r} is {part!r}, a single value.")
    for name, parts in inner.items():
        values[name] = _apply_overrides(getattr(config, name), parts, root, f"{section}{name}.")
    try:
        return dataclasses.replace(config, **values)
    except ConfigError as error:  # the path of the setting says more than the name of the class
        message = str(error).replace(f"{type(config).__name__}.", section, 1)
        if message.partition("=")[0] in known:  # such as flip=2.0: expected ...
            message = section + message
        raise ConfigError(message) from None


def parse_value(text: str) -> Any:
    """`true`, `none`, `4`, `(1, 2)`, `224x448` or a word."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        return int(match[1]), int(match[2])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def format_value(value: Any) -> str:
    """A value as `parse_value` reads it, without spaces where that is possible."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, Config):
        return str(value)
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}" if 0 < abs(value) < 1e-3 else f"{value:g}"
    return str(value).replace(" ", "") if isinstance(value, tuple) else str(value)


def format_type(kind: Any) -> str:
    """A field's type for readers: `number`, `adamw | sgd | muon`, `number | none`."""
    if get_origin(kind) is Literal:
        return " | ".join(format_value(a) for a in get_args(kind))
    if get_origin(kind) is tuple:
        inner = [format_type(a) for a in get_args(kind) if a is not Ellipsis]
        return f"({', '.join(inner)}{', ...' * (Ellipsis in get_args(kind))})"
    if get_args(kind):
        return " | ".join(format_type(a) for a in get_args(kind))
    names = {int: "integer", float: "number", bool: "true | false", str: "text", type(None): "none"}
    return names.get(kind, kind.__name__.removesuffix("Config").lower() if isinstance(kind, type) else str(kind))


@dataclass(frozen=True)
class Setting:
    """One setting."""

    name: str
    """Dotted path, such as optim.lr."""
    value: str
    """As it is written on a command line."""
    type: str
    doc: str


def list_settings(config: Config, prefix: str = "") -> Iterator[Setting]:
    """All settings in the order of their declaration, with those of each section in place of it."""
    docs, types = field_docs(type(config)), field_types(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if isinstance(value, Config) and not hasattr(value, "from_text"):
            yield from list_settings(value, f"{name}.")
        else:
            yield Setting(name, format_value(value), format_type(types[field.name]), docs.get(field.name, ""))


def _field_docs(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError):
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            doc = below.value if isinstance(below, ast.Expr) else None
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Constant) and isinstance(doc.value, str):
                docs[ast.unparse(field.target)] = " ".join(doc.value.split())
    return docs


field_docs: Callable[[type], dict[str, str]] = cache(_field_docs)
"""Config class -> the docstring under each field, on one line, those of base classes too. Empty without source code."""


def suggest_setting(config: Config, path: str, value: Any = None) -> str:
    """End of an error message about a setting that does not exist: what the user may have meant."""
    known = [setting.name for setting in list_settings(config)]
    *section, leaf = path.split(".")
    if leaf in ("epochs", "steps", "num_epochs", "max_epochs", "max_steps") and "duration" in known:
        unit = "steps" if leaf.endswith("steps") else "epochs"
        return f"; try duration='{3 if value is None else value} {unit}'."
    if leaf in SECTIONS and SECTIONS[leaf] in known:
        return f"; did you mean {SECTIONS[leaf]!r}?"
    wanted = SYNONYMS.get(leaf, leaf)
    same_leaf = [name for name in known if name.split(".")[-1] == wanted]
    inside = [name for name in same_leaf if section and name.startswith(f"{section[0]}.")]
    if match := inside or same_leaf:
        best = min(match, key=lambda name: (name.count("."), known.index(name)))
        others = [name for name in match if name != best]
        return f"; did you mean {best!r}{f' or {others[0]!r}' if len(others) == 1 and not inside else ''}?"
    if close := difflib.get_close_matches(path, known, n=1, cutoff=0.7):
        return f"; did you mean {close[0]!r}?"
    return ""
