"""Model architectures: every setting that changes the computed function or the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vitrail.config.base import Config, Pair, allow_use_cache, pair
from vitrail.errors import ConfigError

PositionKind = Literal["none", "learned-1d", "learned-2d", "relative", "sincos-2d", "rope-2d"]
PositionPlace = Literal["stem", "layers", "shared"]
Resample = Literal["google", "timm", "timm-npz", "huggingface", "torchvision", "dinov2", "tipsv2"]
Pool = Literal["token", "gap", "map", "token+gap", "coca"]
Activation = Literal["gelu", "gelu-tanh", "gelu-quick", "swiglu"]


@dataclass(frozen=True, kw_only=True)
class StemConfig(Config):
    """The hybrid's ResNet: post-activation, weight-standardized, group-normalized, SAME padding."""

    layers: tuple[int, ...] = (3, 4, 9)
    """Blocks in each stage; the feature map is 4 * 2**(stages - 1) times smaller than the image."""
    width_factor: float = 1.0
    """Channels of the first stage divided by 64."""
    norm_eps: float = 1e-6
    """GroupNorm's epsilon: 1e-6 in the original, 1e-5 in timm."""
    standardize: Literal["std", "var"] = "std"
    """Weight standardization divides by std + eps (original) or by sqrt(var + eps) (timm)."""
    standardize_eps: float = 1e-5
    """1e-5 in the original, 1e-8 in timm."""

    def check(self) -> None:
        check_positive(self, "width_factor")
        if any(n < 1 for n in self.layers):
            raise ConfigError(f"every stage needs a block, got layers={self.layers}.")

    @property
    def stride(self) -> int:
        """Image size divided by the size of the feature map."""
        return 4 * 2 ** max(len(self.layers) - 1, 0)

    @property
    def channels(self) -> int:
        """Channels of the feature map."""
        base = int(64 * self.width_factor)
        return base * 4 * 2 ** (len(self.layers) - 1) if self.layers else base


@allow_use_cache
@dataclass(frozen=True, kw_only=True)
class ViTConfig(Config):
    """A Vision Transformer. The defaults are ViT-B/16 as the original code computes it."""

    image_size: Pair = 224
    """Height and width of the images; for other sizes the position embeddings are resampled."""
    patch_size: Pair = 16
    """Height and width of a patch in pixels (of the stem's feature map in a hybrid); must divide `image_size`."""
    uncovered: Literal["refuse", "ignore"] = "refuse"
    """Images whose size is not a multiple of the patch size: refuse them, or ignore the last rows and
    columns, as a convolution does (SigLIP SO400M/14 at 384 px)."""
    channels: int = 3
    """Channels of the image."""
    num_classes: int = 1000
    """Outputs of the head; 0: no head, the model returns pooled features."""

    width: int = 768
    """Dimension of the tokens."""
    depth: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Number of attention heads; must divide `width`."""
    mlp_dim: int = 3072
    """Hidden dimension of the MLP (for SwiGLU, after gating)."""

    class_token: bool = True
    """Prepend a learned class token."""
    distilled: bool = False
    """Add a distillation token with its own head (DeiT)."""
    num_registers: int = 0
    """Number of register tokens: learned tokens without a position, not used by the head (DINOv2)."""

    position: PositionKind = "learned-1d"
    """Position encoding of the patches; see docs/models.md."""
    position_at: PositionPlace | None = None
    """Where positions are added: stem (once, before the blocks), layers (at each block, with its own parameters) or
    shared (at each block, the same parameters). None: stem, or layers for relative and rope-2d."""
    position_on_class: bool = True
    """Whether the class and distillation tokens have a learned position (not in big_vision)."""
    position_init_std: float = 0.02
    """Standard deviation of learned positions at initialization; 1 / sqrt(width) in big_vision."""
    resample: Resample = "google"
    """Library whose interpolation resamples learned positions; see docs/models.md."""
    rope_base: float = 100.0
    """Base of the periods of rope-2d (DINOv3's convention)."""
    rope_periods: Literal["float32", "bfloat16"] = "float32"
    """Precision to which the periods of rope-2d are rounded: bfloat16 in the files of DINOv3's own code."""

    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm."""
    norm_eps: float = 1e-6
    """Epsilon of the normalization layers: 1e-6 here and in timm, 1e-12 in Hugging Face's ViT, 1e-5 in CLIP."""
    activation: Activation = "gelu-tanh"
    """Activation of the MLP: tanh-GELU in the original, exact GELU in most PyTorch models."""
    patch_bias: bool = True
    """Bias in the patch projection; CLIP has none."""
    qkv_bias: bool = True
    """Bias in queries, keys and values."""
    key_bias: bool = True
    """Bias in keys, where queries and values have one; not in DINOv3. Always true with qkv_bias=False."""
    proj_bias: bool = True
    """Bias in the attention's output and in the MLP."""
    qk_norm: bool = False
    """Normalize queries and keys per head."""
    layer_scale: float | None = None
    """Initial value of LayerScale; None: no LayerScale."""
    pre_norm: bool = False
    """A norm before the first block (CLIP)."""

    pool: Pool = "token"
    """Pooling: the class token, the mean of the patches (gap), an attention pool over the patches (map, as in
    big_vision) or over all tokens (coca), or class token and mean concatenated (token+gap, DINOv2's classifier)."""
    pool_width: int | None = None
    """Width of CoCa's pool; None: `width`."""
    pool_heads: int | None = None
    """Attention heads of CoCa's pool; None: `num_heads`."""
    pool_norm: Literal["before", "after", "none"] = "before"
    """Final norm before pooling (original) or after it (timm's fc_norm: MAE, DeiT-like gap models)."""
    pre_logits: int = 0
    """Width of the pre-logits layer (Linear and tanh before the head); 0: none."""
    head_bias: bool = True
    """Bias in the head; CLIP's projection has none."""
    head_bias_init: float = 0.0
    """Initial value of the head's bias; -10 in the paper's code for sigmoid losses."""

    dropout: float = 0.0
    """Dropout rate after positions, attention and both MLP layers."""
    attention_dropout: float = 0.0
    """Dropout rate of the attention weights."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block, per image; rises linearly from 0 in the first."""

    stem: StemConfig | None = None
    """A ResNet before the patch embedding (hybrid); None: no stem."""

    def check(self) -> None:
        set_fields(self, image_size=pair(self.image_size), patch_size=pair(self.patch_size))
        set_fields(self, key_bias=self.key_bias or not self.qkv_bias)
        check_positive(
            self,
            "image_size",
            "patch_size",
            "channels",
            "width",
            "depth",
            "num_heads",
            "mlp_dim",
            "norm_eps",
            "rope_base",
        )
        if self.num_classes < 0 or self.num_registers < 0 or self.pre_logits < 0:
            raise ConfigError("num_classes, num_registers and pre_logits must be 0 or more.")
        if self.width % self.num_heads:
            raise ConfigError(f"width={self.width} is not divisible by num_heads={self.num_heads}.")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a probability, at least 0 and less than 1.")
        self.grid_of(pair(self.image_size))
        self._check_tokens()
        self._check_position()

    def _check_tokens(self) -> None:
        if not self.class_token:
            if "token" in self.pool:
                raise ConfigError(f"pool={self.pool!r} needs class_token=true; try pool='gap' or pool='map'.")
            if self.distilled:
                raise ConfigError("distilled=true needs class_token=true.")
        if self.pool == "token+gap" and self.pool_norm == "after":
            raise ConfigError(
                "pool='token+gap' concatenates normalized tokens and needs pool_norm='before' or 'none', not 'after'."
            )
        self._check_coca()
        if self.distilled and self.pool != "token":
            raise ConfigError(f"distilled=true needs pool='token', got pool={self.pool!r}.")
        if self.distilled and self.pre_logits:
            raise ConfigError(f"distilled=true needs pre_logits=0, got pre_logits={self.pre_logits}.")

    def _check_coca(self) -> None:
        if self.pool != "coca":
            if self.pool_width is not None or self.pool_heads is not None:
                raise ConfigError(f"pool_width and pool_heads are only for pool='coca', not for pool={self.pool!r}.")
            return
        if not self.class_token or self.pool_norm != "before":
            raise ConfigError("pool='coca' needs class_token=true and pool_norm='before'.")
        width, heads = self.pooled_width, self.pool_heads or self.num_heads
        if width < 1 or heads < 1 or width % heads:
            raise ConfigError(f"pool_width={width} is not divisible by pool_heads={heads}.")

    def _check_position(self) -> None:
        if self.position in ("relative", "rope-2d") and self.position_at == "stem":
            raise ConfigError(
                f"position={self.position!r} is applied inside attention; "
                "use position_at='layers' or 'shared', not 'stem'."
            )
        if self.position == "learned-2d" and self.width % 2:
            raise ConfigError(f"position='learned-2d' needs an even width, got width={self.width}.")
        if self.position == "sincos-2d" and (self.width % 4 or self.width < 8):
            raise ConfigError(
                f"position='sincos-2d' needs a width that is a multiple of 4 and at least 8, got {self.width}."
            )
        if self.position == "rope-2d" and (self.width // self.num_heads) % 4:
            raise ConfigError(
                "position='rope-2d' needs a head dimension (width / num_heads) that is a multiple of 4, "
                f"got {self.width // self.num_heads}."
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at `image_size`."""
        return self.grid_of(pair(self.image_size))

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of an image of this height and width."""
        patch = pair(self.patch_size)
        if self.stem is None:
            for side, name, size in zip(image_size, ("height", "width"), patch, strict=True):
                if side < size or (side % size and self.uncovered == "refuse"):
                    raise ConfigError(uncovered_message(side, name, size))
            return image_size[0] // patch[0], image_size[1] // patch[1]
        rows, columns = (-(-side // self.stem.stride) for side in image_size)  # SAME padding rounds up
        if rows % patch[0] or columns % patch[1]:
            raise ConfigError(
                f"patch_size={patch[0]}x{patch[1]} does not divide the stem's {rows}x{columns} map of a "
                f"{image_size[0]}x{image_size[1]} image; try a multiple of {patch[0] * self.stem.stride} pixels."
            )
        return rows // patch[0], columns // patch[1]

    @property
    def resolved_position_at(self) -> PositionPlace:
        """`position_at`, or its default for this position encoding."""
        return self.position_at or ("layers" if self.position in ("relative", "rope-2d") else "stem")

    @property
    def num_positioned_prefix_tokens(self) -> int:
        """Number of prefix tokens with a learned position: class and distillation token, or 0."""
        learned = self.position in ("learned-1d", "learned-2d") and self.position_on_class
        return self.class_token + self.distilled if learned else 0

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: class, distillation, registers, in this order."""
        return self.class_token + self.distilled + self.num_registers

    @property
    def prefix_token_names(self) -> tuple[str, ...]:
        """Names of the tokens before the patches, in order."""
        names = ["class"] if self.class_token else []
        names += ["distill"] if self.distilled else []
        return (*names, *(f"register {i + 1}" for i in range(self.num_registers)))

    @property
    def head_width(self) -> int:
        """Input dimension of the head."""
        return self.pre_logits or self.pooled_width

    @property
    def pooled_width(self) -> int:
        if self.pool == "coca" and self.pool_width is not None:
            return self.pool_width
        return self.width * (2 if self.pool == "token+gap" else 1)


@allow_use_cache
@dataclass(frozen=True, kw_only=True)
class BiTConfig(Config):
    """BiT's ResNet: pre-activation, weight-standardized, group-normalized, symmetric padding."""

    image_size: Pair = 224
    """Height and width of the images; other sizes work too."""
    channels: int = 3
    """Channels of the image."""
    num_classes: int = 1000
    """Outputs of the head; 0: no head."""
    layers: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks in each stage."""
    width_factor: float = 1.0
    """Width multiplier: the x1 ... x4 of the name."""
    norm_eps: float = 1e-5
    """GroupNorm's epsilon."""
    standardize_eps: float = 1e-10
    """Weight standardization divides by sqrt(var + eps): 1e-10 in the original, 1e-8 in timm and Hugging Face."""
    root_pad: Literal["zero", "none"] = "zero"
    """Padding of the first max-pool: zeros, which take part in the maximum (paper, timm), or none (big_vision)."""

    def check(self) -> None:
        set_fields(self, image_size=pair(self.image_size))
        check_positive(self, "image_size", "channels", "width_factor", "norm_eps")
        if not self.layers or any(n < 1 for n in self.layers):
            raise ConfigError(f"layers={self.layers}: every stage of a BiT needs at least one block.")


def set_fields(config: Config, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(config, name, value)


def check_positive(config: Config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if any(v <= 0 for v in _numbers(value)):
            raise ConfigError(f"{name} must be positive, got {value}.")


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers in nested tuples."""
    return tuple(n for v in value for n in _numbers(v)) if isinstance(value, tuple) else (value,)


def uncovered_message(side: int, name: str, patch: int) -> str:
    below, above = side // patch * patch, -(-side // patch) * patch
    tries = f"{above}" if not below else f"{below} or {above}"
    return f"patch_size={patch} leaves {side - below} px of the image's {name} {side} uncovered; try {name} {tries}."
