"""The token, the headers, the pages, and that nothing comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import photo, running, served

from vitrail.errors import ConfigError
from vitrail.serve.security import HEADERS, read_token
from vitrail.serve.web import WEB

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running(served(), token=TOKEN) as (client, _):
        yield client


CLOSED = ["/v1/model", "/v1/positions", "/v1/samples", "/metrics"]
OPEN = ["/", "/docs", "/openapi.json", "/healthz", "/readyz", "/static/docs.js", "/samples/cat.jpg"]


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN])
def test_without_the_token_there_is_no_answer(client: httpx.Client, path: str, given: str | None) -> None:
    answer = client.get(path, headers={} if given is None else {"authorization": given})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "token_wanted"


def test_with_the_token_there_is(client: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert [client.get(path, headers=headers).status_code for path in CLOSED] == [200] * len(CLOSED)
    files = {"image": photo()}
    assert client.post("/v1/predict", files=files).status_code == 401
    assert client.post("/v1/predict", files=files, headers=headers).status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_pages_need_no_token_and_carry_every_header(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_headers_allow_nothing_inline_nothing_from_elsewhere_and_no_frame(client: httpx.Client) -> None:
    for path in ("/", "/v1/model", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "http" not in policy
        assert {"default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"} <= set(policy.split("; "))
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_other_pages_are_not_told_they_may_read_answers(client: httpx.Client) -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    for answer in (client.options("/v1/predict", headers=headers), client.get("/v1/model", headers=headers)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_nothing_says_what_the_server_is_made_of(client: httpx.Client) -> None:
    for path in ("/", "/v1/model", "/nowhere"):
        assert "server" not in client.get(path).headers


def test_a_file_the_browser_has_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/static/docs.js")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = client.get("/static/docs.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/static/docs.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("page", ["docs.html", "docs.js", "docs.css"])
def test_the_page_about_the_api_loads_nothing_from_elsewhere(page: str) -> None:
    text = (WEB / page).read_text()
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", text)


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    assert read_token(str(tmp_path / "token")) == "from-a-file"
    monkeypatch.setenv("A_TOKEN", "from-the-environment")
    assert read_token("A_TOKEN") == "from-the-environment"


@pytest.mark.parametrize("content", ["", "\n", "two words", "ümlaut"])
def test_a_token_that_no_header_can_hold_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="is empty or has spaces"):
        read_token(str(tmp_path / "token"))


def test_a_token_on_the_command_line_is_refused_and_not_repeated_elsewhere() -> None:
    with pytest.raises(ConfigError, match="no such file and no environment variable"):
        read_token("hunter2")
