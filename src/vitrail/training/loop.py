"""The training loop: one function from a config to a run folder, for every data source, objective and device.

All random numbers are functions of (seed, step, sample), so a run has no hidden state: it can be killed at any
moment, resumed, or moved to another number of processes, and computes the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from vitrail.config import TrainConfig
from vitrail.data.loader import Loader
from vitrail.errors import TrainError
from vitrail.evaluation.scores import Scores
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime import deterministic, log_on_main_process, warn_once
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.callbacks import Observers
from vitrail.training.checkpointing import CheckpointManager, Progress
from vitrail.training.custom_objects import CustomObjects
from vitrail.training.interrupt import Interrupt, StopRequested
from vitrail.training.nan_guard import NaNGuard
from vitrail.training.run_extension import check_extension, extended_config
from vitrail.training.run_logger import RunLogger
from vitrail.training.setup import Setup, prepare_run
from vitrail.training.snapshots import SnapshotWriter
from vitrail.training.trainer import Trainer

BY_SECOND_CTRL_C = "at once by a second Ctrl-C"


@dataclass(frozen=True)
class FitResult:
    """The outcome of `fit`."""

    run: RunFolder
    setup: Setup
    progress: Progress
    scores: Scores | None
    """Of the saved model on the validation images; None for an unfinished run, or one without classes."""
    stop_reason: str | None = None
    """Why it ended early: the name of a signal, or "patience"; None for a run that reached its end."""
    is_main: bool = True
    """Whether this is the main process (rank 0), which writes files and messages."""
    resume_step: int | None = None
    """The step a stopped run resumes from."""
    test_scores: Scores | None = None
    """Of the same model on the test images, if there is a test split besides the validation split."""

    @property
    def unreadable_images(self) -> Mapping[str, str]:
        """Training images that could not be read, with the reason for each."""
        return self.progress.unreadable_images


def fit(
    config: TrainConfig, run: RunFolder, *, resume: bool = False, objects: CustomObjects | None = None
) -> FitResult:
    """Train into a run folder; with `resume`, continue from its last checkpoint.

    `objects`: the objects that the config has names of. If `config` has a longer duration than the folder's config, the
    run is extended.
    """
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(_explain_interrupt(run, interrupt))
        trainer, logger = _open_run(stack, config, run, resume, objects or CustomObjects())
        distributed, progress = trainer.distributed, logger.progress
        config, optimizer, schedule, ema = trainer.config, trainer.optimizer, trainer.schedule, trainer.ema
        nan_guard = NaNGuard(
            distributed.device, config.on_nan, logger.describe_nan, single_process=distributed.world_size == 1
        )
        batches = stack.enter_context(trainer.training_loader(progress))
        augment = trainer.augmentation(cropped=batches.cropped)
        trainer.check_validation_images()
        interrupt.install(logger.display.note, lambda: _stop_message(run, BY_SECOND_CTRL_C))
        trainer.should_stop = lambda: distributed.any(interrupt.stop_requested is not None)
        snapshots = SnapshotWriter(run.snapshots, trainer)
        stack.callback(snapshots.close)
        snapshots.start(progress.step)
        stop_reason = _evaluate(trainer, logger, batches, interrupt) if progress.evaluation_pending else None
        stop_reason = stop_reason or ("patience" if logger.out_of_patience else None)

        for batch in () if stop_reason else batches:
            images, targets = augment(batch)
            total_weight = distributed.all_reduce(batch.weights.sum())
            sums = trainer.backward(images, targets, batch.weights, trainer.sample_seeds(batch), total_weight)
            grad_norm = optimizer.clip_grad_norm(config.optim.grad_clip)
            progress.step = step = batch.step + 1
            if nan_guard.check(sums["loss"], grad_norm, batch):
                optimizer.step(schedule(batch.step))
                if ema is not None:
                    ema.update(batch.step)
                logger.add_step(sums, batch.weights, grad_norm)
            else:  # the loss is not finite and on_nan=skip
                optimizer.zero_grad()
                progress.skipped_steps += 1

            if trainer.is_due(step, "log_every"):
                logger.log_step(schedule(batch.step))
            if trainer.is_due(step, "snapshot_every"):
                nan_guard.check_pending()
                snapshots.take(step)
            if trainer.is_due(step, "evaluate_every"):
                nan_guard.check_pending()
                stop_reason = _evaluate(trainer, logger, batches, interrupt)
                if logger.out_of_patience and step < trainer.total_steps:
                    stop_reason = "patience"
            stop_reason = _check_stop(interrupt, logger, batches) or stop_reason
            if stop_reason or trainer.is_due(step, "checkpoint_every"):
                nan_guard.check_pending()
                snapshots.wait()
                logger.save_checkpoint(batches)
            if stop_reason:
                break
        if stop_reason in (None, "patience"):
            snapshots.take(progress.step)
            snapshots.wait()
            with suppress(StopRequested):
                scores = logger.finish(batches)
                stop_reason = _check_stop(interrupt, logger, batches) or stop_reason
                return FitResult(
                    run,
                    trainer.setup,
                    progress,
                    scores,
                    stop_reason,
                    distributed.is_main,
                    test_scores=logger.test_scores,
                )
            stop_reason = _check_stop(interrupt, logger, batches)
        return FitResult(run, trainer.setup, progress, None, stop_reason, distributed.is_main, logger.last_saved_step())


def _open_run(
    stack: ExitStack, config: TrainConfig, run: RunFolder, resume: bool, objects: CustomObjects
) -> tuple[Trainer, RunLogger]:
    """Create the trainer and the logger, or restore them from a checkpoint; `stack` closes them."""
    distributed = stack.enter_context(DistributedContext.from_env(config.device))
    stack.enter_context(deterministic(config.deterministic))
    if len(set(distributed.all_gather_object(resume))) > 1:
        raise TrainError(
            f"some processes find a run in {run.path} and some do not; use a folder on a disk that all processes share."
        )
    with log_on_main_process():
        if resume and distributed.is_main and run.started:
            stack.enter_context(run.lock())  # another process may still be saving a checkpoint
        saved = CheckpointManager(run.checkpoints, distributed).latest() if resume else None
        if not resume:
            run.check_unused()
        elif saved is None and run.finished:
            raise TrainError(
                f"{run.path} has a finished model but no usable checkpoint: training would start over and replace the "
                f"model. Start a new run with --out, or remove {run.model} first."
            )
        observers = Observers(config, objects, is_main=distributed.is_main, resume=resume)
        trainer = Trainer(prepare_run(config, distributed, saved=saved and saved[1], objects=objects), distributed)
        stack.callback(trainer.close)
        logger = stack.enter_context(RunLogger(run, trainer, observers))
        if not resume:
            logger.start()
            return trainer, logger
        saved_config: TrainConfig = distributed.broadcast_object(run.read_config() if distributed.is_main else None)
        warn_once(check_extension(saved_config, trainer, saved[1] if saved is not None else Progress()))
        logger.resume(saved)
        if distributed.is_main:
            run.reopen(extended_config(saved_config, trainer.config))
        return trainer, logger


def _evaluate(trainer: Trainer, logger: RunLogger, batches: Loader, interrupt: Interrupt) -> str | None:
    """Evaluate and log the scores; returns the stop reason if a signal interrupted the evaluation.

    An interrupted evaluation is repeated when the run resumes.
    """
    progress = logger.progress
    progress.evaluation_pending = True
    try:
        with logger.checkpoint_on_error(batches):
            scores = trainer.evaluate()
        progress.evaluation_pending = False
        logger.log_evaluation(scores)
    except StopRequested:
        return _check_stop(interrupt, logger, batches)
    return None


@contextmanager
def _explain_interrupt(run: RunFolder, interrupt: Interrupt) -> Iterator[None]:
    """Add to a KeyboardInterrupt the message about what was saved and how to resume."""
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args:
            raise
        how = BY_SECOND_CTRL_C if interrupt.exit_requested else "by Ctrl-C"
        raise KeyboardInterrupt(_stop_message(run, how)) from None


def _stop_message(run: RunFolder, how: str) -> str:
    """The message of a run that stops without saving: the last checkpoint and the command that resumes it."""
    if not run.started and run.main_run is None:
        return f"stopped {how} before the first step; nothing was saved"
    saved = run.last_checkpoint_step
    last = "there is no checkpoint yet" if saved is None else f"the last checkpoint is of step {saved}"
    folder = f" of {run.path}" if run.main_run is not None else ""
    return f"stopped {how}; {last}{folder}; resume with: {run.resume_command()}"


def _check_stop(interrupt: Interrupt, logger: RunLogger, batches: Loader) -> str | None:
    """The signal that requested a stop in any process, or None; raises if too many images are unreadable."""
    stop_requests, new_bad = logger.distributed.sum_counts(
        interrupt.stop_requested is not None, batches.num_unshared_bad
    )
    if batches.too_many_bad(new_bad):
        logger.gather_unreadable(batches)
    return (interrupt.stop_requested or "another process") if stop_requests else None
