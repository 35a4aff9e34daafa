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
OpenPage = Callable[..., Any]


class ServeTestModule(pytest.Module):
    """A test file of this folder, skipped before its imports if the serve extra is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        need_extra("serve")
        import_peer("httpx")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return ServeTestModule.from_parent(parent, path=module_path)


@pytest.fixture
def request_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that send requests in parallel."""
    with ThreadPoolExecutor(40) as pool:
        yield pool


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, started once per file; while it runs, this thread cannot have another event loop."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    api.expect.set_options(timeout=20_000)  # for busy machines
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


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
def open_page(browser: Any, site: Any) -> Iterator[OpenPage]:
    """Opens the page; fails on console errors and on requests to other hosts."""
    errors: list[str] = []
    external_requests: list[str] = []
    with ExitStack() as stack:

        def open_(
            fragment: str = "", *, base_url: str = "", context: Any = None, allowed_error: str = "", **options: Any
        ) -> Any:
            origin = (base_url or str(site.base_url)).rstrip("/")
            if context is None:
                context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
                stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)

            def record(text: str) -> None:
                if not (allowed_error and allowed_error in text):
                    errors.append(text)

            page.on("console", lambda message: record(message.text) if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: record(str(error)))
            page.on("request", lambda request: _is_local(request.url, origin) or external_requests.append(request.url))
            page.goto(f"{origin}/{fragment}")
            return page

        yield open_
    assert errors == []
    assert external_requests == []


def _is_local(url: str, origin: str) -> bool:
    return url.startswith((f"{origin}/", "data:", "blob:"))
