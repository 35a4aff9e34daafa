"""Settings of a training run: model, data, objective, optimizer, schedule. A recipe returns a TrainConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.config.architecture import ViTConfig
from vitrail.config.base import Config
from vitrail.config.data import AugmentConfig, DataConfig
from vitrail.config.duration import Duration, epochs, steps
from vitrail.config.image import PreprocessConfig
from vitrail.config.networks import NetConfig
from vitrail.errors import ConfigError, did_you_mean
from vitrail.plugins import plugin_names

OBJECTIVES = ("classify", "masked-patch", "simmim", "distill")
SELF_SUPERVISED = ("masked-patch", "simmim")
"""Objectives that use no labels."""
TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(Config):
    """Supervised classification."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: cross-entropy; sigmoid: a binary cross-entropy for each class, summed over the classes.
    Multi-label data always uses sigmoid."""
    label_smoothing: float = 0.0
    """Fraction of the target spread evenly over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight each class in the loss by the inverse of its frequency; the mean weight is 1."""

    def check(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing}: expected a fraction, at least 0 and less than 1."
            )


@dataclass(frozen=True, kw_only=True)
class MaskedPatchConfig(Config):
    """Masked patch prediction: self-supervised, predicts corrupted patches (the paper's appendix B.1.2)."""

    mask_ratio: float = 0.5
    """Fraction of the patches that are corrupted."""
    mask_token_prob: float = 0.8
    """Fraction of the corrupted patches that are replaced by a learned mask token."""
    random_patch_prob: float = 0.1
    """Fraction that is replaced by another patch of the same image. The rest stay unchanged."""
    target: Literal["mean-color", "downsized", "pixels"] = "mean-color"
    """What is predicted: the patch's mean color with 3 bits per channel (512 classes), its 4 x 4 downsized
    version in the same colors, or all its pixels (mean squared error)."""

    def check(self) -> None:
        if (
            not 0 < self.mask_ratio <= 1
            or min(self.mask_token_prob, self.random_patch_prob) < 0
            or self.mask_token_prob + self.random_patch_prob > 1
        ):
            raise ConfigError(
                "mask_ratio must be above 0 and at most 1; mask_token_prob and random_patch_prob must be 0 or more and "
                "at most 1 in total."
            )


@dataclass(frozen=True, kw_only=True)
class SimMIMConfig(Config):
    """SimMIM: self-supervised, predicts the pixels of masked patches (arXiv 2111.09886)."""

    mask_ratio: float = 0.6
    """Fraction of the image that is masked."""
    mask_patch_size: int = 32
    """Side of a masked square in pixels; a multiple of the network's patch size."""
    normalize_box: int | None = None
    """Normalize the pixels to predict by the mean and variance of the box of this odd side around each (47 for Swin
    V2); none: by the preprocessing alone."""

    def check(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise ConfigError(f"simmim.mask_ratio={self.mask_ratio}: expected a fraction above 0 and less than 1.")
        if self.mask_patch_size < 1:
            raise ConfigError(f"simmim.mask_patch_size={self.mask_patch_size}: expected pixels, 1 or more.")
        if self.normalize_box is not None and (self.normalize_box < 3 or self.normalize_box % 2 == 0):
            raise ConfigError(f"simmim.normalize_box={self.normalize_box}: expected an odd number, 3 or more, or none.")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Config):
    """Knowledge distillation from a teacher model (DeiT)."""

    teacher: str | None = None
    """Anything that `vitrail.load` loads, with the same classes."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's predicted class as the label; soft: its probabilities."""
    alpha: float = 0.5
    """Weight of the teacher's loss; the loss on the labels has weight 1 - alpha."""
    temperature: float = 3.0
    """Temperature of the soft probabilities."""

    def check(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha}: expected the weight of the teacher's loss, from 0 to 1.")
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature} must be positive.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """The optimizer."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """muon: Muon for the matrices inside the blocks, AdamW for the other parameters."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's term in the denominator, for numerical stability."""
    momentum: float | None = None
    """None: 0.9 for SGD, 0.95 for Muon."""
    nesterov: bool | None = None
    """Nesterov momentum. None: on for Muon, off for SGD."""
    weight_decay: float = 0.0
    """For matrices and convolutions only, not for biases, norms, tokens and positions. Part of the gradient for SGD,
    as in torch; decoupled for AdamW and Muon."""
    decay_by: Literal["lr", "schedule"] = "lr"
    """lr: weight decay is multiplied by the learning rate, as in PyTorch; schedule: only by the schedule's factor,
    from 0 to 1, as in big_vision (1e-4 there is 0.1 with decay_by=lr at a peak of 1e-3)."""
    layer_decay: float | None = None
    """Layer-wise learning rate decay: the factor from each layer to the one below it."""
    grad_clip: float | None = 1.0
    """Maximum norm of the gradient; None: no clipping."""
    trainable: Literal["all", "head"] | int = "all"
    """Trainable parameters: all, the head only, or the head and this number of last blocks."""
    head_lr_factor: float = 1.0
    """Factor by which the head's learning rate is multiplied."""

    def check(self) -> None:
        if self.lr <= 0 or self.eps <= 0 or self.head_lr_factor <= 0:
            values = f"lr={self.lr:g}, eps={self.eps:g}, head_lr_factor={self.head_lr_factor:g}"
            raise ConfigError(f"{values}: expected positive numbers.")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ConfigError(f"grad_clip={self.grad_clip} must be positive, or none.")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(f"layer_decay={self.layer_decay}: expected a number above 0 and at most 1, or none.")
        if self.weight_decay < 0 or not all(0 <= b < 1 for b in (*self.betas, self.momentum or 0.0)):
            raise ConfigError("weight_decay must be 0 or more; betas and momentum must be at least 0 and less than 1.")
        if self.kind == "adamw" and (self.momentum is not None or self.nesterov):
            raise ConfigError("momentum and nesterov are only for sgd and muon; for adamw, set betas.")
        if isinstance(self.trainable, int) and self.trainable < 0:
            raise ConfigError(f"trainable={self.trainable}: expected a number of blocks, 0 or more.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """The learning rate schedule."""

    kind: Literal["cosine", "linear", "rsqrt", "constant"] = "cosine"
    """Decay after the warm-up."""
    warmup: Duration = steps(0)
    """Linear warm-up from 0."""
    cooldown: Duration = steps(0)
    """Linear decay to the final value at the end (for rsqrt and constant)."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of the peak."""
    timescale: Duration = steps(10_000)
    """For rsqrt: the learning rate falls as 1 / sqrt(1 + t / timescale)."""

    def check(self) -> None:
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(
                f"min_lr_ratio={self.min_lr_ratio}: expected a fraction of the peak learning rate, from 0 to 1."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """All settings that determine a run's result. Saved in `runs/NAME/config.json`."""

    name: str = "run"
    """Name of the run; its folder is runs/NAME by default."""
    seed: int = 0
    """Seed of all random numbers: initialization, order, augmentation, masks, dropout."""
    model: NetConfig | None = None
    """The network; with `init_from`, None for the checkpoint's own. num_classes=0 takes the data's."""
    init_from: str | None = None
    """Pretrained model to start from: anything that `vitrail.load` loads."""
    image_size: int | tuple[int, int] | None = None
    """With `init_from`: another image size; positions are resampled."""
    preprocess: PreprocessConfig | None = None
    """How images are prepared for evaluation; None: the checkpoint's way or the family's usual one."""
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    objective: str = "classify"
    """What is trained: classify, masked-patch or distill, which have a section of the same name with their settings;
    the name of another package's objective; or your own, as package.module:name."""
    classify: ClassifyConfig = ClassifyConfig()
    masked_patch: MaskedPatchConfig = MaskedPatchConfig()
    simmim: SimMIMConfig = SimMIMConfig()
    distill: DistillConfig = DistillConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    duration: Duration = epochs(10)
    """Length of the run, in epochs, steps or images."""
    batch_size: int | Literal["auto"] = 256
    """Images per step, over all devices; auto: the largest power of two that fits in memory."""
    grad_accum_steps: int = 1
    """Number of micro-batches per step, to save memory; does not change the result."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights (such as 0.9999), which is then evaluated."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of the computation; with bfloat16 (autocast) the weights stay float32. auto: bfloat16 on a CUDA
    device that supports it, else float32. config.json stores the choice, and a resumed run keeps it."""
    compile: bool | Literal["graphs"] = False
    """Use torch.compile. graphs: with CUDA graphs, for models so small that kernel launches dominate; without a
    GPU, nothing is compiled."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto: the kernels that were measured to be the fastest on this type of GPU, plain PyTorch on all others. plain:
    PyTorch only."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: less memory, a third more time."""
    parallel: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """With several processes: ddp (a replica in each), fsdp (sharded over all of them) or hsdp (sharded over those of
    a machine, replicated over machines). auto: ddp."""
    shard_size: int | None = None
    """With parallel=hsdp: the number of processes that share one copy of the weights; none: those of a machine."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1 or mps."""
    deterministic: bool = False
    """Use only deterministic GPU kernels. CPU runs are always deterministic."""

    log_every: Duration = steps(10)
    """Interval between lines of metrics.jsonl."""
    evaluate_every: Duration | None = epochs(1)
    """Interval between evaluations on the validation images; none: only at the end."""
    checkpoint_every: Duration = epochs(1)
    """Interval between checkpoints, from which a run resumes."""
    snapshot_every: Duration | None = None
    """Interval between snapshots of the weights, which `vitrail.load` can read; the initial and final weights are
    saved too."""
    keep: Literal["auto", "best", "last"] = "auto"
    """Which weights become the model: the best on the validation images or the last ones. auto: the
    best, unless they were measured on the test split, which must not be used for model selection."""
    patience: int | None = None
    """Early stopping: number of evaluations without improvement; None: off."""
    on_nan: Literal["stop", "skip"] = "stop"
    """When the loss is not finite: stop the run, or skip the step."""
    trackers: tuple[str, ...] = ()
    """Where the metrics are also sent, separated by commas: tensorboard, wandb, mlflow (each an extra of this name),
    the name of another package's tracker, or your own, as package.module:name."""
    callbacks: tuple[str, ...] = ()
    """Callbacks, separated by commas: names of other packages' callbacks, or your own, as package.module:name."""
    compare: tuple[str, ...] = ()
    """Overrides such as `model.position=none`; each is trained as a second run, and compared in the report."""

    def __post_init__(self) -> None:
        for name in ("trackers", "callbacks"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                names = tuple(part.strip() for part in (value or "").split(",") if part.strip())
                object.__setattr__(self, name, names)
        super().__post_init__()

    def check(self) -> None:
        _check_name("objective", self.objective, OBJECTIVES, "objectives")
        for tracker in self.trackers:
            _check_name("trackers", tracker, TRACKERS, "trackers")
        for callback in self.callbacks:
            _check_name("callbacks", callback, (), "callbacks")
        if self.model is None and self.init_from is None:
            raise ConfigError("a run needs a model: set model to a network's config, or init_from to a checkpoint.")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: expected a 64-bit integer.")
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: expected 1 or more, or auto.")
        if self.grad_accum_steps < 1:
            raise ConfigError(f"grad_accum_steps={self.grad_accum_steps}: expected 1 or more.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema={self.ema}: expected a number between 0 and 1, or none.")
        for name in ("log_every", "evaluate_every", "checkpoint_every", "snapshot_every", "duration"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}.")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"patience={self.patience}: expected 1 or more evaluations, or none.")
        if self.classify.class_weights == "balanced" and self.data.order == "balanced":
            raise ConfigError(
                "data.order=balanced already samples all classes equally often; set classify.class_weights=none."
            )
        if self.batch_size == "auto" and self.parallel in ("fsdp", "hsdp"):
            raise ConfigError(
                f"batch_size=auto measures the whole model on one device; with parallel={self.parallel}, give a number."
            )
        if self.shard_size is not None and (self.parallel != "hsdp" or self.shard_size < 1):
            raise ConfigError(
                f"shard_size={self.shard_size} with parallel={self.parallel}: expected a number of processes, 1 or "
                "more, with parallel=hsdp; try shard_size=none."
            )
        if self.objective == "distill" and self.distill.teacher is None:
            raise ConfigError("objective=distill needs distill.teacher: a checkpoint, a model's name or a hub id.")
        if self.objective == "masked-patch" and not isinstance(self.model, ViTConfig | None):
            raise ConfigError("objective=masked-patch needs a ViT; for a Swin Transformer, try objective=simmim.")
        if self.data.source.startswith("stream:") and self.data.order == "balanced":
            raise ConfigError(
                "data.order=balanced is not possible with stream:, whose labels are not known in advance; try shards:."
            )


def _check_name(setting: str, name: str, builtin: tuple[str, ...], group: str) -> None:
    """Raise ConfigError unless the name is vitrail's, another package's or that of an object."""
    if name in builtin or ":" in name:
        return
    known = [*builtin, *plugin_names(group)]
    if name not in known:
        hint = (
            did_you_mean(name, known) if known else f"; no installed package adds one (entry points vitrail.{group})."
        )
        raise ConfigError(f"TrainConfig.{setting}={name!r} is not a valid value{hint}")
