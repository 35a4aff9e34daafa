"""Tokens with names: the file, rotation in a running server, wrong tokens."""

from __future__ import annotations

import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import need_extra, other_client, photo, run_server, served, wait_until  # noqa: F401

from vitrail.errors import ConfigError
from vitrail.serve.access import FAILURE_LIMIT, AccessConfig
from vitrail.serve.rate_limit import RateLimit
from vitrail.serve.token_store import MAX_FILE_BYTES, MAX_TOKENS, Token, TokenStore, parse_tokens

OLD, NEW, OTHER = "old-token-of-the-app", "new-token-of-the-app", "token#of;another=one"


def sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def replace(path: Path, text: str) -> None:
    """Replace a file atomically, as `mv` does."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def test_a_line_has_a_name_a_token_or_its_digest_and_options() -> None:
    text = f"""
    # tokens of the fleet
    app: {OLD} expires=2027-01-31
    app: sha256:{sha256(NEW).hex().upper()}  rate=20/s:40   # the next one
    batch.job-2: {OTHER} rate=10/m expires=2027-01-31T12:00+02:00
    """
    assert parse_tokens(text.encode(), "file") == (
        Token("app", sha256(OLD), None, datetime(2027, 1, 31, tzinfo=UTC).timestamp()),
        Token("app", sha256(NEW), RateLimit(20, 40), None),
        Token("batch.job-2", sha256(OTHER), RateLimit(1 / 6, 1), datetime(2027, 1, 31, 10, tzinfo=UTC).timestamp()),
    )


INVALID = {
    "": "there is no token",
    "# only a comment\n": "there is no token",
    OLD: "line 1: expected NAME: TOKEN",
    f"app {OLD}": "line 1: expected NAME: TOKEN",
    "app:": "line 1: expected NAME: TOKEN",
    f"-app: {OLD}": "line 1: expected NAME: TOKEN",
    f"{'a' * 65}: {OLD}": "line 1: expected NAME: TOKEN",
    f"a\x1bb: {OLD}": "line 1: expected NAME: TOKEN",
    f"app: {OLD}\n\nb: short": "line 3: expected a token of 16 to 512",
    "app: sha256:abc": "line 1: expected a token of 16 to 512",
    "app: \u00fcmlaut-token-of-the-app": "line 1: expected a token of 16 to 512",
    f"app: {OLD} {NEW}": "line 1: expected rate=50/s or expires",
    f"app: {OLD} rate=5": "line 1: rate 5: expected images per second",
    f"app: {OLD} rate=5/s rate=6/s": "line 1: expected rate=50/s or expires",
    f"app: {OLD} expires=tomorrow": "expected a date such as 2027-01-31",
    f"app: {OLD}\nb: {OLD}": "line 2: this token is on an earlier line",
    "\n".join(f"a: token-number-{number:06}" for number in range(MAX_TOKENS + 1)): "expected at most 1,000",
}


@pytest.mark.parametrize("text", INVALID, ids=range(len(INVALID)))
def test_a_damaged_file_is_rejected_without_repeating_a_token(text: str) -> None:
    with pytest.raises(ConfigError, match=INVALID[text]) as raised:
        parse_tokens(text.encode(), "file")
    assert not {OLD, NEW, "short", "number"} & set(str(raised.value).replace(":", " ").split())


def test_a_file_that_is_binary_large_missing_or_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    (tmp_path / "large").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for name, words in {"binary": "UTF-8", "large": "1,048,576", "missing": "no such file", ".": "directory"}.items():
        with pytest.raises(ConfigError, match=words):
            TokenStore(path=tmp_path / name)


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
TOKENS = st.from_regex(r"[\x21-\x7e]{16,40}", fullmatch=True).filter(lambda text: not text.startswith(("sha256:", "#")))


@given(st.lists(st.tuples(NAMES, TOKENS, st.booleans()), min_size=1, max_size=8, unique_by=lambda entry: entry[1]))
def test_every_token_of_a_file_is_found_with_its_name(entries: list[tuple[str, str, bool]]) -> None:
    lines = [f"{n}: sha256:{sha256(t).hex()}" if hashed else f"{n}: {t}" for n, t, hashed in entries]
    tokens = parse_tokens("\r\n".join(lines).encode(), "file")
    assert [(token.name, token.digest) for token in tokens] == [(name, sha256(text)) for name, text, _ in entries]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_rejected_in_one_sentence(data: bytes) -> None:
    try:
        tokens = parse_tokens(data, "file")
    except ConfigError as error:
        message = str(error)
    else:
        message = "--tokens file" if tokens else "nothing"
    assert message.startswith("--tokens file")


def test_the_single_token_and_those_of_a_file_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"app: {OLD}\n")
    store = TokenStore("x", tmp_path / "tokens")
    found = [store.find(text.encode()) for text in ("x", OLD, NEW, "", OLD[:-1])]
    assert [token and (token.name, token.digest) for token in found] == [
        (None, sha256("x")),
        ("app", sha256(OLD)),
        None,
        None,
        None,
    ]
    assert not TokenStore()


def test_a_changed_file_is_read_again_at_most_once_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, now, errors = tmp_path / "tokens", [0.0], []
    path.write_text(f"app: {OLD}\n")
    store = TokenStore(path=path, on_error=lambda: errors.append(1), clock=lambda: now[0])
    replace(path, f"app: {NEW}\n")
    assert store.find(NEW.encode()) is None
    now[0] = 1.0
    assert store.find(NEW.encode()) is not None
    assert store.find(OLD.encode()) is None
    with caplog.at_level(logging.INFO, "vitrail.serve"):
        caplog.clear()
        for text in ("app: short", "nothing"):
            replace(path, text)
            now[0] += 1
            assert store.find(NEW.encode()) is not None  # the old tokens stay
            now[0] += 1
            store.find(NEW.encode())  # the same damaged file is not reported again
        path.unlink()
        now[0] += 1
        assert store.find(NEW.encode()) is not None
        assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
            f"the tokens are not changed: --tokens {path}, line 1: expected a token of 16 to 512 ASCII characters, or "
            "sha256: and 64 hexadecimal digits; try one made by: openssl rand -hex 32",
            f"the tokens are not changed: --tokens {path}, line 1: expected NAME: TOKEN, with a name of letters, "
            "digits, '.', '_' and '-'.",
            f"the tokens are not changed: --tokens {path}: no such file or directory; try the path of a file.",
        ]
        assert len(errors) == 3
        replace(path, f"app: {OLD}\n")
        now[0] += 1
        assert store.find(OLD.encode()) is not None


def test_tokens_are_rotated_without_a_failed_request(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"app: {OLD}\n")

    def status(token: str) -> int:
        return client.get("/v1/model", headers=bearer(token)).status_code

    with run_server(served(), access=AccessConfig(tokens=path)) as (client, _):
        assert status(OLD) == 200
        replace(path, f"app: {OLD}\napp: {NEW}\n")  # both
        wait_until(lambda: status(OLD) == 200 and status(NEW) == 200)
        replace(path, f"app: {NEW}\n")
        wait_until(lambda: status(NEW) == 200 and status(OLD) == 401)
        text = client.get("/metrics", headers=bearer(NEW)).text
        assert 'vitrail_token_requests_total{token="app"}' in text
        assert 'vitrail_authentication_failures_total{reason="wrong"}' in text
        assert OLD not in text
        assert NEW not in text
        assert client.get("/healthz").status_code == 200


def test_an_expired_token_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"app: {OLD} expires=2020-01-01\napp: {NEW} expires=2999-01-01\n")
    with run_server(served(), access=AccessConfig(tokens=tmp_path / "tokens")) as (client, _):
        response = client.get("/v1/model", headers=bearer(OLD))
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_token")
        assert response.json()["error"]["message"].startswith("the token has expired")
        text = client.get("/metrics", headers=bearer(NEW)).text
        assert 'vitrail_authentication_failures_total{reason="expired"} 1.0' in text


def post(client: httpx.Client, token: str) -> httpx.Response:
    return client.post("/v1/predict", content=photo(), headers={"content-type": "image/jpeg"} | bearer(token))


def test_a_token_is_one_client_wherever_it_comes_from_and_has_its_own_rate(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"app: {OLD} rate=1/h:2\napp: {NEW} rate=1/h:2\nbatch: {OTHER}\n")
    access = AccessConfig(tokens=tmp_path / "tokens", rate_limit=RateLimit.parse("1/h:3"))
    with run_server(served(), access=access) as (client, _), other_client(client) as other:
        assert [post(client, OLD).status_code, post(other, NEW).status_code] == [200, 200]
        refused = post(other, OLD)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert refused.json()["error"]["message"].startswith("the rate limit of this token is 1 image per hour")
        assert [post(client, OTHER).status_code for _ in range(3)] == [200, 200, 200]
        assert post(client, OTHER).status_code == 429


def test_wrong_tokens_are_limited_per_address_and_right_ones_still_pass(
    tmp_path: Path, request_pool: ThreadPoolExecutor
) -> None:
    (tmp_path / "tokens").write_text(f"app: {OLD}\n")
    with run_server(served(), access=AccessConfig(tokens=tmp_path / "tokens")) as (client, _):

        def guess(number: int) -> httpx.Response:
            return client.get("/v1/model", headers=bearer(f"{NEW}{number}"))

        responses = list(request_pool.map(guess, range(FAILURE_LIMIT.burst + 15)))
        refused = [response for response in responses if response.status_code == 429]
        assert {response.status_code for response in responses} == {401, 429}
        assert FAILURE_LIMIT.burst <= len(responses) - len(refused) <= FAILURE_LIMIT.burst + 5
        assert {response.json()["error"]["code"] for response in refused} == {"too_many_failures"}
        assert {response.headers["retry-after"] for response in refused} == {"1"}
        assert client.get("/v1/model", headers=bearer(OLD)).status_code == 200
        with other_client(client) as other:
            assert other.get("/v1/model", headers=bearer(NEW)).status_code == 401
        assert 'reason="limited"' in client.get("/metrics", headers=bearer(OLD)).text
