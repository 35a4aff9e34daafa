"""Everything that leaves the loop: lines of metrics, the display, checkpoints, and the model at the end."""

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
from vitrail.evaluate.masked_prediction import MaskedPredictionScores
from vitrail.evaluate.scores import Scores
from vitrail.objectives import Distill
from vitrail.runtime import warn_once
from vitrail.runtime.peak_flops import measure_peak_flops
from vitrail.train.display import Display
from vitrail.train.log import Metrics
from vitrail.train.meter import NORM, STEPS, WEIGHT, Meter
from vitrail.train.run import RunFolder
from vitrail.train.setup import samples_named
from vitrail.train.state import (
    Checkpoints,
    Progress,
    Tensors,
    differences,
    generators,
    here,
    seed_generators,
    set_generators,
)
from vitrail.train.trainer import Trainer
from vitrail.weights import checkpoint


class Journal:
    """A run's memory. Only the first process writes and speaks; all of them take part in sums."""

    def __init__(self, run: RunFolder, trainer: Trainer) -> None:
        self.run, self.trainer, self.config, self.ranks = run, trainer, trainer.config, trainer.ranks
        info = trainer.setup.info
        self.progress = Progress(
            ran_on=here(trainer.device, self.ranks.world),
            began={"family": info.family, "origin": info.origin},
            images=trainer.images or None,
            data=trainer.setup.data,
            teacher=trainer.learner.teacher.checksum if isinstance(trainer.learner, Distill) else None,
            total=trainer.total,
        )
        self.checkpoints = Checkpoints(run.checkpoints, trainer.ranks)
        self.meter = Meter(trainer.device)
        self.stack = ExitStack()
        self.scores: Scores | None = None
        self.scored_at = -1
        self.test: Scores | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()

    def begin(self) -> Progress:
        """A new run: the settings are on disk before anything is computed."""
        if self.ranks.first:
            self.stack.enter_context(self.run.held())
            self.run.begin(self.config)
        self.ranks.barrier()
        seed_generators(self.config.seed, self.ranks.rank)
        self._open()
        return self.progress

    def resume(self, saved: tuple[Path, Progress] | None) -> Progress:
        """From the newest checkpoint that is whole; from the beginning where there is none yet."""
        if self.ranks.first:
            self.run.sweep()
        if saved is not None:
            path, progress = saved
            changed = differences(progress.ran_on, self.progress.ran_on)
            if changed:
                warn_once([f"resumed elsewhere ({'; '.join(changed)}): the same run, but not to the last bit"])
            if not progress.data and progress.images not in (None, self.progress.images):  # an older checkpoint
                warn_once([
                    f"{self.config.data.source} had {progress.images:,} images to learn from and has "
                    f"{self.progress.images or 0:,} now: the run goes on, but its result will be another"
                ])  # fmt: skip
            if progress.teacher not in (None, self.progress.teacher):
                warn_once([f"the teacher {self.config.distill.teacher} has other weights than the run began with"])
            tensors = self.checkpoints.read(path, self.trainer.tensors())
            self.trainer.load(tensors)
            self._resume_generators(tensors, progress)
            progress.ran_on, progress.images = self.progress.ran_on, self.progress.images
            progress.data, progress.teacher = self.progress.data, self.progress.teacher
            progress.total = self.progress.total
            self.progress = progress
            self.meter.take(progress.meter if self.ranks.first else {})
        else:
            seed_generators(self.config.seed, self.ranks.rank)
            warn_once([f"{self.run.path} has no checkpoint yet: the run starts from its beginning"])
        self.checkpoints.rewind(self.progress.step)
        self._open()
        return self.progress

    def _resume_generators(self, tensors: Tensors, progress: Progress) -> None:
        """Each process's own go on; on another number of processes there are new ones."""
        rank, world = self.ranks.rank, self.ranks.world
        seed_generators(self.config.seed, rank, progress.step)
        if progress.ran_on.get("processes") == world:
            set_generators(tensors, self.trainer.device, rank)
        elif any(getattr(module, "attention_dropout", 0) for module in self.trainer.learner.net.modules()):
            warn_once(["attention_dropout draws other masks on another number of processes, unlike all other chance"])

    def _open(self) -> None:
        self.started = self.logged = time.monotonic()
        self.before, self.logged_step = self.progress.seconds, self.progress.step
        board = self.run.path / "tensorboard" if self.config.tensorboard else None
        self.metrics = Metrics(self.run.metrics, board) if self.ranks.first else None
        if self.metrics is not None:
            progress = self.progress
            self.metrics.rewind(progress.step, progress.unwritten, evaluated=not progress.evaluation_due)
            self.stack.callback(self.metrics.close)
        self.stack.callback(self.checkpoints.close)
        self.display = self.stack.enter_context(self._display())
        self.trainer.watch = self.display.measuring
        if self.progress.best is not None and self.progress.best_step is not None:
            self.display.seen.best = abs(self.progress.best), self.progress.best_step  # of a loss, it is the negative

    def _display(self) -> Display:
        trainer = self.trainer
        quiet = None if self.ranks.first else Console(quiet=True)
        dtype = torch.bfloat16 if self.config.precision == "bfloat16" else trainer.dtype
        return Display(
            trainer.total,
            trainer.batch,
            images_per_epoch=trainer.images or None,
            flops_per_image=trainer.arithmetic_per_image / self.ranks.world,
            peak_flops=measure_peak_flops(trainer.device, dtype) if self.ranks.first else None,
            title=self.config.name,
            subtitle=str(self.run.path),
            start=self.progress.step,
            num_classes=len(trainer.setup.splits.train.labels),
            device=trainer.device,
            console=quiet,
        )

    def count(self, sums: Tensors, weights: Tensor, norm: Tensor) -> None:
        """One more step: into the sums that `log` reads, and onto the display."""
        self.display.update(self.progress.step)
        whole = norm / self.ranks.world  # every process has the same
        one = torch.ones((), device=norm.device) / self.ranks.world
        self.meter.add({**sums, WEIGHT: weights.sum(), NORM: whole, STEPS: one})

    def log(self, factor: float) -> None:
        """A line of metrics, of what was counted since the last one."""
        step, sums = self.progress.step, self._summed()
        now = time.monotonic()  # a GPU has been waited for: these steps are done, not only asked for
        self.meter.take({})
        weight = max(sums.pop(WEIGHT, 0.0), 1e-9)
        steps, norm = max(sums.pop(STEPS, 1.0), 1e-9), sums.pop(NORM, 0.0)
        images = self.trainer.batch * (step - self.logged_step)
        skipped = {"skipped": self.progress.skipped} if self.progress.skipped else {}
        line: dict[str, Any] = self._place() | {
            **{("accuracy" if name == "correct" else name): value / weight for name, value in sums.items()},
            "lr": self.config.optim.lr * factor,
            NORM: norm / steps,
            "images_per_s": round(images / max(now - self.logged, 1e-9), 2),
            "time": round(self._seconds(), 3),
            **skipped,
        }
        self.logged, self.logged_step = now, step
        self._write(line)
        self.display.update(step, line)

    @contextmanager
    def saved_if_it_fails(self, batches: Loader) -> Iterator[None]:
        """Around a measurement: one that cannot be made costs no step of what was learned before it."""
        try:
            yield
        except VitrailError as error:
            self.checkpoint(batches)
            saved = self.leave()
            if saved is None:
                raise
            skip = ["--skip-bad"] if isinstance(error, DataError) and not self.config.data.skip_bad else []
            again = f"go on from step {saved} with: {self.run.again(*skip)}"
            raise type(error)(f"{error}\nWhat was learned is saved; {again}") from error

    def evaluated(self, scores: Scores | MaskedPredictionScores) -> None:
        """Note a measurement, and the weights where none was better."""
        step, progress = self.progress.step, self.progress
        if isinstance(scores, Scores):
            self.scores, self.scored_at = scores, step
        self._write(self._place() | {"evaluation": scores.to_dict(), "ema": self.config.ema is not None})
        value, loss = _headline(scores), scores.loss
        best = math.isfinite(value) and _better((value, loss), (progress.best, progress.best_loss))
        self.display.evaluated(step, scores.to_dict(), ema=self.config.ema is not None, best=best)
        if best:
            progress.best, progress.best_step, progress.stale = value, step, 0
            progress.best_loss = loss if math.isfinite(loss) else None
            if self._keeps_best():
                self.checkpoints.save_best(self.trainer.model_tensors(), progress)
        else:
            progress.stale += 1
        self.logged, self.logged_step = time.monotonic(), step

    @property
    def patience_is_out(self) -> bool:
        return self.config.patience is not None and self.progress.stale >= self.config.patience

    def checkpoint(self, batches: Loader) -> None:
        """Everything needed to go on, from this very step; of a stream, its state in each process too."""
        self.display.pause()
        self.gather_bad(batches)
        stream = batches.state()
        if self.metrics is not None:
            self.run.restore(self.config)
            self.progress.unwritten = self.metrics.flush()
        self.progress.seconds = self._seconds()
        self.progress.meter = self._summed()
        self.progress.stream = self.ranks.all_told(stream) if stream is not None else None
        self.checkpoints.save(self._tensors(), self.progress)
        self.display.resumed()

    def leave(self) -> int | None:
        """Before its end, when all that can be saved is; the step from which it can go on."""
        self.checkpoints.wait()
        saved: int | None = self.ranks.told(max(self.checkpoints.steps(), default=None))
        return saved

    def gather_bad(self, batches: Loader) -> None:
        """What any process could not read, known to all of them; too much of it stops them all."""
        batches.merge_bad(self.ranks.all_told(batches.bad))
        self.progress.unreadable = batches.bad

    def finish(self, batches: Loader) -> Scores | None:
        """The model of the best weights, or of the last; measured; written where `vitrail.load` finds it."""
        self.gather_bad(batches)
        self._count_bad()
        trainer, progress = self.trainer, self.progress
        self.checkpoints.wait()
        tensors, chosen = trainer.model_tensors(), progress.step
        if self._keeps_best() and progress.best_step not in (None, progress.step):
            found = self.checkpoints.read_best(progress.best_step)
            if found is not None:
                tensors, chosen = found, progress.best_step
                if self.ranks.first:
                    warn_once(
                        [f"the weights of step {chosen:,} were the best and become the model"], about=str(self.run.path)
                    )
        net = trainer.model(tensors)
        if trainer.labeled and self.scored_at != chosen:
            self.scores = trainer.scores(net=net)
            self.display.resumed()
        splits = trainer.setup.splits
        if trainer.labeled and splits.test is not None and splits.eval_split != "test":
            self.test = trainer.scores(splits.test, net=net)
            self.display.resumed()
            self._write(self._place() | {"test": self.test.to_dict(), "model_step": chosen})
        if self.ranks.first:
            info = trainer.setup.info.replace(config=net.config)
            checkpoint.write(net.to("cpu", torch.float32), info, self.run.model, overwrite=True)
        self.checkpoints.close()
        if self.checkpoints.failed is not None and self.ranks.first:
            warn_once([f"the last checkpoint could not be written: {self.checkpoints.failed}"])
        return self.scores

    def last_words(self, batch: Batch) -> str:
        """What to say about a step whose loss is not finite."""
        named = samples_named(self.trainer.setup.splits.train, batch.indices.numpy())
        self.checkpoints.wait()
        return (
            f"the loss of step {batch.step + 1} is not finite; its images were {named}; {self._last_saved()}. "
            "Try a lower learning rate or a longer warm-up, or on_nan=skip to leave such steps out."
        )

    def _count_bad(self) -> None:
        count = len(self.progress.unreadable)
        if count and self.ranks.first:
            warn_once([f"{count:,} image{'s' * (count > 1)} could not be used and counted nothing in training"])

    def _last_saved(self) -> str:
        steps = self.checkpoints.steps()
        if not steps:
            return "no checkpoint was written yet"
        return f"the last good checkpoint is {self.checkpoints.at(steps[-1])}"

    def _keeps_best(self) -> bool:
        keep = self.config.keep
        return keep == "best" or (keep == "auto" and self.trainer.setup.splits.eval_split != "test")

    def _tensors(self) -> Tensors:
        return self.trainer.tensors() | generators(self.trainer.device, self.ranks)

    def _summed(self) -> dict[str, float]:
        names, vector = self.meter.vector()
        if not names:
            return {}
        return dict(zip(names, self.ranks.reduce_sum({"sums": vector})["sums"].tolist(), strict=True))

    def _place(self) -> dict[str, Any]:
        step = self.progress.step
        seen = step * self.trainer.batch
        epoch = {"epoch": seen / self.trainer.images} if self.trainer.images else {}  # a stream has none
        return {"step": step, **epoch, "images": seen}

    def _seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(line)


def _better(found: tuple[float, float], before: tuple[float | None, float | None]) -> bool:
    """Of equal scores, which few images give often, the one with the lower loss."""
    score, loss = before
    return score is None or found[0] > score or (found[0] == score and found[1] < (math.inf if loss is None else loss))


def _headline(scores: Scores | MaskedPredictionScores) -> float:
    """What is compared to find the best: higher is better."""
    if isinstance(scores, MaskedPredictionScores):
        return -scores.loss
    found = scores.mean_average_precision
    return scores.top1 if found is None else found
