"""Small exported models, shared by the tests, since an export takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import need_extra
from exports import export_quickly
from small_models import gradient, model, small

import vitrail
from vitrail.engines.engine import TorchEngine
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.exporting.exporter import ExportResult, export


class ExportTestModule(pytest.Module):
    """A test file of this folder, skipped before its imports if the export extra is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        need_extra("export")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return ExportTestModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def _empty_engine_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty engine cache, so that tests do not depend on earlier exports."""
    monkeypatch.setenv("VITRAIL_ENGINES", str(tmp_path / "engines"))
    export_quickly(monkeypatch)


@pytest.fixture(scope="session")
def tiny() -> vitrail.Model:
    """A classifier with five classes and one block; its images are not square."""
    return model(small(image_size=(32, 48), width=32, depth=1, mlp_dim=48))


@pytest.fixture(scope="session")
def images(tiny: vitrail.Model) -> list[np.ndarray[Any, Any]]:
    """Twelve preprocessed images, each H W C."""
    return [tiny.preprocess.pixels(gradient(40 + 3 * i, 90 - 4 * i).rotate(30 * i)) for i in range(12)]


@pytest.fixture(scope="session")
def torch_engine(tiny: vitrail.Model) -> TorchEngine:
    return TorchEngine(tiny.net, tiny.info)


@pytest.fixture(scope="session")
def onnx_file(tiny: vitrail.Model, images: list[Any], tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """ONNX, float32: pixels to probabilities, any batch size."""
    metadata = ExportMetadata(info=tiny.info, to="onnx", output_type="probabilities")
    return export(tiny.net, metadata, tmp_path_factory.mktemp("exported") / "tiny.onnx", images)


@pytest.fixture(scope="session")
def int8_file(tiny: vitrail.Model, images: list[Any], tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """ONNX, static int8: pixels to logits, any batch size."""
    metadata = ExportMetadata(info=tiny.info, to="onnx", precision="int8", output_type="logits")
    path = tmp_path_factory.mktemp("exported") / "tiny.onnx"
    return export(tiny.net, metadata, path, images, calibration=images, timed=False)


@pytest.fixture(scope="session")
def openvino_file(tiny: vitrail.Model, images: list[Any], tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """OpenVINO, float32: normalized images to logits, batch size 3."""
    metadata = ExportMetadata(info=tiny.info, to="openvino", normalize_inside=False, batch_size=3)
    return export(tiny.net, metadata, tmp_path_factory.mktemp("exported") / "tiny.xml", images, timed=False)
