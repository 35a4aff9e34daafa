"""The explorer with servers that are slow, unreachable or protected, and with other kinds of models."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from browsing import (
    CAT,
    FAILED_REQUEST,
    SAMPLES,
    bars_with_hidden,
    drop_file,
    format_bars,
    link_parameters,
    patch_brightness,
    patch_center,
    random_image,
    wait_for_bars,
    wait_until_explained,
    wait_until_stable,
)
from small_models import LABELS, model, small

import vitrail
from vitrail.config import BiTConfig
from vitrail.explain.attention import AttentionIterator

pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
import uvicorn
from playwright.sync_api import expect
from serving import QUICK, BlockingEngine, run_server, served, wait_until
from training.processes import free_port

from vitrail.serve.app import create_app
from vitrail.serve.served_model import ServedModel

OpenPage = Callable[..., Any]


@contextmanager
def run_server_at(vit: vitrail.Model, port: int) -> Iterator[str]:
    """Run a server at a given port, so that another can replace it."""
    app = create_app(served(vit), batching=QUICK)
    config = uvicorn.Config(app, port=port, lifespan="on", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: app.state.service.default.batcher.ready)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_slow_model_shows_a_status(open_page: OpenPage, cifar10: vitrail.Model) -> None:
    served_model = served(cifar10)
    with run_server(served_model) as (client, _):
        page = wait_until_explained(open_page(base_url=str(client.base_url)))
        expect(page.locator("#status")).to_have_text("")
        served_model.engine.go.clear()  # type: ignore[attr-defined]
        page.mouse.click(*patch_center(page, 3, 3))
        expect(page.locator("#status")).to_have_text("Running the model…")
        expect(page.locator("#status")).to_contain_text("s so far", timeout=5000)
        served_model.engine.go.set()  # type: ignore[attr-defined]
        expect(page.locator("#status")).to_have_text("")


def test_requests_are_retried_while_the_server_is_down_and_the_view_is_kept(
    open_page: OpenPage, cifar10: vitrail.Model, port: int
) -> None:
    with run_server_at(cifar10, port) as url:
        page = wait_until_explained(open_page(base_url=url, allowed_error=FAILED_REQUEST))
        drop_file(page, random_image(3))
        wait_for_bars(page, format_bars((p.label, p.score) for p in cifar10.predict(random_image(3))))
        wait_until_explained(page)
        page.wait_for_timeout(300)
    page.mouse.move(*patch_center(page, 4, 4))  # loaded data needs no server
    expect(page.locator("#query-caption")).to_contain_text("Row 5, column 5 attends")
    page.mouse.click(*patch_center(page, 4, 4))
    expect(page.locator("#banner-text")).to_contain_text("The server is unreachable")
    expect(page.locator("#banner-action")).to_have_text("Try now")
    page.mouse.click(*patch_center(page, 4, 5))
    with run_server_at(cifar10, port) as url, httpx.Client(base_url=url) as client:
        wait_for_bars(page, bars_with_hidden(client, [36, 37], random_image(3)))  # the image is sent again
        expect(page.locator("#banner-text")).to_have_text("The server is back.")
        expect(page.locator("#banner")).to_be_hidden()
        page.wait_for_timeout(500)


def test_a_sample_chosen_while_the_server_is_down_loads_when_it_is_back(
    open_page: OpenPage, cifar10: vitrail.Model, port: int
) -> None:
    with run_server_at(cifar10, port) as url:
        page = wait_until_explained(open_page(base_url=url, allowed_error=FAILED_REQUEST))
        page.wait_for_timeout(300)
    page.locator(".sample[data-name=coffee]").click()
    expect(page.locator("#banner-text")).to_contain_text("The server is unreachable")
    expect(page.locator(".sample[data-name=coffee]")).to_have_attribute("aria-pressed", "true")
    assert link_parameters(page)["image"] == "coffee"  # also kept on reload
    with run_server_at(cifar10, port):
        wait_for_bars(page, format_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "coffee.jpg")))
        page.wait_for_timeout(500)


def test_a_server_that_returns_with_another_model_reloads_the_page(
    open_page: OpenPage, cifar10: vitrail.Model, port: int
) -> None:
    """Hidden patches and the query are dropped with the grid: patch 63 of 8 x 8 does not exist in 4 x 4."""
    with run_server_at(cifar10, port) as url:
        page = wait_until_explained(
            open_page("#image=coffee&layer=9&hide=9.63&ask=8.8", base_url=url, allowed_error=FAILED_REQUEST)
        )
        page.wait_for_timeout(300)
    page.mouse.click(*patch_center(page, 4, 4))
    expect(page.locator("#banner-text")).to_contain_text("The server is unreachable")
    with run_server_at(model(small()), port):
        expect(page.locator("#banner-text")).to_have_text("The server is back with another model: small.")
        wait_until_explained(page)
        expect(page.locator("#model-summary")).to_contain_text("4 × 4 patches")
        expect(page.locator("#hidden-count")).to_contain_text("Nothing hidden")
        parameters = link_parameters(page)
        assert parameters["image"] == "coffee"
        assert {"hide", "ask"}.isdisjoint(parameters)
        page.close()


def test_an_exported_model_shows_its_input_image(open_page: OpenPage) -> None:
    """The displayed image is the input of the model, with and without the network."""
    vit = model(small(image_size=64), preprocess=vitrail.PreprocessConfig(image_size=64, resize="short", resize_to=96))
    brightness = []
    for network in (vit, None):
        with run_server(ServedModel(BlockingEngine(vit), network, name="small")) as (client, _):
            page = open_page("#image=cat&show=plain", base_url=str(client.base_url))
            expect(page.locator("#query-caption")).to_contain_text("64 × 64 pixels." if network else "no explanations")
            brightness.append(wait_until_stable(page, lambda page=page: patch_brightness(page)))
            if network is None:
                expect(page.locator("#hint")).to_contain_text("Click patches to hide them")
                expect(page.locator("#click-action")).to_be_hidden()  # there are no queries
                page.mouse.click(*patch_center(page, 3, 3))
                expect(page.locator("#hidden-count")).to_have_text("1 of 64 hidden")
                expect(page.locator(".tick").first).to_be_visible()
            page.close()
    np.testing.assert_allclose(*brightness, atol=2)


def test_the_token_is_requested_once(open_page: OpenPage) -> None:
    vit = model(small())
    with run_server(served(vit), token="open-sesame") as (client, _):
        page = open_page(base_url=str(client.base_url), allowed_error=FAILED_REQUEST)
        expect(page.locator("#token-dialog")).to_be_visible()
        page.locator("#token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#token-note")).to_contain_text("rejected")
        page.locator("#token").fill("open-sesame")
        page.keyboard.press("Enter")
        wait_until_explained(page)
        page.reload()
        wait_until_explained(page)
        expect(page.locator("#token-dialog")).to_be_hidden()
        page.close()


def test_rectangular_grids_and_prefix_tokens_are_supported(open_page: OpenPage) -> None:
    """A rectangular grid with a class token and registers, which can be queries like patches."""
    torch.manual_seed(0)
    vit = model(small(image_size=(24, 40), class_token=True, num_registers=2))
    with run_server(served(vit)) as (client, _):
        page = wait_until_explained(open_page(base_url=str(client.base_url)))
        expect(page.locator(".chip")).to_contain_text(["head input", "class", "register 1", "register 2"])
        box = page.locator(".patch-grid canvas").bounding_box()
        assert box["width"] / box["height"] == pytest.approx(40 / 24, rel=0.02)
        page.locator(".chip", has_text="register 2").click()
        expect(page.locator("#query-caption")).to_contain_text("The register 2 token attends most to")
        assert link_parameters(page)["ask"] == "register-2"
        page.mouse.move(*patch_center(page, 2, 4, grid=(3, 5)))
        expect(page.locator("#query-caption")).to_contain_text("Row 3, column 5 attends")
        attention = list(AttentionIterator(vit.net, vit.preprocess(CAT)))[-1][0]  # H T T
        page.keyboard.press("]")
        page.mouse.move(*patch_center(page, 2, 3, grid=(3, 5)))
        shares = attention.mean(0)[3 + 2 * 5 + 3, :3].tolist()
        for chip, share in zip(page.locator(".chip").all()[1:], shares, strict=True):
            assert float(chip.locator("b").inner_text().split("\u00a0")[0]) == pytest.approx(100 * share, abs=0.6)
        page.close()


def test_layers_of_a_large_network_are_loaded_on_demand(open_page: OpenPage) -> None:
    torch.manual_seed(0)
    vit = model(
        small(image_size=128, patch_size=4)
    )  # 2 layers, 2 heads, 1,025 tokens: more than the default limit of a response
    with run_server(served(vit)) as (client, _):
        page = open_page("#image=cat&layer=2", base_url=str(client.base_url))
        wait_until_explained(page)
        requests: list[str] = []
        page.on("request", lambda single: requests.append(single.url) if single.url.endswith("/explain") else None)
        page.keyboard.press("[")
        images = vit.preprocess(CAT)
        best = int(next(iter(AttentionIterator(vit.net, images)))[0].mean(0)[0, 1:].argmax())
        expect(page.locator("#query-caption")).to_contain_text(f"row {best // 32 + 1}, column {best % 32 + 1} (")
        page.keyboard.press("]")
        page.keyboard.press("[")
        expect(page.locator("#query-caption")).to_contain_text(f"row {best // 32 + 1}, column {best % 32 + 1} (")
        assert len(requests) == 1  # layers are kept
        page.close()


def test_models_without_attention_or_classes_are_supported(open_page: OpenPage) -> None:
    bit = model(BiTConfig(image_size=32, layers=(1, 1, 1, 1), width_factor=0.5, num_classes=len(LABELS)))
    with run_server(served(bit)) as (client, _):
        page = open_page(base_url=str(client.base_url))
        expect(page.locator("figcaption")).to_contain_text("when 2 × 2 patches are occluded")
        expect(page.locator("#map-select button")).to_have_text(["Occlusion", "Image"])
        page.get_by_role("button", name="Image").click()
        expect(page.locator("#query-caption")).to_contain_text("no attention")
        expect(page.locator("#layer-row")).to_be_hidden()
        page.mouse.click(*patch_center(page, 0, 0))
        expect(page.locator("#hidden-count")).to_contain_text("hidden")
        page.close()
    feature_model = model(small(num_classes=0), task="embed")
    with run_server(served(feature_model)) as (client, _):
        page = open_page(base_url=str(client.base_url), allowed_error=FAILED_REQUEST)
        expect(page.locator(".prediction-block .note")).to_contain_text("no classification head")
        expect(page.locator("#query-caption")).to_contain_text("attends most to")
        page.mouse.click(*patch_center(page, 0, 0, grid=(4, 4)))
        expect(page.locator("#hidden-count")).to_have_text("1 of 16 hidden")
        expect(page.locator(".prediction-block .note")).to_contain_text(
            re.compile("whole images only|with and without")
        )
        page.locator("#clear").click()
        page.locator("#compare").click()
        page.locator(".sample[data-name=flower]").click()
        expect(page.locator(".label").nth(1)).to_contain_text("Cosine")
        page.close()


def test_decoding_in_javascript_matches_numpy(open_page: OpenPage) -> None:
    """Attention rows from bytes, pooling weights, and hidden patches in links."""
    page = wait_until_explained(open_page())
    random = np.random.default_rng(0)
    heads, tokens = 3, 7
    attention = random.dirichlet(np.full(tokens, 0.3), (heads, tokens)).astype(np.float32)
    peaks = attention.max(-1)
    values = np.rint(255 * attention / peaks[..., None]).astype(np.uint8)
    layer = {"num_heads": heads, "num_tokens": tokens, "values": _text(values), "row_max": _text(peaks.astype("<f4"))}
    script = """async (sent) => {
        const { attentionRow, parseLayer, poolingWeights } = await import('/static/attention.js');
        const layer = parseLayer(sent);
        const weights = (pool, prefixTokens) => [...poolingWeights(pool, prefixTokens, layer.tokens)];
        return [[...attentionRow(layer, 2, 5)], [...attentionRow(layer, 0, 5)],
            [...attentionRow(layer, 0, poolingWeights('token+gap', ['class', 'register 1'], layer.tokens))],
            weights('token', ['class', 'distill']), weights('gap', ['register 1'])];
    }"""
    single, mean, pooled, distilled, gap = (np.array(row) for row in page.evaluate(script, layer))
    np.testing.assert_allclose(single, attention[1, 5], atol=0.003)
    np.testing.assert_allclose(mean, attention[:, 5].mean(0), atol=0.003)
    weights = np.array([0.5, 0, *[0.1] * 5])
    np.testing.assert_allclose(pooled, weights @ attention.mean(0), atol=0.003)
    np.testing.assert_allclose(distilled, [0.5, 0.5, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(gap, [0, *[1 / 6] * 6], rtol=1e-6)
    sets = [sorted(random.choice(196, size, replace=False).tolist()) for size in (0, 1, 2, 17, 90, 196)]
    script = """async (sets) => {
        const { readRanges, writeRanges } = await import('/static/permalink.js');
        return [sets.map((set) => [...readRanges(writeRanges(set), 196)]), [...readRanges('5-2.x.3.190-900.-1', 196)]];
    }"""
    round_trip, invalid = page.evaluate(script, sets)
    assert round_trip == sets
    assert invalid == [3, 190, 191, 192, 193, 194, 195]


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
