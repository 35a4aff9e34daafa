"""Exported files and other engines: same responses, and errors for what they cannot compute."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import need_extra
from exports import export_quickly
from serving import photo, run_server
from small_models import gradient, model, small

import vitrail
from vitrail.cli import main
from vitrail.cli.serve import load_served_model
from vitrail.engines.engine import FileEngine
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.exporting import formats
from vitrail.exporting.export_model import export
from vitrail.exporting.open_engine import open_engine
from vitrail.serve.served_model import ServedModel


@pytest.fixture(autouse=True, scope="module")
def _quick_exports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch_context:
        export_quickly(patch_context)
        yield


@pytest.fixture(scope="module")
def exported(vit: vitrail.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default output of `vitrail export`: pixels in, probabilities out."""
    need_extra("export")
    folder = tmp_path_factory.mktemp("exported")
    vit.save(folder / "weights")
    assert main(["export", str(folder / "weights"), str(folder / "small.onnx")]) == 0
    return folder / "small.onnx"


FILES = {
    "weights.safetensors": "torch",
    "weights.pth": "torch",
    "served.pt2": "torch",
    "served.onnx": "onnxruntime",
    "beside.onnx": "onnxruntime",
    "served.xml": "openvino",
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_served_model_does_not_change_with_its_file(
    vit: vitrail.Model, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overwriting or truncating a file crashes a process that has it memory-mapped."""
    path, pixels = tmp_path / name, np.stack([vit.preprocess.pixels(gradient(40, 30))])
    if path.stem == "weights":
        vit.save(path, to="vitrail" if path.suffix == ".safetensors" else "facebook")
    else:
        need_extra("export")
        monkeypatch.setattr(formats, "MAX_ONNX_BYTES", 1000 if path.stem == "beside" else formats.MAX_ONNX_BYTES)
        export(vit, path)
    served = load_served_model(str(path), None, 1)
    expected = served.engine.logits(pixels)
    assert served.engine.name == FILES[name]
    if Path("/proc/self/maps").exists():
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    for part in tmp_path.iterdir():
        with part.open("r+b") as file:
            file.write(bytes(part.stat().st_size))
    assert (served.engine.logits(pixels) == expected).all()
    for part in tmp_path.iterdir():
        os.truncate(part, 0)
    assert (served.engine.logits(pixels) == expected).all()
    if served.model is not None:
        assert np.isfinite(served.outputs(pixels, "features")).all()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_exported_file_predicts_and_explains_what_is_unsupported(
    vit: vitrail.Model, exported: Path, engine: str
) -> None:
    with run_server(ServedModel(open_engine(exported, engine, threads=1), name="small")) as (client, _):
        model_info = client.get("/v1/model").json()
        assert (model_info["engine"], model_info["has_attention"], model_info["methods"]) == (engine, False, [])
        assert model_info["grid"] == {"rows": 4, "columns": 4}
        assert model_info["num_parameters"] == sum(p.numel() for p in vit.net.parameters())
        files = [("images", photo(i)) for i in range(5)]
        results = client.post("/v1/predict", files=files).json()["results"]
        for result, expected in zip(results, vit.predict([data for _, data in files]), strict=True):
            assert [p["index"] for p in result["predictions"]] == [p.index for p in expected]
            assert [p["score"] for p in result["predictions"]] == pytest.approx([p.score for p in expected], abs=1e-4)
        hidden = client.post("/v1/predict", files=files[:1], data={"hide": "[0,1,2,3]", "fill": "zero"})
        assert hidden.json()["results"] != results[:1]
        reasons = {"embed": "has no features", "explain": "has no explanations"}
        for path, code in (("embed", "no_features"), ("explain", "exported_model")):
            refused = client.post(f"/v1/{path}", files=files[:1])
            assert (refused.status_code, refused.json()["error"]["code"]) == (501, code)
            message = f"an exported file {reasons[path]}; serve the checkpoint it was made from."
            assert refused.json()["error"]["message"] == message
        assert client.get("/v1/positions").status_code == 404


def test_an_engine_with_its_network_supports_explanations(vit: vitrail.Model, exported: Path) -> None:
    with run_server(ServedModel(open_engine(exported, threads=1), vit, name="small")) as (client, _):
        assert client.get("/v1/model").json()["engine"] == "onnxruntime"
        response = client.post("/v1/explain", files={"image": photo()})
        assert response.status_code == 200
        assert response.json()["layers"] == [1, 2]
        assert client.post("/v1/embed", files={"image": photo()}).json()["dimension"] == 128


def test_an_exported_file_without_a_parameter_count_is_served(exported: Path) -> None:
    engine = open_engine(exported, threads=1)
    assert isinstance(engine, FileEngine)
    metadata = engine.metadata.to_dict()
    del metadata["parameters"]
    engine.metadata = ExportMetadata.from_json(json.dumps(metadata))
    assert ServedModel(engine, name="small").num_parameters is None


def test_an_exported_file_of_features_embeds_without_the_hidden_patches(tmp_path: Path) -> None:
    vit = model(small(num_classes=0), task="embed")
    path = export(vit, tmp_path / "features.pt2", to="pt2").path
    with run_server(ServedModel(open_engine(path, threads=1), name="small")) as (client, _):
        plain = client.post("/v1/embed", files={"image": photo()}).json()["results"][0]["embedding"]
        assert plain == pytest.approx(vit.embed(photo())[0].tolist(), abs=1e-4)
        hidden = client.post("/v1/embed", files={"image": photo()}, data={"hide": "[0,1,2,3]", "fill": "zero"})
        image = vit.preprocess.prepare(photo())
        image[:, :8] = 0
        with torch.no_grad():
            expected = vit.net.features(image[None], outputs="pooled").pooled
        assert hidden.json()["results"][0]["embedding"] == pytest.approx(expected[0].tolist(), abs=0.02)
        assert hidden.json()["results"][0]["embedding"] != pytest.approx(plain, abs=0.02)
        assert client.get("/v1/model").json()["task"] == "embed"
