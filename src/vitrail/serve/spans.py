"""OpenTelemetry spans of requests, sent by OTLP over HTTP: the request, and within it decoding, queue and engine.

The extra `otel` is imported only if spans are wanted. A stage is recorded while it runs (request_record.py); its span
is made from the two times when the request ends, so requests that are not sampled cost next to nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from typing import Any

from vitrail import __version__
from vitrail.errors import ConfigError
from vitrail.serve.request_record import RequestRecord
from vitrail.serve.trace_context import TraceParent

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
CLOSE_TIMEOUT_S = 5.0
"""Seconds that the end of the server waits for the last spans."""

log = logging.getLogger("vitrail.serve")


class SpanRecorder:
    """Makes the spans of requests."""

    def __init__(self, exporter: Any = None) -> None:
        """exporter: default: OTLP over HTTP, configured by the OTEL_ variables."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):  # the SDK's default
            resource = resource.merge(Resource({"service.name": "vitrail"}))
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # a line for every damaged tracestate
        self._api = trace
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vitrail.serve", __version__)

    def start(self, record: RequestRecord, method: str, parent: TraceParent | None) -> None:
        """Start the span of a request, as a child of the caller's; sets the record's trace id."""
        api = self._api
        record.span = self._tracer.start_span(
            method,
            api.set_span_in_context(api.NonRecordingSpan(self._remote_context(parent))) if parent else None,
            api.SpanKind.SERVER,
            start_time=_nanoseconds(record, record.started),
        )
        record.trace_id = f"{record.span.get_span_context().trace_id:032x}"

    def finish(self, record: RequestRecord, fields: dict[str, Any]) -> None:
        """End the span of a request, and make those of its stages. fields: what the access log says about it."""
        span = record.span
        if span is None or not span.is_recording():
            return
        status, model = fields["status"], _model_attributes(fields)
        span.update_name(f"{fields['method']} {fields['route']}")
        span.set_attributes(
            {
                "http.request.method": fields["method"],
                "http.route": fields["route"],
                "http.response.status_code": status,
                "http.request.body.size": fields["bytes_in"],
                "http.response.body.size": fields["bytes_out"],
                "client.address": fields["client"],
                "vitrail.request_id": record.id,
                **model,
                **({"vitrail.images": record.images} if record.images else {}),
                **({"vitrail.token": record.token} if record.token else {}),
                **({"error.type": record.error or str(status)} if status >= 400 else {}),
            }
        )
        if status >= 500:
            span.set_status(self._api.StatusCode.ERROR)
        parent = self._api.set_span_in_context(span)
        for stage in list(record.stages):
            size = {} if stage.batch_size is None else {"vitrail.batch_size": stage.batch_size}
            attributes = {**(model if stage.name == "engine" else {}), **size}
            start, end = _nanoseconds(record, stage.start), _nanoseconds(record, stage.end)
            self._tracer.start_span(stage.name, parent, attributes=attributes, start_time=start).end(end)
        span.end()

    def _remote_context(self, parent: TraceParent) -> Any:
        """The caller's span."""
        return self._api.SpanContext(
            int(parent.trace_id, 16),
            int(parent.span_id, 16),
            is_remote=True,
            trace_flags=self._api.TraceFlags(parent.flags),
            trace_state=self._api.TraceState.from_header([parent.tracestate] if parent.tracestate else []),
        )

    def close(self) -> None:
        """Send the last spans, if that does not take long."""
        thread = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)


def open_recorder(required: bool) -> SpanRecorder | None:
    """The recorder, if spans are wanted: by --otel (`required`), or by an endpoint in the environment."""
    if not spans_wanted(required):
        return None
    return SpanRecorder()


def spans_wanted(required: bool) -> bool:
    """Whether spans are wanted and possible; ConfigError if they are required and not possible."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if not required and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return False
    problem = ""
    protocol = next((os.environ[name] for name in PROTOCOL_VARIABLES if os.environ.get(name)), PROTOCOL)
    if protocol != PROTOCOL:
        problem = (
            f"got the OTLP protocol {protocol[:40]}, expected {PROTOCOL}; try OTEL_EXPORTER_OTLP_PROTOCOL={PROTOCOL}."
        )
    elif not _is_installed():
        problem = "spans need opentelemetry, which is not installed; try pip install 'vitrail[otel]'."
    if problem and required:
        raise ConfigError(problem)
    if problem:
        log.warning("no spans are sent: %s", problem)
    return not problem


def _is_installed() -> bool:
    try:
        names = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:  # of a parent package
        return False


def _model_attributes(fields: dict[str, Any]) -> dict[str, str]:
    """Model and version, as far as they are known."""
    return {f"vitrail.{name}": str(fields[name]) for name in ("model", "version") if fields.get(name) is not None}


def _nanoseconds(record: RequestRecord, moment: float) -> int:
    """A time on the clock of `time.perf_counter` as nanoseconds since 1970."""
    return int((record.started_at + moment - record.started) * 1e9)
