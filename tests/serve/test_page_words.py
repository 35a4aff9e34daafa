"""What the explorer says and where it stands: invitations, meanings, scales, and a page that fits its window."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from browsing import CAT, answered, lights, patch, query, settled
from small_models import model, small

import vitrail
from vitrail.explain import attention_views
from vitrail.explain.attention import Walk

pytest.importorskip("playwright", reason="the page is tested with it: pip install playwright")
pytest.importorskip("fastapi", reason="the server needs it: pip install 'vitrail[serve]'")
from playwright.sync_api import expect
from serving import running, served

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
DESK, TABLET = ({"viewport": {"width": w, "height": h}} for w, h in ((1440, 900), (820, 1180)))
Opened = Callable[..., Any]


def test_the_first_sight_says_what_to_do_and_shows_something(opened: Opened) -> None:
    page = answered(opened(**DESK))
    expect(page.locator("#invite")).to_have_text(
        "Point at a patch to see what it attends to. Click to hide it.", use_inner_text=True
    )
    expect(page.locator("#words")).to_contain_text("Row 4, column 7 looks most at")  # the cat's eye
    expect(page.locator("figcaption")).to_contain_text("What the framed patch attends to.")
    assert query(page)["ask"] == "4.7"
    plain = opened("#picture=cat&show=plain")
    expect(plain.locator("#words")).to_contain_text("pixels")
    seen, whole = (settled(one, lambda one=one: sum(lights(one))) for one in (page, plain))
    assert seen > 0.4 * whole  # dusk, not night
    for name in ("Attention", "Rollout", "Gradient", "Occlusion"):
        assert len(page.get_by_role("button", name=name).get_attribute("title")) > 20
    page.locator(".sample[data-name=flower]").click()  # which has a place of its own
    expect(page.locator("#words")).to_contain_text("Row 4, column 4 looks most at")
    page.keyboard.press("Escape")
    expect(page.locator("#words")).to_contain_text("The mean of all patches looks most at")
    page.locator(".sample[data-name=cat]").click()  # and is left alone by those who let go
    expect(page.locator("#words")).to_contain_text("The mean of all patches looks most at")


def test_whoever_gets_most_is_named_first(opened: Opened) -> None:
    torch.manual_seed(3)
    vit = model(small(class_token=True))
    last = list(Walk(vit.net, vit.preprocess(CAT)))[-1][0].mean(0)  # T T
    with running(served(vit)) as (client, _):
        page = answered(opened("#picture=cat&layer=2", at=str(client.base_url)))
        for token in (0, 1, 6, 16):
            if token:
                page.mouse.move(*patch(page, *divmod(token - 1, 4), grid=(4, 4)))
            names = ["the class token", *(f"row {i // 4 + 1}, column {i % 4 + 1}" for i in range(16))]
            who = names[token].replace("the", "The").replace("row", "Row")
            names[token] = "itself"
            best, patches = int(last[token].argmax()), 1 + int(last[token, 1:].argmax())
            expect(page.locator("#words")).to_contain_text(f"{who} looks most at {names[best]} (")
            if best == 0:
                expect(page.locator("#words")).to_contain_text(f", then at {names[patches]} (")
        page.close()


def test_the_scale_says_how_bright_is_how_much(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#picture=cat&layer=4&ask=4.7"))
    row = attention_views(cifar10.net, cifar10.preprocess(CAT), query=(4, 7), layers=(3,))[0][0, 0].mean(0).flatten()
    ordered = row.sort().values
    high = max(float(ordered[int(0.965 * 63)]), 0.3 * float(ordered[-1]))
    low = min(float(ordered[int(0.2 * 63)]), 0.4 * high)
    ends = [float(re.search(r"[\d.]+", text)[0]) for text in page.locator("figcaption .ramp span").all_inner_texts()]
    assert ends == pytest.approx([100 * low, 100 * high], abs=0.11)
    page.locator("[data-paint=heat]").click()
    expect(page.locator("figcaption .ramp.heat")).to_be_visible()
    page.get_by_role("button", name="Picture").click()
    expect(page.locator("figcaption .ramp")).to_have_count(0)


def test_maps_of_nothing_and_below_nothing_are_told_in_numbers(opened: Opened) -> None:
    page = answered(opened())
    script = """async ([show, values]) => {
        const { sentence } = await import('/static/telling.js');
        const sheet = { image: true, grid: { rows: 1, columns: 2 } }, model = { special: [], methods: [show] };
        return sentence({ show }, sheet, model, { values, row: null, from: null, hover: 1 });
    }"""
    assert page.evaluate(script, ["gradient", [0, 0]]) == "Row 1, column 2: 0 of the most."
    assert page.evaluate(script, ["occlusion", [-0.3, -0.02]]) == "Row 1, column 2: 2.0 points won when covered."
    assert page.evaluate(script, ["occlusion", [0, 0.125]]) == "Row 1, column 2: 12.5 points lost when covered."


def test_a_bright_corner_is_not_taken_for_more_than_it_is(opened: Opened) -> None:
    page = answered(opened())
    script = """async (best) => {
        const { sentence } = await import('/static/telling.js'), row = new Float32Array(9).fill(0.05);
        row[best] = 0.6;
        const sheet = { image: true, grid: { rows: 3, columns: 3 } };
        const model = { special: [], methods: ['rollout'], attention: true, pool: 'gap' };
        return sentence({ show: 'attention' }, sheet, model, { values: row, row, from: null, hover: null });
    }"""
    assert [("Corners often draw attention" in page.evaluate(script, best)) for best in range(9)] == [
        *(True, False, True),
        *(False, False, False),
        *(True, False, True),
    ]


def test_row_column_and_the_brightest_patch_are_marked(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#picture=cat&layer=4"))
    page.mouse.move(*patch(page, 2, 5))
    expect(page.locator(".tag.row")).to_have_text("3")
    expect(page.locator(".tag.column")).to_have_text("6")
    row = attention_views(cifar10.net, cifar10.preprocess(CAT), query=(3, 6), layers=(3,))[0][0, 0].mean(0)
    best = divmod(int(row.argmax()), 8)
    assert best != (2, 5)
    script = """([row, column]) => {
        const canvas = document.querySelector('.glass canvas'), side = canvas.width / 8;
        const x = Math.round((column + 0.5 + 0.36) * side), y = Math.round((row + 0.5) * side);
        const copy = Object.assign(document.createElement('canvas'), { width: 5, height: 1 }).getContext('2d');
        copy.drawImage(canvas, x - 2, y, 5, 1, 0, 0, 5, 1);
        return [...copy.getImageData(0, 0, 5, 1).data];
    }"""
    assert max(min(page.evaluate(script, list(best))[i : i + 3]) for i in range(0, 20, 4)) > 240  # a white ring
    page.mouse.move(2, 2)
    expect(page.locator(".tag.row")).to_be_hidden()


def test_a_map_that_takes_long_is_announced_on_the_picture(opened: Opened) -> None:
    page = answered(opened("#picture=cat&layer=4"))
    held: list[Any] = []
    page.route("**/v1/explain", lambda route: held.append(route))
    page.get_by_role("button", name="Occlusion").click()
    expect(page.locator("#status")).to_have_text("Computing occlusion…")
    expect(page.locator(".glass.waiting")).to_have_count(1)
    picture, pill = page.locator(".glass").bounding_box(), page.locator("#status").bounding_box()
    assert picture["y"] < pill["y"] < picture["y"] + picture["height"] / 4
    held.pop().continue_()
    expect(page.locator("#words")).to_contain_text("points lost")
    expect(page.locator("#status")).to_have_text("")
    expect(page.locator(".glass.waiting")).to_have_count(0)


def test_a_desktop_needs_no_scrolling(opened: Opened) -> None:
    page = answered(opened(**DESK))
    expect(page.locator("#places")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollHeight") == 900
    page.keyboard.press("c")
    page.locator(".sample[data-name=flower]").click()
    expect(page.locator(".block")).to_have_count(2)
    expect(page.locator(".bar")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollHeight") == 900
    box = page.locator("#places").bounding_box()
    assert box["y"] + box["height"] <= 900


@pytest.mark.parametrize("size", [TABLET, PHONE], ids=["tablet", "phone"])
def test_the_picture_is_seen_while_its_layer_is_chosen(opened: Opened, size: dict[str, Any]) -> None:
    page = answered(opened(**size))
    high = size["viewport"]["height"]
    for control in ("#layer", "#heads", "#shows", "#modes"):
        box = page.locator(control).bounding_box()
        assert box["y"] + box["height"] <= high, control
    glass = page.locator(".glass").bounding_box()
    assert glass["y"] + glass["height"] < page.locator("#layer").bounding_box()["y"]
    page.locator(".bar").last.scroll_into_view_if_needed()
    page.mouse.wheel(0, 0)
    glass = page.locator(".glass").bounding_box()
    assert glass["y"] >= 0  # while the bars are watched
    script = """() => { const plot = document.querySelector('#distance-plot');
        return parseFloat(getComputedStyle(plot).fontSize) * plot.getBoundingClientRect().width / 340; }"""
    assert 9 < page.evaluate(script) < 14
    assert page.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"]


@pytest.mark.parametrize("size", [DESK, TABLET, PHONE], ids=["desk", "tablet", "phone"])
def test_messages_cover_no_button(opened: Opened, size: dict[str, Any]) -> None:
    page = answered(opened(**size))
    page.locator("#link").click()
    expect(page.locator("#banner")).to_be_visible()
    script = """() => {
        const banner = document.querySelector('#banner'), a = banner.getBoundingClientRect();
        const meets = (b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        return [...document.querySelectorAll('button, input, select')]
            .filter((one) => one.offsetParent && !banner.contains(one) && meets(one.getBoundingClientRect()))
            .map((one) => one.id);
    }"""
    assert page.evaluate(script) == []


def test_help_speaks_of_fingers_where_there_are_no_keys(opened: Opened) -> None:
    page = answered(opened(**PHONE))
    page.locator("#help").click()
    expect(page.locator("#help-box")).to_contain_text("Tap a patch", use_inner_text=True)
    expect(page.locator("#help-box")).to_contain_text("Occlusion")
    expect(page.locator(".keys")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "help-title"
    box, close = (page.locator(at).bounding_box() for at in ("#help-box", "#help-box button"))
    assert close["y"] + close["height"] <= box["y"] + box["height"] - 12
    page.locator("#help-box button").click()
    expect(page.locator("#help-box")).to_be_hidden()


def test_the_download_says_what_is_hidden_and_what_it_changed(opened: Opened) -> None:
    page = answered(opened("#picture=cat&layer=4&hide=18-22.26-30&fill=blur"))
    expect(page.locator(".change").first).not_to_be_empty()
    script = """() => {
        const { prototype } = CanvasRenderingContext2D, draw = prototype.fillText;
        window.written = [];
        prototype.fillText = function (text, ...rest) {
            written.push(text);
            draw.call(this, text, ...rest);
        };
    }"""
    page.evaluate(script)
    with page.expect_download():
        page.locator("#save").click()
    written = page.evaluate("written")
    assert "10 of 64 patches hidden, blurred." in written
    shown = page.locator(".much").first.inner_text(), page.locator(".change").first.inner_text()
    assert {*shown, page.locator(".score").inner_text(), page.locator("#words").inner_text()} <= set(written)
