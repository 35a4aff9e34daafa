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


def part_actors(pid: int) -> list[int]:
    """Ray's actors that compute parts for the driver `pid`."""
    return [each for each in descendants(pid) if "PartActor" in title(each)]


def memory_kib(pid: int) -> dict[str, int]:
    """Memory of a process, as in /proc/PID/status: RssAnon, RssShmem, VmHWM, ...; empty if it has ended."""
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) == 3 and words[2] == "kB"}
