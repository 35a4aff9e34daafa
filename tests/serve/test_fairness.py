"""A busy client does not block other clients."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from serving import JPEG, QUICK, BusyServer, other_client, photo, run_server, served, wait_until

import vitrail
from vitrail.serve import app, fair_queue
from vitrail.serve.http_errors import RequestError


def test_batches_are_smaller_while_another_client_is_served(
    vit: vitrail.Model, request_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(served(vit)) as (client, service), other_client(client) as other:
        service.default.batcher.shared_batch_size = 2
        busy = BusyServer(client, service, request_pool)
        queued = [busy.send(i) for i in range(8)]
        busy.wait_until_queued(8)
        other_response = request_pool.submit(other.post, "/v1/predict", content=photo(9), headers=JPEG)
        busy.wait_until_queued(9)
        busy.engine.go.set()
        assert {response.result().status_code for response in (*queued, other_response)} == {200}
        assert busy.engine.batches == [1, 2, 2, 2, 2, 1]
        monkeypatch.setattr(fair_queue, "CONTENTION_WINDOW_S", 0)
        busy.engine.go.clear()
        busy.engine.batches.clear()
        first = busy.send(0)
        wait_until(lambda: busy.engine.batches == [1])
        queued = [busy.send(i) for i in range(4)]
        busy.wait_until_queued(4)
        busy.engine.go.set()
        assert {response.result().status_code for response in (first, *queued)} == {200}
        assert busy.engine.batches == [1, 4]


def test_clients_take_turns_with_explanations(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit)) as (client, service), other_client(client) as other:
        completed: list[str] = []

        def explain(sender: httpx.Client, name: str) -> int:
            link_parameters = {"methods": '["occlusion"]'}
            response = sender.post("/v1/explain", params=link_parameters, content=photo(), headers=JPEG)
            completed.append(name)
            return response.status_code

        busy = BusyServer(client, service, request_pool)
        responses = [request_pool.submit(explain, client, "many") for _ in range(6)]
        wait_until(lambda: len(service.default.batcher._explain_queue) == 6)
        responses.append(request_pool.submit(explain, other, "one"))
        wait_until(lambda: len(service.default.batcher._explain_queue) == 7)
        busy.engine.go.set()
        assert {response.result() for response in responses} == {200}
        assert "one" in completed[:2]


def test_one_of_two_engine_threads_is_reserved_for_other_clients(
    vit: vitrail.Model, request_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "CONTENTION_WINDOW_S", 60)
    batching = replace(QUICK, engine_threads=2, batch_size=2)
    with run_server(served(vit), batching=batching) as (client, service), other_client(client) as other:
        assert other.post("/v1/predict", content=photo(7), headers=JPEG).status_code == 200
        service.default.served.engine.batches.clear()  # type: ignore[attr-defined]
        busy = BusyServer(client, service, request_pool)
        queued = [busy.send(i) for i in range(6)]
        busy.wait_until_queued(6)
        assert service.default.batcher._batches_per_client == {"127.0.0.1": 1}
        other_response = request_pool.submit(other.post, "/v1/predict", content=photo(8), headers=JPEG)
        wait_until(lambda: service.default.batcher._batches_per_client == {"127.0.0.1": 1, "127.0.0.2": 1})
        assert len(service.default.batcher._image_queue) == 6
        busy.engine.go.set()
        assert {response.result().status_code for response in (busy.first, *queued, other_response)} == {200}
        wait_until(lambda: not service.default.batcher._batches_per_client)


def test_a_single_client_may_use_all_engine_threads(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit), batching=replace(QUICK, engine_threads=2, batch_size=2)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        others = [busy.send(i) for i in range(2)]
        wait_until(lambda: service.default.batcher._batches_per_client == {"127.0.0.1": 2})
        busy.engine.go.set()
        assert {response.result().status_code for response in (busy.first, *others)} == {200}


@pytest.mark.parametrize(
    ("status", "received", "seconds"),
    [(429, 100, 1), (413, 0, 1), (400, 100, 0.1), (400, 4_000_000, 0.5), (415, 14_000_000, 1), (404, 0, 0)],
)
def test_the_delay_of_an_error_depends_on_the_size_of_the_body(status: int, received: int, seconds: float) -> None:
    assert app._refusal_delay(RequestError(status, "code", "message"), received) == seconds


def test_the_delay_of_an_error_affects_only_its_client(
    vit: vitrail.Model, request_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MIN_REFUSAL_DELAY_S", 0.4)
    with run_server(served(vit)) as (client, _):
        start = time.monotonic()
        refused = request_pool.submit(client.post, "/v1/predict", content=b"no image", headers=JPEG)
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200
        assert not refused.done()
        assert refused.result().status_code == 400
        assert time.monotonic() - start >= 0.4
