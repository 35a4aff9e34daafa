"""The service as a Ray Serve application."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from conftest import ROOT, import_peer
from serving import photo, run_server, served

import vitrail
from vitrail.errors import ConfigError
from vitrail.serve import deployment
from vitrail.serve.limits import Limits
from vitrail.serve.ray_serve import MAX_ONGOING_REQUESTS, _build_app
from vitrail.serve.server import bind_socket

TOKEN_VARIABLE = "VITRAIL_TEST_TOKEN"
PHOTOS = [photo(0), photo(1, "PNG"), photo(2)]


def test_importing_the_function_imports_neither_ray_nor_torch() -> None:
    code = "import sys; from vitrail.serve import deployment; print({'ray', 'torch', 'fastapi'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"set()"


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'vitrail\[ray,serve\]'"):
        deployment("vitrail/cifar10")


def test_options_are_passed_to_ray() -> None:
    import_peer("ray.serve")
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 16}
    bound = deployment("vitrail/cifar10", name="cats", autoscaling_config=scaling, ray_actor_options={"num_cpus": 2})
    made = bound._bound_deployment
    assert made.name == "cats"
    assert made.max_ongoing_requests == MAX_ONGOING_REQUESTS
    config = made._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (1, 3, 16)
    assert made.ray_actor_options["num_cpus"] == 2
    assert deployment(max_ongoing_requests=7)._bound_deployment.max_ongoing_requests == 7


def test_the_app_of_a_replica_starts_when_the_model_is_warmed_up() -> None:
    app = _build_app(None, None, 1, Limits(max_images=3), {"batch_size": 2}, None, None, {})
    service = app.state.service
    assert (service.limits.max_images, service.default.batcher.batch_size) == (3, 2)
    assert service.registry.names == ("vitrail/cifar10",)

    before = set(threading.enumerate())

    async def start() -> bool:
        async with app.router.lifespan_context(app):
            return bool(service.is_ready)

    assert asyncio.run(start())
    assert not any(thread.name.startswith("engine") for thread in set(threading.enumerate()) - before)


@pytest.fixture(scope="module")
def ray_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the bundled model with a token, served by a local Ray."""
    ray = import_peer("ray")
    serve = import_peer("ray.serve")
    port = free_port()
    variables = {TOKEN_VARIABLE: "secret", "PYTHONPATH": str(ROOT / "src")}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
        app = deployment(
            "vitrail/cifar10",
            limits=Limits(max_images=4, max_bytes=8_000_000),
            batching={"batch_size": 4},
            token=TOKEN_VARIABLE,
            ray_actor_options={"num_cpus": 1},
            autoscaling_config={"min_replicas": 1, "max_replicas": 2},
        )
        serve.run(app, name="vitrail")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own modules
def test_ray_serves_the_answers_of_the_plain_server(ray_server: str, cifar10: vitrail.Model) -> None:
    headers = {"authorization": "Bearer secret"}
    bundled = served(cifar10)
    bundled.name = "vitrail/cifar10"
    with (
        run_server(bundled, Limits(max_images=4, max_bytes=8_000_000)) as (plain, _),
        httpx.Client(base_url=ray_server, headers=headers, timeout=60) as ray_client,
    ):
        files = [("images", data) for data in PHOTOS]
        for path in ("/v1/predict", "/v1/embed"):
            answers = [client.post(path, files=files).json()["results"] for client in (plain, ray_client)]
            assert flat_numbers(answers[1]) == pytest.approx(flat_numbers(answers[0]), abs=1e-4)
        assert ray_client.get("/readyz").status_code == 200
        assert httpx.post(f"{ray_server}/v1/predict", files=files).status_code == 401
        too_many = ray_client.post("/v1/predict", files=files + files)
        assert (too_many.status_code, too_many.json()["error"]["code"]) == (413, "too_many_images")
        too_large = ray_client.post("/v1/predict", content=bytes(9_000_000), headers={"content-type": "image/jpeg"})
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
        large = np.random.default_rng(0).integers(0, 256, (1, 1600, 1600, 3), np.uint8)  # decoded in a process
        expected, found = (infer(str(client.base_url), large, headers) for client in (plain, ray_client))
        assert np.allclose(found, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_requests_to_a_replica_share_batches(ray_server: str, request_pool: Any) -> None:
    with httpx.Client(base_url=ray_server, headers={"authorization": "Bearer secret"}, timeout=60) as client:
        answers = [request_pool.submit(client.post, "/v1/predict", files={"image": PHOTOS[0]}) for _ in range(60)]
        assert [answer.result().status_code for answer in answers] == [200] * 60
        text = client.get("/metrics").text
    count, total = (
        sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vitrail_batch_size_{name}{{"))
        for name in ("count", "sum")
    )
    assert total > count  # of the replica that answered: at least one batch had two images


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_snippet_on_the_page_runs_and_ends(tmp_path: Path) -> None:
    import_peer("ray.serve")
    page = (ROOT / "docs" / "protocols.md").read_text()
    [snippet] = [code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "deployment(" in code]
    port, script = free_port(), tmp_path / "serve_on_ray.py"
    start = f"serve.start(http_options={{'port': {port}}})\n"
    end = f"import httpx\nprint(httpx.get('http://127.0.0.1:{port}/v2').text)\nserve.shutdown()\n"
    script.write_text(snippet.replace("serve.run(", f"{start}serve.run(") + end)
    environment = {"PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"name":"vitrail"' in done.stdout


def free_port() -> int:
    with bind_socket("127.0.0.1", 0) as sock:
        return int(sock.getsockname()[1])


def flat_numbers(values: Any) -> list[float]:
    """All numbers in a JSON value, in order."""
    if isinstance(values, dict | list):
        inner = values.values() if isinstance(values, dict) else values
        return [number for value in inner for number in flat_numbers(value)]
    return [] if isinstance(values, str) else [values]


def infer(url: str, pixels: np.ndarray[Any, Any], headers: dict[str, str]) -> np.ndarray[Any, Any]:
    triton = import_peer("tritonclient.http")
    tensor = triton.InferInput("images", list(pixels.shape), "UINT8").set_data_from_numpy(pixels)
    with triton.InferenceServerClient(url.removeprefix("http://").rstrip("/"), network_timeout=60) as client:
        return client.infer("vitrail/cifar10", [tensor], headers=headers).as_numpy("probabilities")
