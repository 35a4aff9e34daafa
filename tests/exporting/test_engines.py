"""Inference engines: same outputs, concurrent calls, `--engine auto`, the cache, and OpenVINO's ISA limit."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

import vitrail
from vitrail.engines import export_metadata, openvino_engine
from vitrail.engines.engine import open_file
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.errors import CheckpointError, ConfigError
from vitrail.exporting import autotune, compare, engine_cache
from vitrail.exporting.compare import Environment
from vitrail.exporting.exporter import export
from vitrail.exporting.open_engine import open_engine
from vitrail.runtime import amx
from vitrail.runtime.cpu import CpuInfo


def test_torch_is_the_default_and_returns_the_logits_of_the_network(tiny, images):
    engine = open_engine(tiny, device="cpu")
    assert (engine.name, engine.precision, engine.info) == ("torch", "float32", tiny.info)
    np.testing.assert_allclose(engine.logits(np.stack(images)), tiny._run(images, "logits"), atol=1e-6)


def test_open_engine_loads_a_checkpoint_from_a_path(tiny, torch_engine, images, tmp_path):
    tiny.save(tmp_path / "tiny")
    batch = np.stack(images)
    np.testing.assert_array_equal(
        open_engine(tmp_path / "tiny", device="cpu").logits(batch), torch_engine.logits(batch)
    )


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_probabilities_of_a_file_are_converted_to_logits_with_the_same_softmax(onnx_file, torch_engine, images, engine):
    batch = np.stack(images)
    opened = open_engine(onnx_file.path, engine)
    probabilities, expected = (
        np.exp(x - x.max(1, keepdims=True)) for x in (opened.logits(batch), torch_engine.logits(batch))
    )
    np.testing.assert_allclose(probabilities, expected, rtol=1e-4)
    assert (opened.name, opened.precision) == (engine, "float32")


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_concurrent_calls_return_the_outputs_of_their_own_images(onnx_file, torch_engine, images, engine):
    opened = open_engine(onnx_file.path, engine)
    expected = opened.logits(np.stack(images))
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(opened.logits, images[i % 12][None]) for i in range(120)]
        for i, job in enumerate(jobs):
            np.testing.assert_allclose(job.result()[0], expected[i % 12], atol=1e-4)


@pytest.mark.parametrize(
    ("engine", "message"),
    [("torch", "run by onnxruntime or openvino, not by torch"), ("tensorrt", "unknown engine 'tensorrt'")],
)
def test_an_engine_that_cannot_run_the_file_is_refused(onnx_file, engine, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(onnx_file.path, engine)


def test_zero_threads_are_refused(tiny):
    with pytest.raises(ConfigError, match="threads=0"):
        open_engine(tiny, threads=0)


def test_auto_selects_the_fastest_engine_and_caches_the_choice(tiny, torch_engine, images, monkeypatch, caplog):
    speeds = {"torch": 50.0, "onnxruntime": 120.0, "openvino": 80.0}
    monkeypatch.setattr(autotune, "measure_throughput", lambda engine, batch, seconds: speeds[engine.name])
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("onnxruntime", "float32")])
    engine = open_engine(tiny, "auto", device="cpu")
    assert (engine.name, engine.precision) == ("onnxruntime", "float32")
    assert "selected onnxruntime in float32: 120 images/s (torch 50)" in caplog.text
    batch = np.stack(images)
    np.testing.assert_allclose(engine.logits(batch), torch_engine.logits(batch), atol=1e-4)
    monkeypatch.setattr(autotune, "_benchmark_candidates", None)  # must not run again
    assert open_engine(tiny, "auto", device="cpu").name == "onnxruntime"
    assert open_engine(tiny, "onnxruntime", device="cpu").name == "onnxruntime"  # its file is cached, too
    assert "cached in" in caplog.text
    [choice] = Path(os.environ["VITRAIL_ENGINES"]).glob("*/choice-*.json")
    assert json.loads(choice.read_text())["images_per_second"] == {"torch float32": 50, "onnxruntime float32": 120}


def test_the_choice_of_auto_is_cached_per_cpu_and_isa_limit(tiny, monkeypatch):
    benchmarks_run = []
    benchmark = {"engine": "torch", "precision": "float32", "images_per_second": {"torch float32": 1.0}, "refused": {}}
    monkeypatch.setattr(autotune, "_benchmark_candidates", lambda *arguments: benchmarks_run.append(1) or benchmark)
    cpus = [CpuInfo("a", "x86_64", features, ()) for features in (("avx2",), ("avx2", "avx_vnni"))]
    cpus += [CpuInfo("b", "x86_64", ("avx2",), ()), CpuInfo("a", "aarch64", ("avx2",), ())]
    for _ in range(2):  # the second time, all choices are cached
        for cpu in cpus:
            monkeypatch.setattr(autotune, "detect_cpu", lambda cpu=cpu: cpu)
            open_engine(tiny, "auto", device="cpu")
        assert len(benchmarks_run) == len(cpus)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    open_engine(tiny, "auto", device="cpu")
    assert len(benchmarks_run) == len(cpus) + 1


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_int8_file_of_an_older_version_warns_on_a_cpu_without_vnni(int8_file, engine, tmp_path, monkeypatch, caplog):
    model = onnx.load(str(int8_file.path))
    [entry] = [entry for entry in model.metadata_props if entry.key == "vitrail"]
    metadata = json.loads(entry.value)
    assert metadata.pop("saturates_without_vnni") is False
    entry.value = json.dumps(metadata)
    onnx.save(model, str(tmp_path / "old.onnx"))
    for instructions in ((), ("AVX2", "AVX-512"), ("AVX2", "AVX-VNNI"), ("AVX2", "AVX-512", "AVX-512 VNNI")):
        monkeypatch.setattr("vitrail.runtime.notes._logged", set())
        monkeypatch.setattr(
            export_metadata, "detect_cpu", lambda instructions=instructions: CpuInfo("a", "x86_64", (), instructions)
        )
        caplog.clear()
        open_file(int8_file.path, engine)
        assert not caplog.text  # current files do not saturate on any CPU
        open_file(tmp_path / "old.onnx", engine)
        assert ("export the model again" in caplog.text) == (not any("VNNI" in name for name in instructions))


def test_dynamic_int8_in_openvino_does_not_warn_on_a_cpu_without_vnni(tiny, images, tmp_path, monkeypatch, caplog):
    metadata = ExportMetadata(
        info=tiny.info, to="openvino", precision="int8", saturates=True
    )  # as if the file did not state it
    result = export(tiny.net, metadata, tmp_path / "old.xml", images, timed=False)
    monkeypatch.setattr(export_metadata, "detect_cpu", lambda: CpuInfo("a", "x86_64", (), ("AVX2",)))
    open_file(result.path)
    assert "export the model again" not in caplog.text


def test_auto_selects_torch_if_all_other_exports_fail(tiny, monkeypatch, caplog):
    def fail(*arguments: object, **options: object) -> None:
        raise CheckpointError("float32.xml does not match the model: its logits differ.")

    monkeypatch.setattr(engine_cache, "export", fail)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "excluded, with different outputs or an error" in caplog.text


def test_auto_selects_torch_if_no_other_engine_is_installed(tiny, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "is_installed", lambda name: False)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "pip install 'vitrail[export]'" in caplog.text


def test_auto_excludes_engines_with_a_larger_error_than_allowed(tiny, monkeypatch, caplog):
    monkeypatch.setattr(
        autotune, "measure_throughput", lambda engine, batch, seconds: 1.0 if engine.name == "torch" else 9.0
    )
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("openvino", "int8")])
    assert open_engine(tiny, "auto", device="cpu").precision == "int8"
    assert "compared with float32" in caplog.text
    for choice in Path(os.environ["VITRAIL_ENGINES"]).glob("*/choice-*.json"):
        choice.unlink()
    monkeypatch.setitem(autotune.MAX_ERROR, "int8", 1e-9)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "1 excluded" in caplog.text


def test_int8_needs_calibration_images_only_in_onnxruntime():
    assert [c for c in autotune.candidates(False) if c[1] == "int8"] == [("openvino", "int8")]
    assert [c for c in autotune.candidates(True) if c[1] == "int8"] == [("onnxruntime", "int8"), ("openvino", "int8")]


def test_cache_key_depends_on_the_model_but_not_on_origin_and_labels(tiny):
    key = engine_cache.cache_key(tiny.net, tiny.info)
    assert key == engine_cache.cache_key(tiny.net, tiny.info.replace(origin="elsewhere", labels=None))
    assert key != engine_cache.cache_key(tiny.net, tiny.info.replace(multi_label=True))
    assert key != engine_cache.cache_key(tiny.net.with_classes(5), tiny.info)


def test_cache_key_depends_on_the_cache_version(tiny, monkeypatch):
    key = engine_cache.cache_key(tiny.net, tiny.info)
    monkeypatch.setattr(engine_cache, "CACHE_VERSION", engine_cache.CACHE_VERSION - 1)
    assert key != engine_cache.cache_key(tiny.net, tiny.info)


def test_a_cached_file_has_the_labels_of_the_given_model_info(tiny):
    first = engine_cache.cached_engine(tiny.net, tiny.info, "onnxruntime")
    labels = tuple(f"other {i}" for i in range(tiny.config.num_classes))
    second = engine_cache.cached_engine(tiny.net, tiny.info.replace(labels=labels), "onnxruntime")
    assert (first.info.labels, second.info.labels) == (tiny.info.labels, labels)


@pytest.mark.parametrize(("engine", "name"), [("onnxruntime", "float32.onnx"), ("openvino", "float32.bin")])
@pytest.mark.parametrize("damage", ["truncated", "modified"])
def test_a_damaged_cached_file_is_exported_again(tiny, torch_engine, images, engine, name, damage):
    engine_cache.cached_engine(tiny.net, tiny.info, engine)
    path = engine_cache.cache_folder(tiny.net, tiny.info) / name
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:1000] if damage == "truncated" else data[:middle] + bytes(64) + data[middle + 64 :])
    reopened = open_engine(tiny, engine, device="cpu")
    np.testing.assert_allclose(reopened.logits(np.stack(images)), torch_engine.logits(np.stack(images)), atol=1e-4)


def test_auto_compares_a_bfloat16_model_with_its_float32_outputs(tiny, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("onnxruntime", "float32")])
    monkeypatch.setattr(
        autotune, "measure_throughput", lambda engine, batch, seconds: 1.0 if engine.name == "torch" else 2.0
    )
    bfloat16_model = vitrail.Model(tiny.net.rebuild(tiny.net.config, {}).to(torch.bfloat16), tiny.info)
    assert open_engine(bfloat16_model, "auto", device="cpu").name == "onnxruntime"
    assert "excluded" not in caplog.text


def test_auto_on_an_unreadable_file_raises_one_error(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read as ONNX"):
        open_engine(tmp_path / "bad.onnx", "auto")


def test_an_interrupted_call_leaves_the_engine_usable(onnx_file, torch_engine, images, monkeypatch):
    opened = open_engine(onnx_file.path, "openvino", concurrency=2, threads=2)
    batch = np.stack(images)
    expected = opened.logits(batch)

    def interrupt(request: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(openvino_engine, "_wait_for_output", interrupt)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                opened.logits(batch)
    np.testing.assert_allclose(opened.logits(batch), expected, atol=1e-6)


def test_engines_run_without_a_writable_cache(tiny, images, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("VITRAIL_ENGINES", str(tmp_path / "file"))
    assert open_engine(tiny, "onnxruntime", device="cpu").logits(np.stack(images)).shape == (
        12,
        tiny.config.num_classes,
    )
    assert "are not cached" in caplog.text


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit files to 1,000 bytes, as if all disks were full, including /tmp."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    monkeypatch.setattr(engine_cache, "_temporary_cache", lambda: SimpleNamespace(name=str(tmp_path / "now")))
    monkeypatch.setattr(engine_cache, "_FULL_CACHES", set())
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.usefixtures("full_disk")
def test_a_named_engine_raises_one_error_if_all_disks_are_full(tiny, engine):
    with pytest.raises(CheckpointError, match=r"has no space for the files of \w+; set VITRAIL_ENGINES or TMPDIR"):
        open_engine(tiny, engine, device="cpu")


@pytest.mark.usefixtures("full_disk")
def test_auto_runs_on_full_disks_and_does_not_cache_its_choice(tiny, images, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("onnxruntime", "float32")])
    assert open_engine(tiny, "auto", device="cpu").logits(np.stack(images)).shape == (12, tiny.config.num_classes)
    assert "disk full: exported engines are not cached" in caplog.text
    assert not list(Path(os.environ["VITRAIL_ENGINES"]).rglob("choice-*.json"))


def test_a_full_disk_under_the_cache_does_not_stop_an_engine(tiny, images, monkeypatch, caplog):
    cache, export, has_space = Path(os.environ["VITRAIL_ENGINES"]), engine_cache.export, engine_cache._has_space

    def raise_disk_full(net: object, metadata: object, path: Path, *arguments: object, **options: object) -> object:
        if path.is_relative_to(cache):
            raise OSError(errno.ENOSPC, "No space left on device")
        return export(net, metadata, path, *arguments, **options)

    monkeypatch.setattr(engine_cache, "export", raise_disk_full)
    monkeypatch.setattr(
        engine_cache, "_has_space", lambda folder, count: not folder.is_relative_to(cache) and has_space(folder, 1)
    )
    monkeypatch.setattr(engine_cache, "_FULL_CACHES", set())
    opened = open_engine(tiny, "onnxruntime", device="cpu")
    assert (opened.name, opened.logits(np.stack(images)).shape) == ("onnxruntime", (12, tiny.config.num_classes))
    assert f"{cache}: disk full: exported engines are not cached" in caplog.text
    assert not list(cache.rglob("*.onnx"))


def test_openvino_files_are_converted_from_a_cached_onnx_file(tiny, monkeypatch):
    engine_cache.cached_engine(tiny.net, tiny.info, "onnxruntime")
    monkeypatch.setattr("vitrail.exporting.exporter.trace", None)  # must not run again
    assert engine_cache.cached_engine(tiny.net, tiny.info, "openvino").precision == "float32"


def test_auto_selects_the_fastest_engine_for_an_onnx_file(onnx_file, monkeypatch, caplog):
    monkeypatch.setattr(
        autotune,
        "measure_throughput",
        lambda engine, batch, seconds: {"onnxruntime": 20.0, "openvino": 30.0}[engine.name],
    )
    assert open_engine(onnx_file.path, "auto").name == "openvino"
    assert "selected openvino in float32: 30 images/s (onnxruntime 20)" in caplog.text
    assert open_engine(onnx_file.path).name == "onnxruntime"  # in which it was compared with the model


def test_a_fixed_batch_is_not_split(openvino_file, torch_engine, images):
    batch = np.stack(images[:7])
    for concurrency in (1, 2):
        opened = open_engine(openvino_file.path, threads=2, concurrency=concurrency)
        np.testing.assert_allclose(opened.logits(batch), torch_engine.logits(batch), atol=1e-4)


def test_an_engine_that_gives_different_outputs_for_a_file_is_refused(onnx_file, monkeypatch):
    monkeypatch.setitem(compare.TOLERANCE, "float32", -1)
    with pytest.raises(CheckpointError, match=r"openvino gives different outputs for .* than onnxruntime"):
        open_engine(onnx_file.path, "openvino")


@pytest.mark.parametrize("engine", ["torch", "onnxruntime", "openvino"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_batch_split_among_cores_returns_each_image_in_its_row(tiny, torch_engine, images, engine, concurrency):
    threads = torch.get_num_threads()
    opened = open_engine(tiny, engine, device="cpu", threads=3, concurrency=concurrency)
    try:
        for count in (12, 1, 5, 2):
            batch = np.stack(images[:count])
            np.testing.assert_allclose(opened.logits(batch), torch_engine.logits(batch), atol=1e-4)
        with ThreadPoolExecutor(6) as pool:  # more callers than `concurrency`, various batch sizes
            jobs = [(i, 1 + i % 5, pool.submit(opened.logits, np.stack(images[: 1 + i % 5]))) for i in range(40)]
            expected = torch_engine.logits(np.stack(images))
            for _, count, job in jobs:
                np.testing.assert_allclose(job.result(), expected[:count], atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_openvino_avoids_broken_amx_even_if_torch_has_already_started(monkeypatch):
    def too_late() -> None:
        raise ConfigError("products in bfloat16 fail with an illegal instruction")

    monkeypatch.setattr(openvino_engine, "disable_broken_amx", too_late)
    monkeypatch.setenv(amx.ISA_VARIABLE, "")
    monkeypatch.delenv(amx.ISA_VARIABLE)
    openvino_engine.openvino_core()
    assert os.environ[amx.ISA_VARIABLE] == amx.WITHOUT_AMX


AVX512 = ("AVX2", "AVX-512")


@pytest.mark.parametrize(
    ("env_limit", "instructions", "openvino_limit"),
    [
        ("AVX2", AVX512, amx.WITHOUT_AMX),
        ("avx2_vnni", AVX512, amx.WITHOUT_AMX),
        ("AVX512_CORE", AVX512, "AVX512_CORE"),
        ("AVX2", ("AVX2",), "AVX2"),
    ],
)
def test_openvino_starts_with_an_isa_limit_that_all_its_kernels_respect(
    env_limit, instructions, openvino_limit, monkeypatch
):
    limits = []
    monkeypatch.setenv(amx.ISA_VARIABLE, env_limit)
    monkeypatch.setattr(openvino_engine, "detect_cpu", lambda: CpuInfo("a", "x86_64", (), instructions))
    core = SimpleNamespace(compile_model=lambda *arguments: limits.append(os.environ[amx.ISA_VARIABLE]))
    monkeypatch.setattr("openvino.Core", lambda: core)
    openvino_engine._start_openvino.__wrapped__()
    assert limits == ([openvino_limit] if openvino_limit != env_limit else [])
    assert os.environ[amx.ISA_VARIABLE] == env_limit  # for torch and for child processes
    assert (Environment.detect("openvino").isa_limit, Environment.detect("torch").isa_limit) == (
        openvino_limit,
        env_limit,
    )


@pytest.mark.slow
def test_openvino_runs_with_an_isa_limit_below_avx512(tiny, images, tmp_path):
    metadata = ExportMetadata(info=tiny.info, to="openvino", precision="int8")
    result = export(tiny.net, metadata, tmp_path / "tiny.xml", images, timed=False)
    np.save(tmp_path / "pixels.npy", np.stack(images))
    code = (
        "import sys, numpy; from pathlib import Path; from vitrail.engines.engine import open_file; "
        "print(open_file(Path(sys.argv[1])).outputs(numpy.load(sys.argv[2])).shape)"
    )
    command = [sys.executable, "-c", code, result.path, tmp_path / "pixels.npy"]
    environment = os.environ | {amx.ISA_VARIABLE: "AVX2"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "(12, 5)\n"), process.stderr
