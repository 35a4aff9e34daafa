"""Under autocast: tokens in bfloat16 from end to end, whatever the network is made of, and close to float32."""

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
def test_logits_and_gradients_are_those_of_float32_to_a_few_percent(position: str, options: dict[str, object]) -> None:
    net = randomized(build(ViTConfig(**SMALL, position=position, **options))).train()
    images, expected = torch.randn(8, 3, 32, 32), []
    for on in (False, True):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            logits = net(images)
        logits.float().square().mean().backward()
        expected.append((logits, torch.cat([p.grad.flatten() for p in net.parameters()])))
    for exact, rough in zip(*expected, strict=True):
        assert relative(rough, exact) <= 0.03


@pytest.mark.peer
def test_timms_tokens_are_float32() -> None:
    """What the decision departs from."""
    from conftest import import_peer

    theirs = import_peer("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    seen = []
    theirs.blocks[0].register_forward_hook(lambda _, given, out: seen.extend([given[0].dtype, out.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        theirs(torch.randn(1, 3, 32, 32))
    assert seen == [torch.float32, torch.float32]
