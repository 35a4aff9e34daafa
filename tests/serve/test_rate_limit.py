"""Rate limits: token buckets in a table of fixed size, shared by processes, and the responses of a server."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import need_extra, other_client, photo, run_server, served  # noqa: F401
from small_models import model, small

from vitrail.bench.serve_load import service
from vitrail.errors import ConfigError
from vitrail.serve.access import AccessConfig
from vitrail.serve.rate_limit import WAYS, BucketTable, RateLimit, rate_headers

JPEG = {"content-type": "image/jpeg"}
SLOW = RateLimit.parse("6/m:3")  # one in 10 s


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("text", "rate", "burst"),
    [("50/s", 50, 50), ("600/m", 10, 10), ("50/s:100", 50, 100), ("1.5/s", 1.5, 2), ("10/h", 10 / 3600, 1)],
)
def test_a_rate_has_a_unit_and_perhaps_a_burst(text: str, rate: float, burst: int) -> None:
    assert RateLimit.parse(text) == RateLimit(rate, burst)


@pytest.mark.parametrize("text", ["", "50", "50/d", "-1/s", "0/s", "50/s:", "50/s:0", "1e9/s", "50 /s", "9999999999/s"])
def test_a_rate_that_is_none_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="try 50/s, 600/m or 50/s:100"):
        RateLimit.parse(text)


def test_a_rate_is_described_in_its_own_unit() -> None:
    assert RateLimit.parse("50/s:100").describe() == "50 images per second, up to 100 at once"
    assert RateLimit.parse("30/m:5").describe() == "30 images per minute, up to 5 at once"
    assert RateLimit.parse("0.5/h:5").describe() == "0.5 images per hour, up to 5 at once"


def test_a_burst_is_allowed_and_then_the_rate() -> None:
    clock = Clock()
    table = BucketTable(clock=clock)
    assert [table.take("a", SLOW)[0] for _ in range(4)] == [True, True, True, False]
    assert table.take("b", SLOW)[0]  # another client
    full_in = table.take("a", SLOW)[1]
    assert SLOW.seconds_until_one(full_in) == pytest.approx(10)
    clock.now += 9.99
    assert not table.take("a", SLOW)[0]
    clock.now += 0.01
    assert table.take("a", SLOW)[0]
    clock.now += 1000
    assert [table.take("a", SLOW)[0] for _ in range(4)] == [True, True, True, False]  # not more than the burst


def test_what_is_overdrawn_is_paid_back() -> None:
    clock = Clock()
    table = BucketTable(clock=clock)
    table.take("a", SLOW)
    full_in = table.charge("a", SLOW, 15)
    assert SLOW.tokens(full_in) == pytest.approx(-13)
    assert SLOW.seconds_until_one(full_in) == pytest.approx(140)
    clock.now += 139
    assert not table.take("a", SLOW)[0]
    clock.now += 1
    assert table.take("a", SLOW)[0]


@given(
    st.floats(0.01, 1000),
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 16)), max_size=40),
)
def test_a_client_never_gets_more_than_the_rate_and_a_burst(
    rate: float, burst: int, calls: list[tuple[float, int]]
) -> None:
    """In any time t from the start, at most burst + rate * t tokens, and one request's more than that."""
    clock, limit, taken = Clock(), RateLimit(rate, burst), 0
    table = BucketTable(sets=16, clock=clock)
    for wait, count in calls:
        clock.now += wait
        allowed, full_in = table.take("a", limit)
        before = burst + rate * (clock.now - 1000) - taken
        assert allowed or limit.seconds_until_one(full_in) > 0
        if allowed:
            assert before >= 1 - 1e-3
            taken += count
            table.charge("a", limit, count - 1) if count > 1 else None


def test_memory_is_bounded_and_a_million_addresses_do_not_free_a_client_that_is_over_its_limit() -> None:
    """Full buckets are dropped first, then the one that is full soonest."""
    clock = Clock()
    table = BucketTable(sets=4, clock=clock)
    size = len(table._memory)
    for _ in range(3):
        table.take("greedy", SLOW)
    table.charge("greedy", SLOW, 10)
    for number in range(5000):
        table.take(f"client {number}", SLOW)
    assert len(table._memory) == size
    assert not table.take("greedy", SLOW)[0]
    assert WAYS * 4 < 5000


def test_the_keys_of_a_table_are_hashed_with_a_key_of_its_own() -> None:
    """Otherwise a client could choose addresses that push another one out of the table."""
    first, second = BucketTable(sets=16), BucketTable(sets=16)
    first.take("a", SLOW)
    second.take("a", SLOW)
    assert bytes(first._memory[64:]) != bytes(second._memory[64:])


TAKE = """
import sys
from pathlib import Path
from vitrail.serve.rate_limit import BucketTable, RateLimit
table = BucketTable(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(sum(table.take("a", RateLimit(1e-6, 1000))[0] for _ in range(int(sys.argv[2]))), flush=True)
"""


def start_process(path: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TAKE, str(path), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_share_the_buckets_exactly(tmp_path: Path) -> None:
    """Four processes take 1,000 tokens together, however they are interleaved."""
    processes = [start_process(tmp_path / "table", 600) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
    counts = [int(process.communicate("go\n")[0]) for process in processes]
    assert sum(counts) == 1000
    assert max(counts) <= 600


def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    process = start_process(tmp_path / "table", 10**9)
    assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
    process.stdin.write("go\n")  # type: ignore[union-attr]
    process.stdin.flush()  # type: ignore[union-attr]
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    table = BucketTable(tmp_path / "table")
    assert not table.take("a", RateLimit(1e-6, 1000))[0]  # what it took stays taken
    assert table.take("b", RateLimit(1e-6, 1000))[0]


def test_the_headers_state_the_policy_and_what_is_left() -> None:
    assert rate_headers(RateLimit.parse("50/s:100"), 0.5) == [
        (b"ratelimit-policy", b'"images";q=100;w=2'),
        (b"ratelimit", b'"images";r=75;t=1'),
    ]
    assert rate_headers(SLOW, 170.0)[1] == (b"ratelimit", b'"images";r=0;t=170')  # overdrawn


def remaining(response: httpx.Response) -> int:
    match = re.fullmatch(r'"images";r=(\d+);t=\d+', response.headers["ratelimit"])
    assert match
    return int(match[1])


def test_a_client_over_its_limit_gets_429_before_its_body_is_read() -> None:
    access = AccessConfig(rate_limit=RateLimit.parse("6/m:3"))
    with run_server(served(), access=access) as (client, service), other_client(client) as other:
        post = {"url": "/v1/predict", "content": photo(), "headers": JPEG}
        assert [remaining(client.post(**post)) for _ in range(3)] == [2, 1, 0]
        response = client.post(**post)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limited")
        wait = int(response.headers["retry-after"])
        assert 8 <= wait <= 10
        assert remaining(response) == 0
        assert response.headers["ratelimit-policy"] == '"images";q=3;w=30'
        message = f"the rate limit of your address is 6 images per minute, up to 3 at once; try again in {wait} s."
        assert response.json()["error"]["message"] == message
        assert other.post(**post).status_code == 200
        for path in ("/", "/v1/model", "/healthz", "/metrics"):  # only what computes is limited
            assert client.get(path).status_code == 200
        assert client.post("/v2/repository/index").status_code == 200
        assert "ratelimit" not in client.get("/v1/model").headers
        assert "vitrail_rate_limited_total 1.0" in client.get("/metrics").text
        assert service.body_bytes.used == 0


def test_every_image_counts_and_a_request_may_overdraw() -> None:
    access = AccessConfig(rate_limit=RateLimit.parse("6/m:4"))
    with run_server(served(), access=access) as (client, _):
        three = [("images", photo(number)) for number in range(3)]
        assert remaining(client.post("/v1/predict", files=three)) == 1
        overdrawn = client.post("/v1/predict", files=three)
        assert (overdrawn.status_code, remaining(overdrawn)) == (200, 0)
        response = client.post("/v1/predict", files=three)
        assert response.status_code == 429
        assert 25 <= int(response.headers["retry-after"]) <= 30  # 2 overdrawn, and the next one


def test_retry_after_is_the_time_after_which_a_request_is_accepted() -> None:
    access = AccessConfig(rate_limit=RateLimit.parse("1/s:1"))
    post = {"url": "/v1/predict", "content": photo(), "headers": JPEG}
    with run_server(served(), access=access) as (client, _):
        assert client.post(**post).status_code == 200
        refused = client.post(**post)
        assert refused.status_code == 429
        time.sleep(math.ceil(float(refused.headers["retry-after"])))
        assert client.post(**post).status_code == 200


def test_a_request_with_a_large_body_reads_its_429() -> None:
    """The body of a rejected request is received and dropped, because many clients send all of it first."""
    with run_server(served(), access=AccessConfig(rate_limit=RateLimit.parse("1/h"))) as (client, _):
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200
        assert client.post("/v1/predict", content=bytes(8_000_000), headers=JPEG).status_code == 429
        assert client.get("/v1/model").status_code == 200


@pytest.mark.slow
def test_workers_share_the_limit(tmp_path: Path) -> None:
    """With two processes, a client gets the burst once, whichever of them answers."""
    weights = tmp_path / "small"
    model(small()).save(weights)
    log = tmp_path / "log"
    options = ("--workers", "2", "--rate-limit", "1/h:12", "--access-log", str(log))
    with service(str(weights), "torch", options) as (port, _, ended):
        url = f"http://127.0.0.1:{port}/v1/predict"
        statuses = [httpx.post(url, files={"image": photo()}).status_code for _ in range(16)]
    assert ended == [0]
    assert statuses == [200] * 12 + [429] * 4
    lines = [json.loads(line) for line in log.read_text().splitlines()]  # whole lines of both processes
    assert [line["status"] for line in lines if line["route"] == "/v1/predict"].count(429) == 4
