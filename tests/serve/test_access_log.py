"""The access log: lines, rotation, and disks that are slow or full."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import need_extra, photo, run_server, served, wait_until  # noqa: F401

from vitrail.errors import ConfigError
from vitrail.serve import access_log
from vitrail.serve.access import AccessConfig
from vitrail.serve.access_log import AccessLog, utc_time

TOKEN = "secret-token-of-the-app"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def read(path: Path, count: int) -> list[dict[str, Any]]:
    """Wait for this many lines, and parse them."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def client(tmp_path: Path, log: Path) -> Iterator[httpx.Client]:
    (tmp_path / "tokens").write_text(f"app: {TOKEN}\n")
    with run_server(served(), access=AccessConfig(tokens=tmp_path / "tokens", log=str(log))) as (client, _):
        yield client


def test_a_line_says_who_asked_for_what_and_how_long_it_took(client: httpx.Client, log: Path) -> None:
    files = [("images", photo(number)) for number in range(3)]
    headers = BEARER | {"x-request-id": "order-66/a", "traceparent": TRACEPARENT}
    response = client.post("/v1/predict?top=1", files=files, headers=headers)
    (line,) = read(log, 1)
    assert response.headers["x-request-id"] == "order-66/a"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    ms, queue_ms, engine_ms = line.pop("ms"), line.pop("queue_ms"), line.pop("engine_ms")
    assert 0 <= queue_ms < ms
    assert 0 < engine_ms < ms
    assert line.pop("bytes_in") > sum(len(photo(number)) for number in range(3))
    assert line == {
        "request_id": "order-66/a",
        "client": "127.0.0.1",
        "token": "app",
        "method": "POST",
        "route": "/v1/predict",
        "status": 200,
        "bytes_out": len(response.content),
        "images": 3,
        "model": "small",
        "version": "1",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    }


def test_errors_explanations_and_unknown_paths_are_logged(client: httpx.Client, log: Path) -> None:
    client.get("/secret-path?secret-query")
    client.get("/v1/model", headers=BEARER | {"traceparent": "nonsense"})
    client.post("/v1/predict", content=b"no image", headers=BEARER | {"content-type": "image/png"})
    client.post("/v1/explain", files={"image": photo()}, headers=BEARER)
    client.head("/docs")
    lines = read(log, 5)
    found = [(line["method"], line["route"], line["status"], line.get("error"), line.get("images")) for line in lines]
    assert found == [
        ("GET", "other", 401, "missing_token", None),
        ("GET", "/v1/model", 200, None, None),
        ("POST", "/v1/predict", 400, "image_unreadable", 1),
        ("POST", "/v1/explain", 200, None, 1),
        ("HEAD", "/docs", 200, None, None),
    ]
    assert lines[3]["engine_ms"] > 0
    assert lines[4]["bytes_out"] == 0
    assert "trace_id" not in lines[1]
    assert "secret" not in log.read_text()


def test_nothing_that_a_client_sends_breaks_a_line(client: httpx.Client, log: Path) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
        sock.sendall(
            b'PROPFIND /%0a{"a":1}\xe2\x80\xa8 HTTP/1.1\r\nhost: here\r\nx-request-id: a"\\\x0bb\r\n'
            b'authorization: Bearer "}\r\nconnection: close\r\n\r\n'
        )
        while sock.recv(65536):
            pass
    with closing(HTTPConnection(client.base_url.host, client.base_url.port, timeout=20)) as connection:
        connection.putrequest("GET", "/v1/model", skip_host=True)
        connection.putheader("host", "here")
        connection.putheader("x-request-id", "x" * 200)
        connection.putheader("authorization", "Bearer \u00ff\u00fe")
        connection.endheaders()
        connection.getresponse().read()
    lines = read(log, 2)
    assert len(lines) == 2
    assert all(len(line["request_id"]) == 32 for line in lines)
    assert log.read_bytes().isascii()


def test_a_request_that_the_protocol_refuses_has_a_line(client: httpx.Client, log: Path) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        head, _, body = sock.recv(65536).partition(b"\r\n\r\n")
    (line,) = read(log, 1)
    assert (line["status"], line["error"], line["client"]) == (400, "bad_request", "127.0.0.1")
    assert json.loads(body)["error"]["request_id"] == line["request_id"]
    assert line["request_id"].encode() in head


def test_a_client_that_disconnects_has_status_499(client: httpx.Client, log: Path) -> None:
    head = b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-type: image/png\r\ncontent-length: 99\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
        sock.sendall(head + f"authorization: Bearer {TOKEN}\r\n\r\nabc".encode())
        time.sleep(0.2)
    (line,) = read(log, 1)
    assert (line["status"], line["bytes_in"]) == (499, 3)


def test_no_line_has_image_content_a_token_or_a_query(client: httpx.Client, log: Path) -> None:
    client.post("/v1/predict?top=2", files={"image": photo()}, headers=BEARER)
    client.post(f"/v1/predict?token={TOKEN}", json={"image": "QUJD"}, headers=BEARER)
    read(log, 2)
    assert not re.search(f"{TOKEN}|QUJD|top|base64", log.read_text())


def test_the_log_is_off_by_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with run_server(served()) as (client, _):
        client.get("/healthz")
    assert not any("access-log" in thread.name for thread in threading.enumerate())
    assert capfd.readouterr().out == ""


# The writer


def test_a_renamed_file_is_opened_again(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "REOPEN_INTERVAL_S", 0.0)
    writer = AccessLog(str(log), on_dropped=pytest.fail)
    writer.write({"line": 1})
    read(log, 1)
    log.rename(log.with_suffix(".1"))
    writer.write({"line": 2})
    assert read(log, 1) == [{"line": 2}]
    log.unlink()
    writer.write({"line": 3})
    writer.close()
    assert read(log, 1) == [{"line": 3}]
    assert read(log.with_suffix(".1"), 1) == [{"line": 1}]


def test_logrotate_rotates_a_log_without_losing_a_line(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of docs/operations.md; create and copytruncate both work."""
    monkeypatch.setattr(access_log, "REOPEN_INTERVAL_S", 0.01)
    writer = AccessLog(str(log), on_dropped=pytest.fail)
    for number in range(2000):
        writer.write({"line": number})
        if number % 500 == 250:
            wait_until(log.exists)
            for old in range(4, 0, -1):
                if log.with_suffix(f".{old}").exists():
                    log.with_suffix(f".{old}").rename(log.with_suffix(f".{old + 1}"))
            log.rename(log.with_suffix(".1"))
            log.touch()
        time.sleep(0.0002)
    writer.close()
    texts = [path.read_text() for path in sorted(log.parent.glob("access.*"), key=lambda p: p.name)]
    numbers = sorted(json.loads(line)["line"] for text in texts for line in text.splitlines())
    assert numbers == list(range(2000))


FLOOD = """
import sys
from vitrail.serve.access_log import AccessLog
dropped = []
writer = AccessLog("-", dropped.append, max_lines=100)
for number in range(20_000):
    writer.write({"line": number, "text": "x" * 100})
print(sum(dropped), file=sys.stderr, flush=True)
sys.stdin.readline()
writer.close()
"""


def test_a_blocked_pipe_blocks_no_caller_and_dropped_lines_are_counted() -> None:
    """All lines are queued or dropped while nobody reads; what is read later is whole and in order."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", FLOOD], text=True, **pipes) as process:
        dropped = int(process.stderr.readline())  # type: ignore[union-attr]
        out, _ = process.communicate("go on\n", timeout=30)
    numbers = [json.loads(line)["line"] for line in out.splitlines()]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + dropped == 20_000
    assert dropped > 15_000


def test_a_full_disk_drops_lines_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    dropped: list[int] = []
    writer = AccessLog("/dev/full", on_dropped=dropped.append)
    for number in range(5):
        writer.write({"line": number})
        wait_until(lambda expected=number + 1: sum(dropped) == expected)
    writer.close()
    messages = [record.message for record in caplog.records]
    assert messages == ["the access log cannot be written: no space left on device"]


LIMITED = """
import resource, signal, sys, time
from vitrail.serve.access_log import AccessLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
dropped = []
writer = AccessLog(sys.argv[1], dropped.append)
for number in range(50):
    writer.write({"line": number, "text": "x" * 50})
    time.sleep(0.002)
time.sleep(0.2)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write({"line": "last"})
writer.close()
print(sum(dropped))
"""


def test_a_line_that_was_torn_by_a_full_disk_does_not_spoil_the_next(log: Path) -> None:
    result = subprocess.run([sys.executable, "-c", LIMITED, str(log)], capture_output=True, text=True, check=True)
    lines = log.read_text().split("\n")
    complete = [line for line in lines if line.endswith("}")]
    assert json.loads(complete[-1]) == {"line": "last"}
    assert [json.loads(line)["line"] for line in complete[:-1]] == list(range(len(complete) - 1))
    assert len(complete) - 1 + int(result.stdout) == 50
    assert result.stderr.count("file too large") <= 1


APPEND = """
import sys
from vitrail.serve.access_log import AccessLog
writer = AccessLog(sys.argv[1], lambda count: sys.exit(f"dropped {count}"))
for number in range(3000):
    writer.write({"process": sys.argv[2], "line": number, "text": "x" * (number % 300)})
writer.close()
"""


@pytest.mark.parametrize("target", ["file", "-"])
def test_processes_append_whole_lines_to_a_file_and_to_a_pipe(log: Path, target: str) -> None:
    name = "-" if target == "-" else str(log)
    with log.open("wb") as file:
        shared = (
            subprocess.Popen(
                [sys.executable, "-c", "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"],
                stdin=subprocess.PIPE,
                stdout=file,
            )
            if target == "-"
            else None
        )
        out = shared.stdin if shared is not None else None
        processes = [
            subprocess.Popen([sys.executable, "-c", APPEND, name, str(number)], stdout=out) for number in range(3)
        ]
        assert [process.wait(60) for process in processes] == [0, 0, 0]
        if shared is not None:
            shared.communicate()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for process in "012":
        assert [line["line"] for line in lines if line["process"] == process] == list(range(3000))


@pytest.mark.parametrize("name", ["missing/access.log", "."])
def test_a_log_that_cannot_be_opened_is_an_error_at_startup(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--access-log .*; try a file in a folder that exists"):
        AccessConfig(log=str(tmp_path / name)).check()


def test_a_fifo_is_refused_because_opening_it_would_wait_for_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="this is not a file"):
        AccessConfig(log=str(tmp_path / "fifo")).check()


def test_a_line_that_is_too_long_is_dropped(log: Path) -> None:
    dropped: list[int] = []
    writer = AccessLog(str(log), dropped.append)
    writer.write({"text": "x" * 5000})
    writer.write({"text": "y", "nothing": None})
    writer.close()
    assert (dropped, read(log, 1)) == ([1], [{"text": "y"}])


def test_times_are_in_utc_with_milliseconds() -> None:
    assert utc_time(0) == "1970-01-01T00:00:00.000Z"
    assert utc_time(1_800_000_000.1239) == "2027-01-15T08:00:00.123Z"
