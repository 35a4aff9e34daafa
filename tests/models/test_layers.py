"""`features(..., layers=...)`: the tokens of some layers, as timm's `forward_intermediates` gives them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from small_models import gradient, model, small
from torch import Tensor, nn

import vitrail
from vitrail.config import BiTConfig, StemConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.models import Net, build

DEEP = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 6, "num_heads": 2, "mlp_dim": 48, "num_classes": 5}


def deep_net(**options: Any) -> Net:
    return randomized(build(ViTConfig(**DEEP | options)))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def record_computed(net: Net, parts: nn.ModuleList) -> list[int]:
    """A list to which hooks append the index of each block or stage when it is computed."""
    computed: list[int] = []
    for i, part in enumerate(parts):
        first = part[0] if isinstance(part, nn.ModuleList) else part
        first.register_forward_hook(lambda *_, i=i: computed.append(i))
    return computed


@pytest.mark.peer
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["token", "registers", "pooled, then normed", "distilled", "clip"])
def test_layers_match_timm(kind: str, norm: bool) -> None:
    import_peer("timm")
    from timm.models import deit, vision_transformer

    options = {
        "token": {},
        "registers": {"reg_tokens": 3, "no_embed_class": True},
        "pooled, then normed": {"global_pool": "avg"},
        "distilled": {},
        "clip": {"pre_norm": True, "act_layer": "quick_gelu"},
    }[kind]
    vit_class = deit.VisionTransformerDistilled if kind == "distilled" else vision_transformer.VisionTransformer
    theirs = vit_class(img_size=32, patch_size=8, embed_dim=64, depth=6, num_heads=2, num_classes=5, **options)
    theirs = randomized(theirs)
    net = vitrail.load(theirs).net
    with torch.no_grad():
        for layers in ([1, 3, 5], [-1], [0, -2]):
            expected = theirs.forward_intermediates(
                images(), layers, return_prefix_tokens=True, norm=norm, intermediates_only=True
            )
            names = ("patch_maps", "prefix_tokens", "tokens")
            got = net.features(images(), names, layers=layers, norm=norm)
            for i, (maps, prefix) in enumerate(expected):
                assert relative(got.patch_maps[i], maps.permute(0, 2, 3, 1)) <= 1e-5
                assert relative(got.prefix_tokens[i], prefix) <= 1e-5
                assert torch.equal(
                    got.tokens[i][:, net.config.num_prefix_tokens :].unflatten(1, (4, 4)), got.patch_maps[i]
                )


@pytest.mark.parametrize("position", ["learned-1d", "relative", "rope-2d"])
def test_selected_layers_equal_those_of_a_full_pass(position: Any) -> None:
    net = deep_net(position=position, num_registers=2)
    with torch.no_grad():
        all_layers = net.features(images(), ("tokens", "attention", "logits"))
        selected = net.features(images(), ("tokens", "attention", "logits"), layers=[4, 1, -1])
        for i, layer in enumerate((4, 1, 5)):
            assert relative(selected.tokens[i], all_layers.tokens[layer + 1]) <= 1e-6
            assert relative(selected.attention[i], all_layers.attention[layer]) <= 1e-6
        assert len(selected.tokens) == len(selected.attention) == 3
        assert relative(selected.logits, net(images())) <= 1e-5
        maps = net.features(images(), "patch_maps").patch_maps
    assert len(maps) == 6
    assert relative(maps[5].flatten(1, 2), all_layers.tokens[6][:, 3:]) <= 1e-6


def test_layers_without_outputs_gives_only_their_tokens() -> None:
    net = deep_net()
    computed = record_computed(net, net.blocks)
    out = net.features(images(), layers=[1, 3])
    assert [t.shape for t in out.tokens] == [(2, 17, 32)] * 2
    assert computed == [0, 1, 2, 3]  # no block after the last selected one
    assert out.logits is None
    net.features(images(), ("logits", "tokens"), layers=[1])
    assert computed[4:] == [0, 1, 2, 3, 4, 5]


def test_layers_may_be_a_tensor_or_an_array() -> None:
    net = deep_net()
    for layers in (torch.tensor([3, 1]), np.array([3, 1]), (i for i in (3, 1))):
        out = net.features(images(), layers=layers)
        assert torch.equal(out.tokens[0], net.features(images(), layers=[3]).tokens[0])
        assert len(out.tokens) == 2


def test_unselected_layers_are_freed() -> None:
    net, references = deep_net(), []
    net.blocks[0].register_forward_hook(lambda module, inputs, output: references.append(weakref.ref(output)))
    with torch.no_grad():
        net.features(images(), layers=[3])
    assert references[0]() is None


def test_wide_images_give_wide_maps() -> None:
    wide = torch.randn(1, 3, 16, 48)
    assert deep_net().features(wide, "patch_maps", layers=[0]).patch_maps[0].shape == (1, 2, 6, 32)
    hybrid = build(ViTConfig(**DEEP | {"patch_size": 1}, stem=StemConfig(layers=(1, 1), width_factor=0.5)))
    assert hybrid.features(wide, "patch_maps", layers=[0]).patch_maps[0].shape == (1, 2, 6, 32)


def test_layers_of_a_bit_are_its_stages() -> None:
    net = randomized(build(BiTConfig(layers=(1, 1, 1), width_factor=0.5, num_classes=5, image_size=32)))
    computed = record_computed(net, net.stages)
    with torch.no_grad():
        all_maps = net.features(images(), "feature_maps").feature_maps
        del computed[:]
        selected = net.features(images(), layers=[1, 0])
        assert computed == [0, 1]
        assert [m.shape for m in selected.feature_maps] == [(2, 256, 4, 4), (2, 128, 8, 8)]
        assert torch.equal(selected.feature_maps[0], all_maps[1])
        assert net.features(images(), "patch_maps", layers=[-1]).patch_maps[0].shape == (2, 2, 2, 512)
        both = net.features(images(), ("logits", "feature_maps"), layers=[0])
        assert torch.equal(both.logits, net(images()))
    with pytest.raises(ModelError, match="BiT's final norm fits its last stage"):
        net.features(images(), layers=[0], norm=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [6]}, "there is no layer 6; expected 0 to 5, or -1 for the last"),
        ({"layers": [-7]}, "there is no layer -7"),
        ({"layers": []}, "layers is empty"),
        ({"layers": 3}, r"layers=3: expected a list of layers, such as \[3\]"),
        ({"layers": "3"}, "layers=3: expected a list of layers"),
        ({"layers": [1.5]}, r"layers=\[1.5\]: expected a list of layers"),
        (
            {"layers": [3], "outputs": "logits"},
            "layers applies only to attention, feature_maps, .*; got outputs=logits",
        ),
        ({"layers": [3], "outputs": "feature_maps"}, "'patch_maps' are each layer's"),
    ],
)
def test_invalid_layers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        deep_net().features(images(), **options)


def test_prefix_tokens_of_a_network_without_any_are_refused() -> None:
    with pytest.raises(ModelError, match="it has no class, distillation or register tokens"):
        deep_net(class_token=False, pool="gap").features(images(), "prefix_tokens")


def test_selected_layers_compile_as_one_graph() -> None:
    net = deep_net()
    compiled = torch.compile(
        lambda x: net.features(x, "patch_maps", layers=[1, 3]).patch_maps, fullgraph=True, backend="eager"
    )
    with torch.no_grad():
        assert relative(compiled(images())[1], net.features(images(), "patch_maps", layers=[3]).patch_maps[0]) <= 1e-6


def test_model_features_accept_one_image_or_a_list() -> None:
    vit = model(small())
    out = vit.features([gradient()] * 3, ("patch_maps", "pooled"), layers=[0, 1], batch_size=2)
    assert [m.shape for m in out.patch_maps] == [(3, 4, 4, 128)] * 2
    torch.testing.assert_close(out.pooled, vit.embed([gradient()] * 3))
    assert vit.features(gradient(), layers=[1]).tokens[0].shape == (1, 17, 128)
    assert vit.features(gradient()).logits.shape == (1, 5)
    with pytest.raises(ModelError, match="at least one"):
        vit.features([])
