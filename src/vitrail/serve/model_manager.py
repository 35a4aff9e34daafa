"""Keeps the loaded models equal to those in a folder: loads new versions, switches to them, drains the old ones.

Every second the folder is listed. A version whose files have not changed since the last time is loaded in a thread of
low priority, tried on canary images, warmed up, and becomes the default between two requests. One version is loaded at
a time, by one worker at a time. A version that cannot be loaded or is refused leaves everything else as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch

from vitrail.errors import VitrailError
from vitrail.runtime.malloc import trim_malloc
from vitrail.serve.model_choices import Choices, ChoicesFile
from vitrail.serve.model_folder import FoundModel, find_models
from vitrail.serve.model_registry import ModelRegistry, version_key
from vitrail.serve.model_version import ModelVersion
from vitrail.serve.version_loader import ModelsConfig, VersionFactory, VersionLoader, VersionStatus

POLL_S = 1.0
"""Seconds between two listings of the folder."""
UNCHANGED_S = 5.0
"""At the start, files that have not changed for this long are taken as complete without a second look."""

log = logging.getLogger("vitrail.serve")


@dataclass
class _Folder:
    """The folder as last listed."""

    models: dict[str, FoundModel] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)


class ModelManager:
    """Watches the folder and changes the registry of a service. Runs on the event loop, loads in a thread."""

    def __init__(self, registry: ModelRegistry, config: ModelsConfig, create_version: VersionFactory) -> None:
        self.config, self.registry, self.metrics = config, registry, registry.metrics
        self.loader = VersionLoader(config, create_version, registry.metrics)
        self.choices_file = ChoicesFile(config.choices_file)
        self.status: dict[tuple[str, str], VersionStatus] = {}
        self._folder = _Folder()
        self._initial: set[str] | None = None
        """Models in the folder at the start."""
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: asyncio.Task[None] | None = None
        self._listing = asyncio.Lock()
        self._reported = ""
        registry.describe_folder, registry.default_model = self.describe, config.default_model

    @property
    def startup_complete(self) -> bool:
        """Whether every model that was in the folder at the start has a ready version, or none that could become so."""
        return self._initial is not None and all(map(self._has_started, self._initial))

    @property
    def ready(self) -> bool:
        """Whether that is so, and there is a model at all: a server that can answer nothing must get no requests."""
        return self.startup_complete and bool(self.registry.names)

    def _has_started(self, name: str) -> bool:
        default = self.registry.default(name)
        if default is not None:
            return default.ready
        model = self._folder.models.get(name)
        return self.target(name) is None or model is None or bool(model.problem)

    async def run(self) -> None:
        """Watch the folder until cancelled."""
        try:
            while True:
                await self._poll_safely()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in [*self._tasks, *([self._loading] if self._loading else [])]:
                task.cancel()

    async def _poll_safely(self) -> None:
        try:
            await self.poll()
        except OSError as error:
            self._report(f"the folder {self.config.folder} cannot be read ({error.strerror}); models stay as they are")
        except Exception:
            log.exception("listing the models failed; they stay as they are")

    def _report(self, message: str) -> None:
        """Log a message unless it is the same as the last one."""
        if message != self._reported:
            log.error(message)
        self._reported = message

    async def poll(self, complete: bool = False, only: str | None = None) -> None:
        """List the folder and act on what has changed.

        complete: the files (of the model `only`, if it is given) are complete, however new they are.
        """
        async with self._listing:
            before = self._folder.models
            models = await asyncio.to_thread(find_models, self.config.folder, before)
            choices = await asyncio.to_thread(self.choices_file.read)
            first, retry = self._initial is None, choices.reloads != self._folder.choices.reloads
            self._folder = _Folder(models, choices)
            self._reported = ""
            for name, model in models.items():
                if model.problem and (name not in before or before[name].problem != model.problem):
                    log.error("%s: %s No new version is loaded.", name, model.problem)
            self._update_status(() if not complete else models if only is None else (only,), first, retry)
            if self._initial is None:
                self._initial = set(models)
            self._reconcile()

    def _update_status(self, complete: Container[str], first: bool, retry: bool) -> None:
        """complete: models whose files are complete, however new they are; retry: what has failed."""
        found = {
            (one.name, one.version): one for model in self._folder.models.values() for one in model.versions.values()
        }
        for key in self.status.keys() - found.keys():
            if self.status[key].loaded is None:
                del self.status[key]  # of a loaded version, when it is drained
        for key, one in found.items():
            status = self.status.get(key)
            if status is None or status.found.signature != one.signature:
                files_complete = one.name in complete or (first and one.newest < time.time() - UNCHANGED_S)
                loaded = None if status is None else status.loaded
                self.status[key] = VersionStatus(one, loaded=loaded, files_complete=files_complete)
            else:
                unchanged = time.monotonic() - status.seen >= 0.9 * POLL_S  # requests of operators list it more often
                status.files_complete = status.files_complete or one.name in complete or unchanged
                if retry and status.state == "failed":
                    status.state, status.reason, status.public_reason = "available", "", ""

    def _reconcile(self) -> None:
        """Switch and drain what can be switched and drained, and start to load what is missing."""
        self.registry.expected = frozenset(self._folder.models)
        for name in dict.fromkeys([*self._folder.models, *self.registry.names]):
            self._switch(name)
        self.metrics.set_failed({name: self._count_failed(name) for name in self._folder.models})
        missing = self._missing()
        if missing and self._loading is None:
            self._loading = asyncio.create_task(self._load(missing[0]))
            self._loading.add_done_callback(self._loaded)

    def _switch(self, name: str) -> None:
        """Make the target the default if it is loaded, and drain the versions of the model that are not in use."""
        target, versions = self.target(name), self.registry.versions(name)
        if target is not None and target.loaded is not None:
            self.registry.set_default(name, target.found.version)
            unused = {one.version for one in versions} - {target.found.version, *self._kept(name)}
        elif target is not None:  # what is in use stays until the target can take its place
            unused = set()
        else:
            unused = {one.version for one in versions} - {*self._offered(name)}
        for one in versions:
            if one.version in unused:
                self._start_drain(one)

    def _missing(self) -> list[VersionStatus]:
        """Versions to load: those that should be defaults first."""
        defaults = [target for name in self._folder.models if (target := self.target(name)) is not None]
        kept = [self.status[name, version] for name in self._folder.models for version in self._kept(name)]
        return [
            one
            for one in [*defaults, *kept]
            if one.state == "available" and one.files_complete and not self._folder.models[one.found.name].problem
        ]

    def target(self, name: str) -> VersionStatus | None:
        """The version that should be the default: the newest one that is neither held back nor failed.

        A loaded version whose files have been overwritten with a bad one stays usable. A version in use that is held
        back stays the default while the next older one, which was chosen instead, cannot be used.
        """
        offered = [self.status[name, version] for version in self._offered(name)]
        best = max(filter(_is_usable, offered), key=_order, default=None)
        current = self._held_in_use(name)
        if current is None or (best is not None and _order(best) > _order(current)):
            return best
        chosen = max((one for one in offered if _order(one) < _order(current)), key=_order, default=None)
        return best if chosen is None or _is_usable(chosen) else current

    def _held_in_use(self, name: str) -> VersionStatus | None:
        """The default version, if it is in the folder but held back."""
        default = self.registry.default(name)
        if default is None or default.version in self._offered(name) or default.version not in self.signatures(name):
            return None
        status = self.status[name, default.version]
        return status if status.loaded is not None else None

    def _offered(self, name: str) -> list[str]:
        """Versions in the folder that are not held back."""
        choice = self._folder.choices.models.get(name)
        held = {} if choice is None else choice.held
        return [version for version, signature in self.signatures(name).items() if held.get(version) != signature]

    def _kept(self, name: str) -> list[str]:
        """Versions to load beside the default."""
        choice = self._folder.choices.models.get(name)
        versions = self._folder.models[name].versions if name in self._folder.models else {}
        return [] if choice is None else [version for version in choice.kept if version in versions]

    def _count_failed(self, name: str) -> int:
        return sum(one.state == "failed" for (model, _), one in self.status.items() if model == name)

    def _start_drain(self, version: ModelVersion) -> None:
        key = (version.name, version.version)
        status = self.status.get(key)
        if status is not None and status.loaded is version:
            status.loaded, status.state = None, "available"
            models = self._folder.models
            if version.name not in models or version.version not in models[version.name].versions:
                del self.status[key]
        self.registry.retire(version)
        task = asyncio.create_task(self._drain(version))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, version: ModelVersion) -> None:
        title = f"{version.name} {version.version}"
        await self.registry.drain(version)
        del version
        await asyncio.to_thread(_return_memory)
        log.info("%s: drained and released", title)

    async def _discard(self, version: ModelVersion) -> None:
        """Release a version that has never been in use."""
        await version.stop()
        self.metrics.remove_model(version.metrics)
        del version
        await asyncio.to_thread(_return_memory)

    # Loading

    def _loaded(self, task: asyncio.Task[None]) -> None:
        self._loading = None
        self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("loading a model failed", exc_info=task.exception())

    async def _load(self, status: VersionStatus) -> None:
        """Load a version and put it into the registry; on failure, record why."""
        found, start = status.found, time.monotonic()
        status.state, model = "loading", self._folder.models[status.found.name]
        try:
            with contextlib.ExitStack() as leases:  # the engine of the version in use is needed for the comparison
                previous = self.registry.default(found.name)
                if previous is not None:
                    leases.enter_context(self.registry.lease(found.name, previous.version))
                version = await self.loader.load(status, model, previous)
        except Exception as error:
            self._record_failure(status, error)
            return
        await self._poll_safely()
        if self.status.get((found.name, found.version)) is not status:
            await self._discard(version)
            log.warning("%s %s: its files changed while it was loaded", found.name, found.version)
            return
        try:
            version.start()
        except RuntimeError as error:  # the system has no more threads for this process
            await self._discard(version)
            self._record_failure(status, error)
            return
        replaced = self.registry.add(version, default=self.target(found.name) is status)
        self.registry.sort()
        status.state, status.loaded = "ready", version
        self.metrics.loads.labels(found.name, "ready").inc()
        tried = "" if status.report is None else f"; {status.report.describe()}"
        log.info("%s %s: ready after %.1f s%s", found.name, found.version, time.monotonic() - start, tried)
        if replaced is not None:
            self._start_drain(replaced)

    def _record_failure(self, status: VersionStatus, error: Exception) -> None:
        found = status.found
        status.fail(error)
        self.metrics.loads.labels(found.name, "failed").inc()
        current = self.registry.default(found.name)
        consequence = "No version is in use" if current is None else f"Version {current.version} stays in use"
        trace = None if isinstance(error, VitrailError) else error
        log.error("%s %s: %s %s.", found.name, found.version, status.reason, consequence, exc_info=trace)
        cause: BaseException | None = error
        while cause is not None:  # the frames of the traceback hold the model
            cause.__traceback__, cause = None, cause.__cause__ or cause.__context__

    # For the routes

    def describe(self, private: bool = False) -> list[dict[str, Any]]:
        """Every model with the state of each version. private: with paths and the full reasons."""
        draining = [version.name for version in self.registry.draining]
        names = dict.fromkeys([*self.registry.names, *(name for name, _ in self.status), *draining])
        return [self._describe_model(name, private) for name in names]

    def _describe_model(self, name: str, private: bool) -> dict[str, Any]:
        default = self.registry.default(name)
        found = [one for (model, _), one in self.status.items() if model == name]
        versions = {one.found.version: self._describe_version(one, private) for one in found}
        for version in {one.version for one in self.registry.draining if one.name == name}:
            described = versions.setdefault(version, {"version": version, "state": "draining"})
            described |= {"state": "draining"} if described["state"] == "available" else {}
        problem = self._folder.models[name].problem if name in self._folder.models else ""
        described = {
            "name": name,
            "default": None if default is None else default.version,
            "versions": sorted(versions.values(), key=lambda one: version_key(one["version"])),
        }
        return described | ({"problem": problem} if problem else {})

    def _describe_version(self, status: VersionStatus, private: bool) -> dict[str, Any]:
        found, reason = status.found, status.reason if private else status.public_reason
        choice = self._folder.choices.models.get(found.name)
        if status.state == "available" and choice is not None and found.version in choice.held:
            reason = "held back: an older version was chosen."
        described: dict[str, Any] = {"version": found.version, "state": status.state}
        described |= {"reason": reason} if reason else {}
        described |= {"canary": status.report.as_json()} if status.report is not None else {}
        return described | ({"path": str(found.path), "bytes": found.size} if private else {})

    def signatures(self, name: str) -> dict[str, str]:
        """Signatures of the versions of a model in the folder."""
        model = self._folder.models.get(name)
        return {} if model is None else {version: found.signature for version, found in model.versions.items()}

    async def reload(self, wait: float, only: str | None = None) -> None:
        """List the folder now; wait up to `wait` seconds until nothing is loading. For the parameter see `poll`."""
        await self.poll(complete=True, only=only)
        until = time.monotonic() + wait
        while time.monotonic() < until:
            if self._loading is None:
                await self.poll(complete=True, only=only)
                if self._loading is None:
                    return
            await asyncio.sleep(0.05)


def _return_memory() -> None:
    """Return freed memory to the system and, for other processes, to the GPU."""
    trim_malloc()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _is_usable(status: VersionStatus) -> bool:
    return status.state != "failed" or status.loaded is not None


def _order(status: VersionStatus) -> list[tuple[int, int, str]]:
    return version_key(status.found.version)
