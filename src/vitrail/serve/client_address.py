"""The address of a client, also behind proxies, from X-Forwarded-For or Forwarded (RFC 7239).

Both headers are lists to which each proxy appends the address it received the request from. Only what trusted proxies
appended can be believed, so the list is read from its end: the first address that is not a trusted proxy's is the
client's, and whatever stands before it was sent by the client itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import Scope

from vitrail.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
PAIR = re.compile(rf'({TOKEN})=(?:({TOKEN})|"((?:[^"\\]|\\.)*)")')
ELEMENT_END = re.compile(r"[ \t]*,[ \t]*")
NODE = re.compile(r"(?:(\d{1,3}(?:\.\d{1,3}){3})|\[([0-9A-Fa-f:.]{2,45})\])(?::\d{1,5})?|([0-9A-Fa-f:.]{2,45})")
"""An address, with a port if it is IPv4 or in brackets."""
UNIX = "unix"


@dataclass(frozen=True)
class TrustedProxies:
    """Networks of proxies whose forwarding headers are believed; `unix` stands for a Unix socket."""

    networks: tuple[Network, ...] = ()
    unix: bool = False

    @staticmethod
    def parse(values: Sequence[str]) -> TrustedProxies:
        networks = []
        for value in values:
            try:
                networks += [] if value == UNIX else [ipaddress.ip_network(value)]
            except ValueError as error:
                message = f"--trusted-proxy {value}: expected an address or a network such as 10.0.0.0/8, or unix"
                raise ConfigError(f"{message}; {error}.") from None
        return TrustedProxies(tuple(networks), UNIX in values)

    def __bool__(self) -> bool:
        return bool(self.networks) or self.unix

    def trusts(self, host: str) -> bool:
        """Whether this is the address of a trusted proxy; an empty one is a Unix socket's."""
        if not host:
            return self.unix
        address = parse_address(host)
        return address is not None and any(address in network for network in self.networks)

    def client_host(self, scope: Scope) -> str:
        """Address of the client: of the connection, or the one that trusted proxies forward.

        If a proxy passes on two headers that disagree, one of them comes from the client; then the proxy's address
        counts.
        """
        peer = (scope.get("client") or ("",))[0] or ""
        if not self or not self.trusts(peer):
            return peer
        headers: dict[bytes, list[str]] = {b"x-forwarded-for": [], b"forwarded": []}
        for name, value in scope["headers"]:
            if name in headers:
                headers[name].append(value.decode("latin-1"))
        found = set()
        if headers[b"x-forwarded-for"]:
            found.add(self._rightmost(peer, _reversed_list(",".join(headers[b"x-forwarded-for"]))))
        if headers[b"forwarded"]:
            found.add(self._rightmost(peer, parse_forwarded(", ".join(headers[b"forwarded"]))[::-1]))
        return found.pop() if len(found) == 1 else peer

    def _rightmost(self, peer: str, entries: Iterator[str] | Sequence[str]) -> str:
        """First entry that is not a trusted proxy; before an unreadable one, the proxy that added it."""
        last = peer
        for entry in entries:
            address = parse_node(entry)
            if address is None:
                return last
            last = str(address)
            if not self.trusts(last):
                return last
        return last


def _reversed_list(text: str) -> Iterator[str]:
    """The elements of a comma-separated list, from the last; the client's part of a long list is never split."""
    while text:
        text, _, entry = text.rpartition(",")
        yield entry


def parse_forwarded(text: str) -> list[str]:
    """The `for` value of each element of a Forwarded header; empty where there is none, or if it is malformed."""
    hosts: list[str] = []
    position, given = 0, dict[str, str]()
    text = text.strip(" \t")
    while True:
        pair = PAIR.match(text, position)
        if pair is None or pair[1].lower() in given:
            return []
        given[pair[1].lower()] = pair[2] if pair[2] is not None else re.sub(r"\\(.)", r"\1", pair[3])
        position = pair.end()
        if text[position : position + 1] == ";":
            position += 1
            continue
        hosts.append(given.get("for", ""))
        given = {}
        end = ELEMENT_END.match(text, position)
        if end is None:
            return hosts if position == len(text) else []
        position = end.end()


def parse_node(text: str) -> Address | None:
    """The address of an entry such as 192.0.2.1:80 or [2001:db8::1]; None if it is hidden or malformed."""
    match = NODE.fullmatch(text.strip(" \t"))
    return parse_address(match[1] or match[2] or match[3]) if match else None


@lru_cache(maxsize=4096)
def parse_address(host: str) -> Address | None:
    """An IP address, without zone; IPv4 addresses in IPv6 become IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(maxsize=4096)
def address_key(host: str) -> str:
    """Identifies a client by its IPv4 address or its IPv6 /64 network; a Unix socket by its name."""
    address = parse_address(host)
    if address is None:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
