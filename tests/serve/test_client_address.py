"""The address of a client behind proxies: nothing that a client sends can change it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from ipaddress import ip_address, ip_network
from pathlib import Path

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from serving import QUICK, need_extra, other_client, photo, run_server, served, wait_until  # noqa: F401

from vitrail.errors import ConfigError
from vitrail.serve.access import AccessConfig
from vitrail.serve.app import create_app
from vitrail.serve.client_address import TrustedProxies, address_key, parse_forwarded, parse_node
from vitrail.serve.limits import Limits
from vitrail.serve.quota import client_key
from vitrail.serve.server import uvicorn_config

PROXIES = TrustedProxies.parse(["10.0.0.0/8", "2001:db8:1::/48", "unix"])
JPEG = {"content-type": "image/jpeg"}


def client_of(peer: str, *headers: tuple[str, str]) -> str:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return PROXIES.client_host({"client": (peer, 1) if peer else None, "headers": raw})


XFF, FORWARDED = "X-Forwarded-For", "Forwarded"


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("192.0.2.1", [(XFF, "198.51.100.9")], "192.0.2.1"),  # not a trusted proxy
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [(XFF, "198.51.100.9")], "198.51.100.9"),
        ("", [(XFF, "198.51.100.9")], "198.51.100.9"),  # a Unix socket
        ("10.0.0.1", [(XFF, "6.6.6.6, 198.51.100.9")], "198.51.100.9"),
        ("10.0.0.1", [(XFF, "6.6.6.6"), (XFF, "198.51.100.9, 10.1.1.1")], "198.51.100.9"),  # two lines, two proxies
        ("10.0.0.1", [(XFF, "10.2.2.2, 10.1.1.1")], "10.2.2.2"),  # all trusted
        ("10.0.0.1", [(XFF, "6.6.6.6, unknown, 10.1.1.1")], "10.1.1.1"),  # unreadable: the proxy that added it
        ("10.0.0.1", [(XFF, "6.6.6.6,")], "10.0.0.1"),
        ("10.0.0.1", [(XFF, "198.51.100.9:4711")], "198.51.100.9"),
        ("10.0.0.1", [(XFF, "[2001:db8::7]:4711")], "2001:db8::7"),
        ("10.0.0.1", [(XFF, "2001:db8::7")], "2001:db8::7"),
        ("10.0.0.1", [(XFF, "::ffff:198.51.100.9")], "198.51.100.9"),
        ("::ffff:10.0.0.1", [(XFF, "198.51.100.9")], "198.51.100.9"),
        ("10.0.0.1", [(FORWARDED, "for=6.6.6.6, for=198.51.100.9;proto=https;by=10.0.0.1")], "198.51.100.9"),
        ("10.0.0.1", [(FORWARDED, 'proto=https;For="[2001:db8:2::7]:4711"')], "2001:db8:2::7"),
        ("10.0.0.1", [(FORWARDED, "for=198.51.100.9, for=_hidden, for=10.1.1.1")], "10.1.1.1"),
        ("10.0.0.1", [(FORWARDED, 'for=6.6.6.6;by=", for="[2001:db8:2::7]"')], "10.0.0.1"),  # an unbalanced quote
        ("10.0.0.1", [(FORWARDED, 'for="x, for=198.51.100.9')], "10.0.0.1"),
        ("10.0.0.1", [(FORWARDED, "for=6.6.6.6;for=198.51.100.9")], "10.0.0.1"),  # twice in one element
        ("10.0.0.1", [(FORWARDED, "for=6.6.6.6"), (XFF, "198.51.100.9")], "10.0.0.1"),  # one is the client's own
        ("10.0.0.1", [(FORWARDED, "for=198.51.100.9"), (XFF, "6.6.6.6, 198.51.100.9")], "198.51.100.9"),
    ],
)
def test_the_client_is_the_rightmost_address_that_no_trusted_proxy_has(
    peer: str, headers: list[tuple[str, str]], client: str
) -> None:
    assert client_of(peer, *headers) == client


ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
ANYTHING = st.text(st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n"), max_size=60)
JUNK = st.one_of(ANYTHING, st.lists(ADDRESSES, max_size=4).map(", ".join))


@given(JUNK, ADDRESSES)
def test_nothing_before_the_address_that_the_proxy_appends_matters(sent: str, address: str) -> None:
    if parse_node(address) in ip_network("10.0.0.0/8") or PROXIES.trusts(address):
        return
    expected = str(parse_node(address))
    assert client_of("10.0.0.1", (XFF, f"{sent}, {address}")) == expected
    assert client_of("10.0.0.1", (XFF, sent), (XFF, address)) == expected


@given(ANYTHING, st.sampled_from(["for={}", "for={};proto=https", 'proto=http;for={};by="_p"', 'for={};host="a.b:1"']))
def test_what_a_client_sends_in_forwarded_never_becomes_its_address(sent: str, form: str) -> None:
    """At worst the proxy's address counts, never one that the client has chosen."""
    assert client_of("10.0.0.1", (FORWARDED, f"{sent}, {form.format('198.51.100.9')}")) in ("198.51.100.9", "10.0.0.1")
    quoted = form.format('"[2001:db8:2::7]:80"')
    assert client_of("10.0.0.1", (FORWARDED, f"{sent}, {quoted}")) in ("2001:db8:2::7", "10.0.0.1")


@given(st.lists(st.one_of(ADDRESSES.map(ip_address), st.none()), min_size=1, max_size=5))
def test_forwarded_elements_are_read_back_as_they_were_written(hosts: list) -> None:
    def write(host: object) -> str:
        if host is None:
            return "proto=http;for=unknown"
        return f'for="[{host}]:80"' if ":" in str(host) else f"for={host}"

    found = parse_forwarded(" ,\t".join(map(write, hosts)))
    unmapped = [getattr(host, "ipv4_mapped", None) or host for host in hosts]
    assert [parse_node(text) for text in found] == unmapped


@pytest.mark.parametrize(
    "text", ["", "999.1.1.1", "1.2.3", "1.2.3.4:", "1.2.3.4:123456", "[::1", "::1]", "unknown", "_x", "a", "1.2.3.4 5"]
)
def test_an_entry_that_is_no_address_is_not_read_as_one(text: str) -> None:
    assert parse_node(text) is None


@pytest.mark.parametrize("value", ["", "10.0.0.1/8", "10.0.0.0/33", "localhost", "*"])
def test_a_proxy_that_is_no_network_is_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match="expected an address or a network"):
        TrustedProxies.parse([value])


def test_the_key_of_a_client_is_in_the_scope_or_its_address() -> None:
    assert client_key({"client": ("10.0.0.1", 1), "state": {"client": "token app"}}) == "token app"
    assert client_key({"client": ("10.0.0.1", 1), "state": {}}) == "10.0.0.1"
    assert address_key("2001:db8:1:2:3::1") == "2001:db8:1:2::/64"


def test_clients_behind_a_trusted_proxy_have_quotas_of_their_own() -> None:
    """The same connection counts as another client for every address that the proxy forwards."""
    seen: list[str] = []
    access = AccessConfig(proxies=TrustedProxies.parse(["127.0.0.1"]))
    with run_server(served(), access=access) as (client, service):
        acquire = service.default.batcher.image_quota.acquire
        service.default.batcher.image_quota.acquire = lambda key, *rest: (seen.append(key), acquire(key, *rest))[1]
        for address in ("198.51.100.1", "198.51.100.2, 127.0.0.1", "2001:db8::1"):
            headers = JPEG | {"x-forwarded-for": f"6.6.6.6, {address}"}
            assert client.post("/v1/predict", content=photo(), headers=headers).status_code == 200
        with other_client(client) as other:  # from 127.0.0.2, which is not trusted
            headers = JPEG | {"x-forwarded-for": "198.51.100.1"}
            assert other.post("/v1/predict", content=photo(), headers=headers).status_code == 200
    assert seen == ["198.51.100.1", "198.51.100.2", "2001:db8::/64", "127.0.0.2"]


def test_a_proxy_at_a_unix_socket_is_trusted_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    log = tmp_path / "log"
    access = AccessConfig(proxies=TrustedProxies.parse(["unix"]), log=str(log))
    server = uvicorn.Server(uvicorn_config(create_app(served(), batching=QUICK, access_config=access), uds=str(path)))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            client.get("/healthz", headers={"x-forwarded-for": "198.51.100.7"})
            client.get("/healthz")
    finally:
        server.should_exit = True
        thread.join(20)
    lines = log.read_text().splitlines()
    assert '"client": "198.51.100.7"' in lines[0]
    assert '"client": "unix"' in lines[1]


def test_the_connections_of_a_trusted_proxy_have_no_limit_per_client() -> None:
    with run_server(served(), Limits(max_connections=8), access=AccessConfig(proxies=PROXIES)) as (client, _):
        assert _open_connections(client, 8) < 8  # seven eighths
    trusting = AccessConfig(proxies=TrustedProxies.parse(["127.0.0.1"]))
    with run_server(served(), Limits(max_connections=8), access=trusting) as (client, _):
        assert _open_connections(client, 8) == 8


def _open_connections(client: httpx.Client, count: int) -> int:
    """Open connections with a request in progress in each; returns how many of them are not refused."""
    head = b"POST /v1/predict HTTP/1.1\r\nhost: here\r\ncontent-type: image/png\r\ncontent-length: 9\r\n\r\n"
    sockets = []
    try:
        for _ in range(count):
            sockets.append(socket.create_connection((client.base_url.host, client.base_url.port)))
            sockets[-1].sendall(head)
        refused = 0
        time.sleep(0.5)
        for sock in sockets:
            with contextlib.suppress(BlockingIOError):
                sock.setblocking(False)
                refused += b" 429 " in sock.recv(1000)
        return count - refused
    finally:
        for sock in sockets:
            sock.close()
