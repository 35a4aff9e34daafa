"""Fused operations beside their plain twins, in one run.

python benchmarks/kernels.py [--batch 8] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vitrail.kernels.linear_gelu import linear_gelu_tanh, linear_gelu_tanh_plain


def milliseconds(call: Callable[[], object], rounds: int = 40) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("linear + GELU (tanh), float32, CPU, milliseconds")
    for name, width, mlp in (("Ti/16", 192, 768), ("S/16", 384, 1536), ("B/16", 768, 3072)):
        x, weight, bias = torch.randn(options.batch, 197, width), torch.randn(mlp, width) / width**0.5, torch.randn(mlp)
        with torch.inference_mode():
            product = milliseconds(lambda x=x, w=weight, b=bias: F.linear(x, w, b))
            plain = milliseconds(lambda x=x, w=weight, b=bias: linear_gelu_tanh_plain(x, w, b))
            fused = milliseconds(lambda x=x, w=weight, b=bias: linear_gelu_tanh(x, w, b))
        times = f"product alone {product:7.2f}   plain {plain:7.2f}   fused {fused:7.2f}"
        print(f"  {name:6s} {times}   {plain / fused:.2f} x")


if __name__ == "__main__":
    main()
