"""The explorer in a real browser: what a person does with it, held against what the model says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from browsing import (
    AWAY,
    CAT,
    SAMPLES,
    answered,
    as_bars,
    bars,
    capital,
    drawing,
    drop,
    hiding,
    lights,
    patch,
    press,
    query,
    settled,
    wait_for_bars,
)
from PIL import Image

import vitrail
from vitrail.api.explanation import METHODS
from vitrail.explain import attention_maps

pytest.importorskip("playwright", reason="the page is tested with it: pip install playwright")
from playwright.sync_api import expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
Opened = Callable[..., Any]


def test_it_opens_with_a_sample_and_says_what_the_model_says(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened())
    best = cifar10.predict(CAT)
    expect(page.locator(".label")).to_have_text(capital(best[0].label))
    wait_for_bars(page, as_bars((p.label, p.score) for p in best))
    expect(page.locator("#model")).to_contain_text("8 × 8 patches")
    expect(page.locator("#live")).to_contain_text(f"{capital(best[0].label)}, {round(100 * best[0].score)} percent")


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_a_dropped_or_pasted_image_is_looked_at(opened: Opened, cifar10: vitrail.Model, how: str) -> None:
    page = answered(opened())
    drop(page, drawing(), how=how)
    wait_for_bars(page, as_bars((p.label, p.score) for p in cifar10.predict(drawing())))
    assert query(page)["image"].startswith("own:")


def test_the_camera_takes_an_image(opened: Opened) -> None:
    page = answered(opened(permissions=["camera"]))
    page.locator("#camera").click()
    expect(page.locator("#camera-box")).to_be_visible()
    page.wait_for_timeout(300)
    page.locator("#camera-take").click()
    expect(page.locator("#camera-box")).to_be_hidden()
    page.wait_for_timeout(300)
    assert query(page)["image"].startswith("own:")


def test_what_is_no_image_is_refused_in_words_and_the_page_goes_on(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#image=coffee&hide=9", allowed=AWAY))
    said = settled(page, lambda: bars(page))
    for data, name in ((b"not an image at all", "mine.png"), (b"words", "words.txt")):
        drop(page, data, name=name)
        expect(page.locator("#banner-text")).to_contain_text("This file cannot be read as an image")
        expect(page.locator(".glass.waiting")).to_have_count(0)
        expect(page.locator("#words")).to_contain_text("attends most to")  # the last good image is still there
        assert bars(page) == said
        assert {**query(page), "show": ""}.items() >= {"image": "coffee", "hide": "9"}.items()
        page.locator("#banner-close").click()
    drop(page, drawing(1))
    wait_for_bars(page, as_bars((p.label, p.score) for p in cifar10.predict(drawing(1))))
    expect(page.locator("#banner")).to_be_hidden()


def test_hovering_a_patch_lights_what_it_attends_to(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#image=cat&layer=4&head=2"))
    images = cifar10.preprocess(CAT)
    row = attention_maps(cifar10.net, images, query=(3, 6), layers=(3,))[0][0, 0, 1]  # 8 8
    best = divmod(int(row.argmax()), 8)
    page.mouse.move(*patch(page, 2, 5))
    where = "itself" if best == (2, 5) else f"row {best[0] + 1}, column {best[1] + 1}"
    expect(page.locator("#words")).to_contain_text(f"Row 3, column 6 attends most to {where} (")
    share = float(re.search(r"\((.*?)\s%", page.locator("#words").inner_text()).group(1))
    assert share == pytest.approx(100 * float(row.max()), abs=0.6)
    order = row.flatten().argsort().tolist()
    plain = opened("#image=cat&show=plain")
    expect(plain.locator("figcaption")).to_contain_text("as the model receives it")
    expect(plain.locator("#words")).to_have_text("32 × 32 pixels.")
    lit, unlit = (settled(one, lambda one=one: lights(one)) for one in (page, plain))
    assert all(lit[place] < 0.5 * unlit[place] for place in order[:3])
    assert lit[order[-1]] > 0.9 * unlit[order[-1]]


def test_clicking_hides_and_the_prediction_follows(opened: Opened, site: httpx.Client) -> None:
    page = answered(opened())
    whole = bars(page)
    page.mouse.click(*patch(page, 3, 3))
    page.mouse.click(*patch(page, 3, 4))
    wait_for_bars(page, hiding(site, [27, 28], CAT.read_bytes()))
    expect(page.locator("#hidden-count")).to_have_text("2 of 64 hidden")
    expect(page.locator(".tick").first).to_be_visible()
    page.mouse.click(*patch(page, 3, 3))  # shown again
    wait_for_bars(page, hiding(site, [28], CAT.read_bytes()))
    page.locator("#undo").click()
    wait_for_bars(page, hiding(site, [27, 28], CAT.read_bytes()))
    page.locator("#clear").click()
    wait_for_bars(page, whole)
    expect(page.locator(".tick").first).to_be_hidden()


def test_dragging_hides_an_area(opened: Opened, site: httpx.Client) -> None:
    page = answered(opened())
    page.mouse.move(*patch(page, 5, 6))
    page.mouse.down()
    page.mouse.move(*patch(page, 4, 5), steps=3)
    page.mouse.move(*patch(page, 3, 4), steps=3)
    page.mouse.up()
    area = [row * 8 + column for row in (3, 4, 5) for column in (4, 5, 6)]
    wait_for_bars(page, hiding(site, area, CAT.read_bytes()))
    assert query(page)["hide"] == "28-30.36-38.44-46"


def test_a_hidden_patch_does_not_become_the_query(opened: Opened) -> None:
    """After a drag the pointer is over what it hid: what was asked before is still asked."""
    page = answered(opened("#image=cat&layer=4&ask=4.7"))
    words = page.locator("#words")
    page.mouse.move(*patch(page, 5, 5))
    expect(words).to_contain_text("Row 6, column 6 attends most to")
    page.mouse.down()
    page.mouse.move(*patch(page, 6, 6), steps=4)
    expect(words).to_contain_text("Row 6, column 6 attends most to")  # the light stays while the area is drawn
    page.mouse.up()
    expect(page.locator("#hidden-count")).to_have_text("4 of 64 hidden")
    expect(words).to_contain_text("Row 4, column 7 attends most to")
    page.mouse.move(*patch(page, 5, 6))  # over another hidden one
    expect(words).to_contain_text("Row 4, column 7 attends most to")
    page.mouse.move(*patch(page, 0, 0))
    expect(words).to_contain_text("Row 1, column 1 attends most to")
    page.mouse.click(*patch(page, 3, 6))  # the chosen one itself: what the head reads asks, until it is shown again
    expect(words).to_contain_text("The mean of all patches attends most to")
    page.get_by_role("button", name="Click: query").click()
    page.mouse.click(*patch(page, 5, 5))
    expect(page.locator("#banner-text")).to_contain_text("This patch is hidden")
    page.keyboard.press("u")
    page.mouse.move(2, 2)
    expect(words).to_contain_text("Row 4, column 7 attends most to")
    assert query(page)["ask"] == "4.7"


def test_a_long_press_on_the_query_leaves_a_visible_one(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4", **PHONE))
    page.touchscreen.tap(*patch(page, 2, 3))
    expect(page.locator("#words")).to_contain_text("Row 3, column 4 attends most to")
    press(page, *patch(page, 2, 3), milliseconds=600)
    expect(page.locator("#words")).to_contain_text("The mean of all patches attends most to")


def test_only_the_latest_wish_counts(opened: Opened, site: httpx.Client) -> None:
    """An answer that comes late, for what was hidden before, changes nothing."""
    page = answered(opened())
    page.route("**/v1/predict", lambda route: (page.wait_for_timeout(10), route.continue_()))
    for column in range(6):
        page.mouse.click(*patch(page, 6, column))
    wait_for_bars(page, hiding(site, [48, 49, 50, 51, 52, 53], CAT.read_bytes()))
    page.wait_for_timeout(500)
    assert bars(page) == hiding(site, [48, 49, 50, 51, 52, 53], CAT.read_bytes())


def test_a_link_restores_the_view(opened: Opened, site: httpx.Client) -> None:
    page = answered(opened("#image=coffee&layer=5"))
    page.keyboard.press("2")
    page.mouse.move(*patch(page, 1, 1))
    page.mouse.down()
    page.mouse.move(*patch(page, 2, 2), steps=4)
    page.mouse.up()
    page.keyboard.down("Shift")
    page.mouse.click(*patch(page, 6, 4))
    page.keyboard.up("Shift")
    page.mouse.move(2, 2)
    page.keyboard.press("b")
    wait_for_bars(page, hiding(site, [9, 10, 17, 18], (SAMPLES / "coffee.jpg").read_bytes()))
    words = query(page)
    assert words == {
        **{"image": "coffee", "hide": "9-10.17-18", "show": "attention", "layer": "5", "head": "2"},
        **{"ask": "7.5", "paint": "heat"},
    }
    other = answered(opened(page.evaluate("location.hash")))
    wait_for_bars(other, bars(page))
    assert other.locator("#words").inner_text() == page.locator("#words").inner_text()
    assert other.locator("#words").inner_text().startswith("Row 7, column 5 attends")
    assert query(other) == words


def test_an_image_of_ones_own_is_restored_here_and_explained_elsewhere(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened())
    drop(page, drawing(2))
    wait_for_bars(page, as_bars((p.label, p.score) for p in cifar10.predict(drawing(2))))
    answered(page)
    page.mouse.click(*patch(page, 0, 0))
    expect(page.locator("#hidden-count")).to_have_text("1 of 64 hidden")
    page.wait_for_timeout(600)
    fragment, said = page.evaluate("location.hash"), bars(page)
    again = answered(opened(fragment, context=page.context))
    wait_for_bars(again, said)
    stranger = opened(fragment)
    expect(stranger.locator("#banner-text")).to_contain_text("stored in another browser only")
    assert query(stranger).items() >= {"image": query(page)["image"], "hide": "0"}.items()  # the link stays whole
    drop(stranger, drawing(2))
    wait_for_bars(stranger, said)  # with the patch hidden, as the link has it


def test_the_keyboard_alone_is_enough(opened: Opened, site: httpx.Client) -> None:
    page = answered(opened("#image=cat&layer=3"))
    page.locator("#stage").focus()
    page.keyboard.press("Tab")
    expect(page.locator(".glass")).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("PageUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#words")).to_contain_text("Row 2, column 2 attends most to")
    cell = page.locator(f"#{page.locator('.glass').get_attribute('aria-activedescendant')}")
    attention = page.locator("#words").inner_text()  # Row 2, column 2 attends most to row 4, column 5 (3.1 %).
    expect(cell).to_contain_text(f"row 2, column 2; maximum at {attention.split(' most to ')[1].split(' (')[0]}")
    page.keyboard.press("Space")
    wait_for_bars(page, hiding(site, [9], CAT.read_bytes()))
    cell = page.locator(f"#{page.locator('.glass').get_attribute('aria-activedescendant')}")
    expect(cell).to_contain_text("row 2, column 2, hidden")
    expect(page.locator("#live")).to_contain_text("With 1 patch hidden: Cat, ")
    page.keyboard.press("u")
    expect(page.locator("#hidden-count")).to_contain_text("drag to hide an area")
    cell = page.locator(f"#{page.locator('.glass').get_attribute('aria-activedescendant')}")
    expect(cell).not_to_contain_text("hidden")
    page.keyboard.press("]")
    page.keyboard.press("]")
    page.keyboard.press("[")
    expect(page.locator("#layer-out")).to_have_text("4 of 9")
    page.keyboard.press("Enter")
    page.keyboard.press("p")
    expect(page.locator("#layer-out")).to_have_text(re.compile("^[6-9]"))
    page.keyboard.press("p")
    stopped = page.locator("#layer-out").inner_text()
    page.keyboard.press("?")
    expect(page.locator("#help-box")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help-box")).to_be_hidden()
    page.wait_for_timeout(950)
    assert page.locator("#layer-out").inner_text() == stopped
    assert query(page)["ask"] == "2.2"


def test_single_keys_can_be_switched_off(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=3"))
    page.keyboard.press("?")
    page.locator("#keys-on").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("]")
    page.keyboard.press("c")
    page.wait_for_timeout(100)
    expect(page.locator("#layer-out")).to_have_text("3 of 9")
    expect(page.locator(".pane")).to_have_count(1)


def test_two_layers_and_two_images_stand_side_by_side(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#image=cat&layer=8"))
    page.locator("#compare").click()
    expect(page.locator(".pane figcaption")).to_contain_text(["ALayer 8", "BLayer 8"])
    expect(page.locator("#invite")).to_contain_text("The controls apply to B")
    expect(page.locator("#words")).to_contain_text("B: The mean of all patches attends most to")
    for _ in range(4):
        page.keyboard.press("[")
    expect(page.locator(".pane figcaption")).to_contain_text(["ALayer 8", "BLayer 4"])
    expect(page.locator(".block")).to_have_count(1)
    page.mouse.move(*patch(page, 1, 1, pane=1))  # asked in both
    here, there = (settled(page, lambda pane=pane: lights(page, pane)) for pane in (0, 1))
    assert not np.allclose(here, there, atol=5)
    page.locator(".sample[data-name=flower]").click()
    expect(page.locator(".block")).to_have_count(2)
    expect(page.locator(".label").nth(1)).to_have_text(capital(cifar10.predict(SAMPLES / "flower.jpg")[0].label))
    expect(page.locator(".label").nth(0)).to_have_text(capital(cifar10.predict(CAT)[0].label))
    words = query(page)
    assert (words["image"], words["image2"], words["layer"], words["layer2"]) == ("cat", "flower", "8", "4")
    other = answered(opened(page.evaluate("location.hash")))
    expect(other.locator(".block")).to_have_count(2)
    page.keyboard.press("c")
    expect(page.locator(".pane")).to_have_count(1)
    expect(page.locator(".block")).to_have_count(1)


def test_maps_distances_and_places_are_those_of_the_model(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#image=cat&layer=2&paint=heat"))
    told = {
        "Rollout": "%",
        "Gradient": "of the maximum",
        "Occlusion": re.compile("probability (drops|rises) .* points when occluded"),
    }
    for name, unit in told.items():
        page.get_by_role("button", name=name).click()
        page.mouse.move(*patch(page, 3, 3))
        here = "Rows 3 and 4, columns 3 and 4: " if name == "Occlusion" else "Row 4, column 4: "
        expect(page.locator("#words")).to_contain_text(here)
        expect(page.locator("#words")).to_contain_text(unit)
        page.mouse.move(2, 2)
        expect(page.locator("#words")).to_contain_text("Maximum at row")
    images = cifar10.preprocess(CAT)
    lost = METHODS["occlusion"](cifar10.net, images, cifar10.net(images).argmax(1), False)[0]
    down, right = (2 * (at // 2) + 1 for at in divmod(int(lost.argmax()), 8))
    square = f"rows {down} and {down + 1}, columns {right} and {right + 1}"
    where = f"Maximum at {square}: probability drops {100 * float(lost.max()):.1f} points"
    expect(page.locator("#words")).to_contain_text(where)
    expect(page.locator("figcaption")).to_contain_text("Drop in “Cat” when 2 × 2 patches are occluded.")
    page.get_by_role("button", name="Attention", exact=True).click()
    expect(page.locator("#distance-plot circle")).to_have_count(9 * 3)
    expect(page.locator("#distance-plot .band")).to_have_count(1)
    dot = page.locator("#distance-plot circle").nth(4 * 3 + 1).bounding_box()
    page.mouse.move(dot["x"] + 3, dot["y"] + 3)
    expect(page.locator("#distance-note")).to_contain_text("Layer 5, head")
    page.mouse.click(dot["x"] + 3, dot["y"] + 3)
    expect(page.locator("#layer-out")).to_have_text("5 of 9")
    page.mouse.move(*patch(page, 0, 7))
    expect(page.locator("#places-note")).to_contain_text("Row 1, column 8: mean cosine")


def test_what_one_sees_is_downloaded_as_a_png(opened: Opened) -> None:
    page = answered(opened("#image=cat&show2=rollout"))
    page.wait_for_timeout(300)
    with page.expect_download() as found:
        page.locator("#save").click()
    assert found.value.suggested_filename == "vitrail-cat.png"
    with Image.open(found.value.path()) as image:
        assert image.format == "PNG"
        assert image.width > 2 * 720
        assert len(np.unique(np.asarray(image.convert("L")))) > 150


def test_dark_mode_follows_the_system_until_it_is_chosen(opened: Opened) -> None:
    def paper(page: Any) -> int:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    assert paper(opened()) > 700
    page = opened(color_scheme="dark")
    assert paper(page) < 100
    answered(page).locator("#theme").click()
    assert paper(page) > 700
    again = opened(context=page.context)
    assert paper(again) > 700  # remembered, although the system is dark


def test_a_phone_has_everything_within_its_width(opened: Opened, site: httpx.Client) -> None:
    page = answered(opened("#image=cat&layer=3", **PHONE))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.touchscreen.tap(*patch(page, 2, 3))
    expect(page.locator("#words")).to_contain_text("Row 3, column 4 attends most to")
    expect(page.locator("#hidden-count")).to_contain_text("Long-press")
    press(page, *patch(page, 2, 3), milliseconds=600)
    wait_for_bars(page, hiding(site, [19], CAT.read_bytes()))
    page.get_by_role("button", name="Tap: hide").click()
    page.touchscreen.tap(*patch(page, 2, 4))
    wait_for_bars(page, hiding(site, [19, 20], CAT.read_bytes()))
    script = """() => [...document.querySelectorAll('button')].filter((button) => button.offsetParent)
        .map((button) => button.getBoundingClientRect().height)"""
    assert min(page.evaluate(script)) >= 24  # a finger finds it


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_light_glides_or_jumps_as_the_system_wants_it(opened: Opened, motion: str) -> None:
    page = answered(opened("#image=cat&layer=1", reduced_motion=motion))
    settled(page, lambda: lights(page))
    script = """async () => {
        const shown = document.querySelector('.glass canvas'), canvas = document.createElement('canvas');
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
    frames = page.evaluate(script)  # how many different ones
    assert frames <= 2 if motion == "reduce" else frames > 4
