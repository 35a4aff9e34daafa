"""OpenTelemetry spans of requests: with the real SDK in memory, and sent to a collector at loopback."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from conftest import import_peer
from serving import BusyServer, need_extra, photo, run_server, served, wait_until  # noqa: F401

from vitrail.errors import ConfigError
from vitrail.serve import spans
from vitrail.serve.access import AccessConfig
from vitrail.serve.request_record import RequestRecord
from vitrail.serve.trace_context import parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*spans.ENDPOINT_VARIABLES, *spans.PROTOCOL_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An exporter that keeps the spans; the recorder sends them to it."""
    import_peer("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = InMemorySpanExporter()
    monkeypatch.setattr(spans, "open_recorder", lambda required: spans.SpanRecorder(found))
    return found


def by_name(exporter: Any) -> dict[str, list[Any]]:
    """The finished spans by name, each group in order."""
    names: dict[str, list[Any]] = {}
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time):
        names.setdefault(span.name, []).append(span)
    return names


def test_a_request_has_a_span_with_a_child_for_each_stage(exporter: Any) -> None:
    with run_server(served()) as (client, _):
        files = [("images", photo(number)) for number in range(3)]
        response = client.post("/v1/predict?top=1", files=files, headers=SAMPLED | {"x-request-id": "order-66"})
    assert response.status_code == 200
    found = by_name(exporter)
    (request,) = found["POST /v1/predict"]
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == SPAN
    assert request.parent.is_remote
    assert request.kind.name == "SERVER"
    attributes = dict(request.attributes)
    assert attributes.pop("http.request.body.size") > 0
    assert attributes.pop("http.response.body.size") == len(response.content)
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/predict",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "vitrail.request_id": "order-66",
        "vitrail.model": "small",
        "vitrail.version": "1",
        "vitrail.images": 3,
    }
    assert len(found["decode"]) == 3
    assert sum(span.attributes["vitrail.batch_size"] for span in found["engine"]) >= 3
    assert {span.attributes["vitrail.model"] for span in found["engine"]} == {"small"}
    assert len(found["queue"]) == len(found["engine"])
    for span in (*found["decode"], *found["queue"], *found["engine"]):
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
    for queue, engine in zip(found["queue"], found["engine"], strict=True):
        assert queue.end_time == engine.start_time


def test_the_queue_span_is_as_long_as_the_image_waits(exporter: Any, request_pool: Any) -> None:
    with run_server(served()) as (client, service):
        busy = BusyServer(client, service, request_pool)
        second = busy.send(1)
        busy.wait_until_queued(1)
        busy.engine.go.set()
        assert second.result().status_code == 200
    found = by_name(exporter)
    first, waiting = found["engine"]
    queue = found["queue"][1]
    assert queue.start_time < first.end_time <= queue.end_time == waiting.start_time


@pytest.mark.parametrize(
    "state", [b"", b"=", b"a=1,,b", b"a=1,a=2", b"\xff=\xfe", b"a" * 600, b",".join([b"a=1"] * 90)]
)
def test_any_tracestate_is_accepted_and_logs_nothing(
    exporter: Any, caplog: pytest.LogCaptureFixture, state: bytes
) -> None:
    recorder, record = spans.open_recorder(True), RequestRecord("a")
    assert recorder is not None
    recorder.start(record, "GET", parse_traceparent([SAMPLED["traceparent"].encode()], [state]))
    assert record.trace_id == TRACE
    assert caplog.messages == []
    recorder.close()


def test_an_explanation_has_engine_spans_for_its_steps(exporter: Any) -> None:
    with run_server(served()) as (client, _):
        assert client.post("/v1/explain", content=photo(), headers={"content-type": "image/jpeg"}).status_code == 200
    found = by_name(exporter)
    assert len(found["decode"]) == len(found["queue"]) == 1
    assert len(found["engine"]) > 1


def test_errors_and_requests_without_a_caller_have_spans(exporter: Any) -> None:
    with run_server(served(), token="a-token") as (client, service):
        client.get("/v1/model")
        service.default.served.engine.logits = None  # the engine fails
        headers = {"content-type": "image/jpeg", "authorization": "Bearer a-token"}
        assert client.post("/v1/predict", content=photo(), headers=headers).status_code == 500
    found = by_name(exporter)
    (rejected,), (failed,) = found["GET /v1/model"], found["POST /v1/predict"]
    assert (rejected.parent, rejected.attributes["error.type"]) == (None, "missing_token")
    assert rejected.status.status_code.name == "UNSET"  # an error of the client
    assert (failed.status.status_code.name, failed.attributes["error.type"]) == ("ERROR", "internal_error")
    assert failed.context.trace_id != rejected.context.trace_id


def test_a_trace_that_the_caller_does_not_record_is_not_recorded(exporter: Any) -> None:
    with run_server(served()) as (client, _):
        headers = {"content-type": "image/jpeg", "traceparent": f"00-{TRACE}-{SPAN}-00"}
        assert client.post("/v1/predict", content=photo(), headers=headers).status_code == 200
    assert by_name(exporter) == {}


class Collector:
    """An OTLP/HTTP collector at loopback that keeps what it receives."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def spans(self) -> list[Any]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    import_peer("opentelemetry.sdk")
    found = Collector()
    yield found
    found.close()


def test_spans_reach_a_collector_by_otlp_when_its_address_is_in_the_environment(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")  # the framework's own spans stay off
    with run_server(served()) as (client, _):
        headers = {"content-type": "image/jpeg", **SAMPLED}
        assert client.post("/v1/predict", content=photo(), headers=headers).status_code == 200
    # The end of the server sends what is left.
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    assert sorted(span.name for span in collector.spans()) == ["POST /v1/predict", "decode", "engine", "queue"]
    found = {span.name: span for span in collector.spans()}
    assert {span.trace_id.hex() for span in found.values()} == {TRACE}
    assert found["POST /v1/predict"].parent_span_id.hex() == SPAN
    assert found["POST /v1/predict"].trace_state == "vendor=1"
    assert found["engine"].parent_span_id == found["POST /v1/predict"].span_id
    resource = {a.key: a.value.string_value for a in collector.requests[0][1].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "vitrail"


def test_a_collector_that_is_down_disturbs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import_peer("opentelemetry.sdk")
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with run_server(served()) as (client, _):
        for _ in range(5):
            assert client.get("/v1/model").status_code == 200


def test_without_configuration_nothing_is_imported_and_nothing_is_recorded() -> None:
    program = (
        "import sys; from vitrail.serve import access, spans; "
        "assert spans.open_recorder(False) is None; "
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_without_the_extra_spans_that_are_required_are_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"try pip install 'vitrail\[otel\]'"):
        AccessConfig(otel=True).check()
    assert spans.open_recorder(False) is None
    assert caplog.messages == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert spans.open_recorder(False) is None
    assert "no spans are sent" in caplog.text


def test_another_protocol_is_refused_and_the_sdk_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    import_peer("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="got the OTLP protocol grpc, expected http/protobuf"):
        AccessConfig(otel=True).check()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert spans.spans_wanted(required=True)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not spans.spans_wanted(required=True)
