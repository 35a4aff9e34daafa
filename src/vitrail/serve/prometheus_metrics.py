"""Prometheus metrics: requests, latencies, batches, queue."""

from __future__ import annotations

import os

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which workers share their metrics; prometheus_client reads it on import."""


class Metrics:
    """The metrics of one app; the workers of a server share them through a folder."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "vitrail_requests", "Responses, by route and status.", ("route", "status"), registry=own
        )
        self.request_seconds = Histogram(
            "vitrail_request_seconds",
            "Time from the end of the request headers to the end of the response.",
            ("route",),
            buckets=SECONDS_BUCKETS,
            registry=own,
        )
        self.batch_size = Histogram("vitrail_batch_size", "Images per batch.", buckets=BATCH_SIZE_BUCKETS, registry=own)
        self.queued_images = Gauge(
            "vitrail_queue_images",
            "Images queued or in progress.",
            registry=own,
            multiprocess_mode="livesum",
        )
        self.decode_seconds = Histogram(
            "vitrail_decode_seconds", "Time to decode and resize one image.", buckets=SECONDS_BUCKETS, registry=own
        )
        self.engine_seconds = Histogram(
            "vitrail_engine_seconds", "Time to compute one batch.", buckets=SECONDS_BUCKETS, registry=own
        )
        self.disconnects = Counter(
            "vitrail_client_disconnects", "Clients that disconnected before their response.", registry=own
        )
        self.errors = Counter("vitrail_errors", "Error responses, by code.", ("code",), registry=own)
        self.build_info = Gauge(
            "vitrail_build_info",
            "Always 1; the labels describe the model.",
            ("model", "engine", "precision", "version"),
            registry=own,
            multiprocess_mode="livemax",
        )
        if MULTIPROC_DIR not in os.environ:  # meaningless if another worker answers the next scrape
            ProcessCollector(registry=own)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        if MULTIPROC_DIR not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
