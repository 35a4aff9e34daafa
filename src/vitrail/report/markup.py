"""HTML and SVG elements as function calls: text is escaped, markup is not, and every tag is closed."""

from __future__ import annotations

from html import escape

from vitrail.runtime import escape_control

VOID = frozenset({"img", "meta", "br"})


class Markup(str):
    """A string that is already markup."""

    __slots__ = ()


Child = str | None


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """`tag("p", "2 < 3", cls="note")` is `<p class="note">2 &lt; 3</p>`; None and False omit an attribute."""
    text = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{text}>")
    return Markup(f"<{name}{text}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Concatenate; text is escaped, and control characters, which HTML does not allow, are made visible."""
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
