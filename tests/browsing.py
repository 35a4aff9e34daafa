"""What a person does with the explorer, for tests in a real browser."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

import vitrail

SAMPLES = Path(vitrail.__file__).parent / "serve" / "web" / "samples"
CAT = SAMPLES / "cat.jpg"
AWAY = "Failed to load resource"
"""What a browser writes down when the server does not answer, or answers with an error."""


def answered(page: Any) -> Any:
    """When everything about the image has arrived."""
    from playwright.sync_api import expect

    expect(page.locator("#words")).to_contain_text("attends most to")
    expect(page.locator(".bar").first).to_be_visible()
    return page


def bars(page: Any) -> list[tuple[str, str]]:
    """Labels and scores, from above."""
    script = """() => [...document.querySelectorAll('.bar')]
        .map((bar) => [bar.style.transform.match(/\\d+/)[0], bar])
        .sort(([a], [b]) => a - b)
        .map(([, bar]) => ['.who', '.much'].map((part) => bar.querySelector(part).textContent))"""
    return [(label, much) for label, much in page.evaluate(script)]


def capital(label: str) -> str:
    return label[:1].upper() + label[1:]


def as_bars(predictions: Any) -> list[tuple[str, str]]:
    """The same as the page writes it, worked out here."""
    found = []
    for label, score in predictions:
        digits = 1 if score < 0.0995 else 0
        much = "<\u00a00.1\u00a0%" if score < 0.0005 else f"{100 * score:.{digits}f}\u00a0%"
        found.append((capital(label), much))
    return found


def hiding(site: httpx.Client, hide: list[int], image: bytes) -> list[tuple[str, str]]:
    """What the server says of an image with these patches hidden."""
    found = site.post("/v1/predict", files={"image": image}, data={"hide": json.dumps(hide)}).json()
    return as_bars((p["label"], p["score"]) for p in found["results"][0]["predictions"])


def wait_for_bars(page: Any, expected: list[tuple[str, str]]) -> None:
    def same() -> bool:
        page.wait_for_timeout(30)
        return bars(page) == expected

    from serving import until

    try:
        until(same)
    except AssertionError:
        assert bars(page) == expected


def patch(page: Any, row: int, column: int, pane: int = 0, grid: tuple[int, int] = (8, 8)) -> tuple[float, float]:
    """Where on the screen a patch's middle is."""
    box = page.locator(".glass canvas").nth(pane).bounding_box()
    return box["x"] + box["width"] * (column + 0.5) / grid[1], box["y"] + box["height"] * (row + 0.5) / grid[0]


def lights(page: Any, pane: int = 0) -> list[float]:
    """How bright the middle of each patch is on the canvas."""
    script = """(pane) => {
        const shown = document.querySelectorAll('.glass canvas')[pane], canvas = document.createElement('canvas');
        const context = Object.assign(canvas, { width: 80, height: 80 }).getContext('2d', { willReadFrequently: true });
        context.drawImage(shown, 0, 0, 80, 80);
        return Array.from({ length: 64 }, (_, i) => {
            const { data } = context.getImageData((i % 8) * 10 + 3, Math.floor(i / 8) * 10 + 3, 4, 4);
            return data.reduce((sum, value, j) => sum + (j % 4 < 3 ? value : 0), 0) / 48;
        });
    }"""
    found: list[float] = page.evaluate(script, pane)
    return found


def drop(page: Any, data: bytes, name: str = "mine.png", onto: str = "#panes", how: str = "drop") -> None:
    script = """([text, name, onto, how]) => {
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)), carried = new DataTransfer();
        carried.items.add(new File([bytes], name, { type: name.endsWith('.txt') ? 'text/plain' : 'image/png' }));
        const kind = how === 'paste' ? ClipboardEvent : DragEvent;
        const held = how === 'paste' ? { clipboardData: carried } : { dataTransfer: carried };
        const one = new kind(how, { ...held, bubbles: true, cancelable: true });
        document.querySelector(onto).dispatchEvent(one);
    }"""
    page.evaluate(script, [base64.b64encode(data).decode(), name, onto, how])


def drawing(seed: int = 0) -> bytes:
    """An image nobody has seen: colored noise in large pieces."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((64, 64), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


def settled(page: Any, read: Callable[[], Any]) -> Any:
    """What is read, once it stays the same."""
    before, now = None, read()
    while now != before:
        page.wait_for_timeout(350)
        before, now = now, read()
    return now


def query(page: Any) -> dict[str, str]:
    """The words behind the #, once they have settled."""
    settled(page, lambda: page.evaluate("location.hash"))
    return dict(part.split("=", 1) for part in page.evaluate("location.hash").lstrip("#").split("&"))


def press(page: Any, x: float, y: float, milliseconds: int) -> None:
    """A finger that rests."""
    session = page.context.new_cdp_session(page)
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    page.wait_for_timeout(milliseconds)
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
