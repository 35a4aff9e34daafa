"""The number of usable cores: CPU affinity and cgroup quotas."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from conftest import need_extra

from vitrail.runtime import cores as module
from vitrail.runtime.cores import cgroup_quota, usable_cores


def quota_of(folder: Path, membership: str, files: dict[str, str]) -> float:
    """The CPU quota that these cgroup files set."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cgroup_quota(folder / "cgroup", folder / "membership")


V2 = "0::/pods/mine\n"
V1 = "5:cpu,cpuacct:/pods/mine\n4:memory:/elsewhere\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2, {"pods/mine/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"pods/mine/cpu.max": "max 100000\n"}, math.inf),
        (V2, {"pods/mine/cpu.max": "400000 100000\n", "pods/cpu.max": "200000 100000\n"}, 2),  # the lower one
        (V2, {"cpu.max": "300000 100000\n"}, 3),  # in a container its own group is the root
        (V2, {}, math.inf),
        (V2, {"cpu.max": "not a quota"}, math.inf),
        (V2, {"cpu.max": "100000 0"}, math.inf),
        ("", {"cpu.max": "300000 100000\n"}, math.inf),
        (V1, {"cpu/pods/mine/cpu.cfs_quota_us": "50000\n", "cpu/pods/mine/cpu.cfs_period_us": "100000\n"}, 0.5),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 2.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        (V1, {"memory/elsewhere/cpu.max": "100000 100000\n"}, math.inf),
    ],
)
def test_lowest_quota_of_all_parent_groups_applies(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float
) -> None:
    assert quota_of(tmp_path, membership, files) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
@pytest.mark.parametrize(
    ("allowed", "quota", "expected"), [(64, 2, 2), (64, 1.5, 2), (3, math.inf, 3), (2, 64, 2), (8, 0.3, 1)]
)
def test_affinity_and_quota_limit_the_cores(
    monkeypatch: pytest.MonkeyPatch, allowed: int, quota: float, expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    monkeypatch.setattr(module, "cgroup_quota", lambda: quota)
    assert usable_cores() == expected


def test_server_defaults_to_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    need_extra("serve")
    from vitrail.serve.limits import BatchingConfig
    from vitrail.serve.server import ServerConfig

    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(module, "cgroup_quota", lambda: 1.0)
    assert (BatchingConfig().decode_threads, ServerConfig().cores) == (1, 1)
