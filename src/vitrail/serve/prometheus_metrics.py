"""Prometheus metrics: requests, latencies, batches, queue; by model and version where a model is involved."""

from __future__ import annotations

import os
import threading
from collections import Counter as Multiset
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from vitrail import __version__

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which workers share their metrics; prometheus_client reads it on import."""


MODEL_LABELS = ("model", "version")


@dataclass(frozen=True)
class ModelMetrics:
    """The metrics of one model version."""

    labels: tuple[str, str, str, str]
    """Model, version, engine and precision."""
    batch_size: Histogram
    queued_images: Gauge
    decode_seconds: Histogram
    engine_seconds: Histogram


class Metrics:
    """The metrics of one app; the workers of a server share them through a folder.

    Labels with a model and a version are those of loaded models only, so clients cannot create any.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "vitrail_requests",
            "Responses, by route, status, model and version (empty if the request reached no model).",
            ("route", "status", *MODEL_LABELS),
            registry=own,
        )
        self.request_seconds = Histogram(
            "vitrail_request_seconds",
            "Time from the end of the request headers to the end of the response.",
            ("route", *MODEL_LABELS),
            buckets=SECONDS_BUCKETS,
            registry=own,
        )
        self.batch_size = Histogram(
            "vitrail_batch_size", "Images per batch.", MODEL_LABELS, buckets=BATCH_SIZE_BUCKETS, registry=own
        )
        self.queued_images = Gauge(
            "vitrail_queue_images",
            "Images queued or in progress.",
            MODEL_LABELS,
            registry=own,
            multiprocess_mode="livesum",
        )
        self.decode_seconds = Histogram(
            "vitrail_decode_seconds",
            "Time to decode and resize one image.",
            MODEL_LABELS,
            buckets=SECONDS_BUCKETS,
            registry=own,
        )
        self.engine_seconds = Histogram(
            "vitrail_engine_seconds", "Time to compute one batch.", MODEL_LABELS, buckets=SECONDS_BUCKETS, registry=own
        )
        self.disconnects = Counter(
            "vitrail_client_disconnects", "Clients that disconnected before their response.", registry=own
        )
        self.errors = Counter("vitrail_errors", "Error responses, by code.", ("code",), registry=own)
        self.model_info = Gauge(
            "vitrail_model_info",
            "1 for every loaded model version.",
            (*MODEL_LABELS, "engine", "precision"),
            registry=own,
            multiprocess_mode="livemax",
        )
        self.loads = Counter(
            "vitrail_model_loads",
            "Versions that were loaded, by result: ready or failed.",
            ("model", "result"),
            registry=own,
        )
        self.failed_versions = Gauge(
            "vitrail_model_failed_versions",
            "Versions in the folder of --models that cannot be used.",
            ("model",),
            registry=own,
            multiprocess_mode="livemax",
        )
        build_info = Gauge(
            "vitrail_build_info",
            "Always 1; the label is the version of vitrail.",
            ("version",),
            registry=own,
            multiprocess_mode="livemax",
        )
        build_info.labels(__version__).set(1)
        self._models: Multiset[tuple[str, str]] = Multiset()
        """How many objects exist for each model and version: two while one replaces another of the same version."""
        self._engines: Multiset[tuple[str, str, str, str]] = Multiset()
        """The same for each model, version, engine and precision."""
        self._lock = threading.Lock()
        self._folder_models: set[str] = set()
        if MULTIPROC_DIR not in os.environ:  # meaningless if another worker answers the next scrape
            ProcessCollector(registry=own)

    def for_model(self, name: str, version: str, engine: str, precision: str) -> ModelMetrics:
        """The metrics of a version that is being loaded; end with `remove_model`."""
        labels = (name, version, engine, precision)
        with self._lock:
            self._models[name, version] += 1
            self._engines[labels] += 1
            self.model_info.labels(*labels).set(1)
        return ModelMetrics(
            labels,
            self.batch_size.labels(name, version),
            self.queued_images.labels(name, version),
            self.decode_seconds.labels(name, version),
            self.engine_seconds.labels(name, version),
        )

    def remove_model(self, removed: ModelMetrics) -> None:
        """Remove the labels of a version."""
        name, version, *_ = removed.labels
        # Values cannot be removed from the files that workers share; `render` leaves them out.
        removable = MULTIPROC_DIR not in os.environ
        with self._lock:
            self._models[name, version] -= 1
            self._engines[removed.labels] -= 1
            self._models, self._engines = +self._models, +self._engines  # without those that are 0
            if removed.labels not in self._engines:
                self.model_info.labels(*removed.labels).set(0)
                if removable:
                    self.model_info.remove(*removed.labels)
            if not removable or (name, version) in self._models:
                return
        families = (self.requests, self.request_seconds, self.batch_size, self.queued_images)
        for family in (*families, self.decode_seconds, self.engine_seconds):
            family.remove_by_labels({"model": name, "version": version})

    def set_failed(self, counts: dict[str, int]) -> None:
        """Set the number of failed versions of each model in the folder, and remove the labels of other models."""
        for name in self._folder_models - counts.keys():
            self.failed_versions.labels(name).set(0)
            if MULTIPROC_DIR not in os.environ:
                self.failed_versions.remove(name)
                self.loads.remove_by_labels({"model": name})
        for name, count in counts.items():
            self.failed_versions.labels(name).set(count)
        self._folder_models = set(counts)

    def record_request(self, route: str, status: int, seconds: float, model: tuple[str, str] = ("", "")) -> None:
        """Count a response. model: name and version that answered, if any."""
        if model not in self._models:
            model = ("", "")
        self.requests.labels(route, str(status), *model).inc()
        self.request_seconds.labels(route, *model).observe(seconds)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        if MULTIPROC_DIR not in os.environ:
            return generate_latest(self.registry)
        return generate_latest(_LiveModels(set(self._models), self._folder_models))


class _LiveModels(CollectorRegistry):
    """The metrics of all workers, without those of model versions that are no longer loaded."""

    def __init__(self, versions: set[tuple[str, str]], names: set[str]) -> None:
        super().__init__()
        self.versions, self.names = versions, names | {name for name, _ in versions}
        MultiProcessCollector(self)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if self._is_live(sample.labels)]
            yield family

    def _is_live(self, labels: dict[str, Any]) -> bool:
        name = labels.get("model", "")
        if not name:
            return True
        return (name, labels["version"]) in self.versions if "version" in labels else name in self.names
