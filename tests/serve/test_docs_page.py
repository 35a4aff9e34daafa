"""The /docs page."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving import run_server, served


@pytest.fixture
def page(opened: Any) -> Any:
    page = opened("docs")
    page.wait_for_selector("#get-metrics")
    return page


def answer(page: Any, route: str) -> Any:
    """The example shown for a route."""
    return json.loads(page.inner_text(f"#{route} .answer code"))


def test_examples_are_true_and_of_this_model(page: Any, site: httpx.Client) -> None:
    for route in ("healthz", "readyz"):
        assert answer(page, f"get-{route}") == site.get(f"/{route}").json()
    about = site.get("/v1/model").json()
    assert answer(page, "get-v1-model") == about | {"labels": about["labels"][:3]}
    predicted = answer(page, "post-v1-predict")
    assert (predicted["model"], predicted["engine"]) == (about["name"], "torch")
    assert predicted["results"][0]["predictions"][0]["label"] == about["labels"][0]
    assert answer(page, "post-v1-explain")["grid"] == about["grid"]
    assert page.inner_text("#name") == about["name"]


def test_it_says_how_arrays_are_read(page: Any) -> None:
    text = page.inner_text("#post-v1-explain .fields")
    assert "attention[].values" in text
    assert "unsigned bytes, row-major" in text
    assert "float32, little endian" in text
    assert "row by row from 0" in page.inner_text("#post-v1-predict .values")


def test_it_leads_back_and_keeps_the_colors_that_were_chosen(page: Any, site: httpx.Client) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    chosen = page.evaluate("document.documentElement.dataset.theme")
    page.click(".tools a")
    page.wait_for_selector("#stage")
    assert page.url.rstrip("/").startswith(str(site.base_url).rstrip("/"))
    assert page.evaluate("document.documentElement.dataset.theme") == chosen


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(opened: Any, width: int) -> None:
    page = opened("docs", viewport={"width": width, "height": 800})
    page.wait_for_selector("#get-metrics")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_with_a_token_it_asks_for_it_as_the_explorer_does(opened: Any, cifar10: Any) -> None:
    with run_server(served(cifar10), token="open-sesame") as (client, _):
        page = opened("docs", at=str(client.base_url), allowed="401")
        page.wait_for_selector("#token-box[open]")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#token-note:has-text('rejected')")
        page.fill("#token", "open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#get-metrics")
        assert "Bearer TOKEN" in page.inner_text("#post-v1-predict .example code")
        page.reload()  # it is kept until the tab is closed
        page.wait_for_selector("#get-metrics")
