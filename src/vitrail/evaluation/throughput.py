"""Images per second of a whole evaluation, and of the network alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn


@dataclass(frozen=True)
class Throughput:
    """Images per second."""

    total: float
    """Including reading and decoding."""
    network: float
    """Forward passes only; an image and its mirror image count as one."""
    seconds: float
    """Total duration."""

    def to_dict(self) -> dict[str, float]:
        return {"images_per_second": self.total, "network_images_per_second": self.network, "seconds": self.seconds}


class NetworkTimer:
    """Measures the time spent in a network's forward calls, without synchronizing with a GPU."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.began = time.perf_counter()
        self.network_seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.started: Any = None

    def __enter__(self) -> Self:
        self.hooks = [
            self.net.register_forward_pre_hook(lambda *_: self._start()),
            self.net.register_forward_hook(lambda *_: self._stop()),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self.hooks:
            hook.remove()

    def _now(self) -> Any:
        if next((p.device.type for p in self.net.parameters()), "cpu") != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self) -> None:
        self.started = self._now()

    def _stop(self) -> None:
        if isinstance(self.started, float):
            self.network_seconds += self._now() - self.started
        else:
            self.events.append((self.started, self._now()))

    def throughput(self, num_images: int) -> Throughput:
        """The throughput for this number of images since the start."""
        if self.events:
            torch.cuda.synchronize()
        network = self.network_seconds + sum(first.elapsed_time(last) for first, last in self.events) / 1000
        seconds = time.perf_counter() - self.began
        return Throughput(num_images / max(seconds, 1e-9), num_images / max(network, 1e-9), seconds)
