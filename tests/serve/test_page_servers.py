"""The explorer with servers that are slow, away or closed, and with models of other kinds."""

from __future__ import annotations

import base64
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from browsing import (
    AWAY,
    CAT,
    SAMPLES,
    answered,
    as_bars,
    drawing,
    drop,
    hiding,
    lights,
    patch,
    query,
    settled,
    wait_for_bars,
)
from small_models import LABELS, model, small

import vitrail
from vitrail.config import BiTConfig
from vitrail.explain.attention import AttentionIterator

pytest.importorskip("playwright", reason="the page is tested with it: pip install playwright")
import uvicorn
from playwright.sync_api import expect
from serving import QUICK, BlockingEngine, run_server, served, until

from vitrail.serve.app import create_app
from vitrail.serve.served_model import ServedModel

Opened = Callable[..., Any]


@contextmanager
def listening(vit: vitrail.Model, port: int) -> Iterator[str]:
    """A server at a port of our choice, so that another can come after it."""
    app = create_app(served(vit), batching=QUICK)
    config = uvicorn.Config(app, port=port, lifespan="on", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: app.state.service.batcher.ready)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_it_says_what_it_waits_for_when_the_model_is_slow(opened: Opened, cifar10: vitrail.Model) -> None:
    what = served(cifar10)
    with run_server(what) as (client, _):
        page = answered(opened(at=str(client.base_url)))
        expect(page.locator("#status")).to_have_text("")
        what.engine.go.clear()  # type: ignore[attr-defined]
        page.mouse.click(*patch(page, 3, 3))
        expect(page.locator("#status")).to_have_text("Running the model…")
        expect(page.locator("#status")).to_contain_text("s so far", timeout=5000)
        what.engine.go.set()  # type: ignore[attr-defined]
        expect(page.locator("#status")).to_have_text("")


def test_a_server_that_went_away_is_awaited_and_nothing_is_lost(opened: Opened, cifar10: vitrail.Model) -> None:
    port = free_port()
    with listening(cifar10, port) as where:
        page = answered(opened(at=where, allowed=AWAY))
        drop(page, drawing(3))
        wait_for_bars(page, as_bars((p.label, p.score) for p in cifar10.predict(drawing(3))))
        answered(page)
        page.wait_for_timeout(300)
    page.mouse.move(*patch(page, 4, 4))  # what is here already needs nobody
    expect(page.locator("#words")).to_contain_text("Row 5, column 5 attends")
    page.mouse.click(*patch(page, 4, 4))
    expect(page.locator("#banner-text")).to_contain_text("The server is unreachable")
    expect(page.locator("#banner-act")).to_have_text("Try now")
    page.mouse.click(*patch(page, 4, 5))
    with listening(cifar10, port) as where, httpx.Client(base_url=where) as client:
        wait_for_bars(page, hiding(client, [36, 37], drawing(3)))  # the image was sent again
        expect(page.locator("#banner-text")).to_have_text("The server is back.")
        expect(page.locator("#banner")).to_be_hidden()
        page.wait_for_timeout(500)


def test_a_sample_chosen_while_the_server_is_away_comes_with_it(opened: Opened, cifar10: vitrail.Model) -> None:
    port = free_port()
    with listening(cifar10, port) as where:
        page = answered(opened(at=where, allowed=AWAY))
        page.wait_for_timeout(300)
    page.locator(".sample[data-name=coffee]").click()
    expect(page.locator("#banner-text")).to_contain_text("The server is unreachable")
    expect(page.locator(".sample[data-name=coffee]")).to_have_attribute("aria-pressed", "true")
    assert query(page)["image"] == "coffee"  # reloading would not forget it either
    with listening(cifar10, port):
        wait_for_bars(page, as_bars((p.label, p.score) for p in cifar10.predict(SAMPLES / "coffee.jpg")))
        page.wait_for_timeout(500)


def test_a_server_that_comes_back_with_another_model_is_not_taken_for_the_old_one(
    opened: Opened, cifar10: vitrail.Model
) -> None:
    """Patch 63 of 8 x 8 is nowhere in 4 x 4, and patch 9 is elsewhere: what was hidden is shown, and it says why."""
    port = free_port()
    with listening(cifar10, port) as where:
        page = answered(opened("#image=coffee&layer=9&hide=9.63&ask=8.8", at=where, allowed=AWAY))
        page.wait_for_timeout(300)
    page.mouse.click(*patch(page, 4, 4))
    expect(page.locator("#banner-text")).to_contain_text("The server is unreachable")
    with listening(model(small()), port):
        expect(page.locator("#banner-text")).to_have_text("The server is back with another model: small.")
        answered(page)
        expect(page.locator("#model")).to_contain_text("4 × 4 patches")
        expect(page.locator("#hidden-count")).to_contain_text("Nothing hidden")
        words = query(page)
        assert words["image"] == "coffee"
        assert {"hide", "ask"}.isdisjoint(words)
        page.close()


def test_an_exported_file_is_drawn_as_it_sees(opened: Opened) -> None:
    """The grid lies over the pixels that the model gets: the same with the network and without it."""
    vit = model(small(image_size=64), preprocess=vitrail.PreprocessConfig(image_size=64, resize="short", resize_to=96))
    seen = []
    for inside in (vit, None):
        with run_server(ServedModel(BlockingEngine(vit), inside, name="small")) as (client, _):
            page = opened("#image=cat&show=plain", at=str(client.base_url))
            expect(page.locator("#words")).to_contain_text("64 × 64 pixels." if inside else "no explanations")
            seen.append(settled(page, lambda page=page: lights(page)))
            if inside is None:
                expect(page.locator("#invite")).to_contain_text("Click patches to hide them")
                expect(page.locator("#modes")).to_be_hidden()  # nobody can be asked
                page.mouse.click(*patch(page, 3, 3))
                expect(page.locator("#hidden-count")).to_have_text("1 of 64 hidden")
                expect(page.locator(".tick").first).to_be_visible()
            page.close()
    np.testing.assert_allclose(*seen, atol=2)


def test_the_token_is_asked_for_once(opened: Opened) -> None:
    vit = model(small())
    with run_server(served(vit), token="open-sesame") as (client, _):
        page = opened(at=str(client.base_url), allowed=AWAY)
        expect(page.locator("#token-box")).to_be_visible()
        page.locator("#token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#token-note")).to_contain_text("rejected")
        page.locator("#token").fill("open-sesame")
        page.keyboard.press("Enter")
        answered(page)
        page.reload()
        answered(page)
        expect(page.locator("#token-box")).to_be_hidden()
        page.close()


def test_any_grid_and_tokens_that_are_no_patches(opened: Opened) -> None:
    """Not square, with a class token and registers: those are asked and looked at like patches."""
    torch.manual_seed(0)
    vit = model(small(image_size=(24, 40), class_token=True, num_registers=2))
    with run_server(served(vit)) as (client, _):
        page = answered(opened(at=str(client.base_url)))
        expect(page.locator(".chip")).to_contain_text(["head input", "class", "register 1", "register 2"])
        box = page.locator(".glass canvas").bounding_box()
        assert box["width"] / box["height"] == pytest.approx(40 / 24, rel=0.02)
        page.locator(".chip", has_text="register 2").click()
        expect(page.locator("#words")).to_contain_text("The register 2 token attends most to")
        assert query(page)["ask"] == "register-2"
        page.mouse.move(*patch(page, 2, 4, grid=(3, 5)))
        expect(page.locator("#words")).to_contain_text("Row 3, column 5 attends")
        last = list(AttentionIterator(vit.net, vit.preprocess(CAT)))[-1][0]  # H T T
        page.keyboard.press("]")
        page.mouse.move(*patch(page, 2, 3, grid=(3, 5)))
        shares = last.mean(0)[3 + 2 * 5 + 3, :3].tolist()
        for chip, share in zip(page.locator(".chip").all()[1:], shares, strict=True):
            assert float(chip.locator("b").inner_text().split("\u00a0")[0]) == pytest.approx(100 * share, abs=0.6)
        page.close()


def test_layers_of_a_large_network_come_when_they_are_looked_at(opened: Opened) -> None:
    torch.manual_seed(0)
    vit = model(small(image_size=128, patch_size=4))  # 2 layers, 2 heads, 1,025 tokens: too much to send unasked
    with run_server(served(vit)) as (client, _):
        page = opened("#image=cat&layer=2", at=str(client.base_url))
        answered(page)
        asked: list[str] = []
        page.on("request", lambda one: asked.append(one.url) if one.url.endswith("/explain") else None)
        page.keyboard.press("[")
        images = vit.preprocess(CAT)
        best = int(next(iter(AttentionIterator(vit.net, images)))[0].mean(0)[0, 1:].argmax())
        expect(page.locator("#words")).to_contain_text(f"row {best // 32 + 1}, column {best % 32 + 1} (")
        page.keyboard.press("]")
        page.keyboard.press("[")
        expect(page.locator("#words")).to_contain_text(f"row {best // 32 + 1}, column {best % 32 + 1} (")
        assert len(asked) == 1  # and are kept
        page.close()


def test_models_without_attention_or_classes_say_so(opened: Opened) -> None:
    bit = model(BiTConfig(image_size=32, layers=(1, 1, 1, 1), width_factor=0.5, num_classes=len(LABELS)))
    with run_server(served(bit)) as (client, _):
        page = opened(at=str(client.base_url))
        expect(page.locator("figcaption")).to_contain_text("when 2 × 2 patches are occluded")
        expect(page.locator("#shows button")).to_have_text(["Occlusion", "Image"])
        page.get_by_role("button", name="Image").click()
        expect(page.locator("#words")).to_contain_text("no attention")
        expect(page.locator("#layer-row")).to_be_hidden()
        page.mouse.click(*patch(page, 0, 0))
        expect(page.locator("#hidden-count")).to_contain_text("hidden")
        page.close()
    tower = model(small(num_classes=0), task="embed")
    with run_server(served(tower)) as (client, _):
        page = opened(at=str(client.base_url), allowed=AWAY)
        expect(page.locator(".block .note")).to_contain_text("no classification head")
        expect(page.locator("#words")).to_contain_text("attends most to")
        page.mouse.click(*patch(page, 0, 0, grid=(4, 4)))
        expect(page.locator("#hidden-count")).to_have_text("1 of 16 hidden")
        expect(page.locator(".block .note")).to_contain_text(re.compile("whole images only|with and without"))
        page.locator("#clear").click()
        page.locator("#compare").click()
        page.locator(".sample[data-name=flower]").click()
        expect(page.locator(".label").nth(1)).to_contain_text("Cosine")
        page.close()


def test_the_pages_arithmetic_is_numpys(opened: Opened) -> None:
    """Rows of attention from their bytes, how heads read tokens, hidden patches as words and back."""
    page = answered(opened())
    random = np.random.default_rng(0)
    heads, tokens = 3, 7
    attention = random.dirichlet(np.full(tokens, 0.3), (heads, tokens)).astype(np.float32)
    peaks = attention.max(-1)
    values = np.rint(255 * attention / peaks[..., None]).astype(np.uint8)
    sent = {"num_heads": heads, "num_tokens": tokens, "values": _text(values), "row_max": _text(peaks.astype("<f4"))}
    script = """async (sent) => {
        const { attended, layerOf, reading } = await import('/static/attention.js'), layer = layerOf(sent);
        const mix = (pool, special) => [...reading(pool, special, layer.tokens)];
        return [[...attended(layer, 2, 5)], [...attended(layer, 0, 5)],
            [...attended(layer, 0, reading('token+gap', ['class', 'register 1'], layer.tokens))],
            mix('token', ['class', 'distill']), mix('gap', ['register 1'])];
    }"""
    one, mean, read, both, gap = (np.array(row) for row in page.evaluate(script, sent))
    np.testing.assert_allclose(one, attention[1, 5], atol=0.003)
    np.testing.assert_allclose(mean, attention[:, 5].mean(0), atol=0.003)
    weights = np.array([0.5, 0, *[0.1] * 5])
    np.testing.assert_allclose(read, weights @ attention.mean(0), atol=0.003)
    np.testing.assert_allclose(both, [0.5, 0.5, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(gap, [0, *[1 / 6] * 6], rtol=1e-6)
    sets = [sorted(random.choice(196, size, replace=False).tolist()) for size in (0, 1, 2, 17, 90, 196)]
    script = """async (sets) => {
        const { readRanges, writeRanges } = await import('/static/permalink.js');
        return [sets.map((set) => [...readRanges(writeRanges(set), 196)]), [...readRanges('5-2.x.3.190-900.-1', 196)]];
    }"""
    there_and_back, odd = page.evaluate(script, sets)
    assert there_and_back == sets
    assert odd == [3, 190, 191, 192, 193, 194, 195]


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
