"""Fused operations beside their plain twins, in one run.

    python benchmarks/kernels.py [--batch-size 8] [--threads 2]

They take turns, and the least time of all rounds is shown; with one thread it is the process's own
time that counts, in which other work on the machine shows little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vitrail.kernels.linear_gelu import linear_gelu_tanh, linear_gelu_tanh_reference
from vitrail.kernels.onednn_linear import linear_reference, onednn_linear
from vitrail.kernels.packed_attention import packed_attention, packed_attention_reference
from vitrail.models import drop
from vitrail.runtime.malloc import tune_malloc


def least(calls: dict[str, Callable[[], object]], rounds: int = 40) -> dict[str, float]:
    """Milliseconds."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = dict.fromkeys(calls, float("inf"))
    for i in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            if i > 2:
                found[name] = min(found[name], 1000 * (clock() - start))
    return found


def show(what: str, times: dict[str, float], plain: str, ours: str) -> None:
    shown = "   ".join(f"{name} {value:7.2f}" for name, value in times.items())
    print(f"  {what:22s} {shown}   {times[plain] / times[ours]:.2f} x")


def linear_gelu(batch: int) -> None:
    print("linear + GELU (tanh), float32, CPU, milliseconds")
    for name, width, mlp in (("Ti/16", 192, 768), ("S/16", 384, 1536), ("B/16", 768, 3072)):
        x, w, b = torch.randn(batch, 197, width), torch.randn(mlp, width) / width**0.5, torch.randn(mlp)
        calls: dict[str, Callable[[], object]] = {
            "product alone": lambda x=x, w=w, b=b: F.linear(x, w, b),
            "plain": lambda x=x, w=w, b=b: linear_gelu_tanh_reference(x, w, b),
            "fused": lambda x=x, w=w, b=b: linear_gelu_tanh(x, w, b),
        }
        with torch.inference_mode():
            show(name, least(calls), "plain", "fused")


def linear(batch: int) -> None:
    for training in (False, True):
        print(f"linear, {'forward and backward' if training else 'forward'}, float32, CPU, milliseconds")
        for name, inputs, outputs in (("Ti/16", 192, 768), ("B/16", 768, 3072), ("width 64", 64, 192)):
            x, b = torch.randn(batch, 197, inputs, requires_grad=training), torch.randn(outputs, requires_grad=training)
            w = (torch.randn(outputs, inputs) / inputs**0.5).requires_grad_(training)

            def call(kernel: Callable[..., torch.Tensor], x=x, w=w, b=b, training=training) -> None:  # type: ignore[no-untyped-def]
                y = kernel(x, w, b)
                if training:
                    torch.autograd.grad(y, (x, w, b), y.detach())

            times = least({"plain": lambda c=call: c(linear_reference), "oneDNN": lambda c=call: c(onednn_linear)})
            show(name, times, "plain", "oneDNN")


def attention() -> None:
    print("attention, forward and backward, float32, CPU, milliseconds")
    for images, tokens, heads, size in ((32, 17, 4, 16), (32, 50, 4, 16), (32, 65, 3, 64), (16, 197, 3, 64)):
        qkv = torch.randn(images, tokens, 3 * heads * size, requires_grad=True)
        grad = torch.randn(images, tokens, heads * size)

        def call(attend: Callable[..., torch.Tensor], qkv=qkv, grad=grad, heads=heads) -> None:  # type: ignore[no-untyped-def]
            attend(qkv, heads).backward(grad)
            qkv.grad = None

        times = least(
            {"fused": lambda c=call: c(packed_attention_reference), "packed": lambda c=call: c(packed_attention)}
        )
        show(f"{images} x {tokens}, {heads} heads of {size}", times, "fused", "packed")


def dropout() -> None:
    print("dropout, forward and backward, float32, CPU, milliseconds")
    for shape in ((256, 50, 64), (256, 50, 256)):
        x, grad, keys = torch.randn(shape, requires_grad=True), torch.randn(shape), torch.randint(1 << 62, shape[:1])

        def theirs(x: torch.Tensor = x, grad: torch.Tensor = grad) -> None:
            F.dropout(x, 0.1).backward(grad)
            x.grad = None

        def ours(x: torch.Tensor = x, grad: torch.Tensor = grad, keys: torch.Tensor = keys) -> None:
            drop.dropout(x, 0.1, keys).backward(grad)
            x.grad = None

        show(" x ".join(map(str, shape)), least({"torch's": theirs, "keyed": ours}), "torch's", "keyed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tune_malloc()
    linear(options.batch_size)
    linear_gelu(options.batch_size)
    attention()
    dropout()


if __name__ == "__main__":
    main()
