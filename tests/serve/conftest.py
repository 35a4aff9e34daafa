"""Fixtures for the tests of the service and of the explorer page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import import_peer, need_extra

import vitrail

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"),  # a fake camera
]
Opened = Callable[..., Any]


class ServeTestModule(pytest.Module):
    """A test file of this folder, skipped before its imports if the serve extra is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        need_extra("serve")
        import_peer("httpx")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return ServeTestModule.from_parent(parent, path=module_path)


@pytest.fixture
def senders() -> Iterator[ThreadPoolExecutor]:
    """Threads that send requests in parallel."""
    with ThreadPoolExecutor(40) as pool:
        yield pool


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, started once per file; while it runs, this thread cannot have another event loop."""
    api = pytest.importorskip("playwright.sync_api", reason="the page is tested with it: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("the page is tested with Chromium, which is not here: apt install chromium")
    api.expect.set_options(timeout=20_000)  # the machine may be busy
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def cifar10() -> vitrail.Model:
    return vitrail.load("vitrail/cifar10")


@pytest.fixture(scope="module")
def site(cifar10: vitrail.Model) -> Iterator[Any]:
    """A client of a server with the bundled model."""
    from serving import run_server, served

    with run_server(served(cifar10)) as (client, _):
        yield client


@pytest.fixture
def opened(browser: Any, site: Any) -> Iterator[Opened]:
    """Opens the page; fails on console errors and on requests to other hosts."""
    complaints: list[str] = []
    elsewhere: list[str] = []
    with ExitStack() as stack:

        def open_page(
            fragment: str = "", *, at: str = "", context: Any = None, allowed: str = "", **options: Any
        ) -> Any:
            origin = (at or str(site.base_url)).rstrip("/")
            if context is None:
                context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
                stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)

            def complain(text: str) -> None:
                if not (allowed and allowed in text):
                    complaints.append(text)

            page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complain(str(error)))
            page.on("request", lambda asked: _here(asked.url, origin) or elsewhere.append(asked.url))
            page.goto(f"{origin}/{fragment}")
            return page

        yield open_page
    assert complaints == []
    assert elsewhere == []


def _here(url: str, origin: str) -> bool:
    return url.startswith((f"{origin}/", "data:", "blob:"))
