"""The shape of the package: pixels flow one way, files stay small, every module says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "vitrail"
LONGEST = 450

# A module may import from its own station and those above it. `vitrail` is the package's own
# __init__.py, the public face: it gathers what stands above it, and only what stands below may use it.
STATIONS = (
    "errors",
    "config",
    "recipes",
    "runtime",
    "rng",
    "data",
    "kernels",
    "models",
    "weights",
    "objectives",
    "evaluate",
    "train",
    "explain",
    "export",
    "report",
    "api",
    "vitrail",
    "serve",
    "bench",
    "cli",
    "__main__",
)
ALONE = {"recipes": {"config"}}  # where less than everything above is allowed


def modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def station_of(dotted: str) -> str:
    """vitrail.models.vit -> models; vitrail -> vitrail; vitrail.load, which is no module, -> vitrail."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in STATIONS else "vitrail"


def home_of(path: Path, package: Path) -> str:
    """The station a file stands in, which may be one nobody has heard of."""
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return "vitrail" if first == "__init__" else first


def imported(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything of the package's that a file imports, wherever in it."""
    here = [package.name, *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _imports_by_name(node):
            names = [node.args[0].value]  # type: ignore[attr-defined]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == package.name)


def _imports_by_name(call: ast.Call) -> bool:
    """`import_module("vitrail.x")`, under any spelling."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    literal = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return function in ("import_module", "__import__") and literal


def misplaced(package: Path) -> list[str]:
    """Files in no known station, and imports against the flow."""
    found = []
    for path in modules(package):
        name, home = path.relative_to(package), home_of(path, package)
        if home not in STATIONS:
            found.append(f"{name}: no station {home!r}; add it to STATIONS where the pixels pass it")
            continue
        above = STATIONS[: STATIONS.index(home)]
        allowed = {home} | ALONE.get(home, set(above))
        for line, dotted in imported(path, package):
            if station_of(dotted) not in allowed:
                found.append(f"{name}:{line}: {home} may not import {dotted}")
    return found


def too_long(*folders: Path) -> list[str]:
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for f in folders for path in modules(f)}
    return [f"{path}: {count} lines" for path, count in counts.items() if count > LONGEST]


def undescribed(package: Path) -> list[str]:
    return [str(p) for p in modules(package) if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]


def unnamed(*folders: Path) -> list[str]:
    """Files whose name says nothing of what they hold."""
    return [str(p) for f in folders for p in modules(f) if p.stem in ("utils", "util")]


def test_imports_follow_the_stations():
    assert misplaced(PACKAGE) == []


def test_files_stay_small():
    assert too_long(PACKAGE, ROOT / "tests") == []


def test_every_module_opens_with_a_docstring():
    assert undescribed(PACKAGE) == []


def test_no_file_is_called_utils():
    assert unnamed(PACKAGE, ROOT / "tests") == []


def test_the_package_is_where_these_tests_look():
    assert PACKAGE / "errors.py" in modules(PACKAGE)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "vitrail"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("models/vit.py", "from vitrail.weights import renaming"),
        ("models/vit.py", "from vitrail.weights.renaming import Rule"),
        ("models/vit.py", "import vitrail.cli"),
        ("models/vit.py", "import vitrail"),
        ("models/vit.py", "from vitrail import load"),
        ("models/vit.py", "from vitrail import config, api"),
        ("models/vit.py", "from .. import train"),
        ("models/vit.py", "from ..train.loop import fit"),
        ("models/__init__.py", "from ..train import fit"),
        ("models/vit.py", "def late():\n    from vitrail.train import fit"),
        ("models/vit.py", "if TYPE_CHECKING:\n    from vitrail.train import fit"),
        ("models/vit.py", "importlib.import_module('vitrail.train')"),
        ("errors.py", "from vitrail.config import Config"),
        ("config/base.py", "from vitrail.recipes import digits"),
        ("recipes/digits.py", "from vitrail.errors import ConfigError"),
        ("recipes/digits.py", "from vitrail.models import ViT"),
        ("__init__.py", "from vitrail.cli import main"),
        ("api.py", "from vitrail import __version__"),
        ("bench/run.py", "from vitrail.cli import main"),
        ("helpers.py", "import os"),
        ("helpers/more.py", "import os"),
    ],
)
def test_an_import_against_the_flow_is_found(package: Path, file: str, line: str):
    path = package / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(misplaced(package)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("models/vit.py", "from vitrail.config import ViTConfig"),
        ("models/vit.py", "from vitrail.models.layers import Block"),
        ("models/vit.py", "from .layers import Block"),
        ("models/vit.py", "from . import layers"),
        ("models/vit.py", "from vitrail import kernels"),
        ("models/vit.py", "import timm.train, vitrailish.cli"),
        ("models/vit.py", "from torch.export import export"),
        ("models/vit.py", "importlib.import_module(name)"),
        ("config/base.py", "from vitrail.errors import ConfigError"),
        ("recipes/digits.py", "from vitrail.config import ViTConfig"),
        ("train/loop.py", "from vitrail.recipes import digits"),
        ("__init__.py", "from vitrail.api import load"),
        ("cli/__init__.py", "from vitrail import __version__"),
        ("__main__.py", "from vitrail.cli import main"),
    ],
)
def test_an_import_with_the_flow_is_not(package: Path, file: str, line: str):
    path = package / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert misplaced(package) == []


def test_a_long_file_is_found(package: Path):
    package.mkdir()
    (package / "api.py").write_text("x = 1\n" * LONGEST)
    assert too_long(package) == []
    (package / "api.py").write_text("x = 1\n" * (LONGEST + 1))
    assert len(too_long(package)) == 1


def test_a_module_without_a_docstring_is_found(package: Path):
    package.mkdir()
    (package / "api.py").write_text('"""The public face."""')
    assert undescribed(package) == []
    (package / "__init__.py").write_text("")
    (package / "runtime.py").write_text("# a comment is not a docstring\nimport os\n")
    assert len(undescribed(package)) == 2


def test_a_file_called_utils_is_found(package: Path):
    (package / "models").mkdir(parents=True)
    (package / "models" / "utils.py").write_text("")
    assert len(unnamed(package)) == 1
