"""What is counted between two logged lines, on the device, so that nobody waits for a number nobody reads yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WEIGHT, STEPS, NORM = "weight", "steps", "grad_norm"


class Meter:
    """Sums over this process's samples since the last line."""

    def __init__(self, device: torch.device, before: Mapping[str, float] | None = None) -> None:
        # Apple's GPUs have no float64; float32 sums over a hundred steps lose nothing one would see.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.take(before or {})

    def take(self, values: Mapping[str, float]) -> None:
        """Begin from these sums."""
        self.sums = {name: torch.tensor(v, dtype=self.dtype, device=self.device) for name, v in values.items()}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            value = value.detach().to(self.dtype)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def vector(self) -> tuple[list[str], Tensor]:
        """Names, and the sums as one tensor to be reduced over processes."""
        names = sorted(self.sums)
        return names, torch.stack([self.sums[n] for n in names]) if names else torch.zeros(0, dtype=self.dtype)
