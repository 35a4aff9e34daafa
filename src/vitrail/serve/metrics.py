"""What Prometheus reads at /metrics: requests, how long they take, batches, the line."""

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

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Where several workers add up what they count; prometheus_client looks for it when imported."""


class Metrics:
    """One app's numbers; several workers of one server share a folder of them."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "vitrail_requests", "Requests answered, by route and status.", ("route", "status"), registry=own
        )
        self.latency = Histogram(
            "vitrail_request_seconds",
            "From a request's complete headers to the end of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=own,
        )
        self.batch = Histogram("vitrail_batch_size", "Images in a batch.", buckets=BATCHES, registry=own)
        self.queue = Gauge(
            "vitrail_queue_images",
            "Images that wait or are worked on.",
            registry=own,
            multiprocess_mode="livesum",
        )
        self.decode = Histogram(
            "vitrail_decode_seconds", "Decoding and resizing one image.", buckets=SECONDS, registry=own
        )
        self.engine = Histogram("vitrail_engine_seconds", "One batch in the engine.", buckets=SECONDS, registry=own)
        self.gone = Counter("vitrail_clients_gone", "Clients that hung up before their answer.", registry=own)
        self.refused = Counter("vitrail_refusals", "Errors that were answered, by their code.", ("code",), registry=own)
        self.build = Gauge(
            "vitrail_build_info",
            "1; its labels say what is served.",
            ("model", "engine", "precision", "version"),
            registry=own,
            multiprocess_mode="livemax",
        )
        if FOLDER not in os.environ:  # of several processes it would be the numbers of whichever is asked
            ProcessCollector(registry=own)

    def text(self) -> bytes:
        """In Prometheus' format."""
        if FOLDER not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)
