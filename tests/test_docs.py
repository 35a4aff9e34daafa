"""README and docs: every Python snippet runs, in order, page by page; links and named files exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import randomized
from conftest import ROOT, import_peer, need_extra
from PIL import Image

from vitrail.exporting import compare as comparison
from vitrail.models import build
from vitrail.models.model_names import config_from_name
from vitrail.weights import checkpoint, hub
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo

PAGES = [
    "README.md",
    "docs/models.md",
    "docs/other-tools.md",
    "docs/checkpoints.md",
    "docs/data.md",
    "docs/training.md",
    "docs/extending.md",
    "docs/explanations.md",
    "docs/evaluation.md",
    "docs/export.md",
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub repository with the architecture of the pages' example and random weights."""
    config = config_from_name("ViT-Ti/16", activation="gelu", resample="timm")
    folder = tmp_path_factory.mktemp("hub") / "repository"
    info = ModelInfo(
        config=config,
        preprocess=default_preprocess("ViT", config, "timm"),
        labels=tuple(f"class {i}" for i in range(1000)),
    )
    checkpoint.write(randomized(build(config)), info, folder, to="timm")
    return folder


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "docs/export.md":
        need_extra("export")
    if page == "docs/other-tools.md":
        for peer in ("timm", "torchvision", "transformers", "accelerate"):
            import_peer(peer)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "SECONDS", 0.01)  # shortens the speed comparison
    monkeypatch.setattr(hub, "fetch", lambda name, *a, **k: repository)
    for name in ("cat.jpg", "dog.jpg"):
        Image.fromarray(np.random.randint(0, 255, (200, 300, 3), dtype=np.uint8)).save(name)
    torch.compiler.reset()
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert snippets
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
        for line in snippet.splitlines():
            check_comment(line, names)


def check_comment(line: str, names: dict[str, object]) -> None:
    """If a line is `expression  # literal`, check that the expression equals the literal."""
    code, _, comment = line.partition("  # ")
    comment = comment.strip().partition(": ")[0]
    if "=" in code or not re.fullmatch(r"torch\.Size\(.*\)|\(.*\)|'.*'", comment):
        return
    assert eval(code, names) == eval(comment, {"torch": torch}), line


PROSE = [
    *PAGES,
    "CONTRIBUTING.md",
    "docs/benchmarks.md",
    "docs/log.md",
    "docs/operations.md",
    "docs/protocols.md",
    "docs/reproduce.md",
    "docs/reproducibility.md",
    "docs/serving.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "results").glob("*.md")),
]


@pytest.mark.parametrize("page", PROSE)
def test_relative_links_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    for target in targets:
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PROSE)
def test_files_named_in_prose_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in re.findall(r"`(?:python )?((?:benchmarks|tests|docs|examples)/[\w/]+\.py)", text):
        assert (ROOT / name).exists(), name
    packages = "|".join(path.name for path in (ROOT / "src/vitrail").iterdir() if path.is_dir())
    for name in re.findall(rf"`((?:{packages})/[\w/]+\.py)`", text):
        assert (ROOT / "src/vitrail" / name).exists(), name
