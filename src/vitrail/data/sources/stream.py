"""Tar shards read from front to back, without an index: for those too many or too far away to index.

It promises less than the other sources. The order depends on the number of ranks and workers, so a
run continues exactly only with as many as it had; nobody knows how many images there are; and
what cannot be reached by number cannot be held out. In return nothing is read before it is used.

    Stream         which shards, what their labels mean
    Reader         one worker's share of them, without end: samples, and a state to go on from

Of each epoch's shards, in an order of its own, every part (one worker of one rank) reads every n-th.
With fewer shards than parts, every part reads all shards and takes every n-th sample. A buffer is
filled, given out in shuffled order, and filled again while it empties, so that the state is a place
and a count: {"epoch": 2, "shard": 5, "member": 812, "drawn": 77, ...}.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from vitrail.chance import key_of, shuffled, stream
from vitrail.config import DataConfig
from vitrail.data.sources import remote, tar
from vitrail.data.sources.base import IMAGE_EXTENSIONS, Sample
from vitrail.data.sources.label_encoding import LABEL_SEPARATOR
from vitrail.data.sources.shard_index import LABEL_EXTENSIONS, LabelValue, parse_label_file
from vitrail.data.sources.shards import find_label, short_names
from vitrail.errors import DataError, TrainError, nearest

SHUFFLE = stream("stream of shards")
BUFFER_SIZE = 1000
"""Samples that are shuffled together, in each worker."""
NUM_SAMPLES_CHECKED = 16
"""Samples that are looked at to see whether images have several labels."""
LIMITATIONS = (
    "a stream promises less than shards with an index: it continues exactly only with as many ranks and workers, "
    "and the order depends on them"
)


class ShardStream:
    """Labeled images of tar shards, in the order they lie there."""

    def __init__(self, name: str, shards: Sequence[str], labels: Sequence[str], config: DataConfig) -> None:
        self.name = name
        self.shards = tuple(shards)
        self.labels = tuple(labels)
        self.image, self.label = config.image_column, config.label_column
        self._class_index = {label: i for i, label in enumerate(self.labels)}
        self.multi_label = False
        self.multi_label = any(
            _is_multi_label(value) for _, value, _ in _take(self.read(self.shards[0]), NUM_SAMPLES_CHECKED)
        )

    def samples(
        self,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        world: int = 1,
        *,
        worker: int = 0,
        workers: int = 1,
        seed: int = 0,
        buffer: int = BUFFER_SIZE,
    ) -> StreamReader:
        """One worker's share of the samples, without end; from the beginning, or from where a state was taken."""
        return StreamReader(self, rank * workers + worker, world * workers, seed, buffer, state)

    def read(self, shard: str) -> Iterator[tuple[str, LabelValue, bytes]]:
        """Key, label and image of each sample of one shard, in order."""
        held: dict[int, Any] = {}

        def taken(found: Iterable[tar.Member], read: tar.ReadAt) -> Iterator[tar.Member]:
            for member in found:  # what is passed cannot be gone back to
                kind = member.name.rpartition("/")[2].partition(".")[2].lower()
                if kind in LABEL_EXTENSIONS or tar.find_image([kind], IMAGE_EXTENSIONS, self.image):
                    data = read(member.offset, member.size)
                    if len(data) < member.size:
                        raise DataError(f"{shard} is cut off in {member.name}; copy or download it again.")
                    held[member.offset] = parse_label_file(kind, data) if kind in LABEL_EXTENSIONS else data
                yield member

        with ForwardReader(lambda: _open(shard), shard) as read:
            for key, files in tar.group_samples(taken(tar.iter_members(read, shard), read)):
                mine = {kind: held.pop(m.offset) for kind, m in files.items() if m.offset in held}
                kind = tar.find_image(mine, IMAGE_EXTENSIONS, self.image)
                if kind is not None:
                    yield key, find_label(key, mine, self.label), mine[kind]

    def target(self, value: LabelValue, key: str) -> int | tuple[int, ...]:
        """The number of a label's class, or of all its classes."""
        if not self.multi_label:
            return self._encode(value, key)
        values = value if isinstance(value, list) else str(value or "").split(LABEL_SEPARATOR)
        return tuple(sorted({n for v in values if (n := self._encode(v, key)) >= 0}))

    def _encode(self, value: Any, key: str) -> int:
        word = str(value).strip() if value is not None else ""
        if word in self._class_index:
            return self._class_index[word]
        try:
            number = int(word or -1)
        except ValueError:
            near = nearest(word, self.labels)
            raise DataError(f"{key} has the label {word!r}, which is none of the classes{near}") from None
        if number >= len(self.labels):
            raise DataError(f"{key} has the label {number}, and there are {len(self.labels)} classes, counted from 0.")
        return max(number, -1)


class StreamPosition(NamedTuple):
    """Where a sample lies: the epoch, the how-manyeth of the epoch's shards of this part, the how-manyeth in it."""

    epoch: int
    shard: int
    member: int


class StreamReader:
    """An iterator over one part's samples; `state` says, as JSON can, where the next one comes from."""

    def __init__(
        self, stream: ShardStream, part: int, parts: int, seed: int, buffer: int, state: dict[str, Any] | None
    ) -> None:
        self.stream, self.part, self.parts, self.seed, self.buffer = stream, part, parts, seed, max(buffer, 1)
        self.shard_names = dict(zip(stream.shards, short_names(stream.shards), strict=True))
        start, drawn = StreamPosition(0, 0, 0), 0
        if state is not None:
            start, drawn = self._parse_state(state)
        self.start, self.drawn = start, 0
        self._raw = self._read_from(start)
        self._next: tuple[StreamPosition, Sample] | None = None
        self._block: list[Sample] = []
        self._order: list[int] = []
        self._read_ahead: list[tuple[StreamPosition, Sample]] = []
        if drawn:
            self._next_block()
            self.drawn = drawn

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> Sample:
        if self.drawn >= len(self._block):
            self._next_block()
        sample = self._block[self._order[self.drawn]]
        self.drawn += 1
        self._fill(len(self._read_ahead) + 1)  # one in for one out
        return sample

    @property
    def state(self) -> dict[str, Any]:
        start, drawn = self.start, self.drawn
        if drawn and drawn == len(self._block):  # the block is used up: the next one begins after it
            self._fill(1)
            start, drawn = self._read_ahead[0][0], 0
        return {**self._identity(), **start._asdict(), "drawn": drawn}

    def _identity(self) -> dict[str, Any]:
        names = hashlib.sha256("\n".join(self.stream.shards).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return {"shards": names, "seed": self.seed, "buffer": self.buffer, "part": self.part, "parts": self.parts}

    def _parse_state(self, state: dict[str, Any]) -> tuple[StreamPosition, int]:
        told = {
            "shards": "other shards",
            "seed": "another seed",
            "buffer": "another buffer",
            "part": "another rank or worker",
            "parts": "another number of ranks and workers",
        }
        for field, mine in self._identity().items():
            if state.get(field) != mine:
                raise TrainError(
                    f"{self.stream.name}: the stream's state is of {told[field]} ({state.get(field)}, now {mine}), and "
                    "a stream continues only as it began; shards: with an index continue anywhere."
                )
        return StreamPosition(state["epoch"], state["shard"], state["member"]), state["drawn"]

    def _next_block(self) -> None:
        """What has been read ahead becomes the block that is given out."""
        self._fill(self.buffer)
        self.start = self._read_ahead[0][0]
        self._block = [sample for _, sample in self._read_ahead]
        key = key_of(self.seed, SHUFFLE, self.part, self.parts, *self.start)
        self._order = shuffled(np.arange(len(self._block)), len(self._block), key).tolist()
        self._read_ahead, self.drawn = [], 0

    def _fill(self, wanted: int) -> None:
        """Read ahead, within one epoch, until there are so many."""
        while len(self._read_ahead) < min(wanted, self.buffer):
            if self._next is None:
                self._next = next(self._raw)
            if self._read_ahead and self._next[0].epoch != self._read_ahead[0][0].epoch:
                return
            self._read_ahead.append(self._next)
            self._next = None

    def _read_from(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, Sample]]:
        """This part's samples in the order they are read, without end."""
        epoch, first, skip = start
        found = False
        while True:
            for number, shard in enumerate(self._shards(epoch)[first:], start=first):
                for member, (key, value, image) in enumerate(self.stream.read(shard)):
                    if member < skip or not self._is_mine(number, member):
                        continue
                    key = f"{self.shard_names[shard]}/{key}"
                    found = True
                    yield StreamPosition(epoch, number, member), Sample(key, image, self.stream.target(value, key))
                skip = 0
            if not found:
                raise DataError(f"{self.stream.name} holds no images for part {self.part} of {self.parts}.")
            epoch, first, found = epoch + 1, 0, False

    def _shards(self, epoch: int) -> list[str]:
        count = len(self.stream.shards)
        order = shuffled(np.arange(count), count, key_of(self.seed, SHUFFLE, epoch)).tolist()
        mine = order[self.part :: self.parts] if self._splits_shards else order
        return [self.stream.shards[i] for i in mine]

    @property
    def _splits_shards(self) -> bool:
        return len(self.stream.shards) >= self.parts

    def _is_mine(self, shard: int, member: int) -> bool:
        return self._splits_shards or (shard + member) % self.parts == self.part


class ForwardReader:
    """Bytes of something that can only be read on; where it breaks off, it is opened again and caught up with."""

    CHUNK_BYTES = 1 << 20

    def __init__(self, opened: Callable[[], IO[bytes]], where: str) -> None:
        self._make, self._where = opened, where
        self._file: IO[bytes] | None = None
        self._at = 0

    def __enter__(self) -> ForwardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __call__(self, at: int, length: int) -> bytes:
        for left in reversed(range(remote.MAX_ATTEMPTS)):
            try:
                return self._read(at, length)
            except (DataError, EOFError, gzip.BadGzipFile) as error:
                raise error if isinstance(error, DataError) else self._damaged(error) from error
            except Exception as error:  # a connection that broke: each file system has errors of its own
                self._close()
                if not left:
                    raise self._damaged(error) from error
                time.sleep(remote.RETRY_DELAY_S * 2 ** (remote.MAX_ATTEMPTS - 1 - left))
        raise AssertionError("unreachable")

    def _read(self, at: int, length: int) -> bytes:
        if self._file is None:
            self._file, self._at = self._make(), 0
        if at < self._at:
            raise AssertionError(f"{self._where} was asked to go back from {self._at} to {at}")
        while self._at < at:
            if not (skipped := self._file.read(min(at - self._at, self.CHUNK_BYTES))):
                raise DataError(f"{self._where} is cut off at byte {self._at:,}; copy or download it again.")
            self._at += len(skipped)
        pieces = []
        while length:
            if not (piece := self._file.read(length)):
                break
            pieces.append(piece)
            self._at += len(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _damaged(self, error: Exception) -> DataError:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        return DataError(f"{self._where} could not be read on from byte {self._at:,} ({reason}).")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def _open(shard: str) -> IO[bytes]:
    file = remote.open_stream(shard) if remote.is_remote(shard) else open(shard, "rb")  # noqa: SIM115 - Forward closes it
    if not shard.lower().endswith("gz"):
        return file
    unpacked = gzip.GzipFile(fileobj=file)
    unpacked.myfileobj = file  # type: ignore[assignment]  # what it closes when it is closed
    return unpacked  # type: ignore[return-value]


def _is_multi_label(value: LabelValue) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and LABEL_SEPARATOR in value)


def _take(found: Iterator[Any], count: int) -> Iterator[Any]:
    for _, each in zip(range(count), found, strict=False):
        yield each
