"""Layout of the explorer: the prediction stays visible on phones, controls are aligned, long names fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from browsing import CAT, bars_with_hidden, format_bars, patch_center, wait_for_bars, wait_until_explained
from small_models import model, small

import vitrail

pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
from playwright.sync_api import expect
from serving import run_server, served

OpenPage = Callable[..., Any]
LONG_NAME = "supercalifragilistic" * 250
NAMES = [
    LONG_NAME,
    "חתול בית " * 500,
    "<img src=x onerror=alert(1)>",
    "two words " * 500,
    "frog\u202egnp.exe\n",
    "",
    ",comma",
]


def phone(width: int, height: int) -> dict[str, Any]:
    return {"viewport": {"width": width, "height": height}, "has_touch": True, "is_mobile": True}


def bounds(page: Any, selector: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of an element on the screen."""
    box = page.locator(selector).first.bounding_box()
    return box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]


def max_height_of(page: Any, selector: str) -> float:
    """Height of the tallest matching element, once one is displayed."""
    script = (
        "(selector) => Math.max(...[...document.querySelectorAll(selector)].map((element) => element.offsetHeight))"
    )
    height: float = page.wait_for_function(script, arg=selector).json_value()
    return height


@pytest.mark.parametrize("size", [(360, 640), (390, 844), (844, 390), (568, 320), (320, 568)])
def test_the_prediction_is_visible_while_hiding_patches_on_a_phone(
    open_page: OpenPage, site: httpx.Client, size: tuple[int, int]
) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4", **phone(*size)))
    page.get_by_role("button", name="Tap: hide").click()  # scrolls to the button
    for row, column in ((2, 3), (2, 4)):
        page.touchscreen.tap(*patch_center(page, row, column))
    expected = bars_with_hidden(site, [19, 20], CAT.read_bytes())
    wait_for_bars(page, expected)
    predictions = page.locator("#compact-predictions")
    expect(predictions).to_contain_text("".join(expected[0]))
    expect(predictions.locator(".probability-change")).to_contain_text("points")
    for top in (
        0,
        page.locator("#click-action").evaluate("(element) => element.getBoundingClientRect().top + scrollY - 40"),
    ):
        page.evaluate("(top) => scrollTo(0, top)", top)
        left, above, right, below = bounds(page, "#compact-predictions")
        assert 0 <= left < right <= size[0]
        assert 0 <= above < below <= size[1]
        assert below <= bounds(page, ".patch-grid")[1]  # above the image, not over it
        assert bounds(page, ".patch-grid")[3] <= size[1]
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_the_previous_top_class_is_shown_if_hiding_changes_it(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&hide=0-61", **phone(390, 844)))
    top_class, shown_classes = page.locator(".label").inner_text(), page.locator("#compact-predictions .top-class")
    expect(shown_classes).to_have_text([top_class, "Cat"])
    expect(page.locator("#compact-predictions")).to_contain_text("was")
    page.locator("#clear").click()
    expect(shown_classes).to_have_text(["Cat"])
    expect(page.locator("#compact-predictions .probability-change")).to_have_count(0)


def test_a_wide_screen_has_no_compact_predictions(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(viewport={"width": 1024, "height": 768}))
    expect(page.locator("#compact-predictions")).to_be_hidden()


def test_undo_and_clear_are_aligned_with_the_other_controls(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&hide=0-40"))
    script = """() => ['click-action', 'hidden-count', 'fill', 'undo', 'clear'].map((id) => {
        const { top, height } = document.getElementById(id).getBoundingClientRect();
        return top + height / 2;
    })"""
    for width in (320, 390, 640, 820, 960, 1024, 1121, 1280, 1440, 1920, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        modes, count, *buttons = page.evaluate(script)
        assert max(buttons) - min(buttons) < 3, width
        if width >= 640:
            assert max(modes, count, *buttons) - min(modes, count, *buttons) < 3, width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1440, "height": 900})
    assert page.evaluate("document.documentElement.scrollHeight") == 900


@pytest.fixture(scope="module")
def unusual_names() -> Iterator[httpx.Client]:
    """A server of a model with class names that are long, right-to-left, HTML, or empty."""
    torch.manual_seed(0)
    vit = model(small(num_classes=len(NAMES)))
    served_model = served(vitrail.Model(vit.net, vit.info.replace(labels=tuple(NAMES))))
    served_model.name = "model-" + 3000 * "x"
    with run_server(served_model) as (client, _):
        yield client


@pytest.mark.parametrize("size", [(390, 844), (844, 390), (1440, 900)])
def test_class_names_of_any_length_fit_the_layout(
    open_page: OpenPage, unusual_names: httpx.Client, size: tuple[int, int]
) -> None:
    options = phone(*size) if size != (1440, 900) else {"viewport": {"width": 1440, "height": 900}}
    page = wait_until_explained(open_page("#image=cat&hide=3", base_url=str(unusual_names.base_url), **options))
    predictions = unusual_names.post("/v1/predict", params={"hide": "3"}, content=CAT.read_bytes()).json()["results"][
        0
    ]["predictions"]
    for method in ("Gradient", "Occlusion"):
        page.get_by_role("button", name=method).click()
        expect(page.locator("#query-caption")).not_to_be_empty()
        expect(page.locator(".caption-text").first).not_to_be_empty()
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        for selector, max_height in {
            ".label": 100,
            ".caption-text": 60,
            "#model-summary": 50,
            ".bar .class-name": 30,
        }.items():
            assert 0 < max_height_of(page, selector) < max_height, selector
    assert page.locator(".label").get_attribute("title") == predictions[0]["label"]
    titles = page.locator(".bar .class-name").evaluate_all("(elements) => elements.map((element) => element.title)")
    assert set(titles) == {prediction["label"] for prediction in predictions}
    assert len(page.title()) < 90
    assert len(page.locator("#announcement").inner_text()) < 200
    assert page.locator("img[src=x]").count() == 0
    assert "model-xxx" in page.locator("#model-summary b").get_attribute("title")


def test_long_names_are_truncated_in_the_download_and_the_api_page(
    open_page: OpenPage, unusual_names: httpx.Client
) -> None:
    page = wait_until_explained(open_page("#image=cat&hide=3", base_url=str(unusual_names.base_url)))
    page.get_by_role("button", name="Gradient").click()
    expect(page.locator("#query-caption")).to_contain_text("Maximum at")
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
    page.goto(f"{str(unusual_names.base_url).rstrip('/')}/docs")
    expect(page.locator("#post-v1-explain")).to_be_visible()
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert max_height_of(page, ".parameters td") < 300
    assert max_height_of(page, ".page-header") < 90


def test_class_names_are_formatted_for_display(open_page: OpenPage) -> None:
    page = open_page()
    script = """async (label) => {
        const { displayLabel, truncate } = await import('/static/formatting.js');
        return [displayLabel(label), truncate(displayLabel(label), 10)];
    }"""
    assert page.evaluate(script, "tabby, tabby cat") == ["Tabby", "Tabby"]
    assert page.evaluate(script, "great_white_shark") == ["Great white shark", "Great whi…"]
    assert page.evaluate(script, "") == ["(no name)", "(no name)"]
    assert page.evaluate(script, ",x") == [",x", ",x"]
    assert page.evaluate(script, "frog\u202egnp\n.exe") == ["Frog gnp .exe", "Frog gnp…"]
    assert page.evaluate(script, "חתול") == ["חתול", "\u2068חתול\u2069"]  # isolated from the surrounding text
    assert page.evaluate(script, "🐈" * 20)[1] == "🐈" * 9 + "…"  # not cut within a character


def test_compact_predictions_match_the_model(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page(**phone(390, 844)))
    best = format_bars((p.label, p.score) for p in cifar10.predict(CAT))[0]
    expect(page.locator("#compact-predictions")).to_have_text("".join(best))
