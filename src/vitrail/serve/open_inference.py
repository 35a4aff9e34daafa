"""Routes of the Open Inference Protocol v2 (KServe, Triton), over HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vitrail import __version__
from vitrail.serve import schema
from vitrail.serve.batching import OutputName
from vitrail.serve.call import Call
from vitrail.serve.http_errors import RequestError
from vitrail.serve.inference_outputs import describe_outputs, engine_outputs, output_tensors, requested_outputs
from vitrail.serve.limits import Limits
from vitrail.serve.model_registry import ModelRegistry
from vitrail.serve.model_version import ModelVersion
from vitrail.serve.request_parsing import BodyParser, Chunks, RequestBody, join_chunks, request_type
from vitrail.serve.served_model import Floats
from vitrail.serve.tensor_codec import INPUT, InferenceRequest, decode_request, encode_response

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header with the number of bytes of JSON before the binary data."""
EXTENSIONS = ("binary_tensor_data", "classification")
"""Extensions of Triton that the service supports completely."""
CONTENT_TYPES = ("", "application/json", "application/octet-stream", "application/x-www-form-urlencoded")
HEADER_LENGTH_PATTERN = re.compile(r"\d{1,12}", re.ASCII)
STATES = {
    "available": "UNAVAILABLE",
    "loading": "LOADING",
    "comparing": "LOADING",
    "warming_up": "LOADING",
    "ready": "READY",
    "draining": "UNLOADING",
    "failed": "UNAVAILABLE",
}
"""States of a version, and their names in the protocol."""

LeaseFunction = Callable[[Request, str | None, str | None], AbstractContextManager[ModelVersion]]
"""Leases a version of a model for a request, as `Service.lease`."""
PostFunction = Callable[[Request, Any, Any, BodyParser], Awaitable[Response]]
"""Answers a POST request within limits, as `Service._post`: takes the type of parameters, a handler and a parser."""


@dataclass
class InferenceBody(RequestBody):
    """A parsed body of an inference request."""

    inference: InferenceRequest = field(default_factory=lambda: InferenceRequest(images=[]))


class OpenInference:
    """The routes, for the models of a registry."""

    def __init__(self, registry: ModelRegistry, lease: LeaseFunction, post: PostFunction) -> None:
        self.registry, self.lease, self.post = registry, lease, post

    async def server(self) -> Response:
        """Name, version and extensions of the server."""
        return JSONResponse({"name": "vitrail", "version": __version__, "extensions": list(EXTENSIONS)})

    async def live(self) -> Response:
        """Liveness: the process runs."""
        return JSONResponse({"live": True})

    async def model(self, request: Request) -> Response:
        """Metadata of a model: its versions, inputs and outputs."""
        with self.lease(request, *_chosen(request)) as found:
            return JSONResponse(
                {
                    "name": found.name,
                    "versions": [one.version for one in self.registry.versions(found.name)],
                    "platform": f"vitrail_{found.served.engine.name}",
                    "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}],
                    "outputs": describe_outputs(found.served),
                }
            )

    async def model_ready(self, request: Request) -> Response:
        """Readiness of a model: it is warmed up."""
        with self.lease(request, *_chosen(request)) as found:
            if not found.ready:
                raise RequestError(503, "not_ready", "the model is warming up.", {"Retry-After": "1"})
            return JSONResponse({"name": found.name, "ready": True})

    async def repository_index(self) -> Response:
        """Every version of every model, and its state."""
        described = [(model["name"], one) for model in self.registry.describe() for one in model["versions"]]
        return JSONResponse(
            [
                {
                    "name": name,
                    "version": one["version"],
                    "state": STATES[one["state"]],
                    "reason": one.get("reason") or "",
                }
                for name, one in described
            ]
        )

    async def infer(self, request: Request) -> Response:
        """Outputs of the model for images."""
        self.registry.get(*_chosen(request))  # an unknown model is refused before the body is read
        answer = partial(_infer, start=time.monotonic())
        return await self.post(request, schema.ModelParameters, answer, _parse)


async def _infer(call: Call, parameters: schema.ModelParameters, start: float) -> Response:
    assert isinstance(call.body, InferenceBody)
    inference, version = call.body.inference, call.version
    if inference.timeout_s is not None:
        deadline = start + inference.timeout_s
        call = replace(call, deadline=deadline if call.deadline is None else min(deadline, call.deadline))
    outputs = requested_outputs(inference, version.served)
    computed: dict[OutputName, list[Floats]] = {}
    for name in engine_outputs(outputs):
        computed[name] = await call.infer(name)
    tensors = output_tensors(version.served.info, outputs, computed)
    body, header_length = encode_response(version.name, version.version, inference.id, tensors)
    if header_length is None:
        return Response(body, media_type="application/json")
    return Response(body, headers={HEADER_LENGTH: str(header_length)}, media_type="application/octet-stream")


def _chosen(request: Request) -> tuple[str, str | None]:
    """Model and version in the path."""
    return request.path_params["name"], request.path_params.get("version")


async def _parse(request: Request, chunks: Chunks, limits: Limits) -> RequestBody:
    if request_type(request) not in CONTENT_TYPES:
        message = f"got a body of type {request_type(request)[:80]!r}, expected application/json or "
        raise RequestError(415, "unsupported_body", f"{message}application/octet-stream.")
    length = _header_length(request)
    inference = decode_request(await join_chunks(chunks), length, limits)
    return InferenceBody(
        inference.images, dict(zip(("model", "version"), _chosen(request), strict=True)), inference=inference
    )


def _header_length(request: Request) -> int | None:
    text = request.headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not HEADER_LENGTH_PATTERN.fullmatch(text):
        raise RequestError(400, "invalid_tensor", f"{HEADER_LENGTH} must be the number of bytes of the JSON.")
    return int(text)
