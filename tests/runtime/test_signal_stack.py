"""Signals are handled after OpenVINO's engines are gone."""

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
from vitrail.api.exporting import with_engine

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
def test_a_signal_is_handled_after_engines_were_closed_in_the_order_they_were_opened() -> None:
    """Each engine found the signal stack of the one before, and restored it when that was freed."""
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "handled"), done.stderr
