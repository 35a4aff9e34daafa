"""The explorer in Firefox and in WebKit, where they are installed: the same images, words and bars as in Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import CAT, SAMPLES, as_bars, bars, drawing, hiding
from driving import FIREFOX, MINI_BROWSER, Driven, firefox, webkit
from serving import until

import vitrail
from vitrail.explain import attention_maps


def _page(name: str, folder: Path) -> Iterator[Driven]:
    if name == "firefox" and FIREFOX is None:
        pytest.skip("Firefox is not here: apt install firefox-esr")
    if name == "webkit" and not (MINI_BROWSER and shutil.which("WebKitWebDriver") and shutil.which("Xvfb")):
        pytest.skip("WebKit, its driver or a screen is not here: apt install webkit2gtk-driver xvfb")
    with {"firefox": firefox, "webkit": webkit}[name](folder) as page:
        yield page


@pytest.fixture(scope="module", params=["firefox", "webkit"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    yield from _page(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def page(browser: Driven, site: httpx.Client) -> Iterator[Callable[[str], Driven]]:
    def open_page(fragment: str = "") -> Driven:
        browser.go(f"{site.base_url}/{fragment}")
        browser.see("#words", "attends most to")
        return browser

    yield open_page
    assert browser.complaints() == []


def patch(page: Driven, row: int, column: int) -> tuple[float, float]:
    script = """const area = document.querySelector('.glass canvas').getBoundingClientRect();
        return [area.x, area.y, area.width, area.height]"""
    x, y, width, height = page.run(script)
    return x + width * (column + 0.5) / 8, y + height * (row + 0.5) / 8


def wait_for_bars(page: Driven, expected: list[tuple[str, str]]) -> None:
    class Evaluated:
        def evaluate(self, script: str) -> Any:
            return page.run(f"return ({script})()")

    try:
        until(lambda: bars(Evaluated()) == expected)
    except AssertionError:
        assert bars(Evaluated()) == expected


def test_a_sample_is_looked_at(page: Any, cifar10: vitrail.Model) -> None:
    seen = page()
    wait_for_bars(seen, as_bars((p.label, p.score) for p in cifar10.predict(CAT)))
    seen.click(".sample[data-name=flower]")
    wait_for_bars(seen, as_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "flower.jpg")))


def test_a_patch_is_asked_by_pointing(page: Any, cifar10: vitrail.Model) -> None:
    seen = page("#image=cat&layer=4&head=2")
    row = attention_maps(cifar10.net, cifar10.preprocess(CAT), query=(3, 6), layers=(3,))[0][0, 0, 1]  # 8 8
    best = divmod(int(row.argmax()), 8)
    seen.move(*patch(seen, 2, 5))
    where = "itself" if best == (2, 5) else f"row {best[0] + 1}, column {best[1] + 1}"
    seen.see("#words", f"Row 3, column 6 attends most to {where} (")


def test_clicks_and_drags_hide_and_the_pointer_keeps_asking(page: Any, site: httpx.Client) -> None:
    seen = page("#image=cat")
    seen.drag(patch(seen, 3, 3))
    wait_for_bars(seen, hiding(site, [27], CAT.read_bytes()))
    seen.see("#words", "Row 4, column 4 attends most to")  # WebKit sends pointerleave with every click
    seen.drag(patch(seen, 5, 6), patch(seen, 4, 5), patch(seen, 4, 4))
    wait_for_bars(seen, hiding(site, [27, 36, 37, 38, 44, 45, 46], CAT.read_bytes()))
    seen.press("u")
    wait_for_bars(seen, hiding(site, [27], CAT.read_bytes()))


def test_an_image_of_ones_own_is_remembered(page: Any, cifar10: vitrail.Model, tmp_path: Path) -> None:
    mine = tmp_path / "mine.png"
    mine.write_bytes(drawing(4))
    expected = as_bars((p.label, p.score) for p in cifar10.predict(drawing(4)))
    seen = page()
    seen.choose_file("#file", mine)
    wait_for_bars(seen, expected)
    until(lambda: re.search("image=own:", seen.run("return location.hash")))
    fragment = seen.run("return location.hash")
    wait_for_bars(page(), as_bars((p.label, p.score) for p in cifar10.predict(CAT)))
    wait_for_bars(page(fragment), expected)


def test_keys_choose_layers_maps_and_panes(page: Any) -> None:
    seen = page("#image=cat&layer=3")
    seen.press("]", "2")
    seen.see("#layer-out", "4 of 9")
    seen.press("c")
    seen.see("#panes", "BLayer 4, head 2")
    seen.press("v")
    seen.see("#panes", "Rollout")
    seen.press("c", "?")
    seen.see("#help-box[open]", "Help")
