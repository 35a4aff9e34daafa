"""Engines: asked in the same way, from several threads, chosen for the user by what was measured."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

import vitrail
from vitrail.errors import CheckpointError, ConfigError
from vitrail.export import autotune, engine_cache, engines
from vitrail.export.compare import Environment
from vitrail.export.engines import open_engine, open_file
from vitrail.export.export_metadata import ExportMetadata
from vitrail.export.exporter import export
from vitrail.runtime import amx
from vitrail.runtime.cpu import CpuInfo


def test_torch_is_the_default_and_gives_the_networks_logits(tiny, images):
    engine = open_engine(tiny, device="cpu")
    assert (engine.name, engine.precision, engine.info) == ("torch", "float32", tiny.info)
    np.testing.assert_allclose(engine.logits(np.stack(images)), tiny._run(images, "logits"), atol=1e-6)


def test_a_checkpoint_by_its_path_is_opened(tiny, own, images, tmp_path):
    tiny.save(tmp_path / "tiny")
    batch = np.stack(images)
    np.testing.assert_array_equal(open_engine(tmp_path / "tiny", device="cpu").logits(batch), own.logits(batch))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_probabilities_come_back_as_logits_with_the_same_softmax(onnx_file, own, images, engine):
    batch = np.stack(images)
    opened = open_engine(onnx_file.path, engine)
    got, expected = (np.exp(x - x.max(1, keepdims=True)) for x in (opened.logits(batch), own.logits(batch)))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert (opened.name, opened.precision) == (engine, "float32")


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_threads_that_ask_at_once_get_their_own_answers(onnx_file, own, images, engine):
    opened = open_engine(onnx_file.path, engine)
    expected = opened.logits(np.stack(images))
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(opened.logits, images[i % 12][None]) for i in range(120)]
        for i, job in enumerate(jobs):
            np.testing.assert_allclose(job.result()[0], expected[i % 12], atol=1e-4)


@pytest.mark.parametrize(
    ("engine", "message"),
    [("torch", "run by onnxruntime or openvino, not by torch"), ("tensorrt", "no engine 'tensorrt'")],
)
def test_an_engine_that_cannot_is_refused(onnx_file, engine, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(onnx_file.path, engine)


def test_threads_are_counted_from_one(tiny):
    with pytest.raises(ConfigError, match="threads=0"):
        open_engine(tiny, threads=0)


def test_auto_takes_what_was_fastest_says_so_and_remembers(tiny, own, images, monkeypatch, caplog):
    speeds = {"torch": 50.0, "onnxruntime": 120.0, "openvino": 80.0}
    monkeypatch.setattr(autotune, "measure_throughput", lambda engine, batch, seconds: speeds[engine.name])
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("onnxruntime", "float32")])
    engine = open_engine(tiny, "auto", device="cpu")
    assert (engine.name, engine.precision) == ("onnxruntime", "float32")
    assert "takes onnxruntime in float32: 120 images a second (torch 50)" in caplog.text
    batch = np.stack(images)
    np.testing.assert_allclose(engine.logits(batch), own.logits(batch), atol=1e-4)
    monkeypatch.setattr(autotune, "_benchmark_candidates", None)  # not again
    assert open_engine(tiny, "auto", device="cpu").name == "onnxruntime"
    assert open_engine(tiny, "onnxruntime", device="cpu").name == "onnxruntime"  # the file is there, too
    assert "remembered in" in caplog.text
    [choice] = Path(os.environ["VITRAIL_ENGINES"]).glob("*/choice-*.json")
    assert json.loads(choice.read_text())["images_per_second"] == {"torch float32": 50, "onnxruntime float32": 120}


def test_a_choice_is_not_taken_over_by_another_cpu(tiny, monkeypatch):
    raced = []
    found = {"engine": "torch", "precision": "float32", "images_per_second": {"torch float32": 1.0}, "refused": {}}
    monkeypatch.setattr(autotune, "_benchmark_candidates", lambda *arguments: raced.append(1) or found)
    cpus = [CpuInfo("a", "x86_64", features, ()) for features in (("avx2",), ("avx2", "avx_vnni"))]
    cpus += [CpuInfo("b", "x86_64", ("avx2",), ()), CpuInfo("a", "aarch64", ("avx2",), ())]
    for _ in range(2):  # the second time all of them are remembered
        for one in cpus:
            monkeypatch.setattr(autotune, "detect_cpu", lambda one=one: one)
            open_engine(tiny, "auto", device="cpu")
        assert len(raced) == len(cpus)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    open_engine(tiny, "auto", device="cpu")
    assert len(raced) == len(cpus) + 1


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_int8_file_of_an_older_version_warns_on_a_cpu_without_vnni(int8_file, engine, tmp_path, monkeypatch, caplog):
    old = onnx.load(str(int8_file.path))
    [entry] = [entry for entry in old.metadata_props if entry.key == "vitrail"]
    said = json.loads(entry.value)
    assert said.pop("saturates_without_vnni") is False
    entry.value = json.dumps(said)
    onnx.save(old, str(tmp_path / "old.onnx"))
    for one in ((), ("AVX2", "AVX-512"), ("AVX2", "AVX-VNNI"), ("AVX2", "AVX-512", "AVX-512 VNNI")):
        monkeypatch.setattr("vitrail.runtime._logged", set())
        monkeypatch.setattr(engines, "detect_cpu", lambda one=one: CpuInfo("a", "x86_64", (), one))
        caplog.clear()
        open_file(int8_file.path, engine)
        assert not caplog.text  # what is written now holds everywhere
        open_file(tmp_path / "old.onnx", engine)
        assert ("export the model anew" in caplog.text) == (not any("VNNI" in name for name in one))


def test_openvinos_own_integers_hold_on_every_cpu(tiny, images, tmp_path, monkeypatch, caplog):
    metadata = ExportMetadata(
        info=tiny.info, to="openvino", precision="int8", saturates=True
    )  # as in a file that does not say
    made = export(tiny.net, metadata, tmp_path / "old.xml", images, timed=False)
    monkeypatch.setattr(engines, "detect_cpu", lambda: CpuInfo("a", "x86_64", (), ("AVX2",)))
    open_file(made.path)
    assert "export the model anew" not in caplog.text


def test_auto_takes_nothing_that_does_not_agree(tiny, monkeypatch, caplog):
    def disagrees(*arguments: object, **options: object) -> None:
        raise CheckpointError("float32.xml does not agree with the model: its logits are off.")

    monkeypatch.setattr(engine_cache, "export", disagrees)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "did not agree with the model" in caplog.text


def test_auto_without_other_engines_is_torch(tiny, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "is_installed", lambda name: False)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "pip install 'vitrail[export]'" in caplog.text


def test_auto_leaves_out_what_is_far_from_the_model(tiny, monkeypatch, caplog):
    monkeypatch.setattr(
        autotune, "measure_throughput", lambda engine, batch, seconds: 1.0 if engine.name == "torch" else 9.0
    )
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("openvino", "int8")])
    assert open_engine(tiny, "auto", device="cpu").precision == "int8"
    assert "differ from float32's by" in caplog.text
    for choice in Path(os.environ["VITRAIL_ENGINES"]).glob("*/choice-*.json"):
        choice.unlink()
    monkeypatch.setitem(autotune.MAX_ERROR, "int8", 1e-9)
    assert open_engine(tiny, "auto", device="cpu").name == "torch"
    assert "1 did not agree" in caplog.text


def test_int8_needs_images_in_onnx_alone():
    assert [c for c in autotune.candidates(False) if c[1] == "int8"] == [("openvino", "int8")]
    assert [c for c in autotune.candidates(True) if c[1] == "int8"] == [("onnxruntime", "int8"), ("openvino", "int8")]


def test_another_model_has_another_digest_and_other_names_do_not(tiny):
    plain = engine_cache.cache_key(tiny.net, tiny.info)
    assert plain == engine_cache.cache_key(tiny.net, tiny.info.replace(origin="elsewhere", labels=None))
    assert plain != engine_cache.cache_key(tiny.net, tiny.info.replace(multi_label=True))
    assert plain != engine_cache.cache_key(tiny.net.with_classes(5), tiny.info)


def test_files_that_were_written_another_way_are_not_taken_over(tiny, monkeypatch):
    now = engine_cache.cache_key(tiny.net, tiny.info)
    monkeypatch.setattr(engine_cache, "CACHE_VERSION", engine_cache.CACHE_VERSION - 1)
    assert now != engine_cache.cache_key(tiny.net, tiny.info)


def test_a_kept_file_has_the_names_of_the_card_at_hand(tiny):
    first = engine_cache.cached_engine(tiny.net, tiny.info, "onnxruntime")
    names = tuple(f"other {i}" for i in range(tiny.config.num_classes))
    again = engine_cache.cached_engine(tiny.net, tiny.info.replace(labels=names), "onnxruntime")
    assert (first.info.labels, again.info.labels) == (tiny.info.labels, names)


@pytest.mark.parametrize(("engine", "name"), [("onnxruntime", "float32.onnx"), ("openvino", "float32.bin")])
@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_damaged_kept_file_is_made_anew(tiny, own, images, engine, name, how):
    engine_cache.cached_engine(tiny.net, tiny.info, engine)
    path = engine_cache.cache_folder(tiny.net, tiny.info) / name
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:1000] if how == "cut" else data[:middle] + bytes(64) + data[middle + 64 :])
    again = open_engine(tiny, engine, device="cpu")
    np.testing.assert_allclose(again.logits(np.stack(images)), own.logits(np.stack(images)), atol=1e-4)


def test_threads_take_turns_too(tmp_path):
    inside: list[int] = []

    def work(number: int) -> None:
        with engine_cache.file_lock(tmp_path / "lock"):
            inside.append(number)
            assert len(inside) == 1
            time.sleep(0.01)
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


def test_a_model_in_bfloat16_is_held_against_float32(tiny, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("onnxruntime", "float32")])
    monkeypatch.setattr(
        autotune, "measure_throughput", lambda engine, batch, seconds: 1.0 if engine.name == "torch" else 2.0
    )
    rough = vitrail.Model(tiny.net.rebuild(tiny.net.config, {}).to(torch.bfloat16), tiny.info)
    assert open_engine(rough, "auto", device="cpu").name == "onnxruntime"
    assert "did not agree" not in caplog.text


def test_auto_on_a_file_that_nothing_reads_is_one_sentence(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read as ONNX"):
        open_engine(tmp_path / "bad.onnx", "auto")


def test_an_interrupted_call_leaves_the_engine_usable(onnx_file, own, images, monkeypatch):
    opened = open_engine(onnx_file.path, "openvino", concurrency=2, threads=2)
    batch = np.stack(images)
    expected = opened.logits(batch)

    def interrupted(request: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engines, "_wait_for_output", interrupted)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                opened.logits(batch)
    np.testing.assert_allclose(opened.logits(batch), expected, atol=1e-6)


def test_where_nothing_can_be_kept_engines_run_all_the_same(tiny, images, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("VITRAIL_ENGINES", str(tmp_path / "file"))
    assert open_engine(tiny, "onnxruntime", device="cpu").logits(np.stack(images)).shape == (
        12,
        tiny.config.num_classes,
    )
    assert "are not kept" in caplog.text


@pytest.fixture
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file may have more than 1,000 bytes, as on a disk that is full: /tmp too."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    monkeypatch.setattr(engine_cache, "_temporary_cache", lambda: SimpleNamespace(name=str(tmp_path / "now")))
    monkeypatch.setattr(engine_cache, "_FULL_CACHES", set())
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.usefixtures("small_files")
def test_where_every_disk_is_full_a_named_engine_is_one_error(tiny, engine):
    with pytest.raises(CheckpointError, match=r"has no room for the files of \w+; try VITRAIL_ENGINES or TMPDIR"):
        open_engine(tiny, engine, device="cpu")


@pytest.mark.usefixtures("small_files")
def test_where_every_disk_is_full_auto_goes_on_and_does_not_remember_why(tiny, images, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "candidates", lambda calibrated: [("onnxruntime", "float32")])
    assert open_engine(tiny, "auto", device="cpu").logits(np.stack(images)).shape == (12, tiny.config.num_classes)
    assert "there is no room: engines' files are not kept" in caplog.text
    assert not list(Path(os.environ["VITRAIL_ENGINES"]).rglob("choice-*.json"))


def test_a_full_disk_under_the_cache_does_not_stop_an_engine(tiny, images, monkeypatch, caplog):
    cache, whole, room = Path(os.environ["VITRAIL_ENGINES"]), engine_cache.export, engine_cache._has_room

    def full(net: object, metadata: object, path: Path, *arguments: object, **options: object) -> object:
        if path.is_relative_to(cache):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(net, metadata, path, *arguments, **options)

    monkeypatch.setattr(engine_cache, "export", full)
    monkeypatch.setattr(
        engine_cache, "_has_room", lambda folder, count: not folder.is_relative_to(cache) and room(folder, 1)
    )
    monkeypatch.setattr(engine_cache, "_FULL_CACHES", set())
    found = open_engine(tiny, "onnxruntime", device="cpu")
    assert (found.name, found.logits(np.stack(images)).shape) == ("onnxruntime", (12, tiny.config.num_classes))
    assert f"{cache}: there is no room: engines' files are not kept" in caplog.text
    assert not list(cache.rglob("*.onnx"))


def test_openvinos_files_are_made_from_the_onnx_that_is_there(tiny, monkeypatch):
    engine_cache.cached_engine(tiny.net, tiny.info, "onnxruntime")
    monkeypatch.setattr("vitrail.export.exporter.trace", None)  # not again
    assert engine_cache.cached_engine(tiny.net, tiny.info, "openvino").precision == "float32"


def test_auto_tries_both_engines_of_an_onnx_file_and_says_which(onnx_file, monkeypatch, caplog):
    monkeypatch.setattr(
        autotune,
        "measure_throughput",
        lambda engine, batch, seconds: {"onnxruntime": 20.0, "openvino": 30.0}[engine.name],
    )
    assert open_engine(onnx_file.path, "auto").name == "openvino"
    assert "takes openvino in float32: 30 images a second (onnxruntime 20)" in caplog.text
    assert open_engine(onnx_file.path).name == "onnxruntime"  # which it was compared in


def test_a_fixed_batch_is_never_parted(openvino_file, own, images):
    batch = np.stack(images[:7])
    for concurrency in (1, 2):
        opened = open_engine(openvino_file.path, threads=2, concurrency=concurrency)
        np.testing.assert_allclose(opened.logits(batch), own.logits(batch), atol=1e-4)


def test_an_engine_that_makes_something_else_of_a_file_is_refused(onnx_file, monkeypatch):
    monkeypatch.setitem(autotune.TOLERANCE, "float32", -1)
    with pytest.raises(CheckpointError, match=r"openvino gives other outputs for .* than onnxruntime"):
        open_engine(onnx_file.path, "openvino")


@pytest.mark.parametrize("engine", ["torch", "onnxruntime", "openvino"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_batch_shared_out_among_lanes_gives_each_image_its_own_row(tiny, own, images, engine, concurrency):
    threads = torch.get_num_threads()
    opened = open_engine(tiny, engine, device="cpu", threads=3, concurrency=concurrency)
    try:
        for count in (12, 1, 5, 2):
            batch = np.stack(images[:count])
            np.testing.assert_allclose(opened.logits(batch), own.logits(batch), atol=1e-4)
        with ThreadPoolExecutor(6) as pool:  # more callers than concurrency, batches of every size
            jobs = [(i, 1 + i % 5, pool.submit(opened.logits, np.stack(images[: 1 + i % 5]))) for i in range(40)]
            expected = own.logits(np.stack(images))
            for _, count, job in jobs:
                np.testing.assert_allclose(job.result(), expected[:count], atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_openvino_is_told_of_a_cpu_without_tiles_even_where_torch_has_begun(monkeypatch):
    def too_late() -> None:
        raise ConfigError("products in bfloat16 end with an illegal instruction")

    monkeypatch.setattr(engines, "disable_broken_amx", too_late)
    monkeypatch.setenv(amx.ISA_VARIABLE, "")
    monkeypatch.delenv(amx.ISA_VARIABLE)
    engines.openvino_core()
    assert os.environ[amx.ISA_VARIABLE] == amx.WITHOUT_AMX


AVX512 = ("AVX2", "AVX-512")


@pytest.mark.parametrize(
    ("given", "instructions", "limit"),
    [
        ("AVX2", AVX512, amx.WITHOUT_AMX),
        ("avx2_vnni", AVX512, amx.WITHOUT_AMX),
        ("AVX512_CORE", AVX512, "AVX512_CORE"),
        ("AVX2", ("AVX2",), "AVX2"),
    ],
)
def test_openvino_starts_under_a_limit_that_all_its_kernels_obey(given, instructions, limit, monkeypatch):
    limits = []
    monkeypatch.setenv(amx.ISA_VARIABLE, given)
    monkeypatch.setattr(engines, "detect_cpu", lambda: CpuInfo("a", "x86_64", (), instructions))
    started = SimpleNamespace(compile_model=lambda *arguments: limits.append(os.environ[amx.ISA_VARIABLE]))
    monkeypatch.setattr("openvino.Core", lambda: started)
    engines._start_openvino.__wrapped__()
    assert limits == ([limit] if limit != given else [])
    assert os.environ[amx.ISA_VARIABLE] == given  # for torch, and for processes that this one starts
    assert (Environment.detect("openvino").limit, Environment.detect("torch").limit) == (limit, given)


@pytest.mark.slow
def test_openvino_survives_a_limit_below_avx512(tiny, images, tmp_path):
    metadata = ExportMetadata(info=tiny.info, to="openvino", precision="int8")
    made = export(tiny.net, metadata, tmp_path / "tiny.xml", images, timed=False)
    np.save(tmp_path / "pixels.npy", np.stack(images))
    code = (
        "import sys, numpy; from pathlib import Path; from vitrail.export.engines import open_file; "
        "print(open_file(Path(sys.argv[1])).outputs(numpy.load(sys.argv[2])).shape)"
    )
    command = [sys.executable, "-c", code, made.path, tmp_path / "pixels.npy"]
    limited = os.environ | {amx.ISA_VARIABLE: "AVX2"}
    done = subprocess.run(command, env=limited, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(12, 5)\n"), done.stderr
