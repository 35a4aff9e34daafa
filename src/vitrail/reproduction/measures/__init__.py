"""Measurements of a finished run's model, beyond its accuracy.

A measurement returns numbers, which are stored with the trial's result, and may store arrays for figures with
`save_arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vitrail.reproduction.measures.few_shot import few_shot
from vitrail.training.runs import Run

Measure = Callable[[Run], dict[str, float]]

MEASURES: Mapping[str, Measure] = {
    "5-shot": few_shot,
}
"""Name in `Arm.measures` -> the function. A name is not necessarily that of the number."""


def measure(names: Sequence[str], run: Run) -> dict[str, float]:
    """All numbers of these measurements."""
    found: dict[str, float] = {}
    for name in names:
        found |= MEASURES[name](run)
    return found
