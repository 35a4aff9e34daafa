"""The traceparent header of W3C Trace Context: the trace that a request is part of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACESTATE = 512
"""Characters of a tracestate header that are passed on."""


@dataclass(frozen=True)
class TraceParent:
    """The caller's span."""

    trace_id: str
    """32 lower-case hexadecimal digits."""
    span_id: str
    """16 of them."""
    flags: int
    tracestate: str = ""
    """Data of other tracing systems."""

    @property
    def sampled(self) -> bool:
        """Whether the caller records the trace."""
        return bool(self.flags & 1)


def parse_traceparent(values: Iterable[bytes], tracestate: Iterable[bytes] = ()) -> TraceParent | None:
    """The parent of a request from its traceparent headers; None unless there is exactly one, and it is valid.

    Versions after 00 may append fields, which are ignored. All zeros are invalid, and so is version ff.
    """
    given = list(values)
    match = TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    state = b",".join(tracestate)
    text = state.decode("latin-1") if len(state) <= MAX_TRACESTATE else ""
    return TraceParent(trace_id.decode(), span_id.decode(), int(flags, 16), text)
