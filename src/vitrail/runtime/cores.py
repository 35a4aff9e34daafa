"""How many cores this process may use, which is not how many the machine has.

A container or a batch system gives a process some of them: as a list (affinity), or as a share of their
time (a quota of its control group). Threads beyond that only take each other's turns and memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> int:
    """At least 1; a part of a core counts as one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(math.ceil(min(allowed, quota())), 1)


def quota(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float:
    """Cores' worth of time that the control groups of this process allow; infinite where they do not say."""
    return min((share for folder in _folders(groups, membership) for share in _shares(folder)), default=math.inf)


def _folders(groups: Path, membership: Path) -> Iterator[Path]:
    """Of each group this process is in and of those around it: in a container the outermost may be all that is seen."""
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and "cpu" not in kinds.split(","):  # version 1 has a tree for each kind, version 2 has one
            continue
        for top in (groups, groups / "cpu", groups / kinds) if kinds else (groups,):
            inner = Path(path.lstrip("/"))
            yield from (top / part for part in (inner, *inner.parents))


def _shares(folder: Path) -> Iterator[float]:
    """What the files of either version say, where they are there and set a limit."""
    first = _text(folder / "cpu.max").split()
    second = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    for found in (first, second):
        if len(found) == 2 and all(word.isdecimal() for word in found) and int(found[1]):
            yield int(found[0]) / int(found[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
