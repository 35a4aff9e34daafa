"""Texts of the explorer: hints, captions, color scales, status; and a page that fits its window."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from browsing import CAT, link_parameters, patch_brightness, patch_center, wait_until_explained, wait_until_stable
from small_models import model, small

import vitrail
from vitrail.explain import attention_maps
from vitrail.explain.attention import AttentionIterator
from vitrail.explain.occlusion import windows

pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
from playwright.sync_api import expect
from serving import run_server, served

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
DESK, TABLET = ({"viewport": {"width": w, "height": h}} for w, h in ((1440, 900), (820, 1180)))
OpenPage = Callable[..., Any]


def test_the_start_page_shows_a_hint_and_an_attention_map(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(**DESK))
    expect(page.locator("#hint")).to_have_text(
        "Point at a patch to see what it attends to. Click to hide it.", use_inner_text=True
    )
    expect(page.locator("#query-caption")).to_contain_text("Row 4, column 7 attends most to")  # the cat's eye
    expect(page.locator("figcaption")).to_contain_text("Attention of the framed patch.")
    assert link_parameters(page)["ask"] == "4.7"
    plain_page = open_page("#image=cat&show=plain")
    expect(plain_page.locator("#query-caption")).to_contain_text("pixels")
    brightness, plain_brightness = (
        wait_until_stable(one, lambda one=one: sum(patch_brightness(one))) for one in (page, plain_page)
    )
    assert brightness > 0.4 * plain_brightness  # darkened, but visible
    for name in ("Attention", "Rollout", "Gradient", "Occlusion"):
        assert len(page.get_by_role("button", name=name).get_attribute("title")) > 20
    page.locator(".sample[data-name=flower]").click()  # which has its own default query
    expect(page.locator("#query-caption")).to_contain_text("Row 4, column 4 attends most to")
    page.keyboard.press("Escape")
    expect(page.locator("#query-caption")).to_contain_text("The mean of all patches attends most to")
    page.locator(".sample[data-name=cat]").click()  # a cleared query stays cleared
    expect(page.locator("#query-caption")).to_contain_text("The mean of all patches attends most to")


def test_the_token_with_the_most_attention_is_named_first(open_page: OpenPage) -> None:
    torch.manual_seed(3)
    vit = model(small(class_token=True))
    last = list(AttentionIterator(vit.net, vit.preprocess(CAT)))[-1][0].mean(0)  # T T
    with run_server(served(vit)) as (client, _):
        page = wait_until_explained(open_page("#image=cat&layer=2", base_url=str(client.base_url)))
        for token in (0, 1, 6, 16):
            if token:
                page.mouse.move(*patch_center(page, *divmod(token - 1, 4), grid=(4, 4)))
            names = ["the class token", *(f"row {i // 4 + 1}, column {i % 4 + 1}" for i in range(16))]
            subject = names[token].replace("the", "The").replace("row", "Row")
            names[token] = "itself"
            best, patches = int(last[token].argmax()), 1 + int(last[token, 1:].argmax())
            expect(page.locator("#query-caption")).to_contain_text(f"{subject} attends most to {names[best]} (")
            if best == 0:
                expect(page.locator("#query-caption")).to_contain_text(f", then to {names[patches]} (")
        page.close()


def test_the_color_scale_has_the_values_of_its_ends(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4&ask=4.7"))
    row = attention_maps(cifar10.net, cifar10.preprocess(CAT), query=(4, 7), layers=(3,))[0][0, 0].mean(0).flatten()
    ordered = row.sort().values
    high = max(float(ordered[int(0.965 * 63)]), 0.3 * float(ordered[-1]))
    low = min(float(ordered[int(0.2 * 63)]), 0.4 * high)
    labels = [
        float(re.search(r"[\d.]+", text)[0]) for text in page.locator("figcaption .color-scale span").all_inner_texts()
    ]
    assert labels == pytest.approx([100 * low, 100 * high], abs=0.11)
    page.locator("[data-color-scale=heat]").click()
    expect(page.locator("figcaption .color-scale.heat")).to_be_visible()
    page.get_by_role("button", name="Image").click()
    expect(page.locator("figcaption .color-scale")).to_have_count(0)


def test_small_shares_have_two_digits(open_page: OpenPage) -> None:
    """A Swin Transformer's maps have thousands of patches: each contributes a fraction of a tenth of a percent."""
    page = open_page()
    script = """async (values) => {
        const { share } = await import('/static/formatting.js');
        return values.map(share);
    }"""
    shares = [0, 3.2e-4, 0.00128, 0.0064, 0.0123, 0.5]
    assert [text.replace("\u00a0", " ") for text in page.evaluate(script, shares)] == [
        "0", "0.032 %", "0.13 %", "0.64 %", "1.2 %", "50 %",
    ]  # fmt: skip


def test_zero_and_negative_values_are_described(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page())
    script = """async ([mapName, values, isMaximum = false]) => {
        const { queryCaption } = await import('/static/captions.js');
        const state = { image: true, grid: { rows: 1, columns: 2 } }, model = { prefix_tokens: [], methods: [mapName] };
        const hovered = isMaximum ? null : 1;
        return queryCaption({ mapName }, state, model, { values, row: null, query: null, hovered });
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


def test_a_maximum_in_a_corner_has_a_remark(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page())
    script = """async ([mapName, best, query, hovered]) => {
        const { queryCaption } = await import('/static/captions.js'), row = new Float32Array(9).fill(0.05);
        row[best] = 0.6;
        const state = { image: true, grid: { rows: 3, columns: 3 } };
        const model = { prefix_tokens: [], methods: ['rollout'], has_attention: true, pool: 'gap' };
        return queryCaption({ mapName }, state, model, { values: row, row, query, hovered });
    }"""

    def has_remark(show: str, best: int, query_patch: int | None = None, hovered: int | None = None) -> bool:
        return "Corners often receive high attention" in page.evaluate(script, [show, best, query_patch, hovered])

    corners = [0, 2, 6, 8]
    for show in ("attention", "rollout", "gradient"):
        assert [best for best in range(9) if has_remark(show, best)] == corners
    assert [best for best in range(9) if has_remark("attention", best, query_patch=4)] == corners
    assert not has_remark("attention", 8, query_patch=8)  # the query itself
    assert has_remark("rollout", 8, hovered=8)
    assert not has_remark("rollout", 8, hovered=4)
    assert not has_remark("occlusion", 8)  # not an attention map


def test_the_hint_depends_on_the_map(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(**DESK))
    hint, height = page.locator("#hint"), page.locator("#hint").bounding_box()["height"]
    for name, text in {
        "Rollout": "Point at a patch to see its contribution. Click to hide it.",
        "Gradient": "Point at a patch to see its value. Click to hide it.",
        "Occlusion": "Point at a square to see the drop. Click to hide a patch.",
        "Image": "Click patches to hide them, and watch the prediction change.",
    }.items():
        page.get_by_role("button", name=name).click()
        expect(hint).to_have_text(text)
        assert hint.bounding_box()["height"] == height  # the image does not move
        caption = page.locator(".caption-text")
        assert caption.evaluate("(element) => element.scrollWidth <= element.clientWidth")
    page.get_by_role("button", name="Click: query").click()
    expect(hint).to_have_text("Shift-click a patch to hide it, and watch the prediction change.")


def test_a_tap_shows_the_value_of_a_map(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(**PHONE))
    page.get_by_role("button", name="Rollout").click()
    expect(page.locator("#hint")).to_have_text("Tap a patch to see its contribution. Long-press to hide it.")
    page.touchscreen.tap(*patch_center(page, 2, 3))
    expect(page.locator("#query-caption")).to_contain_text("Row 3, column 4: ")


def test_occlusion_names_and_frames_the_occluded_square(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4"))
    page.get_by_role("button", name="Occlusion").click()
    page.mouse.move(*patch_center(page, 3, 4))
    expect(page.locator("#query-caption")).to_contain_text("Rows 3 and 4, columns 5 and 6: ")
    expect(page.locator(".tag.row")).to_have_text("3–4")
    expect(page.locator(".tag.column")).to_have_text("5–6")
    script = """() => {
        const canvas = document.querySelector('.patch-grid canvas'), side = canvas.width / 8;
        const copy = Object.assign(document.createElement('canvas'), { width: 8, height: 1 }).getContext('2d');
        copy.drawImage(canvas, Math.round(6 * side) - 4, Math.round(2.5 * side), 8, 1, 0, 0, 8, 1);
        return [...copy.getImageData(0, 0, 8, 1).data];
    }"""  # the right edge of the square, in the row above
    edge = wait_until_stable(page, lambda: page.evaluate(script))
    pixels = [edge[i : i + 3] for i in range(0, len(edge), 4)]
    assert any(red > 230 and 180 < green < 230 and blue < 150 for red, green, blue in pixels)  # the amber frame
    page.locator(".patch-grid").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".patch-grid [role=gridcell]").filter(has_text="maximum at rows")).to_have_count(1)


@pytest.mark.parametrize("grid", [(4, 4), (5, 7), (1, 3), (3, 2)])
def test_squares_equal_those_of_the_occlusion_windows(open_page: OpenPage, grid: tuple[int, int]) -> None:
    page = open_page()
    rows, columns = grid
    side = min(2, *grid)
    masks = windows(grid, side, side).flatten(1)  # M N
    script = """async ([rows, columns]) => {
        const { coveringSquares } = await import('/static/attention.js');
        return Array.from({ length: rows * columns }, (_, patch) => coveringSquares(patch, { rows, columns }));
    }"""
    for patch_number, squares in enumerate(page.evaluate(script, [rows, columns])):
        containing = masks[masks[:, patch_number]]
        places = [divmod(int(at), columns) for at in containing.any(0).nonzero()]
        down, right = ([min(at), max(at)] for at in zip(*places, strict=True))
        assert squares == {"rowSpan": down, "columnSpan": right, "count": len(containing)}


def test_negative_occlusion_values_are_dark(open_page: OpenPage) -> None:
    page = open_page()
    script = """async (given) => {
        const { normalize, positivePart } = await import('/static/attention.js');
        const { colorScaleLabels } = await import('/static/captions.js');
        const values = Float32Array.from(given);
        return [[...normalize(positivePart(values))], colorScaleLabels('occlusion', values)];
    }"""
    brightness, labels = page.evaluate(script, [-0.5, -0.1, 0, 0.05, 0.1, 0.2])
    assert brightness == pytest.approx([0, 0, 0, 0.5, 1, 1])
    assert labels[0] == "≤ 0"


def test_the_patch_of_the_position_map_is_named(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4&ask=4.7"))
    note = page.locator("#position-note")
    expect(note).to_contain_text("Row 4, column 7: ")
    page.get_by_role("button", name="Rollout").click()  # without a query
    expect(note).to_contain_text("The center patch, framed: ")
    page.mouse.move(*patch_center(page, 0, 7))
    expect(note).to_contain_text("Row 1, column 8: ")


def test_the_row_column_and_maximum_are_marked(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4"))
    page.mouse.move(*patch_center(page, 2, 5))
    expect(page.locator(".tag.row")).to_have_text("3")
    expect(page.locator(".tag.column")).to_have_text("6")
    row = attention_maps(cifar10.net, cifar10.preprocess(CAT), query=(3, 6), layers=(3,))[0][0, 0].mean(0)
    best = divmod(int(row.argmax()), 8)
    assert best != (2, 5)
    script = """([row, column]) => {
        const canvas = document.querySelector('.patch-grid canvas'), side = canvas.width / 8;
        const x = Math.round((column + 0.5 + 0.36) * side), y = Math.round((row + 0.5) * side);
        const copy = Object.assign(document.createElement('canvas'), { width: 5, height: 1 }).getContext('2d');
        copy.drawImage(canvas, x - 2, y, 5, 1, 0, 0, 5, 1);
        return [...copy.getImageData(0, 0, 5, 1).data];
    }"""
    assert max(min(page.evaluate(script, list(best))[i : i + 3]) for i in range(0, 20, 4)) > 240  # a white ring
    page.mouse.move(2, 2)
    expect(page.locator(".tag.row")).to_be_hidden()


def test_a_slow_map_shows_a_status_on_the_image(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4"))
    held_routes: list[Any] = []
    page.route("**/v1/explain", lambda route: held_routes.append(route))
    page.get_by_role("button", name="Occlusion").click()
    expect(page.locator("#status")).to_have_text("Computing occlusion…")
    expect(page.locator(".patch-grid.loading")).to_have_count(1)
    image, status = page.locator(".patch-grid").bounding_box(), page.locator("#status").bounding_box()
    assert image["y"] < status["y"] < image["y"] + image["height"] / 4
    held_routes.pop().continue_()
    expect(page.locator("#query-caption")).to_contain_text("probability drops")
    expect(page.locator("#status")).to_have_text("")
    expect(page.locator(".patch-grid.loading")).to_have_count(0)


def test_the_page_fits_a_desktop_window_without_scrolling(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(**DESK))
    expect(page.locator("#position-similarity")).to_be_visible()
    assert wait_until_stable(page, lambda: page.evaluate("document.documentElement.scrollHeight")) == 900
    page.keyboard.press("c")
    page.locator(".sample[data-name=flower]").click()
    expect(page.locator(".prediction-block")).to_have_count(2)
    expect(page.locator(".bar")).to_have_count(6)
    expect(page.locator("#query-caption")).to_contain_text("B: Row 4, column")  # the explanation of the second image
    assert wait_until_stable(page, lambda: page.evaluate("document.documentElement.scrollHeight")) == 900
    box = page.locator("#position-similarity").bounding_box()
    assert box["y"] + box["height"] <= 900


@pytest.mark.parametrize("size", [TABLET, PHONE], ids=["tablet", "phone"])
def test_the_image_is_visible_while_the_layer_is_changed(open_page: OpenPage, size: dict[str, Any]) -> None:
    page = wait_until_explained(open_page(**size))
    window_height = size["viewport"]["height"]
    for control in ("#layer", "#head-select", "#map-select", "#click-action"):
        box = page.locator(control).bounding_box()
        assert box["y"] + box["height"] <= window_height, control
    grid_box = page.locator(".patch-grid").bounding_box()
    assert grid_box["y"] + grid_box["height"] < page.locator("#layer").bounding_box()["y"]
    page.locator(".bar").last.scroll_into_view_if_needed()
    page.mouse.wheel(0, 0)
    grid_box = page.locator(".patch-grid").bounding_box()
    assert grid_box["y"] >= 0  # while the bars are in view
    script = """() => { const plot = document.querySelector('#distance-plot');
        return parseFloat(getComputedStyle(plot).fontSize) * plot.getBoundingClientRect().width / 340; }"""
    assert 9 < page.evaluate(script) < 14
    assert page.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"]


@pytest.mark.parametrize("size", [DESK, TABLET, PHONE], ids=["desk", "tablet", "phone"])
def test_the_banner_covers_no_controls(open_page: OpenPage, size: dict[str, Any]) -> None:
    page = wait_until_explained(open_page(**size))
    page.locator("#link").click()
    expect(page.locator("#banner")).to_be_visible()
    script = """() => {
        const banner = document.querySelector('#banner'), a = banner.getBoundingClientRect();
        const meets = (b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        return [...document.querySelectorAll('button, input, select')]
            .filter((control) => control.offsetParent && !banner.contains(control))
            .filter((control) => meets(control.getBoundingClientRect()))
            .map(({ id }) => id);
    }"""
    assert page.evaluate(script) == []


def test_help_describes_touch_on_touch_screens(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page(**PHONE))
    page.locator("#help").click()
    expect(page.locator("#help-dialog")).to_contain_text("Tap a patch", use_inner_text=True)
    expect(page.locator("#help-dialog")).to_contain_text("Occlusion")
    expect(page.locator(".shortcuts")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "help-title"
    box, close = (page.locator(at).bounding_box() for at in ("#help-dialog", "#help-dialog button"))
    assert close["y"] + close["height"] <= box["y"] + box["height"] - 12
    page.locator("#help-dialog button").click()
    expect(page.locator("#help-dialog")).to_be_hidden()


RECORD_TEXTS = """() => {
    const { prototype } = CanvasRenderingContext2D, draw = prototype.fillText;
    window.written = [];
    prototype.fillText = function (text, x, y, room) {
        written.push(room === undefined ? text : 'squeezed');
        draw.call(this, text, x, y);
    };
}"""


def test_the_download_has_pane_letters_color_scales_and_credits(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4&image2=flower&show2=rollout"))
    expect(page.locator(".prediction-block")).to_have_count(2)
    expect(page.locator(".label").nth(1)).not_to_have_text("…")
    expect(page.locator("figcaption .color-scale")).to_have_count(2)
    page.evaluate(RECORD_TEXTS)
    with page.expect_download():
        page.locator("#save").click()
    texts = page.evaluate("written")
    shown = [text for text in texts if text.startswith(("A: ", "B: "))]
    assert [text for text in shown if "attends most" not in text] == [
        *("A: Layer 4, all heads", "B: Rollout"),
        *(f"{letter}: {label}" for letter, label in zip("AB", page.locator(".label").all_inner_texts(), strict=True)),
    ]
    assert set(page.locator("figcaption .color-scale span").all_inner_texts()) <= set(texts)
    assert page.locator("#credit").inner_text() in " ".join(texts)
    assert all(f"ample “{name}”" in " ".join(texts) for name in ("cat", "flower"))
    assert "squeezed" not in texts


def test_the_download_shows_the_hidden_patches_and_their_effect(open_page: OpenPage) -> None:
    page = wait_until_explained(open_page("#image=cat&layer=4&hide=18-22.26-30&fill=blur"))
    expect(page.locator(".change").first).not_to_be_empty()
    page.evaluate(RECORD_TEXTS)
    with page.expect_download():
        page.locator("#save").click()
    texts = page.evaluate("written")
    assert "10 of 64 patches hidden, blurred." in texts
    shown = page.locator(".bar .probability").first.inner_text(), page.locator(".change").first.inner_text()
    assert {*shown, page.locator(".score").inner_text(), page.locator("#query-caption").inner_text()} <= set(texts)
