"""All output of the training loop: metrics, the display, checkpoints, and the final model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.loader import Loader
from vitrail.errors import DataError, VitrailError
from vitrail.evaluation.masked_prediction import MaskedPredictionScores
from vitrail.evaluation.scores import Scores
from vitrail.objectives import DistillObjective
from vitrail.runs.metrics_log import MetricsLog
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime import warn_once
from vitrail.runtime.peak_flops import measure_peak_flops
from vitrail.training.callbacks import Observers, RunView
from vitrail.training.checkpointing import (
    CheckpointManager,
    Progress,
    Tensors,
    current_environment,
    describe_environment_changes,
    rng_states,
    seed_rngs,
    set_rng_states,
)
from vitrail.training.display import Display
from vitrail.training.final_model import ShardedModel, WholeModel, final_model
from vitrail.training.meter import NORM, STEPS, WEIGHT, Meter
from vitrail.training.setup import format_sample_names
from vitrail.training.trainer import Trainer


class RunLogger:
    """Logs, saves and restores a run. Every process calls each method; the main process writes."""

    def __init__(self, run: RunFolder, trainer: Trainer, observers: Observers) -> None:
        self.observers, self.status = observers, "stopped"
        self.run, self.trainer, self.config, self.distributed = run, trainer, trainer.config, trainer.distributed
        info = trainer.setup.info
        self.progress = Progress(
            environment=current_environment(trainer.device, self.distributed.world_size),
            model_origin={"family": info.family, "origin": info.origin},
            num_images=trainer.num_images or None,
            data_fingerprint=trainer.setup.data_fingerprint,
            teacher_checksum=trainer.objective.teacher.checksum
            if isinstance(trainer.objective, DistillObjective)
            else None,
            total_steps=trainer.total_steps,
        )
        self.checkpoints = CheckpointManager(run.checkpoints, trainer.distributed)
        self.meter = Meter(trainer.device)
        self.stack = ExitStack()
        self.scores: Scores | None = None
        self.scores_step = -1
        self.test_scores: Scores | None = None

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.status = "failed"
        self.stack.close()

    def start(self) -> Progress:
        """Start a new run: write its config before anything is computed."""
        if self.distributed.is_main:
            self.stack.enter_context(self.run.lock())
            self.run.create(self.config)
        self.distributed.barrier()
        seed_rngs(self.config.seed, self.distributed.rank)
        self._open()
        return self.progress

    def resume(self, saved: tuple[Path, Progress] | None) -> Progress:
        """Restore the state of a checkpoint; without one, start from the beginning."""
        if self.distributed.is_main:
            self.run.remove_temporary_files()
        if saved is not None:
            path, progress = saved
            changed = describe_environment_changes(progress.environment, self.progress.environment)
            if changed:
                warn_once(
                    [f"resumed in another environment ({'; '.join(changed)}): the result may not be bitwise identical"]
                )
            older = not progress.data_fingerprint
            if older and progress.num_images not in (None, self.progress.num_images):
                warn_once([
                    f"{self.config.data.source} had {progress.num_images:,} training images and has "
                    f"{self.progress.num_images or 0:,} now: the run continues, but its result will differ"
                ])  # fmt: skip
            if progress.teacher_checksum not in (None, self.progress.teacher_checksum):
                warn_once(
                    [f"the teacher {self.config.distill.teacher} has different weights than at the start of the run"]
                )
            tensors = self.checkpoints.read(path, self.trainer.state_tensors())
            self.trainer.load_state_tensors(tensors)
            self._restore_rngs(tensors, progress)
            for name in ("environment", "num_images", "data_fingerprint", "teacher_checksum", "total_steps"):
                setattr(progress, name, getattr(self.progress, name))
            self.progress = progress
            self.meter.reset(progress.metric_sums if self.distributed.is_main else {})
        else:
            seed_rngs(self.config.seed, self.distributed.rank)
            warn_once([f"{self.run.path} has no checkpoint yet: the run starts from the beginning"])
        self.checkpoints.delete_after(self.progress.step)
        self._open()
        return self.progress

    def _restore_rngs(self, tensors: Tensors, progress: Progress) -> None:
        """Restore each process's random generators; on another number of processes, seed new ones."""
        rank, world = self.distributed.rank, self.distributed.world_size
        seed_rngs(self.config.seed, rank, progress.step)
        if progress.environment.get("processes") == world:
            set_rng_states(tensors, self.trainer.device, rank)
        elif any(getattr(module, "attention_dropout", 0) for module in self.trainer.objective.net.modules()):
            warn_once(["with a different number of processes, attention_dropout draws different masks than before"])

    def _open(self) -> None:
        self.stack.callback(lambda: self.observers.end(self.status))
        self.started_at = self.logged_at = time.monotonic()
        self.elapsed_before, self.logged_step = self.progress.elapsed_seconds, self.progress.step
        self.metrics = MetricsLog(self.run.metrics) if self.distributed.is_main else None
        if self.metrics is not None:
            progress = self.progress
            self.metrics.rewind(progress.step, progress.unwritten_metrics, evaluated=not progress.evaluation_pending)
            self.stack.callback(self.metrics.close)
        self.stack.callback(self.checkpoints.close)
        self.display = self.stack.enter_context(self._display())
        self.trainer.on_evaluation_batch = self.display.show_evaluation_progress
        self.observers.start(self._view())
        progress = self.progress
        if progress.best_score is not None and progress.best_step is not None:
            self.display.state.best = abs(progress.best_score), progress.best_step  # the score of a loss is negative

    def _view(self) -> RunView:
        trainer = self.trainer
        return RunView(
            self.run.path,
            self.config,
            trainer.setup.info.labels or (),
            trainer.total_steps,
            trainer.batch_size,
            trainer.num_images or None,
            self.progress.step > 0,
            lambda: self.progress.step,
        )

    def _display(self) -> Display:
        trainer = self.trainer
        quiet = None if self.distributed.is_main else Console(quiet=True)
        dtype = torch.bfloat16 if self.config.precision == "bfloat16" else trainer.dtype
        return Display(
            trainer.total_steps,
            trainer.batch_size,
            images_per_epoch=trainer.num_images or None,
            flops_per_image=trainer.flops_per_image / self.distributed.world_size,
            peak_flops=measure_peak_flops(trainer.device, dtype) if self.distributed.is_main else None,
            title=self.config.name,
            subtitle=str(self.run.path),
            start_step=self.progress.step,
            num_classes=len(trainer.setup.splits.train.labels),
            device=trainer.device,
            console=quiet,
        )

    def add_step(self, sums: Tensors, weights: Tensor, norm: Tensor) -> None:
        """Add the metrics of a step to the sums for `log_step`, and update the display."""
        self.display.update(self.progress.step)
        # The meter sums over processes, and these two values are the same in each of them.
        world_size = self.distributed.world_size
        steps = torch.ones((), device=norm.device) / world_size
        self.meter.add({**sums, WEIGHT: weights.sum(), NORM: norm / world_size, STEPS: steps})
        self.observers.step()

    def log_step(self, factor: float) -> None:
        """Write the averages since the last logged step; `factor` is the learning rate relative to `optim.lr`."""
        step, sums = self.progress.step, self._reduced_sums()
        now = time.monotonic()  # after the sums, which wait for the GPU to finish these steps
        self.meter.reset({})
        weight = max(sums.pop(WEIGHT, 0.0), 1e-9)
        steps, norm = max(sums.pop(STEPS, 1.0), 1e-9), sums.pop(NORM, 0.0)
        images = self.trainer.batch_size * (step - self.logged_step)
        skipped = {"skipped": self.progress.skipped_steps} if self.progress.skipped_steps else {}
        line: dict[str, Any] = self._position() | {
            **{("accuracy" if name == "correct" else name): value / weight for name, value in sums.items()},
            "lr": self.config.optim.lr * factor,
            NORM: norm / steps,
            "images_per_s": round(images / max(now - self.logged_at, 1e-9), 2),
            "time": round(self._elapsed_seconds(), 3),
            **skipped,
        }
        self.logged_at, self.logged_step = now, step
        self._write(line)
        self.display.update(step, line)

    @contextmanager
    def checkpoint_on_error(self, batches: Loader) -> Iterator[None]:
        """Context for an evaluation: if it fails, save a checkpoint before raising the error."""
        try:
            yield
        except VitrailError as error:
            self.save_checkpoint(batches)
            saved = self.last_saved_step()
            if saved is None:
                raise
            skip = ["--skip-bad"] if isinstance(error, DataError) and not self.config.data.skip_bad else []
            raise type(error)(
                f"{error}\nThe training state is saved; resume from step {saved} with: {self.run.resume_command(*skip)}"
            ) from error

    def log_evaluation(self, scores: Scores | MaskedPredictionScores) -> None:
        """Write the scores of an evaluation; if they are the best so far, save the weights."""
        step, progress = self.progress.step, self.progress
        if isinstance(scores, Scores):
            self.scores, self.scores_step = scores, step
        self._write(self._position() | {"evaluation": scores.to_dict(), "ema": self.config.ema is not None})
        value, loss = _selection_score(scores), scores.loss
        best = math.isfinite(value) and _is_better((value, loss), (progress.best_score, progress.best_loss))
        self.display.show_evaluation(step, scores.to_dict(), ema=self.config.ema is not None, best=best)
        if best:
            progress.best_score, progress.best_step, progress.evaluations_since_best = value, step, 0
            progress.best_loss = loss if math.isfinite(loss) else None
            if self._keeps_best():
                with self.trainer.ema_weights():
                    self.checkpoints.save_best(self.trainer.network_tensors(), progress)
        else:
            progress.evaluations_since_best += 1
        self.logged_at, self.logged_step = time.monotonic(), step

    @property
    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.progress.evaluations_since_best >= self.config.patience

    def save_checkpoint(self, batches: Loader) -> None:
        """Save the full training state, including the loader's state in each process for a stream."""
        self.display.pause()
        self.gather_unreadable(batches)
        stream = batches.state()
        if self.metrics is not None:
            self.run.recreate_if_missing(self.config)
            self.progress.unwritten_metrics = self.metrics.flush()
        self.progress.elapsed_seconds = self._elapsed_seconds()
        self.progress.metric_sums = self._reduced_sums()
        self.progress.stream_states = self.distributed.all_gather_object(stream) if stream is not None else None
        self.checkpoints.save(self._state_tensors(), self.progress)
        if self.observers.wants("on_checkpoint"):
            self.checkpoints.wait()
            self.observers.checkpoint(self.checkpoints.path_of(self.progress.step))
        self.display.resume()

    def last_saved_step(self) -> int | None:
        """Wait for pending writes and return the step of the newest checkpoint."""
        self.checkpoints.wait()
        saved: int | None = self.distributed.broadcast_object(max(self.checkpoints.steps(), default=None))
        return saved

    def gather_unreadable(self, batches: Loader) -> None:
        """Share the unreadable images of all processes; raises in all of them if there are too many."""
        batches.merge_bad(self.distributed.all_gather_object(batches.bad))
        self.progress.unreadable_images = batches.bad

    def finish(self, batches: Loader) -> Scores | None:
        """Evaluate the best weights, or the last, and write them as the model folder; returns the validation scores."""
        self.gather_unreadable(batches)
        self._report_unreadable()
        self.checkpoints.wait()
        trainer, splits = self.trainer, self.trainer.setup.splits
        with trainer.ema_weights():
            model, model_step = self._final_model()
            if trainer.has_labels and self.scores_step != model_step:
                self.scores = model.evaluate()
                self.display.resume()
            if trainer.has_labels and splits.test is not None and splits.eval_split != "test":
                self.test_scores = model.evaluate(splits.test)
                self.display.resume()
                self._write(self._position() | {"test": self.test_scores.to_dict(), "model_step": model_step})
            model.write(self.run.model)
        self.checkpoints.close()
        if self.checkpoints.error is not None and self.distributed.is_main:
            warn_once([f"the last checkpoint could not be written: {self.checkpoints.error}"])
        self.status = "finished"
        return self.scores

    def _final_model(self) -> tuple[WholeModel | ShardedModel, int]:
        """The network that becomes the model, with the best weights or the last, and the step of these."""
        trainer, last = self.trainer, self.progress.step
        best = self.progress.best_step if self._keeps_best() else None
        if best is None or best == last:
            return final_model(trainer), last
        weights = self.checkpoints.read_best(best, trainer.network_tensors())
        if weights is None:
            return final_model(trainer), last
        if self.distributed.is_main:
            note = f"the weights of step {best:,} have the best score and become the model"
            warn_once([note], about=str(self.run.path))
        return final_model(trainer, weights), best

    def describe_nan(self, batch: Batch) -> str:
        """The error message for a step whose loss is not finite."""
        names = format_sample_names(self.trainer.setup.splits.train, batch.indices.numpy())
        self.checkpoints.wait()
        return (
            f"the loss of step {batch.step + 1} is not finite; its images were {names}; {self._last_checkpoint()}. "
            "Try a lower learning rate or a longer warm-up, or on_nan=skip to skip such steps."
        )

    def _report_unreadable(self) -> None:
        count = len(self.progress.unreadable_images)
        if count and self.distributed.is_main:
            warn_once([f"{count:,} image{'s' * (count > 1)} could not be read and had no weight in training"])

    def _last_checkpoint(self) -> str:
        steps = self.checkpoints.steps()
        if not steps:
            return "no checkpoint was written yet"
        return f"the last good checkpoint is {self.checkpoints.path_of(steps[-1])}"

    def _keeps_best(self) -> bool:
        keep = self.config.keep
        return keep == "best" or (keep == "auto" and self.trainer.setup.splits.eval_split != "test")

    def _state_tensors(self) -> Tensors:
        return self.trainer.state_tensors() | rng_states(self.trainer.device, self.distributed)

    def _reduced_sums(self) -> dict[str, float]:
        names, vector = self.meter.stacked()
        if not names:
            return {}
        return dict(zip(names, self.distributed.all_reduce_tensors({"sums": vector})["sums"].tolist(), strict=True))

    def _position(self) -> dict[str, Any]:
        step = self.progress.step
        seen = step * self.trainer.batch_size
        epoch = {"epoch": seen / self.trainer.num_images} if self.trainer.num_images else {}  # a stream has none
        return {"step": step, **epoch, "images": seen}

    def _elapsed_seconds(self) -> float:
        return self.elapsed_before + time.monotonic() - self.started_at

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(line)
            self.observers.write(line)


def _is_better(new: tuple[float, float], best: tuple[float | None, float | None]) -> bool:
    """Compare (score, loss): of equal scores, which are common with few images, the lower loss is better."""
    score, loss = best
    return score is None or new[0] > score or (new[0] == score and new[1] < (math.inf if loss is None else loss))


def _selection_score(scores: Scores | MaskedPredictionScores) -> float:
    """The score that selects the best weights; higher is better."""
    if isinstance(scores, MaskedPredictionScores):
        return -scores.loss
    mean_ap = scores.mean_average_precision
    return scores.top1 if mean_ap is None else mean_ap
