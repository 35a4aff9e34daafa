"""Measurements of a finished run's model, beyond its accuracy.

A measurement returns numbers, which are stored with the trial's result, and may store arrays for figures with
`save_arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from vitrail.reproduction.measures.development import development
from vitrail.reproduction.measures.few_shot import few_shot
from vitrail.reproduction.measures.heads import heads
from vitrail.reproduction.measures.inspection import inspection
from vitrail.reproduction.measures.start import start_accuracy
from vitrail.reproduction.measures.symmetries import symmetry
from vitrail.training.runs import Run

Measure = Callable[[Run], dict[str, float]]

MEASURES: Mapping[str, Measure] = {
    "5-shot": few_shot,
    "heads": heads,
    "start": start_accuracy,
    "development": development,
    "inspection": inspection,
    **{f"symmetry-{per_side}": partial(symmetry, per_side=per_side) for per_side in (4, 8, 14)},
}
"""Name in `Arm.measures` -> the function. A name is not necessarily that of the number."""


def measure(names: Sequence[str], run: Run) -> dict[str, float]:
    """All numbers of these measurements."""
    found: dict[str, float] = {}
    for name in names:
        found |= MEASURES[name](run)
    return found
