"""nginx and Prometheus run for real, with the files of deploy/, in front of servers started by `vitrail serve`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, import_peer, need_extra

need_extra("serve")
httpx = import_peer("httpx")

from serving import photo  # noqa: E402

DEPLOY = ROOT / "deploy"
NGINX = """
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/vitrail.conf;
}}
"""


@pytest.mark.slow
def test_nginx_answers_over_tls_also_after_a_server_was_killed(tmp_path: Path) -> None:
    with ExitStack() as running:
        log = tmp_path / "access.log"
        options = ("--allow-host", "vitrail.example.org", "--trusted-proxy", "127.0.0.1", "--access-log", str(log))
        servers = [running.enter_context(run(serve_command(*options), "ready")) for _ in range(2)]
        port = free_port()
        write_nginx_files(tmp_path, port, [url for _, url in servers])
        running.enter_context(run([program("nginx"), "-p", str(tmp_path), "-c", f"{tmp_path}/nginx.conf"]))
        url, headers = f"https://127.0.0.1:{port}", {"Host": "vitrail.example.org"}
        client = running.enter_context(httpx.Client(base_url=url, headers=headers, verify=False, timeout=30))
        wait_for(lambda: client.get("/readyz").status_code == 200)
        for path in ("/metrics", "/admin/models"):
            assert client.get(path).headers["server"].startswith("nginx"), path
            assert client.get(path).status_code == 404, path
        # A client must not get rid of its address by sending a header of its own.
        client.get("/v1/model", headers={"X-Forwarded-For": "198.51.100.7", "Forwarded": "for=192.0.2.9"})
        wait_for(lambda: "/v1/model" in log.read_text())
        (line,) = [json.loads(line) for line in log.read_text().splitlines() if "/v1/model" in line]
        assert line["client"] == "198.51.100.7"
        for number in range(20):
            if number == 10:
                servers[0][0].kill()
            answer = client.post("/v1/predict", content=photo(number), headers={"content-type": "image/jpeg"})
            assert answer.status_code == 200, answer.text
        too_large = client.post("/v1/predict", content=bytes(17_500_000), headers={"content-type": "image/jpeg"})
        assert too_large.status_code == 413


@pytest.mark.slow
def test_prometheus_scrapes_the_service_and_its_alerts_fire(tmp_path: Path) -> None:
    with ExitStack() as running:
        server, server_url = running.enter_context(run(serve_command(), "ready"))
        for file in ("prometheus.yml", "alerts.yml"):
            text = (
                (DEPLOY / "prometheus" / file).read_text().replace("vitrail:8000", server_url.removeprefix("http://"))
            )
            text = re.sub(r"(interval: )10s", r"\g<1>1s", text).replace("for: 1m", "for: 2s")
            (tmp_path / file).write_text(text)
        address = f"127.0.0.1:{free_port()}"
        command = [program("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--web.listen-address={address}"]
        running.enter_context(run([*command, f"--storage.tsdb.path={tmp_path}/data"]))
        api = running.enter_context(httpx.Client(base_url=f"http://{address}/api/v1", timeout=10))

        def query(text: str) -> list[Any]:
            answer: list[Any] = api.get("/query", params={"query": text}).json()["data"]["result"]
            return answer

        for number in range(3):
            httpx.post(f"{server_url}/v1/predict", content=photo(number), headers={"content-type": "image/jpeg"})
        predicted = 'sum(vitrail_requests_total{route="/v1/predict", status="200"})'
        wait_for(lambda: [row["value"][1] for row in query(predicted)] == ["3"])
        (group,) = api.get("/rules").json()["data"]["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        server.kill()
        wait_for(lambda: query('ALERTS{alertname="VitrailDown", alertstate="firing"}') != [])


def serve_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "vitrail", "serve", "--port", "0", "--batch-size", "4", *options]


def program(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed: apt install {name}")
    return path


@contextmanager
def run(command: Sequence[str], probe: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command; yields the process and, with a probe, the URL that it prints, once /readyz returns 200."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = ""
        if probe is not None:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            url = found[0]
            wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        yield process, url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def write_nginx_files(folder: Path, port: int, urls: Sequence[str]) -> None:
    """deploy/nginx/vitrail.conf with the addresses of this test, and a certificate that it signs itself."""
    text = (DEPLOY / "nginx/vitrail.conf").read_text()
    for name, url in zip(("vitrail-a:8000", "vitrail-b:8000"), urls, strict=True):
        assert name in text
        text = text.replace(name, url.removeprefix("http://"))
    text = text.replace("listen 8443", f"listen 127.0.0.1:{port}").replace("/etc/nginx/certificates", str(folder))
    (folder / "vitrail.conf").write_text(text)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, user="user root;" if os.geteuid() == 0 else ""))
    openssl = [
        program("openssl"),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    files = ["-keyout", f"{folder}/vitrail.key", "-out", f"{folder}/vitrail.pem", "-subj", "/CN=vitrail.example.org"]
    subprocess.run([*openssl, *files], check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(condition: Any, seconds: float = 60) -> None:
    """Wait until the condition is true; a server that is not there yet counts as false."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.1)
