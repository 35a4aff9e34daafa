"""Durations with a unit: `epochs(5)`, `steps(10_000)`, `images(2_000_000)`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from vitrail.config.base import Config
from vitrail.errors import ConfigError

Unit = Literal["steps", "epochs", "images"]
MULTIPLIERS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
DURATION_PATTERN = re.compile(
    r"\s*((?:\d+(?:_\d+)*)(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kmb]?)\s*(step|epoch|image)s?\s*", re.I
)


@dataclass(frozen=True, kw_only=True)
class Duration(Config):
    """A count of steps, epochs or images; written `5 epochs`, `10k steps` or `1.2m images`."""

    count: float
    unit: Unit

    def check(self) -> None:
        if not 0 <= self.count < math.inf:
            raise ConfigError(f"expected a duration of 0 or more, got {self.count} {self.unit}.")

    @classmethod
    def from_text(cls, text: str) -> Duration:
        match = DURATION_PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"got {text!r}, expected a duration with a unit, such as 5 epochs, 10k steps or 1.2m images."
            )
        count = float(match[1]) * MULTIPLIERS[match[2].lower()]
        return cls(count=count, unit=f"{match[3].lower()}s")  # type: ignore[arg-type]

    def to_steps(self, *, batch_size: int, images: int) -> int:
        """Steps of `batch` images that cover it, where an epoch is `images` images; rounded up."""
        if self.unit == "epochs" and images < 1:
            raise ConfigError(
                f"{self} cannot be converted to steps, because a stream has no known number of images; "
                "use steps or images."
            )
        per_step = {"steps": 1.0, "epochs": batch_size / max(images, 1), "images": float(batch_size)}[self.unit]
        return math.ceil(round(self.count / per_step, 6))

    def __str__(self) -> str:
        count = str(int(self.count)) if self.count == int(self.count) else repr(self.count)
        return f"{count} {self.unit if self.count != 1 else self.unit[:-1]}"

    def __bool__(self) -> bool:
        return self.count > 0


def steps(count: float) -> Duration:
    return Duration(count=count, unit="steps")


def epochs(count: float) -> Duration:
    return Duration(count=count, unit="epochs")


def images(count: float) -> Duration:
    return Duration(count=count, unit="images")
