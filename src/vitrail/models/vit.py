"""The Vision Transformer ("An Image is Worth 16x16 Words", arXiv 2010.11929).

images  B C H W
embed   patch embedding, prefix tokens (class, distillation, registers), positions    -> B T D
encode  `depth` transformer blocks                                                     -> B T D
pool    class token, mean of the patches, or attention pooling                         -> B D
head    linear classifier                                                              -> B num_classes
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from vitrail.config import Pair, ViTConfig, pair
from vitrail.errors import ConfigError, ModelError, did_you_mean
from vitrail.models import drop, init
from vitrail.models.base import BaseNet
from vitrail.models.hybrid import ResNetStem
from vitrail.models.layers import AttentionPool, Block, PatchEmbed, QKTransform, make_norm
from vitrail.models.output import PER_LAYER, POOLED, Output, resolve_layers, resolve_outputs
from vitrail.models.position import AdditivePosition, Grid, make_positions

# B images of C channels; N = h w patches in h rows and w columns; P prefix tokens, T = P + N tokens; D width


class ViT(BaseNet):
    """Vision Transformer. `net(images)`: B C H W -> logits; `net.features(images, outputs=...)`: intermediates by name.

    Images may have any height and width that are multiples of the patch size: positions are resampled
    to the image's grid.

    In training mode `sample_seeds`, B int64 (see `vitrail.rng`), determine dropout and stochastic depth
    for each image, independently of its batch; None draws seeds from torch's generator. Dropout of the
    attention weights is the exception: the fused kernel draws it from torch's generator.

    Under autocast, tokens keep the dtype of the patch embedding (bfloat16) from block to block, as in
    big_vision: half the memory traffic of timm's float32. Norms, positions and LayerScale are computed
    in float32 and rounded once.
    """

    def __init__(self, config: ViTConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config: ViTConfig = config
        self.first_kernel = "stem.root.conv.weight" if config.stem else "patch.weight"
        width, channels = config.width, config.channels
        self.stem = ResNetStem(config.stem, channels) if config.stem else None
        self.patch = PatchEmbed(
            config.stem.channels if config.stem else channels, width, pair(config.patch_size), bias=config.patch_bias
        )
        self.class_token = nn.Parameter(torch.empty(width)) if config.class_token else None
        self.distill_token = nn.Parameter(torch.empty(width)) if config.distilled else None
        self.registers = nn.Parameter(torch.empty(config.num_registers, width)) if config.num_registers else None
        self.positions = make_positions(config)
        self.pre_norm = make_norm(config) if config.pre_norm else nn.Identity()
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = make_norm(config) if config.pool_norm != "none" else nn.Identity()
        self.pool = AttentionPool(config) if config.pool in ("map", "coca") else None
        self.pre_logits = nn.Linear(config.pooled_width, config.pre_logits) if config.pre_logits else None
        self.head = _head(config)
        self.head_distill = _head(config) if config.distilled else None
        if not init.is_meta(self):
            self.initialize(seed)

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        sample_seeds = self.resolve_sample_seeds(images, sample_seeds)
        x, grid = self.embed(images, sample_seeds)  # B T D
        x = self.encode(x, grid, sample_seeds=sample_seeds, num_outputs=self._num_pooled(images))  # B T D or B P D
        return self.classify(*self.pool_tokens(self.norm_before_pool(x)))  # B num_classes

    def features(
        self,
        images: Tensor,
        outputs: str | Iterable[str] | None = None,
        sample_seeds: Tensor | None = None,
        *,
        layers: Iterable[int] | None = None,
        norm: bool = False,
    ) -> Output:
        """Intermediate outputs by name (fields of `Output`; default: the logits), like timm's `forward_intermediates`.

        `layers`: indices of the blocks whose tokens, patch_maps, prefix_tokens or attention are returned, in this
        order; negative ones count from the end. Later blocks are not computed unless another output needs them.
        `norm`: apply the final norm to each layer's tokens. Attention weights are computed only on request.
        """
        names = resolve_outputs(outputs, layers)
        self._check_outputs(names)
        tokens: list[Tensor] | None = [] if names & {"tokens", "patch_maps", "prefix_tokens"} else None
        attention: list[Tensor] | None = [] if "attention" in names else None
        pool_attention: list[Tensor] | None = [] if "pool_attention" in names else None
        indices = resolve_layers(layers, self.config.depth)
        keep_layers = None if layers is None else frozenset(indices)
        num_blocks = max(indices) + 1 if names <= PER_LAYER else None

        sample_seeds = self.resolve_sample_seeds(images, sample_seeds)
        x, grid = self.embed(images, sample_seeds)
        num_outputs = self._num_pooled(images) if names <= POOLED else None
        x = self.encode(x, grid, tokens, attention, sample_seeds, keep_layers, num_blocks, num_outputs)
        results = self._select_layers(indices, tokens, attention, grid, norm)
        if names <= PER_LAYER:
            return Output(**{name: results[name] for name in names})
        x = self.norm_before_pool(x)
        pooled, distill_token = self.pool_tokens(x, pool_attention)
        results |= {
            "pool_attention": pool_attention and pool_attention[0][:, :, 0],
            "pooled": pooled,
            "class_token": x[:, 0] if self.config.class_token else None,
        }
        if "patches" in names:
            results["patches"] = x[:, self.config.num_prefix_tokens :].unflatten(1, grid)
        if "pre_logits" in names:
            results["pre_logits"] = self.apply_pre_logits(pooled)
        if "logits" in names:
            results["logits"] = self.classify(pooled, distill_token)
        if "head_logits" in names and distill_token is not None:
            results["head_logits"] = (self.head(pooled), self.head_distill(distill_token))  # type: ignore[misc]
        return Output(**{name: results[name] for name in names})

    def _select_layers(
        self,
        indices: tuple[int, ...],
        tokens: list[Tensor] | None,
        attention: list[Tensor] | None,
        grid: Grid,
        norm: bool,
    ) -> dict[str, Any]:
        """The per-layer outputs of these blocks, by name, in the order requested."""
        order, num_prefix = sorted(set(indices)), self.config.num_prefix_tokens
        results: dict[str, Any] = {}
        if attention is not None:
            results["attention"] = tuple(attention[order.index(i)] for i in indices)
        if tokens is not None:
            tokens = [self.norm_before_pool(x) for x in tokens] if norm else tokens
            embedded = tokens[: len(tokens) - len(order)]  # the input of the first block, if all layers are returned
            block_outputs = [tokens[len(embedded) + order.index(i)] for i in indices]
            results["tokens"] = (*embedded, *block_outputs)
            results["patch_maps"] = tuple(x[:, num_prefix:].unflatten(1, grid) for x in block_outputs)  # B h w D
            results["prefix_tokens"] = tuple(x[:, :num_prefix] for x in block_outputs)  # B P D
        return results

    def resolve_sample_seeds(self, x: Tensor, sample_seeds: Tensor | None) -> Tensor | None:
        """Validated or newly drawn seeds, B int64; None if neither dropout nor stochastic depth is active."""
        if not self.training or not (self.config.dropout or self.config.drop_path):
            return None
        return drop.resolve_sample_seeds(x, sample_seeds)

    def embed(
        self,
        images: Tensor,
        sample_seeds: Tensor | None = None,
        corrupt: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Grid]:
        """B C H W -> the input of the first block, B T D, and the grid (rows, columns) of patches.

        `corrupt` is applied to the patch embeddings, B N D, before prefix tokens and positions are added.
        """
        self._check_size(images)
        images = self.crop_to_patches(images) if self.stem is None else self.stem(images)  # the stem gives feature maps
        x = self.patch(images)  # B h w D
        grid = (x.shape[1], x.shape[2])
        x = x.flatten(1, 2)  # B N D
        if corrupt is not None:
            x = corrupt(x)
        prefix = [t.view(-1, x.shape[-1]) for t in self._prefix_tokens()]  # P D in total
        if prefix:
            x = torch.cat([torch.cat(prefix).expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)  # B T D
        if self.config.resolved_position_at == "stem":
            x = self.add_position(x, 0, grid)
        rate = self.config.dropout if self.training else 0.0
        x = drop.dropout(x, rate, None if sample_seeds is None else drop.embedding_seeds(sample_seeds))
        return self.pre_norm(x).to(x.dtype), grid

    def encode(
        self,
        x: Tensor,
        grid: Grid,
        tokens_out: list[Tensor] | None = None,
        attention_out: list[Tensor] | None = None,
        sample_seeds: Tensor | None = None,
        keep_layers: Collection[int] | None = None,
        num_blocks: int | None = None,
        num_outputs: int | None = None,
    ) -> Tensor:
        """Run all blocks, or the first `num_blocks`: B T D -> B T D.

        With `num_outputs` the last block computes the first tokens only: B num_outputs D. `tokens_out` and
        `attention_out` receive the tokens and attention weights of the blocks in `keep_layers`; None: of all blocks,
        and the input of the first block too.
        """
        recompute = self.is_checkpointing() and attention_out is None
        sample_seeds = self.resolve_sample_seeds(x, sample_seeds)
        seeds = None if sample_seeds is None else drop.block_seeds(sample_seeds, self.config.depth)
        qk_transform: QKTransform | None = None
        if tokens_out is not None and keep_layers is None:
            tokens_out.append(x)
        for i, block in enumerate(self.blocks):
            if i == num_blocks:
                break
            keep = keep_layers is None or i in keep_layers
            x, qk_transform = self.apply_position(i, x, grid, qk_transform)
            block_seeds = None if seeds is None else seeds[i]
            outputs = num_outputs if i == len(self.blocks) - 1 else None
            if recompute:
                x = checkpoint(
                    block,
                    x,
                    qk_transform,
                    None,
                    block_seeds,
                    outputs,
                    use_reentrant=False,
                    preserve_rng_state=self.config.attention_dropout > 0,  # other dropout depends on block_seeds only
                )
            else:
                x = block(x, qk_transform, attention_out if keep else None, block_seeds, outputs)
            if tokens_out is not None and keep:
                tokens_out.append(x)
        return x

    def apply_position(
        self, layer: int, x: Tensor, grid: Grid, qk_transform: QKTransform | None
    ) -> tuple[Tensor, QKTransform | None]:
        """Apply one block's position encoding: returns the tokens, B T D, and the block's QKTransform or None.

        Additive encodings are added to the tokens; encodings inside attention become the QKTransform.
        `qk_transform` is that of the previous block, reused if all blocks share one encoding.
        """
        if self.config.resolved_position_at != "stem" and self.positions:
            if isinstance(self._position(layer), AdditivePosition):
                return self.add_position(x, layer, grid), qk_transform
            if qk_transform is None or len(self.positions) > 1:
                return x, self._position(layer)(grid, x)
        return x, qk_transform

    def add_position(self, x: Tensor, layer: int, grid: Grid) -> Tensor:
        """Tokens plus this layer's additive position embeddings, B T D."""
        return (x + self._position(layer)(grid, x)).to(x.dtype) if self.positions else x

    def pool_tokens(self, x: Tensor, attention_out: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """B T D -> the pooled features, B D (B 2D for 'token+gap'), and the distillation token, B D or None."""
        config = self.config
        patches, distill_token = x[:, config.num_prefix_tokens :], None  # B N D
        match config.pool:
            case "token":
                pooled = x[:, 0]
                distill_token = x[:, 1] if config.distilled else None
            case "gap":
                pooled = patches.mean(1)
            case "token+gap":
                pooled = torch.cat([x[:, 0], patches.mean(1)], dim=-1)
            case "map" | "coca":
                assert self.pool is not None
                pooled = self.pool(patches if config.pool == "map" else x, attention_out)
        if config.pool_norm == "after":
            pooled = self.norm(pooled)
            distill_token = None if distill_token is None else self.norm(distill_token)
        return pooled, distill_token

    def norm_before_pool(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.config.pool_norm == "before" else x

    def apply_pre_logits(self, pooled: Tensor) -> Tensor:
        """tanh(Linear(pooled)), the hidden layer of the paper's pre-training head; `pooled` itself if there is none."""
        return pooled if self.pre_logits is None else torch.tanh(self.pre_logits(pooled))

    def classify(self, pooled: Tensor, distill_token: Tensor | None = None) -> Tensor:
        """Logits, B num_classes; for distilled models the mean of the two heads' logits."""
        logits: Tensor = self.head(self.apply_pre_logits(pooled))
        if distill_token is not None and self.head_distill is not None:
            logits = (logits + self.head_distill(distill_token)) / 2
        return logits

    @torch.no_grad()
    def initialize(self, seed: int | None = None) -> Self:
        """Initialize the weights as the original code does; the same seed gives the same weights."""
        config, g = self.config, init.generator_for(self.patch.weight, seed)
        if self.stem is not None:
            self.stem.initialize(g)
        init.lecun_normal_(self.patch.weight, g)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
        for block in self.blocks:
            _init_block(block, config, g)
        if self.pool is not None:
            _init_pool(self.pool, g)
        if self.pre_logits is not None:
            init.lecun_normal_(self.pre_logits.weight, g)
            nn.init.zeros_(self.pre_logits.bias)
        for parameter in (self.patch.bias, self.class_token):
            if parameter is not None:
                nn.init.zeros_(parameter)
        for parameter, std in [(self.distill_token, 0.02), (self.registers, 1e-6)]:
            if parameter is not None:
                init.normal_(parameter, std, g)
        for parameter in self.positions.parameters():
            init.normal_(parameter, config.position_init_std, g)
        for head in (self.head, self.head_distill):
            if isinstance(head, nn.Linear):
                _init_head(head, config)
        return self

    def resized(self, image_size: Pair) -> ViT:
        """A copy of the network for images of this size, with resampled position embeddings."""
        config = self.config.replace(image_size=image_size)
        if config.grid == self.config.grid:
            return self.rebuild(config, {})
        if self.config.position == "relative":
            raise ModelError("relative positions cannot be resampled; use images of the size the model was built for.")
        resampled = {
            f"positions.{j}.{name}": value
            for j, position in enumerate(self.positions)
            if isinstance(position, AdditivePosition)
            for name, value in position.resampled(config.grid).items()
        }
        return self.rebuild(config, resampled)

    def with_classes(self, num_classes: int) -> ViT:
        """A copy of the network for fine-tuning: new heads with zero weights, no pre-logits layer."""
        config = self.config.replace(num_classes=num_classes, pre_logits=0, head_bias=True)
        new_heads = {}
        for head in ("head", "head_distill") if config.distilled else ("head",):
            if num_classes:
                like = self.patch.weight
                new_heads[f"{head}.weight"] = like.new_zeros(num_classes, config.pooled_width)
                new_heads[f"{head}.bias"] = like.new_full((num_classes,), config.head_bias_init)
        return self.rebuild(config, new_heads, drop=("head", "pre_logits"))

    def layer_id(self, name: str) -> int:
        """Layer number of a parameter, for layer-wise learning rate decay.

        0 for the stem, patch embedding, tokens and positions; i + 1 for block i and, with position_at='layers', its
        positions; depth + 1 for the final norm, pool and heads.
        """
        module, _, path = name.partition(".")
        if not hasattr(self, module):
            raise ModelError(f"unknown parameter {name!r}{did_you_mean(name, dict(self.named_parameters()))}")
        if module == "blocks" or (module == "positions" and self.config.resolved_position_at == "layers"):
            return int(path.split(".")[0]) + 1
        return self.config.depth + 1 if module in ("norm", "pool", "pre_logits", "head", "head_distill") else 0

    def crop_to_patches(self, images: Tensor) -> Tensor:
        """Crop the rows at the bottom and the columns at the right that do not fill a patch."""
        if self.config.uncovered == "refuse":
            return images  # _check_size has verified that the size is a multiple of the patch size
        height, width = pair(self.config.patch_size)
        return images[:, :, : images.shape[2] // height * height, : images.shape[3] // width * width]

    def _num_pooled(self, images: Tensor) -> int | None:
        """Number of leading tokens that the logits depend on; None: all.

        Only they leave the last block, which takes a fourteenth of the FLOPs off a ViT-B/16. Hooks in that block or
        after it and graphs of torch.fx see all tokens, and dropout of the attention weights draws the same random
        numbers as for all.
        """
        config, observed = self.config, (*self.blocks[-1:].modules(), self.norm)
        if config.pool != "token" or (self.training and config.attention_dropout) or not self.blocks:
            return None
        if isinstance(images, Proxy) or any(m._forward_hooks or m._forward_pre_hooks for m in observed):
            return None
        return 2 if config.distilled else 1

    def _position(self, layer: int) -> nn.Module:
        return self.positions[layer if len(self.positions) > 1 else 0]

    def _prefix_tokens(self) -> list[Tensor]:
        return [t for t in (self.class_token, self.distill_token, self.registers) if t is not None]

    def _check_size(self, images: Tensor) -> None:
        self.check_images(images)
        if isinstance(images, Proxy):
            return
        try:
            self.config.grid_of((images.shape[2], images.shape[3]))
        except ConfigError as error:
            raise ModelError(str(error)) from None

    def _check_outputs(self, names: frozenset[str]) -> None:
        config = self.config
        unavailable = {
            "class_token": not config.class_token,
            "head_logits": not config.distilled,
            "pool_attention": self.pool is None,
            "prefix_tokens": not config.num_prefix_tokens,
            "feature_maps": True,
        }
        reasons = {
            "class_token": "it has no class token",
            "head_logits": "it is not distilled: there is one head",
            "pool_attention": f"it pools by {config.pool!r}, not by attention",
            "prefix_tokens": "it has no class, distillation or register tokens",
            "feature_maps": "a ViT has tokens; 'patch_maps' are each layer's as B h w D, 'patches' the final ones",
        }
        for name in names:
            if unavailable.get(name):
                raise ModelError(f"this network cannot give {name!r}: {reasons[name]}.")


def _head(config: ViTConfig) -> nn.Module:
    if not config.num_classes:
        return nn.Identity()
    return nn.Linear(config.head_width, config.num_classes, bias=config.head_bias)


def _init_head(head: nn.Linear, config: ViTConfig) -> None:
    nn.init.zeros_(head.weight)
    if head.bias is not None:
        nn.init.constant_(head.bias, config.head_bias_init)


def _init_block(block: nn.Module, config: ViTConfig, g: torch.Generator | None) -> None:
    assert isinstance(block, Block)
    init.xavier_uniform_(block.attention.qkv.weight, g, parts=3)
    init.xavier_uniform_(block.attention.out.weight, g)
    for bias in (block.attention.qkv.bias, block.attention.out.bias):
        if bias is not None:
            nn.init.zeros_(bias)
    _init_mlp(block.mlp, g)
    for scale in (block.scale1, block.scale2):
        if scale is not None and config.layer_scale is not None:
            nn.init.constant_(scale, config.layer_scale)


def _init_mlp(mlp: nn.Module, g: torch.Generator | None) -> None:
    for layer in mlp.children():
        assert isinstance(layer, nn.Linear)
        init.xavier_uniform_(layer.weight, g)
        if layer.bias is not None:
            init.normal_(layer.bias, 1e-6, g)


def _init_pool(pool: AttentionPool, g: torch.Generator | None) -> None:
    bound = (6 / (1 + len(pool.probe))) ** 0.5  # Xavier bound of a one-row matrix
    pool.probe.uniform_(-bound, bound, generator=g)
    for linear, parts in [(pool.q, 1), (pool.kv, 2), (pool.out, 1)]:
        init.xavier_uniform_(linear.weight, g, parts=parts)
        nn.init.zeros_(linear.bias)
    if pool.mlp is not None:
        _init_mlp(pool.mlp, g)
