"""bfloat16 where a CPU says more than is true: survived, or explained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vitrail.errors import ConfigError
from vitrail.runtime import tiles
from vitrail.runtime.tiles import SETTING, check_bfloat16


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(SETTING, "")  # so that it is put back as it was
    monkeypatch.delenv(SETTING)
    monkeypatch.setattr(tiles, "_announced", lambda: True)
    check_bfloat16.cache_clear()
    tiles._found.cache_clear()
    yield
    check_bfloat16.cache_clear()
    tiles._found.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is announced")
def test_a_product_is_survived_on_this_machine() -> None:
    code = "from vitrail.runtime.tiles import check_bfloat16; check_bfloat16(); import torch; "
    code += "a = torch.ones(128, 128, dtype=torch.bfloat16); print((a @ a).float().mean().item())"
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "128.0\n"), done.stderr


def test_without_tiles_it_goes_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tiles, "_survives", lambda: SETTING in os.environ)
    check_bfloat16()
    assert os.environ[SETTING] == "AVX512_CORE_FP16"
    assert "this CPU announces AMX and has none" in caplog.text


def test_too_late_is_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_survives", lambda: False)
    with pytest.raises(ConfigError, match="set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts"):
        check_bfloat16()
    assert SETTING not in os.environ


def test_whoever_has_decided_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_survives", lambda: pytest.fail("asked"))
    monkeypatch.setenv(SETTING, "AVX2")
    check_bfloat16()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("ends", "survives"), [(lambda: None, True), (lambda: os.kill(os.getpid(), signal.SIGILL), False)]
)
def test_a_copy_dies_alone(monkeypatch: pytest.MonkeyPatch, ends, survives: bool) -> None:
    monkeypatch.setattr(tiles, "_product", ends)
    assert tiles._survives() is survives
