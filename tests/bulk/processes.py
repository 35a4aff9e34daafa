"""The processes that a command has started, from Linux's /proc."""

from __future__ import annotations

from pathlib import Path


def parents() -> dict[int, int]:
    """Process id -> its parent's."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
            except OSError:  # it has just ended
                continue
            found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    """Processes that a process and its children have started."""
    parent_of = parents()
    found = [pid]
    for each in found:
        found += [child for child, parent in parent_of.items() if parent == each]
    return found[1:]


def title(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def ray_actors(pid: int) -> list[int]:
    """The actors that compute parts for a driver."""
    return [each for each in descendants(pid) if "PartActor" in title(each)]
