"""One forward pass for all explanations: how often the network runs, and the same results as each method by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from compare import randomized
from explain.test_attention import CONFIGS, random_images
from small_models import gradient, model, small

from vitrail.config import BiTConfig
from vitrail.errors import ModelError
from vitrail.explain import attention as attention_module
from vitrail.explain import attention_maps, gradient_rollout, occlusion, rollout_map
from vitrail.explain.steps import (
    METHODS,
    AttributionMap,
    ForwardResult,
    LayerAttention,
    attribution_maps,
    explain_steps,
    supported_methods,
)
from vitrail.models import Net, build

BIT = BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5)


class CallCounter:
    """Counts the images that enter the network, and the calls of its first block, by hooks."""

    def __init__(self, net: Net) -> None:
        self.batches: list[int] = []
        self.blocks = 0
        net.patch.register_forward_hook(lambda module, inputs, output: self.batches.append(len(inputs[0])))
        net.blocks[0].register_forward_hook(lambda module, inputs, output: self.count_block())

    def count_block(self) -> None:
        self.blocks += 1


@pytest.mark.parametrize(
    "methods",
    [["rollout"], ["attention"], ["gradient"], ["rollout", "attention"], ["rollout", "gradient", "attention"]],
)
@pytest.mark.parametrize("kind", ["token", "map"])
def test_network_runs_once_for_logits_attention_rollout_and_gradients(kind: str, methods: Sequence[str]):
    vit = model(CONFIGS[kind])
    counter = CallCounter(vit.net)
    explanation = vit.explain(gradient(), methods=methods)
    assert set(explanation.maps) == {*methods}
    assert explanation.attention is not None
    assert explanation.predictions
    assert (counter.batches, counter.blocks) == ([1], 1)


def test_occlusion_adds_one_image_per_square():
    vit = model(small())  # 4 x 4 patches: 4 squares of 2 x 2
    counter = CallCounter(vit.net)
    vit.explain(gradient(), methods=METHODS)
    assert sum(counter.batches) == 1 + 4


@pytest.mark.parametrize("kind", CONFIGS)
def test_maps_equal_those_of_each_method_alone(kind: str):
    net = randomized(build(CONFIGS[kind])).eval()
    images, targets = random_images(net.config), torch.tensor([1, 3])
    maps = attribution_maps(net, images, METHODS, targets=targets)
    torch.testing.assert_close(maps["rollout"], rollout_map(net, images))
    torch.testing.assert_close(maps["gradient"], gradient_rollout(net, images, targets))
    torch.testing.assert_close(maps["occlusion"], occlusion(net, images, targets, stride=2), rtol=1e-4, atol=1e-6)
    if net.pool is None:
        torch.testing.assert_close(maps["attention"], attention_maps(net, images)[0][-1].mean(1))


@pytest.mark.parametrize("kind", CONFIGS)
def test_recomputed_blocks_give_the_same_relevance(kind: str, monkeypatch: pytest.MonkeyPatch):
    net = randomized(build(CONFIGS[kind])).eval().double()
    images, targets = random_images(net.config).double(), torch.tensor([1, 3])
    kept = gradient_rollout(net, images, targets)
    monkeypatch.setattr(attention_module, "MAX_KEPT_BYTES", 0)
    torch.testing.assert_close(gradient_rollout(net, images, targets), kept)
    counter = CallCounter(net)
    gradient_rollout(net, images, targets)
    assert counter.blocks == 2  # forward, and again in the backward pass


def test_attention_pool_maps_are_the_same_when_attention_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    net = randomized(build(CONFIGS["map"])).eval()
    images = random_images(net.config)
    kept = attention_maps(net, images)
    monkeypatch.setattr(attention_module, "MAX_KEPT_BYTES", 0)
    for expected, actual in zip(kept, attention_maps(net, images), strict=True):
        torch.testing.assert_close(actual, expected)


def test_steps_arrive_in_order_and_only_requested_layers_are_yielded():
    net = randomized(build(small(depth=3))).eval()
    steps = list(explain_steps(net, random_images(net.config, 1), METHODS, layers=(1,)))
    assert [type(step) for step in steps[:2]] == [LayerAttention, ForwardResult]
    assert isinstance(steps[0], LayerAttention)
    assert steps[0].layer == 1
    complete = [step for step in steps[2:] if isinstance(step, AttributionMap) and step.known is None]
    assert tuple(step.method for step in complete) == METHODS


def test_partial_occlusion_maps_grow_to_the_complete_map():
    net = randomized(build(small())).eval()
    steps = explain_steps(net, random_images(net.config, 1), ["occlusion"], max_batch_size=1)
    *partial, complete = (step for step in steps if isinstance(step, AttributionMap))
    assert [step.done for step in partial] == [1, 2, 3, 4]
    assert [int(step.known.sum()) for step in partial if step.known is not None] == [4, 8, 12, 16]
    for step in partial:
        assert step.known is not None
        torch.testing.assert_close(step.values[0][step.known].float(), complete.values[0][step.known])


def test_default_target_is_the_top_class():
    net = randomized(build(small())).eval()
    images = random_images(net.config)
    (result,) = (step for step in explain_steps(net, images) if isinstance(step, ForwardResult))
    assert torch.equal(result.targets, result.logits.argmax(-1))
    with torch.no_grad():
        torch.testing.assert_close(result.logits, net(images), rtol=1e-4, atol=1e-5)


def test_network_without_attention_has_occlusion_only():
    net = randomized(build(BIT)).eval()
    assert supported_methods(net, has_classes=True) == ("occlusion",)
    assert supported_methods(net, has_classes=False) == ()
    assert set(attribution_maps(net, torch.randn(1, 3, 32, 32), ["occlusion"])) == {"occlusion"}
    with pytest.raises(ModelError, match="no attention, which rollout needs; try occlusion"):
        attribution_maps(net, torch.randn(1, 3, 32, 32), ["rollout"])
