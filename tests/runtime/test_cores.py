"""Threads are counted by the cores that a process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from conftest import need_extra

from vitrail.runtime import cores as module
from vitrail.runtime.cores import cores, quota


def groups(folder: Path, membership: str, files: dict[str, str]) -> float:
    """The quota where these files are all there is."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return quota(folder / "cgroup", folder / "membership")


ONE = "0::/pods/mine\n"
OLD = "5:cpu,cpuacct:/pods/mine\n4:memory:/elsewhere\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("membership", "files", "wanted"),
    [
        (ONE, {"pods/mine/cpu.max": "150000 100000\n"}, 1.5),
        (ONE, {"pods/mine/cpu.max": "max 100000\n"}, math.inf),
        (ONE, {"pods/mine/cpu.max": "400000 100000\n", "pods/cpu.max": "200000 100000\n"}, 2),  # the tighter one
        (ONE, {"cpu.max": "300000 100000\n"}, 3),  # a container sees its own group as the outermost
        (ONE, {}, math.inf),
        (ONE, {"cpu.max": "what is this"}, math.inf),
        (ONE, {"cpu.max": "100000 0"}, math.inf),
        ("", {"cpu.max": "300000 100000\n"}, math.inf),
        (OLD, {"cpu/pods/mine/cpu.cfs_quota_us": "50000\n", "cpu/pods/mine/cpu.cfs_period_us": "100000\n"}, 0.5),
        (OLD, {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 2.5),
        (OLD, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        (OLD, {"memory/elsewhere/cpu.max": "100000 100000\n"}, math.inf),
    ],
)
def test_the_tightest_quota_of_its_groups_counts(
    tmp_path: Path, membership: str, files: dict[str, str], wanted: float
) -> None:
    assert groups(tmp_path, membership, files) == wanted


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
@pytest.mark.parametrize(
    ("allowed", "share", "wanted"), [(64, 2, 2), (64, 1.5, 2), (3, math.inf, 3), (2, 64, 2), (8, 0.3, 1)]
)
def test_cores_are_those_a_process_may_use(
    monkeypatch: pytest.MonkeyPatch, allowed: int, share: float, wanted: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    monkeypatch.setattr(module, "quota", lambda: share)
    assert cores() == wanted


def test_the_service_counts_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    need_extra("serve")
    from vitrail.serve.limits import Work
    from vitrail.serve.server import Settings

    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(module, "quota", lambda: 1.0)
    assert (Work().decoders, Settings().cores) == (1, 1)
