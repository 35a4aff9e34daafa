"""The routes of operators: reload the folder of models, load, unload and choose versions; with their own token.

A choice is written to a file that all workers follow within a second, and that a restarted server finds again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vitrail.serve.access import Access
from vitrail.serve.http_errors import RequestError
from vitrail.serve.model_choices import Choices, ModelChoice
from vitrail.serve.model_manager import ModelManager
from vitrail.serve.model_registry import version_key
from vitrail.serve.request_record import current_record

MAX_WAIT_S = 600.0
"""Upper limit of the parameter `wait`."""
ACTIONS = ("load", "unload", "default")

log = logging.getLogger("vitrail.serve")


class Admin:
    """The routes under /admin."""

    def __init__(self, manager: ModelManager, access: Access, token: str) -> None:
        self.manager, self.access, self.token = manager, access, token.encode()

    async def models(self, request: Request) -> Response:
        """Every model with the state, the path and the full reason of each version."""
        await self.check_token(request)
        return JSONResponse({"models": self.manager.describe(private=True)})

    async def reload(self, request: Request) -> Response:
        """List the folder now, without waiting for files to settle, and try again what has failed."""
        await self.check_token(request)
        wait = _read_wait(request)
        log.info("operator: reload")

        def count(choices: Choices) -> None:
            choices.reloads += 1

        await asyncio.to_thread(self._change, count)
        await self.manager.reload(wait)
        return JSONResponse({"models": self.manager.describe(private=True)})

    async def act(self, request: Request, name: str, version: str, action: str) -> Response:
        """load: keep a version in memory beside the default; unload: take it out of use; default: answer with it.

        `default` holds newer versions back that are in the folder now; one that comes later is used as usual. If the
        version turns out to be unusable while the request waits, the choice is taken back.
        """
        await self.check_token(request)
        if action not in ACTIONS:
            raise RequestError(404, "not_found", f"got {action[:40]!r}, expected one of {', '.join(ACTIONS)}.")
        wait = _read_wait(request)
        await self.manager.poll(complete=True, only=name)
        signatures = self._signatures(name, version)
        target = self.manager.target(name)
        in_use = None if target is None else target.found.version
        before, after = ModelChoice(), ModelChoice()
        log.info("operator: %s %s %s", action, name, version)

        def apply(choices: Choices) -> None:
            nonlocal before, after
            before = choices.of(name)
            after = choices.models[name] = _changed(before, action, version, signatures, in_use)
            choices.reloads += action != "unload"

        def take_back(choices: Choices) -> None:
            if choices.of(name) == after:  # no other operator has changed it since
                choices.models[name] = before

        await asyncio.to_thread(self._change, apply)
        await self.manager.reload(wait, only=name)
        status = self.manager.status.get((name, version))
        if action != "unload" and status is not None and status.state == "failed":
            if action == "default":
                await asyncio.to_thread(self._change, take_back)
                await self.manager.poll()
            raise RequestError(409, "version_failed", f"version {version} of {name}: {status.reason}")
        return JSONResponse({"models": self.manager.describe(private=True)})

    async def check_token(self, request: Request) -> None:
        """Raise RequestError unless the request has the token of operators."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            self.access.reject_missing()
        if not hmac.compare_digest(given.strip().encode(), self.token):
            raise await self.access.failure(current_record(), "wrong", "the token is wrong; use that of --admin-token.")

    def _change(self, change: Callable[[Choices], None]) -> None:
        with self.manager.choices_file.change() as choices:
            change(choices)

    def _signatures(self, name: str, version: str) -> dict[str, str]:
        """Signatures of the versions of a model in the folder; raises RequestError if this version is not there."""
        signatures = self.manager.signatures(name)
        if version not in signatures:
            found = ", ".join(sorted(signatures, key=version_key)) or "no version of it"
            message = f"the folder has no version {version[:80]!r} of {name[:80]!r}; there is {found}."
            raise RequestError(404, "unknown_version", message)
        return signatures


def _changed(
    choice: ModelChoice, action: str, version: str, signatures: Mapping[str, str], in_use: str | None
) -> ModelChoice:
    """The choice after an action. signatures: the versions in the folder; in_use: the default, or what will be it."""
    held = {one: found for one, found in choice.held.items() if signatures.get(one) == found}
    if action == "default":
        newer = {one: found for one, found in signatures.items() if version_key(one) > version_key(version)}
        held = {one: found for one, found in held.items() if one != version} | newer
    newest = max(signatures.keys() - held.keys(), key=version_key, default=None)
    if action == "unload" and version in (in_use, newest):
        held[version] = signatures[version]
    kept = {*choice.kept} - {version}
    return ModelChoice(held, sorted(kept | {version} if action == "load" else kept))


def _read_wait(request: Request) -> float:
    """Seconds to wait until loading has ended."""
    text = request.query_params.get("wait", "0")
    try:
        wait = float(text)
    except ValueError:
        wait = -1.0
    if not 0 <= wait <= MAX_WAIT_S:
        message = f"wait: got {text[:40]!r}, expected seconds, 0 to {MAX_WAIT_S:g}."
        raise RequestError(400, "invalid_parameter", message)
    return wait


def add_admin_routes(app: FastAPI, manager: ModelManager, access: Access, token: str) -> None:
    """Add the routes, which are not part of /openapi.json."""
    admin = Admin(manager, access, token)
    options: dict[str, Any] = {"include_in_schema": False, "response_model": None}
    app.get("/admin/models", **options)(admin.models)
    app.post("/admin/reload", **options)(admin.reload)
    app.post("/admin/models/{name}/versions/{version}/{action}", **options)(admin.act)
