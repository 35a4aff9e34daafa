"""How much a client may ask for, and how the work is shared out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import ConfigError
from vitrail.runtime.cores import usable_cores


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may bring, and how slowly; more is answered 413 before any of it is decoded."""

    bytes: int = 16 * 2**20
    """Of the body."""
    pixels: int = 50_000_000
    """Of one image, as its header has it."""
    images: int = 16
    """Images in one request."""
    seconds: float = 30.0
    """For the body to arrive; a slower client is answered 408. As long may nothing of an answer be read."""
    headers: float = 20.0
    """Seconds for a request's headers to arrive, from when the connection is opened or the first byte came."""
    connections: int = 768
    """At a time, below the 1,024 files that a process may usually have open; past it the idlest is closed. One client
    may have seven eighths of them; past that the idlest of its own is closed."""

    def __post_init__(self) -> None:
        for name in ("bytes", "pixels", "images", "seconds", "headers", "connections"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"a limit of {getattr(self, name)} {name} lets nothing in; wanted 1 or more.")

    @property
    def total_pixels(self) -> int:
        """Of all images in a request: each of its pixels counts 2 if it has transparency, and 4 if it has 16 bits."""
        return 4 * self.pixels


@dataclass(frozen=True, kw_only=True)
class Work:
    """How images become batches."""

    queue: int = 256
    """Images that may wait; past it the answer is 503, and past seven eighths of it for one client 429. So it is
    with the next three."""
    queue_bytes: int = 512 * 2**20
    """Of all bodies that are here, from their first byte until their requests are answered; past it, 503 too."""
    uploads: int = 256
    """Bodies that are read at a time."""
    looks: int = 8
    """Explanations at a time, from when their images come until they are answered."""
    batch_size: int | None = None
    """Images the engine is given at a time, at most; None: what a short timing finds best."""
    wait: float = 0.004
    """Seconds a batch that is not full waits for images that are being decoded."""
    lanes: int = 1
    """Threads that run the engine, each on a batch of its own."""
    threads: int | None = None
    """Cores each of them computes on; None: as torch has it."""
    decoders: int = field(default_factory=usable_cores)
    """Threads that decode small images, and processes that decode large ones."""

    def __post_init__(self) -> None:
        for name in ("queue", "queue_bytes", "uploads", "looks", "lanes", "decoders"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: wanted 1 or more.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: wanted 1 image at a time or more.")
        if not 0 <= self.wait <= 1:
            raise ConfigError(f"wait={1000 * self.wait:g} ms: wanted 0 to 1000.")


def shares(cores: int, alone: bool, **options: Any) -> Work:
    """So many cores, shared by decoders and engine.

    An engine that takes calls side by side (`alone`) has a lane for each core: threads that work together on
    one batch would wait for each other whenever a decoder has one of the cores.
    """
    return Work(lanes=cores if alone else 1, threads=1 if alone else cores, decoders=cores, **options)
