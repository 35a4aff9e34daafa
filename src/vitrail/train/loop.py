"""Training: one function from settings to a run folder, whatever the data, the objective or the devices.

Everything drawn is a function of (seed, step, sample), so a run has no hidden state: it can be
killed anywhere, resumed, or spread over another number of processes, and computes the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from vitrail.config import TrainConfig
from vitrail.data.loader import Loader
from vitrail.errors import TrainError
from vitrail.evaluate.scores import Scores
from vitrail.runtime import deterministic, log_on_main_process, warn_once
from vitrail.train.extension import check_length, extended
from vitrail.train.health import Health
from vitrail.train.interrupt import Interrupt, StopRequested
from vitrail.train.journal import Journal
from vitrail.train.parallel import Ranks
from vitrail.train.run import RunFolder
from vitrail.train.setup import Setup, prepare
from vitrail.train.snapshots import Snapshots
from vitrail.train.state import Checkpoints, Progress
from vitrail.train.trainer import Trainer

AT_ONCE = "at once by a second Ctrl-C"


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: RunFolder
    setup: Setup
    progress: Progress
    scores: Scores | None
    """Of the model that was kept, on the validation images; None for an unfinished run, or one without classes."""
    stopped: str | None = None
    """What ended it before its time: a signal's name, or "patience"."""
    first: bool = True
    """Whether this process is the one that writes and speaks."""
    saved: int | None = None
    """The step from which a run that was stopped can go on."""
    test: Scores | None = None
    """Of the same model on the test images, where there are some beside the validation ones."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Training images that could not be read, and why."""
        return self.progress.unreadable


def fit(config: TrainConfig, run: RunFolder, *, resume: bool = False) -> Result:
    """Train as the settings say, into a run folder; with `resume`, go on from its last checkpoint.

    Settings with a longer duration than the folder's extend the run.
    """
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(_last_words(run, interrupt))
        trainer, journal = _opened(stack, config, run, resume)
        ranks, progress = trainer.ranks, journal.progress
        config, optimizer, schedule, ema = trainer.config, trainer.optimizer, trainer.schedule, trainer.ema
        health = Health(ranks.device, config.on_nan, journal.last_words, alone=ranks.world == 1)
        batches = stack.enter_context(trainer.batches(progress))
        augment = trainer.augmentation(cropped=batches.cropped)
        trainer.look_ahead()
        interrupt.listen(journal.display.note, lambda: _left_behind(run, AT_ONCE))  # before, there was nothing to save
        trainer.stopping = lambda: ranks.anywhere(interrupt.asked is not None)
        snapshots = Snapshots(run.snapshots, trainer)
        stack.callback(snapshots.close)
        snapshots.begin(progress.step)
        stopped = _evaluate(trainer, journal, batches, interrupt) if progress.evaluation_due else None
        stopped = stopped or ("patience" if journal.patience_is_out else None)

        for batch in () if stopped else batches:
            images, targets = augment(batch)
            total = ranks.sum(batch.weights.sum())
            sums = trainer.backward(images, targets, batch.weights, trainer.keys(batch), total)
            norm = optimizer.clip(config.optim.grad_clip)
            progress.step = step = batch.step + 1
            if health.ok(sums["loss"], norm, batch):
                optimizer.step(schedule(batch.step))
                if ema is not None:
                    ema.update(batch.step)
                journal.count(sums, batch.weights, norm)
            else:
                optimizer.zero()
                progress.skipped += 1

            if trainer.due(step, "log_every"):
                journal.log(schedule(batch.step))
            if trainer.due(step, "snapshot_every"):
                health.settle()
                snapshots.take(step)
            if trainer.due(step, "evaluate_every"):
                health.settle()
                stopped = _evaluate(trainer, journal, batches, interrupt)
                if journal.patience_is_out and step < trainer.total:
                    stopped = "patience"
            stopped = _wish(interrupt, journal, batches) or stopped
            if stopped or trainer.due(step, "checkpoint_every"):
                health.settle()
                snapshots.wait()
                journal.checkpoint(batches)
            if stopped:
                break
        if stopped in (None, "patience"):
            snapshots.take(progress.step)
            snapshots.wait()
            with suppress(StopRequested):
                scores = journal.finish(batches)
                ended = _wish(interrupt, journal, batches) or stopped
                return Result(run, trainer.setup, progress, scores, ended, ranks.first, test=journal.test)
            stopped = _wish(interrupt, journal, batches)
        return Result(run, trainer.setup, progress, None, stopped, ranks.first, journal.leave())


def _opened(stack: ExitStack, config: TrainConfig, run: RunFolder, resume: bool) -> tuple[Trainer, Journal]:
    """Everything that is ready before the first step, to be closed with the stack."""
    ranks = stack.enter_context(Ranks.start(config.device))
    stack.enter_context(deterministic(config.deterministic))
    if len(set(ranks.all_told(resume))) > 1:
        raise TrainError(f"some processes find a run in {run.path} and some do not: its disk must be one they share.")
    with log_on_main_process():
        if resume and ranks.first and run.started:
            stack.enter_context(run.held())  # whoever trains there may be about to save once more
        saved = Checkpoints(run.checkpoints, ranks).latest() if resume else None
        if not resume:
            run.check_free()
        elif saved is None and run.finished:
            raise TrainError(
                f"{run.path} has a finished model and no whole checkpoint: training would begin again and replace it. "
                f"Start a new run with --out, or remove {run.model} first."
            )
        trainer = Trainer(prepare(config, ranks, saved=saved and saved[1]), ranks)
        stack.callback(trainer.close)
        journal = stack.enter_context(Journal(run, trainer))
        if not resume:
            journal.begin()
            return trainer, journal
        before: TrainConfig = ranks.told(run.read_config() if ranks.first else None)
        warn_once(check_length(before, trainer, saved[1] if saved is not None else Progress()))
        journal.resume(saved)
        if ranks.first:
            run.reopen(extended(before, trainer.config))
        return trainer, journal


def _evaluate(trainer: Trainer, journal: Journal, batches: Loader, interrupt: Interrupt) -> str | None:
    """The evaluation that is due; one that a signal stops half-way is made when the run goes on. What stops it."""
    progress = journal.progress
    progress.evaluation_due = True
    try:
        with journal.saved_if_it_fails(batches):
            scores = trainer.evaluate()
        progress.evaluation_due = False
        journal.evaluated(scores)
    except StopRequested:
        return _wish(interrupt, journal, batches)
    return None


@contextmanager
def _last_words(run: RunFolder, interrupt: Interrupt) -> Iterator[None]:
    """Ctrl-C that ends a run at once says what is left of it."""
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args:
            raise
        how = AT_ONCE if interrupt.at_once else "by Ctrl-C"
        raise KeyboardInterrupt(_left_behind(run, how)) from None


def _left_behind(run: RunFolder, how: str) -> str:
    """What there is to go on from after a stop that saved nothing more."""
    if not run.started and run.compared_with is None:
        return f"stopped {how} before the first step; nothing was saved"
    saved = run.saved
    last = "there is no checkpoint yet" if saved is None else f"the last checkpoint is of step {saved}"
    of = f" of {run.path}" if run.compared_with is not None else ""
    return f"stopped {how}; {last}{of}; go on with: {run.again()}"


def _wish(interrupt: Interrupt, journal: Journal, batches: Loader) -> str | None:
    """The signal that has asked any of the processes to stop; too many unreadable images end them all."""
    asked, news = journal.ranks.totals(interrupt.asked is not None, batches.num_unshared_bad)
    if batches.too_many_bad(news):
        journal.gather_bad(batches)
    return (interrupt.asked or "another process") if asked else None
