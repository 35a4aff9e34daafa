"""Kernels and blocks of the fast path on a GPU: each candidate beside the plain one, in one run.

    python benchmarks/fast_path.py check|gemm|attention|block [--model B/16] [--train] [--only WORD]
        [--seconds 400] [--json results.jsonl]

Prints a table of predicted and measured milliseconds, TFLOP/s, the error relative to a float64 or float32 reference,
and the ratio to the first row. A candidate that fails is a row with its error; when the seconds are over, the rest is
left out. Results are appended to the file of --json as they come, and those that it has are not measured again.
fast_session.py runs all of this, and whole networks, in the order in which it tells most.

Predictions for ViT-B/16 on an H200, from the 40.5 ms of an inference batch of 512 and the 65.7 ms of a training batch
of 256 that were measured with plain kernels (24 and 36 of them matrix products):

    what                                                      inference        training
    the last block computes the class token only              -2.7 ms          -4.5 ms
    GELU in the epilogue (quack; triton -3.0 and -4.0)        -5.5             -6.0
    GELU as a polynomial, if Inductor keeps its own kernel    -1.6             -1.7
    residuals in the epilogues of both output projections     -1.5             -
    one kernel for short attention                            -1.6             -
    row-wise e4m3 products, scales found by LayerNorm, GELU   -11              -
    together, bfloat16                                        30 (1.5 x timm)  55 (1.33 x timm)
    together, e4m3                                            22 (2.0 x timm)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fast_check import checks
from fast_kernels import BATCH, attention, gemm, tokens_of
from fast_rows import Candidate, Session, relative
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.kernels import choice
from vitrail.models.eight_bit_net import to_eight_bit
from vitrail.models.flops import count_flops
from vitrail.models.layers import Block
from vitrail.models.model_names import config_from_name

VARIANTS: dict[str, dict[choice.Operation, choice.Backend]] = {
    "plain": {},
    "polynomial GELU": {"gelu": "polynomial"},
    "triton MLP": {"mlp": "triton", "mlp training": "triton"},
    "triton attention": {"attention": "triton"},
    "triton MLP, residuals": {"mlp": "triton", "residual": "triton"},
    "triton MLP, attention": {"mlp": "triton", "attention": "triton"},
    "triton MLP, both residuals": {"mlp": "triton", "residual": "triton", "attention residual": "triton"},
    "quack MLP": {"mlp": "quack", "mlp training": "quack"},
    "quack MLP, triton residuals": {"mlp": "quack", "residual": "triton"},
}
"""Kernels that are forced."""
TRAINING_OPERATIONS = {"mlp training", "gelu"}


def is_for(forced: dict[choice.Operation, choice.Backend], train: bool) -> bool:
    """Whether a variant differs from plain kernels in training, or in inference."""
    if any(not choice.is_installed(backend) for backend in forced.values()):
        return False
    return not forced or not train or (bool(TRAINING_OPERATIONS & set(forced)) and "attention" not in forced)


def block(options: argparse.Namespace, session: Session) -> None:
    """One transformer block: compiles in seconds."""
    config = config_from_name(f"ViT-{options.model}").replace(activation="gelu")
    assert isinstance(config, ViTConfig)
    kind = "forward and backward" if options.train else "inference"
    title = f"a block of ViT-{options.model}, {BATCH[options.model][options.train]} images, {kind}, compiled"
    session.table(title, blocks(config, BATCH[options.model][options.train], options.train))


def blocks(config: ViTConfig, images: int, train: bool) -> Iterator[Candidate]:
    x = torch.randn(images, tokens_of(config), config.width, device="cuda").bfloat16()
    layer = Block(config).cuda()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.05) if p.ndim > 1 else nn.init.uniform_(p, 0, 1)
    with torch.no_grad():
        expected = layer(x[:8].float())

    def make(name: str) -> tuple[Callable[[], Tensor], Callable[[], float]]:
        torch._dynamo.reset()
        block: nn.Module = Block(config).cuda()
        block.load_state_dict(layer.state_dict())
        if "e4m3" in name:
            wrapped = nn.Module()
            wrapped.blocks = nn.ModuleList([block])
            block = to_eight_bit(wrapped).blocks[0]
        block = block if train else block.eval().bfloat16()
        run, given = torch.compile(block, dynamic=False), x.clone().requires_grad_(train)
        grad, forced = torch.randn_like(x), dict(VARIANTS.get(name, {}))
        forced |= {"gelu": "polynomial"} if name == "e4m3, polynomial GELU" else {}

        def call() -> Tensor:
            with choice.force(forced), torch.set_grad_enabled(train):
                with torch.autocast("cuda", torch.bfloat16, enabled=train):
                    out: Tensor = run(given)
                if train:
                    out.backward(grad)
            return out

        return call, lambda: relative(call()[:8], expected)

    names = [name for name, forced in VARIANTS.items() if is_for(forced, train)]
    names += [] if train else ["e4m3", "e4m3, polynomial GELU"]
    flops = (3 if train else 1) * images * count_flops(config) / config.depth
    for name in names:
        yield Candidate(name, lambda name=name: make(name), flops, limit=0.15 if "e4m3" in name else 2e-2)


PARTS: dict[str, Callable[[argparse.Namespace, Session], Any]] = {
    "check": checks,
    "gemm": gemm,
    "attention": attention,
    "block": block,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--only", help="candidates with this in their name")
    parser.add_argument("--seconds", type=float, default=400, help="start no candidate after this time")
    parser.add_argument("--json", help="file of results, which are not measured again")
    options = parser.parse_args()
    start, session = time.monotonic(), Session(options.json, options.seconds, options.only)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in options.parts:
        PARTS[part](options, session)
    print(f"\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
