"""Real server processes: listening, draining, signals, workers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from serving import photo, wait_until
from small_models import model, small

from vitrail.errors import ConfigError
from vitrail.serve.limits import Limits
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server import ACCEPT_ROUNDS, BACKLOG, DUPLICATE_SIGNAL_S, bind_socket, fit_open_files, url_of
from vitrail.serve.supervisor import _load_quietly

SLOW_SCRIPT = """
import sys, time
from vitrail.engines.engine import TorchEngine
from vitrail.cli import main
quick = TorchEngine.logits
TorchEngine.logits = lambda self, pixels: (time.sleep(0.7), quick(self, pixels))[1]
if __name__ == "__main__":  # workers import this module too
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small"
    model(small()).save(path)
    return path


@contextmanager
def run_command(
    weights: Path, *options: str, slow: bool = False, max_open_files: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `vitrail serve` in a process; yields the process and its URL."""
    script = weights.with_name("slowly.py")
    script.write_text(SLOW_SCRIPT)
    program = [str(script)] if slow else ["-m", "vitrail"]
    command = [sys.executable, *program, "serve", str(weights), "--port", "0", "--batch-size", "4", *options]
    command = ["sh", "-c", f'ulimit -n {max_open_files}; exec "$@"', "sh", *command] if max_open_files else command
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, line + process.stderr.read()
        wait_until(lambda: httpx.get(f"{match[0]}/readyz").status_code == 200)
        yield process, match[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()


def queued_images(url: str) -> float:
    """Images queued or in progress, in all workers."""
    values = re.findall(r"^vitrail_queue_images\{.*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return sum(map(float, values))


def start_request(url: str, responses: list[httpx.Response]) -> threading.Thread:
    def send() -> None:
        responses.append(httpx.post(f"{url}/v1/predict", files={"image": photo()}, timeout=30))

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_open_requests_are_answered_after_a_signal_and_the_exit_status_is_0(weights: Path, sig: signal.Signals) -> None:
    with run_command(weights, slow=True) as (process, url):
        responses: list[httpx.Response] = []
        threads = [start_request(url, responses) for _ in range(3)]
        wait_until(lambda: queued_images(url) == 3)
        process.send_signal(sig)
        ready = httpx.get(f"{url}/readyz")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
        for thread in threads:
            thread.join()
        assert [a.status_code for a in responses] == [200, 200, 200]
        assert process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_to_the_process_group_drains_like_one_to_the_process(weights: Path, workers: str) -> None:
    with run_command(weights, "--workers", workers, slow=True) as (process, url):
        responses: list[httpx.Response] = []
        threads = [start_request(url, responses) for _ in range(4)]
        wait_until(lambda: queued_images(url) == 4)
        process.terminate()  # like `timeout`: first the process, then its group
        os.killpg(process.pid, signal.SIGTERM)
        for worker in worker_pids(process.pid):
            os.kill(worker, signal.SIGTERM)
        ready = httpx.get(f"{url}/readyz")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
        for thread in threads:
            thread.join()
        assert [a.status_code for a in responses] == [200] * 4
        assert process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")
        assert process.stderr is not None
        assert process.stderr.read().splitlines() == [
            "stopping: finishing open requests; press Ctrl-C again to stop immediately"
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("sig", "after"), [(signal.SIGTERM, 0.5), (signal.SIGTERM, 2.5), (signal.SIGINT, 0.5)])
def test_a_signal_to_the_group_while_workers_load_exits_with_status_0(
    weights: Path, sig: signal.Signals, after: float
) -> None:
    command = [sys.executable, "-m", "vitrail", "serve", str(weights), "--port", "0", "--workers", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until(lambda: len(worker_pids(process.pid)) == 2, 60)
        time.sleep(after)
        os.killpg(process.pid, sig)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert not [line for line in stderr.splitlines() if not line.startswith(("stopping", "note"))]


def test_connections_stay_within_the_limit_of_open_files(weights: Path) -> None:
    """256 open files and 400 silent clients: all other requests are answered, and accept() never fails."""
    with run_command(weights, max_open_files=256) as (process, url), ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(400):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(20)
            sock.connect((host, int(port)))
        assert httpx.post(f"{url}/v1/predict", files={"image": photo()}, timeout=20).status_code == 200
        assert httpx.get(f"{url}/static/docs.js", timeout=20).status_code == 200
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Too many open files" not in stderr
    assert "Traceback" not in stderr


@pytest.mark.skipif(os.name != "posix", reason="no limit of open files on this system")
def test_connection_limits_are_reduced_to_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    defaults, rlimits = Limits(), [(1024, 1_048_576)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: rlimits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: rlimits.append(limits))
    assert fit_open_files(defaults) == (defaults, BACKLOG)
    assert defaults.max_connections + BACKLOG < rlimits[1][0] < 1_048_576  # raised only as far as needed
    rlimits[:] = [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]
    assert fit_open_files(defaults) == (defaults, BACKLOG)
    assert len(rlimits) == 1
    rlimits[0] = (512, 512)
    reduced, backlog = fit_open_files(defaults)
    assert 100 < reduced.max_connections < reduced.max_connections + ACCEPT_ROUNDS * backlog < 512
    rlimits[0] = (40, 40)
    with pytest.raises(ConfigError, match="ulimit -n allows 40 open files"):
        fit_open_files(defaults)


def test_an_idle_server_exits_quickly(weights: Path) -> None:
    with run_command(weights) as (process, url), httpx.Client(base_url=url) as client:
        assert client.get("/healthz").status_code == 200  # a connection that is kept open
        start = time.monotonic()
        process.terminate()
        assert process.wait(20) == 0
        assert time.monotonic() - start < 2  # freeing the model would take longer


@pytest.mark.slow
def test_a_dead_worker_is_logged_and_repeated_failures_end_the_server(tmp_path: Path) -> None:
    path = tmp_path / "small"
    model(small()).save(path)
    with run_command(path, "--workers", "2") as (process, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        for file in path.rglob("*"):
            file.unlink()
        worker = worker_pids(process.pid)[0]
        os.kill(worker, signal.SIGKILL)
        assert process.wait(200) == 1
        assert process.stderr is not None
        stderr = process.stderr.read()
    assert f"(process {worker}) was killed by SIGKILL; it is restarted in 1 s" in stderr
    for seconds in (1, 2, 4, 8):
        assert re.search(rf"ended with status 1: .*; another is started in {seconds} s", stderr)
    assert re.search(
        r"^error: 5 workers in a row could not start; the last, worker \d .* exited with status 1: .*small",
        stderr,
        re.M,
    )
    assert "Traceback" not in stderr


def test_a_second_signal_exits_immediately(weights: Path) -> None:
    with run_command(weights, slow=True) as (process, url):
        thread = threading.Thread(target=request_that_fails, args=(url,))
        thread.start()
        wait_until(lambda: queued_images(url) == 1)
        process.terminate()
        time.sleep(DUPLICATE_SIGNAL_S + 0.1)
        start = time.monotonic()
        process.terminate()
        assert process.wait(5) == 128 + signal.SIGTERM
        assert time.monotonic() - start < 0.5
        thread.join()


def request_that_fails(url: str) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{url}/v1/predict", files={"image": photo()}, timeout=30)


@pytest.mark.slow
def test_workers_share_an_address_sum_their_metrics_and_are_replaced(weights: Path) -> None:
    with run_command(weights, "--workers", "2") as (process, url):
        for _ in range(20):
            assert httpx.post(f"{url}/v1/predict", files={"image": photo()}).status_code == 200
        text = httpx.get(f"{url}/metrics").text
        assert (
            'vitrail_requests_total{model="vitrail/cifar10",route="/v1/predict",status="200",version="1"} 20.0' in text
        )
        workers = worker_pids(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        wait_until(lambda: len(worker_pids(process.pid)) == 2 and workers[0] not in worker_pids(process.pid))
        restarted = worker_pids(process.pid)
        os.kill(workers[1], signal.SIGSTOP)  # so that the new worker must respond
        wait_until(lambda: responses(url))
        assert worker_pids(process.pid) == restarted
        os.kill(workers[1], signal.SIGCONT)
        assert httpx.post(f"{url}/v1/predict", files={"image": photo()}).status_code == 200
        process.terminate()
        assert process.wait(30) == 0
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_notes_about_the_model_are_printed_once() -> None:
    command = [sys.executable, "-m", "vitrail", "serve", "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "vitrail/cifar10 at http" in process.stdout.readline()
        process.terminate()
        stderr = process.stderr.read().splitlines()
    assert process.returncode == 0
    expected_notes = [
        "note: no --model was given: using vitrail/cifar10",
        "note: its classes are airplane",
        "stopping: finishing",
    ]
    for note in expected_notes:
        assert len([line for line in stderr if line.startswith(note)]) == 1, stderr
    assert len(stderr) == len(expected_notes)


def test_a_quiet_worker_prints_no_notes_but_raises_errors(capfd: pytest.CaptureFixture[str]) -> None:
    def load() -> ServedModel:
        os.write(2, b"a note\n")
        raise ConfigError("no such model.")

    with pytest.raises(ConfigError, match="no such model"):
        _load_quietly(load)
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"


def responses(url: str) -> bool:
    """Whether a new connection gets a response soon."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def worker_pids(pid: int) -> list[int]:
    """Worker processes, without multiprocessing's resource tracker."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in listed if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]


@pytest.mark.slow
def test_a_model_that_no_worker_can_load_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vitrail", "serve", str(tmp_path), "--port", "0", "--workers", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr


def test_an_address_in_use_is_an_error() -> None:
    with bind_socket("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: .*in use; try another --port"
        ):
            bind_socket("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_does_not_exist_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}, port 0: .*; try --host 127\.0\.0\.1"):
        bind_socket(host, 0)


def test_the_url_of_a_wildcard_address_works_in_a_browser() -> None:
    with bind_socket("0.0.0.0", 0) as sock:
        sock.listen()
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
        socket.create_connection(("127.0.0.1", sock.getsockname()[1])).close()


def test_an_ipv6_address_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        sock = bind_socket("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with sock:
        assert re.fullmatch(r"http://\[::1\]:\d+", url_of(sock))
