"""The tokens of clients, with names: a file that is read again when it changes.

One token per line, `NAME: TOKEN` or `NAME: sha256:DIGEST`, with options after it:

    # comment
    mobile-app: 5f0c...            expires=2027-01-31 rate=20/s
    mobile-app: sha256:9f86d0...   # the next one; both are accepted until the other line is removed
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vitrail.errors import ConfigError
from vitrail.serve.rate_limit import RateLimit

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PLAIN = re.compile(r"[\x21-\x7e]{16,512}")
DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
COMMENT = re.compile(r"(?:^|\s)#")
"""Start of a comment; within a token, # is a character like others."""
MAX_TOKENS = 1000
"""Lines with a token; every request is compared with all of them, in about 0.2 µs each."""
MAX_FILE_BYTES = 2**20
CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at whether the file has changed."""

log = logging.getLogger("vitrail.serve")


@dataclass(frozen=True)
class Token:
    """A token that the server accepts."""

    name: str | None
    """None for the token of --token."""
    digest: bytes
    """SHA-256 of the token."""
    rate: RateLimit | None = None
    """Its own rate limit, instead of the general one."""
    expires: float | None = None
    """Seconds since 1970."""


class TokenStore:
    """The accepted tokens: the one of --token, and those of a file."""

    def __init__(
        self,
        single: str | None = None,
        path: Path | None = None,
        on_error: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_error: called when a changed file cannot be used."""
        self._single = () if single is None else (Token(None, _digest(single.encode())),)
        self._path, self._on_error, self._clock = path, on_error, clock
        self._signature = None if path is None else _signature(path)
        self._tokens = self._single + (() if path is None else read_tokens(path))
        self._checked_at = clock()

    def __bool__(self) -> bool:
        """Whether a token is needed at all."""
        return bool(self._single) or self._path is not None

    def find(self, given: bytes) -> Token | None:
        """The token; None if it is unknown. The time does not depend on how much of it is right."""
        self._reload()
        digest, found = _digest(given), None
        for token in self._tokens:
            if hmac.compare_digest(digest, token.digest):
                found = token
        return found

    def _reload(self) -> None:
        """Read the file again if it has changed; a damaged one leaves the tokens as they are."""
        if self._path is None or self._clock() < self._checked_at + CHECK_INTERVAL_S:
            return
        self._checked_at = self._clock()
        signature = _signature(self._path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            tokens = read_tokens(self._path)
        except ConfigError as error:
            log.error("the tokens are not changed: %s", error)
            self._on_error()
            return
        self._tokens = self._single + tokens
        log.warning("%s was read again: %d tokens", self._path, len(tokens))


def read_tokens(path: Path) -> tuple[Token, ...]:
    """The tokens of a file; ConfigError names the first line that is wrong, without its content."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"--tokens {path}: {(error.strerror or str(error)).lower()}; try the path of a file."
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--tokens {path}: more than {MAX_FILE_BYTES:,} bytes, expected one token per line.")
    return parse_tokens(data, str(path))


def parse_tokens(data: bytes, where: str) -> tuple[Token, ...]:
    """The tokens in the lines of a file."""
    tokens: dict[bytes, Token] = {}
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"--tokens {where}: this is not text in UTF-8.") from None
    for number, line in enumerate(lines, 1):
        words = COMMENT.split(line, maxsplit=1)[0].split()
        if not words:
            continue
        token = _parse_line(words, f"--tokens {where}, line {number}")
        other = tokens.setdefault(token.digest, token)
        if other is not token:
            raise ConfigError(f"--tokens {where}, line {number}: this token is on an earlier line, too; remove one.")
    if not tokens:
        raise ConfigError(f"--tokens {where}: there is no token; expected lines such as NAME: TOKEN.")
    if len(tokens) > MAX_TOKENS:
        raise ConfigError(f"--tokens {where}: got {len(tokens):,} tokens, expected at most {MAX_TOKENS:,}.")
    return tuple(tokens.values())


def _parse_line(words: list[str], where: str) -> Token:
    name = words[0].removesuffix(":")
    if len(words) < 2 or not words[0].endswith(":") or not NAME.fullmatch(name):
        raise ConfigError(f"{where}: expected NAME: TOKEN, with a name of letters, digits, '.', '_' and '-'.")
    hashed = DIGEST.fullmatch(words[1])
    if not hashed and (words[1].startswith("sha256:") or not PLAIN.fullmatch(words[1])):
        raise ConfigError(
            f"{where}: expected a token of 16 to 512 ASCII characters, or sha256: and 64 hexadecimal digits; "
            "try one made by: openssl rand -hex 32"
        )
    digest = bytes.fromhex(hashed[1]) if hashed else _digest(words[1].encode())
    rate, expires = None, None
    for word in words[2:]:
        key, _, value = word.partition("=")
        if key == "rate" and rate is None:
            rate = RateLimit.parse(value, f"{where}: rate")
        elif key == "expires" and expires is None:
            expires = _parse_time(value, where)
        else:
            raise ConfigError(f"{where}: expected rate=50/s or expires=2027-01-31 after the token, each at most once.")
    return Token(name, digest, rate, expires)


def _parse_time(text: str, where: str) -> float:
    """A date or time of ISO 8601 in seconds since 1970; without a time zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{where}: expires={text[:40]}: expected a date such as 2027-01-31, or 2027-01-31T12:00Z."
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _signature(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is replaced or written; None if it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
