"""bfloat16 on a CPU that reports AMX without having it: AMX is turned off, or an error explains it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vitrail.errors import ConfigError
from vitrail.runtime import amx
from vitrail.runtime.amx import ISA_VARIABLE, check_bfloat16


@pytest.fixture(autouse=True)
def _clear_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ISA_VARIABLE, "")  # so that it is restored afterwards
    monkeypatch.delenv(ISA_VARIABLE)
    monkeypatch.setattr(amx, "_reports_amx", lambda: True)
    check_bfloat16.cache_clear()
    amx._amx_state.cache_clear()
    yield
    check_bfloat16.cache_clear()
    amx._amx_state.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not report AMX here")
def test_bfloat16_product_succeeds_on_this_machine() -> None:
    code = "from vitrail.runtime.amx import check_bfloat16; check_bfloat16(); import torch; "
    code += "a = torch.ones(128, 128, dtype=torch.bfloat16); print((a @ a).float().mean().item())"
    environment = {name: value for name, value in os.environ.items() if name != ISA_VARIABLE}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "128.0\n"), result.stderr


def test_broken_amx_is_turned_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(amx, "_bfloat16_product_succeeds", lambda: ISA_VARIABLE in os.environ)
    check_bfloat16()
    assert os.environ[ISA_VARIABLE] == "AVX512_CORE_FP16"
    assert "this CPU reports AMX but does not support it" in caplog.text


def test_a_failure_without_amx_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_bfloat16_product_succeeds", lambda: False)
    with pytest.raises(ConfigError, match="set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts"):
        check_bfloat16()
    assert ISA_VARIABLE not in os.environ


def test_user_setting_of_the_variable_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_bfloat16_product_succeeds", lambda: pytest.fail("called"))
    monkeypatch.setenv(ISA_VARIABLE, "AVX2")
    check_bfloat16()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("product", "succeeds"), [(lambda: None, True), (lambda: os.kill(os.getpid(), signal.SIGILL), False)]
)
def test_a_crash_stays_in_the_forked_process(monkeypatch: pytest.MonkeyPatch, product, succeeds: bool) -> None:
    monkeypatch.setattr(amx, "_compute_bfloat16_product", product)
    assert amx._bfloat16_product_succeeds() is succeeds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_crash_leaves_no_core_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child exits with an error if the kernel would write one."""
    import resource

    check_limit = lambda: None if resource.getrlimit(resource.RLIMIT_CORE) == (0, 0) else os.abort()  # noqa: E731
    monkeypatch.setattr(amx, "_compute_bfloat16_product", check_limit)
    assert amx._bfloat16_product_succeeds()
