"""Overlapping and failing requests of the explorer: the latest one is displayed, the others are cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from browsing import (
    CAT,
    FAILED_REQUEST,
    SAMPLES,
    bars_with_hidden,
    drop_file,
    format_bars,
    link_parameters,
    patch_center,
    random_image,
    wait_for_bars,
    wait_until_explained,
)

import vitrail

pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
from playwright.sync_api import expect

OpenPage = Callable[..., Any]


def test_a_slow_link_does_not_replace_a_newer_one(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page())
    held_routes: list[Any] = []
    page.route("**/samples/coffee.jpg", lambda route: held_routes.append(route))
    page.evaluate("location.hash = '#image=coffee'")
    page.wait_for_timeout(100)
    page.evaluate("location.hash = '#image=rocket'")
    rocket = format_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "rocket.jpg"))
    wait_for_bars(page, rocket)
    held_routes.pop().continue_()
    page.wait_for_timeout(400)
    wait_for_bars(page, rocket)
    assert link_parameters(page)["image"] == "rocket"


def test_a_slow_file_does_not_replace_a_later_sample(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page())
    script = """() => {
        const read = createImageBitmap, wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
        window.createImageBitmap = async (...args) => {
            if (args[0] instanceof File) await wait(600);
            return read(...args);
        };
    }"""
    page.evaluate(script)
    drop_file(page, random_image(5))
    page.locator(".sample[data-name=coffee]").click()
    coffee = format_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "coffee.jpg"))
    wait_for_bars(page, coffee)
    page.wait_for_timeout(900)
    wait_for_bars(page, coffee)
    assert link_parameters(page)["image"] == "coffee"


def test_an_invalid_file_in_the_second_pane_changes_neither_pane(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4&show2=rollout", allowed_error=FAILED_REQUEST))
    page.locator(".patch-grid").nth(1).click(modifiers=["Shift"])  # makes the second pane active
    drop_file(page, b"not an image", selector=".pane:nth-child(2) .patch-grid")
    expect(page.locator("#banner-text")).to_contain_text("cannot be read as an image")
    expect(page.locator(".prediction-block")).to_have_count(1)
    expect(page.locator(".patch-grid.loading")).to_have_count(0)
    parameters = link_parameters(page)
    assert parameters["image"] == "cat"
    assert "image2" not in parameters


def test_a_camera_cancelled_before_its_first_frame_is_switched_off(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(permissions=["camera"]))
    script = """() => {
        HTMLMediaElement.prototype.play = () => new Promise(() => {});
        const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (constraints) => (window.stream = await open(constraints));
    }"""
    page.evaluate(script)
    page.locator("#camera").click()
    expect(page.locator("#camera-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#camera-dialog")).to_be_hidden()
    page.wait_for_function("stream.getTracks().every((track) => track.readyState === 'ended')")


@pytest.mark.parametrize("status", [429, 504])
def test_temporary_errors_of_a_proxy_are_retried(open_page: OpenPage, site: httpx.Client, status: int) -> None:
    page = wait_until_explained(open_page(allowed_error=FAILED_REQUEST))
    refused: list[Any] = []

    def refuse_once(route: Any) -> None:
        refused.append(route)
        if len(refused) == 1:
            route.fulfill(status=status, body="later")
        else:
            route.continue_()

    page.route("**/v1/predict", refuse_once)
    page.mouse.click(*patch_center(page, 3, 3))
    wait_for_bars(page, bars_with_hidden(site, [27], CAT.read_bytes()))
    assert len(refused) == 2


def test_retrying_leaves_no_abort_listeners(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(allowed_error=FAILED_REQUEST))
    script = """async () => {
        const { request } = await import('/static/server.js'), { signal } = new AbortController();
        const originalFetch = window.fetch;
        let failures = 3, listeners = 0;
        for (const [name, step] of [['addEventListener', 1], ['removeEventListener', -1]]) {
            const original = signal[name].bind(signal);
            signal[name] = (...args) => { listeners += step; original(...args); };
        }
        const headers = { 'Retry-After': '0.01' };
        window.fetch = async () => new Response('{}', { status: failures-- ? 503 : 200, headers });
        await request('/anything', { signal });
        window.fetch = originalFetch;
        return listeners;
    }"""
    assert page.evaluate(script) == 0


def test_a_rejected_map_is_requested_only_once(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4", allowed_error=FAILED_REQUEST))
    requests: list[Any] = []

    def refuse(route: Any) -> None:
        requests.append(route)
        route.fulfill(
            status=400, json={"error": {"code": "invalid_parameter", "message": "there is no gradient today."}}
        )

    page.route("**/v1/explain", refuse)
    page.get_by_role("button", name="Gradient").click()
    expect(page.locator("#banner-text")).to_have_text("There is no gradient today.")
    page.wait_for_timeout(500)
    assert len(requests) == 1
    page.unroute("**/v1/explain")
    page.get_by_role("button", name="Attention", exact=True).click()
    expect(page.locator("#query-caption")).to_contain_text("attends most to")
