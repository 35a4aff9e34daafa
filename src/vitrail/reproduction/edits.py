"""Changes to a pretrained model before a trial fine-tunes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from vitrail.model import Model
from vitrail.open_model import load

EDITS: Mapping[str, Callable[[Model], Model]] = {}
"""Name in `Arm.parent_edit` -> a function that returns the changed model."""


def edit_model(name: str, source: Path, out: Path, *, seed: int) -> Path:
    """Write the model in `source`, changed, to `out`, unless it is there from before an interruption."""
    if not out.exists():
        torch.manual_seed(seed)
        EDITS[name](load(source)).save(out)
    return out
