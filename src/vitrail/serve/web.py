"""The files of web/: the explorer, the page about the API, sample images."""

from __future__ import annotations

import hashlib
import json
import mimetypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from vitrail.serve.problems import Problem

WEB = Path(__file__).with_name("web")
KINDS = {".js": "text/javascript; charset=utf-8", ".webmanifest": "application/manifest+json"}


def page(request: Request, name: str) -> Response:
    """A file of web/, or a bare 304 where the browser has it already."""
    path = _files().get(name)
    if path is None:
        raise Problem(404, "not_found", "there is nothing at this address.")
    body, tag = _read(path, path.stat().st_mtime_ns)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}  # asks each time, and is told 304
    if tag in (asked.strip().removeprefix("W/") for asked in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_kind(path))


def samples() -> list[dict[str, Any]]:
    """Openly licensed images to try, with what is on them and whose they are."""
    listed: list[dict[str, Any]] = json.loads((WEB / "samples" / "samples.json").read_text(encoding="utf-8"))
    told = ("name", "alt", "credit", "point")
    return [{"url": f"/samples/{one['file']}", **{key: one[key] for key in told}} for one in listed]


@lru_cache(maxsize=1)
def _files() -> dict[str, Path]:
    """Files of web/ by name, none of them hidden: what a client asks for never reaches the file system."""
    return {path.relative_to(WEB).as_posix(): path for path in WEB.rglob("[!.]*") if path.is_file()}


@lru_cache(maxsize=256)
def _read(path: Path, changed: int) -> tuple[bytes, str]:
    body = path.read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _kind(path: Path) -> str:
    if path.suffix in KINDS:
        return KINDS[path.suffix]
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
