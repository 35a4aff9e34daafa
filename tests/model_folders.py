"""Folders of models for tests of `vitrail serve --models`, and servers that watch them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from serving import QUICK, httpx, wait_until
from small_models import LABELS, model, small

import vitrail
from vitrail.engines.engine import TorchEngine

import uvicorn  # isort: skip

from vitrail.serve import model_manager
from vitrail.serve.app import Service, create_app
from vitrail.serve.limits import Limits
from vitrail.serve.model_manager import ModelManager
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server import uvicorn_config
from vitrail.serve.version_loader import ModelsConfig

ADMIN_TOKEN = "of-the-operators"
ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}


def make_model(seed: int = 0, labels: tuple[str, ...] = LABELS, **changes: Any) -> vitrail.Model:
    """A small model that prefers class `seed` (modulo their number); without labels, one that outputs features."""
    vit = model(small(depth=1, num_classes=len(labels), **changes))
    if labels:
        with torch.no_grad():
            vit.net.head.bias[seed % len(labels)] += 8
    return vitrail.Model(vit.net, vit.info.replace(labels=labels or None))


def put(folder: Path, name: str, version: str, vit: vitrail.Model | None = None, seed: int = 0) -> Path:
    """Add a version to the folder as operators should: under a hidden name, then renamed."""
    hidden, path = folder / name / f".{version}", folder / name / version
    (vit or make_model(seed)).save(hidden)
    return hidden.rename(path)


def write_labeled_images(folder: Path, labels_of: vitrail.Model, count: int = 8) -> None:
    """Write canary images, in folders named after the classes that a model gives them."""
    from serving import photo

    for number in range(count):
        data = photo(number)
        path = folder / labels_of.predict(data)[0].label / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def load_served(path: str) -> ServedModel:
    vit = vitrail.load(path)
    return ServedModel(TorchEngine(vit.net, vit.info), vit)


def config_for(folder: Path, **options: Any) -> ModelsConfig:
    own = folder.parent / "state"
    own.mkdir(exist_ok=True)
    files = {"choices_file": own / "choices.json", "lock_file": own / "load.lock"}
    return ModelsConfig(**{"folder": folder, "loader": load_served, **files, **options})


class WatchedFolder:
    """A service whose folder is listed when a test asks for it; used inside one event loop."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.service = Service(Limits(), QUICK)
        self.service.manage(config_for(folder, **options), lambda _: QUICK)
        assert self.service.manager is not None
        self.manager: ModelManager = self.service.manager

    async def settle(self) -> None:
        """List the folder, and load, switch and drain until nothing is left to do."""
        await self.manager.reload(60)
        while self.manager._tasks:
            await asyncio.gather(*self.manager._tasks)

    def states(self, name: str = "photos") -> dict[str, str]:
        """State of each version."""
        [described] = [one for one in self.manager.describe() if one["name"] == name]
        return {one["version"]: one["state"] for one in described["versions"]}

    def reason(self, version: str, name: str = "photos") -> str:
        return self.manager.status[name, version].reason

    async def label_and_version(self, data: bytes) -> tuple[int, str]:
        """Top class and version of an answer."""
        with self.service.registry.lease() as version:
            [row] = await version.infer([data], "client", "logits")
            return int(row.argmax()), version.version


def run_watched(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@contextmanager
def run_models(
    folder: Path, monkeypatch: Any, token: str | None = None, **options: Any
) -> Iterator[tuple[httpx.Client, Service]]:
    """Run a server that watches the folder, in a thread; yields a client and its `Service`."""
    monkeypatch.setattr(model_manager, "POLL_S", 0.1)
    config = config_for(folder, admin_token=ADMIN_TOKEN, **options)
    with run_app(create_app((), None, QUICK, token, models=config)) as client_and_service:
        yield client_and_service


@contextmanager
def run_app(app: Any) -> Iterator[tuple[httpx.Client, Service]]:
    """Run a server in a thread until its models are ready."""
    server = uvicorn.Server(uvicorn_config(app, port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: (server.started and app.state.service.is_ready) or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client, app.state.service
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


@contextmanager
def run_models_command(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `vitrail serve --models` in a process; yields the process and its URL."""
    command = [sys.executable, "-m", "vitrail", "serve", "--models", str(folder), "--port", "0", "--batch-size", "4"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://" in line, process.communicate()[1]
        yield process, line.rpartition(" at ")[2].strip()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.communicate(timeout=30)


def states_of(client: httpx.Client, name: str = "photos") -> dict[str, str]:
    """State of each version, from /v1/models."""
    models = {one["name"]: one for one in client.get("/v1/models").json()["data"]}
    return {one["version"]: one["state"] for one in models[name]["versions"]} if name in models else {}


def write_settings(folder: Path, name: str = "photos", **settings: Any) -> None:
    (folder / name / "serving.json").write_text(json.dumps(settings))
