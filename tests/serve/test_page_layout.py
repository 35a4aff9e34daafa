"""The explorer's layout: the prediction stays in view on phones, controls stay in line, long names fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from browsing import CAT, answered, as_bars, hiding, patch, wait_for_bars
from small_models import model, small

import vitrail

pytest.importorskip("playwright", reason="the page is tested with it: pip install playwright")
from playwright.sync_api import expect
from serving import run_server, served

Opened = Callable[..., Any]
LONG = "supercalifragilistic" * 250
NAMES = [
    LONG,
    "חתול בית " * 500,
    "<img src=x onerror=alert(1)>",
    "two words " * 500,
    "frog\u202egnp.exe\n",
    "",
    ",comma",
]


def phone(width: int, height: int) -> dict[str, Any]:
    return {"viewport": {"width": width, "height": height}, "has_touch": True, "is_mobile": True}


def area(page: Any, at: str) -> tuple[float, float, float, float]:
    """Left, top, right, bottom, on the screen."""
    box = page.locator(at).first.bounding_box()
    return box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]


def tallest(page: Any, at: str) -> float:
    """The height of the tallest of them, once one is shown."""
    script = "(at) => Math.max(...[...document.querySelectorAll(at)].map((one) => one.offsetHeight))"
    height: float = page.wait_for_function(script, arg=at).json_value()
    return height


@pytest.mark.parametrize("size", [(360, 640), (390, 844), (844, 390), (568, 320), (320, 568)])
def test_the_prediction_is_in_view_while_patches_are_hidden_on_a_phone(
    opened: Opened, site: httpx.Client, size: tuple[int, int]
) -> None:
    page = answered(opened("#image=cat&layer=4", **phone(*size)))
    page.get_by_role("button", name="Tap: hide").click()  # scrolls to it
    for row, column in ((2, 3), (2, 4)):
        page.touchscreen.tap(*patch(page, row, column))
    expected = hiding(site, [19, 20], CAT.read_bytes())
    wait_for_bars(page, expected)
    verdict = page.locator("#verdict")
    expect(verdict).to_contain_text("".join(expected[0]))
    expect(verdict.locator(".shift")).to_contain_text("points")
    for top in (0, page.locator("#modes").evaluate("(one) => one.getBoundingClientRect().top + scrollY - 40")):
        page.evaluate("(top) => scrollTo(0, top)", top)
        left, above, right, below = area(page, "#verdict")
        assert 0 <= left < right <= size[0]
        assert 0 <= above < below <= size[1]
        assert below <= area(page, ".glass")[1]  # beside the image, not over it
        assert area(page, ".glass")[3] <= size[1]
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_the_class_before_is_named_where_hiding_changes_it(opened: Opened) -> None:
    page = answered(opened("#image=cat&hide=0-61", **phone(390, 844)))
    first, now = page.locator(".label").inner_text(), page.locator("#verdict .best")
    expect(now).to_have_text([first, "Cat"])
    expect(page.locator("#verdict")).to_contain_text("was")
    page.locator("#clear").click()
    expect(now).to_have_text(["Cat"])
    expect(page.locator("#verdict .shift")).to_have_count(0)


def test_a_wide_screen_has_the_prediction_once(opened: Opened) -> None:
    page = answered(opened(viewport={"width": 1024, "height": 768}))
    expect(page.locator("#verdict")).to_be_hidden()


def test_undo_and_clear_stand_in_one_line_with_the_rest(opened: Opened) -> None:
    page = answered(opened("#image=cat&hide=0-40"))
    script = """() => ['modes', 'hidden-count', 'fill', 'undo', 'clear'].map((id) => {
        const { top, height } = document.getElementById(id).getBoundingClientRect();
        return top + height / 2;
    })"""
    for width in (320, 390, 640, 820, 960, 1024, 1121, 1280, 1440, 1920, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        modes, count, *ends = page.evaluate(script)
        assert max(ends) - min(ends) < 3, width
        if width >= 640:
            assert max(modes, count, *ends) - min(modes, count, *ends) < 3, width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1440, "height": 900})
    assert page.evaluate("document.documentElement.scrollHeight") == 900


@pytest.fixture(scope="module")
def named() -> Iterator[httpx.Client]:
    """A server of a model whose names are long, right to left, like HTML, or nothing."""
    torch.manual_seed(0)
    vit = model(small(num_classes=len(NAMES)))
    what = served(vitrail.Model(vit.net, vit.info.replace(labels=tuple(NAMES))))
    what.name = "model-" + 3000 * "x"
    with run_server(what) as (client, _):
        yield client


@pytest.mark.parametrize("size", [(390, 844), (844, 390), (1440, 900)])
def test_a_name_of_any_length_stays_in_its_place(opened: Opened, named: httpx.Client, size: tuple[int, int]) -> None:
    options = phone(*size) if size != (1440, 900) else {"viewport": {"width": 1440, "height": 900}}
    page = answered(opened("#image=cat&hide=3", at=str(named.base_url), **options))
    found = named.post("/v1/predict", params={"hide": "3"}, content=CAT.read_bytes()).json()["results"][0][
        "predictions"
    ]
    for method in ("Gradient", "Occlusion"):
        page.get_by_role("button", name=method).click()
        expect(page.locator("#words")).not_to_be_empty()
        expect(page.locator(".means").first).not_to_be_empty()
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        for at, most in {".label": 100, ".means": 60, "#model": 50, ".bar .who": 30}.items():
            assert 0 < tallest(page, at) < most, at
    assert page.locator(".label").get_attribute("title") == found[0]["label"]
    titles = page.locator(".bar .who").evaluate_all("(all) => all.map((one) => one.title)")
    assert set(titles) == {prediction["label"] for prediction in found}
    assert len(page.title()) < 90
    assert len(page.locator("#live").inner_text()) < 200
    assert page.locator("img[src=x]").count() == 0
    assert "model-xxx" in page.locator("#model b").get_attribute("title")


def test_long_names_are_cut_in_the_download_and_in_the_description_of_the_api(
    opened: Opened, named: httpx.Client
) -> None:
    page = answered(opened("#image=cat&hide=3", at=str(named.base_url)))
    page.get_by_role("button", name="Gradient").click()
    expect(page.locator("#words")).to_contain_text("Maximum at")
    script = """() => {
        const { prototype } = CanvasRenderingContext2D, draw = prototype.fillText;
        window.wide = [];
        prototype.fillText = function (text, x, y) {
            wide.push(this.measureText(text).width);
            draw.call(this, text, x, y);
        };
    }"""
    page.evaluate(script)
    with page.expect_download():
        page.locator("#save").click()
    assert max(page.evaluate("wide")) < 720
    page.goto(f"{str(named.base_url).rstrip('/')}/docs")
    expect(page.locator("#post-v1-explain")).to_be_visible()
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert tallest(page, ".values td") < 300
    assert tallest(page, ".top") < 90


def test_names_are_made_fit_for_a_sentence(opened: Opened) -> None:
    page = opened()
    script = """async (label) => {
        const { short, tidy } = await import('/static/formatting.js');
        return [tidy(label), short(tidy(label), 10)];
    }"""
    assert page.evaluate(script, "tabby, tabby cat") == ["Tabby", "Tabby"]
    assert page.evaluate(script, "great_white_shark") == ["Great white shark", "Great whi…"]
    assert page.evaluate(script, "") == ["(no name)", "(no name)"]
    assert page.evaluate(script, ",x") == [",x", ",x"]
    assert page.evaluate(script, "frog\u202egnp\n.exe") == ["Frog gnp .exe", "Frog gnp…"]
    assert page.evaluate(script, "חתול") == ["חתול", "\u2068חתול\u2069"]  # isolated from the words around it
    assert page.evaluate(script, "🐈" * 20)[1] == "🐈" * 9 + "…"  # no half of a letter


def test_bars_and_names_are_those_of_the_model(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened(**phone(390, 844)))
    best = as_bars((p.label, p.score) for p in cifar10.predict(CAT))[0]
    expect(page.locator("#verdict")).to_have_text("".join(best))
