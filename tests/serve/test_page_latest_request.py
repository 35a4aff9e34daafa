"""The explorer when wishes cross each other or fail: the latest counts, and nothing is left running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from browsing import AWAY, CAT, SAMPLES, answered, as_bars, drawing, drop, hiding, patch, query, wait_for_bars

import vitrail

pytest.importorskip("playwright", reason="the page is tested with it: pip install playwright")
from playwright.sync_api import expect

Opened = Callable[..., Any]


def test_a_link_that_comes_late_does_not_win(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened())
    held: list[Any] = []
    page.route("**/samples/coffee.jpg", lambda route: held.append(route))
    page.evaluate("location.hash = '#image=coffee'")
    page.wait_for_timeout(100)
    page.evaluate("location.hash = '#image=rocket'")
    rocket = as_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "rocket.jpg"))
    wait_for_bars(page, rocket)
    held.pop().continue_()
    page.wait_for_timeout(400)
    wait_for_bars(page, rocket)
    assert query(page)["image"] == "rocket"


def test_a_file_that_takes_long_to_read_does_not_win_over_a_later_sample(
    opened: Opened, cifar10: vitrail.Model
) -> None:
    page = answered(opened())
    script = """() => {
        const read = createImageBitmap, wait = (ms) => new Promise((go) => setTimeout(go, ms));
        window.createImageBitmap = async (...given) => {
            if (given[0] instanceof File) await wait(600);
            return read(...given);
        };
    }"""
    page.evaluate(script)
    drop(page, drawing(5))
    page.locator(".sample[data-name=coffee]").click()
    coffee = as_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "coffee.jpg"))
    wait_for_bars(page, coffee)
    page.wait_for_timeout(900)
    wait_for_bars(page, coffee)
    assert query(page)["image"] == "coffee"


def test_a_bad_file_in_a_second_pane_leaves_both_as_they_were(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4&show2=rollout", allowed=AWAY))
    page.locator(".glass").nth(1).click(modifiers=["Shift"])  # the second pane is chosen
    drop(page, b"not an image", onto=".pane:nth-child(2) .glass")
    expect(page.locator("#banner-text")).to_contain_text("cannot be read as an image")
    expect(page.locator(".block")).to_have_count(1)
    expect(page.locator(".glass.waiting")).to_have_count(0)
    words = query(page)
    assert words["image"] == "cat"
    assert "image2" not in words


def test_a_camera_that_is_called_off_before_it_shows_anything_is_switched_off(opened: Opened) -> None:
    page = answered(opened(permissions=["camera"]))
    script = """() => {
        HTMLMediaElement.prototype.play = () => new Promise(() => {});
        const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (wish) => (window.stream = await open(wish));
    }"""
    page.evaluate(script)
    page.locator("#camera").click()
    expect(page.locator("#camera-box")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#camera-box")).to_be_hidden()
    page.wait_for_function("stream.getTracks().every((track) => track.readyState === 'ended')")


@pytest.mark.parametrize("status", [429, 504])
def test_what_a_proxy_refuses_for_now_is_asked_again(opened: Opened, site: httpx.Client, status: int) -> None:
    page = answered(opened(allowed=AWAY))
    refused: list[Any] = []

    def once(route: Any) -> None:
        refused.append(route)
        if len(refused) == 1:
            route.fulfill(status=status, body="later")
        else:
            route.continue_()

    page.route("**/v1/predict", once)
    page.mouse.click(*patch(page, 3, 3))
    wait_for_bars(page, hiding(site, [27], CAT.read_bytes()))
    assert len(refused) == 2


def test_waiting_leaves_no_listener_behind(opened: Opened) -> None:
    page = answered(opened(allowed=AWAY))
    script = """async () => {
        const { ask } = await import('/static/server.js'), control = new AbortController(), { signal } = control;
        const fetched = window.fetch;
        let left = 3, open = 0;
        for (const [name, step] of [['addEventListener', 1], ['removeEventListener', -1]]) {
            const real = signal[name].bind(signal);
            signal[name] = (...given) => { open += step; real(...given); };
        }
        const headers = { 'Retry-After': '0.01' };
        window.fetch = async () => new Response('{}', { status: left-- ? 503 : 200, headers });
        await ask('/anything', { signal });
        window.fetch = fetched;
        return open;
    }"""
    assert page.evaluate(script) == 0


def test_a_map_that_is_refused_is_not_asked_for_again_and_again(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4", allowed=AWAY))
    asked: list[Any] = []

    def refuse(route: Any) -> None:
        asked.append(route)
        route.fulfill(
            status=400, json={"error": {"code": "invalid_parameter", "message": "there is no gradient today."}}
        )

    page.route("**/v1/explain", refuse)
    page.get_by_role("button", name="Gradient").click()
    expect(page.locator("#banner-text")).to_have_text("There is no gradient today.")
    page.wait_for_timeout(500)
    assert len(asked) == 1
    page.unroute("**/v1/explain")
    page.get_by_role("button", name="Attention", exact=True).click()
    expect(page.locator("#words")).to_contain_text("attends most to")
