"""Callbacks and trackers of a run: what other code sees of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vitrail.config import TrainConfig
from vitrail.config.train import TRACKERS
from vitrail.errors import TrainError
from vitrail.plugins import IN_MEMORY, plugin_errors
from vitrail.runs.trackers import TrackerThread, make_tracker, tracked_metrics
from vitrail.runtime import warn_once
from vitrail.training.custom_objects import CustomObjects


@dataclass(frozen=True)
class RunView:
    """What a callback sees of a run. `step` and `epoch` advance; nothing can be changed."""

    folder: Path
    config: TrainConfig
    """The resolved settings."""
    labels: tuple[str, ...]
    """Class names; empty for a run without labels."""
    total_steps: int
    batch_size: int
    num_images: int | None
    """Number of training images; None for a stream."""
    resumed: bool
    _step: Callable[[], int] = field(repr=False)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._step()

    @property
    def epoch(self) -> float | None:
        return self.step * self.batch_size / self.num_images if self.num_images else None


class Callback(Protocol):
    """Methods that a callback may have; each is optional.

    They are called in the main process, between two steps, and training waits for them; comparison runs do not call
    them. An exception ends the run with an error that names the callback.
    """

    def on_start(self, run: RunView) -> None:
        """Before the first step, or the first step after resuming."""

    def on_step(self, run: RunView) -> None:
        """After each step. The loss is not known here: reading it would make a GPU wait; see `on_log`."""

    def on_log(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl (`log_every`): loss, accuracy, lr, grad_norm, images_per_s, ..."""

    def on_evaluation(self, run: RunView, scores: Mapping[str, Any]) -> None:
        """After each evaluation: its scores, as in metrics.jsonl."""

    def on_checkpoint(self, run: RunView, folder: Path) -> None:
        """After a checkpoint has been written to this folder. With this method, training waits for the write."""

    def on_end(self, run: RunView, status: str) -> None:
        """The end: "finished" (the model is in run.folder / "model"), "stopped" (it can be resumed) or "failed"."""


HOOKS = ("on_start", "on_step", "on_log", "on_evaluation", "on_checkpoint", "on_end")


class Observers:
    """The callbacks and trackers of a run, in the main process; in other processes there are none."""

    def __init__(self, config: TrainConfig, objects: CustomObjects, *, is_main: bool, resume: bool) -> None:
        self.callbacks: dict[str, Any] = {}
        self.trackers: dict[str, Any] = {}
        self.threads: list[TrackerThread] = []
        self.view: RunView | None = None
        if not is_main:
            return
        for name in config.callbacks:
            self.callbacks[name] = _instance("callbacks", name, objects.find("callbacks", name))
            if not any(hasattr(self.callbacks[name], hook) for hook in HOOKS):
                raise TrainError(
                    f"the callback {name.removeprefix(IN_MEMORY)} has none of the methods {', '.join(HOOKS)}."
                )
        for name in config.trackers:
            try:
                found = make_tracker(name) if name in TRACKERS else objects.find("trackers", name)
                self.trackers[name] = found if name in TRACKERS else _instance("trackers", name, found)
            except TrainError as error:
                if not resume or name not in TRACKERS:
                    raise
                warn_once([f"the run continues without its tracker: {error}"])

    def start(self, view: RunView) -> None:
        self.view = view
        for name, tracker in self.trackers.items():
            self.threads.append(thread := TrackerThread(name, tracker))
            thread.start(view.config.to_dict(), view.folder, view.step)
        self._call("on_start")

    def step(self) -> None:
        self._call("on_step")

    def write(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        for thread in self.threads:
            thread.log(line["step"], tracked_metrics(line))
        if "evaluation" in line:
            self._call("on_evaluation", line["evaluation"])
        elif "test" not in line:
            self._call("on_log", line)

    def wants(self, hook: str) -> bool:
        return any(hasattr(callback, hook) for callback in self.callbacks.values())

    def checkpoint(self, folder: Path) -> None:
        self._call("on_checkpoint", folder)

    def end(self, status: str) -> None:
        """Called once, whatever happened; trackers are finished even if a callback fails."""
        if self.view is None:
            return
        try:
            self._call("on_end", status)
        except TrainError:
            status = "failed"
            raise
        finally:
            for thread in self.threads:
                thread.finish(status)

    def _call(self, hook: str, *arguments: Any) -> None:
        for name, callback in self.callbacks.items():
            method = getattr(callback, hook, None)
            if method is None:
                continue
            assert self.view is not None
            try:
                method(self.view, *arguments)
            except Exception as error:
                raise TrainError(
                    f"the callback {name.removeprefix(IN_MEMORY)} failed in {hook} at step {self.view.step}: "
                    f"{type(error).__name__}: {error}"
                ) from error


def _instance(group: str, name: str, found: Any) -> Any:
    """The object, or what a class or a function without arguments returns."""
    hooks: Sequence[str] = HOOKS if group == "callbacks" else ("start", "log", "finish")
    if isinstance(found, type) or (callable(found) and not any(hasattr(found, hook) for hook in hooks)):
        with plugin_errors(group, name):
            return found()
    return found
