"""The explorer in Firefox and WebKit, if installed: the same images, captions and bars as in Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import CAT, SAMPLES, bars_with_hidden, format_bars, random_image, read_bars
from driving import FIREFOX, MINI_BROWSER, BrowserSession, firefox, webkit
from serving import wait_until

import vitrail
from vitrail.explain import attention_maps


def _start_browser(name: str, folder: Path) -> Iterator[BrowserSession]:
    if name == "firefox" and FIREFOX is None:
        pytest.skip("Firefox is not installed: apt install firefox-esr")
    if name == "webkit" and not (MINI_BROWSER and shutil.which("WebKitWebDriver") and shutil.which("Xvfb")):
        pytest.skip("WebKit, its driver or Xvfb is not installed: apt install webkit2gtk-driver xvfb")
    with {"firefox": firefox, "webkit": webkit}[name](folder) as page:
        yield page


@pytest.fixture(scope="module", params=["firefox", "webkit"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserSession]:
    yield from _start_browser(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def page(browser: BrowserSession, site: httpx.Client) -> Iterator[Callable[[str], BrowserSession]]:
    def open_page(fragment: str = "") -> BrowserSession:
        browser.open(f"{site.base_url}/{fragment}")
        browser.wait_for_text("#query-caption", "attends most to")
        return browser

    yield open_page
    assert browser.errors() == []


def patch_center(page: BrowserSession, row: int, column: int) -> tuple[float, float]:
    script = """const area = document.querySelector('.patch-grid canvas').getBoundingClientRect();
        return [area.x, area.y, area.width, area.height]"""
    x, y, width, height = page.run(script)
    return x + width * (column + 0.5) / 8, y + height * (row + 0.5) / 8


def wait_for_bars(page: BrowserSession, expected: list[tuple[str, str]]) -> None:
    class Evaluated:
        def evaluate(self, script: str) -> Any:
            return page.run(f"return ({script})()")

    try:
        wait_until(lambda: read_bars(Evaluated()) == expected)
    except AssertionError:
        assert read_bars(Evaluated()) == expected


def test_a_sample_is_predicted(page: Any, cifar10: vitrail.Model) -> None:
    window = page()
    wait_for_bars(window, format_bars((p.label, p.score) for p in cifar10.predict(CAT)))
    window.click(".sample[data-name=flower]")
    wait_for_bars(window, format_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "flower.jpg")))


def test_pointing_at_a_patch_shows_its_attention(page: Any, cifar10: vitrail.Model) -> None:
    window = page("#image=cat&layer=4&head=2")
    row = attention_maps(cifar10.net, cifar10.preprocess(CAT), query=(3, 6), layers=(3,))[0][0, 0, 1]  # 8 8
    best = divmod(int(row.argmax()), 8)
    window.move(*patch_center(window, 2, 5))
    where = "itself" if best == (2, 5) else f"row {best[0] + 1}, column {best[1] + 1}"
    window.wait_for_text("#query-caption", f"Row 3, column 6 attends most to {where} (")


def test_clicks_and_drags_hide_patches_and_pointing_sets_the_query(page: Any, site: httpx.Client) -> None:
    window = page("#image=cat")
    window.drag(patch_center(window, 3, 3))
    wait_for_bars(window, bars_with_hidden(site, [27], CAT.read_bytes()))
    window.wait_for_text(
        "#query-caption", "Row 4, column 4 attends most to"
    )  # WebKit sends pointerleave with every click
    window.drag(patch_center(window, 5, 6), patch_center(window, 4, 5), patch_center(window, 4, 4))
    wait_for_bars(window, bars_with_hidden(site, [27, 36, 37, 38, 44, 45, 46], CAT.read_bytes()))
    window.press_keys("u")
    wait_for_bars(window, bars_with_hidden(site, [27], CAT.read_bytes()))


def test_a_user_image_is_restored_from_its_link(page: Any, cifar10: vitrail.Model, tmp_path: Path) -> None:
    path = tmp_path / "mine.png"
    path.write_bytes(random_image(4))
    expected = format_bars((p.label, p.score) for p in cifar10.predict(random_image(4)))
    window = page()
    window.choose_file("#file-input", path)
    wait_for_bars(window, expected)
    wait_until(lambda: re.search("image=own:", window.run("return location.hash")))
    fragment = window.run("return location.hash")
    wait_for_bars(page(), format_bars((p.label, p.score) for p in cifar10.predict(CAT)))
    wait_for_bars(page(fragment), expected)


def test_shortcuts_select_layers_maps_and_panes(page: Any) -> None:
    window = page("#image=cat&layer=3")
    window.press_keys("]", "2")
    window.wait_for_text("#layer-value", "4 of 9")
    window.press_keys("c")
    window.wait_for_text("#panes", "BLayer 4, head 2")
    window.press_keys("v")
    window.wait_for_text("#panes", "Rollout")
    window.press_keys("c", "?")
    window.wait_for_text("#help-dialog[open]", "Help")
