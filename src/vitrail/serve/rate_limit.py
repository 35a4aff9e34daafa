"""Rate limits per client: token buckets in a table of fixed size, which the workers of a server share.

A bucket holds `burst` tokens and gains `rate` per second. It is stored as one number, the time at which it will be full
again: it has burst - rate * (full_at - now) tokens, and needs no entry once it is full. So an entry may be dropped as
soon as that time has passed, and in a set of the table without such an entry, the one that is full soonest is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import ConfigError

RATE = re.compile(r"(\d+(?:\.\d+)?)/([smh])(?::(\d+))?")
PERIODS = {"second": 1, "minute": 60, "hour": 3600}
UNIT_SECONDS = {name[0]: seconds for name, seconds in PERIODS.items()}
ENTRY = struct.Struct("16sd")
WAYS = 8
"""Entries in a set; a client is in the set that its hash selects."""
SETS = 16_384
"""Sets in the table, which so has 131,072 entries in 3 MiB."""
HEADER_BYTES = 64
"""Start of the table; its first 16 bytes are the key of the hash."""


@dataclass(frozen=True)
class RateLimit:
    """A rate with a burst, such as 50/s:100."""

    rate: float
    """Per second."""
    burst: int

    @staticmethod
    def parse(text: str, option: str = "--rate-limit") -> RateLimit:
        """From RATE/s, RATE/m or RATE/h, with :BURST; the default burst is what the rate gives in a second, or 1."""
        match = RATE.fullmatch(text)
        count, unit, burst = match.groups() if match else ("0", "s", None)
        rate = float(count) / UNIT_SECONDS[unit]
        limit = RateLimit(rate, int(burst) if burst is not None else max(math.ceil(rate), 1))
        if not 1e-6 <= limit.rate <= 1e6 or not 1 <= limit.burst <= 1_000_000:
            raise ConfigError(
                f"{option} {text}: expected images per second, minute or hour; try 50/s, 600/m or 50/s:100."
            )
        return limit

    def describe(self) -> str:
        """In words, such as `50 images per second, up to 100 at once`."""
        count, unit = next((self.rate * s, u) for u, s in PERIODS.items() if self.rate * s >= 1 or u == "hour")
        return f"{count:g} image{'s' * (count != 1)} per {unit}, up to {self.burst:,} at once"

    def tokens(self, full_in: float) -> float:
        """Tokens in a bucket that will be full in so many seconds; negative if it is overdrawn."""
        return self.burst - self.rate * full_in

    def seconds_until_one(self, full_in: float) -> float:
        """Seconds until the bucket has a whole token."""
        return max(full_in - (self.burst - 1) / self.rate, 0.0)


class BucketTable:
    """Token buckets by key, in a memory-mapped file if several processes share them. Used by one thread per process."""

    def __init__(self, path: Path | None = None, sets: int = SETS, clock: Callable[[], float] = time.monotonic) -> None:
        """path: file that all workers pass; None: the buckets belong to this process."""
        self._sets, self._clock = sets, clock
        size = HEADER_BYTES + sets * WAYS * ENTRY.size
        self._file: int | None = None
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if hasattr(os, "posix_fallocate"):  # on a full disk this fails now, and no write to the memory later
                os.posix_fallocate(self._file, 0, size)
            os.ftruncate(self._file, size)  # the same size in every worker: zeros, or what is there
            self._memory = mmap.mmap(self._file, size)
        with self._locked(0, HEADER_BYTES):
            if not any(self._memory[:16]):
                self._memory[:16] = secrets.token_bytes(16)
        self._hash_key = bytes(self._memory[:16])

    def take(self, key: str, limit: RateLimit) -> tuple[bool, float]:
        """Take one token if there is one; returns whether, and the seconds until the bucket is full."""
        return self._update(key, limit, 1, only_if_enough=True)

    def charge(self, key: str, limit: RateLimit, count: int) -> float:
        """Take tokens, even if there are fewer; returns the seconds until the bucket is full."""
        return self._update(key, limit, count, only_if_enough=False)[1]

    def _update(self, key: str, limit: RateLimit, count: int, only_if_enough: bool) -> tuple[bool, float]:
        digest = hashlib.blake2b(key.encode(), digest_size=16, key=self._hash_key).digest()
        first = HEADER_BYTES + int.from_bytes(digest[:4], "little") % self._sets * WAYS * ENTRY.size
        with self._locked(first, WAYS * ENTRY.size):
            now = self._clock()
            at, full_at = self._find(digest, first)
            full_in = max(full_at - now, 0.0)
            # The clock is read in floats: a token that is due in less than a microsecond is there.
            if only_if_enough and limit.seconds_until_one(full_in) > 1e-6:
                return False, full_in
            full_in += count / limit.rate
            ENTRY.pack_into(self._memory, at, digest, now + full_in)
        return True, full_in

    def _find(self, digest: bytes, first: int) -> tuple[int, float]:
        """Offset of an entry and when its bucket is full; if there is none, of the one to replace, and 0."""
        oldest, oldest_at = math.inf, first
        for at in range(first, first + WAYS * ENTRY.size, ENTRY.size):
            owner, full_at = ENTRY.unpack_from(self._memory, at)
            if owner == digest:
                return at, full_at
            if full_at < oldest:
                oldest, oldest_at = full_at, at
        return oldest_at, 0.0

    @contextlib.contextmanager
    def _locked(self, start: int, length: int) -> Iterator[None]:
        """Lock a part of the file against other processes. The kernel releases the lock of a process that dies."""
        if self._file is None:
            yield
            return
        import fcntl

        fcntl.lockf(self._file, fcntl.LOCK_EX, length, start)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, length, start)

    def close(self) -> None:
        self._memory.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def rate_headers(limit: RateLimit, full_in: float) -> list[tuple[bytes, bytes]]:
    """RateLimit-Policy and RateLimit, as in draft-ietf-httpapi-ratelimit-headers-10.

    q: the burst; w: seconds in which an empty bucket fills; r: images left; t: seconds until it is full.
    """
    window = math.ceil(limit.burst / limit.rate)
    left = max(math.floor(limit.tokens(full_in) + 1e-6), 0)
    policy, state = f'"images";q={limit.burst};w={window}', f'"images";r={left};t={math.ceil(full_in)}'
    return [(b"ratelimit-policy", policy.encode()), (b"ratelimit", state.encode())]
