"""The routes of the HTTP service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vitrail import __version__
from vitrail.errors import ModelError, VitrailError
from vitrail.serve import schema, static_files
from vitrail.serve.access import Access, AccessConfig
from vitrail.serve.batching import Batcher, OutputName, ProgressCallback, deadline_error
from vitrail.serve.explain_requests import Explainer, ExplainRequest, encode_positions
from vitrail.serve.http_errors import DEFAULT_CODES, ClientDisconnected, RequestError, public_message
from vitrail.serve.image_decoder import ImageDecoder, Pixels
from vitrail.serve.limits import BatchingConfig, Limits
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.quota import Lease, Quota, client_key
from vitrail.serve.request_parsing import RequestBody, discard_body, read_body, read_deadline
from vitrail.serve.responses import describe_model, top_classes
from vitrail.serve.security import SecurityMiddleware
from vitrail.serve.served_model import Floats, ServedModel
from vitrail.serve.streaming import LatestValue, accepts_ndjson, stream_ndjson

DISCARD_BODY_S = 1.0
"""Seconds for which the rest of a rejected body is received, because many clients read only after sending."""

MAX_REFUSAL_DELAY_S, MIN_REFUSAL_DELAY_S, REFUSED_BYTES_PER_S = 1.0, 0.1, 8e6
"""Delay of an error response to a request with a body: maximum and minimum seconds, and bytes per second of delay."""

NO_FRAMEWORK_SPANS = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)
"""Recent versions of FastAPI can send spans of their own, with query strings and tracebacks; spans.py makes ours."""

JSONObject = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A POST request that has been received and is not yet answered."""

    body: RequestBody
    deadline: float | None
    disconnected: asyncio.Future[None]

    def single_image(self) -> bytes | str:
        """The image of a route that takes only one."""
        if len(self.body.images) > 1:
            raise RequestError(400, "single_image_only", f"got {len(self.body.images)} images, expected 1.")
        return self.body.images[0]


class Service:
    """The routes of one model, and the objects behind them."""

    def __init__(self, served: ServedModel, limits: Limits, batching: BatchingConfig) -> None:
        self.body_bytes = Quota(
            "bytes of request bodies are in memory already", batching.max_queue_bytes, close_connection=True
        )
        self.uploads = Quota("requests are being read already", batching.max_uploads, close_connection=True)
        self.metrics = Metrics()
        self.image_decoder = ImageDecoder(served.preprocess, limits, served.grid)
        self.batcher = Batcher(served, self.image_decoder, batching, self.metrics)
        reduced = {
            "max_images": min(limits.max_images, self.batcher.image_quota.client_limit),
            "max_bytes": min(limits.max_bytes, self.body_bytes.client_limit),
        }
        limits = replace(limits, **reduced)  # a larger request could never be queued
        self.served, self.limits, self.batching = served, limits, batching
        self.metrics.build_info.labels(served.name, served.engine.name, served.engine.precision, __version__).set(1)
        self.explainer = Explainer(served, self.image_decoder)
        self.draining = False
        self.description = describe_model(served, limits)
        self._positions: JSONObject | None = None

    async def model(self) -> Response:
        """The model: classes, size, explanation methods, and the limits on a request."""
        return JSONResponse(self.description)

    async def predict(self, request: Request) -> Response:
        """The top classes of each image, best first."""
        return await self._post(request, schema.PredictParameters, self._predict)

    async def embed(self, request: Request) -> Response:
        """The features of each image: the input of the model's head."""
        return await self._post(request, schema.HideParameters, self._embed)

    async def explain(self, request: Request) -> Response:
        """Explanation of one image: maps, attention of every token, mean attention distances."""
        if not accepts_ndjson(request):
            return await self._post(request, schema.ExplainParameters, self._explain)
        latest = LatestValue()
        explain = partial(self._explain, progress=latest.put)
        return await stream_ndjson(self._post(request, schema.ExplainParameters, explain), latest, self.metrics)

    async def preprocess(self, request: Request) -> Response:
        """One image as the network receives it: resized, cropped, with hidden patches filled."""
        return await self._post(request, schema.HideParameters, self._preprocess)

    async def positions(self) -> Response:
        """Similarity of the position embeddings of every pair of patches."""
        if self._positions is None:
            try:
                self._positions = await asyncio.to_thread(encode_positions, self.served)
            except ModelError as error:
                raise RequestError(
                    404, "no_positions", public_message(error, "this model has no position embeddings.")
                ) from None
        return JSONResponse(self._positions)

    async def samples(self) -> Response:
        """The sample images."""
        return JSONResponse(static_files.samples())

    async def health(self) -> Response:
        """Liveness: the process runs."""
        return JSONResponse({"status": "alive"})

    async def ready(self) -> Response:
        """Readiness: the model is warmed up, and the server is not shutting down."""
        if self.draining:
            raise RequestError(503, "shutting_down", "the server is shutting down.", {"Retry-After": "1"})
        if not self.batcher.ready:
            raise RequestError(503, "not_ready", "the model is warming up.", {"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    async def prometheus(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self.metrics.render(), media_type=self.metrics.content_type)

    async def _post(
        self,
        request: Request,
        parameters_type: type[BaseModel],
        handler: Callable[[Call, Any], Awaitable[JSONObject]],
    ) -> Response:
        """Common part of all POST routes: deadline, quotas, body, parameters, disconnects."""
        start, request.state.model = time.monotonic(), self.served.name
        deadline, lease = read_deadline(request, start), Lease(self.body_bytes, client_key(request.scope))
        try:
            body = await self._read_body(request, deadline, lease)
            parameters = schema.validate_parameters(parameters_type, body.parameters)
            if deadline is not None and time.monotonic() > deadline:
                raise deadline_error()
            disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
            try:
                result = await handler(Call(body, deadline, disconnected), parameters)
            finally:
                disconnected.cancel()
        except ClientDisconnected:
            self.metrics.disconnects.inc()
            return Response(status_code=499)  # not read by anyone
        except VitrailError as error:
            raise RequestError(
                400, "invalid_parameter", public_message(error, "not supported by this model.")
            ) from None
        finally:
            lease.release()
        return JSONResponse({**result, "ms": round(1000 * (time.monotonic() - start), 2)})

    async def _read_body(self, request: Request, deadline: float | None, lease: Lease) -> RequestBody:
        """Read the body. After an error the rest is received for a moment, so that the client reads the response."""
        try:
            return await self._read_within_quota(request, deadline, lease)
        except RequestError as failure:
            refusal = failure.with_traceback(None)  # the traceback would keep the body alive
        lease.release()
        if refusal.status in (413, 415, 429, 503) and "expect" not in request.headers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_BODY_S):
                    await discard_body(request, 4 * self.limits.max_bytes)
        raise refusal

    async def _read_within_quota(self, request: Request, deadline: float | None, lease: Lease) -> RequestBody:
        upload = Lease(self.uploads, lease.client)
        upload.acquire(1)
        try:
            self.batcher.check_quota(lease.client)
            return await read_body(request, self.limits, lease, deadline)
        finally:
            upload.release()

    async def _predict(self, call: Call, parameters: schema.PredictParameters) -> JSONObject:
        if not self.served.classifies:
            raise RequestError(400, "no_classes", "this model has no classes, only features; try /v1/embed.")
        rows = await self._run_engine(call, parameters, "logits")
        results = [{"predictions": top_classes(self.served.info, row, parameters.top)} for row in rows]
        return {"model": self.served.name, "engine": self.served.engine.name, "results": results}

    async def _run_engine(self, call: Call, parameters: schema.HideParameters, output: OutputName) -> list[Floats]:
        """Engine outputs of each image, with the given patches hidden."""
        self.image_decoder.check_patches(parameters.hide)
        hider, body = self._patch_hider(parameters), call.body
        return await self.batcher.infer(body.images, body.client, output, hider, call.deadline, call.disconnected)

    def _patch_hider(self, parameters: schema.HideParameters) -> Callable[[Pixels], Pixels] | None:
        """Function that hides the patches in an image; None if there are none to hide."""
        return (
            partial(self.image_decoder.hide_patches, hide=parameters.hide, fill=parameters.fill)
            if parameters.hide
            else None
        )

    async def _embed(self, call: Call, parameters: schema.HideParameters) -> JSONObject:
        if not self.served.has_features:
            message = "an exported file has no features; serve the checkpoint it was made from."
            raise RequestError(501, "no_features", message)
        rows = await self._run_engine(call, parameters, "features")
        results = [{"embedding": row.tolist()} for row in rows]
        return {"model": self.served.name, "dimension": len(rows[0]), "results": results}

    async def _preprocess(self, call: Call, parameters: schema.HideParameters) -> JSONObject:
        image = call.single_image()
        self.image_decoder.check_patches(parameters.hide)
        steps, hider = self.explainer.preprocess_steps, self._patch_hider(parameters)
        result = await self.batcher.explain(image, call.body.client, steps, hider, call.deadline, call.disconnected)
        return {"model": self.served.name, **result}

    async def _explain(
        self, call: Call, parameters: schema.ExplainParameters, progress: ProgressCallback | None = None
    ) -> JSONObject:
        image = call.single_image()
        explain_request = ExplainRequest(
            layers=None if parameters.layers is None else tuple(parameters.layers),
            methods=None if parameters.methods is None else tuple(dict.fromkeys(parameters.methods)),
            target=parameters.target,
            hide=tuple(parameters.hide),
            fill=parameters.fill,
        )
        self.explainer.check(explain_request)
        steps = partial(self.explainer.steps, request=explain_request)
        result = await self.batcher.explain(
            image, call.body.client, steps, None, call.deadline, call.disconnected, progress
        )
        return {"model": self.served.name, **result}


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    served: ServedModel,
    limits: Limits | None = None,
    batching: BatchingConfig | None = None,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    access_config: AccessConfig | None = None,
) -> FastAPI:
    """The service as an ASGI app; its `Service` is `app.state.service`.

    hosts: accepted host names besides loopback; None: all.
    """
    service = Service(served, limits or Limits(), batching or BatchingConfig())
    access = Access(access_config or AccessConfig(), token, service.metrics.registry)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await service.batcher.stop()
        await asyncio.to_thread(access.close)

    app = FastAPI(
        title="vitrail",
        version=__version__,
        summary=f"HTTP API of {served.name}.",
        description="Predictions, features and explanations for images.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        telemetry=NO_FRAMEWORK_SPANS,
    )
    app.state.service, app.state.access = service, access
    _add_routes(app, service, bool(access.tokens), hosts is not None)
    for error_type in (RequestError, HTTPException):
        app.add_exception_handler(error_type, partial(_error_response, service.metrics))
    app.add_middleware(
        SecurityMiddleware, metrics=service.metrics, access=access, hosts=hosts, routes=app.router.routes
    )
    default_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema.add_examples(default_openapi(), service.description)
        return default_openapi()

    app.openapi = openapi
    return app


def _add_routes(app: FastAPI, service: Service, requires_token: bool, checks_host: bool) -> None:
    access_errors = (401,) * requires_token + (421,) * checks_host
    post_routes: list[tuple[str, Any, Any, Any, bool, tuple[int, ...]]] = [
        ("/v1/predict", service.predict, schema.PredictResponse, schema.PredictParameters, True, ()),
        ("/v1/embed", service.embed, schema.EmbedResponse, schema.HideParameters, True, (501,)),
        ("/v1/explain", service.explain, schema.ExplainResponse, schema.ExplainParameters, False, (501,)),
        ("/v1/preprocess", service.preprocess, schema.PreprocessResponse, schema.HideParameters, False, ()),
    ]
    for path, route, response_type, parameters, multiple_images, errors in post_routes:
        failures = schema.error_responses(400, *access_errors, 403, 408, 413, 415, 429, 431, *errors, 503, 504)
        extra = schema.post_operation(parameters, multiple_images, service.description)
        success = {"model": response_type, **(schema.NDJSON_RESPONSE if path == "/v1/explain" else {})}
        app.post(path, responses={200: success, **failures}, response_model=None, openapi_extra=extra)(route)
    get_routes: list[tuple[str, Any, Any, tuple[int, ...]]] = [
        ("/v1/model", service.model, schema.ModelResponse, access_errors),
        ("/v1/positions", service.positions, schema.PositionsResponse, (*access_errors, 404)),
        ("/v1/samples", service.samples, list[schema.Sample], access_errors),
        ("/healthz", service.health, schema.HealthResponse, (421,) * checks_host),
        ("/readyz", service.ready, schema.ReadyResponse, (*(421,) * checks_host, 503)),
    ]
    for path, route, response_type, errors in get_routes:
        app.get(
            path, responses={200: {"model": response_type}, **schema.error_responses(*errors)}, response_model=None
        )(route)
    text: dict[int | str, Any] = {
        200: {
            "content": {"text/plain": {"schema": {"type": "string"}}},
            "description": "Metrics in the Prometheus text format.",
        }
    }
    app.get("/metrics", responses={**text, **schema.error_responses(*access_errors)}, response_class=Response)(
        service.prometheus
    )
    pages = {"/": "index.html", "/docs": "docs.html"}
    for path, name in pages.items():
        app.get(path, include_in_schema=False)(_page_route(name))
    app.get("/static/{name:path}", include_in_schema=False)(_static)
    app.get("/samples/{name}", include_in_schema=False)(_sample)


def _page_route(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def found(request: Request) -> Response:
        return static_files.file_response(request, name)

    return found


async def _static(request: Request, name: str) -> Response:
    return static_files.file_response(request, name)


async def _sample(request: Request, name: str) -> Response:
    return static_files.file_response(request, f"samples/{name}")


async def _error_response(metrics: Metrics, request: Request, error: Exception) -> Response:
    failure = error if isinstance(error, RequestError) else _routing_error(request, error)
    metrics.errors.labels(failure.code).inc()
    failure.__traceback__ = failure.__context__ = None  # these would keep the request data alive
    await asyncio.sleep(_refusal_delay(failure, getattr(request.state, "received", 0)))
    return failure.response()


def _refusal_delay(failure: RequestError, received: int) -> float:
    """Seconds to delay an error response, so that a client that repeats its request at once does not keep the server
    busy."""
    if failure.status in (413, 429):
        return MAX_REFUSAL_DELAY_S
    return min(max(received / REFUSED_BYTES_PER_S, MIN_REFUSAL_DELAY_S), MAX_REFUSAL_DELAY_S) if received else 0


def _routing_error(request: Request, error: Exception) -> RequestError:
    """Error of the router: unknown path, or wrong method."""
    assert isinstance(error, HTTPException)
    messages = {
        404: "unknown path; see /docs.",
        405: f"got {request.method[:10]}, which this path does not support; see /docs.",
    }
    message = messages.get(error.status_code, "the request cannot be answered.")
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    return RequestError(error.status_code, DEFAULT_CODES.get(error.status_code, "bad_request"), message, headers)
