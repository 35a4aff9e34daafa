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


def test_this_cpu_has_a_name_and_known_instruction_sets():
    cpu = detect_cpu()
    assert cpu.name
    assert cpu.cache_key == detect_cpu().cache_key
    if "avx2" in cpu.features:
        assert "AVX2" in cpu.instructions
    assert set(cpu.instructions) <= {display for _, display in INSTRUCTION_SETS.values()}
    assert cpu.name in str(cpu)


@pytest.mark.parametrize(
    ("text", "machine", "name", "instructions", "saturates"),
    [
        (X86, "x86_64", "AMD EPYC 7763", ("AVX2",), True),
        (X86.replace("avx2", "avx2 avx_vnni"), "AMD64", "AMD EPYC 7763", ("AVX2", "AVX-VNNI"), False),
        (ARM, "aarch64", "unknown CPU", ("NEON", "dot product", "I8MM"), False),
        (None, "arm64", "unknown CPU", (), False),
    ],
)
def test_cpuinfo_is_read_if_torch_reports_no_capabilities(
    monkeypatch, tmp_path: Path, text, machine, name, instructions, saturates
):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    cpu = detect_cpu()
    assert (cpu.name, cpu.instructions, cpu.int8_saturates) == (name, instructions, saturates)


def test_limiting_the_instruction_sets_changes_the_cache_key(monkeypatch):
    cpu = CpuInfo("a", "x86_64", ("avx2",), ("AVX2",))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    unlimited_key = cpu.cache_key
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert cpu.cache_key != unlimited_key
