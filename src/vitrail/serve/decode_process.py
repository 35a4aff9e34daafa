"""A low-priority process that decodes large images, one at a time.

It isolates the service from the memory use of large images, from Pillow holding the interpreter lock for seconds, and
from crashes. The process is killed when its image is no longer needed or takes too long; its replacement is forked
within milliseconds from a process that has everything imported.
"""

from __future__ import annotations

import atexit
import logging
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from vitrail.config import PreprocessConfig
from vitrail.data.preprocess import Preprocess
from vitrail.serve.fork_server import ForkServer
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder, limit_pillow_pixels
from vitrail.serve.limits import Limits

Pixels = npt.NDArray[Any]
NICENESS = 10
"""Niceness of the process: beside busy threads of the service it gets about a tenth of a core."""
CPU_LIMIT_S = 20
"""CPU seconds for one image: fifteen times what 50 million pixels of the slowest common format take."""
POLL_INTERVAL_S = 0.05
"""Seconds between two checks whether the image is still needed."""

BASE_MEMORY_BYTES, MEMORY_BYTES_PER_PIXEL = 2**29, 32
"""Memory limit on top of the memory at startup: a base, plus bytes per allowed pixel. This is twice what the most
expensive format needs. A malicious file can make a decoder allocate any amount."""

log = logging.getLogger("vitrail.serve")

fork_server = ForkServer(__name__, "run_decoder")
"""The instance shared by this process."""
atexit.register(fork_server.close)


class DecodeProcess:
    """A decode process used by one thread. It is started on first use and restarted when it dies."""

    def __init__(self, config: PreprocessConfig, limits: Limits, seconds: float = CPU_LIMIT_S) -> None:
        self.config, self.limits, self.seconds = config, limits, seconds
        self._pid: int | None = None
        self._pipe: Connection | None = None

    def decode(self, data: bytes, is_needed: Callable[[], bool]) -> Pixels | None:
        """Image bytes -> H W C pixels, 0 to 255. Kills the process and returns None once `is_needed` returns False."""
        pipe = self._ensure_started()
        try:
            pipe.send_bytes(data)
            while not pipe.poll(POLL_INTERVAL_S):
                if not is_needed():
                    self.close()
                    return None
            result = pipe.recv()
        except (EOFError, OSError):
            raise self._crash_error() from None
        if isinstance(result, Exception):
            raise result
        pixels: Pixels = result
        return pixels

    def close(self) -> int | None:
        """Kill the process; returns its exit code if known."""
        pid, pipe, self._pid, self._pipe = self._pid, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        return None if pid is None else fork_server.kill(pid)

    def _ensure_started(self) -> Connection:
        if self._pipe is not None and not self._pipe.poll():  # readable if the process has died
            return self._pipe
        self.close()
        pipe, child_pipe = Pipe()
        try:
            with child_pipe:
                self._pid = fork_server.fork(child_pipe)
            pipe.send((self.config, self.limits, self.seconds))
        except OSError as error:
            pipe.close()
            log.error("cannot start a process to decode large images: %s", error)
            message = "large images cannot be decoded at the moment; try again in 5 s."
            raise RequestError(503, "decoder_unavailable", message, {"Retry-After": "5"}) from None
        self._pipe = pipe
        return pipe

    def _crash_error(self) -> RequestError:
        code = self.close()
        if code == -signal.SIGPROF:
            return RequestError(400, "image_unreadable", f"decoding the image takes more than {self.seconds:g} s.")
        log.error("the decode process for large images exited with status %s", code)
        return RequestError(400, "image_unreadable", "the image cannot be read: decoding it failed.")


def run_decoder(pipe: Connection) -> None:
    """Main function of the process: decodes images from the pipe until the pipe is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(NICENESS)
    torch.set_num_threads(1)
    config, limits, seconds = pipe.recv()
    limit_pillow_pixels(limits.max_pixels)
    limit_memory(BASE_MEMORY_BYTES + MEMORY_BYTES_PER_PIXEL * limits.max_pixels)
    decoder = ImageDecoder(Preprocess(config), limits, None)
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF then kills the process
        try:
            result: Any = decoder.decode_bytes(data)
        except RequestError as error:
            result = error
        except MemoryError:
            result = RequestError(
                400, "image_unreadable", "the image cannot be read: decoding it takes too much memory."
            )
        except Exception as error:
            log.exception("decoding failed")
            result = RuntimeError(f"decoding failed: {type(error).__name__}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            pipe.send(result)
        except OSError:
            return
        del data, result


def limit_memory(more: int) -> None:
    """Limit the address space of this process to its current size plus `more` bytes (Linux only)."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more if hard < 0 else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
