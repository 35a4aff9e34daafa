"""Serves the files of web/: the explorer, the API page, the sample images."""

from __future__ import annotations

import hashlib
import json
import mimetypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from vitrail.serve.http_errors import RequestError

WEB_DIR = Path(__file__).with_name("web")
MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".webmanifest": "application/manifest+json"}


def file_response(request: Request, name: str) -> Response:
    """A file of web/, or 304 if the browser has the current version."""
    path = _files().get(name)
    if path is None:
        raise RequestError(404, "not_found", "unknown path; see /docs.")
    body, tag = _read(path, path.stat().st_mtime_ns)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}  # revalidated on every request
    if tag in (given.strip().removeprefix("W/") for given in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_media_type(path))


def samples() -> list[dict[str, Any]]:
    """The sample images: openly licensed, with alt text and credit."""
    listed: list[dict[str, Any]] = json.loads((WEB_DIR / "samples" / "samples.json").read_text(encoding="utf-8"))
    fields = ("name", "alt", "credit", "query_point")
    return [{"url": f"/samples/{one['file']}", **{key: one[key] for key in fields}} for one in listed]


@lru_cache(maxsize=1)
def _files() -> dict[str, Path]:
    """Files of web/ by name, without hidden ones. A requested name is only looked up here, never opened as a path."""
    return {path.relative_to(WEB_DIR).as_posix(): path for path in WEB_DIR.rglob("[!.]*") if path.is_file()}


@lru_cache(maxsize=256)
def _read(path: Path, changed: int) -> tuple[bytes, str]:
    body = path.read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _media_type(path: Path) -> str:
    if path.suffix in MEDIA_TYPES:
        return MEDIA_TYPES[path.suffix]
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
