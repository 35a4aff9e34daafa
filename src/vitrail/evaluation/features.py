"""Feature extraction: one vector per image, from any layers of a network, with a choice of poolings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import DataConfig
from vitrail.data.batch import Batch
from vitrail.data.batches import evaluation_batches
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Source
from vitrail.errors import ConfigError, DataError, ModelError, did_you_mean
from vitrail.models import BiT, Net, Swin, ViT
from vitrail.models.base import eval_mode
from vitrail.runtime import autocast

# b images in a batch, N images in all, T tokens, D features

WITHOUT_NORM = ", without the final norm"
POOLS = ("pooled", "token", "mean", "token+mean")
ROWS_PER_CHECK = 65536
"""Rows that are checked for NaN and infinity at a time."""


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Which features to take: layers, pooling of their tokens, and whether to apply the final norm."""

    layers: tuple[int, ...] = ()
    """Block indices (stage indices for a BiT) whose vectors are concatenated: 0 is the input of the first block, 1 its
    output, -1 the output of the last block. Empty: the input of the head, or with another `pool` the last block."""
    pool: str = "pooled"
    """pooled: the input of the head; token: the class token; mean: the mean patch token; token+mean: both."""
    norm: bool = True
    """Whether to apply the network's final norm to each layer, as in DINO's protocol."""

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise ConfigError(f"unknown pooling {self.pool!r}{did_you_mean(self.pool, POOLS)}")

    def __str__(self) -> str:
        if not self.layers and self.pool == "pooled":
            return "head input"
        where = f"layer {'+'.join(map(str, self.layers))}" if self.layers else "last layer"
        return f"{where}, {self.pool}{'' if self.norm else WITHOUT_NORM}"

    @classmethod
    def from_text(cls, text: str) -> FeatureSpec:
        """The spec that `str` describes; ConfigError if none does."""
        if text == "head input":
            return cls()
        match = re.fullmatch(rf"(?:last layer|layer (\d+(?:\+\d+)*)), ([a-z+]+)({WITHOUT_NORM})?", text)
        if match is None:
            raise ConfigError(f"got features {text!r}, expected such as 'head input' or 'layer 12, token'.")
        layers = tuple(map(int, match[1].split("+"))) if match[1] else ()
        return cls(layers=layers, pool=match[2], norm=match[3] is None)


def resolve_features(spec: FeatureSpec, net: Net) -> FeatureSpec:
    """Check `spec` against a network, replace negative layer indices, and choose the default pooling of layers.

    Layers without an explicit pooling use the class token if there is one, else the mean.
    """
    depth = len(net.config.layers) if isinstance(net, BiT) else net.config.depth
    spec = replace(spec, layers=tuple(depth + 1 + n if -depth <= n < 0 else n for n in spec.layers))
    what = "stage" if isinstance(net, BiT) else "layer"
    for layer in spec.layers:
        if not (1 if isinstance(net, BiT) else 0) <= layer <= depth:
            raise ModelError(
                f"there is no {what} {layer} of {depth}; expected {'0' if what == 'layer' else '1'} to {depth}."
            )
    if not isinstance(net, ViT):
        if spec.pool not in ("pooled", "mean"):
            kind = "a BiT has no tokens" if isinstance(net, BiT) else "a Swin Transformer has no class token"
            raise ModelError(f"{kind} to pool with {spec.pool!r}; expected pooled or mean.")
        if isinstance(net, Swin) and spec.norm and any(n <= depth - net.config.depths[-1] for n in spec.layers):
            raise ModelError(
                f"the final norm of a Swin Transformer fits the layers of its last stage only, from "
                f"{depth - net.config.depths[-1] + 1}; choose these, or no norm (norm=False, --no-norm)."
            )
        return replace(spec, pool="mean") if isinstance(net, Swin) and spec.layers else spec
    if spec.pool.startswith("token") and not net.config.class_token:
        raise ModelError(f"this network has no class token for {spec.pool!r}; expected pooled or mean.")
    if spec.pool == "pooled" and spec.layers:
        return replace(spec, pool="token" if net.config.class_token else "mean")
    return spec


def extract(net: Net, images: Tensor, spec: FeatureSpec) -> Tensor:
    """Normalized images, b C H W -> features, b D; `spec` must have been resolved by `resolve_features`."""
    if spec.pool == "pooled" and not spec.layers:
        pooled = net.features(images, outputs="pooled").pooled
        assert pooled is not None
        return pooled
    if isinstance(net, Swin):
        layers = spec.layers or (net.config.depth,)
        tokens = net.features(images, outputs="tokens").tokens
        assert tokens is not None
        norm: nn.Module = net.norm if spec.norm else nn.Identity()
        return torch.cat([norm(tokens[layer]).mean(1) for layer in layers], dim=1)
    if not isinstance(net, ViT):
        maps = net.features(images, outputs="feature_maps").feature_maps
        assert maps is not None
        return torch.cat([maps[layer - 1].mean((2, 3)) for layer in spec.layers or (len(maps),)], dim=1)
    layers = spec.layers or (net.config.depth,)
    vectors = {layer: _pool_tokens(net, tokens, spec) for layer, tokens in _layer_tokens(net, images, layers)}
    return torch.cat([vectors[layer] for layer in layers], dim=1)


def _layer_tokens(net: ViT, images: Tensor, layers: Collection[int]) -> Iterator[tuple[int, Tensor]]:
    """(layer, tokens b T D) for each requested layer. Blocks after the last requested layer are not computed."""
    x, grid = net.embed(images)
    if 0 in layers:
        yield 0, x
    qk_transform = None
    for i, block in enumerate(list(net.blocks)[: max(layers)]):
        x, qk_transform = net.apply_position(i, x, grid, qk_transform)
        x = block(x, qk_transform)
        if i + 1 in layers:
            yield i + 1, x


def _pool_tokens(net: ViT, tokens: Tensor, spec: FeatureSpec) -> Tensor:
    """b T D -> b D, or b 2D for token+mean. The norm comes before or after pooling, according to the config."""
    norm: nn.Module = net.norm if spec.norm else nn.Identity()
    first, then = (nn.Identity(), norm) if net.config.pool_norm == "after" else (norm, nn.Identity())
    tokens = first(tokens)
    parts = []
    if spec.pool.startswith("token"):
        parts.append(then(tokens[:, 0]))
    if spec.pool.endswith("mean"):
        parts.append(then(tokens[:, net.config.num_prefix_tokens :].mean(1)))
    return torch.cat(parts, dim=1)


def image_batches(
    source: Source, preprocess: Preprocess, *, batch_size: int, device: torch.device, workers: int | None = None
) -> Loader:
    """A loader over every image once, which decodes on demand and caches nothing; unreadable images have weight 0."""
    if not len(source):
        raise DataError(f"{source.name} has no images.")
    config = DataConfig(resident=False, skip_bad=True, workers=workers)
    return evaluation_batches(
        source, preprocess=preprocess.config, batch_size=batch_size, device=device, config=config, labeled=False
    )


def extract_batches(
    net: Net, batches: Iterable[Batch], *, preprocess: Preprocess, spec: FeatureSpec, precision: str = "float32"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each batch, the indices of its readable images and their features (float32, on the CPU)."""
    spec = resolve_features(spec, net)
    dtype = next(p.dtype for p in net.parameters())
    for batch in batches:
        with eval_mode(net), torch.no_grad(), autocast(precision, batch.images.device):
            found = extract(net, preprocess.normalize(batch.images).to(dtype), spec)
        readable = (batch.weights > 0).cpu()
        yield batch.indices[readable], found.float().cpu()[readable]


@dataclass(frozen=True)
class Features:
    """Features of labeled images."""

    values: Tensor
    """N D, float32, on the CPU."""
    targets: Tensor
    """N class indices."""
    labels: tuple[str, ...]
    """Class names."""
    name: str = "features"
    """Name of the data, for messages."""

    def __post_init__(self) -> None:
        finite = [part.isfinite().all(1) for part in self.values.split(ROWS_PER_CHECK)] or [
            torch.ones(0, dtype=torch.bool)
        ]
        bad = len(self.values) - int(torch.cat(finite).sum())
        if bad:
            raise DataError(
                f"{bad:,} of the {len(self.values):,} images of {self.name} have features that are NaN or infinite, "
                "so no classifier can be fitted; check the weights."
            )

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, rows: Tensor) -> Features:
        return Features(self.values[rows], self.targets[rows], self.labels, self.name)


def extract_features(
    net: Net,
    source: Source,
    *,
    preprocess: Preprocess,
    spec: FeatureSpec,
    batch_size: int = 64,
    device: torch.device,
    workers: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[Features, dict[str, str]]:
    """Extract the features of all labeled images of a source; also returns the unreadable images and why."""
    if source.multi_label:
        raise DataError(f"{source.name} is multi-label; probing needs one label per image.")
    targets = torch.from_numpy(np.asarray(source.targets, dtype=np.int64))
    values, numbers = [], []
    with image_batches(source, preprocess, batch_size=batch_size, device=device, workers=workers) as batches:
        for indices, found in extract_batches(net, batches, preprocess=preprocess, spec=spec):
            labeled = targets[indices] >= 0
            values.append(found[labeled])
            numbers.append(indices[labeled])
            if advance is not None:
                advance(min(batch_size, len(source) - batch_size * (len(values) - 1)))
        bad = batches.bad
    index = torch.cat(numbers)
    if not len(index):
        raise DataError(f"none of the {len(source):,} images of {source.name} is readable and labeled.")
    return Features(torch.cat(values), targets[index], source.labels, source.name), bad
