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
from vitrail.explain import attention_maps
from vitrail.explain.attention import AttentionIterator
from vitrail.explain.occlusion import windows

pytest.importorskip("playwright", reason="the page is tested with it: pip install playwright")
from playwright.sync_api import expect
from serving import run_server, served

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
DESK, TABLET = ({"viewport": {"width": w, "height": h}} for w, h in ((1440, 900), (820, 1180)))
Opened = Callable[..., Any]


def test_the_first_sight_says_what_to_do_and_shows_something(opened: Opened) -> None:
    page = answered(opened(**DESK))
    expect(page.locator("#invite")).to_have_text(
        "Point at a patch to see what it attends to. Click to hide it.", use_inner_text=True
    )
    expect(page.locator("#words")).to_contain_text("Row 4, column 7 attends most to")  # the cat's eye
    expect(page.locator("figcaption")).to_contain_text("Attention of the framed patch.")
    assert query(page)["ask"] == "4.7"
    plain = opened("#image=cat&show=plain")
    expect(plain.locator("#words")).to_contain_text("pixels")
    seen, whole = (settled(one, lambda one=one: sum(lights(one))) for one in (page, plain))
    assert seen > 0.4 * whole  # dusk, not night
    for name in ("Attention", "Rollout", "Gradient", "Occlusion"):
        assert len(page.get_by_role("button", name=name).get_attribute("title")) > 20
    page.locator(".sample[data-name=flower]").click()  # which has a place of its own
    expect(page.locator("#words")).to_contain_text("Row 4, column 4 attends most to")
    page.keyboard.press("Escape")
    expect(page.locator("#words")).to_contain_text("The mean of all patches attends most to")
    page.locator(".sample[data-name=cat]").click()  # and is left alone by those who let go
    expect(page.locator("#words")).to_contain_text("The mean of all patches attends most to")


def test_whoever_gets_most_is_named_first(opened: Opened) -> None:
    torch.manual_seed(3)
    vit = model(small(class_token=True))
    last = list(AttentionIterator(vit.net, vit.preprocess(CAT)))[-1][0].mean(0)  # T T
    with run_server(served(vit)) as (client, _):
        page = answered(opened("#image=cat&layer=2", at=str(client.base_url)))
        for token in (0, 1, 6, 16):
            if token:
                page.mouse.move(*patch(page, *divmod(token - 1, 4), grid=(4, 4)))
            names = ["the class token", *(f"row {i // 4 + 1}, column {i % 4 + 1}" for i in range(16))]
            who = names[token].replace("the", "The").replace("row", "Row")
            names[token] = "itself"
            best, patches = int(last[token].argmax()), 1 + int(last[token, 1:].argmax())
            expect(page.locator("#words")).to_contain_text(f"{who} attends most to {names[best]} (")
            if best == 0:
                expect(page.locator("#words")).to_contain_text(f", then to {names[patches]} (")
        page.close()


def test_the_scale_says_how_bright_is_how_much(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#image=cat&layer=4&ask=4.7"))
    row = attention_maps(cifar10.net, cifar10.preprocess(CAT), query=(4, 7), layers=(3,))[0][0, 0].mean(0).flatten()
    ordered = row.sort().values
    high = max(float(ordered[int(0.965 * 63)]), 0.3 * float(ordered[-1]))
    low = min(float(ordered[int(0.2 * 63)]), 0.4 * high)
    ends = [float(re.search(r"[\d.]+", text)[0]) for text in page.locator("figcaption .ramp span").all_inner_texts()]
    assert ends == pytest.approx([100 * low, 100 * high], abs=0.11)
    page.locator("[data-paint=heat]").click()
    expect(page.locator("figcaption .ramp.heat")).to_be_visible()
    page.get_by_role("button", name="Image").click()
    expect(page.locator("figcaption .ramp")).to_have_count(0)


def test_maps_of_nothing_and_below_nothing_are_told_in_numbers(opened: Opened) -> None:
    page = answered(opened())
    script = """async ([show, values, alone = false]) => {
        const { sentence } = await import('/static/captions.js');
        const sheet = { image: true, grid: { rows: 1, columns: 2 } }, model = { prefix_tokens: [], methods: [show] };
        return sentence({ show }, sheet, model, { values, row: null, from: null, hover: alone ? null : 1 });
    }"""
    assert page.evaluate(script, ["gradient", [0, 0]]) == "Row 1, column 2: 0 of the maximum."
    assert page.evaluate(script, ["gradient", [0, 0], True]) == "No patch has a positive value."
    assert page.evaluate(script, ["gradient", [1, 0.25]]) == "Row 1, column 2: 0.25 of the maximum."
    assert page.evaluate(script, ["gradient", [0.5, 1]]).startswith("Row 1, column 2: the maximum.")
    assert page.evaluate(script, ["gradient", [0.5, 1], True]).startswith("Maximum at row 1, column 2. ")
    assert (
        page.evaluate(script, ["occlusion", [-0.3, -0.02]])
        == "Row 1, column 2: probability rises 2.0 points when occluded."
    )
    assert (
        page.evaluate(script, ["occlusion", [0, 0.125]])
        == "Row 1, column 2: probability drops 12.5 points when occluded."
    )


def test_a_bright_corner_is_not_taken_for_more_than_it_is(opened: Opened) -> None:
    page = answered(opened())
    script = """async ([show, best, from, hover]) => {
        const { sentence } = await import('/static/captions.js'), row = new Float32Array(9).fill(0.05);
        row[best] = 0.6;
        const sheet = { image: true, grid: { rows: 3, columns: 3 } };
        const model = { prefix_tokens: [], methods: ['rollout'], has_attention: true, pool: 'gap' };
        return sentence({ show }, sheet, model, { values: row, row, from, hover });
    }"""

    def remarked(show: str, best: int, asks: int | None = None, pointed: int | None = None) -> bool:
        return "Corners often receive high attention" in page.evaluate(script, [show, best, asks, pointed])

    corners = [0, 2, 6, 8]
    for show in ("attention", "rollout", "gradient"):
        assert [best for best in range(9) if remarked(show, best)] == corners
    assert [best for best in range(9) if remarked("attention", best, asks=4)] == corners
    assert not remarked("attention", 8, asks=8)  # itself
    assert remarked("rollout", 8, pointed=8)
    assert not remarked("rollout", 8, pointed=4)
    assert not remarked("occlusion", 8)  # what the class needs, not what attention does


def test_the_invitation_says_what_pointing_tells_in_each_map(opened: Opened) -> None:
    page = answered(opened(**DESK))
    invite, high = page.locator("#invite"), page.locator("#invite").bounding_box()["height"]
    for name, said in {
        "Rollout": "Point at a patch to see its contribution. Click to hide it.",
        "Gradient": "Point at a patch to see its value. Click to hide it.",
        "Occlusion": "Point at a square to see the drop. Click to hide a patch.",
        "Image": "Click patches to hide them, and watch the prediction change.",
    }.items():
        page.get_by_role("button", name=name).click()
        expect(invite).to_have_text(said)
        assert invite.bounding_box()["height"] == high  # the image stays where it is
        caption = page.locator(".means")
        assert caption.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    page.get_by_role("button", name="Click: query").click()
    expect(invite).to_have_text("Shift-click a patch to hide it, and watch the prediction change.")


def test_a_finger_reads_the_value_of_a_map(opened: Opened) -> None:
    page = answered(opened(**PHONE))
    page.get_by_role("button", name="Rollout").click()
    expect(page.locator("#invite")).to_have_text("Tap a patch to see its contribution. Long-press to hide it.")
    page.touchscreen.tap(*patch(page, 2, 3))
    expect(page.locator("#words")).to_contain_text("Row 3, column 4: ")


def test_occlusion_speaks_of_the_square_that_is_covered(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4"))
    page.get_by_role("button", name="Occlusion").click()
    page.mouse.move(*patch(page, 3, 4))
    expect(page.locator("#words")).to_contain_text("Rows 3 and 4, columns 5 and 6: ")
    expect(page.locator(".tag.row")).to_have_text("3–4")
    expect(page.locator(".tag.column")).to_have_text("5–6")
    script = """() => {
        const canvas = document.querySelector('.glass canvas'), side = canvas.width / 8;
        const copy = Object.assign(document.createElement('canvas'), { width: 8, height: 1 }).getContext('2d');
        copy.drawImage(canvas, Math.round(6 * side) - 4, Math.round(2.5 * side), 8, 1, 0, 0, 8, 1);
        return [...copy.getImageData(0, 0, 8, 1).data];
    }"""  # the right edge of the square, in the row above
    edge = settled(page, lambda: page.evaluate(script))
    pixels = [edge[i : i + 3] for i in range(0, len(edge), 4)]
    assert any(red > 230 and 180 < green < 230 and blue < 150 for red, green, blue in pixels)  # the amber frame
    page.locator(".glass").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".glass [role=gridcell]").filter(has_text="maximum at rows")).to_have_count(1)


@pytest.mark.parametrize("grid", [(4, 4), (5, 7), (1, 3), (3, 2)])
def test_squares_are_those_that_the_model_is_shown(opened: Opened, grid: tuple[int, int]) -> None:
    page = opened()
    rows, columns = grid
    side = min(2, *grid)
    masks = windows(grid, side, side).flatten(1)  # M N
    script = """async ([rows, columns]) => {
        const { covered } = await import('/static/attention.js');
        return Array.from({ length: rows * columns }, (_, patch) => covered(patch, { rows, columns }));
    }"""
    for patch_number, found in enumerate(page.evaluate(script, [rows, columns])):
        mine = masks[masks[:, patch_number]]
        places = [divmod(int(at), columns) for at in mine.any(0).nonzero()]
        down, right = ([min(at), max(at)] for at in zip(*places, strict=True))
        assert found == {"down": down, "right": right, "count": len(mine)}


def test_what_the_class_wins_by_is_dark(opened: Opened) -> None:
    page = opened()
    script = """async (values) => {
        const { positivePart, scaled } = await import('/static/attention.js');
        const { legend } = await import('/static/captions.js');
        const found = Float32Array.from(values);
        return [[...scaled(positivePart(found))], legend('occlusion', found)];
    }"""
    light, ends = page.evaluate(script, [-0.5, -0.1, 0, 0.05, 0.1, 0.2])
    assert light == pytest.approx([0, 0, 0, 0.5, 1, 1])
    assert ends[0] == "≤ 0"


def test_the_place_that_is_compared_is_named(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4&ask=4.7"))
    note = page.locator("#places-note")
    expect(note).to_contain_text("Row 4, column 7: ")
    page.get_by_role("button", name="Rollout").click()  # where nobody asks
    expect(note).to_contain_text("The center patch, framed: ")
    page.mouse.move(*patch(page, 0, 7))
    expect(note).to_contain_text("Row 1, column 8: ")


def test_row_column_and_the_brightest_patch_are_marked(opened: Opened, cifar10: vitrail.Model) -> None:
    page = answered(opened("#image=cat&layer=4"))
    page.mouse.move(*patch(page, 2, 5))
    expect(page.locator(".tag.row")).to_have_text("3")
    expect(page.locator(".tag.column")).to_have_text("6")
    row = attention_maps(cifar10.net, cifar10.preprocess(CAT), query=(3, 6), layers=(3,))[0][0, 0].mean(0)
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


def test_a_map_that_takes_long_is_announced_on_the_image(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4"))
    held: list[Any] = []
    page.route("**/v1/explain", lambda route: held.append(route))
    page.get_by_role("button", name="Occlusion").click()
    expect(page.locator("#status")).to_have_text("Computing occlusion…")
    expect(page.locator(".glass.waiting")).to_have_count(1)
    image, pill = page.locator(".glass").bounding_box(), page.locator("#status").bounding_box()
    assert image["y"] < pill["y"] < image["y"] + image["height"] / 4
    held.pop().continue_()
    expect(page.locator("#words")).to_contain_text("probability drops")
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
def test_the_image_is_seen_while_its_layer_is_chosen(opened: Opened, size: dict[str, Any]) -> None:
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


WRITTEN = """() => {
    const { prototype } = CanvasRenderingContext2D, draw = prototype.fillText;
    window.written = [];
    prototype.fillText = function (text, x, y, room) {
        written.push(room === undefined ? text : 'squeezed');
        draw.call(this, text, x, y);
    };
}"""


def test_the_download_has_letters_a_scale_and_whose_the_images_are(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4&image2=flower&show2=rollout"))
    expect(page.locator(".block")).to_have_count(2)
    expect(page.locator(".label").nth(1)).not_to_have_text("…")
    expect(page.locator("figcaption .ramp")).to_have_count(2)
    page.evaluate(WRITTEN)
    with page.expect_download():
        page.locator("#save").click()
    written = page.evaluate("written")
    shown = [text for text in written if text.startswith(("A: ", "B: "))]
    assert [text for text in shown if "attends most" not in text] == [
        *("A: Layer 4, all heads", "B: Rollout"),
        *(f"{letter}: {label}" for letter, label in zip("AB", page.locator(".label").all_inner_texts(), strict=True)),
    ]
    assert set(page.locator("figcaption .ramp span").all_inner_texts()) <= set(written)
    assert page.locator("#credit").inner_text() in " ".join(written)
    assert all(f"ample “{name}”" in " ".join(written) for name in ("cat", "flower"))
    assert "squeezed" not in written


def test_the_download_says_what_is_hidden_and_what_it_changed(opened: Opened) -> None:
    page = answered(opened("#image=cat&layer=4&hide=18-22.26-30&fill=blur"))
    expect(page.locator(".change").first).not_to_be_empty()
    page.evaluate(WRITTEN)
    with page.expect_download():
        page.locator("#save").click()
    written = page.evaluate("written")
    assert "10 of 64 patches hidden, blurred." in written
    shown = page.locator(".much").first.inner_text(), page.locator(".change").first.inner_text()
    assert {*shown, page.locator(".score").inner_text(), page.locator("#words").inner_text()} <= set(written)
