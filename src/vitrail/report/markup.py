"""HTML and SVG by function call: what is text is escaped, what is markup stays, every tag is closed."""

from __future__ import annotations

from html import escape

from vitrail.runtime import escape_control

VOID = frozenset({"img", "meta", "br"})


class Markup(str):
    """A string that is markup already."""

    __slots__ = ()


Child = str | None


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """`tag("p", "2 < 3", cls="note")` is `<p class="note">2 &lt; 3</p>`; None and False leave an attribute out."""
    text = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{text}>")
    return Markup(f"<{name}{text}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """One after the other, each escaped unless it is markup; control characters, which HTML forbids, are visible."""
    return Markup(
        "".join(c if isinstance(c, Markup) else escape(escape_control(c), quote=False) for c in children if c)
    )


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = {"cls": "class", "for_": "for", "viewbox": "viewBox"}.get(key, key.replace("_", "-"))
    if value is True:
        return f" {name}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{escape(escape_control(text))}"'
