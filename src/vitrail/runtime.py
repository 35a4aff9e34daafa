"""Where and how things run: device, precision, what is said aloud."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vitrail.errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vitrail")
"""Assumptions and choices are told here, at level WARNING, so that a plain script shows them once."""


def say(notes: Iterable[str]) -> None:
    """Tell the user what was assumed or chosen for them."""
    for note in notes:
        log.warning("%s", note)


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is CUDA, else Apple's MPS, else the CPU; anything else is torch's own name."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]} Try --device cpu.") from None
    return device
