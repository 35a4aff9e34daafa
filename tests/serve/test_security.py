"""Token, host and origin checks, security headers, static files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from serving import photo, run_server, served

from vitrail.errors import ConfigError
from vitrail.serve.app import create_app
from vitrail.serve.security import SECURITY_HEADERS, read_token
from vitrail.serve.static_files import WEB_DIR

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with run_server(served(), token=TOKEN) as (client, _):
        yield client


PROTECTED = ["/v1/models", "/v1/model", "/v1/positions", "/v1/samples", "/metrics", "/openapi.json"]
PUBLIC = ["/", "/docs", "/healthz", "/readyz", "/static/docs.js", "/samples/cat.jpg"]
PROBES = ["/v2/health/live", "/v2/health/ready", "/ping"]
"""Public routes of the protocols of other servers."""


def test_every_route_is_public_or_needs_a_token() -> None:
    """A new route must be added to one of the lists; it needs the token unless it is listed as public."""
    app = create_app(served(), token=TOKEN)
    routes = {getattr(route, "path", "") for route in app.routes}
    folders = {f"/{path.split('/')[1]}/" for path in PUBLIC if path.count("/") > 1}
    public = {path for path in routes if path in PUBLIC or path.startswith(tuple(folders))}
    posts = {"/v1/predict", "/v1/embed", "/v1/explain", "/v1/preprocess", "/v1/embeddings", "/invocations"}
    model = "/v2/models/{name:path}"
    models = {f"{one}{end}" for one in (model, f"{model}/versions/{{version}}") for end in ("", "/ready", "/infer")}
    assert routes - public == {*PROTECTED, *posts, *PROBES, *models, "/v2", "/v2/repository/index"}


@pytest.mark.parametrize("path", PROBES)
def test_probes_need_no_token(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v2", "/v2/models/small", "/v2/models/small/ready", "/v2/health", "/ping/"])
def test_other_routes_of_the_protocols_need_the_token(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.post("/v2/models/small/infer").status_code == 401
    assert client.post("/v2/repository/index").status_code == 401
    assert client.post("/invocations").status_code == 401


@pytest.mark.parametrize("path", ["/v1/predict", "/nowhere", "/openapi.json/", "//v1/model", "/static", "/docs/"])
def test_every_path_that_is_not_public_needs_the_token(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code in (404, 405)


FILE_NAMES = {
    "long": "a" * 4000,
    "long parts": "/".join(["a" * 300] * 10),
    "deep": "a/" * 2000,
    "nul": "a%00.js",
    "above": "../static_files.py",
    "escaped above": "%2e%2e%2fweb.py",
    "absolute": "/etc/passwd",
    "a folder": "samples",
    "not UTF-8": "%ff%fe",
    "surrogate": "%ed%a0%80",
    "emoji": "%F0%9F%98%80" * 100,
    "nothing": "",
    "stroke": "docs.js/",
}


def get(client: httpx.Client, target: str) -> tuple[int, bytes]:
    """GET a path without normalizing it."""
    with closing(HTTPConnection(client.base_url.host, client.base_url.port, timeout=20)) as connection:
        connection.request("GET", target)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize("folder", ["/static/", "/samples/"])
@pytest.mark.parametrize("name", sorted(FILE_NAMES))
def test_an_unusual_file_name_is_answered_404(client: httpx.Client, folder: str, name: str) -> None:
    status, body = get(client, folder + FILE_NAMES[name])
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")


def test_a_long_query_string_is_accepted_up_to_the_header_limit(client: httpx.Client) -> None:
    assert get(client, "/static/docs.js?" + "a" * 20_000)[0] == 200
    assert get(client, "/static/docs.js?" + "a" * 100_000)[0] == 431


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN]
)
def test_without_the_token_requests_are_rejected(client: httpx.Client, path: str, authorization: str | None) -> None:
    response = client.get(path, headers={} if authorization is None else {"authorization": authorization})
    assert response.status_code == 401
    is_wrong = authorization in ("Bearer wrong", f"Bearer {TOKEN}x")  # not missing
    assert response.headers["www-authenticate"] == ('Bearer error="invalid_token"' if is_wrong else "Bearer")
    assert response.json()["error"]["code"] == ("invalid_token" if is_wrong else "missing_token")
    assert ("the token is wrong" if is_wrong else "a token is required") in response.json()["error"]["message"]


def test_with_the_token_requests_are_answered(client: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert [client.get(path, headers=headers).status_code for path in PROTECTED] == [200] * len(PROTECTED)
    files = {"image": photo()}
    assert client.post("/v1/predict", files=files).status_code == 401
    assert client.post("/v1/predict", files=files, headers=headers).status_code == 200
    lower = {"authorization": f"bearer  {TOKEN}"}  # schemes are case-insensitive
    assert client.get("/v1/model", headers=lower).status_code == 200


def test_a_wrong_token_is_counted_for_its_route(client: httpx.Client) -> None:
    def count() -> float:
        text = client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
        name = 'vitrail_requests_total{model="",route="/v1/embed",status="401",version=""}'
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    before = count()
    assert client.post("/v1/embed").status_code == 401
    assert client.get("/v1/embed").status_code == 401
    assert count() == before + 2


@pytest.fixture(scope="module")
def restricted() -> Iterator[httpx.Client]:
    with run_server(served(), hosts=("vitrail.example.org",)) as (client, _):
        yield client


ACCEPTED_HOSTS = [
    "localhost",
    "localhost:8000",
    "LOCALHOST:1",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.1.2.3:9",
    "[::1]",
    "[::1]:8000",
]
ACCEPTED_HOSTS += ["vitrail.example.org", "Vitrail.Example.org:443", "localhost."]
REJECTED_HOSTS = [
    "evil.example.com",
    "127.0.0.1.evil.example.com",
    "localhost.evil.example",
    "evil.example:127",
    "10.0.0.1",
    "",
]
REJECTED_HOSTS += ["[::2]", "localhost@evil.example", "127.0.0.1:80:90"]


@pytest.mark.parametrize("path", ["/", "/v1/model", "/healthz"])
def test_only_accepted_host_names_are_answered(restricted: httpx.Client, path: str) -> None:
    for host in ACCEPTED_HOSTS:
        assert restricted.get(path, headers={"host": host}).status_code == 200, host
    for host in REJECTED_HOSTS:
        response = restricted.get(path, headers={"host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (421, "wrong_host"), host
        assert "--allow-host" in response.json()["error"]["message"]


def test_without_accepted_hosts_every_name_is_accepted() -> None:
    with run_server(served()) as (client, _):
        assert client.get("/v1/model", headers={"host": "evil.example.com"}).status_code == 200


LOCAL_HOST = {"host": "localhost:8000"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # not a browser
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost:8000"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost:8000"}, 403),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://vitrail.example.org", "host": "vitrail.example.org"}, 200),  # behind a proxy with TLS
        ({"origin": "https://vitrail.example.org", "host": "vitrail.example.org:443"}, 200),
    ],
)
def test_requests_of_other_sites_are_rejected(restricted: httpx.Client, headers: dict[str, str], status: int) -> None:
    response = restricted.post("/v1/predict", files={"image": photo()}, headers=LOCAL_HOST | headers)
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "cross_site_request"
        assert (
            restricted.get("/v1/model", headers=LOCAL_HOST | headers).status_code == 200
        )  # the other site cannot read it


@pytest.mark.parametrize("path", PUBLIC)
def test_head_is_get_without_the_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    of_each = ("date", "x-request-id")
    headers = {name: value for name, value in get.headers.items() if name not in of_each}
    assert {name: value for name, value in head.headers.items() if name not in of_each} == headers
    assert client.head("/v1/predict", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 405


@pytest.mark.parametrize("path", PUBLIC)
def test_pages_need_no_token_and_have_every_security_header(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert {name: response.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS


def test_the_content_security_policy_forbids_inline_external_and_framing(client: httpx.Client) -> None:
    for path in ("/", "/v1/model", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "http" not in policy
        assert {"default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"} <= set(policy.split("; "))
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_there_are_no_cors_headers(client: httpx.Client) -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    for response in (client.options("/v1/predict", headers=headers), client.get("/v1/model", headers=headers)):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_responses_do_not_name_the_server_software(client: httpx.Client) -> None:
    for path in ("/", "/v1/model", "/nowhere"):
        assert "server" not in client.get(path).headers


def test_a_cached_file_is_answered_304(client: httpx.Client) -> None:
    first = client.get("/static/docs.js")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    cached = client.get("/static/docs.js", headers={"if-none-match": first.headers["etag"]})
    assert (cached.status_code, cached.content) == (304, b"")
    assert client.get("/static/docs.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("page", ["docs.html", "docs.js", "docs.css"])
def test_the_api_page_loads_nothing_from_other_hosts(page: str) -> None:
    text = (WEB_DIR / page).read_text()
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", text)


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    assert read_token(str(tmp_path / "token")) == "from-a-file"
    monkeypatch.setenv("A_TOKEN", "from-the-environment")
    assert read_token("A_TOKEN") == "from-the-environment"


@pytest.mark.parametrize("content", ["", "\n", "two words", "ümlaut"])
def test_a_token_that_is_invalid_in_a_header_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="is empty or contains spaces"):
        read_token(str(tmp_path / "token"))


def test_a_token_on_the_command_line_is_rejected_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="no such file and no environment variable"):
        read_token("hunter2")
