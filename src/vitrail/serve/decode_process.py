"""A process that decodes large images, one at a time and at low priority.

What a large image costs falls on this process: its memory, the seconds for which Pillow keeps the interpreter's
lock, and a crash. It is killed when its image is no longer wanted or takes too long; the next one is forked from
a process that has imported everything, within milliseconds.
"""

from __future__ import annotations

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
from vitrail.serve.fork_server import fork_server
from vitrail.serve.images import Images, bound_pillow
from vitrail.serve.limits import Limits
from vitrail.serve.problems import Problem

Pixels = npt.NDArray[Any]
NICE = 10
"""Added to the priority of the process: beside busy threads of the service it gets about a tenth of a core."""
SECONDS = 20
"""CPU time for one image: fifteen times what 50 million pixels of the slowest usual kind take."""
POLL = 0.05
"""Seconds between two looks at whether the image is still wanted."""

MEMORY, PIXEL = 2**29, 32
"""Bytes that decoding may take beside those that the process begins with, and as many more for each pixel that an
image may have: twice what an image of the costliest kind needs. A file can make a decoder want any number."""

log = logging.getLogger("vitrail.serve")


class DecodeProcess:
    """Used by one thread; the process is started when first needed."""

    def __init__(self, config: PreprocessConfig, limits: Limits, seconds: float = SECONDS) -> None:
        self.config, self.limits, self.seconds = config, limits, seconds
        self._pid: int | None = None
        self._pipe: Connection | None = None

    def pixels(self, data: bytes, wanted: Callable[[], bool]) -> Pixels | None:
        """H W C, 0 to 255; None, and the work is given up, as soon as it is not `wanted`."""
        pipe = self._started()
        try:
            pipe.send_bytes(data)
            while not pipe.poll(POLL):
                if not wanted():
                    self.close()
                    return None
            answer = pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, Exception):
            raise answer
        found: Pixels = answer
        return found

    def close(self) -> int | None:
        """End the process at once, whatever it does; its exit code, if it was still known."""
        pid, pipe, self._pid, self._pipe = self._pid, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        return None if pid is None else fork_server.end(pid)

    def _started(self) -> Connection:
        if self._pipe is not None and not self._pipe.poll():  # at its end if the process has died
            return self._pipe
        self.close()
        pipe, other = Pipe()
        try:
            with other:
                self._pid = fork_server.fork(other)
            pipe.send((self.config, self.limits, self.seconds))
        except OSError as error:
            pipe.close()
            log.error("no process can be started to decode large images: %s", error)
            message = "large images cannot be decoded at the moment; try again in 5 s."
            raise Problem(503, "no_process", message, {"Retry-After": "5"}) from None
        self._pipe = pipe
        return pipe

    def _died(self) -> Problem:
        code = self.close()
        if code == -signal.SIGPROF:
            return Problem(400, "image_unreadable", f"the image takes more than {self.seconds:g} s to decode.")
        log.error("the process that decodes large images ended with status %s", code)
        return Problem(400, "image_unreadable", "the image cannot be read: decoding it failed.")


def decode(pipe: Connection) -> None:
    """The process: it ends when the pipe does."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(NICE)
    torch.set_num_threads(1)
    config, limits, seconds = pipe.recv()
    bound_pillow(limits.pixels)
    bound_memory(MEMORY + PIXEL * limits.pixels)
    images = Images(Preprocess(config), limits, None)
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # then SIGPROF ends the process
        try:
            answer: Any = images.pixels(data)
        except Problem as problem:
            answer = problem
        except MemoryError:
            answer = Problem(400, "image_unreadable", "the image cannot be read: decoding it takes too much memory.")
        except Exception as error:
            log.exception("decoding failed")
            answer = RuntimeError(f"decoding failed: {type(error).__name__}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            pipe.send(answer)
        except OSError:
            return
        del data, answer


def bound_memory(more: int) -> None:
    """Let this process have so many bytes more than it has, where the system says how many that is."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = now + more if hard < 0 else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
