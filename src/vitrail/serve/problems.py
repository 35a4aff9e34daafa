"""What a client is told when there is no answer: a status, a code for machines, a sentence for people."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

from vitrail.errors import VitrailError

CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
"""For those that no route raised."""
REMEDIES = re.compile(
    r"(; try pip install|; if you trust it|; copy or download it again|, copy or download it again).*"
)
"""What helps the owner of a file or of this machine, and not a client."""
SUBJECT = re.compile(r"^(image of \d+ bytes|Pillow image \S+ \d+ x \d+)")
INSIDE = re.compile(r"(/[\w.-]+){2,}|[A-Z]:\\|\bat 0x[0-9a-f]+|\.py\b|Traceback")
"""Words about the machine rather than the request."""


class Problem(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})

    def __reduce__(self) -> Any:
        """So that it can be sent from one process to another."""
        return Problem, (self.status, self.code, self.message, self.headers)

    def about(self, number: int, count: int) -> Problem:
        """The same, and which of several images is meant."""
        if count > 1:
            self.message = f"image {number + 1} of {count}: {self.message}"
        return self

    def body(self) -> bytes:
        return json.dumps({"error": {"code": self.code, "message": self.message}}).encode()

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


class Gone(Exception):
    """The client hung up: nobody is left to answer."""


def told(error: VitrailError, otherwise: str) -> str:
    """An error's sentence as a stranger may read it; where it speaks of this machine, `otherwise`."""
    sentence = SUBJECT.sub("the image", REMEDIES.sub("", str(error))).rstrip(".") + "."
    return otherwise if INSIDE.search(sentence) else sentence
