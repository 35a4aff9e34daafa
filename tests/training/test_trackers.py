"""TensorBoard, W&B and MLflow get every metric once, also when a run is resumed; a failing tracker stops no run."""

from __future__ import annotations

import importlib
import json
import struct
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from training.small_runs import at_step, digits_config, logged_metrics, model_weights

import vitrail
from vitrail.config import TrainConfig
from vitrail.config.format_version import upgrade
from vitrail.errors import ConfigError, TrainError
from vitrail.runs.run_folder import RunFolder
from vitrail.runs.trackers import TrackerThread, tracked_metrics

pytestmark = pytest.mark.usefixtures("quick_disk", "in_tmp_dir")

Points = list[tuple[str, int, float]]


@pytest.fixture(autouse=True)
def local_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def read_tensorboard(folder: Path) -> Points:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(tag, e.step, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]


def read_wandb(folder: Path) -> Points:
    """The history in the files of all offline runs, which `wandb sync` would upload."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: Points = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = messages.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = int(items.get("_step", record.history.step.num))
                found += [(k, step, json.loads(v)) for k, v in items.items() if not k.startswith("_")]
    return found


def log_records(data: bytes) -> list[bytes]:
    """The records of a LevelDB log, W&B's file format: blocks of 32 KiB, each chunk with checksum, length and type."""
    assert data[:4] == b":W&B"
    at, records, partial = 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        partial += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            records.append(partial)
            partial = b""
    return records


def read_mlflow(folder: Path) -> Points:
    tracking = importlib.import_module("mlflow.tracking")
    client = tracking.MlflowClient(f"sqlite:///{folder.absolute().parent / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "vitrail"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.01"
    return [
        (m.key, m.step, m.value) for name in run.data.metrics for m in client.get_metric_history(run.info.run_id, name)
    ]


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("tracker", READERS)
def test_a_resumed_run_sends_each_metric_once(tracker: str, tmp_path: Path):
    pytest.importorskip(tracker)
    config = digits_config(12, trackers=(tracker,))
    with at_step(11, interrupt), pytest.raises(KeyboardInterrupt):  # the last checkpoint is of step 8
        vitrail.train(config, out="run", report=False)
    vitrail.train(resume=True, out="run", report=False)
    expected = [(*item, line["step"]) for line in logged_metrics(Path("run")) for item in tracked_metrics(line).items()]
    # Images per second are not in `logged_metrics`: they depend on the clock.
    got = [point for point in READERS[tracker](Path("run")) if point[0] != "training/images_per_s"]
    assert sorted((name, step) for name, step, _ in got) == sorted((name, step) for name, _, step in expected)
    assert {(name, step): value for name, step, value in got} == {
        (name, step): pytest.approx(value, rel=1e-5) for name, value, step in expected
    }


def test_a_plain_run_and_one_with_a_tracker_end_with_the_same_bits():
    vitrail.train(digits_config(6), out="plain", report=False)
    vitrail.train(digits_config(6, trackers=("tensorboard",)), out="tracked", report=False)
    plain, tracked = model_weights(Path("plain")), model_weights(Path("tracked"))
    assert all(plain[name].equal(tracked[name]) for name in plain)
    assert logged_metrics(Path("plain")) == logged_metrics(Path("tracked"))


class Recorder:
    """A tracker that keeps its calls, and may fail in one."""

    def __init__(self, fails_in: str = "", wait: threading.Event | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_in, self.wait = fails_in, wait

    def _call(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))
        if self.wait is not None:
            self.wait.wait(60)
        if method == self.fails_in:
            raise ConnectionError("no route to host")

    def start(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        self._call("start", config["name"], folder, step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", step, sorted(metrics))

    def finish(self, status: str) -> None:
        self._call("finish", status)


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_failing_tracker_is_noted_once_and_does_not_stop_the_run(method: str, caplog: pytest.LogCaptureFixture):
    broken, working = Recorder(fails_in=method), Recorder()
    run = vitrail.train(digits_config(6), trackers=[broken, working], out="run", report=False)
    assert run.finished
    assert sum("failed and gets no more metrics" in message for message in caplog.messages) == 1
    assert "ConnectionError: no route to host" in caplog.text
    assert broken.calls[-1][0] == method
    assert [call[0] for call in working.calls] == ["start", "log", "log", "log", "log", "finish"]
    assert working.calls[0] == ("start", "small", Path("run"), 0)
    assert working.calls[1][1] == 3
    assert "training/loss" in working.calls[1][2]
    assert "evaluation/top1" in working.calls[2][2]
    assert working.calls[-1] == ("finish", "finished")


def test_a_tracker_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture):
    wait = threading.Event()
    thread = TrackerThread("slow", Recorder(wait=wait))
    thread.start({"name": "x"}, Path("x"), 0)
    thread.finish("finished", timeout_s=0.05)
    assert "the tracker slow is still sending after" in caplog.text
    wait.set()


def test_trackers_are_told_how_a_run_ended():
    recorder = Recorder()
    with at_step(3, interrupt), pytest.raises(KeyboardInterrupt):
        vitrail.train(digits_config(6), trackers=[recorder], out="stopped", report=False)
    assert recorder.calls[-1] == ("finish", "stopped")
    failing = Recorder()
    with pytest.raises(TrainError, match="the callback Broken failed in on_step"):
        vitrail.train(digits_config(6), trackers=[failing], callbacks=[Broken()], out="failed", report=False)
    assert failing.calls[-1] == ("finish", "failed")


class Broken:
    def on_step(self, run: object) -> None:
        raise ZeroDivisionError("oh")


def test_a_missing_library_is_an_error_before_the_run_and_a_note_when_it_is_resumed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    vitrail.train(digits_config(2), out="run", report=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainError, match=r"trackers=wandb needs wandb; try pip install 'vitrail\[wandb\]'"):
        vitrail.train(digits_config(2), trackers="wandb", out="other", report=False)
    assert not Path("other").exists()
    vitrail.train(resume=True, out="run", trackers="wandb", report=False)
    assert "the run continues without its tracker: trackers=wandb needs wandb" in caplog.text


def test_an_unknown_tracker_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"trackers='tensorbord' is not .*; did you mean 'tensorboard'\?"):
        digits_config(2, trackers="wandb,tensorbord")


def test_trackers_are_a_list_separated_by_commas():
    assert digits_config(2, trackers="wandb, mlflow").trackers == ("wandb", "mlflow")
    assert digits_config(2, trackers=None).trackers == ()


@pytest.mark.parametrize("version", [{}, {"format_version": 2}])
def test_the_old_setting_tensorboard_is_read(version: dict[str, int]):
    values = digits_config(2).to_dict()
    del values["trackers"]
    for old, expected in ((True, ("tensorboard",)), (False, ())):
        config = TrainConfig.from_dict(upgrade("run", values | version | {"tensorboard": old}))
        assert config.trackers == expected


def test_a_run_that_was_started_with_the_old_setting_is_resumed():
    vitrail.train(digits_config(2), out="run", report=False)
    values = json.loads(Path("run/config.json").read_text())
    del values["trackers"]
    Path("run/config.json").write_text(json.dumps(values | {"tensorboard": True}))
    assert RunFolder(Path("run")).read_config().trackers == ("tensorboard",)
