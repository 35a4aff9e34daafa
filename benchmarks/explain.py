"""What looking inside costs, as multiples of a plain forward pass; and the command from a cold start.

    python benchmarks/explain.py [--model ViT-Ti/16] [--rounds 7] [--image photo.jpg]

Rounds take turns, so that a machine that is slow for a while is slow for all. Printed are medians,
and medians of each round's ratio to the plain forward pass.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

import vitrail
from vitrail.explain import attention_maps, gradient_rollout, occlusion, rollout_map
from vitrail.figures.model_figures import sample_images


def timed(work: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Seconds for one of several, the least."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def cold(model: str, image: Path, rounds: int) -> list[float]:
    """Seconds that `vitrail explain` takes as a person runs it."""
    found = []
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "vitrail", "explain", str(image), "--model", model, "--out", out]
        for _ in range(rounds):
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            found.append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--image", type=Path)
    options = parser.parse_args()
    vit = vitrail.load(options.model, device="auto")
    image = sample_images()[0] if options.image is None else options.image
    images = vit.preprocess([image] * options.batch_size).to(vit.device)
    net = vit.net.eval()

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return net(images)

    targets = forward().argmax(1)
    works: dict[str, Callable[[], object]] = {
        "forward": forward,
        "rollout": lambda: rollout_map(net, images),
        "attention of all layers": lambda: attention_maps(net, images),
        "gradient-weighted rollout": lambda: gradient_rollout(net, images, targets),
        "occlusion, 49 windows": lambda: occlusion(net, images, targets, stride=2),
    }
    for work in works.values():
        work()
    rounds = [{name: timed(work, vit.device) for name, work in works.items()} for _ in range(options.rounds)]
    print(f"{options.model}, batch {options.batch_size}, {images.shape[2]} x {images.shape[3]}, {vit.device}")
    for name in works:
        seconds = statistics.median(r[name] for r in rounds)
        ratio = statistics.median(r[name] / r["forward"] for r in rounds)
        print(f"  {name:27} {1000 * seconds:8.1f} ms  {ratio:6.2f} x")
    with tempfile.TemporaryDirectory() as folder:
        file = options.image
        if file is None:
            file = Path(folder) / "image.png"
            Image.fromarray(image).save(file)
        seconds = cold(options.model, file, min(options.rounds, 5))
    print(f"  vitrail explain, cold: {statistics.median(seconds):.2f} s (least {min(seconds):.2f})")


if __name__ == "__main__":
    main()
