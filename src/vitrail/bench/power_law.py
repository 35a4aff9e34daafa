"""Cost against one variable, and the exponent of the power law that it follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Point:
    """The cost of one image at one value of what varies."""

    value: int
    ms: float | None
    """Per image: the time of a step divided by the batch size."""
    memory_mb: float | None
    """Per image: peak memory divided by the batch size, weights included."""
    gflops: float
    status: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Cost against one variable, the others being constant."""

    variable: str
    title: str
    points: tuple[Point, ...]

    def exponent(self, quantity: str) -> float | None:
        """Of the power law that fits the points best: 2 if doubling the variable quadruples the quantity."""
        pairs = [(p.value, getattr(p, quantity)) for p in self.points if getattr(p, quantity)]
        return fit_exponent(pairs)

    def last_exponent(self, quantity: str) -> float | None:
        """The same for the last two points, where large values decide."""
        return fit_exponent([(p.value, getattr(p, quantity)) for p in self.points if getattr(p, quantity)][-2:])

    def to_dict(self) -> dict[str, Any]:
        exponents = {
            name: {"all": self.exponent(name), "last": self.last_exponent(name)}
            for name in ("ms", "memory_mb", "gflops")
        }
        return {**asdict(self), "exponents": exponents}


def fit_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Slope of the least-squares line through the logarithms; None with fewer than two different points."""
    x, y = [math.log(value) for value, _ in points], [math.log(cost) for _, cost in points]
    if len(set(x)) < 2:
        return None
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
