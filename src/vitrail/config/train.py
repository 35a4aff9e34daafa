"""A training run: model, data, objective, optimizer, schedule. A recipe is a function that returns one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.config.base import Config
from vitrail.config.data import AugmentConfig, DataConfig
from vitrail.config.duration import Duration, epochs, steps
from vitrail.config.image import PreprocessConfig
from vitrail.config.model import BiTConfig, ViTConfig
from vitrail.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(Config):
    """Learning labels."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy over the classes, or a yes or no for each, summed over them (what several labels
    to an image always have)."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weigh each class's term of the loss by how rare the class is; the mean weight is 1."""

    def check(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is a share: 0 or more, less than 1.")


@dataclass(frozen=True, kw_only=True)
class MaskedPatchConfig(Config):
    """Learning without labels, by guessing what corrupted patches showed (the paper's appendix B.1.2)."""

    mask_ratio: float = 0.5
    """Of the patches that are corrupted."""
    mask_token_prob: float = 0.8
    """Of those: replaced by a learned token."""
    random_patch_prob: float = 0.1
    """Of those: replaced by another patch of the same image. The rest stay as they are."""
    target: Literal["mean-color", "downsized", "pixels"] = "mean-color"
    """The patch's mean color in 3 bits a channel (512 classes), a 4 x 4 miniature of it in the same
    colors, or all its pixels by their squared error."""

    def check(self) -> None:
        if (
            not 0 < self.mask_ratio <= 1
            or min(self.mask_token_prob, self.random_patch_prob) < 0
            or self.mask_token_prob + self.random_patch_prob > 1
        ):
            raise ConfigError(
                "mask_ratio is in (0, 1]; mask_token_prob and random_patch_prob are 0 or more and at most 1 together."
            )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Config):
    """Learning from another model (DeiT)."""

    teacher: str | None = None
    """Anything that `vitrail.load` loads, with the same classes."""
    kind: Literal["hard", "soft"] = "hard"
    """Its decisions as labels, or its probabilities."""
    alpha: float = 0.5
    """Of the loss that the teacher has."""
    temperature: float = 3.0
    """Of the soft probabilities."""

    def check(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} is the weight of the teacher in the loss: from 0 to 1.")
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature} must be positive.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """How a step is taken."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """Muon turns matrices inside the blocks and leaves the rest to AdamW."""
    lr: float = 1e-3
    """Learning rate at its highest."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's memory of the gradient and of its square."""
    eps: float = 1e-8
    momentum: float | None = None
    """None: 0.9 for SGD, 0.95 for Muon."""
    nesterov: bool | None = None
    """Whether a step looks ahead along the momentum. None: Muon's does, SGD's does not."""
    weight_decay: float = 0.0
    """On matrices only: never on biases, norms, tokens, positions. SGD's is part of the gradient, as in
    torch; the others' is decoupled from it."""
    decay_by: Literal["lr", "schedule"] = "lr"
    """Decay is multiplied by the learning rate (PyTorch), or by the schedule alone, from 0 to 1
    (big_vision: 1e-4 there is 0.1 here at lr=1e-3)."""
    layer_decay: float | None = None
    """Each layer below the head learns this much slower than the one above it."""
    grad_clip: float | None = 1.0
    """Largest norm of the whole gradient."""
    trainable: Literal["all", "head"] | int = "all"
    """What learns: everything, the head only, or the head and the last so many blocks."""
    head_lr_factor: float = 1.0
    """Times the learning rate, for the head."""

    def check(self) -> None:
        if self.lr <= 0 or self.eps <= 0 or self.head_lr_factor <= 0:
            raise ConfigError("lr, eps and head_lr_factor must be positive.")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ConfigError(f"grad_clip={self.grad_clip} must be positive, or none.")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(f"layer_decay={self.layer_decay} is in (0, 1], or none.")
        if self.weight_decay < 0 or not all(0 <= b < 1 for b in (*self.betas, self.momentum or 0.0)):
            raise ConfigError("weight_decay is 0 or more; betas and momentum are in [0, 1).")
        if self.kind == "adamw" and (self.momentum is not None or self.nesterov):
            raise ConfigError("momentum and nesterov are for sgd and muon; AdamW has betas.")
        if isinstance(self.trainable, int) and self.trainable < 0:
            raise ConfigError(f"trainable={self.trainable} counts blocks: 0 or more.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """How the learning rate rises and falls."""

    kind: Literal["cosine", "linear", "rsqrt", "constant"] = "cosine"
    """Its way down after the warm-up."""
    warmup: Duration = steps(0)
    """A straight rise from 0 at the start."""
    cooldown: Duration = steps(0)
    """A straight fall to `floor` at the end (for rsqrt and constant)."""
    min_lr_ratio: float = 0.0
    """What is left at the end, as a share of the highest."""
    timescale: Duration = steps(10_000)
    """For rsqrt: the learning rate falls as 1 / sqrt(1 + t / timescale)."""

    def check(self) -> None:
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio={self.min_lr_ratio} is a share of the highest learning rate: from 0 to 1.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Everything that decides what a run computes. `runs/NAME/config.json` holds one, resolved."""

    name: str = "run"
    """The run folder is runs/NAME unless told otherwise."""
    seed: int = 0
    """Decides first values, order, augmentation, masks, dropout: everything drawn."""
    model: ViTConfig | BiTConfig | None = None
    """The network; with `start`, None for the checkpoint's own. num_classes=0 takes the data's."""
    init_from: str | None = None
    """A checkpoint to begin from: anything that `vitrail.load` loads."""
    image_size: int | tuple[int, int] | None = None
    """With `start`: another image size; positions are resampled."""
    preprocess: PreprocessConfig | None = None
    """How images are prepared for evaluation; None: the checkpoint's way or the family's usual one."""
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    objective: Literal["classify", "masked-patch", "distill"] = "classify"
    classify: ClassifyConfig = ClassifyConfig()
    masked_patch: MaskedPatchConfig = MaskedPatchConfig()
    distill: DistillConfig = DistillConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    duration: Duration = epochs(10)
    batch_size: int | Literal["auto"] = 256
    """Images per step, over all devices together; auto: the largest power of two that fits."""
    grad_accum_steps: int = 1
    """Parts a batch is computed in, one after the other, to save memory; changes nothing else."""
    ema: float | None = None
    """Keep an average of the weights that forgets at this rate a step (0.9999), and measure it."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Of the arithmetic; with bfloat16 the weights stay float32. auto: bfloat16 on a CUDA device that has it,
    float32 elsewhere. A run's config.json holds what was chosen, and a resumed run keeps it."""
    compile: bool | Literal["graphs"] = False
    """torch.compile: slow to start, then faster. graphs: as CUDA graphs too, for networks so small that
    a GPU waits for the host between its kernels; without a GPU, nothing is compiled."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: less memory, a third more time."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Under torchrun: a copy of the model on each device, or each a shard of it. auto: ddp."""
    device: str = "auto"
    deterministic: bool = False
    """Choose only GPU kernels that give the same bits each time. A CPU always does."""

    log_every: Duration = steps(10)
    evaluate_every: Duration | None = epochs(1)
    """None: at the end only."""
    checkpoint_every: Duration = epochs(1)
    snapshot_every: Duration | None = None
    """Keep a copy of the weights so often, as a model that `vitrail.load` loads; the first ones and the last, too."""
    keep: Literal["auto", "best", "last"] = "auto"
    """Which weights become the model: the best on the validation images or the last ones. auto: the
    best, unless they were measured on the test split, where choosing would be cheating."""
    patience: int | None = None
    """Stop after so many evaluations without a better one."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What a loss that is not finite does: end the run, or leave that step out."""
    tensorboard: bool = False
    compare: tuple[str, ...] = ()
    """Overrides (`model.position=none`), each of which makes a second run to compare with in the report."""

    def check(self) -> None:
        if self.model is None and self.init_from is None:
            raise ConfigError("a run needs a model: a network's config, or init_from=CHECKPOINT.")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} is too large; wanted a number of 64 bits.")
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: one image or more.")
        if self.grad_accum_steps < 1:
            raise ConfigError(f"grad_accum_steps={self.grad_accum_steps}: 1 or more.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema={self.ema} is between 0 and 1, or none.")
        for name in ("log_every", "evaluate_every", "checkpoint_every", "snapshot_every", "duration"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}.")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"patience={self.patience}: 1 or more evaluations, or none.")
        if self.classify.class_weights == "balanced" and self.data.order == "balanced":
            raise ConfigError(
                "data.order=balanced shows classes equally often already: classify.class_weights=none with it."
            )
        if self.batch_size == "auto" and self.parallel == "fsdp":
            raise ConfigError("batch_size=auto tries the whole model on one device; with parallel=fsdp give a number.")
        if self.objective == "distill" and self.distill.teacher is None:
            raise ConfigError("objective=distill needs distill.teacher: a checkpoint, a model's name or a hub id.")
        if self.objective == "masked-patch" and not isinstance(self.model, ViTConfig | None):
            raise ConfigError("masked patches need a ViT: a BiT has none.")
        if self.data.source.startswith("stream:") and self.data.order == "balanced":
            raise ConfigError("a plain stream cannot be balanced: its labels are not known before; use shards:.")
