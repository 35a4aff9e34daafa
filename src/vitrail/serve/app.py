"""The routes: each reads a request, asks the batcher and says what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vitrail import __version__
from vitrail.errors import ModelError, VitrailError
from vitrail.serve import schema, web
from vitrail.serve.answers import description, ranked
from vitrail.serve.batching import Batcher, Progress, Want, late
from vitrail.serve.bodies import Body, deadline_of, read_body, swallow
from vitrail.serve.images import Images, Pixels
from vitrail.serve.limits import Limits, Work
from vitrail.serve.looking import Asked, Looker, positions
from vitrail.serve.metrics import Metrics
from vitrail.serve.problems import CODES, Gone, Problem, told
from vitrail.serve.quota import Lease, Quota, client_of
from vitrail.serve.security import Guard
from vitrail.serve.served import Floats, Served
from vitrail.serve.streaming import Newest, in_lines, wants_lines

LINGER = 1.0
"""Seconds for which the rest of a refused body is still taken in: who is sending does not listen."""

HOLD, LEAST, RECEIVED = 1.0, 0.1, 8e6
"""Seconds for which the refusal of a body is held back, at most and at least, and the bytes that count for one."""

Answer = dict[str, Any]


class Service:
    """One model and everything that answers for it."""

    def __init__(self, served: Served, limits: Limits, work: Work) -> None:
        self.room = Quota("bytes of requests are here already", work.queue_bytes, close=True)
        self.uploads = Quota("requests are being read already", work.uploads, close=True)
        self.metrics = Metrics()
        self.images = Images(served.preprocess, limits, served.grid)
        self.batcher = Batcher(served, self.images, work, self.metrics)
        most = {"images": min(limits.images, self.batcher.waiting.share), "bytes": min(limits.bytes, self.room.share)}
        limits = replace(limits, **most)  # more could never be let in
        self.served, self.limits, self.work = served, limits, work
        self.metrics.build.labels(served.name, served.engine.name, served.engine.precision, __version__).set(1)
        self.looker = Looker(served, self.images)
        self.draining = False
        self.about = description(served, limits)
        self._positions: Answer | None = None

    async def model(self) -> Response:
        """The model: its classes, its size, what it can explain, and what a request may bring."""
        return JSONResponse(self.about)

    async def predict(self, request: Request) -> Response:
        """The likeliest classes of each image, best first."""
        return await self._post(request, schema.PredictValues, self._predict)

    async def embed(self, request: Request) -> Response:
        """Numbers to compare images by: what the model's head would read."""
        return await self._post(request, schema.HideValues, self._embed)

    async def explain(self, request: Request) -> Response:
        """What happens inside for one image: maps, attention of every token, how far heads look."""
        if not wants_lines(request):
            return await self._post(request, schema.ExplainValues, self._explain)
        newest = Newest()
        explain = partial(self._explain, progress=newest.put)
        return await in_lines(self._post(request, schema.ExplainValues, explain), newest, self.metrics)

    async def image(self, request: Request) -> Response:
        """One image as the network sees it: resized, cut, and without what is hidden."""
        return await self._post(request, schema.HideValues, self._image)

    async def positions(self) -> Response:
        """How alike the positions of any two patches are."""
        if self._positions is None:
            try:
                self._positions = await asyncio.to_thread(positions, self.served)
            except ModelError as error:
                raise Problem(404, "no_positions", told(error, "this model has no positions.")) from None
        return JSONResponse(self._positions)

    async def samples(self) -> Response:
        """Images to try."""
        return JSONResponse(web.samples())

    async def alive(self) -> Response:
        """The process lives."""
        return JSONResponse({"status": "alive"})

    async def ready(self) -> Response:
        """The model has answered once, and the server is not about to stop."""
        if self.draining:
            raise Problem(503, "draining", "the server is about to stop.", {"Retry-After": "1"})
        if not self.batcher.warm:
            raise Problem(503, "not_ready", "the model has not answered yet.", {"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    async def numbers(self) -> Response:
        """What Prometheus reads."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _post(
        self,
        request: Request,
        kind: type[BaseModel],
        work: Callable[[Body, Any, float | None, asyncio.Future[None]], Awaitable[Answer]],
    ) -> Response:
        """What all POSTs share: time, room, the body, its values; and a client that may hang up."""
        start = time.monotonic()
        deadline, share = deadline_of(request, start), Lease(self.room, client_of(request.scope))
        try:
            body = await self._read(request, deadline, share)
            values = schema.read_values(kind, body.values)
            if deadline is not None and time.monotonic() > deadline:
                raise late()
            gone = asyncio.ensure_future(_gone(request))
            try:
                answer = await work(body, values, deadline, gone)
            finally:
                gone.cancel()
        except Gone:
            self.metrics.gone.inc()
            return Response(status_code=499)  # nobody reads it
        except VitrailError as error:
            raise Problem(400, "bad_value", told(error, "this model cannot do that.")) from None
        finally:
            share.release()
        return JSONResponse({**answer, "ms": round(1000 * (time.monotonic() - start), 2)})

    async def _read(self, request: Request, deadline: float | None, share: Lease) -> Body:
        """The body, if there is room for it; a refused one is taken in for a moment, so that the refusal is heard."""
        try:
            return await self._admitted(request, deadline, share)
        except Problem as problem:
            refusal = problem.with_traceback(None)  # which would keep what has been read
        share.release()
        if refusal.status in (413, 415, 429, 503) and "expect" not in request.headers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    await swallow(request, 4 * self.limits.bytes)
        raise refusal

    async def _admitted(self, request: Request, deadline: float | None, share: Lease) -> Body:
        reading = Lease(self.uploads, share.client)
        reading.take(1)
        try:
            self.batcher.check_room(share.client)
            return await read_body(request, self.limits, share, deadline)
        finally:
            reading.release()

    async def _predict(
        self, body: Body, values: schema.PredictValues, deadline: float | None, gone: asyncio.Future[None]
    ) -> Answer:
        if not self.served.classifies:
            raise Problem(400, "no_classes", "this model has no classes: it gives features; try /v1/embed.")
        rows = await self._answered(body, values, "logits", deadline, gone)
        results = [{"predictions": ranked(self.served.info, row, values.top)} for row in rows]
        return {"model": self.served.name, "engine": self.served.engine.name, "results": results}

    async def _answered(
        self,
        body: Body,
        values: schema.HideValues,
        want: Want,
        deadline: float | None,
        gone: asyncio.Future[None],
    ) -> list[Floats]:
        """What the engine makes of each image, without the patches that are to be hidden."""
        self.images.check_hidden(values.hide)
        return await self.batcher.answer(body.images, body.client, want, self._hiding(values), deadline, gone)

    def _hiding(self, values: schema.HideValues) -> Callable[[Pixels], Pixels] | None:
        """What is done to an image's pixels."""
        return partial(self.images.without, hide=values.hide, fill=values.fill) if values.hide else None

    async def _embed(
        self, body: Body, values: schema.HideValues, deadline: float | None, gone: asyncio.Future[None]
    ) -> Answer:
        if not self.served.embeds:
            message = "an exported file gives classes and no features; serve the checkpoint it was made from."
            raise Problem(501, "no_features", message)
        rows = await self._answered(body, values, "features", deadline, gone)
        results = [{"embedding": row.tolist()} for row in rows]
        return {"model": self.served.name, "dimension": len(rows[0]), "results": results}

    async def _image(
        self, body: Body, values: schema.HideValues, deadline: float | None, gone: asyncio.Future[None]
    ) -> Answer:
        if len(body.images) > 1:
            raise Problem(400, "one_image", f"got {len(body.images)} images, wanted one to show.")
        self.images.check_hidden(values.hide)
        found = await self.batcher.look(
            body.images[0], body.client, self.looker.only_seen, self._hiding(values), deadline, gone
        )
        return {"model": self.served.name, **found}

    async def _explain(
        self,
        body: Body,
        values: schema.ExplainValues,
        deadline: float | None,
        gone: asyncio.Future[None],
        progress: Progress | None = None,
    ) -> Answer:
        if len(body.images) > 1:
            raise Problem(400, "one_image", f"got {len(body.images)} images, wanted one to explain.")
        asked = Asked(
            layers=None if values.layers is None else tuple(values.layers),
            methods=None if values.methods is None else tuple(dict.fromkeys(values.methods)),
            target=values.target,
            hide=tuple(values.hide),
            fill=values.fill,
        )
        self.looker.check(asked)
        steps = partial(self.looker.steps, asked=asked)
        answer = await self.batcher.look(body.images[0], body.client, steps, None, deadline, gone, progress)
        return {"model": self.served.name, **answer}


async def _gone(request: Request) -> None:
    """Done when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    served: Served,
    limits: Limits | None = None,
    work: Work | None = None,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """The whole service as an ASGI app; `app.state.service` is what stands behind it.

    hosts: the names it is asked by, beside those of loopback; None: any.
    """
    service = Service(served, limits or Limits(), work or Work())

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await service.batcher.stop()

    app = FastAPI(
        title="vitrail",
        version=__version__,
        summary=f"{served.name} behind HTTP.",
        description="Images in, classes, features and what happens inside out.",
        docs_url=None,
        redoc_url=None,
        lifespan=life,
        redirect_slashes=False,
    )
    app.state.service = service
    _add_routes(app, service, token is not None, hosts is not None)
    for kind in (Problem, HTTPException):
        app.add_exception_handler(kind, partial(_refused, service.metrics))
    app.add_middleware(Guard, metrics=service.metrics, token=token, hosts=hosts, routes=app.router.routes)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema.add_examples(plain(), service.about)
        return plain()

    app.openapi = openapi
    return app


def _add_routes(app: FastAPI, service: Service, closed: bool, named: bool) -> None:
    locked = (401,) * closed + (421,) * named
    posts: list[tuple[str, Any, Any, Any, bool, tuple[int, ...]]] = [
        ("/v1/predict", service.predict, schema.PredictAnswer, schema.PredictValues, True, ()),
        ("/v1/embed", service.embed, schema.EmbedAnswer, schema.HideValues, True, (501,)),
        ("/v1/explain", service.explain, schema.ExplainAnswer, schema.ExplainValues, False, (501,)),
        ("/v1/image", service.image, schema.ImageAnswer, schema.HideValues, False, ()),
    ]
    for path, route, answer, values, several, errors in posts:
        refusals = schema.problems(400, *locked, 403, 408, 413, 415, 429, 431, *errors, 503, 504)
        extra = schema.posted(values, several, service.about)
        found = {"model": answer, **(schema.IN_LINES if path == "/v1/explain" else {})}
        app.post(path, responses={200: found, **refusals}, response_model=None, openapi_extra=extra)(route)
    gets: list[tuple[str, Any, Any, tuple[int, ...]]] = [
        ("/v1/model", service.model, schema.ModelAnswer, locked),
        ("/v1/positions", service.positions, schema.PositionsAnswer, (*locked, 404)),
        ("/v1/samples", service.samples, list[schema.Sample], locked),
        ("/healthz", service.alive, schema.Alive, (421,) * named),
        ("/readyz", service.ready, schema.Ready, (*(421,) * named, 503)),
    ]
    for path, route, answer, errors in gets:
        app.get(path, responses={200: {"model": answer}, **schema.problems(*errors)}, response_model=None)(route)
    text: dict[int | str, Any] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format."}
    }
    app.get("/metrics", responses={**text, **schema.problems(*locked)}, response_class=Response)(service.numbers)
    pages = {"/": "index.html", "/docs": "docs.html"}
    for path, name in pages.items():
        app.get(path, include_in_schema=False)(_file(name))
    app.get("/static/{name:path}", include_in_schema=False)(_static)
    app.get("/samples/{name}", include_in_schema=False)(_sample)


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def found(request: Request) -> Response:
        return web.page(request, name)

    return found


async def _static(request: Request, name: str) -> Response:
    return web.page(request, name)


async def _sample(request: Request, name: str) -> Response:
    return web.page(request, f"samples/{name}")


async def _refused(metrics: Metrics, request: Request, error: Exception) -> Response:
    problem = error if isinstance(error, Problem) else _unrouted(request, error)
    metrics.refused.labels(problem.code).inc()
    problem.__traceback__ = problem.__context__ = None  # which keep what the request brought
    await asyncio.sleep(_hold(problem, getattr(request.state, "received", 0)))
    return problem.response()


def _hold(problem: Problem, received: int) -> float:
    """Seconds to wait before a refusal, so that a client that sends the same again at once does not keep the server
    busy with reading it."""
    if problem.status in (413, 429):
        return HOLD
    return min(max(received / RECEIVED, LEAST), HOLD) if received else 0


def _unrouted(request: Request, error: Exception) -> Problem:
    """What the router refuses: no such address, or not with this method."""
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this address.", 405: f"{request.method[:10]} is not answered at this address."}
    message = words.get(error.status_code, "this request cannot be answered.")
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    return Problem(error.status_code, CODES.get(error.status_code, "bad_request"), message, headers)
