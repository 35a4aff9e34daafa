"""Trackers: TensorBoard, Weights & Biases, MLflow and those of other packages, behind one protocol.

Each tracker is called in a thread of its own, so that a slow one does not delay training, and one that fails is dropped
with one note: metrics.jsonl has all metrics in any case. What was sent is recorded in trackers/NAME.json in the run
folder, so that a resumed run continues the same tracker run and sends each step once.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from vitrail.config.train import TRACKERS
from vitrail.errors import TrainError
from vitrail.plugins import load_plugin
from vitrail.runtime import warn_once
from vitrail.storage.atomic_write import write_json

Metrics = Mapping[str, float]
"""`training/loss`, `training/accuracy`, `evaluation/top1`, `test/top1`, ... -> value, which may be NaN."""

FINISH_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for a tracker that is still sending."""
MAX_PARAM_CHARS, MAX_PARAMS_PER_CALL = 500, 100
"""Limits of MLflow on the length of a parameter and on their number in one call."""
MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
NOT_METRICS = ("step", "images", "epoch", "time", "model_step")


class Tracker(Protocol):
    """Receives the metrics of a run. In the main process only, in order, from one thread.

    A class is called without arguments before the run starts: import what may be missing there.
    """

    def start(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        """A run starts, or is resumed from `step`: what was logged after that step will be logged again.

        `config`: the content of config.json. `folder`: the run folder.
        """

    def log(self, step: int, metrics: Metrics) -> None:
        """A logged step, or an evaluation after this step."""

    def finish(self, status: str) -> None:
        """The end: "finished", "stopped" (the run can be resumed) or "failed"."""


def make_tracker(name: str) -> Any:
    """The tracker of this name; ImportError, or TrainError with the extra to install, if its library is missing."""
    if name not in TRACKERS:
        return load_plugin("trackers", name, TRACKERS)
    try:
        return {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}[name]()
    except ImportError as error:
        raise TrainError(f"trackers={name} needs {error.name}; try pip install 'vitrail[{name}]'.") from error


def tracked_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl under the names that trackers get."""
    group = next((name for name in ("evaluation", "test") if name in line), None)
    values = line if group is None else line[group]
    return {
        f"{group or 'training'}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in NOT_METRICS
    }


class TrackerThread:
    """Calls one tracker in a thread. After an exception the tracker is not called again, and a note says why."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"tracker-{name}")
        self.thread.start()

    def start(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        self.calls.put(("start", (config, folder, step)))

    def log(self, step: int, metrics: Metrics) -> None:
        self.calls.put(("log", (step, metrics)))

    def finish(self, status: str, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Wait until the tracker has sent everything, at most this long."""
        self.calls.put(("finish", (status,)))
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            warn_once([f"the tracker {self.name} is still sending after {timeout_s:.0f} s; the run ends without it"])

    def _run(self) -> None:
        method = ""
        try:
            while method != "finish":
                method, arguments = self.calls.get()
                getattr(self.tracker, method)(*arguments)
        except Exception as error:
            warn_once([
                f"the tracker {self.name} failed and gets no more metrics ({type(error).__name__}: {error}); "
                "training continues, and metrics.jsonl has all metrics"
            ])  # fmt: skip


class SentSteps:
    """What a tracker was sent, in trackers/NAME.json: the run's id there and the last step of each group of metrics."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / "trackers" / f"{name}.json"
        self.id: str | None = None
        self.last: dict[str, int] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.id, self.last = found["id"], {str(group): int(step) for group, step in found["last"].items()}

    def rewind(self, step: int) -> None:
        """Forget the steps after this one, which the tracker has removed and will be sent again."""
        self.last = {group: min(last, step) for group, last in self.last.items()}

    def unsent(self, step: int, metrics: Metrics) -> dict[str, float]:
        """The metrics of groups that were not sent for this step or a later one; they now count as sent."""
        found = {name: v for name, v in metrics.items() if step > self.last.get(name.partition("/")[0], -1)}
        if found:
            self.last |= {name.partition("/")[0]: step for name in found}
            self.write()
        return found

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"id": self.id, "last": self.last}, overwrite=True)


class TensorBoard:
    """TensorBoard events in the run folder: `tensorboard --logdir runs`."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(str(error), name="tensorboard") from error
        self.writer_type: Callable[..., Any] = SummaryWriter

    def start(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        self.sent = SentSteps(folder, "tensorboard")
        self.sent.rewind(step)
        board = folder / "tensorboard"
        # `purge_step` makes TensorBoard drop the events of this step and later ones.
        self.writer = self.writer_type(str(board), purge_step=step + 1 if board.exists() else None)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in self.sent.unsent(step, metrics).items():
            self.writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Weights & Biases. The project is $WANDB_PROJECT, by default vitrail; WANDB_MODE=offline needs no network."""

    def __init__(self) -> None:
        import wandb

        self.wandb = wandb

    def start(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        self.sent = SentSteps(folder, "wandb")
        self.sent.id = self.sent.id or secrets.token_hex(4)
        self.sent.write()
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vitrail"),
            name=_run_name(folder),
            id=self.sent.id,
            resume="allow",
            config=dict(config),
            allow_val_change=True,
            dir=str(folder),
            settings=self.wandb.Settings(console="off", init_timeout=FINISH_TIMEOUT_S / 2),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        if unsent := self.sent.unsent(step, metrics):
            self.run.log(unsent, step=step)

    def finish(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """MLflow. The store is $MLFLOW_TRACKING_URI, by default mlflow.db (SQLite) beside the run folder."""

    def __init__(self) -> None:
        import mlflow.entities
        import mlflow.tracking

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells of every new database
        self.mlflow = mlflow

    def start(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        self.sent = SentSteps(folder, "mlflow")
        default_path = _main_folder(folder).absolute().parent / "mlflow.db"
        self.client = self.mlflow.tracking.MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{default_path}"
        )
        if self.sent.id is not None:
            self.client.update_run(self.sent.id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitrail")
        found = self.client.get_experiment_by_name(experiment)
        number = self.client.create_experiment(experiment) if found is None else found.experiment_id
        self.sent.id = self.client.create_run(number, run_name=_run_name(folder)).info.run_id
        self.sent.write()
        params = [self.mlflow.entities.Param(name, value[:MAX_PARAM_CHARS]) for name, value in _flatten(config)]
        for first in range(0, len(params), MAX_PARAMS_PER_CALL):
            self.client.log_batch(self.sent.id, params=params[first : first + MAX_PARAMS_PER_CALL])

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        if unsent := self.sent.unsent(step, metrics):
            values = [self.mlflow.entities.Metric(name, value, now, step) for name, value in unsent.items()]
            self.client.log_batch(self.sent.id, metrics=values)

    def finish(self, status: str) -> None:
        self.client.set_terminated(self.sent.id, MLFLOW_STATUS[status])


def _main_folder(folder: Path) -> Path:
    """The folder of the main run, for that of a comparison run, runs/digits/compare/NAME."""
    return folder.parent.parent if folder.parent.name == "compare" else folder


def _run_name(folder: Path) -> str:
    main = _main_folder(folder)
    return main.name if main == folder else f"{main.name}/{folder.name}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and text of each setting; MLflow has no empty values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value) or "''"
