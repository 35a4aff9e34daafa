"""Structure of the package: packages import in one direction, files are short, names and docstrings are useful."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "vitrail"
MAX_LINES = 450

# A module may import from its own package and from those listed before it. `vitrail` is the top-level __init__.py,
# which re-exports the public names.
PACKAGE_ORDER = (
    "errors",
    "plugins",
    "config",
    "recipes",
    "runtime",
    "storage",
    "rng",
    "data",
    "kernels",
    "models",
    "weights",
    "predictions",
    "inference",
    "engines",
    "explain",
    "model",
    "engine_model",
    "open_model",
    "objectives",
    "evaluation",
    "retrieval",
    "exporting",
    "runs",
    "report",
    "training",
    "vtab",
    "figures",
    "reproduction",
    "bulk",
    "vitrail",
    "serve",
    "bench",
    "cli",
    "__main__",
)
RESTRICTED = {"recipes": {"config"}}
"""Package -> the only other packages it may import, where that is less than all before it."""

SHARED_FILE_NAMES = {
    # The base class of the package's other modules.
    "base.py": {"config", "data/sources", "models", "objectives"},
    # A command, and the module of another package that it is the command for.
    "figures.py": {"cli", "explain"},
    "finetune.py": {"cli", "recipes"},
    "reproduce.py": {"cli", "reproduction"},
    "search.py": {"cli", "retrieval"},
    "train.py": {"cli", "config"},
    "vtab.py": {".", "cli"},
    # An experiment, and the figures of what it is about.
    "swin.py": {"config", "models"},
    "positions.py": {"explain", "reproduction/experiments"},
}
"""File names that occur more than once, and in which packages; every other file name is unique."""


def modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def package_of(dotted: str) -> str:
    """vitrail.models.vit -> models; vitrail -> vitrail; vitrail.load (a function) -> vitrail."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGE_ORDER else "vitrail"


def package_of_file(path: Path, package: Path) -> str:
    """models/vit.py -> models, whether or not it is in PACKAGE_ORDER."""
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return "vitrail" if first == "__init__" else first


def package_imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import from the package in a file, also inside functions or only for types."""
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
    """Whether the call is import_module("...") or __import__("..."), however they were imported."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    literal = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return function in ("import_module", "__import__") and literal


def import_violations(package: Path) -> list[str]:
    """Files in packages that PACKAGE_ORDER does not list, and imports against its order."""
    violations = []
    for path in modules(package):
        name, importer = path.relative_to(package), package_of_file(path, package)
        if importer not in PACKAGE_ORDER:
            violations.append(f"{name}: unknown package {importer!r}; add it to PACKAGE_ORDER after what it imports")
            continue
        earlier = PACKAGE_ORDER[: PACKAGE_ORDER.index(importer)]
        allowed = {importer} | RESTRICTED.get(importer, set(earlier))
        for line, dotted in package_imports(path, package):
            if package_of(dotted) not in allowed:
                violations.append(f"{name}:{line}: {importer} may not import {dotted}")
    return violations


def import_cycles(package: Path) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, also inside functions or only for types."""
    names = {
        path: ".".join([package.name, *path.relative_to(package).with_suffix("").parts]) for path in modules(package)
    }
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    known = set(names.values())
    imports = {
        name: {d if d in known else d.rpartition(".")[0] for _, d in package_imports(path, package)} & known
        for path, name in names.items()
    }
    reachable = {name: set(targets) for name, targets in imports.items()}
    for middle in reachable:  # Warshall's transitive closure
        for targets in reachable.values():
            if middle in targets:
                targets |= reachable[middle]
    groups = {
        frozenset(other for other in targets if name in reachable[other])
        for name, targets in reachable.items()
        if name in targets
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def long_files(*folders: Path) -> list[str]:
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for f in folders for path in modules(f)}
    return [f"{path}: {count} lines" for path, count in counts.items() if count > MAX_LINES]


def modules_without_docstring(package: Path) -> list[str]:
    return [str(p) for p in modules(package) if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]


def utils_files(*folders: Path) -> list[str]:
    """Files called utils.py or util.py, a name that does not say what they hold."""
    return [str(p) for f in folders for p in modules(f) if p.stem in ("utils", "util")]


def shared_file_names(package: Path) -> dict[str, set[str]]:
    """File names that occur in more than one package -> those packages. Every package has an __init__.py."""
    packages: dict[str, set[str]] = {}
    for path in modules(package):
        packages.setdefault(path.name, set()).add(path.relative_to(package).parent.as_posix())
    return {name: where for name, where in packages.items() if len(where) > 1 and name != "__init__.py"}


def test_imports_follow_the_package_order():
    assert import_violations(PACKAGE) == []


def test_no_modules_import_each_other():
    assert import_cycles(PACKAGE) == []


def test_files_are_short():
    assert long_files(PACKAGE, ROOT / "tests") == []


def test_every_module_has_a_docstring():
    assert modules_without_docstring(PACKAGE) == []


def test_no_file_is_called_utils():
    assert utils_files(PACKAGE, ROOT / "tests") == []


def test_file_names_are_unique_except_those_listed():
    assert shared_file_names(PACKAGE) == SHARED_FILE_NAMES


def test_these_tests_read_the_package():
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
        ("models/vit.py", "from .. import training"),
        ("models/vit.py", "from ..training.loop import fit"),
        ("models/__init__.py", "from ..training import fit"),
        ("models/vit.py", "def late():\n    from vitrail.training import fit"),
        ("models/vit.py", "if TYPE_CHECKING:\n    from vitrail.training import fit"),
        ("models/vit.py", "importlib.import_module('vitrail.training')"),
        ("errors.py", "from vitrail.config import Config"),
        ("config/base.py", "from vitrail.recipes import digits"),
        ("recipes/digits.py", "from vitrail.errors import ConfigError"),
        ("recipes/digits.py", "from vitrail.models import ViT"),
        ("__init__.py", "from vitrail.cli import main"),
        ("model.py", "from vitrail import __version__"),
        ("bench/run.py", "from vitrail.cli import main"),
        ("helpers.py", "import os"),
        ("helpers/more.py", "import os"),
    ],
)
def test_an_import_against_the_order_is_reported(package: Path, file: str, line: str):
    (package / file).parent.mkdir(parents=True)
    (package / file).write_text(line)
    assert len(import_violations(package)) == 1


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
        ("training/loop.py", "from vitrail.recipes import digits"),
        ("__init__.py", "from vitrail.open_model import load"),
        ("cli/__init__.py", "from vitrail import __version__"),
        ("__main__.py", "from vitrail.cli import main"),
    ],
)
def test_an_import_in_order_is_allowed(package: Path, file: str, line: str):
    (package / file).parent.mkdir(parents=True)
    (package / file).write_text(line)
    assert import_violations(package) == []


def test_modules_that_import_each_other_are_reported(package: Path):
    files = {
        "errors.py": "",
        "models/__init__.py": "from vitrail.models import vit, layers",
        "models/vit.py": "from vitrail.models.layers import Block\nfrom vitrail import errors",
        "models/layers.py": "def late():\n    from vitrail.models.position import resample",
        "models/position.py": "import vitrail.models.vit",
    }
    for file, text in files.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
    assert import_cycles(package) == [["vitrail.models.layers", "vitrail.models.position", "vitrail.models.vit"]]
    (package / "models" / "position.py").write_text("from vitrail import errors")
    assert import_cycles(package) == []
    (package / "models" / "layers.py").write_text("if TYPE_CHECKING:\n    from vitrail.models.vit import ViT")
    assert import_cycles(package) == [["vitrail.models.layers", "vitrail.models.vit"]]


def test_a_long_file_is_reported(package: Path):
    package.mkdir()
    (package / "api.py").write_text("x = 1\n" * MAX_LINES)
    assert long_files(package) == []
    (package / "api.py").write_text("x = 1\n" * (MAX_LINES + 1))
    assert len(long_files(package)) == 1


def test_a_module_without_a_docstring_is_reported(package: Path):
    package.mkdir()
    (package / "api.py").write_text('"""The public functions."""')
    assert modules_without_docstring(package) == []
    (package / "__init__.py").write_text("")
    (package / "runtime.py").write_text("# a comment is not a docstring\nimport os\n")
    assert len(modules_without_docstring(package)) == 2


def test_a_file_called_utils_is_reported(package: Path):
    (package / "models").mkdir(parents=True)
    (package / "models" / "utils.py").write_text("")
    assert len(utils_files(package)) == 1


def test_a_file_name_that_occurs_twice_is_reported(package: Path):
    for file in ("models/hub.py", "weights/hub.py", "weights/names.py", "models/__init__.py", "weights/__init__.py"):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("")
    assert shared_file_names(package) == {"hub.py": {"models", "weights"}}
