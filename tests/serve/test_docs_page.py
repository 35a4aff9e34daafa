"""The /docs page."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving import run_server, served


@pytest.fixture
def page(open_page: Any) -> Any:
    page = open_page("docs")
    page.wait_for_selector("#get-metrics")
    return page


def example_response(page: Any, route: str) -> Any:
    """The example shown for a route."""
    return json.loads(page.inner_text(f"#{route} .response code"))


def test_examples_match_the_responses_of_this_model(page: Any, site: httpx.Client) -> None:
    for route in ("healthz", "readyz"):
        assert example_response(page, f"get-{route}") == site.get(f"/{route}").json()
    model_info = site.get("/v1/model").json()
    assert example_response(page, "get-v1-model") == model_info | {"labels": model_info["labels"][:3]}
    predicted = example_response(page, "post-v1-predict")
    assert (predicted["model"], predicted["engine"]) == (model_info["name"], "torch")
    assert predicted["results"][0]["predictions"][0]["label"] == model_info["labels"][0]
    assert example_response(page, "post-v1-explain")["grid"] == model_info["grid"]
    assert page.inner_text("#model-name") == model_info["name"]


def test_array_encodings_are_documented(page: Any) -> None:
    text = page.inner_text("#post-v1-explain .response-fields")
    assert "attention[].values" in text
    assert "unsigned bytes, row-major" in text
    assert "float32, little endian" in text
    assert "row by row from 0" in page.inner_text("#post-v1-predict .parameters")


def test_the_theme_is_kept_when_returning_to_the_explorer(page: Any, site: httpx.Client) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.click(".toolbar a")
    page.wait_for_selector("#image-panel")
    assert page.url.rstrip("/").startswith(str(site.base_url).rstrip("/"))
    assert page.evaluate("document.documentElement.dataset.theme") == theme


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_width_of_the_window(open_page: Any, width: int) -> None:
    page = open_page("docs", viewport={"width": width, "height": 800})
    page.wait_for_selector("#get-metrics")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_token_dialog_is_shown_if_the_server_requires_a_token(open_page: Any, cifar10: Any) -> None:
    with run_server(served(cifar10), token="open-sesame") as (client, _):
        page = open_page("docs", base_url=str(client.base_url), allowed_error="401")
        page.wait_for_selector("#token-dialog[open]")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#token-note:has-text('rejected')")
        page.fill("#token", "open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#get-metrics")
        assert "Bearer TOKEN" in page.inner_text("#post-v1-predict .example code")
        page.reload()  # stored until the tab is closed
        page.wait_for_selector("#get-metrics")
