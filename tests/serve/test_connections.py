"""Limits of connections, over real sockets: slow, silent, not reading, too many."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from fastapi.responses import Response
from serving import photo, run_server, served, wait_until

from vitrail.errors import ConfigError
from vitrail.serve import connections, static_files
from vitrail.serve.limits import Limits

SHORT = Limits(header_timeout=0.4, body_timeout=0.5, max_connections=8)
GET = b"GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n"


@pytest.fixture(scope="module", params=["httptools.HttpToolsProtocol", "h11.H11Protocol"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Client of a server, for each of uvicorn's two protocols."""
    module, _, name = request.param.partition(".")
    protocols = pytest.importorskip(f"uvicorn.protocols.http.{module}_impl")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connections, "AutoHTTPProtocol", getattr(protocols, name))
        with run_server(served(), SHORT) as (client, _):
            yield client


@contextmanager
def connect(client: httpx.Client, address: str = "127.0.0.1", **options: int) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind((address, 0))
        for name, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.settimeout(10)
        sock.connect((client.base_url.host, client.base_url.port))
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """Everything received until the connection is closed."""
    data = b""
    try:
        while chunk := sock.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def test_endless_headers_are_rejected(client: httpx.Client) -> None:
    with connect(client) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: here\r\nx: ")
        sent = 0
        try:
            while sent < 2**22:
                sent += sock.send(bytes(2**14).replace(b"\0", b"a"))
        except OSError:
            pass
        assert sent < 2**22
        response = read_all(sock)
    assert response[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")  # a sending client may miss the response


def test_long_bodies_and_pipelined_requests_do_not_count_as_headers(client: httpx.Client) -> None:
    body = bytes(300_000)
    head = b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-type: image/png\r\ncontent-length: %d\r\n\r\n"
    with connect(client) as sock:
        sock.sendall(head % len(body) + body + GET)
        received = b""
        while b"alive" not in received:
            received += sock.recv(65536)
    assert received.count(b"HTTP/1.1 ") == 2


MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a header without a colon": b"GET /healthz HTTP/1.1\r\nhost: here\r\nnonsense\r\n\r\n",
    "two lengths": b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "a chunk of no length": b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-type: image/png\r\n"
    b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\nconnection: close\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nhost: here\r\nhost: there\r\nconnection: close\r\n\r\n",
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_a_malformed_request_gets_a_json_error(client: httpx.Client, name: str) -> None:
    with connect(client) as sock:
        sock.sendall(MALFORMED[name])
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (error["code"], set(error)) == ("bad_request", {"code", "message", "request_id"})
    assert f"x-request-id: {error['request_id']}".encode() in head.lower()


def test_an_http_1_0_request_needs_no_host(client: httpx.Client) -> None:
    with connect(client) as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")


def test_an_http_1_0_client_gets_a_single_json_response(client: httpx.Client) -> None:
    data = photo()
    with connect(client) as sock:
        head = "POST /v1/explain HTTP/1.0\r\naccept: application/x-ndjson\r\ncontent-type: image/jpeg"
        sock.sendall(f"{head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        head, _, body = read_all(sock).decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert "transfer-encoding" not in head.lower()
    assert json.loads(body)["model"] == "small"


def test_a_malformed_request_does_not_affect_the_one_before_it(client: httpx.Client) -> None:
    with connect(client) as sock:
        sock.sendall(GET + b"hello\r\n\r\n")
        response = read_all(sock)
    assert response.startswith(b"HTTP/1.1 200 OK")
    assert response.count(b"HTTP/1.1 200 OK") == 1


def test_headers_that_are_too_long_are_answered_431(client: httpx.Client) -> None:
    with connect(client) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: here\r\nx: " + b"a" * (connections.MAX_HEADER_BYTES + 1000))
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def send_slowly(sock: socket.socket, data: bytes) -> float:
    """Send a byte every 50 ms until there is a response or the connection is closed; returns the seconds."""
    start = time.monotonic()
    sock.setblocking(False)
    for i in range(200):
        try:
            sock.send(data[i % len(data) :][:1])
            sock.recv(1, socket.MSG_PEEK)
            break
        except BlockingIOError:
            time.sleep(0.05)
        except (BrokenPipeError, ConnectionResetError):
            break
    sock.settimeout(10)
    return time.monotonic() - start


def test_headers_sent_byte_by_byte_are_answered_408_and_the_connection_closed(client: httpx.Client) -> None:
    with connect(client) as sock:
        seconds = send_slowly(sock, b"GET /healthz HTTP/1.1\r\nx-slow: " + 1000 * b"a")
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert 0.3 < seconds < 3
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == (
        "request_timeout",
        "the headers did not arrive within 0.4 seconds.",
    )


def test_a_silent_connection_is_closed_without_a_response(client: httpx.Client) -> None:
    with connect(client) as sock:
        start = time.monotonic()
        assert read_all(sock) == b""
        assert 0.3 < time.monotonic() - start < 3


def test_a_second_request_has_the_same_header_timeout(client: httpx.Client) -> None:
    with connect(client) as sock:
        sock.sendall(GET)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert 0.3 < send_slowly(sock, b"GET /healthz HTTP/1.1\r\nx-slow: " + 1000 * b"a") < 3
        assert read_all(sock) == b""


def test_the_rest_of_a_rejected_body_does_not_keep_the_connection_open(client: httpx.Client) -> None:
    with connect(client) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nhost: here\r\ncontent-length: 100000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 404")
        assert 0.3 < send_slowly(sock, b"a") < 3


def test_a_connection_may_be_idle_longer_between_requests(client: httpx.Client) -> None:
    with connect(client) as sock:
        for _ in range(3):
            sock.sendall(GET)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")
            time.sleep(0.6)


def test_split_headers_and_a_slow_body_within_the_timeouts_are_accepted(client: httpx.Client) -> None:
    data = photo()
    head = b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-type: image/jpeg\r\n"
    with connect(client) as sock:
        sock.sendall(head)
        time.sleep(0.2)
        sock.sendall(b"content-length: %d\r\n\r\n" % len(data) + data[:100])
        time.sleep(0.35)  # in total longer than the header timeout
        sock.sendall(data[100:])
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_stops_reading_is_disconnected(client: httpx.Client) -> None:
    with connect(client, SO_RCVBUF=4096) as sock:
        wait_until(lambda: not is_accepted(sock, 20 * b"GET /openapi.json HTTP/1.1\r\nhost: here\r\n\r\n"))
    assert client.get("/healthz").status_code == 200


def test_a_client_that_reads_slowly_gets_its_complete_response(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"x" * 3_000_000
    monkeypatch.setattr(static_files, "file_response", lambda request, name: Response(body))
    with connect(client, SO_RCVBUF=2**16) as sock:
        sock.sendall(GET.replace(b"/healthz", b"/static/long").replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        start, received, slow_seconds = time.monotonic(), b"", 1.6  # three times the read timeout
        while chunk := sock.recv(2**14):
            received += chunk
            if time.monotonic() < start + slow_seconds:
                time.sleep(0.03)
    assert time.monotonic() - start > slow_seconds
    assert received.endswith(b"\r\n\r\n" + body)


def is_accepted(sock: socket.socket, data: bytes) -> bool:
    sock.settimeout(0.1)
    try:
        sock.sendall(data)
    except TimeoutError:  # the server no longer reads
        return True
    except (BrokenPipeError, ConnectionResetError):
        return False
    time.sleep(0.05)
    return True


def test_a_few_pipelined_requests_are_answered_in_order(client: httpx.Client) -> None:
    with connect(client) as sock:
        sock.sendall(10 * GET + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert read_all(sock).count(b"HTTP/1.1 200 OK") == 11


def test_thousands_of_pipelined_requests_are_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = pytest.importorskip("uvicorn.protocols.http.httptools_impl")  # h11 reads only one request ahead
    monkeypatch.setattr(connections, "AutoHTTPProtocol", tools.HttpToolsProtocol)
    with run_server(served(), SHORT) as (client, _):
        with connect(client) as sock:
            sock.sendall(3000 * GET)
            assert 1 <= read_all(sock).count(b"HTTP/1.1 200 OK") < 100
        assert client.get("/healthz").status_code == 200


def test_too_many_connections_close_the_longest_idle_one(client: httpx.Client) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(connect(client))
        first.sendall(GET)
        assert first.recv(4096).startswith(b"HTTP/1.1 200 OK")
        for _ in range(12):
            sock = stack.enter_context(connect(client))
            sock.sendall(GET)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert read_all(first) == b""  # although the keep-alive timeout is 75 s
        sock.sendall(GET)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_a_connection_is_answered_503_if_all_are_busy() -> None:
    served_model = served()
    with run_server(served_model, Limits(max_connections=3)) as (client, service), ExitStack() as stack:
        client.get("/healthz", headers={"connection": "close"})
        served_model.engine.go.clear()
        data = photo()
        head = b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-type: image/jpeg\r\ncontent-length: %d\r\n\r\n"
        busy = [stack.enter_context(connect(client)) for _ in range(3)]
        for sock in busy:
            sock.sendall(head % len(data) + data)
        wait_until(lambda: service.default.batcher.image_quota.used == 3)
        with connect(client, "127.0.0.2") as another:
            response_head, _, body = read_all(another).partition(b"\r\n\r\n")
        assert response_head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"retry-after: 1" in response_head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        served_model.engine.go.set()
        assert all(sock.recv(4096).startswith(b"HTTP/1.1 200 OK") for sock in busy)


def test_one_client_cannot_have_all_connections(client: httpx.Client) -> None:
    data = photo()
    head = b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-type: image/jpeg\r\ncontent-length: %d\r\n\r\n"
    with ExitStack() as stack:
        other = stack.enter_context(connect(client, "127.0.0.3"))
        other.sendall(GET)
        assert other.recv(4096).startswith(b"HTTP/1.1 200 OK")
        busy = [stack.enter_context(connect(client, "127.0.0.2")) for _ in range(7)]
        for sock in busy:
            sock.sendall(head % len(data))
            time.sleep(0.01)
        with connect(client, "127.0.0.2") as another:
            refused, _, body = read_all(another).partition(b"\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"retry-after: 1" in refused
        assert json.loads(body)["error"]["message"].startswith("7 connections are open for your address, at most")
        other.sendall(GET)
        assert other.recv(4096).startswith(b"HTTP/1.1 200 OK")
        busy[0].sendall(data)
        assert busy[0].recv(4096).startswith(b"HTTP/1.1 200 OK")
        another = stack.enter_context(connect(client, "127.0.0.2"))  # closes the idle connection of that client
        another.sendall(GET)
        assert another.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert read_all(busy[0]) == b""
        other.sendall(GET)
        assert other.recv(4096).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("name", ["header_timeout", "max_connections"])
def test_a_limit_of_zero_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: 0})
