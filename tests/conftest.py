"""Shared setup: no network, fixed seeds, a share of the cores for each worker, real data, peer packages."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# The packages read these variables when they are first imported, so they are set before the imports.
CORES = os.cpu_count() or 1
THREADS = max(1, CORES // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
HUB_CACHE = tempfile.mkdtemp(prefix="vitrail-hub-")  # empty: tests must not depend on downloaded files
atexit.register(shutil.rmtree, HUB_CACHE, ignore_errors=True)
for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(variable, None)
os.environ["HF_HOME"] = HUB_CACHE

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from small_models import gradient, model, small  # noqa: E402

import vitrail  # noqa: E402

# Some machines report AMX and crash when it is used; AVX512_CORE_BF16 is enough for bfloat16 products.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A background process may ignore SIGINT and its children inherit that, but some tests interrupt commands.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("vitrail", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("vitrail")
torch.set_num_threads(THREADS)


def _declare_torchvision_operators() -> torch.library.Library | None:
    """Declare the operators that importing torchvision requires, if its own library does not load.

    Its wheels are built for CUDA: with a CPU-only torch the library does not load, and importing
    torchvision (and so timm) fails. Networks do not use these operators.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return operators
    return None


TORCHVISION_OPERATORS = _declare_torchvision_operators()  # the declarations live as long as this object


def import_peer(name: str) -> ModuleType:
    """Import another package to compare with, or skip the test or file: `timm = import_peer("timm")`."""
    return pytest.importorskip(name, reason=f"{name} is not installed; make test installs it")


EXTRAS = {
    "cloud": ("fsspec", "aiohttp", "s3fs"),
    "export": ("onnx", "onnxscript", "onnxruntime", "openvino"),
    "ray": ("ray",),
    "search": ("faiss",),
    "serve": ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "httptools"),
}


def need_extra(extra: str) -> None:
    """Skip the calling test or file if an extra is not installed: `need_extra("export")`."""
    for name in EXTRAS[extra]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'vitrail[{extra}]'", allow_module_level=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Set the same random state before every test."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _reset_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset vitrail's logging, which an earlier test may have silenced or redirected."""
    monkeypatch.setattr("vitrail.runtime.notes._logged", set())
    logger = logging.getLogger("vitrail")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers, logger.propagate = [], True


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout."""
    return _path_or_skip(ROOT.parent / "shared")


def golden(name: str) -> Path:
    """A file of weights, inputs or outputs made with the original code; the largest are beside the checkout."""
    for folder in (ROOT / "tests" / "golden", ROOT.parent / "shared" / "golden"):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"no {name}: it is too large for the repository")


@pytest.fixture(scope="session")
def real_checkpoint(shared: Path) -> Path:
    """A ViT-Ti/16 trained on ImageNet, with timm's tensor names."""
    return _path_or_skip(shared / "data" / "weights" / "vit_tiny_patch16_224.safetensors")


@pytest.fixture(scope="session")
def imagenet_val(shared: Path) -> Path:
    """One validation image of each ImageNet class, in tar shards."""
    return _path_or_skip(shared / "data" / "imagenet-val-1k")


@pytest.fixture(scope="module")
def vit() -> vitrail.Model:
    """A small classifier of five classes with random weights."""
    torch.manual_seed(0)
    return model(small())


@pytest.fixture(scope="module")
def model_folder(vit: vitrail.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that classifier, called `small`."""
    path = tmp_path_factory.mktemp("models") / "small"
    vit.save(path)
    return path


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    return gradient()


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip fsync and use one torch thread: faster for hundreds of small files and networks."""
    monkeypatch.setattr("vitrail.storage.atomic_write.fsync", lambda path: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_tmp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, for code that writes to the current folder."""
    monkeypatch.chdir(tmp_path)


def _path_or_skip(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"no {path.relative_to(ROOT.parent)} beside the checkout")
    return path
