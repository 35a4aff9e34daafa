"""Who may use the server how much, and what is recorded of it: tokens, client addresses, rate limits, logs, spans."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope

from vitrail.serve import spans
from vitrail.serve.access_log import AccessLog, open_log, utc_time
from vitrail.serve.client_address import TrustedProxies, address_key
from vitrail.serve.http_errors import RequestError
from vitrail.serve.prometheus_metrics import MULTIPROC_DIR
from vitrail.serve.rate_limit import BucketTable, RateLimit, rate_headers
from vitrail.serve.request_record import RequestRecord, choose_request_id
from vitrail.serve.token_store import TokenStore, read_tokens
from vitrail.serve.trace_context import parse_traceparent

FAILURE_LIMIT = RateLimit(rate=1.0, burst=20)
"""Wrong tokens per second from one address that get 401; further ones get 429."""
FAILURE_DELAY_S, LIMITED_DELAY_S = 0.1, 1.0
"""Seconds before the response to a wrong token; to a request over a limit (at most)."""
UNLIMITED_METHODS = ("GET", "HEAD", "OPTIONS")
MAX_METHOD = 16
"""Characters of a method in the log."""


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Configuration of what this module does; all of it is off by default."""

    tokens: Path | None = None
    """File with the tokens of clients and their names."""
    proxies: TrustedProxies = TrustedProxies()
    """Proxies whose X-Forwarded-For or Forwarded header is believed."""
    rate_limit: RateLimit | None = None
    """Images per client; a client with a token that has its own rate has that one."""
    log: str | None = None
    """File of the access log; `-` for standard output."""
    otel: bool = False
    """Whether spans are required; without it they are sent if the environment names an endpoint."""

    def check(self) -> None:
        """Raise ConfigError now instead of when the server starts."""
        if self.tokens is not None:
            read_tokens(self.tokens)
        if self.log is not None and self.log != "-":
            os.close(open_log(Path(self.log)))
        if self.otel:
            spans.spans_wanted(required=True)


class AccessMetrics:
    """Metrics of tokens, rate limits and the access log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.token_requests = Counter(
            "vitrail_token_requests", "Requests with a token that has a name, by name.", ("token",), registry=registry
        )
        self.authentication_failures = Counter(
            "vitrail_authentication_failures",
            "Requests rejected for their token, by reason.",
            ("reason",),
            registry=registry,
        )
        self.tokens_file_errors = Counter(
            "vitrail_tokens_file_errors", "Changes of the tokens file that could not be used.", registry=registry
        )
        self.rate_limited = Counter("vitrail_rate_limited", "Requests rejected by a rate limit.", registry=registry)
        self.dropped_lines = Counter(
            "vitrail_access_log_dropped_lines", "Lines of the access log that were not written.", registry=registry
        )


class Access:
    """Tokens, addresses, limits, log and spans of one app. Called on the event loop."""

    def __init__(self, config: AccessConfig, token: str | None, registry: CollectorRegistry) -> None:
        """token: the one of --token, which has no name."""
        self.config, self.metrics = config, AccessMetrics(registry)
        self.tokens = TokenStore(token, config.tokens, self.metrics.tokens_file_errors.inc)
        shared = os.environ.get(MULTIPROC_DIR)  # a worker: the folder lives as long as the server
        self.buckets = BucketTable(None if shared is None else Path(shared) / "rate_limits")
        self.log = None if config.log is None else AccessLog(config.log, self.metrics.dropped_lines.inc)
        self.spans = spans.open_recorder(config.otel)

    def start(self, scope: Scope) -> RequestRecord:
        """The record of a request that has just arrived; its client's key is in the state of the scope, for quotas."""
        headers = _find_headers(scope, b"x-request-id", b"traceparent", b"tracestate")
        record = RequestRecord(choose_request_id(headers[0]), self.config.proxies.client_host(scope))
        record.client, record.rate_limit = address_key(record.address), self.config.rate_limit
        scope.setdefault("state", {})["client"] = record.client
        parent = parse_traceparent(headers[1], headers[2]) if headers[1] else None
        if self.spans is not None:
            self.spans.start(record, scope["method"][:MAX_METHOD], parent)
        elif parent is not None:
            record.trace_id = parent.trace_id
        return record

    async def authenticate(self, given: bytes, record: RequestRecord, scope: Scope) -> None:
        """Raise RequestError unless the token is accepted; a token with a name identifies the client from here on.

        An accepted token passes however many wrong ones came from its address, which others may share.
        """
        token = self.tokens.find(given)
        if token is None:
            raise await self.failure(record, "wrong", "the token is wrong; use a token that the server accepts.")
        if token.expires is not None and token.expires <= record.started_at:
            raise await self.failure(record, "expired", "the token has expired; use the one that replaces it.")
        if token.name is not None:
            record.token, record.client = token.name, f"token {token.name}"
            scope["state"]["client"] = record.client
            self.metrics.token_requests.labels(token.name).inc()
        if token.rate is not None:
            record.rate_limit = token.rate

    async def failure(self, record: RequestRecord, reason: str, message: str) -> RequestError:
        """The error for a token that is not accepted, after a delay; another one after many from the same address."""
        allowed, full_in = self.buckets.take(f"failures {address_key(record.address)}", FAILURE_LIMIT)
        self.metrics.authentication_failures.labels(reason if allowed else "limited").inc()
        await asyncio.sleep(FAILURE_DELAY_S if allowed else LIMITED_DELAY_S)
        if not allowed:
            after = math.ceil(FAILURE_LIMIT.seconds_until_one(full_in))
            message = f"too many wrong tokens from your address; try again in {after} s."
            return RequestError(429, "too_many_failures", message, {"Retry-After": str(after)})
        return RequestError(401, "invalid_token", message, {"WWW-Authenticate": 'Bearer error="invalid_token"'})

    def reject_missing(self) -> None:
        """Raise the error for a request without a token."""
        self.metrics.authentication_failures.labels("missing").inc()
        message = "a token is required; send Authorization: Bearer TOKEN."
        raise RequestError(401, "missing_token", message, {"WWW-Authenticate": "Bearer"})

    async def limit(self, method: str, record: RequestRecord) -> None:
        """Raise RequestError if the client is over its rate limit.

        A request counts as one image on arrival, so that it is rejected before its body is read. Its other images are
        counted when their number is known; they may overdraw the bucket, and the next request waits for that.
        """
        limit = record.rate_limit
        if limit is None or method in UNLIMITED_METHODS:
            return
        allowed, full_in = self.buckets.take(record.client, limit)
        record.headers[1:] = rate_headers(limit, full_in)
        if allowed:
            record.on_images = _Charge(self.buckets, record, limit)
            return
        self.metrics.rate_limited.inc()
        seconds = limit.seconds_until_one(full_in)
        await asyncio.sleep(min(seconds, LIMITED_DELAY_S))
        after = max(math.ceil(seconds), 1)
        whose = "this token" if record.token is not None else "your address"
        message = f"the rate limit of {whose} is {limit.describe()}; try again in {after} s."
        raise RequestError(429, "rate_limited", message, {"Retry-After": str(after)})

    def finish(self, record: RequestRecord, scope: Scope, method: str, route: str, status: int) -> None:
        """Write the line of a request and end its span."""
        if self.log is None and self.spans is None:
            return
        fields = self._describe(record, scope.get("state", {}), method, route, status)
        if self.spans is not None:
            self.spans.finish(record, fields)
        if self.log is not None:
            self.log.write(fields)

    def refused(self, host: str, request_id: str, status: int, code: str) -> None:
        """Write the line of a request that the protocol has refused, such as one with endless headers."""
        if self.log is not None:
            record = RequestRecord(request_id, host)
            record.error = code
            self.log.write(self._describe(record, {}, "", "", status))

    def _describe(
        self, record: RequestRecord, state: dict[str, Any], method: str, route: str, status: int
    ) -> dict[str, Any]:
        """What the access log says about a request."""
        engine, (model, version) = record.engine_seconds or None, state.get("model", (None, None))
        return {
            "time": utc_time(record.started_at),
            "request_id": record.id,
            "client": record.address[:64] or "unix",
            "token": record.token,
            "method": method[:MAX_METHOD],
            "route": route,
            "status": status,
            "error": record.error,
            "bytes_in": record.bytes_in,
            "bytes_out": record.bytes_out,
            "images": record.images or None,
            "model": model,
            "version": version,
            "ms": _milliseconds(record.seconds),
            "queue_ms": _milliseconds(record.queue_seconds),
            "engine_ms": _milliseconds(engine),
            "trace_id": record.trace_id,
        }

    def close(self) -> None:
        """Write the last lines and spans."""
        if self.log is not None:
            self.log.close()
        if self.spans is not None:
            self.spans.close()


class _Charge:
    """Charges the images of a request, of which the first has been counted on arrival."""

    def __init__(self, buckets: BucketTable, record: RequestRecord, limit: RateLimit) -> None:
        self.buckets, self.record, self.limit = buckets, record, limit

    def __call__(self, count: int) -> None:
        extra = count - (self.record.images == count)
        if extra:
            full_in = self.buckets.charge(self.record.client, self.limit, extra)
            self.record.headers[1:] = rate_headers(self.limit, full_in)


def _find_headers(scope: Scope, *names: bytes) -> list[list[bytes]]:
    """The values of each of these headers."""
    found: dict[bytes, list[bytes]] = {name: [] for name in names}
    for name, value in scope["headers"]:
        if name in found:
            found[name].append(value)
    return list(found.values())


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
