"""Images per second of ViT: vitrail beside timm and torchvision, eager and compiled, in one run.

    python benchmarks/throughput.py [--model ViT-B/16] [--batch-size 256] [--train] [--eager] [--device cuda]

The same weights' shapes, the same random images, bf16 on an accelerator and float32 on a CPU. The
networks take turns, and the median of the rounds is printed with its ratio to the best peer's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

TIMM = {"ViT-Ti/16": "vit_tiny_patch16_224", "ViT-S/16": "vit_small_patch16_224", "ViT-B/16": "vit_base_patch16_224"}
TIMM |= {"ViT-L/16": "vit_large_patch16_224", "ViT-H/14": "vit_huge_patch14_224"}
TORCHVISION = {"ViT-B/16": "vit_b_16", "ViT-L/16": "vit_l_16", "ViT-H/14": "vit_h_14"}


def networks(name: str) -> dict[str, Callable[[], nn.Module]]:
    from vitrail.models import build
    from vitrail.models.model_names import config_from_name

    found: dict[str, Callable[[], nn.Module]] = {"vitrail": lambda: build(config_from_name(name), seed=0)}
    library = torch.library.Library("torchvision", "DEF")
    try:
        import torchvision
    except RuntimeError:  # beside a CPU-only torch
        for operator in ("nms", "qnms"):
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    if name in TORCHVISION:
        found["torchvision"] = lambda: getattr(torchvision.models, TORCHVISION[name])()
    import timm

    found["timm"] = lambda: timm.create_model(TIMM[name])
    return found


def step_of(net: nn.Module, images: torch.Tensor, train: bool, bf16: bool) -> Callable[[], None]:
    targets = torch.randint(1000, (len(images),), device=images.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True) if train else None

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16), torch.set_grad_enabled(train):
            logits = net(images)
        if optimizer is not None:
            nn.functional.cross_entropy(logits.float(), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], device: str, seconds: float = 1.0) -> float:
    """Seconds per step over about a second."""

    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start, count = wait(), 0
    while wait() - start < seconds:
        step()
        count += 1
    return (wait() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    bf16 = options.device == "cuda"
    images = torch.randn(options.batch_size, 3, 224, 224, device=options.device)
    steps = {}
    for who, make in networks(options.model).items():
        net = make().to(options.device).train(options.train)
        if bf16 and not options.train:
            net = net.bfloat16()
        if not options.eager:
            net = torch.compile(net)
        given = images.bfloat16() if bf16 and not options.train else images
        steps[who] = step_of(net, given, options.train, bf16 and options.train)
        for _ in range(4):
            steps[who]()
    rates: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(options.rounds):
        for who, step in steps.items():
            rates[who].append(options.batch_size / timed(step, options.device))
    median = {who: statistics.median(values) for who, values in rates.items()}
    best = max(rate for who, rate in median.items() if who != "vitrail")
    what = f"{options.model} {'training' if options.train else 'inference'}, batch {options.batch_size}"
    print(f"{what}, {'eager' if options.eager else 'compiled'}, {options.device}, torch {torch.__version__}")
    for who, rate in sorted(median.items(), key=lambda item: -item[1]):
        spread = (max(rates[who]) - min(rates[who])) / rate
        print(f"  {who:12s} {rate:10.1f} img/s   {rate / best:5.2f} of the best peer   spread {100 * spread:.1f} %")


if __name__ == "__main__":
    main()
