"""Signals are still handled after OpenVINO engines are closed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import need_extra

need_extra("export")

SCRIPT = """
import os, signal
import numpy as np
import vitrail
from vitrail.exporting.open_engine import with_engine

model, image = vitrail.load("vitrail/cifar10"), np.zeros((32, 32, 3), np.uint8)
handled = []
signal.signal(signal.SIGTERM, lambda *_: handled.append(True))
first, second = (with_engine(model, "openvino") for _ in range(2))
for engine in (first, second):
    engine.predict(image)
del engine, first
del second
os.kill(os.getpid(), signal.SIGTERM)
print("handled" if handled else "lost")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sigaltstack as on Linux")
def test_signals_are_handled_after_engines_are_closed_in_opening_order() -> None:
    """Each engine saved the previous engine's signal stack and restored it after it was freed."""
    result = subprocess.run([sys.executable, "-X", "faulthandler", "-c", SCRIPT], capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "handled"), result.stderr
