"""Images a second of one model in every engine, beside timm's eager float32: in turns, in one run.

    python benchmarks/engines.py [--model ViT-Ti/16] [--batch-size 8] [--rounds 7] [--calibrate DATA]

All are given the same pixels, B H W C of uint8, and give logits; timm gets them normalized by one
multiply and add. Files are exported and compared with the model first. `--calibrate` lets auto take its
int8 scales from those images; without it they are found token by token.
Printed are medians, and medians of each round's ratio to timm: a machine that is slow for a while
is slow for all. `cpu` is the time of all cores that an image takes, which other work disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

import vitrail
from vitrail.engines.engine import Engine
from vitrail.exporting.autotune import candidates
from vitrail.exporting.engine_cache import cached_engine
from vitrail.exporting.open_engine import open_engine, with_engine
from vitrail.exporting.sample_images import sample_images

PAUSE = 0.3
"""Seconds before each turn: threads of the one before go on spinning for a while."""
TIMM = {"ViT-Ti/16": "vit_tiny_patch16_224", "ViT-S/16": "vit_small_patch16_224", "ViT-B/16": "vit_base_patch16_224"}


def timm_eager(name: str) -> Callable[[np.ndarray], object]:
    library = torch.library.Library("torchvision", "DEF")
    try:
        import timm
    except RuntimeError:  # torchvision's wheel beside a CPU-only torch
        for operator in ("nms", "qnms"):
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm
    net = timm.create_model(TIMM[name]).eval()

    @torch.no_grad()
    def work(pixels: np.ndarray) -> object:
        return net(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1)

    work.library = library  # type: ignore[attr-defined] # the declarations live as long as this
    return work


def timed(work: Callable[[np.ndarray], object], batch: np.ndarray, seconds: float) -> tuple[float, float]:
    """Images a second, and milliseconds of all cores an image."""
    time.sleep(PAUSE)
    count, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds or not count:
        work(batch)
        count += len(batch)
    return count / (time.perf_counter() - start), 1000 * (time.process_time() - cpu) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-Ti/16", help="a name, or a file of weights of that name's shape")
    parser.add_argument("--like", default="ViT-Ti/16", help="what timm builds")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--calibrate")
    parser.add_argument("--cache", help="where exported files are kept; else they are made anew")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITRAIL_ENGINES"] = options.cache or folder
        vit = vitrail.load(options.model)
        engines: dict[str, Engine] = {"torch float32": open_engine(vit, device="cpu")}
        chosen = with_engine(vit, "auto", device="cpu", calibrate=options.calibrate).engine  # type: ignore[attr-defined]
        for name, precision in candidates(False):
            engines[f"{name} {precision}"] = cached_engine(vit.net, vit.info, name, precision)
        engines["auto"] = chosen
        works = {name: engine.logits for name, engine in engines.items()} | {"timm": timm_eager(options.like)}
        pixels = [vit.preprocess.pixels(image) for image in sample_images()]
        batch = np.stack([pixels[i % len(pixels)] for i in range(options.batch_size)])
        for work in works.values():
            work(batch)
        rounds = [
            {name: timed(work, batch, options.seconds) for name, work in works.items()} for _ in range(options.rounds)
        ]
    print(f"{options.model}, batch {options.batch_size}, {torch.get_num_threads()} threads; ", end="")
    print(f"auto is {chosen.name} in {chosen.precision}")
    for name in works:
        rate, cpu = (statistics.median(r[name][i] for r in rounds) for i in (0, 1))
        ratio = statistics.median(r[name][0] / r["timm"][0] for r in rounds)
        lean = statistics.median(r["timm"][1] / r[name][1] for r in rounds)
        print(f"  {name:22} {rate:7.1f} /s  {ratio:5.2f} x timm    {cpu:6.1f} ms cpu  {lean:5.2f} x")


if __name__ == "__main__":
    main()
