"""Occlusion in the explorer while it is computed: it fills in, can be stopped, and ends as the whole map."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from browsing import AWAY, answered, lights, patch, settled
from serving import until

from vitrail.serve import explain_requests

pytest.importorskip("playwright", reason="the page is tested with it: pip install playwright")
from playwright.sync_api import expect

Opened = Callable[..., Any]


class Steps:
    """Holds occlusion back: `left` squares may still be computed."""

    def __init__(self) -> None:
        self.left, self.calls, self.error = 10**6, 0, False
        self.changed = threading.Condition()

    def allow(self, count: int) -> None:
        with self.changed:
            self.left = count
            self.changed.notify_all()

    def scores(self, *given: Any, real: Any = explain_requests.class_probabilities, **named: Any) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: self.left > 0, timeout=20)
            self.left -= 1
            self.calls += 1
        time.sleep(0.01)  # so that the line before is sent
        if self.error:
            raise RuntimeError("the device is gone")
        return real(*given, **named)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    held = Steps()
    monkeypatch.setattr(explain_requests, "class_probabilities", held.scores)
    monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
    yield held
    held.allow(10**6)


def begun(opened: Opened, steps: Steps, squares: int) -> Any:
    """The page with so many of the 16 squares, and one request for them."""
    page = answered(opened("#image=cat&layer=4", allowed=AWAY))
    script = """() => {
        const real = fetch;
        window.asked = [];
        window.fetch = (path, ...rest) => { asked.push(path); return real(path, ...rest); };
    }"""
    page.evaluate(script)
    steps.allow(1 + squares)  # one for the whole image
    page.get_by_role("button", name="Occlusion").click()
    expect(page.locator("#doing-count")).to_have_text(f" {squares} of 16")
    return page


def test_occlusion_fills_in_square_by_square(opened: Opened, steps: Steps) -> None:
    page = begun(opened, steps, 5)
    expect(page.locator("#status")).to_contain_text("Computing occlusion…")
    expect(page.locator("#words")).to_contain_text("Maximum so far at rows")
    expect(page.locator(".glass.waiting")).to_have_count(0)
    page.mouse.move(*patch(page, 7, 7))
    expect(page.locator("#words")).to_have_text("Rows 7 and 8, columns 7 and 8: not computed yet.")
    page.mouse.move(*patch(page, 0, 0))
    expect(page.locator("#words")).to_contain_text(
        re.compile("Rows 1 and 2, columns 1 and 2: probability (drops|rises) .* points")
    )
    page.mouse.move(2, 2)
    partly = settled(page, lambda: lights(page))
    steps.allow(10**6)
    expect(page.locator("#words")).to_contain_text("Maximum at rows")
    expect(page.locator("#status")).to_have_text("")
    expect(page.locator("#stop")).to_be_hidden()
    assert page.evaluate("asked").count("/v1/explain") == 1  # moving the mouse has not begun it again
    final = settled(page, lambda: lights(page))
    page.reload()
    expect(page.locator("#words")).to_contain_text("Maximum at rows")
    assert settled(page, lambda: lights(page)) == pytest.approx(final, abs=1)
    page.get_by_role("button", name="Image").click()
    plain = settled(page, lambda: lights(page))
    unknown = [row * 8 + column for row in (4, 5, 6, 7) for column in range(8)]
    assert sum(partly[i] > plain[i] for i in unknown) > 20  # paler than the image, as no value ever is


def test_occlusion_can_be_stopped_and_begun_again(opened: Opened, site: httpx.Client, steps: Steps) -> None:
    page = begun(opened, steps, 3)
    page.locator("#stop").click()
    expect(page.locator("#words")).to_contain_text("Stopped at 3 of 16 squares; choose Occlusion to start again.")
    expect(page.locator("#status")).to_have_text("")
    expect(page.locator("#stop")).to_be_hidden()
    made = steps.calls
    steps.allow(10**6)
    page.mouse.move(*patch(page, 0, 0))
    page.wait_for_timeout(300)
    assert steps.calls <= made + 1  # the server has stopped too
    page.get_by_role("button", name="Occlusion").click()
    page.mouse.move(2, 2)
    expect(page.locator("#words")).to_contain_text("Maximum at rows")


@pytest.mark.parametrize("how", ["hide", "show"])
def test_occlusion_that_is_no_longer_wanted_is_called_off(opened: Opened, steps: Steps, how: str) -> None:
    page = begun(opened, steps, 3)
    ended: list[str] = []
    page.on("requestfailed", lambda request: ended.append(request.url))
    if how == "hide":
        page.mouse.click(*patch(page, 7, 7))
        expect(page.locator("#hidden-count")).to_have_text("1 of 64 hidden")
    else:
        page.get_by_role("button", name="Rollout").click()
        expect(page.locator("#words")).to_contain_text("Maximum at row")
    until(lambda: page.wait_for_timeout(20) or any("explain" in url for url in ended))
    steps.allow(10**6)
    page.get_by_role("button", name="Occlusion").click()
    page.mouse.move(2, 2)
    expect(page.locator("#words")).to_contain_text("Maximum at rows")


def test_what_goes_wrong_on_the_way_is_told(opened: Opened, steps: Steps) -> None:
    page = begun(opened, steps, 3)
    steps.error = True
    steps.allow(10**6)
    expect(page.locator("#banner-text")).to_contain_text("Internal error")
    expect(page.locator("#status")).to_have_text("")
    steps.error = False
    page.get_by_role("button", name="Occlusion").click()
    expect(page.locator("#words")).to_contain_text("Maximum at rows")


def test_two_panes_that_want_two_maps_get_both(opened: Opened, steps: Steps) -> None:
    page = opened("#image=cat&show=occlusion&show2=gradient")
    expect(page.locator("figcaption .ramp")).to_have_count(2)
    expect(page.locator("#words")).to_contain_text("Maximum at rows")
