"""The explorer with an exported model: images and hiding work; unsupported maps are explained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import bars_with_hidden, drop_file, format_bars, patch_center, random_image, read_bars, wait_for_bars
from conftest import need_extra
from exports import export_quickly

import vitrail

need_extra("export")


@pytest.fixture(scope="module")
def site(cifar10: vitrail.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server with the bundled model, exported."""
    from serving import run_server

    from vitrail.exporting.export_model import export
    from vitrail.exporting.open_engine import open_engine
    from vitrail.serve.served_model import ServedModel

    with pytest.MonkeyPatch.context() as patch_context:
        export_quickly(patch_context)
        exported = export(cifar10, tmp_path_factory.mktemp("exported") / "cifar10.onnx")
    with run_server(ServedModel(open_engine(exported.path, threads=1), name="cifar10")) as (client, _):
        yield client


def wait_for_bars_to_appear(page: Any) -> Any:
    from playwright.sync_api import expect

    expect(page.locator(".bar").first).to_be_visible()
    return page


def test_a_dropped_image_is_predicted_and_patches_can_be_hidden(
    open_page: Any, site: Any, cifar10: vitrail.Model
) -> None:
    page = wait_for_bars_to_appear(open_page("#image=cat"))
    data = random_image(1)
    drop_file(page, data)
    expected = format_bars((p.label, p.score) for p in cifar10.predict(data))
    wait_for_bars(page, expected)
    for row, column in ((3, 3), (3, 4), (4, 3)):
        page.mouse.click(*patch_center(page, row, column))
    wait_for_bars(page, bars_with_hidden(site, [27, 28, 35], data))
    assert read_bars(page) != expected
    page.keyboard.press("x")
    wait_for_bars(page, expected)


def test_maps_are_not_offered_and_the_caption_says_why(open_page: Any) -> None:
    from playwright.sync_api import expect

    page = wait_for_bars_to_appear(open_page("#image=cat"))
    expect(page.locator("#query-caption")).to_contain_text("exported")
    expect(page.locator("#query-caption")).to_contain_text("no explanations")
    for name in ("Attention", "Rollout", "Gradient", "Occlusion"):
        expect(page.get_by_role("radio", name=name)).to_have_count(0)
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    expect(page.locator("#layer-row")).to_be_hidden()
    page.mouse.move(*patch_center(page, 2, 2))
    page.keyboard.press("]")
    page.keyboard.press("v")
    expect(page.locator("#query-caption")).to_contain_text("no explanations")


def test_a_link_to_an_attention_map_opens_without_errors(open_page: Any) -> None:
    from playwright.sync_api import expect

    page = wait_for_bars_to_appear(open_page("#image=cat&show=attention&layer=3&head=2&ask=2.2&hide=3-5"))
    expect(page.locator("#query-caption")).to_contain_text("no explanations")
