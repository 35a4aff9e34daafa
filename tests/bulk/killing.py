"""Kill an embedding run with SIGKILL as its parts appear, resume it each time, and compare with an uninterrupted run.

python tests/bulk/killing.py FOLDER [--kills 5]

Both files must have the same bytes. Runs are forked from a process that has imported all modules but not
computed anything.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from PIL import Image

import vitrail
from vitrail.bulk.running import embed
from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.models import build
from vitrail.weights.model_info import ModelInfo

CONFIG = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, num_heads=2, mlp_dim=128, num_classes=3)


def write_images(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    for i in range(count):
        path = folder / "photos" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i == 17:
            path.write_bytes(b"no image")
        else:
            Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    return folder / "photos"


def start_embedding(data: Path, out: Path) -> int:
    """Start the embedding in a forked process; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(os.open(out.parent / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        info = ModelInfo(config=CONFIG, preprocess=PreprocessConfig(image_size=32), labels=("a", "b", "c"))
        model = vitrail.Model(build(CONFIG, seed=0).eval(), info)
        embed(model, str(data), out, batch_size=4, images_per_part=8, advance=lambda count: time.sleep(0.01))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait_for_parts(child: int, until: int, parts: Path) -> int | None:
    """The exit status of a process that ends before `until` parts exist, or None."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if len(list(parts.glob("part-*.parquet"))) >= until:
            return None
        time.sleep(0.001)
    raise TimeoutError((parts.parent / "log.txt").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    data = write_images(args.folder, 16 * args.kills + 21)
    uninterrupted, killed = (args.folder / name / "features.parquet" for name in ("uninterrupted", "killed"))
    for path in (uninterrupted, killed):
        path.parent.mkdir()
    assert wait_for_parts(start_embedding(data, uninterrupted), 10**9, uninterrupted.parent) == 0, (
        uninterrupted.parent / "log.txt"
    ).read_text()
    parts, parts_at_kill = killed.with_name("features.parquet.parts"), []
    for kill in range(args.kills):
        child = start_embedding(data, killed)
        assert wait_for_parts(child, 2 * kill + 1, parts) is None, (killed.parent / "log.txt").read_text()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        parts_at_kill.append(len(list(parts.glob("part-*.parquet"))))
    assert wait_for_parts(start_embedding(data, killed), 10**9, parts) == 0, (killed.parent / "log.txt").read_text()
    same = uninterrupted.read_bytes() == killed.read_bytes()
    files_left = sorted(p.name for p in killed.parent.iterdir() if p.name != "log.txt")
    print(
        f"{len(parts_at_kill)} kills after {' '.join(map(str, parts_at_kill))} parts; "
        f"{'the same bytes' if same else 'different bytes'}"
    )
    print(f"files left: {' '.join(files_left)}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
