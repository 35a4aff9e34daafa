"""The Swin Transformer (arXiv 2103.14030) and Swin Transformer V2 (arXiv 2111.09883).

images  B C H W
embed   patches of 4 x 4 pixels, norm                                                  -> B T D
encode  four stages of blocks with attention inside windows, shifted in every second block;
        between stages each 2 x 2 tokens become one of twice the width                 -> B T/64 8D
pool    norm, mean of the tokens                                                       -> B 8D
head    linear classifier                                                              -> B num_classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, fx, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from vitrail.config import Pair, SwinConfig, pair
from vitrail.errors import ConfigError, ModelError, did_you_mean
from vitrail.models import drop, init
from vitrail.models.base import BaseNet
from vitrail.models.layers import PatchEmbed
from vitrail.models.output import PER_LAYER, Output, resolve_layers, resolve_outputs
from vitrail.models.swin_layers import ContinuousBias, PatchMerging, SwinBlock, TableBias, by_window, resample_table
from vitrail.models.windows import Grid

# B images of C channels; T = h w tokens of a stage's map; D width of the stage

NO_OUTPUT = {
    "class_token": "a Swin Transformer has no class token",
    "prefix_tokens": "a Swin Transformer has no class, distillation or register tokens",
    "pool_attention": "a Swin Transformer pools by the mean, not by attention",
    "head_logits": "it is not distilled: there is one head",
}


class Stage(nn.Module):
    """Blocks at one resolution, after merging the patches of the stage before it (`merge`; not in the first)."""

    def __init__(self, config: SwinConfig, stage: int) -> None:
        super().__init__()
        self.merge = PatchMerging(config, config.stage_width(stage - 1)) if stage else None
        first = sum(config.depths[:stage])
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(
            SwinBlock(config, stage, bool(i % 2), rates[first + i]) for i in range(config.depths[stage])
        )


@dataclass
class Requested:
    """The outputs of stages and blocks that a forward pass keeps."""

    blocks: frozenset[int] = frozenset()
    """Blocks whose tokens and attention are kept, counted over all stages."""
    tokens: bool = False
    attention: bool = False
    feature_maps: frozenset[int] = frozenset()
    """Stages whose final map is kept."""
    last_block: int | None = None
    """Blocks after this one are not run."""

    kept_tokens: dict[int, tuple[Tensor, Grid]] = field(default_factory=dict)
    kept_attention: dict[int, Tensor] = field(default_factory=dict)
    kept_maps: dict[int, Tensor] = field(default_factory=dict)


class Swin(BaseNet):
    """Swin Transformer. `net(images)`: B C H W -> logits; `net.features(images, outputs=...)`: intermediates by name.

    Images may have any height and width: windows are placed by `config.window_rule`. The patch embedding, dropout and
    stochastic depth work as in a `ViT`, also under autocast.
    """

    first_kernel = "patch.weight"

    def __init__(self, config: SwinConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config: SwinConfig = config
        self.patch = PatchEmbed(config.channels, config.width, pair(config.patch_size))
        self.patch_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.stages = nn.ModuleList(Stage(config, stage) for stage in range(len(config.depths)))
        self.norm = nn.LayerNorm(config.pooled_width, eps=config.norm_eps)
        self.head = nn.Linear(config.pooled_width, config.num_classes) if config.num_classes else nn.Identity()
        if not init.is_meta(self):
            self.initialize(seed)

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        x, _ = self.encode(images, sample_seeds)  # B T D
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits

    def features(
        self,
        images: Tensor,
        outputs: str | Iterable[str] | None = None,
        sample_seeds: Tensor | None = None,
        *,
        layers: Iterable[int] | None = None,
        norm: bool = False,
    ) -> Output:
        """Intermediate outputs by name (fields of `Output`; default: the logits).

        `feature_maps` are the maps of the four stages, B D h w, with the strides `config.strides`. `tokens`,
        `patch_maps` and `attention` (B nW H N N: nW windows of N tokens) have one value for each block. `layers`
        selects among them: stages for `feature_maps`, blocks for the others, counted over all stages; negative ones
        count from the end. Later blocks are not computed unless another output needs them.
        """
        names = resolve_outputs(outputs, layers, default_layered="feature_maps")
        self._check_outputs(names, layers, norm)
        depth = len(self.stages) if "feature_maps" in names and layers is not None else self.config.depth
        indices = resolve_layers(layers, depth)
        requested = self._requested(names, indices, layers is None)
        x, grid = self.encode(images, sample_seeds, requested=requested)
        results = _select(requested, indices, "tokens" in names and layers is None)
        if names <= PER_LAYER:
            return Output(**{name: results[name] for name in names})
        x = self.norm(x)
        pooled = x.mean(1)  # B D
        results |= {"pooled": pooled, "pre_logits": pooled, "patches": x.unflatten(1, grid)}
        if "logits" in names:
            results["logits"] = self.head(pooled)
        return Output(**{name: results[name] for name in names})

    def _requested(self, names: frozenset[str], indices: tuple[int, ...], all_layers: bool) -> Requested:
        num_stages, ends = len(self.stages), _last_blocks(self.config)
        stages = frozenset(range(num_stages) if all_layers else indices) if "feature_maps" in names else frozenset()
        per_block = names & {"tokens", "patch_maps", "attention"}
        blocks = frozenset(indices) if per_block else frozenset()
        last = max([*blocks, *(ends[stage] for stage in stages)], default=None) if names <= PER_LAYER else None
        return Requested(
            blocks, bool(per_block - {"attention"}), "attention" in names, feature_maps=stages, last_block=last
        )

    def embed(
        self,
        images: Tensor,
        sample_seeds: Tensor | None = None,
        corrupt: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Grid]:
        """B C H W -> the input of the first block, B T D, and the grid (rows, columns) of patches.

        `corrupt` is applied to the normalized patch embeddings, B T D.
        """
        self.check_images(images)
        if not isinstance(images, Proxy):
            try:
                self.config.grid_of((images.shape[2], images.shape[3]))
            except ConfigError as error:
                raise ModelError(str(error)) from None
        x = self.patch(cover_with_patches(images, pair(self.config.patch_size), self.config.uncovered))  # B h w D
        grid = (x.shape[1], x.shape[2])
        x = self.patch_norm(x.flatten(1, 2)).to(x.dtype)
        if corrupt is not None:
            x = corrupt(x)
        seeds = None if sample_seeds is None else drop.embedding_seeds(sample_seeds)
        return drop.dropout(x, self.config.dropout if self.training else 0.0, seeds), grid

    def encode(
        self,
        images: Tensor,
        sample_seeds: Tensor | None = None,
        *,
        corrupt: Callable[[Tensor], Tensor] | None = None,
        requested: Requested | None = None,
    ) -> tuple[Tensor, Grid]:
        """B C H W -> the output of the last block, B T D, and its grid. `requested` receives intermediate outputs."""
        sample_seeds = self.resolve_sample_seeds(images, sample_seeds)
        x, grid = self.embed(images, sample_seeds, corrupt)
        seeds = None if sample_seeds is None else drop.block_seeds(sample_seeds, self.config.depth)
        requested = requested or Requested()
        if requested.tokens:
            requested.kept_tokens[-1] = x, grid
        number = 0
        for index, stage in enumerate(self.stages):
            assert isinstance(stage, Stage)
            if stage.merge is not None:
                x, grid = stage.merge(x, grid), (half(grid[0]), half(grid[1]))
            for block in stage.blocks:
                x = self._run(block, x, grid, number, None if seeds is None else seeds[number], requested)
                number += 1
                if number - 1 == requested.last_block:
                    break
            if index in requested.feature_maps:
                requested.kept_maps[index] = x.transpose(1, 2).unflatten(2, grid)  # B D h w
            if number - 1 == requested.last_block:
                break
        return x, grid

    def _run(
        self, block: nn.Module, x: Tensor, grid: Grid, number: int, seeds: Tensor | None, requested: Requested
    ) -> Tensor:
        """Run one block, and keep what is requested of it."""
        keep = number in requested.blocks
        weights: list[Tensor] | None = [] if keep and requested.attention else None
        if self.is_checkpointing() and weights is None:
            x = checkpoint(
                block,
                x,
                grid,
                None,
                seeds,
                use_reentrant=False,
                preserve_rng_state=self.config.attention_dropout > 0,  # other dropout depends on the seeds only
            )
        else:
            x = block(x, grid, weights, seeds)
        if weights:
            assert isinstance(block, SwinBlock)
            requested.kept_attention[number] = by_window(weights[0], len(x), block.attention.num_heads)
        if keep and requested.tokens:
            requested.kept_tokens[number] = x, grid
        return x

    def resolve_sample_seeds(self, x: Tensor, sample_seeds: Tensor | None) -> Tensor | None:
        """Validated or newly drawn seeds, B int64; None if neither dropout nor stochastic depth is active."""
        if not self.training or not (self.config.dropout or self.config.drop_path):
            return None
        return drop.resolve_sample_seeds(x, sample_seeds)

    @torch.no_grad()
    def initialize(self, seed: int | None = None) -> Self:
        """Initialize the weights as the original code does, with a zero head; the same seed gives the same weights."""
        g = init.generator_for(self.patch.weight, seed)
        bound = 1 / math.sqrt(math.prod(self.patch.weight.shape[1:]))  # torch's default for convolutions
        for parameter in (self.patch.weight, self.patch.bias):
            assert parameter is not None
            parameter.uniform_(-bound, bound, generator=g)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                _init_linear(module, g)
            elif isinstance(module, TableBias):
                nn.init.trunc_normal_(module.table, std=0.02, generator=g)
        for module in self.modules():
            if isinstance(module, SwinBlock) and not module.norm_first:
                for norm in (module.norm1, module.norm2):  # each block starts as the identity
                    nn.init.zeros_(norm.weight)
                if module.attention.log_scale is not None:
                    nn.init.constant_(module.attention.log_scale, math.log(10))
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
        return self

    def decayed_parameters(self) -> set[str]:
        """As in a ViT, and without the MLPs of version 2's position biases, as in the original code."""
        biases = tuple(f"{name}." for name, module in self.named_modules() if isinstance(module, ContinuousBias))
        return {name for name in super().decayed_parameters() if not name.startswith(biases)}

    @property
    def table_windows(self) -> tuple[Grid, ...]:
        """Version 1: window size of each table of position biases; empty in version 2."""
        return tuple(module.window for module in self.modules() if isinstance(module, TableBias))

    def resized(self, image_size: Pair) -> Swin:
        """A copy for images of this size. Tables of position biases whose window changes by the rule are resampled."""
        return self._rebuilt(self.config.replace(image_size=image_size))

    def with_window(self, window_size: Pair) -> Swin:
        """A copy with windows of another size.

        Version 1: tables of position biases are resampled. Version 2: the coordinates of the biases keep their scale,
        that of the windows before, as in the released models window12to16 and window12to24.
        """
        changes: dict[str, Any] = {"window_size": window_size, "stage_window_sizes": ()}
        if self.config.version == 2 and not any(self.config.pretrained_window_sizes):
            before = [self.config.table_window(stage) for stage in range(len(self.stages))]
            if any(height != width for height, width in before):
                raise ModelError(f"windows of version 2 that are not square, {before}, cannot be replaced by others.")
            changes["pretrained_window_sizes"] = tuple(height for height, _ in before)
        return self._rebuilt(self.config.replace(**changes))

    def _rebuilt(self, config: SwinConfig) -> Swin:
        resampled = {}
        for name, module in self.named_modules():
            if isinstance(module, TableBias):
                stage = int(name.split(".")[1])
                window = config.table_window(stage)
                resampled[f"{name}.table"] = resample_table(module.table, module.window, window, config.window_rule)
        return self.rebuild(config, resampled)

    def with_classes(self, num_classes: int) -> Swin:
        """A copy with a new head initialized to zero, for fine-tuning."""
        config, like = self.config.replace(num_classes=num_classes), self.norm.weight
        head = {
            "head.weight": like.new_zeros(num_classes, config.pooled_width),
            "head.bias": like.new_zeros(num_classes),
        }
        return self.rebuild(config, head if num_classes else {}, drop=("head.",))

    def layer_id(self, name: str) -> int:
        """0 for the patch embedding; the blocks of all stages from 1, merging with the block after it; one more for the
        final norm and the head."""
        part, _, rest = name.partition(".")
        if not hasattr(self, part):
            raise ModelError(f"unknown parameter {name!r}{did_you_mean(name, dict(self.named_parameters()))}")
        if part == "stages":
            stage, kind, *path = rest.split(".")
            block = int(path[0]) if kind == "blocks" else 0
            return sum(self.config.depths[: int(stage)]) + block + 1
        return self.config.depth + 1 if part in ("norm", "head") else 0

    def _check_outputs(self, names: frozenset[str], layers: Iterable[int] | None, norm: bool) -> None:
        for name in names:
            if name in NO_OUTPUT:
                raise ModelError(f"this network cannot give {name!r}: {NO_OUTPUT[name]}.")
        if norm:
            raise ModelError(
                "a Swin Transformer's final norm fits its last stage alone; 'patches' is that map, normalized."
            )
        if layers is not None and "feature_maps" in names and len(names & PER_LAYER) > 1:
            raise ModelError(
                "with 'feature_maps', layers counts stages, and with 'tokens', 'patch_maps' and 'attention' blocks; "
                "request them separately, or without layers."
            )


@fx.wrap
def half(side: int) -> int:
    """Half of a side, rounded up."""
    return -(-side // 2)


@fx.wrap
def cover_with_patches(images: Tensor, patch: Grid, uncovered: str) -> Tensor:
    """Pad the images at the bottom and right to whole patches, or crop what does not fill one."""
    height, width = images.shape[2:]
    if not height % patch[0] and not width % patch[1]:
        return images
    if uncovered == "pad":
        return F.pad(images, (0, -width % patch[1], 0, -height % patch[0]))
    return images[:, :, : height // patch[0] * patch[0], : width // patch[1] * patch[1]]


def count_flops(config: SwinConfig, image_size: Grid) -> int:
    """FLOPs of a forward pass for one image: two per multiply-add of matrix products, over padded windows.

    The MLPs of version 2's position biases, which do not depend on the image, are not counted.
    """
    grids = config.stage_grids(config.grid_of(image_size))
    total = 2 * math.prod(grids[0]) * config.channels * math.prod(pair(config.patch_size)) * config.width
    for stage, grid in enumerate(grids):
        width, tokens = config.stage_width(stage), math.prod(grid)
        if stage:
            total += 2 * tokens * 2 * width * width  # merging: from 4 D/2 to D channels
        window = config.window_placement(stage).on(grid).size
        in_windows = math.prod(-(-side // size) * size for side, size in zip(grid, window, strict=True))
        attention = 2 * in_windows * 3 * width * width + 4 * in_windows * math.prod(window) * width
        block = attention + 2 * tokens * width * width + 4 * tokens * width * config.mlp_dim(stage)
        total += config.depths[stage] * block
    return total + 2 * config.pooled_width * config.num_classes


def _last_blocks(config: SwinConfig) -> list[int]:
    """The number of the last block of each stage."""
    return [sum(config.depths[: stage + 1]) - 1 for stage in range(len(config.depths))]


def _select(requested: Requested, indices: tuple[int, ...], with_embedding: bool) -> dict[str, Any]:
    """The kept outputs by name, in the order of `indices`."""
    results: dict[str, Any] = {}
    if requested.tokens:
        kept = [requested.kept_tokens[i] for i in indices]
        embedding = (requested.kept_tokens[-1][0],) if with_embedding else ()
        results["tokens"] = (*embedding, *(x for x, _ in kept))
        results["patch_maps"] = tuple(x.unflatten(1, grid) for x, grid in kept)
    if requested.attention:
        results["attention"] = tuple(requested.kept_attention[i] for i in indices)
    if requested.feature_maps:
        order = indices if set(indices) == requested.feature_maps else sorted(requested.feature_maps)
        results["feature_maps"] = tuple(requested.kept_maps[i] for i in order)
    return results


def _init_linear(linear: nn.Linear, g: Generator | None) -> None:
    nn.init.trunc_normal_(linear.weight, std=0.02, generator=g)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
