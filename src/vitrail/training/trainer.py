"""The components of a run: objective, optimizer, schedule, EMA, augmentation; their evaluation and their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from vitrail import rng
from vitrail.config import Duration, TrainConfig, pair
from vitrail.data.augment import Augment
from vitrail.data.batch import Batch
from vitrail.data.batches import evaluation_batches, training_batches
from vitrail.data.loader import Loader, usable_indices
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Source
from vitrail.data.transfer import TargetTable
from vitrail.errors import ConfigError, TrainError
from vitrail.evaluation.accuracy import measure
from vitrail.evaluation.masked_prediction import MaskedPredictionScores, measure_masked_prediction
from vitrail.evaluation.scores import Scores
from vitrail.kernels.choice import set_kernels
from vitrail.models.flops import count_flops, training_flops
from vitrail.objectives import DistillObjective, make_objective, requires_labels
from vitrail.runtime import autocast, resolve_precision, warn_once
from vitrail.runtime.distributed import DistributedContext
from vitrail.runtime.peak_flops import slowdown
from vitrail.training.batch_size_search import MAX_BATCH_SIZE, find_batch_size
from vitrail.training.checkpointing import Progress, Tensors, add_prefix, select_prefix
from vitrail.training.ema import EMA, check_same_tensors
from vitrail.training.interrupt import StopRequested
from vitrail.training.lr_schedule import LRSchedule
from vitrail.training.optimizer import freeze, make_optimizer
from vitrail.training.parallel import SHARDED, copy_into, evaluation_network, gradient_sync, unwrap, wrap
from vitrail.training.setup import Setup

# b images of this process, C channels, H W pixels, K classes

INTERVALS = ("log_every", "evaluate_every", "checkpoint_every", "snapshot_every")


class Trainer:
    """The components of a run, built from its config."""

    def __init__(self, setup: Setup, distributed: DistributedContext) -> None:
        config, source = setup.config, setup.splits.train
        config = config.replace(precision=resolve_precision(config.precision, distributed.device))
        setup = replace(setup, config=config)
        self.setup, self.config, self.distributed, self.device = setup, config, distributed, distributed.device
        set_kernels(config.kernels)
        self.autocast()  # fails early if the device does not support the precision
        self._warn_of_slow_precision()
        if config.patience is not None and setup.splits.eval_split == "test":
            warn_once([
                "early stopping uses the test images, which biases their score; "
                "data.held_out=0.1 holds out validation images"
            ])  # fmt: skip
        self.num_images = 0  # unknown for a stream
        if hasattr(source, "__len__"):
            targets = TargetTable(source.targets, source.multi_label, self.has_labels)
            self.num_images = len(usable_indices(source, targets))
        self.dtype = torch.float64 if config.precision == "float64" else torch.float32
        self.preprocess = Preprocess(setup.info.preprocess)
        setup.net.gradient_checkpointing = config.gradient_checkpointing
        # FSDP moves the weights to the device one unit at a time, so that it never has to hold the whole model. Only a
        # distilled one is there from the start, beside its teacher.
        shards_later = distributed.object_group is not None and config.parallel in SHARDED
        on_cpu = shards_later and config.objective != "distill"
        start_device = torch.device("cpu") if on_cpu else self.device
        self.objective = make_objective(
            config,
            setup.net.train(),
            setup.info.preprocess,
            multi_label=source.multi_label,
            class_counts=setup.class_counts,
            labels=source.labels,
            device=start_device,
            custom=setup.objective,
        ).to(start_device, self.dtype)
        freeze(self.objective, config.optim.trainable)
        if config.batch_size == "auto":
            config = config.replace(batch_size=self._find_batch_size())
            self.setup, self.config = replace(setup, config=config), config
        self.batch_size = _check_batch_size(config, distributed.world_size, self.num_images)
        self.total_steps = max(self.to_steps("duration"), 1)
        self.intervals = {name: max(self.to_steps(name), 1) for name in INTERVALS if getattr(config, name) is not None}
        graphs = config.compile == "graphs"
        if config.compile and (not graphs or self.device.type == "cuda"):
            self.objective.compile(dynamic=False, mode="reduce-overhead" if graphs else None)
        self.wrapped = wrap(self.objective, config, distributed)
        self.optimizer = make_optimizer(self.objective, config.optim)
        self.schedule = LRSchedule(
            config.schedule, total_steps=self.total_steps, batch_size=self.batch_size, num_images=self.num_images
        )
        self.ema = EMA(self.objective, config.ema) if config.ema else None
        self.should_stop: Callable[[], bool] = lambda: False
        """Whether to interrupt an evaluation; the same in all processes."""
        self.on_evaluation_batch: Callable[[int, int], None] = lambda done, total: None
        """Called for each batch of an evaluation with the number of batches done and their total."""

    def training_loader(self, progress: Progress) -> Loader:
        """This process's part of the training batches, from the next step on; a context manager."""
        streams = progress.stream_states
        config, distributed = self.config, self.distributed
        if streams is not None and len(streams) != distributed.world_size:
            raise TrainError(
                f"a stream can be resumed only on as many processes as before, {len(streams)}, and there are "
                f"{distributed.world_size}; shards: with an index can be resumed on any number."
            )
        batches = training_batches(
            self.setup.splits.train,
            config=config.data,
            augment=config.augment,
            preprocess=self.setup.info.preprocess,
            batch_size=self.batch_size,
            seed=config.seed,
            device=self.device,
            rank=distributed.rank,
            world_size=distributed.world_size,
            start_step=progress.step,
            steps=self.total_steps,
            labeled=self.has_labels,
            state=streams[distributed.rank] if streams is not None else None,
        )
        batches.merge_bad([progress.unreadable_images, batches.bad])
        return batches

    def augmentation(self, cropped: bool) -> Augment:
        """The augmentation of a batch. `cropped`: whether the loader's workers have cropped the images already."""
        mix_until_step = self.total_steps - self.to_steps("augment.mix_off")
        if self.config.augment.mixes and mix_until_step <= 0 and self.distributed.is_main:
            warn_once([f"augment.mix_off={self.config.augment.mix_off} covers the whole run: no images are mixed"])
        return Augment(
            self.config.augment,
            preprocess=self.setup.info.preprocess,
            image_size=pair(self.setup.info.preprocess.image_size),
            num_classes=len(self.setup.splits.train.labels),
            batch_size=self.batch_size,
            seed=self.config.seed,
            cropped=cropped,
            mix_until_step=mix_until_step,
            repeats=self.config.data.repeats,
            compile=bool(self.config.compile) and self.device.type == "cuda",
        )

    def sample_seeds(self, batch: Batch) -> Tensor:
        """Seeds of the random numbers in the network (dropout, stochastic depth), one per image: b."""
        # Derived from another seed than the augmentation's, so that the two draw independent numbers.
        seeds = rng.sample_seeds(rng.derive_seed(self.config.seed, 1), batch.step, batch.slots.cpu().numpy())
        return rng.seeds_to_tensor(seeds, self.device)

    def backward(
        self, images: Tensor, targets: Tensor, weights: Tensor, seeds: Tensor, total_weight: Tensor
    ) -> Tensors:
        """Compute the gradients of the mean loss over the global batch, in `grad_accum_steps` micro-batches.

        `seeds`: from `sample_seeds`. `total_weight`: the sum of the weights of the global batch. Returns the sums of
        loss and metrics over this process's images.
        """
        num_micro_batches = self.config.grad_accum_steps
        sums: Tensors = {}
        if self.config.compile == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        tensors = (images.to(self.dtype), targets, weights, seeds)
        micro_batches = zip(*(t.chunk(num_micro_batches) for t in tensors), strict=True)
        for i, micro_batch in enumerate(micro_batches):
            with gradient_sync(self.wrapped, is_last=i == num_micro_batches - 1):
                with self.autocast():
                    output = self.wrapped(*micro_batch)
                # The mean over all images; DDP and FSDP divide by the number of processes.
                (output["loss"] * (self.distributed.world_size / total_weight.clamp(min=1))).backward()
            for name, value in output.items():
                # Cloned, since the CUDA graph of the next micro-batch writes to the same memory.
                sums[name] = sums[name] + value.detach() if name in sums else value.detach().clone()
        return sums

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.config.precision, self.device)

    def _warn_of_slow_precision(self) -> None:
        if self.config.precision != "bfloat16" or self.device.type != "cpu" or not self.distributed.is_main:
            return
        times = slowdown(self.device, torch.bfloat16)
        if times > 1:
            warn_once(
                [f"precision=bfloat16 is slow on this CPU: matrix products take {times:.1f} x as long as float32"]
            )

    @property
    def has_labels(self) -> bool:
        """Whether the objective uses labels."""
        return requires_labels(self.config.objective, self.setup.objective)

    def evaluate(self) -> Scores | MaskedPredictionScores:
        """Evaluate the weights, or their EMA if there is one, on the validation images."""
        return self.evaluate_classes() if self.has_labels else self.evaluate_masked_patches()

    def evaluate_classes(self, source: Source | None = None, net: nn.Module | None = None) -> Scores:
        """Classification scores, on the validation images and with the current weights by default."""
        source = source or self.setup.splits.validation
        config, distributed = self.config, self.distributed
        with ExitStack() as stack:
            batches = stack.enter_context(self._evaluation_loader(source))
            if net is None:
                stack.enter_context(self.ema_weights())
            scores = measure(
                evaluation_network(self.wrapped) if net is None else net.to(self.device, self.dtype),
                self._until_stopped(batches),
                preprocess=self.preprocess,
                num_classes=len(source.labels),
                multi_label=source.multi_label,
                precision=config.precision,
                loss=config.classify.loss,
                reduce=distributed.all_reduce if distributed.world_size > 1 else None,
                gather=distributed.all_gather_rows if distributed.world_size > 1 else None,
            )
            batches.merge_bad(distributed.all_gather_object(batches.bad))
            return scores

    def evaluate_masked_patches(self) -> MaskedPredictionScores:
        """Scores of masked patch prediction on the validation images."""
        config, distributed = self.config, self.distributed
        # Eager: compiling again for these batch sizes would take longer.
        with (
            self._evaluation_loader(self.setup.splits.validation) as batches,
            self.ema_weights(),
            set_stance("force_eager"),
        ):
            scores = measure_masked_prediction(
                unwrap(self.wrapped),
                self._until_stopped(batches),
                preprocess=self.preprocess,
                seed=rng.derive_seed(
                    config.seed, 2
                ),  # independent of the network's and the augmentation's random numbers
                precision=config.precision,
                reduce=distributed.all_reduce if distributed.world_size > 1 else None,
            )
            batches.merge_bad(distributed.all_gather_object(batches.bad))
            return scores

    def _until_stopped(self, batches: Loader) -> Iterator[Batch]:
        total = len(batches)
        for done, batch in enumerate(batches):
            if self.should_stop():
                raise StopRequested
            self.on_evaluation_batch(done, total)
            yield batch

    def _evaluation_loader(self, source: Source) -> Loader:
        return evaluation_batches(
            source,
            preprocess=self.setup.info.preprocess,
            batch_size=max(min(self.batch_size // self.distributed.world_size, 1024), 1),
            device=self.device,
            rank=self.distributed.rank,
            world_size=self.distributed.world_size,
            config=self.config.data,
            labeled=self.has_labels,
        )

    def check_validation_images(self) -> None:
        """Decode the validation images if they are kept in memory, so that unreadable ones are found at the start."""
        with self._evaluation_loader(self.setup.splits.validation) as batches:
            batches.merge_bad(self.distributed.all_gather_object(batches.bad))

    def ema_weights(self) -> AbstractContextManager[None]:
        """Context in which the network has the averaged weights, if there are any; one inside another has no effect."""
        return self.ema.swap() if self.ema is not None and not self.ema.swapped else nullcontext()

    def state_tensors(self) -> Tensors:
        """The state of the objective, its EMA and the optimizer, by name."""
        average = self.ema.state_tensors() if self.ema is not None else {}
        return {
            **add_prefix("learner", self.objective.state_dict()),
            **add_prefix("average", average),
            **add_prefix("optimizer", self.optimizer.state_tensors()),
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned, on any number of processes."""
        current, saved = self.objective.state_dict(), select_prefix("learner", tensors)
        check_same_tensors("the weights", saved, current)
        for name, tensor in saved.items():
            copy_into(current[name], tensor)
        if self.ema is not None:
            self.ema.load_state_tensors(select_prefix("average", tensors))
        self.optimizer.load_state_tensors(select_prefix("optimizer", tensors))

    def network_tensors(self) -> Tensors:
        """The tensors of the network by name, sharded if the objective is."""
        state = self.objective.state_dict()
        return {name.removeprefix("net."): t for name, t in state.items() if name.startswith("net.")}

    def close(self) -> None:
        """Release DDP before the process group is destroyed, which could otherwise hang."""
        del self.wrapped

    def to_steps(self, name: str) -> int:
        """The number of steps of a duration in the config, given by its dotted path."""
        duration: Duration = attrgetter(name)(self.config)
        if duration.unit == "epochs" and not self.num_images:
            raise ConfigError(
                f"{name}={duration} cannot be converted to steps: a stream has no known number of images; "
                "give it in steps or images."
            )
        return duration.to_steps(batch_size=self.batch_size, images=self.num_images)

    def is_due(self, step: int, name: str) -> bool:
        """Whether an action with this interval (`log_every`, ...) is due after `step` steps; always after the last."""
        return step >= self.total_steps or (name in self.intervals and step % self.intervals[name] == 0)

    def _find_batch_size(self) -> int:
        """The global batch size for batch_size=auto, searched by the main process."""
        num_micro_batches = self.distributed.world_size * self.config.grad_accum_steps
        size = 0
        if self.distributed.is_main:
            images = (self.num_images or MAX_BATCH_SIZE * 8 * num_micro_batches) // num_micro_batches
            multi_label = self.setup.splits.train.multi_label
            with self.autocast():
                size = find_batch_size(
                    self.objective, self.objective.net, images, self.device, self.dtype, multi_label=multi_label
                )
            warn_once([f"batch_size=auto: using batch_size={size * num_micro_batches}"])
        return int(self.distributed.broadcast_object(size)) * num_micro_batches

    @property
    def flops_per_image(self) -> float:
        """FLOPs of training on one image: forward, backward through the trainable part, and the teacher's forward."""
        teacher = self.objective.teacher if isinstance(self.objective, DistillObjective) else None
        teacher_flops = count_flops(teacher.net.config, teacher.size) if teacher is not None else 0
        return training_flops(self.objective.net.config, self.config.optim.trainable) + teacher_flops


def _check_batch_size(config: TrainConfig, processes: int, images: int) -> int:
    batch, parts, group = config.batch_size, config.grad_accum_steps, config.augment.mix_group
    assert isinstance(batch, int), "batch_size=auto was not resolved"
    shares = processes * parts
    if images and batch > images:
        raise ConfigError(
            f"batch_size={batch} is more than the {images:,} training images; try batch_size={images // 2}."
        )
    if batch % shares:
        raise ConfigError(
            f"batch_size={batch} cannot be divided evenly among {processes} processes with {parts} parts each; "
            f"try batch_size={-(-batch // shares) * shares}."
        )
    share = batch // processes
    if config.augment.mixes and processes > 1 and share % group:
        more, smaller = math.lcm(group * processes, shares), math.gcd(share, group)
        other = f", augment.mix_group={smaller}" if smaller > 1 else ""
        raise ConfigError(
            f"batch_size={batch} gives each of {processes} processes {share} images, which is not a multiple of "
            f"augment.mix_group={group}; try batch_size={-(-batch // more) * more}{other} or fewer processes."
        )
    return batch
