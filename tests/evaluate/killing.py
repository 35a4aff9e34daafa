"""Kill an embedding with SIGKILL as its parts appear, resume it each time, and compare with one left alone.

python tests/evaluate/killing.py FOLDER [--kills 5]

Both files have the same bytes. Runs are forked from one process that has imported everything and
computed nothing.
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
from vitrail.api.embedding import embed
from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.models import build
from vitrail.weights.model_info import ModelInfo

CONFIG = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, num_heads=2, mlp_dim=128, num_classes=3)


def draw(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    for i in range(count):
        path = folder / "photos" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i == 17:
            path.write_bytes(b"no image")
        else:
            Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    return folder / "photos"


def start(data: Path, out: Path) -> int:
    """The embedding in a process of its own; its number."""
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


def ended(child: int, until: int, parts: Path) -> int | None:
    """The status of a process that ends before so many parts are there, else None."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        if len(list(parts.glob("0*.parquet"))) >= until:
            return None
        time.sleep(0.001)
    raise TimeoutError((parts.parent / "log.txt").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    chosen = parser.parse_args()
    data = draw(chosen.folder, 16 * chosen.kills + 21)
    whole, cut = (chosen.folder / name / "features.parquet" for name in ("whole", "cut"))
    for path in (whole, cut):
        path.parent.mkdir()
    assert ended(start(data, whole), 10**9, whole.parent) == 0, (whole.parent / "log.txt").read_text()
    parts, seen = cut.with_name("features.parquet.parts"), []
    for kill in range(chosen.kills):
        child = start(data, cut)
        assert ended(child, 2 * kill + 1, parts) is None, (cut.parent / "log.txt").read_text()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.append(len(list(parts.glob("0*.parquet"))))
    assert ended(start(data, cut), 10**9, parts) == 0, (cut.parent / "log.txt").read_text()
    same = whole.read_bytes() == cut.read_bytes()
    left = sorted(p.name for p in cut.parent.iterdir() if p.name != "log.txt")
    print(f"{len(seen)} kills after {' '.join(map(str, seen))} parts; {'the same bytes' if same else 'other bytes'}")
    print(f"left behind: {' '.join(left)}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
