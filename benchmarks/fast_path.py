"""Kernels, blocks and networks of the fast path on a GPU: each candidate beside the plain one and timm, in one run.

    python benchmarks/fast_path.py gemm|attention|block|network|latency [--model B/16] [--train] [--only WORD]
        [--seconds 400] [--json results.jsonl]

Prints a table of predicted and measured milliseconds, TFLOP/s, the error relative to a float64 or float32 reference,
and the ratio to the first row. A candidate that fails is a row with its error; when the seconds are over, the rest is
left out. Results are appended to the file of --json as they come, and those that it has are not measured again.

Predictions for ViT-B/16 on an H200, from the 40.5 ms of an inference batch of 512 and the 65.7 ms of a training batch
of 256 that were measured with plain kernels (24 and 36 of them matrix products):

    what                                                      inference        training
    the last block computes the class token only              -2.7 ms          -4.5 ms
    GELU in the epilogue (quack; triton -4.1 and -4.5)        -5.5             -6.0
    GELU as a polynomial, if Inductor keeps its own kernel    -1.2             -1.5
    residuals in the epilogues of both output projections     -1.5             -
    one kernel for short attention                            -1.0             -
    row-wise e4m3 products, scales found by LayerNorm, GELU   -11              -
    together, bfloat16                                        30 (1.5 x timm)  55 (1.33 x timm)
    together, e4m3                                            24 (1.85 x timm)
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fast_kernels import BATCH, attention, gemm
from fast_session import Candidate, Session, relative
from torch import Tensor, nn

from vitrail.kernels import choice, eight_bit
from vitrail.models import ViT, build
from vitrail.models.flops import count_flops
from vitrail.models.layers import Block
from vitrail.models.model_names import config_from_name

TIMM = {"Ti/16": "vit_tiny_patch16_224", "S/16": "vit_small_patch16_224", "B/16": "vit_base_patch16_224"}
TIMM |= {"L/16": "vit_large_patch16_224", "H/14": "vit_huge_patch14_224"}
TRAINING_OPERATIONS = {"mlp training"}
VARIANTS: dict[str, dict[str, str]] = {
    "vitrail": {},
    "vitrail, all tokens in the last block": {},
    "vitrail, triton MLP": {"mlp": "triton", "mlp training": "triton"},
    "vitrail, quack MLP": {"mlp": "quack", "mlp training": "quack"},
    "vitrail, quack MLP and residuals": {"mlp": "quack", "residual": "quack"},
    "vitrail, quack MLP and residuals, triton attention": {"mlp": "quack", "residual": "quack", "attention": "triton"},
    "vitrail, triton MLP and attention": {"mlp": "triton", "attention": "triton"},
}
"""Kernels that are forced."""


def make_network(model: str) -> ViT:
    """Random weights, and a random head: with a new one, all logits are 0."""
    net = build(config_from_name(f"ViT-{model}").replace(activation="gelu"), seed=0)
    assert isinstance(net, ViT)
    nn.init.normal_(net.head.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    return net


def timm_network(model: str, own: ViT) -> nn.Module:
    """timm's network with the same weights."""
    from vitrail.bench.libraries import LIBRARIES, import_library, peer_network
    from vitrail.weights.family_defaults import default_preprocess
    from vitrail.weights.model_info import ModelInfo

    import_library("timm")
    info = ModelInfo(config=own.config, preprocess=default_preprocess("ViT", own.config, "timm"))
    return peer_network(LIBRARIES["timm"], own, info)


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """The kernels of a variant, in a process that has compiled nothing yet."""
    torch._dynamo.reset()
    with choice.force(VARIANTS.get(name, {})), contextlib.ExitStack() as stack:
        if "all tokens" in name:
            original = ViT._num_pooled
            ViT._num_pooled = lambda self: None  # type: ignore[method-assign]
            stack.callback(setattr, ViT, "_num_pooled", original)
        yield


def network_candidates(model: str, train: bool, mode: str | None, batch: int | None = None) -> list[Candidate]:
    own = make_network(model)
    batch = batch or BATCH[model][train]
    side = own.config.image_size
    images = torch.randn(batch, 3, *(side if isinstance(side, tuple) else (side, side)), device="cuda")
    targets = torch.randint(1000, (batch,), device="cuda")
    with torch.no_grad():
        expected = own.cuda()(images[:32]).double()
    own.cpu()
    flops = (3 if train else 1) * batch * count_flops(own.config)

    def make(name: str) -> Any:
        torch._dynamo.reset()
        net = timm_network(model, own) if name == "timm" else make_network(model)
        if "e4m3" in name:
            excluded = name.partition("without ")[2]
            net = eight_bit.to_eight_bit(net, lambda layer: not (excluded and layer.endswith(excluded)))
        step = training_step(net, images, targets, mode) if train else inference_step(net, images, mode)

        def call() -> Tensor:
            with choice.force(VARIANTS.get(name, {})):
                return step()

        with variant(name):  # the first call compiles
            call()
        return call, lambda: relative(call()[:32], expected) if not train else 0.0

    names = ["timm", *(name for name, forced in VARIANTS.items() if is_for(forced, train))]
    if not train:
        names += ["vitrail, e4m3", "vitrail, e4m3 without down"]
    return [Candidate(name, lambda name=name: make(name), flops) for name in names]


def is_for(forced: dict[str, str], train: bool) -> bool:
    """Whether a variant differs from plain kernels in training, or in inference."""
    return not forced or not train or (TRAINING_OPERATIONS & set(forced) and "attention" not in forced)


def inference_step(net: nn.Module, images: Tensor, mode: str | None) -> Callable[[], Tensor]:
    net, images = net.cuda().eval(), images.bfloat16()
    for p in net.parameters():
        p.data = p.data.bfloat16()
    run = torch.compile(net, mode=mode, dynamic=False)

    @torch.no_grad()
    def step() -> Tensor:
        return run(images)

    return step


def training_step(net: nn.Module, images: Tensor, targets: Tensor, mode: str | None) -> Callable[[], Tensor]:
    net = net.cuda().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    run = torch.compile(net, mode=mode, dynamic=False)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = run(images)
            loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


def network(options: argparse.Namespace, session: Session) -> None:
    kind = "training" if options.train else "inference"
    title = f"ViT-{options.model} {kind}, batch {BATCH[options.model][options.train]}, compiled"
    session.table(title, network_candidates(options.model, options.train, None), rounds=10)


def latency(options: argparse.Namespace, session: Session) -> None:
    for mode in ("reduce-overhead", None):
        title = f"ViT-{options.model}, one image, compiled, {mode or 'without CUDA graphs'}"
        candidates = network_candidates(options.model, False, mode, batch=1)
        session.table(title, [c for c in candidates if c.name in ("timm", "vitrail", "vitrail, e4m3")], rounds=200)


def block(options: argparse.Namespace, session: Session) -> None:
    """One transformer block: compiles in seconds."""
    config = make_network(options.model).config
    images = BATCH[options.model][options.train]
    x = torch.randn(images, config.grid[0] * config.grid[1] + 1, config.width, device="cuda").bfloat16()
    layer = Block(config).cuda()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.05) if p.ndim > 1 else nn.init.uniform_(p, 0, 1)
    with torch.no_grad():
        expected = layer(x[:8].float())

    def make(name: str) -> Any:
        torch._dynamo.reset()
        block = Block(config).cuda()
        block.load_state_dict(layer.state_dict())
        if "e4m3" in name:
            wrapped = nn.Module()
            wrapped.blocks = nn.ModuleList([block])
            block = eight_bit.to_eight_bit(wrapped).blocks[0]
        block = block if options.train else block.eval().bfloat16()
        run, given = torch.compile(block, dynamic=False), x.clone().requires_grad_(options.train)
        grad = torch.randn_like(x)

        def call() -> Tensor:
            with choice.force(VARIANTS.get(name, {})), torch.set_grad_enabled(options.train):
                with torch.autocast("cuda", torch.bfloat16, enabled=options.train):
                    out = run(given)
                if options.train:
                    out.backward(grad)
            return out

        return call, lambda: relative(call()[:8], expected)

    names = [name for name, forced in VARIANTS.items() if is_for(forced, options.train) and "all tokens" not in name]
    names += [] if options.train else ["vitrail, e4m3"]
    flops = (3 if options.train else 1) * images * count_flops(config) / config.depth
    kind = "forward and backward" if options.train else "inference"
    candidates = [Candidate(name, lambda name=name: make(name), flops) for name in names]
    session.table(f"a block of ViT-{options.model}, {images} images, {kind}, compiled", candidates)


PARTS = {"gemm": gemm, "attention": attention, "block": block, "network": network, "latency": latency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--only", help="candidates with this in their name")
    parser.add_argument("--seconds", type=float, default=400, help="start no candidate after this time")
    parser.add_argument("--json", help="file of results, which are not measured again")
    options = parser.parse_args()
    start, session = time.monotonic(), Session(options)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in options.parts:
        PARTS[part](options, session)
    print(f"\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
