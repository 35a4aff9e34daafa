"""Faults of other libraries' Swin Transformers (as of timm 1.0.30, transformers 5.22), absent here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from swin_peers import peer_logits, peer_swin, save_peer, timm_swin, transformers_swin

from vitrail.config import SwinConfig
from vitrail.models import Swin, build
from vitrail.weights import checkpoint

pytestmark = pytest.mark.peer


def read_peer(model: torch.nn.Module, tmp_path: Path, **overrides: object) -> Swin:
    net, _ = checkpoint.read(save_peer(model, tmp_path / "peer"), overrides=overrides)
    assert isinstance(net, Swin)
    return net


def test_a_small_image_does_not_change_the_outputs_of_later_ones(tmp_path: Path) -> None:
    """transformers stores the smaller windows of a 40 px image, which its tables do not fit, in the network."""
    model = peer_swin("transformers v1")
    net = read_peer(model, tmp_path)
    small, large = torch.randn(1, 3, 40, 40), torch.randn(1, 3, 224, 224)
    expected = peer_logits(model, large)
    with pytest.raises(RuntimeError):
        peer_logits(model, small)
    with pytest.raises(RuntimeError):
        peer_logits(model, large)
    assert net(small).isfinite().all()
    assert relative(net(large), expected) <= 1e-5


@pytest.mark.parametrize("size", [240, 288, 320])
def test_version_2_runs_at_sizes_that_windows_do_not_divide(size: int, tmp_path: Path) -> None:
    """timm's mask of version 2 is not rounded up to whole windows."""
    images = torch.randn(1, 3, size, size)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        timm_swin("v2", img_size=size, strict_img_size=True)
    model = randomized(timm_swin("v2", img_size=size))
    net, _ = checkpoint.read(save_peer(model, tmp_path / "peer", img_size=size))
    assert relative(net(images), peer_logits(model, images)) <= 1e-5


def test_windows_of_one_token_are_finite_in_version_2(tmp_path: Path) -> None:
    """timm divides by window - 1 = 0; on a last map of 1 x 1 tokens every network has such windows."""
    images = torch.randn(1, 3, 32, 32)
    model = randomized(timm_swin("v2", img_size=32))
    assert peer_logits(model, images).isnan().all()
    net, _ = checkpoint.read(save_peer(model, tmp_path / "peer", img_size=32))
    assert net(images).isfinite().all()
    whole = randomized(transformers_swin("v2", image_size=32))  # which is guarded
    assert relative(read_peer(whole, tmp_path / "2")(images), peer_logits(whole, images)) <= 1e-5


def test_the_doubled_mask_is_reproduced_only_on_request(tmp_path: Path) -> None:
    """transformers adds the mask of version 2 twice: -200 for -100, which shows where logits are large."""
    model = peer_swin("transformers v2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("logit_scale"):
                parameter.fill_(math.log(100))
            elif name.endswith(("query.weight", "key.weight")):
                parameter.zero_()
            elif name.endswith("query.bias"):
                parameter.fill_(1.0)
    tie_queries_and_keys(model)
    images = torch.randn(1, 3, 256, 256)
    expected = peer_logits(model, images)
    assert relative(read_peer(model, tmp_path, mask_value=-200.0)(images), expected) <= 1e-5
    net = read_peer(model, tmp_path / "2")
    assert net.config.mask_value == -100
    assert relative(net(images), expected) > 1e-4
    timm = timm_swin("v2")  # as in the original's code, -100
    checkpoint.write(net, info_of(net), tmp_path / "timm", to="timm")
    timm = import_peer("timm").create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert relative(net(images), peer_logits(timm, images)) <= 1e-5


def tie_queries_and_keys(model: torch.nn.Module) -> None:
    """Make some cosines -1 and others 1: queries and keys along one direction, whose sign the image decides."""
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "Swinv2SelfAttention":
                width = module.all_head_size
                direction = torch.randn(width)
                module.query.weight.copy_(torch.outer(direction, torch.randn(width)))
                module.key.weight.copy_(-module.query.weight)
                module.query.bias.zero_()


def info_of(net: Swin):  # type: ignore[no-untyped-def]
    from vitrail.models.families import FAMILIES
    from vitrail.weights.model_info import ModelInfo

    return ModelInfo(config=net.config, preprocess=FAMILIES["SwinV2"].preprocess, family="SwinV2")


def test_stochastic_depth_acts_on_attention_and_mlp() -> None:
    """transformers applies it to the attention of version 1 only."""
    config = SwinConfig(image_size=32, width=8, depths=(1, 1), num_heads=(1, 1), window_size=4, num_classes=3)
    net = build(config.replace(drop_path=0.999999))
    assert isinstance(net, Swin)
    randomized(net).train()
    block = net.stages[1].blocks[0]  # the last one, where the rate is highest
    x = torch.randn(2, 16, 16)
    assert torch.equal(block(x, (4, 4)), x)
