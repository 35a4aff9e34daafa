"""Error responses: a status, a machine-readable code and a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

from vitrail.errors import VitrailError
from vitrail.serve.request_record import current_record

DEFAULT_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
"""Codes of the errors that the router raises itself."""
OPEN_INFERENCE = "/v2"
"""Path of the Open Inference Protocol."""
LOCAL_ADVICE = re.compile(
    r"(; try pip install|; if you trust it|; copy or download it again|, copy or download it again).*"
)
"""Advice for the operator of the server, which is of no use to a client."""
IMAGE_SUBJECT = re.compile(r"^(image of \d+ bytes|Pillow image \S+ \d+ x \d+)")
INTERNAL_DETAIL = re.compile(r"(/[\w.-]+){2,}|[A-Z]:\\|\bat 0x[0-9a-f]+|\.py\b|Traceback")
"""Text that reveals details of the machine."""


class RequestError(Exception):
    """Aborts a request with an error response."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})

    def __reduce__(self) -> Any:
        """Make the error picklable, for errors sent by a decode process."""
        return RequestError, (self.status, self.code, self.message, self.headers)

    def for_image(self, number: int, count: int) -> RequestError:
        """Prefix the message with the number of the image, if the request has several."""
        if count > 1:
            self.message = f"image {number + 1} of {count}: {self.message}"
        return self

    def body(self, path: str = "", request_id: str = "") -> bytes:
        """The error as JSON, with the id of the current request, whose record receives the code.

        path: one of the Open Inference Protocol gives only the message, as that requires.
        """
        record = current_record()
        record.error, request_id = self.code, request_id or record.id
        if path == OPEN_INFERENCE or path.startswith(f"{OPEN_INFERENCE}/"):
            return json.dumps({"error": self.message}).encode()
        identified = {"request_id": request_id} if request_id else {}
        return json.dumps({"error": {"code": self.code, "message": self.message, **identified}}).encode()

    def response(self, path: str = "") -> Response:
        return Response(self.body(path), self.status, self.headers, media_type="application/json")


class ClientDisconnected(Exception):
    """The client closed the connection before its response."""


def public_message(error: VitrailError, otherwise: str) -> str:
    """The message of an error without details of the machine; `otherwise` if they cannot be removed."""
    sentence = IMAGE_SUBJECT.sub("the image", LOCAL_ADVICE.sub("", str(error))).rstrip(".") + "."
    return otherwise if INTERNAL_DETAIL.search(sentence) else sentence
