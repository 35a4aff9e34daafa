"""Running sums of the metrics between two logged steps, kept on the device to avoid synchronization."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WEIGHT, STEPS, NORM = "weight", "steps", "grad_norm"


class Meter:
    """Sums over this process's samples since the last logged step."""

    def __init__(self, device: torch.device, before: Mapping[str, float] | None = None) -> None:
        # MPS has no float64; float32 is precise enough for sums over a hundred steps.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.reset(before or {})

    def reset(self, values: Mapping[str, float]) -> None:
        """Replace the sums by these."""
        self.sums = {name: torch.tensor(v, dtype=self.dtype, device=self.device) for name, v in values.items()}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            value = value.detach().to(self.dtype)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def stacked(self) -> tuple[list[str], Tensor]:
        """Names, and the sums as one tensor, to be reduced over processes."""
        names = sorted(self.sums)
        return names, torch.stack([self.sums[n] for n in names]) if names else torch.zeros(0, dtype=self.dtype)
