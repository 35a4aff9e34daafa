"""Arrays that measurements store beside the run's model, for figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.reproduction.results import ARRAYS_FILE
from vitrail.storage.atomic_write import atomic_file
from vitrail.training.runs import Run


def save_arrays(run: Run, **arrays: npt.NDArray[Any]) -> None:
    """Add arrays to the trial's arrays.npz; `Results.arrays` reads them."""
    path = run.path / ARRAYS_FILE
    if path.exists():
        with np.load(path, allow_pickle=False) as found:
            arrays = {**found, **arrays}
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
