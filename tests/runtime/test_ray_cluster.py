"""Connecting to Ray: addresses, errors, and a cluster that ends with the block."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import need_extra

from vitrail.errors import ConfigError
from vitrail.runtime import ray_cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "address", ["ray", "ray://auto", "ray://head:10001", "ray://10.0.0.1:10001", "ray://[::1]:10001"]
)
def test_addresses_are_accepted(address: str) -> None:
    assert ray_cluster.check_address(address) == address


@pytest.mark.parametrize("address", ["", "spark", "ray://", "ray://head", "ray://head:0", "ray://a b:1", "head:10001"])
def test_other_addresses_are_refused_before_ray_is_imported(address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected ray .* or ray://HOST:PORT"), ray_cluster.ray_cluster(address):
        pass


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is not installed .*; try pip install 'vitrail\[ray\]'"):
        ray_cluster.import_ray()


def test_the_cluster_of_ray_start_is_found_only_while_it_answers(tmp_path: Path) -> None:
    environment = {"RAY_TMPDIR": str(tmp_path)}
    assert ray_cluster.started_cluster(environment) is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")
        assert ray_cluster.started_cluster(environment) == address
    assert ray_cluster.started_cluster(environment) is None
    (tmp_path / "ray" / "ray_current_cluster").write_text("?")
    assert ray_cluster.started_cluster(environment) is None


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


PRIVATE_SCRIPT = """
import os, subprocess, sys
from vitrail.runtime.ray_cluster import ray_cluster
with ray_cluster("ray", num_cpus=1) as ray:
    print(ray.get_runtime_context().gcs_address, flush=True)
    if len(sys.argv) == 1:
        subprocess.run([sys.executable, __file__, "inner"], check=True)
"""


@pytest.mark.slow
def test_cluster_of_another_command_is_not_joined(tmp_path: Path) -> None:
    """It ends with that command."""
    need_extra("ray")
    (tmp_path / "private.py").write_text(PRIVATE_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "RAY_TMPDIR": tempfile.mkdtemp(prefix="r", dir="/tmp")}
    command = [sys.executable, str(tmp_path / "private.py")]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    finally:
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 2


@pytest.mark.slow
def test_address_without_a_cluster_is_one_sentence(tmp_path: Path) -> None:
    need_extra("ray")
    script = "from vitrail.runtime.ray_cluster import ray_cluster\nwith ray_cluster('ray://127.0.0.1:9'): pass"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "ConfigError: cannot connect to ray://127.0.0.1:9 (" in done.stderr
    assert "set RAY_AUTH_MODE=token if it asks for a token." in done.stderr
