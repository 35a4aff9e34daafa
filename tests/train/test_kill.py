"""A run that is killed anywhere and resumed ends as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_killed_run_ends_with_the_same_bits():
    """In a fresh process: a run is forked, which a process that has computed something must not be."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "tests" / "train" / "killing.py"), "--kills", "5", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills" in done.stdout
    assert "every weight, average and moment has the same bits" in done.stdout
