"""A watched folder: versions are loaded, refused, switched, drained and removed."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folders import WatchedFolder, make_model, put, run_watched, write_labeled_images, write_settings
from serving import photo
from small_models import LABELS

from vitrail.engines.engine import TorchEngine
from vitrail.serve import model_manager, version_loader
from vitrail.serve.http_errors import RequestError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def test_the_newest_version_is_served_and_a_newer_one_replaces_it(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "9", seed=9)
        put(folder, "photos", "8", seed=8)
        watched = WatchedFolder(folder)
        await watched.settle()
        assert watched.states() == {"8": "available", "9": "ready"}
        put(folder, "photos", "10", seed=10)
        await watched.settle()
        assert watched.states() == {"8": "available", "9": "available", "10": "ready"}
        expected = make_model(10).predict(photo())[0].index
        assert await watched.label_and_version(photo()) == (expected, "10")

    run_watched(check())


def test_a_file_that_is_still_being_copied_is_not_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_manager, "POLL_S", 0.02)

    async def check() -> None:
        source, target = tmp_path / "source", folder / "photos" / "1"
        make_model().save(source)
        data = (source / "model.safetensors").read_bytes()
        target.mkdir(parents=True)
        shutil.copy(source / "config.json", target)
        watched = WatchedFolder(folder)
        for end in range(0, len(data), len(data) // 3):
            (target / "model.safetensors").write_bytes(data[:end])
            await watched.manager.poll()
            assert watched.states() == {"1": "available"}
            assert watched.manager._loading is None
        (target / "model.safetensors").write_bytes(data)
        await watched.manager.poll()
        await watched.manager.poll()  # too soon to tell
        assert watched.manager._loading is None
        await asyncio.sleep(0.02)
        await watched.manager.poll()  # unchanged since the last time
        assert watched.manager._loading is not None
        await watched.settle()
        assert watched.states() == {"1": "ready"}

    run_watched(check())


def test_a_truncated_version_leaves_the_old_one_and_is_tried_again_when_its_files_change(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        path = put(folder, "photos", "2", seed=2) / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        await watched.settle()
        assert watched.states() == {"1": "ready", "2": "failed"}
        assert "truncated or damaged" in watched.reason("2")
        [model] = watched.manager.describe()
        assert model["default"] == "1"
        assert str(folder) not in str(model)
        assert str(folder) in str(watched.manager.describe(private=True))
        path.write_bytes(data)
        await watched.settle()
        assert watched.states() == {"1": "available", "2": "ready"}

    run_watched(check())


def test_overwriting_the_version_in_use_with_a_bad_file_changes_nothing(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        path = put(folder, "photos", "2", seed=2)
        watched = WatchedFolder(folder)
        await watched.settle()
        before = await watched.label_and_version(photo())
        (path / "model.safetensors").write_bytes(b"not a model")
        await watched.settle()
        assert watched.states()["2"] == "failed"
        assert await watched.label_and_version(photo()) == before

    run_watched(check())


def test_overwriting_the_version_in_use_with_another_model_replaces_it(folder: Path) -> None:
    async def check() -> None:
        path = put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        other = make_model(3)
        shutil.rmtree(path)
        put(folder, "photos", "1", other)
        await watched.settle()
        assert watched.states() == {"1": "ready"}
        with watched.service.registry.lease() as version:
            [row] = await version.infer([photo()], "client", "logits")
        with_other = other.net(other.preprocess.prepare(photo())[None])[0].detach().numpy()
        assert np.allclose(row, with_other, atol=1e-4)

    run_watched(check())


def test_files_that_change_while_they_are_loaded_are_loaded_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        path = put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        load, calls = watched.manager.config.loader, []

        def load_and_touch(name: str) -> Any:
            served = load(name)
            calls.append(name)
            if len(calls) == 1:
                os.utime(path / "config.json", ns=(1, 1))
            return served

        object.__setattr__(watched.manager.config, "loader", load_and_touch)
        await watched.settle()
        assert watched.states() == {"1": "ready"}
        assert len(calls) == 2

    run_watched(check())


def test_removing_the_newest_version_returns_to_the_one_before_and_removing_all_ends_in_404(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        put(folder, "photos", "2", seed=2)
        put(folder, "animals", "1")
        watched = WatchedFolder(folder)
        await watched.settle()
        (folder / "photos" / "2").rename(folder / "photos" / ".2")
        await watched.settle()
        assert watched.states() == {"1": "ready"}
        shutil.rmtree(folder / "photos")
        await watched.settle()
        assert watched.service.registry.names == ("animals",)
        with pytest.raises(RequestError, match="there is no model 'photos'; there is animals"):
            watched.service.registry.get("photos")

    run_watched(check())


def test_models_stay_while_the_folder_cannot_be_listed(folder: Path, tmp_path: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1")
        watched = WatchedFolder(folder)
        await watched.settle()
        folder.rename(tmp_path / "unmounted")
        await watched.manager._poll_safely()
        assert watched.service.registry.names == ("photos",)

    run_watched(check())


def test_a_request_keeps_its_version_until_it_ends_and_then_the_memory_is_released(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        with watched.service.registry.lease() as old:
            net = weakref.ref(old.served.model.net)  # type: ignore[union-attr]
            put(folder, "photos", "2", seed=2)
            await watched.manager.reload(60)
            assert watched.states() == {"1": "draining", "2": "ready"}
            assert watched.service.default.version == "2"
            [row] = await old.infer([photo()], "client", "logits")
            assert row.argmax() == make_model(1).predict(photo())[0].index
        old_threads = [*old.batcher._threads]
        del old
        await watched.settle()
        assert watched.states() == {"1": "available", "2": "ready"}
        assert not any(thread.is_alive() for thread in old_threads)
        gc.collect()
        assert net() is None

    run_watched(check())


@pytest.mark.parametrize("reason", ["reordered", "fewer", "features", "width"])
def test_other_classes_are_refused_unless_the_settings_allow_them(folder: Path, reason: str) -> None:
    others = {
        "reordered": (make_model(2, LABELS[::-1]), "its class 0 is 'frog', that of the version in use 'cat'"),
        "fewer": (make_model(2, LABELS[:4]), "it has 4 classes, the version in use 5"),
        "features": (make_model(2, ()), "it outputs features, the version in use classes"),
        "width": (make_model(2, (), width=64), "its features have 64 numbers, those of the version in use 128"),
    }
    vit, message = others[reason]

    async def check() -> None:
        put(folder, "photos", "1", make_model(1, ()) if reason == "width" else None, seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        put(folder, "photos", "2", vit)
        await watched.settle()
        assert watched.states() == {"1": "ready", "2": "failed"}
        assert message in watched.reason("2")
        write_settings(folder, classes="any")
        with watched.manager.choices_file.change() as choices:
            choices.reloads += 1
        await watched.settle()
        assert watched.states()["2"] == "ready"

    run_watched(check())


def test_a_new_version_may_have_more_classes(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        put(folder, "photos", "2", make_model(2, (*LABELS, "horse")))
        await watched.settle()
        assert watched.states()["2"] == "ready"

    run_watched(check())


def test_a_version_that_is_less_accurate_on_the_canary_images_is_refused(folder: Path) -> None:
    async def check() -> None:
        good, bad = make_model(1), make_model(2)
        write_labeled_images(folder / "photos" / "canary", good)
        put(folder, "photos", "1", good)
        watched = WatchedFolder(folder)
        await watched.settle()
        report = watched.manager.status["photos", "1"].report
        assert report is not None
        assert (report.images, report.accuracy, report.agreement) == (8, 1.0, None)
        put(folder, "photos", "2", bad)
        await watched.settle()
        assert watched.states() == {"1": "ready", "2": "failed"}
        assert "its accuracy on the canary images is 0.0%, that of version 1 100.0%" in watched.reason("2")
        put(folder, "photos", "3", make_model(1))
        await watched.settle()
        report = watched.manager.status["photos", "3"].report
        assert report is not None
        assert (report.compared_with, report.agreement, report.previous_accuracy) == ("1", 1.0, 1.0)

    run_watched(check())


def test_returning_to_a_version_is_not_refused_because_of_its_accuracy_or_classes(folder: Path) -> None:
    async def check() -> None:
        good, bad = make_model(2, (*LABELS, "horse")), make_model(1)
        write_labeled_images(folder / "photos" / "canary", good)
        put(folder, "photos", "1", bad)
        put(folder, "photos", "2", good)
        watched = WatchedFolder(folder)
        await watched.settle()
        (folder / "photos" / "2").rename(folder / "photos" / ".2")
        await watched.settle()
        assert watched.states() == {"1": "ready"}

    run_watched(check())


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "are not finite"), (0.0, "are the same for all 8 canary images")]
)
def test_outputs_that_are_not_finite_or_do_not_depend_on_the_image_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: float, message: str
) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        put(folder, "photos", "2", seed=2)
        with monkeypatch.context() as patched:
            outputs = lambda self, pixels: np.full((len(pixels), 5), value, np.float32)  # noqa: E731
            patched.setattr(TorchEngine, "logits", outputs)
            await watched.settle()
        assert watched.states() == {"1": "ready", "2": "failed"}
        assert message in watched.reason("2")

    run_watched(check())


def test_an_unexpected_error_while_loading_is_a_failure_without_details_for_clients(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)

        def fail(path: str) -> Any:
            raise RuntimeError("secret of the machine")

        watched = WatchedFolder(folder, loader=fail)
        await watched.settle()
        assert watched.states() == {"1": "failed"}
        assert "secret" not in str(watched.manager.describe())
        with pytest.raises(RequestError, match="model 'photos' has no version that is loaded"):
            watched.service.registry.get("photos")

    run_watched(check())


def test_a_warning_says_that_two_versions_may_not_fit_into_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        put(folder, "photos", "1")
        await WatchedFolder(folder).settle()

    monkeypatch.setattr(version_loader, "free_memory", lambda device: 2**20)
    monkeypatch.setattr("vitrail.serve.version_loader.log.propagate", True)
    run_watched(check())
    assert "and 1 MiB are free; give the server memory for two versions" in caplog.text


def test_a_failing_version_at_the_start_makes_way_for_an_older_one(folder: Path) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        (put(folder, "photos", "2") / "model.safetensors").write_bytes(b"")
        watched = WatchedFolder(folder)
        assert not watched.manager.ready
        await watched.settle()
        assert watched.states() == {"1": "ready", "2": "failed"}
        assert watched.manager.ready

    run_watched(check())


def test_the_batch_size_of_the_same_architecture_is_not_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        put(folder, "photos", "1", seed=1)
        watched = WatchedFolder(folder)
        await watched.settle()
        batcher = watched.service.default.batcher
        batcher.batch_size, batcher.shared_batch_size = 3, 2
        put(folder, "photos", "2", seed=2)
        await watched.settle()
        batcher = watched.service.default.batcher
        assert (batcher.batch_size, batcher.shared_batch_size) == (3, 2)
        await asyncio.sleep(0)

    run_watched(check())
