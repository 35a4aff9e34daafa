"""Which image is learned from when: a pure function of the seed and the position.

Training reads one endless sequence of images; a step's batch is the next `batch` positions of it,
whatever ends there, so that batches are always full. Nothing is remembered: any process can ask for
any positions, in any order, and a resumed run asks for those it has not had.

    shuffled    every image once an epoch, in a new random order each time
    balanced    every class once a round, in a new random order each time; each class goes through
                its own images in random order, again and again
    blocks      shuffled, for images that lie in runs (tar shards): the runs are shuffled, then the
                images inside windows of a few of them, so that few are read at any time
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vitrail import chance
from vitrail.errors import ConfigError, DataError

# n positions asked for, N images, K classes

Indices = npt.NDArray[np.int64]

EPOCH, CLASSES, MEMBERS, BLOCKS, WINDOW, WALK = (
    chance.stream(f"order {name}") for name in ("epoch", "classes", "members", "blocks", "window", "walk")
)
WINDOW_IMAGES = 2**14
"""A window is as many blocks as hold so many images, and at least `WINDOW_BLOCKS`."""
WINDOW_BLOCKS = 4
FEISTEL_ROUNDS = 6


class Sampler:
    """The endless training sequence: `Sampler(50_000, seed=0).indices(first=step * 256, count=256)`.

    Made for a number of images, or for the class of each (balanced needs it; -1 is left out).
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
            raise DataError("there are no images to learn from.")
        if mode == "balanced":
            self._members, self._starts, self._counts = _group_by_class(images)
        self.blocks = None if mode == "balanced" or blocks is None else tuple(n for n in blocks if n)
        if self.blocks is not None and sum(self.blocks) != self.size:
            raise DataError(f"the blocks hold {sum(self.blocks)} images, wanted {self.size}.")

    def indices(self, first: int, count: int) -> Indices:
        """Numbers of the images at positions first, first + 1, ..., first + count - 1."""
        places = np.arange(first, first + count, dtype=np.int64) // self.repeats
        if self.mode == "balanced":
            return self._balanced(places)
        out, length, done = np.empty(count, np.int64), self.size * self.repeats, 0
        while done < count:
            epoch = (first + done) // length
            part = slice(done, min((epoch + 1) * length - first, count))
            out[part] = self._epoch(epoch, places[part] - epoch * self.size)
            done = part.stop
        return out

    def _epoch(self, epoch: int, places: Indices) -> Indices:
        if self.blocks is None or len(self.blocks) == 1:
            return chance.shuffled(places, self.size, chance.key_of(self.seed, EPOCH, epoch))
        layout = _block_layout(self.blocks, chance.key_of(self.seed, BLOCKS, epoch))
        window = np.searchsorted(layout.window_starts, places, side="right") - 1
        start, size = layout.window_starts[window], np.diff(layout.window_starts)[window]
        keys = chance.keys_of(chance.key_of(self.seed, WINDOW), epoch, window)
        places = start + permute_each(places - start, size, keys)
        block = np.searchsorted(layout.epoch_starts, places, side="right") - 1
        return layout.data_starts[block] + places - layout.epoch_starts[block]

    def _balanced(self, places: Indices) -> Indices:
        classes = len(self._counts)
        turn, seat = places // classes, places % classes
        keys = chance.keys_of(self.seed, CLASSES, turn)
        kind = permute_each(seat, np.full_like(seat, classes), keys)
        count = self._counts[kind]
        keys = chance.keys_of(self.seed, MEMBERS, (kind << 40) + turn // count)
        return self._members[self._starts[kind] + permute_each(turn % count, count, keys)]


class BlockLayout(NamedTuple):
    """The blocks in one epoch's order."""

    data_starts: Indices
    """Where each block begins in the data."""
    epoch_starts: Indices
    """Where each block begins in the epoch."""
    window_starts: Indices
    """Where each window begins in the epoch, and where the last one ends."""


@lru_cache(maxsize=4)
def _block_layout(blocks: tuple[int, ...], key: int) -> BlockLayout:
    order = chance.shuffled(np.arange(len(blocks)), len(blocks), key)
    sizes = np.array(blocks, np.int64)
    starts, ends = np.cumsum(sizes) - sizes, np.cumsum(sizes[order])
    together = max(WINDOW_BLOCKS, round(WINDOW_IMAGES / sizes.mean()))
    windows = max(len(blocks) // together, 1)
    last = np.arange(1, windows + 1) * len(blocks) // windows - 1  # each window's last block: all nearly alike
    return BlockLayout(starts[order], ends - sizes[order], np.append(0, ends[last]))


def _group_by_class(targets: int | npt.NDArray[np.int64]) -> tuple[Indices, Indices, Indices]:
    """Images sorted by class, and where each class that has any begins and how many it has."""
    if isinstance(targets, int) or targets.ndim != 1:
        raise ConfigError("order=balanced needs one label for each image; try order=shuffled.")
    members = np.argsort(targets, kind="stable")
    members = members[targets[members] >= 0]
    if len(members) == 0:
        raise DataError("order=balanced needs labels, and no image has one.")
    _, starts, counts = np.unique(targets[members], return_index=True, return_counts=True)
    return members.astype(np.int64), starts.astype(np.int64), counts.astype(np.int64)


def permute_each(places: Indices, sizes: Indices, keys: chance.Keys) -> Indices:
    """`chance.shuffled` where each place has a permutation of its own size and key: n, n, n -> n."""
    found = np.empty_like(places)
    few = sizes <= chance.FEW
    for size in np.unique(sizes[few]).tolist():  # made whole, as there: a Feistel network favors some of few
        here = np.flatnonzero(sizes == size)
        order = np.argsort(chance.bits_np(keys[here], WALK, size), axis=1, kind="stable")
        found[here] = order[np.arange(len(here)), places[here]]
    found[~few] = _cycle_walk(places[~few], sizes[~few], keys[~few])
    return found


def _cycle_walk(places: Indices, sizes: Indices, keys: chance.Keys) -> Indices:
    """The same by a Feistel network on the next power of four."""
    half = np.maximum((np.frexp(sizes - 1)[1] + 1) // 2, 1).astype(np.uint64)
    rounds = chance.bits_np(keys, WALK, FEISTEL_ROUNDS)  # n FEISTEL_ROUNDS
    at, size = places.astype(np.uint64), sizes.astype(np.uint64)
    todo = np.arange(len(at))
    while len(todo):
        at[todo] = _feistel(at[todo], half[todo], rounds[todo])
        todo = todo[at[todo] >= size[todo]]  # outside: sent on until it lands inside
    return at.astype(np.int64)


def _feistel(at: chance.Keys, half: chance.Keys, rounds: chance.Keys) -> chance.Keys:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = at >> half, at & low
    for key in rounds.T:
        left, right = right, left ^ (chance.bits_np(right ^ key, WALK, 1)[:, 0] & low)
    return (left << half) | right
