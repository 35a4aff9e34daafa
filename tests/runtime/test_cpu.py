"""CPU name and instruction sets, as reported by torch or by /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitrail.runtime import cpu as module
from vitrail.runtime.cpu import INSTRUCTION_SETS, CpuInfo, detect_cpu

X86 = "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu avx avx2\n\nprocessor\t: 1\nmodel name\t: other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd40\n"


@pytest.fixture(autouse=True)
def _clear_cache() -> None:
    detect_cpu.cache_clear()
    yield
    detect_cpu.cache_clear()


def test_this_cpu_has_a_name_and_lists_what_torch_uses():
    here = detect_cpu()
    assert here.name
    assert here.cache_key == detect_cpu().cache_key
    if "avx2" in here.features:
        assert "AVX2" in here.instructions
    assert set(here.instructions) <= {display for _, display in INSTRUCTION_SETS.values()}
    assert here.name in str(here)


@pytest.mark.parametrize(
    ("text", "machine", "name", "instructions", "saturates"),
    [
        (X86, "x86_64", "AMD EPYC 7763", ("AVX2",), True),
        (X86.replace("avx2", "avx2 avx_vnni"), "AMD64", "AMD EPYC 7763", ("AVX2", "AVX-VNNI"), False),
        (ARM, "aarch64", "unknown CPU", ("NEON", "dot product", "I8MM"), False),
        (None, "arm64", "unknown CPU", (), False),
    ],
)
def test_without_torch_cpuinfo_is_read(monkeypatch, tmp_path: Path, text, machine, name, instructions, saturates):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    here = detect_cpu()
    assert (here.name, here.instructions, here.int8_saturates) == (name, instructions, saturates)


def test_a_limit_on_instruction_sets_makes_another_key(monkeypatch):
    one = CpuInfo("a", "x86_64", ("avx2",), ("AVX2",))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    free = one.cache_key
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert one.cache_key != free
