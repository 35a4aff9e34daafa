"""Occlusion in the explorer while it is computed: partial results are displayed, and it can be stopped."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from browsing import FAILED_REQUEST, patch_brightness, patch_center, wait_until_explained, wait_until_stable
from serving import wait_until

from vitrail.serve import explain_requests

pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
from playwright.sync_api import expect

occlusion_module = importlib.import_module("vitrail.explain.occlusion")  # the name in the package is the function
OpenPage = Callable[..., Any]


class OcclusionSteps:
    """Pauses occlusion: `left` squares may still be computed."""

    def __init__(self) -> None:
        self.left, self.calls, self.error = 10**6, 0, False
        self.changed = threading.Condition()

    def allow(self, count: int) -> None:
        with self.changed:
            self.left = count
            self.changed.notify_all()

    def class_probabilities(self, *args: Any, real: Any = occlusion_module.class_probabilities, **kwargs: Any) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: self.left > 0, timeout=20)
            self.left -= 1
            self.calls += 1
        time.sleep(0.01)  # so that the previous line is sent
        if self.error:
            raise RuntimeError("the device is gone")
        return real(*args, **kwargs)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[OcclusionSteps]:
    occlusion_steps = OcclusionSteps()
    monkeypatch.setattr(occlusion_module, "class_probabilities", occlusion_steps.class_probabilities)
    monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
    yield occlusion_steps
    occlusion_steps.allow(10**6)


def start_occlusion(open_page: OpenPage, steps: OcclusionSteps, squares: int) -> Any:
    """Open the page and pause occlusion after some of the 16 squares."""
    page = wait_until_explained(open_page("#image=cat&layer=4", allowed_error=FAILED_REQUEST))
    script = """() => {
        const originalFetch = fetch;
        window.requests = [];
        window.fetch = (path, ...rest) => { requests.push(path); return originalFetch(path, ...rest); };
    }"""
    page.evaluate(script)
    steps.allow(squares)
    page.get_by_role("button", name="Occlusion").click()
    expect(page.locator("#status-progress")).to_have_text(f" {squares} of 16")
    return page


def test_occlusion_is_displayed_square_by_square(open_page: OpenPage, steps: OcclusionSteps) -> None:
    page = start_occlusion(open_page, steps, 5)
    expect(page.locator("#status")).to_contain_text("Computing occlusion…")
    expect(page.locator("#query-caption")).to_contain_text("Maximum so far at rows")
    expect(page.locator(".patch-grid.loading")).to_have_count(0)
    page.mouse.move(*patch_center(page, 7, 7))
    expect(page.locator("#query-caption")).to_have_text("Rows 7 and 8, columns 7 and 8: not computed yet.")
    page.mouse.move(*patch_center(page, 0, 0))
    expect(page.locator("#query-caption")).to_contain_text(
        re.compile("Rows 1 and 2, columns 1 and 2: probability (drops|rises) .* points")
    )
    page.mouse.move(2, 2)
    partial_brightness = wait_until_stable(page, lambda: patch_brightness(page))
    steps.allow(10**6)
    expect(page.locator("#query-caption")).to_contain_text("Maximum at rows")
    expect(page.locator("#status")).to_have_text("")
    expect(page.locator("#stop")).to_be_hidden()
    assert page.evaluate("requests").count("/v1/explain") == 1  # moving the mouse did not restart it
    final_brightness = wait_until_stable(page, lambda: patch_brightness(page))
    page.reload()
    expect(page.locator("#query-caption")).to_contain_text("Maximum at rows")
    assert wait_until_stable(page, lambda: patch_brightness(page)) == pytest.approx(final_brightness, abs=1)
    page.get_by_role("button", name="Image").click()
    image_brightness = wait_until_stable(page, lambda: patch_brightness(page))
    unknown = [row * 8 + column for row in (4, 5, 6, 7) for column in range(8)]
    assert (
        sum(partial_brightness[i] > image_brightness[i] for i in unknown) > 20
    )  # paler than the image, unlike any value


def test_occlusion_can_be_stopped_and_restarted(open_page: OpenPage, site: httpx.Client, steps: OcclusionSteps) -> None:
    page = start_occlusion(open_page, steps, 3)
    page.locator("#stop").click()
    expect(page.locator("#query-caption")).to_contain_text(
        "Stopped at 3 of 16 squares; choose Occlusion to start again."
    )
    expect(page.locator("#status")).to_have_text("")
    expect(page.locator("#stop")).to_be_hidden()
    calls = steps.calls
    steps.allow(10**6)
    page.mouse.move(*patch_center(page, 0, 0))
    page.wait_for_timeout(300)
    assert steps.calls <= calls + 1  # the server has stopped as well
    page.get_by_role("button", name="Occlusion").click()
    page.mouse.move(2, 2)
    expect(page.locator("#query-caption")).to_contain_text("Maximum at rows")


@pytest.mark.parametrize("change", ["hide", "show"])
def test_occlusion_is_cancelled_if_the_view_changes(open_page: OpenPage, steps: OcclusionSteps, change: str) -> None:
    page = start_occlusion(open_page, steps, 3)
    failed_urls: list[str] = []
    page.on("requestfailed", lambda request: failed_urls.append(request.url))
    if change == "hide":
        page.mouse.click(*patch_center(page, 7, 7))
        expect(page.locator("#hidden-count")).to_have_text("1 of 64 hidden")
    else:
        page.get_by_role("button", name="Rollout").click()
        expect(page.locator("#query-caption")).to_contain_text("Maximum at row")
    wait_until(lambda: page.wait_for_timeout(20) or any("explain" in url for url in failed_urls))
    steps.allow(10**6)
    page.get_by_role("button", name="Occlusion").click()
    page.mouse.move(2, 2)
    expect(page.locator("#query-caption")).to_contain_text("Maximum at rows")


def test_an_error_during_occlusion_is_displayed(open_page: OpenPage, steps: OcclusionSteps) -> None:
    page = start_occlusion(open_page, steps, 3)
    steps.error = True
    steps.allow(10**6)
    expect(page.locator("#banner-text")).to_contain_text("Internal error")
    expect(page.locator("#status")).to_have_text("")
    steps.error = False
    page.get_by_role("button", name="Occlusion").click()
    expect(page.locator("#query-caption")).to_contain_text("Maximum at rows")


def test_two_panes_load_two_different_maps(open_page: OpenPage, steps: OcclusionSteps) -> None:
    page = open_page("#image=cat&show=occlusion&show2=gradient")
    expect(page.locator("figcaption .color-scale")).to_have_count(2)
    expect(page.locator("#query-caption")).to_contain_text("Maximum at rows")
