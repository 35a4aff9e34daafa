"""What a network makes of images: features of any layer, pooled in one of a few ways, batch after batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import DataConfig
from vitrail.data.batch import Batch
from vitrail.data.loader import Loader, evaluation_batches
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Source
from vitrail.errors import ConfigError, DataError, ModelError, did_you_mean
from vitrail.models import Net, ViT
from vitrail.models.base import eval_mode
from vitrail.runtime import autocast

# b images of a batch, N of all, T tokens, D features

POOLS = ("pooled", "token", "mean", "token+mean")
ROWS_PER_CHECK = 65536
"""Features that are looked at together."""


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Where in a network features are taken, and how its tokens become one vector."""

    layers: tuple[int, ...] = ()
    """Numbers of blocks (of stages, in a BiT), whose vectors follow one another: 1 is what leaves the
    first one, 0 what enters it, -1 what leaves the last. None: what the head sees, or the last one."""
    pool: str = "pooled"
    """pooled: what the head sees; token: the class token; mean: of the patches; token+mean: both."""
    norm: bool = True
    """Whether the network's final norm is applied, to each of the layers, as in DINO's protocol."""

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise ConfigError(f"no pooling is called {self.pool!r}{did_you_mean(self.pool, POOLS)}")

    def __str__(self) -> str:
        if not self.layers:
            return "what the head sees" if self.pool == "pooled" else f"the last layer's {self.pool}"
        plain = "" if self.norm else ", without the final norm"
        return f"layer {'+'.join(map(str, self.layers))}, {self.pool}{plain}"


def resolve_features(spec: FeatureSpec, net: Net) -> FeatureSpec:
    """The same spec with its pooling chosen, where a layer's number leaves it open; refused where it cannot be.

    Numbers below 0 count from the end: -1 is the last.
    """
    depth = net.config.depth if isinstance(net, ViT) else len(net.config.layers)
    spec = replace(spec, layers=tuple(depth + 1 + n if -depth <= n < 0 else n for n in spec.layers))
    what = "layer" if isinstance(net, ViT) else "stage"
    for layer in spec.layers:
        if not (0 if isinstance(net, ViT) else 1) <= layer <= depth:
            raise ModelError(
                f"there is no {what} {layer} of {depth}; wanted {'0' if what == 'layer' else '1'} to {depth}."
            )
    if not isinstance(net, ViT):
        if spec.pool not in ("pooled", "mean"):
            raise ModelError(f"BiT has no tokens, so none to pool as {spec.pool!r}; wanted pooled or mean.")
        return spec
    if spec.pool.startswith("token") and not net.config.class_token:
        raise ModelError(f"this network has no class token for {spec.pool!r}; wanted pooled or mean.")
    if spec.pool == "pooled" and spec.layers:
        return replace(spec, pool="token" if net.config.class_token else "mean")
    return spec


def extract(net: Net, images: Tensor, spec: FeatureSpec) -> Tensor:
    """Normalized images, b C H W -> features, b D; `spec` has been settled."""
    if spec.pool == "pooled" and not spec.layers:
        pooled = net.features(images, outputs="pooled").pooled
        assert pooled is not None
        return pooled
    if not isinstance(net, ViT):
        maps = net.features(images, outputs="feature_maps").feature_maps
        assert maps is not None
        return torch.cat([maps[layer - 1].mean((2, 3)) for layer in spec.layers or (len(maps),)], dim=1)
    layers = spec.layers or (net.config.depth,)
    found = {layer: _pool_tokens(net, tokens, spec) for layer, tokens in _layer_tokens(net, images, layers)}
    return torch.cat([found[layer] for layer in layers], dim=1)


def _layer_tokens(net: ViT, images: Tensor, layers: Collection[int]) -> Iterator[tuple[int, Tensor]]:
    """The layers that are wanted with their tokens, b T D; no others are kept, and none after the last computed."""
    x, grid = net.embed(images)
    if 0 in layers:
        yield 0, x
    within = None
    for i, block in enumerate(list(net.blocks)[: max(layers)]):
        x, within = net.before(i, x, grid, within)
        x = block(x, within)
        if i + 1 in layers:
            yield i + 1, x


def _pool_tokens(net: ViT, tokens: Tensor, spec: FeatureSpec) -> Tensor:
    """b T D -> b D, or b 2D; the norm comes before or after pooling, as the network has it."""
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
    """Every image once, decoded as it is needed and kept by nobody; the unreadable have weight 0."""
    if not len(source):
        raise DataError(f"{source.name} has no images.")
    config = DataConfig(resident=False, skip_bad=True, workers=workers)
    return evaluation_batches(
        source, preprocess=preprocess.config, batch_size=batch_size, device=device, config=config, labeled=False
    )


def extract_batches(
    net: Net, batches: Iterable[Batch], *, preprocess: Preprocess, spec: FeatureSpec, precision: str = "float32"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each batch the numbers of its readable images, and their features, float32 on the CPU."""
    spec = resolve_features(spec, net)
    dtype = next(p.dtype for p in net.parameters())
    for batch in batches:
        with eval_mode(net), torch.no_grad(), autocast(precision, batch.images.device):
            found = extract(net, preprocess.normalize(batch.images).to(dtype), spec)
        kept = (batch.weights > 0).cpu()
        yield batch.indices[kept], found.float().cpu()[kept]


@dataclass(frozen=True)
class Features:
    """Features of some images with their classes."""

    values: Tensor
    """N D, float32, on the CPU."""
    targets: Tensor
    """N class numbers."""
    labels: tuple[str, ...]
    """Names of the classes."""
    name: str = "features"
    """What people call the images."""

    def __post_init__(self) -> None:
        finite = [part.isfinite().all(1) for part in self.values.split(ROWS_PER_CHECK)] or [
            torch.ones(0, dtype=torch.bool)
        ]
        bad = len(self.values) - int(torch.cat(finite).sum())
        if bad:
            raise DataError(
                f"{bad:,} of the {len(self.values):,} images of {self.name} have features that are NaN or infinite, "
                "which no classifier can use; look for broken weights."
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
    """The features of all labeled images of a source, and which of them could not be read, and why."""
    if source.multi_label:
        raise DataError(f"{source.name} has several labels to an image; features are probed with one each.")
    targets = torch.from_numpy(np.asarray(source.targets, dtype=np.int64))
    values, numbers = [], []
    with image_batches(source, preprocess, batch_size=batch_size, device=device, workers=workers) as batches:
        for indices, found in extract_batches(net, batches, preprocess=preprocess, spec=spec):
            known = targets[indices] >= 0
            values.append(found[known])
            numbers.append(indices[known])
            if advance is not None:
                advance(min(batch_size, len(source) - batch_size * (len(values) - 1)))
        bad = batches.bad
    index = torch.cat(numbers)
    if not len(index):
        raise DataError(f"none of the {len(source):,} images of {source.name} can be read and has a label.")
    return Features(torch.cat(values), targets[index], source.labels, source.name), bad


def weights_checksum(net: nn.Module) -> str:
    """Eight letters that differ for other weights."""
    sum_ = 0
    for tensor in net.state_dict().values():
        sum_ = zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data, sum_)
    return f"{sum_:08x}"
