"""The CPU's model, and the instruction sets that decide how matrix products are computed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vitrail.runtime.amx import ISA_VARIABLE

CPUINFO = Path("/proc/cpuinfo")

# fmt: off
INSTRUCTION_SETS = {  # torch's name: (Linux's name, display name)
    "avx2":        ("avx2",        "AVX2"),
    "avx512_f":    ("avx512f",     "AVX-512"),
    "avx_vnni":    ("avx_vnni",    "AVX-VNNI"),
    "avx512_vnni": ("avx512_vnni", "AVX-512 VNNI"),
    "avx512_bf16": ("avx512_bf16", "AVX-512 BF16"),
    "amx_int8":    ("amx_int8",    "AMX INT8"),
    "amx_bf16":    ("amx_bf16",    "AMX BF16"),
    "neon":        ("asimd",       "NEON"),
    "dot":         ("asimddp",     "dot product"),
    "i8mm":        ("i8mm",        "I8MM"),
    "bf16":        ("bf16",        "BF16"),
    "sve":         ("sve",         "SVE"),
}
# fmt: on
INT32_ACCUMULATION = {"AVX-VNNI", "AVX-512 VNNI", "AMX INT8"}
"""x86 instruction sets that add 8-bit products in 32 bits; without any of them, pairs are added in 16 bits."""


@dataclass(frozen=True)
class CpuInfo:
    """Name, architecture and instruction sets of a processor."""

    name: str
    machine: str
    """Architecture: x86_64, aarch64, arm64, ..."""
    features: tuple[str, ...]
    """All instruction sets that the system reports, under the system's names, sorted."""
    instructions: tuple[str, ...]
    """Display names of those that decide how matrix products are computed."""

    @property
    def int8_saturates(self) -> bool:
        """Whether sums of two 8-bit products (unsigned x signed) saturate at 16 bits, as on x86 without VNNI."""
        return self.machine.lower() in ("x86_64", "amd64") and not INT32_ACCUMULATION & set(self.instructions)

    @property
    def cache_key(self) -> str:
        """Differs between CPUs, and between ISA limits, under which an engine may compute or perform differently."""
        return json.dumps([self.machine, self.name, self.features, os.environ.get(ISA_VARIABLE, "")])

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.instructions) or 'no vector instructions known'})"


@lru_cache(maxsize=1)
def detect_cpu() -> CpuInfo:
    """The CPU of this machine, as torch reports it, else from /proc/cpuinfo."""
    import torch

    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    cpuinfo = _read_cpuinfo()
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    if known:
        features = {name for name, value in known.items() if value is True}
        instructions = [display for name, (_, display) in INSTRUCTION_SETS.items() if name in features]
    else:
        features, instructions = flags, [display for name, display in INSTRUCTION_SETS.values() if name in flags]
    name = known.get("cpu_name") or cpuinfo.get("model name") or platform.processor() or "unknown CPU"
    return CpuInfo(str(name), platform.machine(), tuple(sorted(features)), tuple(instructions))


def _read_cpuinfo() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in CPUINFO.read_text(errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields.setdefault(key.strip(), value.strip())
    return fields
