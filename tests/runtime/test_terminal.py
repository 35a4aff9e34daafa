"""Untrusted text, such as names from files, on a terminal and in notes."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from vitrail import runtime
from vitrail.cli import console
from vitrail.runtime import escape_control, suppress_note, warn_once
from vitrail.runtime.terminal import SafeConsole

HOSTILE = "a\x1b[31mb\x1b]0;title\x07\x9b2J\r\u202ec[red]d[/red]:cat:"
ESCAPED = r"a\x1b[31mb\x1b]0;title\x07\x9b2J\r\u202ec[red]d[/red]:cat:"


def test_control_characters_are_escaped_and_other_text_is_kept():
    assert escape_control(HOSTILE) == ESCAPED
    assert escape_control("tab\tline\nçå 猫 👩\u200d🔬") == "tab\tline\nçå 猫 👩\u200d🔬"


def test_printed_text_cannot_control_the_terminal():
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, color_system=None, width=200)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    for item in (HOSTILE, Text(HOSTILE), table):
        console.print(item)
    bar = Progress(TextColumn("{task.description}", markup=False), console=console)
    bar.add_task(HOSTILE)
    console.print(bar)
    console.print(console.status(HOSTILE).renderable)
    assert out.getvalue().count(r"a\x1b[31mb") == 6
    assert out.getvalue().count("[red]d[/red]:cat:") >= 3  # a narrow column is measured before it is escaped
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(out.getvalue())


def test_errors_and_notes_escape_every_control_character(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(console, "err", SafeConsole(file=sys.stdout, width=200))
    for print_line in (console.print_error, console.print_stopped, console.print_note):
        print_line(HOSTILE)  # rich's Text drops some of them, the bell for one
    assert capsys.readouterr().out.splitlines() == [f"error: {ESCAPED}", ESCAPED, f"note: {ESCAPED}"]


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("one", "one."),
        ("one.", "one."),
        ("skipped a, b, ...", "skipped a, b, ..."),
        ("a, b …", "a, b …"),
        ("\x1b[2J", r"\x1b[2J."),
    ],
)
def test_a_note_ends_in_one_period_or_an_ellipsis(
    note: str, expected: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runtime.notes, "_logged", set())
    monkeypatch.setattr(logging.getLogger("vitrail"), "propagate", True)
    warn_once([note])
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_one_note_can_be_suppressed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime.notes, "_logged", set())
    monkeypatch.setattr(logging.getLogger("vitrail"), "propagate", True)
    with suppress_note("names were assumed"):
        warn_once(["names were assumed", "another"], about="a.safetensors")
    warn_once(["names were assumed"], about="b.safetensors")
    assert [record.getMessage() for record in caplog.records] == [
        "a.safetensors: another.",
        "b.safetensors: names were assumed.",
    ]
