"""The CPU of this machine: its model and the instruction sets that decide how products are computed."""

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

from vitrail.runtime.tiles import SETTING as LIMIT  # keeps oneDNN, and so torch and OpenVINO, from what the CPU has

CPUINFO = Path("/proc/cpuinfo")

# fmt: off
SHOWN = {  # torch's name: (Linux's, how it is written)
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
WIDE = {"AVX-VNNI", "AVX-512 VNNI", "AMX INT8"}
"""x86 instruction sets that add 8-bit products in 32 bits; without any of them, pairs are added in 16 bits."""


@dataclass(frozen=True)
class Cpu:
    """What the processor is and can do."""

    name: str
    machine: str
    """Architecture: x86_64, aarch64, arm64, ..."""
    features: tuple[str, ...]
    """All instruction sets that are known to be there, under the system's names, sorted."""
    instructions: tuple[str, ...]
    """Those that decide how matrix products are computed, as people write them."""

    @property
    def saturates(self) -> bool:
        """Whether sums of two 8-bit products (unsigned x signed) are cut off at 16 bits, as on x86 without VNNI."""
        return self.machine.lower() in ("x86_64", "amd64") and not WIDE & set(self.instructions)

    @property
    def key(self) -> str:
        """Differs for CPUs, or limits set on one, on which the same engine may compute or perform differently."""
        return json.dumps([self.machine, self.name, self.features, os.environ.get(LIMIT, "")])

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.instructions) or 'no vector instructions known'})"


@lru_cache(maxsize=1)
def cpu() -> Cpu:
    """The CPU of this machine; asked from the processor by torch, else read from Linux's list."""
    import torch

    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    lines = _lines()
    listed = set((lines.get("flags") or lines.get("Features") or "").split())
    if known:
        features = {name for name, value in known.items() if value is True}
        shown = [words for name, (_, words) in SHOWN.items() if name in features]
    else:
        features, shown = listed, [words for name, words in SHOWN.values() if name in listed]
    name = known.get("cpu_name") or lines.get("model name") or platform.processor() or "unknown CPU"
    return Cpu(str(name), platform.machine(), tuple(sorted(features)), tuple(shown))


def _lines() -> dict[str, str]:
    """What Linux says of the first processor; empty elsewhere."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in CPUINFO.read_text(errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                found.setdefault(key.strip(), value.strip())
    return found
