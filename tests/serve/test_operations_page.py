"""docs/operations.md: its tables, examples and options match the code."""

from __future__ import annotations

import inspect
import json
import re

from conftest import ROOT
from prometheus_client import CollectorRegistry
from serving import need_extra, run_server, served  # noqa: F401

from vitrail.cli import serve
from vitrail.serve import access, access_log, rate_limit, token_store
from vitrail.serve.access import Access, AccessConfig
from vitrail.serve.app import create_app
from vitrail.serve.rate_limit import RateLimit, rate_headers
from vitrail.serve.request_record import MAX_STAGES, RequestRecord
from vitrail.serve.spans import ENDPOINT_VARIABLES
from vitrail.serve.token_store import parse_tokens

PAGE = (ROOT / "docs" / "operations.md").read_text()


def table(header: str) -> list[list[str]]:
    """The cells of the rows of a table."""
    rows = PAGE.partition(f"| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def block(language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_metrics_table_is_the_registry() -> None:
    """Names, types and labels; a metric that is added or renamed needs its row."""
    registry = create_app(served()).state.service.metrics.registry
    existing = {}
    for collector in set(registry._collector_to_names):
        if hasattr(collector, "_labelnames"):  # not those of the process
            (metric,) = collector.describe()
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            existing[name] = (metric.type, list(collector._labelnames))
    described = {
        code(name)[0]: (kind, code(labels)) for name, kind, labels, _ in table("metric | type | labels | meaning")
    }
    assert described == existing


def test_the_reasons_of_authentication_failures_are_listed() -> None:
    (meaning,) = (row[3] for row in table("metric | type | labels | meaning") if "authentication_failures" in row[0])
    source = inspect.getsource(access)
    assert set(code(meaning)) == {word for word in ("missing", "wrong", "expired", "limited") if f'"{word}"' in source}


def test_the_fields_of_the_access_log_are_listed_and_in_the_example() -> None:
    described = [name for cells in table("field | meaning") for name in code(cells[0])]
    own = Access(AccessConfig(), None, CollectorRegistry())
    fields = own._describe(RequestRecord("a"), {}, "GET", "/", 200)
    assert described == list(fields)
    (example,) = (json.loads(text) for text in block("json") if '"time"' in text)
    assert list(example) == [name for name in fields if name in example]
    assert set(fields) - set(example) == {"error"}


def test_the_example_of_an_error_is_what_the_server_sends() -> None:
    (example,) = (json.loads(text) for text in block("json") if '"error"' in text and '"time"' not in text)
    with run_server(served()) as (client, _):
        headers = {"x-request-id": example["error"]["request_id"]}
        response = client.post("/v1/predict", files={"image": b""}, headers=headers)
    assert response.json() == example


def test_the_example_of_a_tokens_file_is_valid() -> None:
    (example,) = block("tokens")
    tokens = parse_tokens(example.encode(), "the example")
    assert [token.name for token in tokens] == ["mobile-app", "batch-jobs", "partner"]
    assert [token.rate for token in tokens] == [None, RateLimit(200, 1000), None]
    assert tokens[2].expires is not None


def test_the_headers_of_a_rate_limit_are_as_in_the_example() -> None:
    match = re.search(r"--rate-limit (\S+)`", PAGE)
    assert match
    limit = RateLimit.parse(match[1])
    policy, state = rate_headers(limit, (100 - 37) / limit.rate)
    assert f"RateLimit-Policy: {policy[1].decode()} " in PAGE
    assert f"RateLimit: {state[1].decode()} " in PAGE


def test_the_options_and_variables_on_the_page_exist() -> None:
    names = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve.serve).parameters}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert {"--access-log", "--tokens", "--rate-limit", "--trusted-proxy", "--otel"} <= used <= names
    assert set(ENDPOINT_VARIABLES) <= set(re.findall(r"OTEL_[A-Z_]+", PAGE))


def test_the_numbers_on_the_page_match_the_code() -> None:
    assert (access_log.MAX_QUEUED_LINES, token_store.MAX_TOKENS, MAX_STAGES) == (10_000, 1000, 64)
    assert rate_limit.SETS * rate_limit.WAYS == 131_072
    assert (access.FAILURE_LIMIT.rate, access.FAILURE_LIMIT.burst) == (1, 20)
    for words in ("10,000 lines", "1,000 tokens", "64 stages", "After 20 wrong", "131,072 clients", "16 to 512"):
        assert words in PAGE
