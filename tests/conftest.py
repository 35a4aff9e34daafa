"""What all tests share: no network, one seed, a fair share of the cores, real data where it is there, the peers."""

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

# Read when these packages are first imported, so they are set before any of them is.
CORES = os.cpu_count() or 1
THREADS = max(1, CORES // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
HUB = tempfile.mkdtemp(prefix="vitrail-hub-")  # an empty cache: what someone has downloaded must not decide a test
atexit.register(shutil.rmtree, HUB, ignore_errors=True)
for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(variable, None)
os.environ["HF_HOME"] = HUB

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# Some machines say that they have AMX and die of using it; bfloat16 products need no more than this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Whoever is started in the background may be deaf to Ctrl-C, and so would be the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("vitrail", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("vitrail")
torch.set_num_threads(THREADS)


def _complete_torchvision() -> torch.library.Library | None:
    """Declare the operators torchvision's import asks for, where its own library does not load.

    Its wheels are built for CUDA; beside a CPU-only torch the library is not there and the import
    of torchvision, and so of timm, fails. Networks do not use these operators.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return declared
    return None


DECLARED = _complete_torchvision()  # the declarations live as long as this object


def import_peer(name: str) -> ModuleType:
    """Another package, to compare with: `timm = import_peer("timm")`; the test or file is skipped without it."""
    return pytest.importorskip(name, reason=f"{name} is not installed; make test installs it")


EXTRAS = {
    "cloud": ("fsspec", "aiohttp", "s3fs"),
    "export": ("onnx", "onnxscript", "onnxruntime", "openvino"),
    "serve": ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "httptools"),
}


def need_extra(extra: str) -> None:
    """Skip the test or file that calls this where an extra is not installed: `need_extra("export")`."""
    for name in EXTRAS[extra]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'vitrail[{extra}]'", allow_module_level=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test hears what vitrail says, whichever silenced or redirected it before."""
    monkeypatch.setattr("vitrail.runtime._logged", set())
    logger = logging.getLogger("vitrail")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers, logger.propagate = [], True


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout."""
    return _there(ROOT.parent / "shared")


def golden(name: str) -> Path:
    """A file of weights, inputs or outputs of the originals' own code; the largest lie beside the checkout."""
    for folder in (ROOT / "tests" / "golden", ROOT.parent / "shared" / "golden"):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"no {name}: it is too large for the repository")


@pytest.fixture(scope="session")
def real_checkpoint(shared: Path) -> Path:
    """A trained ViT-Ti/16 for ImageNet, with timm's names."""
    return _there(shared / "data" / "weights" / "vit_tiny_patch16_224.safetensors")


@pytest.fixture(scope="session")
def imagenet_val(shared: Path) -> Path:
    """One validation image of each ImageNet class, in tar shards."""
    return _there(shared / "data" / "imagenet-val-1k")


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For hundreds of small files and networks: nothing waits for the disk, or for a second core."""
    monkeypatch.setattr("vitrail.weights.writers.fsync", lambda path: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, for what writes where it stands."""
    monkeypatch.chdir(tmp_path)


def _there(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"no {path.relative_to(ROOT.parent)} beside the checkout")
    return path
