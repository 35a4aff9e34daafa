"""SwinConfig: the architecture of Swin Transformers, and how windows are placed on a feature map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitrail.config.architecture import check_positive, set_fields, uncovered_message
from vitrail.config.base import Config, Pair, allow_use_cache, pair
from vitrail.errors import ConfigError

WindowRule = Literal["torchvision", "microsoft", "huggingface", "timm"]
Grid = tuple[int, int]


class WindowShape(NamedTuple):
    """The windows of a block: their size, and the cyclic shift of the map before it is cut, in tokens."""

    size: Grid
    shift: Grid


class WindowPlacement(NamedTuple):
    """Window size of a stage, and the rule that adapts it to a map.

    torchvision   the full window, over padding if the map is smaller; no shift along a side with one window
    microsoft     on a map whose shorter side is no larger than the window: windows of that side, no shift
    huggingface   decided by the height of the map at the config's `image_size`, for maps of any size
    timm          decided for each side of the map at the config's `image_size`, for maps of any size
    """

    size: Grid
    rule: WindowRule
    built_for: Grid
    """Rows and columns of the stage's map at the config's `image_size`, rounded down as in these libraries."""

    def on(self, grid: Grid) -> WindowShape:
        """Windows on a map of this grid, with the shift of every second block."""
        size = self.size
        if self.rule == "microsoft" and min(grid) <= size[0]:
            return WindowShape((min(grid), min(grid)), (0, 0))
        if self.rule in ("timm", "huggingface"):
            grid = self.built_for
            size = min(size[0], grid[0]), min(size[1], grid[1])
        shift = self.size[0] // 2 * (grid[0] > size[0]), self.size[1] // 2 * (grid[1] > size[1])
        if self.rule == "huggingface":
            return WindowShape((size[0], size[0]), (shift[0], shift[0]))
        return WindowShape(size, shift)


@allow_use_cache
@dataclass(frozen=True, kw_only=True)
class SwinConfig(Config):
    """A Swin Transformer (arXiv 2103.14030) or Swin Transformer V2 (arXiv 2111.09883). The defaults are Swin-T."""

    image_size: Pair = 224
    """Height and width of the images; others work too, by `window_rule`."""
    patch_size: Pair = 4
    """Height and width of a patch in pixels."""
    uncovered: Literal["pad", "refuse", "ignore"] = "pad"
    """Images whose size is not a multiple of the patch size: pad them with zeros (transformers), refuse them (the
    original, timm), or ignore the last rows and columns (torchvision)."""
    channels: int = 3
    """Channels of the image."""
    num_classes: int = 1000
    """Outputs of the head; 0: no head, the model returns pooled features."""

    version: Literal[1, 2] = 1
    """1: norms before attention and MLP, a table of relative position biases. 2: norms after them, cosine attention,
    position biases computed by a small MLP."""
    width: int = 96
    """Dimension of the tokens in the first stage; it doubles with each stage."""
    depths: tuple[int, ...] = (2, 2, 6, 2)
    """Number of blocks in each stage."""
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    """Number of attention heads in each stage."""
    mlp_ratio: float = 4.0
    """Hidden dimension of the MLP divided by the stage's width."""

    window_size: Pair = 7
    """Height and width of an attention window, in tokens."""
    stage_window_sizes: tuple[Pair, ...] = ()
    """Window size of each stage where they differ (Swin-S3); empty: `window_size` in every stage."""
    window_rule: WindowRule = "torchvision"
    """Library whose rule places windows on maps that are smaller than the window or not a multiple of it; see
    WindowPlacement and docs/models.md."""
    pretrained_window_sizes: tuple[int, ...] = ()
    """Version 2: window size of each stage in pre-training, which scales the coordinates of the position biases; 0 or
    empty: the stage's own window."""
    mask_value: float = -100.0
    """Added to the attention logits of two tokens that are neighbors only by the cyclic shift. -200 in transformers'
    Swin V2, which adds the mask twice."""

    norm_eps: float = 1e-5
    """Epsilon of the normalization layers."""
    qkv_bias: bool = True
    """Bias in queries, keys and values (version 2: in queries and values)."""

    dropout: float = 0.0
    """Dropout rate after the patch embedding, attention and both MLP layers."""
    attention_dropout: float = 0.0
    """Dropout rate of the attention weights."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block, per image; rises linearly from 0 in the first."""

    def check(self) -> None:
        set_fields(
            self,
            image_size=pair(self.image_size),
            patch_size=pair(self.patch_size),
            window_size=pair(self.window_size),
            stage_window_sizes=tuple(pair(size) for size in self.stage_window_sizes),
        )
        check_positive(
            self, "image_size", "patch_size", "channels", "width", "depths", "num_heads", "mlp_ratio", "window_size"
        )
        check_positive(self, "norm_eps", "stage_window_sizes")
        if self.num_classes < 0:
            raise ConfigError("num_classes must be 0 or more.")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a probability, at least 0 and less than 1.")
        self._check_stages()
        self.grid_of(pair(self.image_size))

    def _check_stages(self) -> None:
        stages = len(self.depths)
        if not stages:
            raise ConfigError("depths is empty; expected the number of blocks of each stage, such as 2,2,6,2.")
        for name in ("num_heads", "stage_window_sizes", "pretrained_window_sizes"):
            values = getattr(self, name)
            if len(values) != stages and (values or name == "num_heads"):
                raise ConfigError(
                    f"{name}={values} has {len(values)} values for {stages} stages (depths={self.depths})."
                )
        for stage, heads in enumerate(self.num_heads):
            if self.stage_width(stage) % heads:
                raise ConfigError(
                    f"the width of stage {stage + 1}, {self.stage_width(stage)}, is not divisible by its "
                    f"num_heads={heads}."
                )
        if any(size < 0 for size in self.pretrained_window_sizes):
            raise ConfigError(f"pretrained_window_sizes={self.pretrained_window_sizes}: expected 0 or more for each.")
        if self.pretrained_window_sizes and self.version == 1:
            raise ConfigError("pretrained_window_sizes are for version=2; version 1 resamples its table of biases.")
        square = all(height == width for height, width in self.window_sizes)
        if self.window_rule in ("microsoft", "huggingface") and not square:
            raise ConfigError(f"window_rule={self.window_rule!r} has square windows only, got {self.window_sizes}.")

    @property
    def window_sizes(self) -> tuple[Grid, ...]:
        """Window size of each stage, before it is adapted to small maps."""
        return tuple(pair(size) for size in self.stage_window_sizes or (self.window_size,) * len(self.depths))

    @property
    def depth(self) -> int:
        """Number of blocks in all stages."""
        return sum(self.depths)

    @property
    def strides(self) -> tuple[Grid, ...]:
        """Pixels per token, vertically and horizontally, in each stage."""
        rows, columns = pair(self.patch_size)
        return tuple((rows << stage, columns << stage) for stage in range(len(self.depths)))

    @property
    def pooled_width(self) -> int:
        """Input dimension of the head."""
        return self.stage_width(len(self.depths) - 1)

    def stage_width(self, stage: int) -> int:
        """Dimension of a stage's tokens."""
        return self.width << stage

    def mlp_dim(self, stage: int) -> int:
        """Hidden dimension of a stage's MLPs."""
        return int(self.stage_width(stage) * self.mlp_ratio)

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches at `image_size`."""
        return self.grid_of(pair(self.image_size))

    def grid_of(self, image_size: Grid) -> Grid:
        """Rows and columns of patches of an image of this height and width."""
        patch = pair(self.patch_size)
        if self.uncovered == "pad":
            return -(-image_size[0] // patch[0]), -(-image_size[1] // patch[1])
        for side, name, size in zip(image_size, ("height", "width"), patch, strict=True):
            if side < size or (side % size and self.uncovered == "refuse"):
                raise ConfigError(uncovered_message(side, name, size))
        return image_size[0] // patch[0], image_size[1] // patch[1]

    def stage_grids(self, grid: Grid) -> tuple[Grid, ...]:
        """Rows and columns of each stage's map; merging rounds odd sides up."""
        grids = [grid]
        for _ in self.depths[1:]:
            grids.append((-(-grids[-1][0] // 2), -(-grids[-1][1] // 2)))
        return tuple(grids)

    def window_placement(self, stage: int) -> WindowPlacement:
        """How windows are placed on the maps of a stage."""
        rows, columns = (
            max(side // size >> stage, 1)
            for side, size in zip(pair(self.image_size), pair(self.patch_size), strict=True)
        )
        built_for = rows, columns
        return WindowPlacement(self.window_sizes[stage], self.window_rule, built_for)

    def table_window(self, stage: int) -> Grid:
        """Version 1: window size for which a stage stores its table of relative position biases."""
        placement = self.window_placement(stage)
        return placement.on(placement.built_for).size
