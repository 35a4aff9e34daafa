"""Where the time of a network goes on a GPU: milliseconds per step of each kernel, compiled, after a warm-up.

    python benchmarks/fast_profile.py [--model B/16] [--train] [--precision bfloat16|float8] [--kernels auto plain ...]

Several --kernels are profiled one after the other; the cases are those of `vitrail bench`.
"""

from __future__ import annotations

import argparse
import re
import time

import torch
from torch.profiler import ProfilerActivity, profile

from vitrail.bench.cases import OWN, Case, default_batches, full_name
from vitrail.bench.workload import make_workload
from vitrail.kernels import choice

STEPS = 5
KINDS = {
    "attention": r"sdpa|flash|fmha|attention",
    "matrix products": r"nvjet|gemm|cutlass|xmma|_product|cublas|scaled_mm|GemmSm90|kernel_cutlass",
    "patch embedding": r"conv|implicit",
}
"""Kind -> names of its kernels; the others are elementwise or reductions, most of them Inductor's."""


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")


def show(case: Case, rows: int) -> None:
    torch._dynamo.reset()
    start = time.monotonic()
    forced: dict[choice.Operation, choice.Backend] = {}
    if case.kernels != "auto":
        forced = {**dict.fromkeys(choice.OPERATIONS, "plain"), **choice.parse(case.kernels.replace("plain", ""))}
    with choice.force(forced):
        load = make_workload(case)
        for _ in range(3):
            load.step()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(2 * STEPS):
            load.step()
        end.record()
        torch.cuda.synchronize()
        step_ms = begin.elapsed_time(end) / (2 * STEPS)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                load.step()
            torch.cuda.synchronize()
    kernels = [event for event in found.key_averages() if event.device_time_total > 0]
    total = sum(event.device_time_total for event in kernels) / STEPS / 1000
    print(
        f"\n{case.model} {case.work} batch {case.batch_size} {case.precision} {case.kernels}: {step_ms:.2f} ms per step"
    )
    print(f"  {total:.2f} ms in kernels; error {load.error or 0:.1e}; set up in {time.monotonic() - start:.0f} s")
    kinds: dict[str, float] = {}
    for event in kernels:
        kind = kind_of(event.key)
        kinds[kind] = kinds.get(kind, 0.0) + event.device_time_total / STEPS / 1000
    print("  " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(kinds.items(), key=lambda pair: -pair[1])))
    for event in sorted(kernels, key=lambda event: -event.device_time_total)[:rows]:
        ms, calls = event.device_time_total / STEPS / 1000, event.count / STEPS
        print(f"  {ms:8.3f} ms {calls:6.1f} x  {kind_of(event.key)[:10]:10s}  {event.key[:88]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--kernels", nargs="+", default=["auto"])
    parser.add_argument("--rows", type=int, default=14)
    options = parser.parse_args()
    model, mode = full_name(options.model), "train" if options.train else "inference"
    for kernels in options.kernels:
        (batch_size,) = default_batches(model, mode, gpu=True)
        case = Case(
            library=OWN, model=model, work="train" if options.train else "forward", batch_size=batch_size,
            device="cuda", precision=options.precision, compile="default", kernels=kernels,
        )  # fmt: skip
        show(case, options.rows)


if __name__ == "__main__":
    main()
