"""Helpers for tests of the explorer in a real browser: user actions and displayed values."""

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
FAILED_REQUEST = "Failed to load resource"
"""Start of the console message when the server is unreachable or responds with an error."""


def wait_until_explained(page: Any) -> Any:
    """Wait until the explanation and the predictions are displayed; returns the page."""
    from playwright.sync_api import expect

    expect(page.locator("#query-caption")).to_contain_text("attends most to")
    expect(page.locator(".bar").first).to_be_visible()
    return page


def read_bars(page: Any) -> list[tuple[str, str]]:
    """Labels and scores of the bars, from top to bottom."""
    script = """() => [...document.querySelectorAll('.bar')]
        .map((bar) => [bar.style.transform.match(/\\d+/)[0], bar])
        .sort(([a], [b]) => a - b)
        .map(([, bar]) => ['.class-name', '.probability'].map((part) => bar.querySelector(part).textContent))"""
    return [(label, percent) for label, percent in page.evaluate(script)]


def capitalize(label: str) -> str:
    return label[:1].upper() + label[1:]


def format_bars(predictions: Any) -> list[tuple[str, str]]:
    """Labels and scores formatted as on the page, computed independently of its code."""
    expected = []
    for label, score in predictions:
        digits = 1 if score < 0.0995 else 0
        percent = "<\u00a00.1\u00a0%" if score < 0.0005 else f"{100 * score:.{digits}f}\u00a0%"
        expected.append((capitalize(label), percent))
    return expected


def bars_with_hidden(site: httpx.Client, hide: list[int], image: bytes) -> list[tuple[str, str]]:
    """The bars of the server's predictions for an image with these patches hidden."""
    response = site.post("/v1/predict", files={"image": image}, data={"hide": json.dumps(hide)}).json()
    return format_bars((p["label"], p["score"]) for p in response["results"][0]["predictions"])


def wait_for_bars(page: Any, expected: list[tuple[str, str]]) -> None:
    def matches() -> bool:
        page.wait_for_timeout(30)
        return read_bars(page) == expected

    from serving import wait_until

    try:
        wait_until(matches)
    except AssertionError:
        assert read_bars(page) == expected


def patch_center(
    page: Any, row: int, column: int, pane: int = 0, grid: tuple[int, int] = (8, 8)
) -> tuple[float, float]:
    """Screen coordinates of the center of a patch."""
    box = page.locator(".patch-grid canvas").nth(pane).bounding_box()
    return box["x"] + box["width"] * (column + 0.5) / grid[1], box["y"] + box["height"] * (row + 0.5) / grid[0]


def patch_brightness(page: Any, pane: int = 0) -> list[float]:
    """Brightness of the center of each patch on the canvas."""
    script = """(pane) => {
        const shown = document.querySelectorAll('.patch-grid canvas')[pane], canvas = document.createElement('canvas');
        const context = Object.assign(canvas, { width: 80, height: 80 }).getContext('2d', { willReadFrequently: true });
        context.drawImage(shown, 0, 0, 80, 80);
        return Array.from({ length: 64 }, (_, i) => {
            const { data } = context.getImageData((i % 8) * 10 + 3, Math.floor(i / 8) * 10 + 3, 4, 4);
            return data.reduce((sum, value, j) => sum + (j % 4 < 3 ? value : 0), 0) / 48;
        });
    }"""
    brightness: list[float] = page.evaluate(script, pane)
    return brightness


def drop_file(
    page: Any, data: bytes, name: str = "mine.png", selector: str = "#panes", event_type: str = "drop"
) -> None:
    script = """([text, name, selector, type]) => {
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)), dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([bytes], name, { type: name.endsWith('.txt') ? 'text/plain' : 'image/png' }));
        const EventClass = type === 'paste' ? ClipboardEvent : DragEvent;
        const data = type === 'paste' ? { clipboardData: dataTransfer } : { dataTransfer };
        const event = new EventClass(type, { ...data, bubbles: true, cancelable: true });
        document.querySelector(selector).dispatchEvent(event);
    }"""
    page.evaluate(script, [base64.b64encode(data).decode(), name, selector, event_type])


def random_image(seed: int = 0) -> bytes:
    """A PNG of smooth colored noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((64, 64), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def wait_until_stable(page: Any, read: Callable[[], Any]) -> Any:
    """The value of `read` once it no longer changes."""
    previous, value = None, read()
    while value != previous:
        page.wait_for_timeout(350)
        previous, value = value, read()
    return value


def link_parameters(page: Any) -> dict[str, str]:
    """The parameters of the URL fragment, once it no longer changes."""
    wait_until_stable(page, lambda: page.evaluate("location.hash"))
    return dict(part.split("=", 1) for part in page.evaluate("location.hash").lstrip("#").split("&"))


def long_press(page: Any, x: float, y: float, milliseconds: int) -> None:
    """Touch a point for some time."""
    session = page.context.new_cdp_session(page)
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    page.wait_for_timeout(milliseconds)
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
