"""The routes of the HTTP service."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from vitrail import __version__
from vitrail.errors import VitrailError
from vitrail.serve import protocol_schema, response_types, schema, static_files
from vitrail.serve.access import Access, AccessConfig
from vitrail.serve.admin import add_admin_routes
from vitrail.serve.batching import ProgressCallback, deadline_error
from vitrail.serve.call import Call
from vitrail.serve.decode_pool import LargeImageLimits
from vitrail.serve.explain_requests import ExplainRequest
from vitrail.serve.http_errors import DEFAULT_CODES, ClientDisconnected, RequestError, public_message
from vitrail.serve.limits import BatchingConfig, Limits
from vitrail.serve.model_manager import ModelManager
from vitrail.serve.model_registry import ModelRegistry
from vitrail.serve.model_version import ModelVersion
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.protocol_routes import add_protocol_routes
from vitrail.serve.quota import Lease, Quota, client_key, default_client_limit
from vitrail.serve.request_parsing import BodyParser, RequestBody, discard_body, parse_body, read_body, read_deadline
from vitrail.serve.responses import list_models, top_classes
from vitrail.serve.security import SecurityMiddleware
from vitrail.serve.served_model import ServedModel
from vitrail.serve.streaming import LatestValue, accepts_ndjson, stream_ndjson
from vitrail.serve.version_loader import ModelsConfig

DISCARD_BODY_S = 1.0
"""Seconds for which the rest of a rejected body is received, because many clients read only after sending."""

MAX_REFUSAL_DELAY_S, MIN_REFUSAL_DELAY_S, REFUSED_BYTES_PER_S = 1.0, 0.1, 8e6
"""Delay of an error response to a request with a body: maximum and minimum seconds, and bytes per second of delay."""

NO_FRAMEWORK_SPANS = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)
"""Recent versions of FastAPI can send spans of their own, with query strings and tracebacks; spans.py makes ours."""

JSONObject = dict[str, Any]
Parameters = TypeVar("Parameters", bound=schema.ModelParameters)

POST_PARAMETERS: dict[str, tuple[type[schema.ModelParameters], bool]] = {
    "/v1/predict": (schema.PredictParameters, True),
    "/v1/embed": (schema.HideParameters, True),
    "/v1/explain": (schema.ExplainParameters, False),
    "/v1/preprocess": (schema.HideParameters, False),
    "/invocations": (schema.PredictParameters, True),
}
"""Parameters of the POST routes, and whether they take several images."""


class Service:
    """The routes, and the objects behind them: models, quotas, metrics."""

    def __init__(self, limits: Limits, batching: BatchingConfig) -> None:
        self.body_bytes = Quota(
            "bytes of request bodies are in memory already", batching.max_queue_bytes, close_connection=True
        )
        self.uploads = Quota("requests are being read already", batching.max_uploads, close_connection=True)
        self.metrics = Metrics()
        self.registry = ModelRegistry(self.metrics)
        reduced = {
            "max_images": min(limits.max_images, default_client_limit(batching.max_queue)),
            "max_bytes": min(limits.max_bytes, self.body_bytes.client_limit),
        }
        self.limits = replace(limits, **reduced)  # a larger request could never be queued
        self.large_images = LargeImageLimits(self.limits, batching.decode_threads)
        self.manager: ModelManager | None = None
        """Loads and removes models; None if the models are fixed."""
        self.draining = False

    @property
    def default(self) -> ModelVersion:
        """The version that answers requests without a model and version."""
        return self.registry.get()

    @property
    def is_ready(self) -> bool:
        """Whether the models are warmed up."""
        return self.registry.ready if self.manager is None else self.manager.ready

    @property
    def startup_complete(self) -> bool:
        """Whether that is so, or no model is left that could become ready."""
        return self.is_ready if self.manager is None else self.manager.startup_complete

    def create_version(
        self, served: ServedModel, batching: BatchingConfig, name: str | None = None, version: str = "1"
    ) -> ModelVersion:
        """A version with the limits of this service, not yet in the registry. Callable from any thread."""
        shared = {"name": name, "version": version, "large_images": self.large_images}
        return ModelVersion(served, self.limits, batching, self.metrics, **shared)  # type: ignore[arg-type]

    def manage(self, models: ModelsConfig, batching_for: Callable[[ServedModel], BatchingConfig]) -> None:
        """Serve the models of a folder, from the start of the app on."""

        def create(served: ServedModel, name: str, version: str) -> ModelVersion:
            return self.create_version(served, batching_for(served), name, version)

        self.manager = ModelManager(self.registry, models, create)

    async def models(self) -> Response:
        """The models, and the state of each of their versions."""
        return JSONResponse(list_models(self.registry.describe()))

    async def model(self, request: Request) -> Response:
        """One model: classes, size, explanation methods, and the limits on a request."""
        with self._lease_from_query(request) as version:
            return JSONResponse(version.description)

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

    async def positions(self, request: Request) -> Response:
        """Similarity of the position embeddings of every pair of patches."""
        with self._lease_from_query(request) as version:
            return JSONResponse({"model": version.name, "version": version.version, **(await version.positions())})

    async def samples(self) -> Response:
        """The sample images."""
        return JSONResponse(static_files.samples())

    async def health(self) -> Response:
        """Liveness: the process runs."""
        return JSONResponse({"status": "alive"})

    async def ready(self) -> Response:
        """Readiness: the models are warmed up, and the server is not shutting down."""
        if self.draining:
            raise RequestError(503, "shutting_down", "the server is shutting down.", {"Retry-After": "1"})
        if not self.is_ready:
            message = "no model is loaded; see /v1/models." if self.startup_complete else "the models are warming up."
            raise RequestError(503, "not_ready", message, {"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    async def prometheus(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self.metrics.render(), media_type=self.metrics.content_type)

    @contextlib.contextmanager
    def lease(self, request: Request, name: str | None, version: str | None) -> Iterator[ModelVersion]:
        """The chosen version, kept alive during the `with` block; the metrics of the request name it."""
        with self.registry.lease(name, version) as found:
            request.state.model = (found.name, found.version)
            yield found

    def _lease_from_query(self, request: Request) -> contextlib.AbstractContextManager[ModelVersion]:
        """The version that the query string chooses."""
        query = request.query_params
        return self.lease(request, query.get("model"), query.get("version"))

    async def _post(
        self,
        request: Request,
        parameters_type: type[Parameters],
        handler: Callable[[Call, Parameters], Awaitable[JSONObject | Response]],
        parse: BodyParser = parse_body,
    ) -> Response:
        """Common part of all POST routes: deadline, quotas, body, parameters, model, disconnects."""
        start = time.monotonic()
        deadline, lease = read_deadline(request, start), Lease(self.body_bytes, client_key(request.scope))
        try:
            body = await self.read_body(request, deadline, lease, parse)
            parameters = schema.validate_parameters(parameters_type, body.parameters)
            if deadline is not None and time.monotonic() > deadline:
                raise deadline_error()
            disconnected = asyncio.ensure_future(wait_for_disconnect(request))
            try:
                with self.lease(request, *parameters.chosen) as version:
                    result = await handler(Call(body, version, deadline, disconnected), parameters)
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
        if isinstance(result, Response):
            return result
        names = {"model": version.name, "version": version.version}
        return JSONResponse({**names, **result, "ms": round(1000 * (time.monotonic() - start), 2)})

    async def read_body(
        self, request: Request, deadline: float | None, lease: Lease, parse: BodyParser = parse_body
    ) -> RequestBody:
        """Read the body. After an error the rest is received for a moment, so that the client reads the response."""
        try:
            return await self._read_within_quota(request, deadline, lease, parse)
        except RequestError as failure:
            refusal = failure.with_traceback(None)  # the traceback would keep the body alive
        lease.release()
        if refusal.status in (413, 415, 429, 503) and "expect" not in request.headers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_BODY_S):
                    await discard_body(request, 4 * self.limits.max_bytes)
        raise refusal

    async def _read_within_quota(
        self, request: Request, deadline: float | None, lease: Lease, parse: BodyParser
    ) -> RequestBody:
        upload = Lease(self.uploads, lease.client)
        upload.acquire(1)
        try:
            self._check_queue(request, lease.client)
            return await read_body(request, self.limits, lease, deadline, parse)
        finally:
            upload.release()

    def _check_queue(self, request: Request, client: str) -> None:
        """Raise RequestError if the queue of the model is full, unless the body will tell which model it is."""
        chosen = {**request.query_params, **request.path_params}
        if len(self.registry.names) == 1 or "model" in chosen:
            self.registry.get(chosen.get("model"), chosen.get("version")).batcher.check_quota(client)

    async def _predict(self, call: Call, parameters: schema.PredictParameters) -> JSONObject:
        served = call.version.served
        rows = await call.infer("logits", parameters.hide, parameters.fill)
        results = [{"predictions": top_classes(served.info, row, parameters.top)} for row in rows]
        return {"engine": served.engine.name, "results": results}

    async def _embed(self, call: Call, parameters: schema.HideParameters) -> JSONObject:
        rows = await call.infer("features", parameters.hide, parameters.fill)
        return {"dimension": len(rows[0]), "results": [{"embedding": row.tolist()} for row in rows]}

    async def _preprocess(self, call: Call, parameters: schema.HideParameters) -> JSONObject:
        image, version = call.single_image(), call.version
        hider, steps = version.patch_hider(parameters.hide, parameters.fill), version.explainer.preprocess_steps
        client, waits = call.body.client, (call.deadline, call.disconnected)
        return dict(await version.batcher.explain(image, client, steps, hider, *waits))

    async def _explain(
        self, call: Call, parameters: schema.ExplainParameters, progress: ProgressCallback | None = None
    ) -> JSONObject:
        image, version = call.single_image(), call.version
        explain_request = ExplainRequest(
            layers=None if parameters.layers is None else tuple(parameters.layers),
            methods=None if parameters.methods is None else tuple(dict.fromkeys(parameters.methods)),
            target=parameters.target,
            hide=tuple(parameters.hide),
            fill=parameters.fill,
        )
        version.explainer.check(explain_request)
        steps, client = partial(version.explainer.steps, request=explain_request), call.body.client
        waits = (call.deadline, call.disconnected)
        return dict(await version.batcher.explain(image, client, steps, None, *waits, progress))


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    served: ServedModel | Sequence[ServedModel],
    limits: Limits | None = None,
    batching: BatchingConfig | None = None,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    models: ModelsConfig | None = None,
    batching_for: Callable[[ServedModel], BatchingConfig] | None = None,
    access_config: AccessConfig | None = None,
) -> FastAPI:
    """The service as an ASGI app; its `Service` is `app.state.service`.

    served: a model, or several with different names; hosts: accepted host names besides loopback; None: all;
    models: a folder of models to watch, `batching_for` gives their queues and threads.
    """
    batching = batching or BatchingConfig()
    service = Service(limits or Limits(), batching)
    access = Access(access_config or AccessConfig(), token, service.metrics.registry)
    if models is not None:
        service.manage(models, batching_for or (lambda _: batching))
    for one in [served] if isinstance(served, ServedModel) else served:
        service.registry.add(service.create_version(one, batching))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.registry.start()
        watcher = None if service.manager is None else asyncio.create_task(service.manager.run())
        yield
        if watcher is not None:
            watcher.cancel()
        await service.registry.stop()
        await asyncio.to_thread(access.close)

    app = FastAPI(
        title="vitrail",
        version=__version__,
        summary=f"HTTP API of {', '.join(service.registry.names) or 'several models'}.",
        description="Predictions, features and explanations for images.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        telemetry=NO_FRAMEWORK_SPANS,
    )
    app.state.service, app.state.access = service, access
    _add_routes(app, service, bool(access.tokens), hosts is not None)
    if service.manager is not None and models is not None and models.admin_token is not None:
        add_admin_routes(app, service.manager, access, models.admin_token)
    for error_type in (RequestError, HTTPException):
        app.add_exception_handler(error_type, partial(_error_response, service.metrics))
    app.add_middleware(
        SecurityMiddleware, metrics=service.metrics, access=access, hosts=hosts, routes=app.router.routes
    )
    app.openapi = partial(_openapi, app.openapi, service)
    return app


def _openapi(default_openapi: Callable[[], dict[str, Any]], service: Service) -> dict[str, Any]:
    """/openapi.json for the models that are loaded now."""
    described = copy.deepcopy(default_openapi())
    models = [version.description for version in service.registry]
    for path, (parameters, multiple_images) in POST_PARAMETERS.items():
        extra = schema.post_operation(parameters, multiple_images, models, service.limits.max_images)
        described["paths"][path]["post"] |= extra
    for path in ("/v1/model", "/v1/positions"):
        described["paths"][path]["get"] |= schema.model_query(models)
    protocol_schema.constrain_to_models(described["paths"], models, service.limits.max_images)
    if models:
        schema.add_examples(described, models[0])
    return described


def _add_routes(app: FastAPI, service: Service, requires_token: bool, checks_host: bool) -> None:
    access_errors = (401,) * requires_token + (421,) * checks_host
    post_routes: list[tuple[str, Any, Any, tuple[int, ...]]] = [
        ("/v1/predict", service.predict, response_types.PredictResponse, ()),
        ("/v1/embed", service.embed, response_types.EmbedResponse, (501,)),
        ("/v1/explain", service.explain, response_types.ExplainResponse, (501,)),
        ("/v1/preprocess", service.preprocess, response_types.PreprocessResponse, ()),
    ]
    for path, route, response_type, errors in post_routes:
        failures = schema.error_responses(400, *access_errors, 403, 404, 408, 413, 415, 429, 431, *errors, 503, 504)
        success = {"model": response_type, **(schema.NDJSON_RESPONSE if path == "/v1/explain" else {})}
        app.post(path, responses={200: success, **failures}, response_model=None)(route)
    get_routes: list[tuple[str, Any, Any, tuple[int, ...]]] = [
        ("/v1/models", service.models, response_types.ModelsResponse, access_errors),
        ("/v1/model", service.model, response_types.ModelResponse, (*access_errors, 404, 503)),
        ("/v1/positions", service.positions, response_types.PositionsResponse, (*access_errors, 404, 503)),
        ("/v1/samples", service.samples, list[response_types.Sample], access_errors),
        ("/healthz", service.health, response_types.HealthResponse, (421,) * checks_host),
        ("/readyz", service.ready, response_types.ReadyResponse, (*(421,) * checks_host, 503)),
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
    add_protocol_routes(app, service, service._post, access_errors, (421,) * checks_host)
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
    return failure.response(request.scope["path"])


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
