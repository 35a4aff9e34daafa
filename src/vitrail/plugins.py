"""Code from outside the package: entry points of other packages, and Python objects by `package.module:name`.

    [project.entry-points."vitrail.objectives"]
    focal = "my_package.losses:focal"

An installed package with these lines in its pyproject.toml adds the objective `focal`. The entry points of a group are
listed when a name is asked for that vitrail does not have itself, and imported when one of them is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from vitrail.errors import NotFoundError, PluginError, VitrailError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = {
    "objectives": "objective",
    "sources": "data source",
    "formats": "checkpoint format",
    "callbacks": "callback",
    "trackers": "tracker",
    "models": "model",
}
"""Group, without the prefix `vitrail.` -> what one of its members is called in messages."""
IN_MEMORY = "memory:"
"""Prefix, in config.json, of the name of an object that cannot be imported and has to be passed again."""


def _find(group: str) -> dict[str, list[EntryPoint]]:
    from importlib.metadata import entry_points  # would slow down `vitrail --help`

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"vitrail.{group}"):
        same = found.setdefault(point.name, [])
        if all(_package(point) != _package(other) or point.value != other.value for other in same):
            same.append(point)  # a package that is on the path twice counts once
    return found


find_entry_points: Callable[[str], dict[str, list[EntryPoint]]] = cache(_find)
"""Entry points of a group, by name."""


def plugin_names(group: str) -> list[str]:
    """The names that other packages add to a group of GROUPS."""
    return sorted(find_entry_points(group))


def load_plugin(group: str, name: str, builtin: Iterable[str] = ()) -> Any:
    """The object of an entry point. `builtin`: vitrail's own names, for the message about an unknown one."""
    points = find_entry_points(group).get(name, [])
    if not points:
        known = [*builtin, *plugin_names(group)]
        hint = did_you_mean(name, known) if known else f"; no package adds one to the group vitrail.{group}."
        raise NotFoundError(f"unknown {GROUPS[group]} {name!r}{hint}")
    if len(points) > 1:
        packages = " and ".join(map(_package, points))
        raise PluginError(f"the packages {packages} both add the {GROUPS[group]} {name!r}; uninstall one of them.")
    with plugin_errors(group, name):
        return points[0].load()


@contextmanager
def plugin_errors(group: str, name: str) -> Iterator[None]:
    """Turn an exception of a plugin into a PluginError that names the package and the entry point."""
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        points = find_entry_points(group).get(name)
        plugin = f"the {GROUPS[group]} {name!r}"
        if points:
            plugin += f" of the package {_package(points[0])} (entry point {points[0].value} of vitrail.{group})"
        raise PluginError(f"{plugin} failed: {type(error).__name__}: {error}") from error


def import_reference(text: str) -> Any:
    """The object at `package.module:name`."""
    module, _, path = text.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except Exception as error:
        raise PluginError(
            f"{text} cannot be imported ({type(error).__name__}: {error}); expected package.module:name."
        ) from error
    return value


def reference_to(value: Any) -> str:
    """`package.module:name` of a function or a class that can be imported under it, else `memory:` and its name."""
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    text = f"{getattr(value, '__module__', None)}:{name}"
    try:
        if not text.startswith("__main__:") and import_reference(text) is value:
            return text
    except PluginError:
        pass
    return IN_MEMORY + name.rpartition(".")[2]


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"
