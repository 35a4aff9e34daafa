"""Device, precision, CPU cores, and notes to the user.

amx            works around CPUs that report AMX without having it
cores          number of CPU cores that this process may use
cpu            the CPU's model and instruction sets
device         device, dtype and precision by name
malloc         glibc's malloc keeps freed memory instead of returning it to the system
notes          messages about assumptions and choices, each logged once
peak_flops     measured peak rate of matrix products on a device
private_torch  functions of torch without a public interface, each with a substitute
ray_cluster    connects to a Ray cluster, or starts one
terminal       a console that escapes control characters
"""

from vitrail.runtime.device import autocast, deterministic, parse_dtype, pick_device, resolve_precision
from vitrail.runtime.notes import (
    CONTROL_CHARS,
    escape_control,
    is_main_process,
    log,
    log_on_main_process,
    suppress_note,
    warn_once,
)

__all__ = [
    "CONTROL_CHARS",
    "autocast",
    "deterministic",
    "escape_control",
    "is_main_process",
    "log",
    "log_on_main_process",
    "parse_dtype",
    "pick_device",
    "resolve_precision",
    "suppress_note",
    "warn_once",
]
