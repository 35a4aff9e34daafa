"""Failures of the folder of models, of its files and of the machine: what is in use stays, and readiness says so."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_folders import WatchedFolder, put, run_watched, write_settings

from vitrail.serve.batching import Batcher
from vitrail.serve.http_errors import RequestError
from vitrail.serve.model_version import ModelVersion


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def failing(function: Callable[..., Any], suffix: str) -> Callable[..., Any]:
    """The function of `os`, which fails for paths with this end, as on a damaged disk."""

    def fail(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).endswith(suffix):
            raise OSError(5, "Input/output error")
        return function(path, *arguments, **options)

    return fail


@pytest.mark.parametrize("suffix", ["photos", "photos/2", "photos/2/config.json", "photos/2/model.safetensors"])
@pytest.mark.parametrize("function", ["scandir", "stat"])
def test_a_version_whose_files_cannot_be_read_for_a_while_stays_in_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str, suffix: str
) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        put(folder, "photos", "2", seed=2)
        watched = WatchedFolder(folder)
        await watched.settle()
        with monkeypatch.context() as patched:
            patched.setattr(os, function, failing(getattr(os, function), suffix))
            for _ in range(2):
                await watched.settle()
        assert watched.states() == {"1": "available", "2": "ready"}
        await watched.settle()
        assert watched.states() == {"1": "available", "2": "ready"}

    run_watched(check())


def test_a_new_version_that_cannot_be_read_fails_and_leaves_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        put(folder, "photos", "2", seed=2)
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", failing(os.stat, "photos/2/config.json"))  # as without the right to enter it
            await watched.settle()
            assert watched.states() == {"1": "ready", "2": "failed"}
            restarted = WatchedFolder(folder)
            await restarted.settle()
            assert restarted.states() == {"1": "ready", "2": "failed"}
        await watched.settle()
        assert watched.states() == {"1": "available", "2": "ready"}

    run_watched(check())


def test_a_choices_file_that_cannot_be_read_changes_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        put(folder, "photos", "2", seed=2)
        watched = WatchedFolder(folder)
        await watched.settle()
        with watched.manager.choices_file.change() as choices:
            choices.of("photos").held["2"] = watched.manager.signatures("photos")["2"]
        await watched.settle()
        assert watched.service.default.version == "1"
        path = watched.manager.choices_file.path
        for damage in (lambda: path.write_text("{"), path.unlink, path.mkdir):
            damage()
            if path.exists():
                await watched.settle()
                await watched.settle()
                assert watched.service.default.version == "1"
        assert len([record for record in caplog.records if "the choices stay" in record.message]) == 1

    run_watched(check())


def test_settings_that_cannot_be_read_do_not_keep_the_server_from_being_ready(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        put(folder, "animals", "1")
        put(folder, "photos", "1")
        (folder / "photos" / "serving.json").write_text("{")
        watched = WatchedFolder(folder)
        await watched.settle()
        assert watched.manager.ready
        with pytest.raises(RequestError, match="model 'photos' has no version that is loaded"):
            watched.service.registry.get("photos")
        write_settings(folder, classes="any")
        await watched.settle()
        assert watched.states() == {"1": "ready"}

    with caplog.at_level(logging.ERROR, "vitrail.serve"):
        run_watched(check())
    assert caplog.messages == ["photos: serving.json is not readable as JSON. No new version is loaded."]


def test_a_server_without_a_model_is_not_ready_until_there_is_one(folder: Path) -> None:
    async def check() -> None:
        for damaged in (False, True):
            if damaged:
                (put(folder, "photos", "1") / "model.safetensors").write_bytes(b"")
            watched = WatchedFolder(folder)
            await watched.settle()
            assert watched.service.startup_complete
            assert not watched.service.is_ready
            with pytest.raises(RequestError, match="no model is loaded"):
                await watched.service.ready()
        put(folder, "photos", "2")
        await watched.settle()
        assert watched.service.is_ready

    run_watched(check())


def test_a_model_whose_versions_are_all_held_back_does_not_keep_the_server_from_being_ready(folder: Path) -> None:
    async def check() -> None:
        put(folder, "animals", "1")
        put(folder, "photos", "1")
        watched = WatchedFolder(folder)
        await watched.settle()
        with watched.manager.choices_file.change() as choices:
            choices.of("photos").held["1"] = watched.manager.signatures("photos")["1"]
        restarted = WatchedFolder(folder)
        await restarted.settle()
        assert restarted.states() == {"1": "available"}
        assert restarted.manager.ready

    run_watched(check())


def test_no_other_model_answers_in_place_of_the_default_model(folder: Path) -> None:
    async def check() -> None:
        put(folder, "animals", "1")
        (put(folder, "photos", "1") / "model.safetensors").write_bytes(b"")
        watched = WatchedFolder(folder, default_model="photos")
        await watched.settle()
        assert watched.manager.ready
        with pytest.raises(RequestError, match="model 'photos' has no version that is loaded") as refused:
            watched.service.registry.get()
        assert refused.value.status == 503
        assert watched.service.registry.get("animals").name == "animals"
        put(folder, "photos", "2")
        await watched.settle()
        assert watched.service.registry.get().name == "photos"

    run_watched(check())


def test_an_action_on_one_model_does_not_take_the_files_of_another_as_complete(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1")
        watched = WatchedFolder(folder)
        await watched.settle()
        put(folder, "animals", "1")
        put(folder, "photos", "2")
        for _ in range(3):  # unchanged, but within a second
            await watched.manager.poll(complete=True, only="photos")
        assert watched.manager.status["photos", "2"].files_complete
        assert not watched.manager.status["animals", "1"].files_complete
        await watched.settle()
        assert watched.states("animals") == {"1": "ready"}

    run_watched(check())


def refuse_to_start(self: ModelVersion) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("failure", ["changed", "warm-up", "threads"])
def test_a_version_that_is_dropped_leaves_no_memory_and_no_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """Without waiting for Python's garbage collector, which runs rarely in a server."""

    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        path, nets = put(folder, "photos", "2", seed=2), []
        load = watched.manager.config.loader

        def record_and_touch(name: str) -> Any:
            served = load(name)
            nets.append(weakref.ref(served.model.net))
            if failure == "changed":
                os.utime(path / "config.json", ns=(1, 1))
            return served

        object.__setattr__(watched.manager.config, "loader", record_and_touch)
        with monkeypatch.context() as patched:
            if failure == "warm-up":
                patched.setattr(Batcher, "warm_up", lambda *arguments: 1 / 0)
            if failure == "threads":
                patched.setattr(ModelVersion, "start", refuse_to_start)
            gc.collect()
            gc.disable()
            try:
                await watched.manager.reload(0)
                assert watched.manager._loading is not None
                await asyncio.wait([watched.manager._loading])
                assert [net() for net in nets] == [None]
            finally:
                gc.enable()
        state = {"changed": "available"}.get(failure, "failed")
        assert watched.states() == {"1": "ready", "2": state}
        assert 'version="2"' not in watched.service.metrics.render().decode()
        with watched.manager.choices_file.change() as choices:
            choices.reloads += 1
        await watched.settle()
        assert watched.states() == {"1": "available", "2": "ready"}

    logging.getLogger("vitrail.serve").propagate = False  # pytest would keep the records, with their tracebacks
    try:
        run_watched(check())
    finally:
        logging.getLogger("vitrail.serve").propagate = True
