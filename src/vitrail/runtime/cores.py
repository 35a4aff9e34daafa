"""The number of CPU cores that this process may use, which can be fewer than the machine has.

A container or a batch system limits a process by a set of cores (affinity) or by CPU time (the quota of its control
group). More threads than that only compete for cores and memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Number of cores that affinity and cgroup quota allow, rounded up; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(math.ceil(min(allowed, cgroup_quota())), 1)


def cgroup_quota(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> float:
    """CPU time that the control groups of this process allow, in cores; infinite where none sets a limit."""
    return min((quota for folder in _folders(root, membership) for quota in _quotas(folder)), default=math.inf)


def _folders(root: Path, membership: Path) -> Iterator[Path]:
    """The folder of each control group of this process, and all its parents: a container may see only the outermost."""
    for line in _read_text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):  # cgroup v1 has a tree per controller, v2 has one
            continue
        for top in (root, root / "cpu", root / controllers) if controllers else (root,):
            inner = Path(path.lstrip("/"))
            yield from (top / part for part in (inner, *inner.parents))


def _quotas(folder: Path) -> Iterator[float]:
    """Quotas set by the files of cgroup v2 and v1 in one folder, in cores."""
    v2 = _read_text(folder / "cpu.max").split()
    v1 = [_read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    for fields in (v2, v1):
        if len(fields) == 2 and all(field.isdecimal() for field in fields) and int(fields[1]):
            yield int(fields[0]) / int(fields[1])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
