"""FLOPs and parameters of a model, counted from its config."""

from __future__ import annotations

from math import prod

from vitrail.config import BiTConfig, NetConfig, Pair, SwinConfig, ViTConfig, pair
from vitrail.models import bit, build, hybrid, swin


def count_flops(config: NetConfig, image_size: Pair | None = None) -> int:
    """FLOPs of a forward pass for one image: two per multiply-add of matrix products and convolutions.

    Norms, activations and softmax are not counted, as in torch's FlopCounterMode. All tokens of all blocks count, as
    in the literature; a network that pools its class token computes fewer in its last block.
    """
    size = pair(image_size if image_size is not None else config.image_size)
    if isinstance(config, BiTConfig):
        return bit.count_flops(config, size)
    if isinstance(config, SwinConfig):
        return swin.count_flops(config, size)
    patches = prod(config.grid_of(size))
    tokens = patches + config.num_prefix_tokens
    channels = config.stem.channels if config.stem else config.channels
    total = hybrid.count_flops(config.stem, size, config.channels) if config.stem else 0
    total += 2 * patches * channels * prod(pair(config.patch_size)) * config.width
    total += config.depth * _block(config, tokens, patches)
    if config.pool in ("map", "coca"):
        total += _pool(config, patches if config.pool == "map" else tokens)
    if config.pre_logits:
        total += 2 * config.pooled_width * config.pre_logits
    return total + 2 * config.head_width * config.num_classes * (1 + config.distilled)


def training_flops(config: NetConfig, trainable: str | int = "all") -> int:
    """FLOPs of forward and backward pass for one image; `trainable`: "all", "head" or a number of last blocks.

    The backward pass costs two products for each product of the trainable layers' forward pass: the gradients of
    weights and of inputs. Frozen layers have no backward pass. Blocks of a BiT or Swin Transformer count with their
    mean cost.
    """
    forward = count_flops(config)
    if trainable == "all":
        return 3 * forward
    last = trainable if isinstance(trainable, int) else 0
    if isinstance(config, BiTConfig):
        return forward + 2 * forward * last // sum(config.layers)
    if isinstance(config, SwinConfig):
        return forward + 2 * forward * last // config.depth
    head = 2 * config.head_width * config.num_classes * (1 + config.distilled)
    return forward + 2 * (head + last * (count_flops(config.replace(depth=config.depth + 1)) - forward))


def _block(config: ViTConfig, tokens: int, patches: int) -> int:
    width = config.width
    projections = 2 * tokens * width * 4 * width
    attention = 4 * tokens * tokens * width
    relative = 2 * patches * (2 * patches - 1) * width if config.position == "relative" else 0
    return projections + attention + relative + _mlp(config, tokens)


def _mlp(config: ViTConfig, tokens: int) -> int:
    matrices = 3 if config.activation == "swiglu" else 2
    return 2 * matrices * tokens * config.width * config.mlp_dim


def _pool(config: ViTConfig, tokens: int) -> int:
    width = config.pooled_width
    query_and_output = 2 * 2 * width * width
    attention = 2 * tokens * config.width * 2 * width + 4 * tokens * width
    return query_and_output + attention + (_mlp(config, 1) if config.pool == "map" else 0)


def count_parameters(config: NetConfig) -> int:
    """Number of parameters, counted on the meta device; every block of a ViT has the same number."""
    if not isinstance(config, ViTConfig):
        return _count(config)
    first, second = _count(config.replace(depth=1)), _count(config.replace(depth=2))
    return first + (config.depth - 1) * (second - first)


def _count(config: NetConfig) -> int:
    return sum(p.numel() for p in build(config, meta=True).parameters())
