"""The explorer before an exported file: images and hiding work, and it says what it cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import as_bars, bars, drawing, drop, hiding, patch, wait_for_bars
from conftest import need_extra
from exports import export_quickly

import vitrail

need_extra("export")


@pytest.fixture(scope="module")
def site(cifar10: vitrail.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server with the model that ships, exported."""
    from serving import run_server

    from vitrail.api.exporting import export
    from vitrail.export.engines import open_engine
    from vitrail.serve.served_model import ServedModel

    with pytest.MonkeyPatch.context() as patched:
        export_quickly(patched)
        made = export(cifar10, tmp_path_factory.mktemp("exported") / "cifar10.onnx")
    with run_server(ServedModel(open_engine(made.path, threads=1), name="cifar10")) as (client, _):
        yield client


def ready(page: Any) -> Any:
    from playwright.sync_api import expect

    expect(page.locator(".bar").first).to_be_visible()
    return page


def test_a_dropped_image_is_named_and_patches_are_hidden(opened: Any, site: Any, cifar10: vitrail.Model) -> None:
    page = ready(opened("#image=cat"))
    data = drawing(1)
    drop(page, data)
    whole = as_bars((p.label, p.score) for p in cifar10.predict(data))
    wait_for_bars(page, whole)
    for row, column in ((3, 3), (3, 4), (4, 3)):
        page.mouse.click(*patch(page, row, column))
    wait_for_bars(page, hiding(site, [27, 28, 35], data))
    assert bars(page) != whole
    page.keyboard.press("x")
    wait_for_bars(page, whole)


def test_it_says_what_cannot_be_seen_and_offers_none_of_it(opened: Any) -> None:
    from playwright.sync_api import expect

    page = ready(opened("#image=cat"))
    expect(page.locator("#words")).to_contain_text("exported")
    expect(page.locator("#words")).to_contain_text("no explanations")
    for word in ("Attention", "Rollout", "Gradient", "Occlusion"):
        expect(page.get_by_role("radio", name=word)).to_have_count(0)
        expect(page.get_by_role("button", name=word)).to_have_count(0)
    expect(page.locator("#layer-row")).to_be_hidden()
    page.mouse.move(*patch(page, 2, 2))
    page.keyboard.press("]")
    page.keyboard.press("v")
    expect(page.locator("#words")).to_contain_text("no explanations")


def test_a_link_that_asks_for_attention_opens_without_complaint(opened: Any) -> None:
    from playwright.sync_api import expect

    page = ready(opened("#image=cat&show=attention&layer=3&head=2&ask=2.2&hide=3-5"))
    expect(page.locator("#words")).to_contain_text("no explanations")
