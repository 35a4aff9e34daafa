"""Where and how things run: device, precision, what is said aloud.

    cores    how many of them this process may use
    cpu      its model and instruction sets
    heap     freed memory that stays with the process
    locks    a file for one process alone
    peak     how fast a device multiplies matrices, measured
    terminal a console that prints names from files as text
    tiles    bfloat16 on a CPU that only announces it

Assumptions and choices made for the user go to the logger "vitrail", at level WARNING, so that a
plain script shows them; `logging.getLogger("vitrail").setLevel("ERROR")` silences them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from vitrail.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, change its state or reverse its text; not tab and newline."""

log = logging.getLogger("vitrail")
_said: set[tuple[str, str]] = set()
_silent: set[str] = set()


def visible(text: str) -> str:
    """The text with control characters as escapes, `\\x1b[31m`: names in a file must not control a terminal."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(notes: Iterable[str], about: str = "") -> None:
    """Tell the user what was assumed or chosen about something, once for each such thing."""
    for note in notes:
        if note in _silent:
            continue
        note = visible(note if note.endswith((".", "…")) else f"{note}.")
        if (about, note) not in _said:
            _said.add((about, note))
            log.warning("%s", f"{visible(about)}: {note}" if about else note, extra={"note": note})


@contextmanager
def silent(note: str) -> Iterator[None]:
    """Leave one note out, for a caller that makes no use of what it is about."""
    _silent.add(note)
    try:
        yield
    finally:
        _silent.discard(note)


def speaks() -> bool:
    """Whether this process is the one that talks to the user: under torchrun only the first does."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def first_speaks() -> Iterator[None]:
    """What all processes would say alike, the first one says."""
    before, log.disabled = log.disabled, log.disabled or not speaks()
    try:
        yield
    finally:
        log.disabled = before


def pick_device(name: str | torch.device = "auto") -> torch.device:
    """`auto` is CUDA, else Apple's MPS, else the CPU; anything else is torch's own name."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"there is no device {str(name)!r}; try cpu, cuda, cuda:1, mps or auto.") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        raise ConfigError(f"device {str(name)!r} cannot be used here ({reason}); try cpu or auto.") from None
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """`auto` is bfloat16 on a GPU of NVIDIA or AMD that has it, float32 elsewhere; anything else is meant as it is."""
    import torch

    if name != "auto":
        return name
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Inside, products are computed in bfloat16, if that is the precision; weights stay what they are."""
    import torch

    if precision != "bfloat16":
        return nullcontext()
    if device.type == "cpu":
        from vitrail.runtime.tiles import check_bfloat16

        check_bfloat16()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Inside, only GPU kernels that give the same bits each time; an operation that has none is an error."""
    import torch

    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when first used
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def pick_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """torch's own, or its name: "bfloat16"."""
    import torch

    if not isinstance(name, str):
        return name
    known = ("float32", "float64", "float16", "bfloat16")
    if name.removeprefix("torch.") not in known:
        raise ConfigError(f"no dtype {name!r} to load weights as{nearest(name, known)}")
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
