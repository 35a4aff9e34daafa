"""The order of training images: a pure function of the seed and the position.

Training reads one endless sequence of image indices; a step's batch is the next `batch_size` positions, also
across the end of an epoch, so that batches are always full. The sampler has no state: any process can compute
any positions in any order, and a resumed run starts at the position it had reached.

    shuffled    every image once per epoch, in a new random order each epoch
    balanced    every class once per round, in a new random order each round; each class cycles through
                its own images, reshuffled each time
    blocks      shuffled, for images stored in blocks (tar shards): the blocks are shuffled, then the
                images inside windows of a few blocks, so that few blocks are read at any time
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vitrail import rng
from vitrail.errors import ConfigError, DataError

# n positions, N images, K classes

Indices = npt.NDArray[np.int64]

EPOCH, CLASSES, MEMBERS, BLOCKS, WINDOW, WALK = (
    rng.stream_id(f"order {name}") for name in ("epoch", "classes", "members", "blocks", "window", "walk")
)
WINDOW_IMAGES = 2**14
"""A window is as many blocks as hold about this many images, and at least `WINDOW_BLOCKS`."""
WINDOW_BLOCKS = 4
FEISTEL_ROUNDS = 6


class Sampler:
    """The endless training sequence: `Sampler(50_000, seed=0).indices(first=step * 256, count=256)`.

    `images` is the number of images, or the class of each (needed for balanced; images of class -1 are excluded).
    """

    def __init__(
        self,
        images: int | npt.NDArray[np.int64],
        *,
        seed: int,
        mode: Literal["shuffled", "balanced"] = "shuffled",
        repeats: int = 1,
        blocks: tuple[int, ...] | None = None,
    ) -> None:
        self.seed, self.mode, self.repeats = seed, mode, repeats
        self.size = images if isinstance(images, int) else len(images)
        if self.size < 1:
            raise DataError("there are no training images.")
        if mode == "balanced":
            self._members, self._starts, self._counts = _group_by_class(images)
        self.blocks = None if mode == "balanced" or blocks is None else tuple(n for n in blocks if n)
        if self.blocks is not None and sum(self.blocks) != self.size:
            raise DataError(f"the blocks hold {sum(self.blocks)} images, expected {self.size}.")

    def indices(self, first: int, count: int) -> Indices:
        """Indices of the images at positions first, first + 1, ..., first + count - 1."""
        positions = np.arange(first, first + count, dtype=np.int64) // self.repeats
        if self.mode == "balanced":
            return self._balanced(positions)
        out, length, done = np.empty(count, np.int64), self.size * self.repeats, 0
        while done < count:
            epoch = (first + done) // length
            part = slice(done, min((epoch + 1) * length - first, count))
            out[part] = self._shuffled(epoch, positions[part] - epoch * self.size)
            done = part.stop
        return out

    def _shuffled(self, epoch: int, positions: Indices) -> Indices:
        if self.blocks is None or len(self.blocks) == 1:
            return rng.permute_indices(positions, self.size, rng.derive_seed(self.seed, EPOCH, epoch))
        layout = _block_layout(self.blocks, rng.derive_seed(self.seed, BLOCKS, epoch))
        window = np.searchsorted(layout.window_starts, positions, side="right") - 1
        start, size = layout.window_starts[window], np.diff(layout.window_starts)[window]
        seeds = rng.sample_seeds(rng.derive_seed(self.seed, WINDOW), epoch, window)
        positions = start + permute_each(positions - start, size, seeds)
        block = np.searchsorted(layout.epoch_starts, positions, side="right") - 1
        return layout.data_starts[block] + positions - layout.epoch_starts[block]

    def _balanced(self, positions: Indices) -> Indices:
        num_classes = len(self._counts)
        round_index, rank_in_round = positions // num_classes, positions % num_classes
        seeds = rng.sample_seeds(self.seed, CLASSES, round_index)
        class_index = permute_each(rank_in_round, np.full_like(rank_in_round, num_classes), seeds)
        count = self._counts[class_index]
        seeds = rng.sample_seeds(self.seed, MEMBERS, (class_index << 40) + round_index // count)
        return self._members[self._starts[class_index] + permute_each(round_index % count, count, seeds)]


class BlockLayout(NamedTuple):
    """The blocks in the order of one epoch."""

    data_starts: Indices
    """Index of each block's first image in the data."""
    epoch_starts: Indices
    """Position of each block's first image in the epoch."""
    window_starts: Indices
    """Position of each window's first image in the epoch, and the end of the last window."""


@lru_cache(maxsize=4)
def _block_layout(blocks: tuple[int, ...], seed: int) -> BlockLayout:
    order = rng.permute_indices(np.arange(len(blocks)), len(blocks), seed)
    sizes = np.array(blocks, np.int64)
    starts, ends = np.cumsum(sizes) - sizes, np.cumsum(sizes[order])
    blocks_per_window = max(WINDOW_BLOCKS, round(WINDOW_IMAGES / sizes.mean()))
    windows = max(len(blocks) // blocks_per_window, 1)
    last = np.arange(1, windows + 1) * len(blocks) // windows - 1  # last block of each window
    return BlockLayout(starts[order], ends - sizes[order], np.append(0, ends[last]))


def _group_by_class(targets: int | npt.NDArray[np.int64]) -> tuple[Indices, Indices, Indices]:
    """Image indices sorted by class, and for each class that has images its start in them and its size."""
    if isinstance(targets, int) or targets.ndim != 1:
        raise ConfigError("order=balanced needs one label for each image; try order=shuffled.")
    members = np.argsort(targets, kind="stable")
    members = members[targets[members] >= 0]
    if len(members) == 0:
        raise DataError("order=balanced needs labels, and no image has one.")
    _, starts, counts = np.unique(targets[members], return_index=True, return_counts=True)
    return members.astype(np.int64), starts.astype(np.int64), counts.astype(np.int64)


def permute_each(positions: Indices, sizes: Indices, seeds: rng.Seeds) -> Indices:
    """Map each position through a random permutation with a size and a seed of its own: n, n, n -> n."""
    permuted = np.empty_like(positions)
    small = sizes <= rng.MAX_SORTED_SIZE
    for size in np.unique(sizes[small]).tolist():  # sorted, since a Feistel network is biased here
        here = np.flatnonzero(sizes == size)
        order = np.argsort(rng.bits_np(seeds[here], WALK, size), axis=1, kind="stable")
        permuted[here] = order[np.arange(len(here)), positions[here]]
    permuted[~small] = _cycle_walk(positions[~small], sizes[~small], seeds[~small])
    return permuted


def _cycle_walk(positions: Indices, sizes: Indices, seeds: rng.Seeds) -> Indices:
    """`permute_each` by a Feistel network on the next power of four, repeated until inside the range."""
    half = np.maximum((np.frexp(sizes - 1)[1] + 1) // 2, 1).astype(np.uint64)
    rounds = rng.bits_np(seeds, WALK, FEISTEL_ROUNDS)  # n FEISTEL_ROUNDS
    at, size = positions.astype(np.uint64), sizes.astype(np.uint64)
    todo = np.arange(len(at))
    while len(todo):
        at[todo] = _feistel(at[todo], half[todo], rounds[todo])
        todo = todo[at[todo] >= size[todo]]  # outside: apply again
    return at.astype(np.int64)


def _feistel(at: rng.Seeds, half: rng.Seeds, rounds: rng.Seeds) -> rng.Seeds:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = at >> half, at & low
    for round_seed in rounds.T:
        left, right = right, left ^ (rng.bits_np(right ^ round_seed, WALK, 1)[:, 0] & low)
    return (left << half) | right
