"""Under autocast, every kind of ViT keeps its tokens in bfloat16 and stays close to float32."""

from __future__ import annotations

import pytest
import torch
from compare import randomized, relative
from models.test_compile import KINDS

from vitrail.config import ViTConfig
from vitrail.models import build

SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 48, "num_classes": 5}
POSITIONS = ["none", "learned-1d", "learned-2d", "relative", "sincos-2d", "rope-2d"]
VITS = {name: config for name, config in KINDS.items() if isinstance(config, ViTConfig)}


@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
@pytest.mark.parametrize("train", [False, True])
def test_tokens_stay_in_bfloat16(config: ViTConfig, train: bool) -> None:
    net, images = randomized(build(config)).train(train), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = net.features(images, outputs=("tokens", "logits"))
    assert {t.dtype for t in out.tokens} == {torch.bfloat16}
    out.logits.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.1, "pre_norm": True, "qk_norm": True, "num_registers": 2}])
def test_logits_and_gradients_are_within_3_percent_of_float32(position: str, options: dict[str, object]) -> None:
    net = randomized(build(ViTConfig(**SMALL, position=position, **options))).train()
    images, results = torch.randn(8, 3, 32, 32), []
    for enabled in (False, True):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = net(images)
        logits.float().square().mean().backward()
        results.append((logits, torch.cat([p.grad.flatten() for p in net.parameters()])))
    for float32, bfloat16 in zip(*results, strict=True):
        assert relative(bfloat16, float32) <= 0.03


@pytest.mark.peer
def test_timm_keeps_tokens_in_float32() -> None:
    """timm keeps tokens in float32 under autocast; this package deliberately does not."""
    from conftest import import_peer

    theirs = import_peer("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    dtypes = []
    theirs.blocks[0].register_forward_hook(lambda _, inputs, out: dtypes.extend([inputs[0].dtype, out.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        theirs(torch.randn(1, 3, 32, 32))
    assert dtypes == [torch.float32, torch.float32]
