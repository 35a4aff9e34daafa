"""The models of a server: names -> versions -> the version that answers by default.

All methods are called on the event loop, so a request sees a switch of versions either completely or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.serve.http_errors import RequestError
from vitrail.serve.model_version import ModelVersion
from vitrail.serve.prometheus_metrics import Metrics

MAX_LISTED = 20
"""Names listed in an error."""


class ModelRegistry:
    """Loaded versions by model name. Requests hold a version with `lease`."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.describe_folder: Callable[[], list[dict[str, Any]]] | None = None
        """Describes a watched folder of models, also what is not loaded; None without one."""
        self.expected: frozenset[str] = frozenset()
        """Models that will be loaded, or that cannot be: requests for them get 503, not 404."""
        self.default_model: str | None = None
        """Model that answers requests without a model, whether it is loaded or not; None: the first one."""
        self._versions: dict[str, dict[str, ModelVersion]] = {}
        self._defaults: dict[str, str] = {}
        self._draining: list[ModelVersion] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models; the first one is the default."""
        return tuple(self._versions)

    @property
    def ready(self) -> bool:
        """Whether there is a model, and the default version of every model has been warmed up."""
        return bool(self._versions) and all(self.get(name).ready for name in self._versions)

    def __iter__(self) -> Iterator[ModelVersion]:
        """All loaded versions."""
        return (one for versions in list(self._versions.values()) for one in list(versions.values()))

    def versions(self, name: str) -> tuple[ModelVersion, ...]:
        """Loaded versions of a model in natural order, oldest first; empty if it is unknown."""
        return tuple(sorted(self._versions.get(name, {}).values(), key=lambda one: version_key(one.version)))

    @property
    def draining(self) -> tuple[ModelVersion, ...]:
        """Versions that are out of use and finish their requests."""
        return tuple(self._draining)

    def default(self, name: str) -> ModelVersion | None:
        """The version of a model that answers requests without a version; None if there is none."""
        return self._versions[name][self._defaults[name]] if name in self._versions else None

    def get(self, name: str | None = None, version: str | None = None) -> ModelVersion:
        """A loaded version; default: that of the default model. Raises RequestError if there is none."""
        expected = name is None or name in self.expected
        if name is None:
            name = self.default_model or next(iter(self._versions), None)
        if name is None or (expected and name not in self._versions):
            message = "no model is loaded" if name is None else f"model {_shorten(name)} has no version that is loaded"
            raise RequestError(503, "model_not_ready", f"{message}; see /v1/models.", {"Retry-After": "1"})
        if name not in self._versions:
            known = _list(self.names) or "none"
            raise RequestError(404, "unknown_model", f"there is no model {_shorten(name)}; there is {known}.")
        versions = self._versions[name]
        found = versions.get(self._defaults[name] if version is None else version)
        if found is None:
            available = _list([one.version for one in self.versions(name)])
            message = f"model {_shorten(name)} has no version {_shorten(version or '')}; there is {available}."
            raise RequestError(404, "unknown_version", message)
        return found

    @contextmanager
    def lease(self, name: str | None = None, version: str | None = None) -> Iterator[ModelVersion]:
        """Like `get`; keeps the version alive until the end of the `with` block, even if it is replaced meanwhile."""
        found = self.get(name, version)
        found.acquire()
        try:
            yield found
        finally:
            found.release()

    def add(self, added: ModelVersion, default: bool = True) -> ModelVersion | None:
        """Add a started version, as the default of its model or beside it.

        Returns the version of the same name and number that it replaces, if any; the caller then drains it.
        """
        versions = self._versions.setdefault(added.name, {})
        replaced, versions[added.version] = versions.get(added.version), added
        if default or len(versions) == 1:
            self._defaults[added.name] = added.version
        return replaced

    def set_default(self, name: str, version: str) -> None:
        """Make a loaded version the default of its model."""
        self._defaults[name] = self.get(name, version).version

    def sort(self) -> None:
        """Order the models by name, with the default model before the others."""
        names = sorted(self._versions, key=lambda name: (name != self.default_model, version_key(name)))
        self._versions = {name: self._versions[name] for name in names}

    def retire(self, removed: ModelVersion) -> None:
        """Take a version out of use: it gets no more requests. `drain` then releases it.

        If it was the default, the newest of the other versions becomes the default.
        """
        versions = self._versions.get(removed.name, {})
        if versions.get(removed.version) is removed:
            del versions[removed.version]
            if not versions:
                del self._versions[removed.name], self._defaults[removed.name]
            elif self._defaults[removed.name] == removed.version:
                self._defaults[removed.name] = self.versions(removed.name)[-1].version
        self._draining.append(removed)

    async def drain(self, retired: ModelVersion) -> None:
        """Wait until a retired version has finished its requests, and release its threads, memory and metrics."""
        try:
            await retired.stop()
        finally:
            self._draining.remove(retired)
            self.metrics.remove_model(retired.metrics)

    def start(self) -> None:
        """Start the threads of all versions."""
        for one in self:
            one.start()

    async def stop(self) -> None:
        """Stop the threads of all versions, after the requests that they have."""
        for one in list(self):
            await one.stop()

    def describe(self) -> list[dict[str, Any]]:
        """Every model with its versions and their states."""
        if self.describe_folder is not None:
            return self.describe_folder()
        return [self._describe(name) for name in self._versions]

    def _describe(self, name: str) -> dict[str, Any]:
        versions = [
            *({"version": one.version, "state": "ready" if one.ready else "loading"} for one in self.versions(name)),
            *({"version": one.version, "state": "draining"} for one in self.draining if one.name == name),
        ]
        return {"name": name, "default": self._defaults[name], "versions": versions}


def version_key(version: str) -> list[tuple[int, int, str]]:
    """Natural order: numbers in a version compare as numbers, so 10 follows 9 and v1.10 follows v1.9."""
    parts = re.findall(r"\d+|\D+", version)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def _list(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _shorten(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}...")
