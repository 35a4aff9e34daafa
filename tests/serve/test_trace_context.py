"""traceparent headers: what is accepted, compared with OpenTelemetry's own parser."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vitrail.serve.trace_context import TraceParent, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-03", 3),  # with the flag for random ids of level 2
        (f"cc-{TRACE}-{SPAN}-01", 1),  # a later version
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-holds", 1),
    ],
)
def test_a_valid_header_gives_the_trace_and_the_span(header: str, flags: int) -> None:
    parent = parse_traceparent([header.encode()])
    assert parent == TraceParent(TRACE, SPAN, flags)
    assert parent.sampled == bool(flags & 1)


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 has no more fields
        f"00-{TRACE}-{SPAN}-01-",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_an_invalid_header_gives_nothing(header: str) -> None:
    assert parse_traceparent([header.encode()]) is None


def test_two_headers_give_nothing() -> None:
    header = f"00-{TRACE}-{SPAN}-01".encode()
    assert parse_traceparent([header, header]) is None
    assert parse_traceparent([]) is None


def test_a_tracestate_is_combined_and_dropped_if_it_is_long() -> None:
    header = [f"00-{TRACE}-{SPAN}-01".encode()]
    assert parse_traceparent(header, [b"a=1", b"b=2"]) == TraceParent(TRACE, SPAN, 1, "a=1,b=2")
    assert parse_traceparent(header, [b"a=" + b"1" * 600]) == TraceParent(TRACE, SPAN, 1)


HEX = "0123456789abcdef"
DAMAGED = st.builds(
    lambda version, trace, span, flags, more: f"{version}-{trace}-{span}-{flags}{more}",
    st.text(HEX, min_size=1, max_size=3),
    st.one_of(st.text(HEX, min_size=32, max_size=32), st.text(HEX + "G", min_size=30, max_size=33)),
    st.one_of(st.text(HEX, min_size=16, max_size=16), st.text(HEX + "A", min_size=15, max_size=17)),
    st.text(HEX, min_size=1, max_size=3),
    st.one_of(st.just(""), st.from_regex(r"-[a-z0-9-]{0,10}", fullmatch=True)),
)


@given(st.one_of(DAMAGED, st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=80)))
@example(f"00-{TRACE}-{SPAN}-01")
@example(f"42-{TRACE}-{SPAN}-01-x")
def test_opentelemetry_reads_the_same_headers_in_the_same_way(header: str) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry is not installed: vitrail[otel]")
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    expected = trace.get_current_span(context).get_span_context()
    parent = parse_traceparent([header.encode()])
    if not expected.is_valid:
        assert parent is None
    else:
        assert parent is not None
        assert (int(parent.trace_id, 16), int(parent.span_id, 16)) == (expected.trace_id, expected.span_id)
        assert parent.flags == expected.trace_flags
