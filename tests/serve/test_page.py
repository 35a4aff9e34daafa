"""The explorer in a real browser: user actions, and displayed values compared with the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from browsing import (
    CAT,
    FAILED_REQUEST,
    SAMPLES,
    bars_with_hidden,
    capitalize,
    drop_file,
    format_bars,
    link_parameters,
    long_press,
    patch_brightness,
    patch_center,
    random_image,
    read_bars,
    wait_for_bars,
    wait_until_explained,
    wait_until_stable,
)
from PIL import Image

import vitrail
from vitrail.explain import attention_maps, occlusion

pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
from playwright.sync_api import expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
OpenPage = Callable[..., Any]


def test_the_page_opens_with_a_sample_and_shows_its_predictions(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page())
    best = cifar10.predict(CAT)
    expect(page.locator(".label")).to_have_text(capitalize(best[0].label))
    wait_for_bars(page, format_bars((p.label, p.score) for p in best))
    expect(page.locator("#model-summary")).to_contain_text("8 × 8 patches")
    expect(page.locator("#announcement")).to_contain_text(
        f"{capitalize(best[0].label)}, {round(100 * best[0].score)} percent"
    )


@pytest.mark.parametrize("event_type", ["drop", "paste"])
def test_a_dropped_or_pasted_image_is_predicted(open_page: OpenPage, cifar10: vitrail.Model, event_type: str) -> None:
    page = wait_until_explained(open_page())
    drop_file(page, random_image(), event_type=event_type)
    wait_for_bars(page, format_bars((p.label, p.score) for p in cifar10.predict(random_image())))
    assert link_parameters(page)["image"].startswith("own:")


def test_the_camera_takes_an_image(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(permissions=["camera"]))
    page.locator("#camera").click()
    expect(page.locator("#camera-dialog")).to_be_visible()
    page.wait_for_timeout(300)
    page.locator("#camera-take").click()
    expect(page.locator("#camera-dialog")).to_be_hidden()
    page.wait_for_timeout(300)
    assert link_parameters(page)["image"].startswith("own:")


def test_a_file_that_is_not_an_image_is_reported_and_the_view_is_kept(
    open_page: OpenPage, cifar10: vitrail.Model
) -> None:
    page = wait_until_explained(open_page("#image=coffee&hide=9", allowed_error=FAILED_REQUEST))
    shown_bars = wait_until_stable(page, lambda: read_bars(page))
    for data, name in ((b"not an image at all", "mine.png"), (b"words", "words.txt")):
        drop_file(page, data, name=name)
        expect(page.locator("#banner-text")).to_contain_text("This file cannot be read as an image")
        expect(page.locator(".patch-grid.loading")).to_have_count(0)
        expect(page.locator("#query-caption")).to_contain_text("attends most to")  # the last good image is still there
        assert read_bars(page) == shown_bars
        assert {**link_parameters(page), "show": ""}.items() >= {"image": "coffee", "hide": "9"}.items()
        page.locator("#banner-close").click()
    drop_file(page, random_image(1))
    wait_for_bars(page, format_bars((p.label, p.score) for p in cifar10.predict(random_image(1))))
    expect(page.locator("#banner")).to_be_hidden()


def test_hovering_a_patch_brightens_the_patches_it_attends_to(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4&head=2"))
    images = cifar10.preprocess(CAT)
    row = attention_maps(cifar10.net, images, query=(3, 6), layers=(3,))[0][0, 0, 1]  # 8 8
    best = divmod(int(row.argmax()), 8)
    page.mouse.move(*patch_center(page, 2, 5))
    where = "itself" if best == (2, 5) else f"row {best[0] + 1}, column {best[1] + 1}"
    expect(page.locator("#query-caption")).to_contain_text(f"Row 3, column 6 attends most to {where} (")
    share = float(re.search(r"\((.*?)\s%", page.locator("#query-caption").inner_text()).group(1))
    assert share == pytest.approx(100 * float(row.max()), abs=0.6)
    order = row.flatten().argsort().tolist()
    plain_page = open_page("#image=cat&show=plain")
    expect(plain_page.locator("figcaption")).to_contain_text("as the model receives it")
    expect(plain_page.locator("#query-caption")).to_have_text("32 × 32 pixels.")
    brightness, plain_brightness = (
        wait_until_stable(one, lambda one=one: patch_brightness(one)) for one in (page, plain_page)
    )
    assert all(brightness[place] < 0.5 * plain_brightness[place] for place in order[:3])
    assert brightness[order[-1]] > 0.9 * plain_brightness[order[-1]]


def test_clicking_hides_a_patch_and_updates_the_prediction(open_page: OpenPage, site: httpx.Client) -> None:
    page = wait_until_explained(open_page())
    initial_bars = read_bars(page)
    page.mouse.click(*patch_center(page, 3, 3))
    page.mouse.click(*patch_center(page, 3, 4))
    wait_for_bars(page, bars_with_hidden(site, [27, 28], CAT.read_bytes()))
    expect(page.locator("#hidden-count")).to_have_text("2 of 64 hidden")
    expect(page.locator(".tick").first).to_be_visible()
    page.mouse.click(*patch_center(page, 3, 3))  # shown again
    wait_for_bars(page, bars_with_hidden(site, [28], CAT.read_bytes()))
    page.locator("#undo").click()
    wait_for_bars(page, bars_with_hidden(site, [27, 28], CAT.read_bytes()))
    page.locator("#clear").click()
    wait_for_bars(page, initial_bars)
    expect(page.locator(".tick").first).to_be_hidden()


def test_dragging_hides_an_area(open_page: OpenPage, site: httpx.Client) -> None:
    page = wait_until_explained(open_page())
    page.mouse.move(*patch_center(page, 5, 6))
    page.mouse.down()
    page.mouse.move(*patch_center(page, 4, 5), steps=3)
    page.mouse.move(*patch_center(page, 3, 4), steps=3)
    page.mouse.up()
    area = [row * 8 + column for row in (3, 4, 5) for column in (4, 5, 6)]
    wait_for_bars(page, bars_with_hidden(site, area, CAT.read_bytes()))
    assert link_parameters(page)["hide"] == "28-30.36-38.44-46"


def test_a_hidden_patch_does_not_become_the_query(open_page: OpenPage) -> None:
    """After a drag the pointer is over a hidden patch; the previous query is kept."""
    page = wait_until_explained(open_page("#image=cat&layer=4&ask=4.7"))
    caption = page.locator("#query-caption")
    page.mouse.move(*patch_center(page, 5, 5))
    expect(caption).to_contain_text("Row 6, column 6 attends most to")
    page.mouse.down()
    page.mouse.move(*patch_center(page, 6, 6), steps=4)
    expect(caption).to_contain_text("Row 6, column 6 attends most to")  # the query is kept while the area is drawn
    page.mouse.up()
    expect(page.locator("#hidden-count")).to_have_text("4 of 64 hidden")
    expect(caption).to_contain_text("Row 4, column 7 attends most to")
    page.mouse.move(*patch_center(page, 5, 6))  # over another hidden patch
    expect(caption).to_contain_text("Row 4, column 7 attends most to")
    page.mouse.move(*patch_center(page, 0, 0))
    expect(caption).to_contain_text("Row 1, column 1 attends most to")
    page.mouse.click(
        *patch_center(page, 3, 6)
    )  # the selected query is hidden: the input of the head is the query until it is shown again
    expect(caption).to_contain_text("The mean of all patches attends most to")
    page.get_by_role("button", name="Click: query").click()
    page.mouse.click(*patch_center(page, 5, 5))
    expect(page.locator("#banner-text")).to_contain_text("This patch is hidden")
    page.keyboard.press("u")
    page.mouse.move(2, 2)
    expect(caption).to_contain_text("Row 4, column 7 attends most to")
    assert link_parameters(page)["ask"] == "4.7"


def test_hiding_the_query_by_a_long_press_clears_it(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4", **PHONE))
    page.touchscreen.tap(*patch_center(page, 2, 3))
    expect(page.locator("#query-caption")).to_contain_text("Row 3, column 4 attends most to")
    long_press(page, *patch_center(page, 2, 3), milliseconds=600)
    expect(page.locator("#query-caption")).to_contain_text("The mean of all patches attends most to")


def test_only_the_latest_request_is_displayed(open_page: OpenPage, site: httpx.Client) -> None:
    """A late response for an earlier set of hidden patches changes nothing."""
    page = wait_until_explained(open_page())
    page.route("**/v1/predict", lambda route: (page.wait_for_timeout(10), route.continue_()))
    for column in range(6):
        page.mouse.click(*patch_center(page, 6, column))
    wait_for_bars(page, bars_with_hidden(site, [48, 49, 50, 51, 52, 53], CAT.read_bytes()))
    page.wait_for_timeout(500)
    assert read_bars(page) == bars_with_hidden(site, [48, 49, 50, 51, 52, 53], CAT.read_bytes())


def test_a_link_restores_the_view(open_page: OpenPage, site: httpx.Client) -> None:
    page = wait_until_explained(open_page("#image=coffee&layer=5"))
    page.keyboard.press("2")
    page.mouse.move(*patch_center(page, 1, 1))
    page.mouse.down()
    page.mouse.move(*patch_center(page, 2, 2), steps=4)
    page.mouse.up()
    page.keyboard.down("Shift")
    page.mouse.click(*patch_center(page, 6, 4))
    page.keyboard.up("Shift")
    page.mouse.move(2, 2)
    page.keyboard.press("b")
    wait_for_bars(page, bars_with_hidden(site, [9, 10, 17, 18], (SAMPLES / "coffee.jpg").read_bytes()))
    parameters = link_parameters(page)
    assert parameters == {
        **{"image": "coffee", "hide": "9-10.17-18", "show": "attention", "layer": "5", "head": "2"},
        **{"ask": "7.5", "paint": "heat"},
    }
    other = wait_until_explained(open_page(page.evaluate("location.hash")))
    wait_for_bars(other, read_bars(page))
    assert other.locator("#query-caption").inner_text() == page.locator("#query-caption").inner_text()
    assert other.locator("#query-caption").inner_text().startswith("Row 7, column 5 attends")
    assert link_parameters(other) == parameters


def test_a_link_to_a_user_image_works_only_in_the_same_browser(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page())
    drop_file(page, random_image(2))
    wait_for_bars(page, format_bars((p.label, p.score) for p in cifar10.predict(random_image(2))))
    wait_until_explained(page)
    page.mouse.click(*patch_center(page, 0, 0))
    expect(page.locator("#hidden-count")).to_have_text("1 of 64 hidden")
    page.wait_for_timeout(600)
    fragment, shown_bars = page.evaluate("location.hash"), read_bars(page)
    reopened = wait_until_explained(open_page(fragment, context=page.context))
    wait_for_bars(reopened, shown_bars)
    other_browser = open_page(fragment)
    expect(other_browser.locator("#banner-text")).to_contain_text("stored in another browser only")
    assert (
        link_parameters(other_browser).items() >= {"image": link_parameters(page)["image"], "hide": "0"}.items()
    )  # the link is complete
    drop_file(other_browser, random_image(2))
    wait_for_bars(other_browser, shown_bars)  # with the hidden patch of the link


def test_the_page_works_with_the_keyboard_alone(open_page: OpenPage, site: httpx.Client) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=3"))
    page.locator("#image-panel").focus()
    page.keyboard.press("Tab")
    expect(page.locator(".patch-grid")).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("PageUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#query-caption")).to_contain_text("Row 2, column 2 attends most to")
    cell = page.locator(f"#{page.locator('.patch-grid').get_attribute('aria-activedescendant')}")
    attention = page.locator("#query-caption").inner_text()  # Row 2, column 2 attends most to row 4, column 5 (3.1 %).
    expect(cell).to_contain_text(f"row 2, column 2; maximum at {attention.split(' most to ')[1].split(' (')[0]}")
    page.keyboard.press("Space")
    wait_for_bars(page, bars_with_hidden(site, [9], CAT.read_bytes()))
    cell = page.locator(f"#{page.locator('.patch-grid').get_attribute('aria-activedescendant')}")
    expect(cell).to_contain_text("row 2, column 2, hidden")
    expect(page.locator("#announcement")).to_contain_text("With 1 patch hidden: Cat, ")
    page.keyboard.press("u")
    expect(page.locator("#hidden-count")).to_contain_text("drag to hide an area")
    cell = page.locator(f"#{page.locator('.patch-grid').get_attribute('aria-activedescendant')}")
    expect(cell).not_to_contain_text("hidden")
    page.keyboard.press("]")
    page.keyboard.press("]")
    page.keyboard.press("[")
    expect(page.locator("#layer-value")).to_have_text("4 of 9")
    page.keyboard.press("Enter")
    page.keyboard.press("p")
    expect(page.locator("#layer-value")).to_have_text(re.compile("^[6-9]"))
    page.keyboard.press("p")
    stopped_layer = page.locator("#layer-value").inner_text()
    page.keyboard.press("?")
    expect(page.locator("#help-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help-dialog")).to_be_hidden()
    page.wait_for_timeout(950)
    assert page.locator("#layer-value").inner_text() == stopped_layer
    assert link_parameters(page)["ask"] == "2.2"


def test_shortcuts_can_be_turned_off(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=3"))
    page.keyboard.press("?")
    page.locator("#shortcuts-enabled").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("]")
    page.keyboard.press("c")
    page.wait_for_timeout(100)
    expect(page.locator("#layer-value")).to_have_text("3 of 9")
    expect(page.locator(".pane")).to_have_count(1)


def test_two_layers_and_two_images_are_compared_side_by_side(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=8"))
    page.locator("#compare").click()
    expect(page.locator(".pane figcaption")).to_contain_text(["ALayer 8", "BLayer 8"])
    expect(page.locator("#hint")).to_contain_text("The controls apply to B")
    expect(page.locator("#query-caption")).to_contain_text("B: The mean of all patches attends most to")
    for _ in range(4):
        page.keyboard.press("[")
    expect(page.locator(".pane figcaption")).to_contain_text(["ALayer 8", "BLayer 4"])
    expect(page.locator(".prediction-block")).to_have_count(1)
    page.mouse.move(*patch_center(page, 1, 1, pane=1))  # the query of both panes
    first_pane, second_pane = (
        wait_until_stable(page, lambda pane=pane: patch_brightness(page, pane)) for pane in (0, 1)
    )
    assert not np.allclose(first_pane, second_pane, atol=5)
    page.locator(".sample[data-name=flower]").click()
    expect(page.locator(".prediction-block")).to_have_count(2)
    expect(page.locator(".label").nth(1)).to_have_text(capitalize(cifar10.predict(SAMPLES / "flower.jpg")[0].label))
    expect(page.locator(".label").nth(0)).to_have_text(capitalize(cifar10.predict(CAT)[0].label))
    parameters = link_parameters(page)
    assert (parameters["image"], parameters["image2"], parameters["layer"], parameters["layer2"]) == (
        "cat",
        "flower",
        "8",
        "4",
    )
    other = wait_until_explained(open_page(page.evaluate("location.hash")))
    expect(other.locator(".prediction-block")).to_have_count(2)
    page.keyboard.press("c")
    expect(page.locator(".pane")).to_have_count(1)
    expect(page.locator(".prediction-block")).to_have_count(1)


def test_maps_distances_and_position_similarity_match_the_model(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=2&paint=heat"))
    units = {
        "Rollout": "%",
        "Gradient": "of the maximum",
        "Occlusion": re.compile("probability (drops|rises) .* points when occluded"),
    }
    for name, unit in units.items():
        page.get_by_role("button", name=name).click()
        page.mouse.move(*patch_center(page, 3, 3))
        patch_text = "Rows 3 and 4, columns 3 and 4: " if name == "Occlusion" else "Row 4, column 4: "
        expect(page.locator("#query-caption")).to_contain_text(patch_text)
        expect(page.locator("#query-caption")).to_contain_text(unit)
        page.mouse.move(2, 2)
        expect(page.locator("#query-caption")).to_contain_text("Maximum at row")
    images = cifar10.preprocess(CAT)
    drops = occlusion(cifar10.net, images, cifar10.net(images).argmax(1), stride=2)[0]
    down, right = (2 * (at // 2) + 1 for at in divmod(int(drops.argmax()), 8))
    square = f"rows {down} and {down + 1}, columns {right} and {right + 1}"
    where = f"Maximum at {square}: probability drops {100 * float(drops.max()):.1f} points"
    expect(page.locator("#query-caption")).to_contain_text(where)
    expect(page.locator("figcaption")).to_contain_text("Drop in “Cat” when 2 × 2 patches are occluded.")
    page.get_by_role("button", name="Attention", exact=True).click()
    expect(page.locator("#distance-plot circle")).to_have_count(9 * 3)
    expect(page.locator("#distance-plot .current-layer")).to_have_count(1)
    dot = page.locator("#distance-plot circle").nth(4 * 3 + 1).bounding_box()
    page.mouse.move(dot["x"] + 3, dot["y"] + 3)
    expect(page.locator("#distance-note")).to_contain_text("Layer 5, head")
    page.mouse.click(dot["x"] + 3, dot["y"] + 3)
    expect(page.locator("#layer-value")).to_have_text("5 of 9")
    page.mouse.move(*patch_center(page, 0, 7))
    expect(page.locator("#position-note")).to_contain_text("Row 1, column 8: mean cosine")


def test_the_view_is_downloaded_as_a_png(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&show2=rollout"))
    page.wait_for_timeout(300)
    with page.expect_download() as download:
        page.locator("#save").click()
    assert download.value.suggested_filename == "vitrail-cat.png"
    with Image.open(download.value.path()) as image:
        assert image.format == "PNG"
        assert image.width > 2 * 720
        assert len(np.unique(np.asarray(image.convert("L")))) > 150


def test_the_theme_follows_the_system_until_one_is_chosen(open_page: OpenPage) -> None:
    def background_brightness(page: Any) -> int:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    assert background_brightness(open_page()) > 700
    page = open_page(color_scheme="dark")
    assert background_brightness(page) < 100
    wait_until_explained(page).locator("#theme").click()
    assert background_brightness(page) > 700
    reopened = open_page(context=page.context)
    assert background_brightness(reopened) > 700  # stored, although the system is dark


def test_the_page_fits_the_width_of_a_phone(open_page: OpenPage, site: httpx.Client) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=3", **PHONE))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.touchscreen.tap(*patch_center(page, 2, 3))
    expect(page.locator("#query-caption")).to_contain_text("Row 3, column 4 attends most to")
    expect(page.locator("#hidden-count")).to_contain_text("Long-press")
    long_press(page, *patch_center(page, 2, 3), milliseconds=600)
    wait_for_bars(page, bars_with_hidden(site, [19], CAT.read_bytes()))
    page.get_by_role("button", name="Tap: hide").click()
    page.touchscreen.tap(*patch_center(page, 2, 4))
    wait_for_bars(page, bars_with_hidden(site, [19, 20], CAT.read_bytes()))
    script = """() => [...document.querySelectorAll('button')].filter((button) => button.offsetParent)
        .map((button) => button.getBoundingClientRect().height)"""
    assert min(page.evaluate(script)) >= 24  # large enough for touch


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_map_changes_are_animated_unless_reduced_motion_is_set(open_page: OpenPage, motion: str) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=1", reduced_motion=motion))
    wait_until_stable(page, lambda: patch_brightness(page))
    script = """async () => {
        const shown = document.querySelector('.patch-grid canvas'), canvas = document.createElement('canvas');
        const context = Object.assign(canvas, { width: 8, height: 8 }).getContext('2d', { willReadFrequently: true });
        const seen = new Set();
        dispatchEvent(new KeyboardEvent('keydown', { key: ']' }));
        for (let frame = 0; frame < 12; frame++) {
            await new Promise(requestAnimationFrame);
            context.drawImage(shown, 0, 0, 8, 8);
            seen.add(context.getImageData(0, 0, 8, 8).data.join());
        }
        return seen.size;
    }"""
    frames = page.evaluate(script)  # the number of different frames
    assert frames <= 2 if motion == "reduce" else frames > 4
