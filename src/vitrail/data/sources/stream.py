"""Tar shards read sequentially, without an index; for shards too many or too remote to index.

A stream guarantees less than other sources. The order depends on the number of ranks and workers,
so a run resumes exactly only with the same numbers. The number of images is unknown. No images can
be held out, because there is no random access. In return, nothing is read before it is used.

    ShardStream    the shards, and how their labels are encoded
    StreamReader   an endless iterator over one worker's samples, with a state to resume from

In each epoch the shards are permute_indices, and each of the n workers of all ranks reads every n-th one.
With fewer shards than workers, each worker reads all shards and takes every n-th sample. Samples are
permute_indices within a buffer, which is refilled from the next samples while it is emptied. The state is
therefore a position and a count: {"epoch": 2, "shard": 5, "member": 812, "drawn": 77, ...}.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from vitrail.config import DataConfig
from vitrail.data.sources import remote, tar
from vitrail.data.sources.base import IMAGE_EXTENSIONS, Sample
from vitrail.data.sources.label_encoding import LABEL_SEPARATOR
from vitrail.data.sources.shard_index import LABEL_EXTENSIONS, LabelValue, parse_label_file
from vitrail.data.sources.shards import find_label, short_names
from vitrail.errors import DataError, TrainError, did_you_mean
from vitrail.rng import derive_seed, permute_indices, stream_id

SHUFFLE = stream_id("stream of shards")
BUFFER_SIZE = 1000
"""Samples in each worker's shuffle buffer."""
NUM_SAMPLES_CHECKED = 16
"""Samples read to detect multi-label data."""
LIMITATIONS = (
    "a stream has no index: the order of samples depends on the number of ranks and workers, "
    "and a run resumes exactly only with the same numbers"
)


class ShardStream:
    """An iterable dataset of labeled images in tar shards."""

    def __init__(self, name: str, shards: Sequence[str], labels: Sequence[str], config: DataConfig) -> None:
        self.name = name
        self.shards = tuple(shards)
        self.labels = tuple(labels)
        self.image_extension, self.label_field = config.image_column, config.label_column
        self._class_index = {label: i for i, label in enumerate(self.labels)}
        self.multi_label = False
        self.multi_label = any(
            _is_multi_label(value) for _, value, _ in _take(self.read(self.shards[0]), NUM_SAMPLES_CHECKED)
        )

    def samples(
        self,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        worker: int = 0,
        num_workers: int = 1,
        seed: int = 0,
        buffer: int = BUFFER_SIZE,
    ) -> StreamReader:
        """An endless iterator over the samples of one worker of one rank, from the start or from a saved state."""
        return StreamReader(self, rank * num_workers + worker, world_size * num_workers, seed, buffer, state)

    def read(self, shard: str) -> Iterator[tuple[str, LabelValue, bytes]]:
        """Key, label and encoded image of each sample of one shard, in order."""
        contents: dict[int, Any] = {}  # by offset

        def with_contents_read(members: Iterable[tar.Member], read: tar.ReadAt) -> Iterator[tar.Member]:
            for member in members:  # read in passing: there is no seeking back
                extension = member.name.rpartition("/")[2].partition(".")[2].lower()
                is_label = extension in LABEL_EXTENSIONS
                if is_label or tar.find_image([extension], IMAGE_EXTENSIONS, self.image_extension):
                    data = read(member.offset, member.size)
                    if len(data) < member.size:
                        raise DataError(f"{shard} is truncated in {member.name}; copy or download it again.")
                    contents[member.offset] = parse_label_file(extension, data) if is_label else data
                yield member

        with ForwardReader(lambda: _open(shard), shard) as read:
            for key, files in tar.group_samples(with_contents_read(tar.iter_members(read, shard), read)):
                by_extension = {e: contents.pop(m.offset) for e, m in files.items() if m.offset in contents}
                extension = tar.find_image(by_extension, IMAGE_EXTENSIONS, self.image_extension)
                if extension is not None:
                    yield key, find_label(key, by_extension, self.label_field), by_extension[extension]

    def target(self, value: LabelValue, key: str) -> int | tuple[int, ...]:
        """The class index of a label; for multi-label data, the indices of all its classes."""
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
            near = did_you_mean(word, self.labels)
            raise DataError(f"{key} has the label {word!r}, which is not a class{near}") from None
        if number >= len(self.labels):
            raise DataError(f"{key} has the label {number}, but there are {len(self.labels)} classes, counted from 0.")
        return max(number, -1)


class StreamPosition(NamedTuple):
    """The epoch, the index among the epoch's shards of this worker, and the index of the sample in the shard."""

    epoch: int
    shard: int
    member: int


class StreamReader:
    """An endless iterator over the samples of one worker; `state` is JSON-serializable.

    worker, num_workers: counted over all ranks.
    """

    def __init__(
        self,
        stream: ShardStream,
        worker: int,
        num_workers: int,
        seed: int,
        buffer: int,
        state: dict[str, Any] | None,
    ) -> None:
        self.stream, self.worker, self.num_workers = stream, worker, num_workers
        self.seed, self.buffer = seed, max(buffer, 1)
        self.shard_names = dict(zip(stream.shards, short_names(stream.shards), strict=True))
        start, num_returned = StreamPosition(0, 0, 0), 0
        if state is not None:
            start, num_returned = self._parse_state(state)
        self.start, self.num_returned = start, 0
        self._raw = self._read_from(start)
        self._next: tuple[StreamPosition, Sample] | None = None
        self._block: list[Sample] = []
        self._order: list[int] = []
        self._read_ahead: list[tuple[StreamPosition, Sample]] = []
        if num_returned:
            self._next_block()
            self.num_returned = num_returned

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> Sample:
        if self.num_returned >= len(self._block):
            self._next_block()
        sample = self._block[self._order[self.num_returned]]
        self.num_returned += 1
        self._fill(len(self._read_ahead) + 1)  # read one sample for each one returned
        return sample

    @property
    def state(self) -> dict[str, Any]:
        start, num_returned = self.start, self.num_returned
        if num_returned and num_returned == len(
            self._block
        ):  # at the end of a block: the state is the start of the next
            self._fill(1)
            start, num_returned = self._read_ahead[0][0], 0
        return {**self._identity(), **start._asdict(), "drawn": num_returned}

    def _identity(self) -> dict[str, Any]:
        names = hashlib.sha256("\n".join(self.stream.shards).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return {
            "shards": names,
            "seed": self.seed,
            "buffer": self.buffer,
            "part": self.worker,  # stored in checkpoints under these keys
            "parts": self.num_workers,
        }

    def _parse_state(self, state: dict[str, Any]) -> tuple[StreamPosition, int]:
        descriptions = {
            "shards": "other shards",
            "seed": "another seed",
            "buffer": "another buffer size",
            "part": "another rank or worker",
            "parts": "another number of ranks and workers",
        }
        for field, current in self._identity().items():
            if state.get(field) != current:
                raise TrainError(
                    f"{self.stream.name}: the saved state of the stream is for {descriptions[field]} "
                    f"({state.get(field)}, now {current}), and a stream resumes only with the same settings; "
                    "use shards: instead of stream: to resume with others."
                )
        return StreamPosition(state["epoch"], state["shard"], state["member"]), state["drawn"]

    def _next_block(self) -> None:
        """Make the samples read ahead the current block, and shuffle it."""
        self._fill(self.buffer)
        self.start = self._read_ahead[0][0]
        self._block = [sample for _, sample in self._read_ahead]
        key = derive_seed(self.seed, SHUFFLE, self.worker, self.num_workers, *self.start)
        self._order = permute_indices(np.arange(len(self._block)), len(self._block), key).tolist()
        self._read_ahead, self.num_returned = [], 0

    def _fill(self, count: int) -> None:
        """Read ahead, within one epoch, until `count` samples are buffered."""
        while len(self._read_ahead) < min(count, self.buffer):
            if self._next is None:
                self._next = next(self._raw)
            if self._read_ahead and self._next[0].epoch != self._read_ahead[0][0].epoch:
                return
            self._read_ahead.append(self._next)
            self._next = None

    def _read_from(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, Sample]]:
        """The samples of this worker, in the order they are read, without end."""
        epoch, first, skip = start
        found_image = False
        while True:
            for shard_index, shard in enumerate(self._shards(epoch)[first:], start=first):
                for member, (key, value, image) in enumerate(self.stream.read(shard)):
                    if member < skip or not self._is_mine(shard_index, member):
                        continue
                    key = f"{self.shard_names[shard]}/{key}"
                    found_image = True
                    target = self.stream.target(value, key)
                    yield StreamPosition(epoch, shard_index, member), Sample(key, image, target)
                skip = 0
            if not found_image:
                raise DataError(f"{self.stream.name} has no images for worker {self.worker} of {self.num_workers}.")
            epoch, first, found_image = epoch + 1, 0, False

    def _shards(self, epoch: int) -> list[str]:
        count = len(self.stream.shards)
        order = permute_indices(np.arange(count), count, derive_seed(self.seed, SHUFFLE, epoch)).tolist()
        own = order[self.worker :: self.num_workers] if self._splits_shards else order
        return [self.stream.shards[i] for i in own]

    @property
    def _splits_shards(self) -> bool:
        """Whether workers read different shards, rather than different samples of all shards."""
        return len(self.stream.shards) >= self.num_workers

    def _is_mine(self, shard: int, member: int) -> bool:
        return self._splits_shards or (shard + member) % self.num_workers == self.worker


class ForwardReader:
    """Reads a file that is not seekable; if the connection breaks, it reopens the file and skips to the position."""

    CHUNK_BYTES = 1 << 20

    def __init__(self, open_file: Callable[[], IO[bytes]], where: str) -> None:
        self._open_file, self._where = open_file, where
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
            except Exception as error:  # a broken connection; each file system has its own error classes
                self._close()
                if not left:
                    raise self._damaged(error) from error
                time.sleep(remote.RETRY_DELAY_S * 2 ** (remote.MAX_ATTEMPTS - 1 - left))
        raise AssertionError("unreachable")

    def _read(self, at: int, length: int) -> bytes:
        if self._file is None:
            self._file, self._at = self._open_file(), 0
        if at < self._at:
            raise AssertionError(f"{self._where}: cannot seek back from {self._at} to {at}")
        while self._at < at:
            if not (skipped := self._file.read(min(at - self._at, self.CHUNK_BYTES))):
                raise DataError(f"{self._where} is truncated at byte {self._at:,}; copy or download it again.")
            self._at += len(skipped)
        chunks = []
        while length:
            if not (chunk := self._file.read(length)):
                break
            chunks.append(chunk)
            self._at += len(chunk)
            length -= len(chunk)
        return b"".join(chunks)

    def _damaged(self, error: Exception) -> DataError:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        return DataError(f"cannot read {self._where} from byte {self._at:,} on ({reason}).")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def _open(shard: str) -> IO[bytes]:
    file = remote.open_stream(shard) if remote.is_remote(shard) else open(shard, "rb")  # noqa: SIM115 - Forward closes it
    if not shard.lower().endswith("gz"):
        return file
    unpacked = gzip.GzipFile(fileobj=file)
    unpacked.myfileobj = file  # type: ignore[assignment]  # closed together with the GzipFile
    return unpacked  # type: ignore[return-value]


def _is_multi_label(value: LabelValue) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and LABEL_SEPARATOR in value)


def _take(items: Iterator[Any], count: int) -> Iterator[Any]:
    for _, item in zip(range(count), items, strict=False):
        yield item
