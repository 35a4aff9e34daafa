"""The routes of the protocols of other servers: Open Inference Protocol v2, OpenAI's embeddings, SageMaker."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vitrail.serve import openai_embeddings, protocol_schema, response_types, schema
from vitrail.serve.model_registry import ModelRegistry
from vitrail.serve.model_version import ModelVersion
from vitrail.serve.open_inference import OpenInference, PostFunction
from vitrail.serve.sagemaker import invoke


class ServiceRoutes(Protocol):
    """What the routes need of the service."""

    registry: ModelRegistry

    def lease(
        self, request: Request, name: str | None, version: str | None
    ) -> AbstractContextManager[ModelVersion]: ...

    async def ready(self) -> Response: ...

    async def predict(self, request: Request) -> Response: ...

    async def embed(self, request: Request) -> Response: ...


def add_protocol_routes(
    app: FastAPI,
    service: ServiceRoutes,
    post: PostFunction,
    access_errors: tuple[int, ...],
    host_errors: tuple[int, ...],
) -> None:
    """Add the routes. access_errors, host_errors: statuses of the checks of token and host, and of the host alone."""
    _add_open_inference(app, service, post, access_errors, host_errors)

    async def embeddings(request: Request) -> Response:
        """Embeddings in the shape of OpenAI's API."""
        return await post(request, schema.ModelParameters, openai_embeddings.answer, openai_embeddings.parse_body)

    async def invocations(request: Request) -> Response:
        """Amazon SageMaker's route for requests: as /v1/predict, or /v1/embed for a model without classes."""
        classifies = service.registry.get().served.classifies
        return await invoke(request, service.predict if classifies else service.embed)

    async def ping() -> Response:
        """Amazon SageMaker's readiness."""
        return await service.ready()

    failures = (400, *access_errors, 403, 404, 408, 413, 415, 429, 431, 501, 503, 504)
    app.post(
        "/v1/embeddings",
        responses=_success(protocol_schema.EmbeddingsResponse) | schema.error_responses(*failures),
        response_model=None,
        openapi_extra=protocol_schema.EMBEDDINGS_OPERATION,
    )(embeddings)
    responses = _success(response_types.PredictResponse) | schema.error_responses(*sorted({*failures, 406}))
    app.post("/invocations", responses=responses, response_model=None)(invocations)
    responses = _success(response_types.ReadyResponse) | schema.error_responses(*host_errors, 503)
    app.get("/ping", responses=responses, response_model=None)(ping)


def _add_open_inference(
    app: FastAPI,
    service: ServiceRoutes,
    post: PostFunction,
    access_errors: tuple[int, ...],
    host_errors: tuple[int, ...],
) -> None:
    protocol = OpenInference(service.registry, service.lease, post)

    async def ready() -> Response:
        """Readiness: the models are warmed up, and the server is not shutting down."""
        await service.ready()
        return JSONResponse({"ready": True})

    get_routes: list[tuple[str, Any, Any, tuple[int, ...]]] = [
        ("/v2", protocol.server, protocol_schema.ServerMetadata, access_errors),
        ("/v2/health/live", protocol.live, protocol_schema.ServerLive, host_errors),
        ("/v2/health/ready", ready, protocol_schema.ServerReady, (*host_errors, 503)),
    ]
    for path, route, response_type, errors in get_routes:
        responses = _success(response_type) | protocol_schema.plain_errors(*errors)
        app.get(path, responses=responses, response_model=None)(route)
    responses = _success(list[protocol_schema.IndexedVersion]) | protocol_schema.plain_errors(*access_errors, 403)
    app.post("/v2/repository/index", responses=responses, response_model=None)(protocol.repository_index)
    inference = protocol_schema.plain_errors(400, *access_errors, 403, 404, 408, 413, 415, 429, 431, 501, 503, 504)
    metadata = protocol_schema.plain_errors(*access_errors, 404, 503)
    # A name may contain slashes and takes what it can, so versioned paths are matched first, and the bare name last.
    for versioned in (True, False):
        path = "/v2/models/{name:path}" + "/versions/{version}" * versioned
        app.post(
            f"{path}/infer",
            responses={200: protocol_schema.BINARY_RESPONSE, **inference},
            response_model=None,
            openapi_extra=protocol_schema.inference_operation(versioned),
        )(protocol.infer)
        add_get = partial(app.get, response_model=None, openapi_extra=protocol_schema.model_path(versioned))
        add_get(f"{path}/ready", responses=_success(protocol_schema.ModelReady) | metadata)(protocol.model_ready)
        add_get(path, responses=_success(protocol_schema.ModelMetadata) | metadata)(protocol.model)


def _success(response_type: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": response_type}}
