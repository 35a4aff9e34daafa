"""Device, precision, locks, and notes to the user.

    amx         works around CPUs that report AMX without having it
    cores       number of CPU cores that this process may use
    cpu         the CPU's model and instruction sets
    locks       exclusive locks on open files
    malloc      glibc's malloc keeps freed memory instead of returning it to the system
    peak_flops  measured peak rate of matrix products on a device
    terminal    a console that escapes control characters

Assumptions and choices made for the user are logged to the logger "vitrail" at level WARNING, so that a plain script
shows them; `logging.getLogger("vitrail").setLevel("ERROR")` silences them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from vitrail.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, change its state or reverse its text; not tab and newline."""

log = logging.getLogger("vitrail")
_logged: set[tuple[str, str]] = set()
_suppressed: set[str] = set()


def escape_control(text: str) -> str:
    """Replace control characters with escapes (`\\x1b[31m`): names read from a file must not control a terminal."""
    return CONTROL_CHARS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def warn_once(notes: Iterable[str], about: str = "") -> None:
    """Log each note at level WARNING, prefixed with `about`; each pair of `about` and note is logged once."""
    for note in notes:
        if note in _suppressed:
            continue
        note = escape_control(note if note.endswith((".", "…")) else f"{note}.")
        if (about, note) not in _logged:
            _logged.add((about, note))
            log.warning("%s", f"{escape_control(about)}: {note}" if about else note, extra={"note": note})


@contextmanager
def suppress_note(note: str) -> Iterator[None]:
    """Do not log this note inside the block: the caller does not use what it is about."""
    _suppressed.add(note)
    try:
        yield
    finally:
        _suppressed.discard(note)


def is_main_process() -> bool:
    """Whether this process prints to the user: always, except for ranks above 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def log_on_main_process() -> Iterator[None]:
    """Inside the block only the main process logs, since all processes would log the same."""
    before, log.disabled = log.disabled, log.disabled or not is_main_process()
    try:
        yield
    finally:
        log.disabled = before


def pick_device(name: str | torch.device = "auto") -> torch.device:
    """The device of this name as torch writes it; `auto` is CUDA, else Apple's MPS, else the CPU."""
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
    """Resolve `auto`: bfloat16 on an NVIDIA or AMD GPU that supports it, else float32. Other names are unchanged."""
    import torch

    if name != "auto":
        return name
    supported = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if supported else "float32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """`torch.autocast` to bfloat16 if `precision` is "bfloat16", else no change; weights keep their dtype."""
    import torch

    if precision != "bfloat16":
        return nullcontext()
    if device.type == "cpu":
        from vitrail.runtime.amx import check_bfloat16

        check_bfloat16()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Inside the block torch uses only deterministic GPU kernels; an operation without one raises an error."""
    import torch

    if not enabled:
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
    """The torch dtype of a name such as "bfloat16"; a dtype or None is returned as is."""
    import torch

    if not isinstance(name, str):
        return name
    known = ("float32", "float64", "float16", "bfloat16")
    if name.removeprefix("torch.") not in known:
        raise ConfigError(f"no dtype {name!r}{did_you_mean(name, known)}")
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
