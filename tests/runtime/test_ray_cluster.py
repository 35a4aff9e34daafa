"""Connecting to Ray: addresses, errors, and a cluster that ends with the block."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import need_extra

from vitrail.errors import ConfigError, NotFoundError
from vitrail.runtime import ray_cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("address", ["ray", "ray://head:10001", "ray://10.0.0.1:10001", "ray://[::1]:10001"])
def test_addresses_are_accepted(address: str) -> None:
    assert ray_cluster.check_address(address) == address


@pytest.mark.parametrize("address", ["", "spark", "ray://", "ray://head", "ray://head:0", "ray://a b:1", "head:10001"])
def test_other_addresses_are_refused_before_ray_is_imported(address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected ray .* or ray://HOST:PORT"), ray_cluster.ray_cluster(address):
        pass


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotFoundError, match=r"pip install 'vitrail\[ray\]'"):
        ray_cluster.import_ray()


SCRIPT = """
from vitrail.runtime.ray_cluster import ray_cluster
with ray_cluster("ray", num_cpus=1) as ray:
    with ray_cluster("ray") as same:
        assert same is ray
    assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 1
    print(ray.get(ray.remote(lambda: print("noise") or 6 * 7).remote()))
assert not ray.is_initialized()
"""


@pytest.mark.slow
def test_local_cluster_ends_with_the_block_and_is_quiet(tmp_path: Path) -> None:
    need_extra("ray")
    environment = os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


@pytest.mark.slow
def test_address_without_a_cluster_is_one_sentence(tmp_path: Path) -> None:
    need_extra("ray")
    script = "from vitrail.runtime.ray_cluster import ray_cluster\nwith ray_cluster('ray://127.0.0.1:9'): pass"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "NotFoundError: no Ray cluster answers at ray://127.0.0.1:9" in done.stderr
