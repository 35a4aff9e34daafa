"""Loads one version of a model for `vitrail serve --models`: load, compare with the version in use, warm up.

This runs in a thread of low priority while other versions answer requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from vitrail.data.resident import free_memory
from vitrail.engines.exported_files import is_exported
from vitrail.errors import VitrailError
from vitrail.serve.canary import DEFAULT_DROP, CanaryReport, check_classes, check_outputs, read_canary
from vitrail.serve.decode_pool import set_torch_threads
from vitrail.serve.decode_process import NICENESS
from vitrail.serve.http_errors import public_message
from vitrail.serve.model_folder import FoundModel, FoundVersion
from vitrail.serve.model_registry import version_key
from vitrail.serve.model_version import ModelVersion
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.served_model import ServedModel
from vitrail.storage.locks import file_lock

LOADED_PER_STORED = 2.0
"""Bytes of memory for a byte of a model's files while it is loaded: the weights, and a copy of them."""
State = Literal["available", "loading", "comparing", "warming_up", "ready", "failed"]
Result = TypeVar("Result")
VersionFactory = Callable[[ServedModel, str, str], ModelVersion]
"""Creates a version from a loaded model, a name and a version, in any thread."""

log = logging.getLogger("vitrail.serve")


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """What `vitrail serve --models` serves. Picklable, for workers."""

    folder: Path
    loader: Callable[[str], ServedModel]
    """Loads a path."""
    low_priority: bool = True
    """Whether to load at low priority; not with engines that start threads of their own, which would inherit it."""
    canary: str | None = None
    """Folder or data set of canary images for models without their own."""
    canary_drop: float = DEFAULT_DROP
    default_model: str | None = None
    """Model that answers requests without a model; None: the first one by name."""
    admin_token: str | None = None
    choices_file: Path
    lock_file: Path
    """Held by the worker that loads a version."""


@dataclass
class VersionStatus:
    """A version in the folder, and what has become of it."""

    found: FoundVersion
    state: State = "available"
    reason: str = ""
    """Why it has failed or is not in use."""
    public_reason: str = ""
    """The same for clients, without paths."""
    report: CanaryReport | None = None
    loaded: ModelVersion | None = None
    files_complete: bool = False
    """Whether its files are complete."""
    seen: float = field(default_factory=time.monotonic)
    """When these files were first listed."""

    def fail(self, error: Exception) -> None:
        """Record why it cannot be used."""
        self.state, self.reason = "failed", str(error)
        otherwise = "it cannot be loaded; the log of the server says why."
        if isinstance(error, VitrailError):
            path = self.found.path  # clients may know the names of its files, but not where they are
            relative = self.reason.replace(f"{path}/", "").replace(str(path), path.name)
            self.public_reason = public_message(VitrailError(relative), otherwise)
        else:
            self.public_reason = otherwise
            self.reason = f"loading it failed with {type(error).__name__}; the log of the server has the traceback."


class VersionLoader:
    """Loads versions for a service, one at a time."""

    def __init__(self, config: ModelsConfig, create_version: VersionFactory, metrics: Metrics) -> None:
        self.config, self.create_version, self.metrics = config, create_version, metrics

    async def load(self, status: VersionStatus, model: FoundModel, previous: ModelVersion | None) -> ModelVersion:
        """A version that is ready to start; raises an error if it cannot be loaded or must not be used.

        previous: the version in use; it is compared with the new one.
        """
        low_priority = self.config.low_priority and not is_exported(status.found.path)
        return await _run_in_thread(low_priority, self._load, status, model, previous)

    def _load(self, status: VersionStatus, model: FoundModel, previous: ModelVersion | None) -> ModelVersion:
        found = status.found
        with file_lock(self.config.lock_file):  # the other workers keep serving; engines find their files in the cache
            if shortage := describe_shortage(found.size, previous):
                log.warning("%s %s: %s", found.name, found.version, shortage)
            set_torch_threads(1)
            served = self.config.loader(str(found.path))
            status.state = "comparing"
            status.report = self._compare(served, found, model, previous)
            status.state = "warming_up"
            version = self.create_version(served, found.name, found.version)
            try:
                version.batcher.warm_up(None if previous is None else previous.batcher)
            except BaseException:
                version.drop_model()
                self.metrics.remove_model(version.metrics)
                raise
            return version

    def _compare(
        self, served: ServedModel, found: FoundVersion, model: FoundModel, previous: ModelVersion | None
    ) -> CanaryReport:
        """Try the version on images. A return to an older version is not refused because of classes or accuracy."""
        images = read_canary(model.canary, self.config.canary)
        if previous is None:
            return check_outputs(served, images, None, None, math.inf)
        drop = self.config.canary_drop if model.settings.canary_drop is None else model.settings.canary_drop
        if version_key(found.version) < version_key(previous.version):
            drop = math.inf
        else:
            check_classes(served, previous.served, model.settings, images)
        return check_outputs(served, images, previous.served, previous.version, drop)


async def _run_in_thread(low_priority: bool, function: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function in a new thread, because a priority that was lowered cannot be raised again."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        try:
            if low_priority:
                lower_thread_priority()
            outcome: tuple[Callable[[Any], None], Any] = future.set_result, function(*arguments)
        except BaseException as error:
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="load-model", daemon=True).start()
    return await future


def lower_thread_priority() -> None:
    """Let other threads go first; affects the calling thread and those that it starts (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def describe_shortage(size: int, previous: ModelVersion | None) -> str:
    """A warning if a model with files of this size may not fit beside those that are loaded; empty if it does."""
    model = None if previous is None else previous.served.model
    device = torch.device("cpu") if model is None else model.device
    free, needed = free_memory(device), int(LOADED_PER_STORED * size)
    if needed <= free:
        return ""
    return (
        f"loading it may need {needed / 2**20:,.0f} MiB beside what is loaded, and {free / 2**20:,.0f} MiB are free; "
        "give the server memory for two versions of its largest model."
    )
