"""docs/serving.md: its Python code runs, and its tables and numbers match the code."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
from conftest import ROOT
from serving import photo, run_server, served

import vitrail.serve as serving
from vitrail.cli import serve
from vitrail.explain.masking import Fill
from vitrail.serve.app import create_app
from vitrail.serve.image_decoder import FORMATS
from vitrail.serve.limits import BatchingConfig, Limits
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.schema import PredictParameters
from vitrail.serve.security import PUBLIC_PATHS, PUBLIC_PREFIXES

PAGE = (ROOT / "docs" / "serving.md").read_text()


def test_the_python_snippets_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("cat.jpg", "dog.jpg")):
        Path(name).write_bytes(photo(number))
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    with run_server(served()) as (client, _):
        names: dict[str, object] = {}
        for snippet in snippets:
            code = snippet.replace("http://127.0.0.1:8000", str(client.base_url).rstrip("/"))
            exec(compile(code, "serving.md", "exec"), names)
            *_, last = snippet.strip().splitlines()
            expression, _, value = last.partition("  # ")
            if not last.startswith("print"):
                assert eval(expression, names) == eval(value)
        assert names["relevance"].shape == (4, 4)  # type: ignore[attr-defined]
    assert "label" in capsys.readouterr().out
    imported = {
        word for line in re.findall(r"^import (.*)", "".join(snippets), re.MULTILINE) for word in line.split(", ")
    }
    assert imported - {"numpy as np"} <= {*sys.stdlib_module_names, "urllib.request"}


def test_the_page_lists_exactly_the_http_statuses_of_the_code() -> None:
    table = PAGE.partition("| status | when |")[2].partition("\n\n")[0]
    match = {int(status) for status in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    source = "".join(path.read_text() for path in Path(serving.__file__).parent.glob("*.py"))
    raised = {int(status) for status in re.findall(r"RequestError\(\s*(\d{3}),", source)}
    assert match == raised | {404, 405, 429}  # raised by the router, and by quotas


def test_the_page_lists_all_routes_fills_and_their_defaults() -> None:
    protocols = (ROOT / "docs" / "protocols.md").read_text()
    tables = [page.partition("| route | returns |")[2].partition("\n\n")[0] for page in (PAGE, protocols)]
    assert set(re.findall(r"`(?:GET|POST) (/\S+)`", "".join(tables))) == set(create_app(served()).openapi()["paths"])
    values = PredictParameters()
    assert f"`top` (default {values.top})" in PAGE
    match = re.search(r"`fill` selects what replaces them: (.*?)\. ", PAGE, re.DOTALL)
    assert match
    assert set(re.findall(r"`(\w+)`", match[1])) == set(get_args(Fill))
    assert f"`{values.fill}`, the mean color of the image (default)" in " ".join(match[1].split())


def test_the_page_lists_the_paths_that_need_no_token() -> None:
    sentence = " ".join(PAGE.partition("- `--token NAME` requires")[2].partition("own.")[0].split())
    named = set(re.findall(r"`(/[^`]*)`", sentence))
    assert named == {*PUBLIC_PATHS, *(prefix.rstrip("/") for prefix in PUBLIC_PREFIXES)} - {"/static", "/samples"}


def test_the_package_lists_its_modules() -> None:
    listed = set(re.findall(r"\b(\w+\.py)\b", serving.__doc__ or ""))
    assert listed == {path.name for path in Path(serving.__file__).parent.glob("*.py")} - {"__init__.py"}


def test_command_line_options_on_the_page_exist() -> None:
    names = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve.serve).parameters}
    used_options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {
        "--data-binary",
        "--json",
        "--data",
        "--clients",
    }
    assert used_options
    assert used_options <= names


def test_numbers_on_the_page_match_the_defaults() -> None:
    limits, batching = Limits(), BatchingConfig()
    assert (limits.max_bytes, limits.max_pixels, limits.max_images, limits.body_timeout) == (
        16 * 2**20,
        50_000_000,
        16,
        30,
    )
    assert (batching.max_queue, batching.batch_delay, batching.max_uploads, batching.max_queue_bytes) == (
        256,
        0.004,
        256,
        512 * 2**20,
    )
    for words in ("16 MiB", "50 million pixels", "16 images", "30 seconds", "512 MiB", "256 bodies"):
        assert words in PAGE


def test_the_page_lists_all_metrics_and_image_formats() -> None:
    text = Metrics().render().decode()
    existing = {m for m in re.findall(r"^# TYPE (vitrail_\w+)", text, re.MULTILINE) if not m.endswith("_created")}
    assert set(re.findall(r"`(vitrail_\w+)`", PAGE)) == existing
    match = re.search(r"- The supported formats are (.*?)\. Variants", PAGE)
    assert match
    assert {w.upper() for w in re.findall(r"\w+", match[1])} - {"AND"} == set(FORMATS)
