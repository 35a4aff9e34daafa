"""Limits on a request, and the configuration of batching and threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import ConfigError
from vitrail.runtime.cores import usable_cores


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on one request and on connections. A request over a size limit gets 413 before decoding."""

    max_bytes: int = 16 * 2**20
    """Bytes in a request body."""
    max_pixels: int = 50_000_000
    """Pixels in one image, according to its header."""
    max_images: int = 16
    """Images in one request."""
    body_timeout: float = 30.0
    """Seconds for the body to arrive (then 408), and for a client to read some of its response."""
    header_timeout: float = 20.0
    """Seconds for the request headers to arrive, from opening the connection or from the first byte."""
    max_connections: int = 768
    """Open connections, below the usual limit of 1,024 open files. Beyond it the connection idle longest is closed.
    One client may have seven eighths of them; beyond that its own idlest connection is closed."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_images", "body_timeout", "header_timeout", "max_connections"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected more than 0.")

    @property
    def max_total_pixels(self) -> int:
        """Pixels in all images of a request; a pixel counts 2 with transparency and 4 with 16 bits or more."""
        return 4 * self.max_pixels


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """Queue limits, batch size and threads. Exceeding a limit gives 503, seven eighths of it by one client 429."""

    max_queue: int = 256
    """Maximum number of queued images."""
    max_queue_bytes: int = 512 * 2**20
    """Maximum bytes of all request bodies in memory, until their requests are answered."""
    max_uploads: int = 256
    """Maximum number of bodies being read at a time."""
    max_explanations: int = 8
    """Maximum number of explanations in progress, including queued ones."""
    batch_size: int | None = None
    """Maximum batch size; None: measured at startup."""
    batch_delay: float = 0.004
    """Seconds that an incomplete batch waits for images being decoded."""
    engine_threads: int = 1
    """Threads that run the engine, each on its own batch."""
    intra_op_threads: int | None = None
    """torch intra-op threads of each engine thread; None: torch's default."""
    decode_threads: int = field(default_factory=usable_cores)
    """Threads that decode small images, and as many processes that decode large ones."""

    def __post_init__(self) -> None:
        for name in (
            "max_queue",
            "max_queue_bytes",
            "max_uploads",
            "max_explanations",
            "engine_threads",
            "decode_threads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 1 or more.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: expected 1 or more.")
        if not 0 <= self.batch_delay <= 1:
            raise ConfigError(f"batch_delay={self.batch_delay:g}: expected 0 to 1 seconds.")


def divide_cores(cores: int, parallel_batches: bool, **options: Any) -> BatchingConfig:
    """Divide the cores between decoding and the engine.

    With `parallel_batches` each core runs its own batch: threads that share a batch would wait for each other
    whenever a decoder uses one of the cores.
    """
    return BatchingConfig(
        engine_threads=cores if parallel_batches else 1,
        intra_op_threads=1 if parallel_batches else cores,
        decode_threads=cores,
        **options,
    )
