"""Request ids: in every response, in error bodies and in log lines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import need_extra, photo, run_server, served  # noqa: F401

from vitrail.serve.app import Service
from vitrail.serve.http_errors import RequestError
from vitrail.serve.request_record import (
    MAX_STAGES,
    RequestIdFilter,
    RequestRecord,
    choose_request_id,
    current,
    current_record,
    join_ids,
)

JPEG = {"content-type": "image/jpeg"}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[httpx.Client, Service]]:
    with run_server(served()) as (client, service):
        yield client, service


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/healthz", 200),
        ("GET", "/static/docs.js", 200),
        ("GET", "/metrics", 200),
        ("GET", "/nowhere", 404),
        ("DELETE", "/v1/model", 405),
        ("POST", "/v1/predict", 415),
    ],
)
def test_every_response_has_the_id_of_its_request(
    server: tuple[httpx.Client, Service], method: str, path: str, status: int
) -> None:
    own = server[0].request(method, path, headers={"x-request-id": "a1.b2_C3"})
    made = server[0].request(method, path)
    assert (own.status_code, own.headers["x-request-id"]) == (status, "a1.b2_C3")
    assert re.fullmatch(r"[0-9a-f]{32}", made.headers["x-request-id"])
    assert len(own.headers.get_list("x-request-id")) == 1
    if status >= 400:
        assert own.json()["error"]["request_id"] == "a1.b2_C3"
        assert made.json()["error"]["request_id"] == made.headers["x-request-id"]


def test_an_error_at_the_end_of_a_stream_has_the_id(
    server: tuple[httpx.Client, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = server
    steps = service.default.explainer.steps

    def fail_in_the_middle(pixels: object, request: object) -> Iterator[object]:
        yield {"occlusion": {}}
        raise RequestError(400, "late", "too late.")
        yield from steps(pixels, request)

    monkeypatch.setattr(service.default.explainer, "steps", fail_in_the_middle)
    headers = JPEG | {"accept": "application/x-ndjson", "x-request-id": "stream-1"}
    lines = client.post("/v1/explain", content=photo(), headers=headers).text.splitlines()
    error = {"code": "late", "message": "too late.", "request_id": "stream-1"}
    assert json.loads(lines[-1]) == {"error": error}


@given(st.binary(max_size=200))
def test_only_a_well_formed_id_is_taken_over(value: bytes) -> None:
    well_formed = re.fullmatch(rb"[A-Za-z0-9._~:@/+=-]{1,128}", value) is not None
    assert (choose_request_id([value]) == value.decode("latin-1")) == well_formed


def test_of_two_ids_none_is_taken_over() -> None:
    assert choose_request_id([b"a", b"a"]) != "a"
    assert choose_request_id([]) != choose_request_id([])


def test_log_lines_of_a_request_have_its_id(
    server: tuple[httpx.Client, Service], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = server
    caplog.handler.addFilter(RequestIdFilter())
    monkeypatch.setattr(service.default.served.engine, "logits", None)  # the engine fails
    headers = JPEG | {"x-request-id": "failing-1"}
    assert client.post("/v1/predict", content=photo(), headers=headers).status_code == 500
    found = {record.message: record.request for record in caplog.records}
    assert found == {
        "the engine failed on a batch of 1 images of requests failing-1": "",  # in the engine thread
        "unexpected error in a request": " request=failing-1",
    }


def test_outside_of_requests_there_is_no_id() -> None:
    assert current_record().id == ""
    record = logging.makeLogRecord({})
    assert RequestIdFilter().filter(record)
    assert record.request == ""
    assert json.loads(RequestError(400, "a", "b.").body()) == {"error": {"code": "a", "message": "b."}}


def test_the_record_is_that_of_the_current_request() -> None:
    record = RequestRecord("abc")
    context = current.set(record)
    try:
        assert current_record() is record
        assert b'"request_id": "abc"' in RequestError(400, "a", "b.").body()
        assert record.error == "a"
    finally:
        current.reset(context)


def test_ids_in_a_line_are_listed_once() -> None:
    records = [RequestRecord("a"), RequestRecord("b"), RequestRecord("a")]
    assert join_ids(records) == "a, b"
    assert join_ids([]) == "none"


def test_a_record_keeps_a_bounded_number_of_stages() -> None:
    record = RequestRecord("a")
    for index in range(10 * MAX_STAGES):
        record.decoded(index, record.started)
        record.ran_batch(index, record.started + index, record.started + index + 0.5, 1)
    assert len(record.stages) == MAX_STAGES
    assert record.engine_seconds == pytest.approx(5 * MAX_STAGES)
