"""The explorer with several models: one is chosen in the header, and the link keeps the choice."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import format_bars, read_bars, wait_for_bars
from model_folders import make_model, put, run_app, run_models
from serving import QUICK, served, wait_until

import vitrail
from vitrail.serve.app import create_app
from vitrail.serve.static_files import WEB_DIR

CAT = (WEB_DIR / "samples" / "cat.jpg").read_bytes()


@pytest.fixture(scope="module")
def other() -> vitrail.Model:
    return make_model(3)


@pytest.fixture(scope="module")
def site(cifar10: vitrail.Model, other: vitrail.Model) -> Iterator[Any]:
    models = [served(cifar10), served(other)]
    models[0].name, models[1].name = "cifar10", "other"
    with run_app(create_app(models, batching=QUICK)) as (client, _):
        yield client


def bars_of(vit: vitrail.Model) -> Any:
    return format_bars((p.label, p.score) for p in vit.predict(CAT))


def test_a_model_is_chosen_in_the_header_and_kept_in_the_link(
    open_page: Any, cifar10: vitrail.Model, other: vitrail.Model
) -> None:
    from playwright.sync_api import expect

    page = open_page("#image=cat&hide=3")
    select = page.locator("#model-select")
    expect(select).to_have_value("cifar10")
    assert select.locator("option").all_text_contents() == ["cifar10", "other"]
    select.select_option("other")
    expect(page).to_have_url(re.compile(r"\?model=other#image=cat(?!.*hide)"))
    wait_for_bars(page, bars_of(other))
    expect(page.locator("#model-summary")).to_contain_text("4 × 4 patches")
    page.reload()
    wait_for_bars(page, bars_of(other))
    expect(page.locator("#model-select")).to_have_value("other")
    page.locator("#model-select").select_option("cifar10")
    wait_for_bars(page, bars_of(cifar10))


def test_the_page_is_reloaded_when_its_answers_come_from_another_version(
    open_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import expect

    folder = tmp_path / "models"
    put(folder, "photos", "1", seed=1)
    with run_models(folder, monkeypatch) as (client, service):
        page = open_page("#image=cat", base_url=str(client.base_url))
        wait_for_bars(page, bars_of(make_model(1)))
        expect(page.locator("#model-summary b")).to_have_attribute("title", "photos, version 1")
        put(folder, "photos", "2", seed=2)
        while service.default.version != "2":
            page.wait_for_timeout(50)
        page.keyboard.press("x")
        page.locator("#samples button").nth(1).click()
        expect(page.locator("#banner-text")).to_have_text("The server has another version of the model now: 2.")
        wait_until(lambda: page.wait_for_timeout(30) or read_bars(page))
        shutil.rmtree(folder)
