"""`vitrail serve`: options and early errors."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from conftest import need_extra
from serving import photo

from vitrail.errors import ConfigError
from vitrail.exporting import compare
from vitrail.serve import supervisor


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments with which the server would be started; it is not started."""
    arguments: dict[str, Any] = {}

    def serve(opener: Any, sock: socket.socket, settings: Any, workers: int, tell: Any, stopping: Any) -> None:
        arguments.update(opener=opener, settings=settings, workers=workers, name=sock.getsockname())
        sock.close()
        tell("small", "torch in float32, 2 cores, batches of up to 4")
        stopping()

    monkeypatch.setattr(supervisor, "serve", serve)
    return arguments


def test_address_engine_and_stop_key_are_printed(vitrail, weights, started):
    result = vitrail("serve", weights, "--port", 0)
    assert result.status == 0
    host, port = started["name"]
    assert host == "127.0.0.1"
    lines = result.out.splitlines()
    assert lines[0] == f"small at http://127.0.0.1:{port}"
    assert lines[1] == "  engine    torch in float32, 2 cores, batches of up to 4"
    assert f"http://127.0.0.1:{port}/docs" in result.out
    assert "stopping: finishing open requests" in result.err
    assert "Ctrl-C" in lines[-1]
    assert max(map(len, lines)) < 80


def test_options_reach_the_server(vitrail, weights, started, monkeypatch):
    monkeypatch.setenv("SECRET", "a-token")
    options = (
        "--max-bytes",
        1000,
        "--max-pixels",
        2000,
        "--max-images",
        3,
        "--max-queue",
        4,
        "--batch-size",
        5,
        "--batch-delay",
        6,
    )
    result = vitrail("serve", "--model", weights, "--port", 0, "--workers", 2, "--token", "SECRET", *options)
    assert result.status == 0
    settings = started["settings"]
    assert (settings.limits.max_bytes, settings.limits.max_pixels, settings.limits.max_images) == (1000, 2000, 3)
    assert settings.batching == {"max_queue": 4, "batch_size": 5, "batch_delay": 0.006}
    assert (settings.token, started["workers"]) == ("a-token", 2)
    assert ", 2 processes" in result.out
    assert isinstance(started["opener"], partial)


def test_access_options_reach_the_server(vitrail, weights, started, tmp_path):
    (tmp_path / "tokens").write_text("app: a-token-of-the-app\n")
    options = ("--tokens", tmp_path / "tokens", "--rate-limit", "50/s:100", "--access-log", tmp_path / "log")
    proxies = ("--trusted-proxy", "10.0.0.0/8", "--trusted-proxy", "unix")
    result = vitrail("serve", weights, "--port", 0, "--host", "0.0.0.0", *options, *proxies)
    assert result.status == 0
    access = started["settings"].access
    assert (access.tokens, access.log) == (tmp_path / "tokens", str(tmp_path / "log"))
    assert (access.rate_limit.rate, access.rate_limit.burst) == (50, 100)
    assert access.proxies.trusts("10.1.2.3")
    assert access.proxies.trusts("")
    assert not access.otel
    assert not [note for note in result.notes if "everyone" in note]  # a token is needed
    pickle.dumps(started["settings"])  # for the workers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", "missing"), "no such file"),
        (("--rate-limit", "fast"), "try 50/s"),
        (("--trusted-proxy", "proxy.example"), "expected an address or a network"),
        (("--access-log", "missing/log"), "try a file in a folder that exists"),
    ],
)
def test_a_wrong_access_option_is_reported_before_the_model_is_loaded(vitrail, options, words):
    result = vitrail("serve", "/no/such/model", "--port", 0, *options)
    assert result.status == 1
    assert words in result.errors[0]
    assert options[0] in result.errors[0]


def test_with_the_access_log_on_stdout_nothing_else_is_printed_there(vitrail, weights, started):
    result = vitrail("serve", weights, "--port", 0, "--access-log", "-")
    assert result.out == ""
    assert "small at http://127.0.0.1:" in result.err


def test_the_model_is_opened_with_its_options(vitrail, weights, started, tmp_path):
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    vitrail("serve", weights, "--port", 0, "--labels", tmp_path / "labels.txt", "--image-size", "64")
    served = started["opener"]()
    assert served.info.labels == ("a", "b", "c", "d", "e")
    assert served.input_shape == (64, 64, 3)
    assert served.grid == (8, 8)
    assert (served.engine.name, served.parallel_batches, served.model is not None) == ("torch", True, True)


def test_without_a_model_the_bundled_one_is_served(vitrail, started):
    vitrail("serve", "--port", 0)
    served = started["opener"]()
    assert served.name == "vitrail/cifar10"


def test_a_model_without_classes_is_served(vitrail, headless, started):
    vitrail("serve", headless, "--port", 0)
    served = started["opener"]()
    assert (served.classifies, served.has_features) == (False, True)


def test_listening_on_all_interfaces_without_a_token_prints_a_note(vitrail, weights, started):
    result = vitrail("serve", weights, "--port", 0, "--host", "0.0.0.0")
    assert [note for note in result.notes if "everyone who can reach 0.0.0.0 can use this server; pass --token" in note]
    assert not [note for note in vitrail("serve", weights, "--port", 0).notes if "everyone" in note]
    port = started["name"][1]
    assert "0.0.0.0" not in result.out  # not a usable URL
    assert "small at http://127.0.0.1:" in result.out
    assert f"  network   http://{socket.gethostname()}:" in result.out
    assert f":{port}" not in result.out


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], ()),
        (["--host", "0.0.0.0"], None),
        (["--allow-host", "a.example", "--allow-host", "b.example"], ("a.example", "b.example")),
        (["--host", "0.0.0.0", "--allow-host", "a.example"], ("a.example",)),
    ],
)
def test_on_loopback_only_loopback_names_are_accepted(vitrail, weights, started, options, hosts):
    assert vitrail("serve", weights, "--port", 0, *options).status == 0
    assert started["settings"].hosts == hosts


def test_calibration_images_reach_the_engine(vitrail, weights, started, monkeypatch, tmp_path):
    from vitrail.engines.engine import torch_engine
    from vitrail.exporting import open_engine as engines

    arguments = {}

    def open_engine(source, engine, *rest, **options):
        arguments.update(options, engine=engine)
        return torch_engine(source.net, source.info)

    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        (images / f"{number}.jpg").write_bytes(photo(number))
    vitrail("serve", weights, "--port", 0, "--engine", "auto", "--calibrate", images)
    monkeypatch.setattr(engines, "open_engine", open_engine)
    started["opener"]()
    assert (arguments["engine"], len(arguments["calibrate"])) == ("auto", 3)


def test_a_port_in_use_is_reported_before_the_model_is_loaded(vitrail):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = vitrail("serve", "/no/such/model", "--port", taken.getsockname()[1])
    assert result.status == 1
    assert "in use" in result.errors[0]


def test_missing_package_is_named(vitrail, weights, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = vitrail("serve", weights, "--port", 0)
    assert result.status == 1
    assert result.errors == ["serving needs fastapi, which is not installed; try pip install 'vitrail[serve]'."]


def test_help_needs_neither_torch_nor_fastapi():
    code = "import sys; from vitrail.cli import main; main(['serve', '--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--max-pixels" in done.stdout
    assert not {"torch", "fastapi", "uvicorn", "numpy"} & set(done.stderr.split())


@pytest.mark.parametrize(("to", "engine", "parallel"), [("onnx", "onnxruntime", True), ("pt2", "torch", True)])
def test_an_exported_file_is_served_by_its_own_engine(
    vitrail, weights, started, tmp_path, monkeypatch, to, engine, parallel
):
    if to == "onnx":
        need_extra("export")
    monkeypatch.setattr(compare, "SECONDS", 0.01)
    path = tmp_path / f"small.{to}"
    assert vitrail("export", weights, path, "--to", to).status == 0
    assert vitrail("serve", path, "--port", 0).status == 0
    served = started["opener"]()
    assert (served.engine.name, served.parallel_batches, served.model, served.name) == (engine, parallel, None, "small")
    assert (served.classifies, served.has_features, served.explain_methods) == (True, False, ())
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    result = vitrail("serve", path, "--port", 0, "--labels", tmp_path / "labels.txt", "--device", "cpu")
    assert started["opener"]().info.labels == ("a", "b", "c", "d", "e")
    assert "  page      http://127.0.0.1:" in result.out
    assert "explorer" not in result.out  # it has no explanations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image-size", 64], "is an exported file: --image-size has no effect"),
        (["--device", "cuda"], "is exported and runs on the CPU only; for cuda, serve the checkpoint it was made from"),
        (["--dtype", "bfloat16"], "has a fixed precision; for bfloat16, export it again or serve the checkpoint"),
    ],
)
def test_options_that_cannot_change_an_exported_file_are_rejected(vitrail, started, tmp_path, options, message):
    path = tmp_path / "small.onnx"
    path.write_bytes(b"it is not opened")
    vitrail("serve", path, "--port", 0, *options)
    with pytest.raises(ConfigError, match=message):
        started["opener"]()
