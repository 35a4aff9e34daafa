"""BiT against big_vision's outputs, timm and transformers; the cache of standardized kernels."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import randomized, relative
from conftest import golden, import_peer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import BiTConfig, StemConfig
from vitrail.errors import ModelError
from vitrail.models.bit import BiT, count_flops, root_pool
from vitrail.models.hybrid import ResNetStem
from vitrail.models.resnet import StandardizedConv

SMALL = BiTConfig(layers=(1, 2), width_factor=0.5, image_size=32, num_classes=10)

# Depth and width -> units of each stage, parameters with 1000 classes
PARAMETERS = {
    "50x1": ((3, 4, 6, 3), 25_549_352),
    "50x3": ((3, 4, 6, 3), 217_319_080),
    "101x1": ((3, 4, 23, 3), 44_541_480),
    "101x3": ((3, 4, 23, 3), 387_934_888),
    "152x2": ((3, 8, 36, 3), 236_335_208),
    "152x4": ((3, 8, 36, 3), 936_533_224),
}


def loaded(config: BiTConfig, state: dict[str, Tensor]) -> BiT:
    with torch.device("meta"):
        net = BiT(config)
    net.load_state_dict(state, assign=True)
    return net.eval()


def has_cached_kernels(net: nn.Module) -> bool:
    return any(conv._cache for conv in standardized_convs(net))


def standardized_convs(net: nn.Module) -> list[StandardizedConv]:
    return [m for m in net.modules() if isinstance(m, StandardizedConv)]


# Parity


def from_big_vision(name: str, value: Tensor) -> tuple[str, Tensor]:
    name = name.removeprefix("params/").replace("root_block/conv_root", "root").replace("norm-pre-head", "norm")
    name = re.sub(r"block(\d+)/unit(\d+)/", lambda m: f"stages.{int(m[1]) - 1}.{int(m[2]) - 1}.", name)
    name = re.sub(r"gn(\d)", r"norm\1", name).replace("conv_proj", "project")
    name = name.replace("/kernel", ".weight").replace("/scale", ".weight").replace("/bias", ".bias")
    if value.ndim == 4:
        value = value.flatten() if "norm" in name else value.permute(3, 2, 0, 1)
    return name, value.T if name == "head.weight" else value


def test_logits_match_big_vision():
    weights, values = np.load(golden("bigvision_bit_small.npz")), np.load(golden("bigvision_bit_small_io.npz"))
    state = dict(from_big_vision(k, torch.from_numpy(v)) for k, v in weights.items())
    net = loaded(
        BiTConfig(root_pad="none", layers=(1, 1, 1, 1), width_factor=0.5, image_size=64, num_classes=10), state
    )
    with torch.no_grad():
        logits = net(torch.from_numpy(values["images_nhwc"]).permute(0, 3, 1, 2))
    assert relative(logits, torch.from_numpy(values["logits"])) <= 1e-5


@pytest.mark.peer
def test_logits_match_timm_at_even_and_odd_sizes():
    timm = import_peer("timm")
    with torch.device("meta"):
        theirs = timm.create_model("resnetv2_50x1_bit", num_classes=10)
    theirs = randomized(theirs)
    names = {"stem.conv": "root", "downsample.conv": "project", "head.fc": "head", ".blocks.": "."}
    state = theirs.state_dict()
    for old, new in names.items():
        state = {k.replace(old, new): v for k, v in state.items()}
    state["head.weight"] = state["head.weight"].flatten(1)
    net = loaded(BiTConfig(standardize_eps=1e-8, num_classes=10), state)
    with torch.no_grad():
        for size in [(64, 64), (65, 47)]:
            images = torch.randn(2, 3, *size)
            assert relative(net(images), theirs(images)) <= 1e-5


@pytest.mark.peer
def test_logits_and_feature_maps_match_transformers():
    transformers = import_peer("transformers")
    config = transformers.BitConfig(
        embedding_size=32, hidden_sizes=[128, 256, 512], depths=[1, 2, 1], num_labels=10, output_hidden_states=True
    )
    theirs = randomized(transformers.BitForImageClassification(config))
    names = {
        "bit.embedder.convolution": "root", "bit.encoder.": "", "layers.": "", "downsample.conv": "project",
        "bit.norm": "norm", "classifier.1": "head",
    }  # fmt: skip
    state = theirs.state_dict()
    for old, new in names.items():
        state = {k.replace(old, new): v for k, v in state.items()}
    net = loaded(BiTConfig(layers=(1, 2, 1), width_factor=0.5, standardize_eps=1e-8, num_classes=10), state)
    images = torch.randn(2, 3, 65, 64)
    with torch.no_grad():
        ours, expected = net.features(images, outputs=("logits", "feature_maps")), theirs(images)
    assert relative(ours.logits, expected.logits) <= 1e-5
    for feature_map, hidden in zip(ours.feature_maps, expected.hidden_states[1:], strict=True):
        assert relative(feature_map, hidden) <= 1e-5


@given(height=st.integers(1, 12), width=st.integers(1, 12))
def test_root_pool_pads_with_zeros_or_negative_infinity(height: int, width: int):
    x = torch.randn(1, 4, height, width) - 1
    assert torch.equal(root_pool(x, "zero"), F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2))
    assert torch.equal(
        root_pool(x, "none"),
        F.max_pool2d(x, 3, 2, padding=1),
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_size_has_its_golden_parameter_count(name: str):
    layers, count = PARAMETERS[name]
    with torch.device("meta"):
        net = BiT(BiTConfig(layers=layers, width_factor=float(name.split("x")[1])))
    assert sum(p.numel() for p in net.parameters()) == count


@pytest.mark.peer
@pytest.mark.parametrize("name", ["50x1", "101x3", "152x4"])
def test_parameter_counts_match_timm(name: str):
    timm = import_peer("timm")
    with torch.device("meta"):
        theirs = timm.create_model(f"resnetv2_{name}_bit")
    assert sum(p.numel() for p in theirs.parameters()) == PARAMETERS[name][1]


# Outputs, conversions and compilation


def test_features_are_consistent_with_the_logits():
    net, images = randomized(BiT(SMALL)), torch.randn(2, 3, 40, 33)
    with torch.no_grad():
        out = net.features(images, outputs=("logits", "pooled", "pre_logits", "patches", "feature_maps"))
        assert torch.equal(out.logits, net(images))
        assert torch.equal(net.head(out.pooled), out.logits)
        assert torch.equal(out.pooled, out.pre_logits)
        assert torch.equal(out.patches, torch.relu(net.norm(out.feature_maps[-1])).permute(0, 2, 3, 1))
    assert [tuple(m.shape) for m in out.feature_maps] == [(2, 128, 10, 9), (2, 256, 5, 5)]
    assert out.attention is None
    assert net.features(images, "pooled").logits is None


@pytest.mark.parametrize("name", ["attention", "tokens", "class_token", "pool_attention", "head_logits"])
def test_unavailable_outputs_are_refused(name: str):
    with pytest.raises(ModelError, match=f"cannot give '{name}': BiT "):
        BiT(SMALL).features(torch.randn(1, 3, 32, 32), outputs=("logits", name))


def test_wrong_channels_and_integer_images_are_refused():
    net = BiT(SMALL)
    with pytest.raises(ModelError, match=r"expected images as B 3 H W, got \(1, 1, 32, 32\)"):
        net(torch.randn(1, 1, 32, 32))
    with pytest.raises(ModelError, match="uint8; preprocess"):
        net(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_initialization_matches_the_original_code():
    net = BiT(BiTConfig(layers=(1, 1), num_classes=5), seed=1)
    assert torch.equal(net.root.weight, BiT(net.config, seed=1).root.weight)
    assert not torch.equal(net.root.weight, BiT(net.config, seed=2).root.weight)
    weight = net.stages[1][0].conv2.weight
    assert weight.std().item() == pytest.approx((128 * 9) ** -0.5, rel=0.01)
    for name, parameter in net.named_parameters():
        if name.startswith("head") or name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


def test_with_classes_creates_a_zero_head_and_copies_the_rest():
    net, images = randomized(BiT(SMALL)), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        new = net.with_classes(3)
        assert new.config.num_classes == 3
        assert torch.equal(new(images), torch.zeros(1, 3))
        bare = net.with_classes(0)
        assert torch.equal(bare(images), net.features(images, "pooled").pooled)
        new.root.weight.zero_()
    assert net.root.weight.all()
    assert not net.training
    assert not new.training


def test_resized_changes_the_config_and_not_the_logits():
    net, images = randomized(BiT(SMALL)), torch.randn(1, 3, 32, 32)
    resized = net.resized((48, 64))
    assert resized.config.image_size == (48, 64)
    assert torch.equal(resized(images), net(images))


def test_meta_network_loads_all_weights():
    original = randomized(BiT(SMALL))
    reloaded = loaded(SMALL, original.state_dict())
    assert not list(reloaded.buffers())
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(reloaded(images), original(images))


@pytest.mark.parametrize(
    "network", [lambda: BiT(SMALL), lambda: ResNetStem(StemConfig(layers=(1, 2), width_factor=0.5), 3)]
)
def test_gradient_checkpointing_does_not_change_gradients(network: Callable[[], nn.Module]):
    plain = randomized(network()).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing = True
    images = torch.randn(2, 3, 32, 32)
    for net in (plain, checkpointed):
        net(images).square().mean().backward()
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_bit_compiles_and_exports_as_one_graph():
    net, images = randomized(BiT(SMALL)), torch.randn(2, 3, 33, 32)
    with torch.no_grad():
        expected = net(images)  # caches kernels, which must not become constants of the graphs
        torch._dynamo.reset()
        assert relative(torch.compile(net, fullgraph=True, backend="aot_eager")(images), expected) <= 1e-6
        program = torch.export.export(net, (images,), dynamic_shapes={"images": {0: torch.export.Dim.DYNAMIC}})
    assert not program.constants
    assert relative(program.module()(images[:1]), expected[:1]) <= 1e-5


@pytest.mark.parametrize("size", [(64, 64), (45, 30)])
def test_flops_equal_torchs_count(size: tuple[int, int]):
    config = BiTConfig(layers=(1, 2, 1), width_factor=0.5, channels=4, num_classes=7)
    with torch.device("meta"):
        net, images = BiT(config), torch.empty(3, 4, *size)
    with FlopCounterMode(display=False) as counter:
        net(images)
    assert 3 * count_flops(config, size) == counter.get_total_flops()
    assert count_flops(config) == count_flops(config, 224)


# The cache of standardized kernels


def by_inplace(net: BiT) -> None:
    net.root.weight.copy_(net.root.weight.flip(0))


def by_foreach(net: BiT) -> None:
    torch._foreach_mul_([net.root.weight], [torch.randn_like(net.root.weight)])


def by_view(net: BiT) -> None:
    net.root.weight[0].detach().normal_()


def by_load(net: BiT) -> None:
    net.load_state_dict(randomized(BiT(SMALL), seed=1).state_dict())


def by_load_assign(net: BiT) -> None:
    net.load_state_dict(randomized(BiT(SMALL), seed=1).state_dict(), assign=True)


def by_new_parameter(net: BiT) -> None:
    net.root.weight = nn.Parameter(torch.randn_like(net.root.weight))


def by_new_parameter_on_the_old_storage(net: BiT) -> None:
    old = net.root.weight
    net.root.weight = nn.Parameter(old.data)
    while net.root.weight._version < old._version:
        net.root.weight.normal_()


def by_new_data(net: BiT) -> None:
    net.root.weight.data = torch.randn_like(net.root.weight)


def by_new_data_at_the_old_address(net: BiT) -> None:
    """Freed memory is reused, so the address alone does not identify a tensor."""
    address, shape = net.root.weight.data_ptr(), net.root.weight.shape
    net.root.weight.data = torch.empty(0)
    candidates = [torch.randn(shape) for _ in range(8)]
    net.root.weight.data = next((t for t in candidates if t.data_ptr() == address), candidates[0])


def by_writing_to_data(net: BiT) -> None:
    net.root.weight.data.normal_()
    net.eval()


def by_training(net: BiT, optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD, **options: bool) -> None:
    """Fine-tuning in evaluation mode."""
    with torch.enable_grad():
        optimizer = optimizer_class(net.parameters(), lr=0.1, **options)
        net(torch.randn(2, 3, 32, 32)).square().mean().backward()
        optimizer.step()


def by_fused_adam(net: BiT) -> None:
    by_training(net, torch.optim.AdamW, fused=True)


def by_reinitialization(net: BiT) -> None:
    net.initialize(seed=5)
    net.head.weight.normal_()


def in_inference_mode(net: BiT) -> None:
    with torch.inference_mode():
        net.root.weight.normal_()


@pytest.mark.parametrize(
    "change",
    [
        by_inplace, by_foreach, by_view, by_load, by_load_assign, by_new_parameter,
        by_new_parameter_on_the_old_storage, by_new_data, by_new_data_at_the_old_address, by_writing_to_data,
        by_training, by_fused_adam, by_reinitialization, in_inference_mode,
    ],
)  # fmt: skip
@torch.no_grad()
def test_changed_weights_invalidate_the_cached_kernels(change: Callable[[BiT], None]):
    net, images = randomized(BiT(SMALL)), torch.randn(1, 3, 32, 32)
    before = net(images)
    assert all(conv._cache for conv in standardized_convs(net))
    change(net)
    after = net(images)
    assert torch.equal(after, loaded(SMALL, net.state_dict())(images))
    assert not torch.equal(after, before)


@torch.no_grad()
def test_kernels_are_standardized_once_in_evaluation(monkeypatch: pytest.MonkeyPatch):
    calls = []
    original = torch.nn.functional.layer_norm
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda *a, **k: calls.append(0) or original(*a, **k))
    net, images = BiT(SMALL).eval(), torch.randn(1, 3, 32, 32)
    first = net(images)
    count = len(calls)
    assert count == len(standardized_convs(net))
    assert torch.equal(net(images), first)
    assert len(calls) == count
    net.train()(images)
    net(images)
    assert len(calls) == 3 * count


def test_gradients_copies_and_mode_changes_drop_cached_kernels():
    net, images = randomized(BiT(SMALL)), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        net(images)
    assert has_cached_kernels(net)
    assert not has_cached_kernels(copy.deepcopy(net))
    buffer = io.BytesIO()
    torch.save(net, buffer)
    assert buffer.tell() < 1.2 * sum(p.nbytes for p in net.parameters())
    net(images).sum().backward()
    assert not has_cached_kernels(net)
    assert net.root.weight.grad.any()
    for method in (nn.Module.double, nn.Module.train, nn.Module.eval):
        with torch.no_grad():
            net.eval()(images.to(net.root.weight.dtype))
        assert has_cached_kernels(net)
        assert not has_cached_kernels(method(net))


@torch.no_grad()
def test_functional_call_does_not_cache_kernels():
    net, images = randomized(BiT(SMALL)), torch.randn(1, 3, 32, 32)
    other_weights = {k: v.clone() for k, v in randomized(BiT(SMALL), seed=1).state_dict().items()}
    own_logits = net(images)
    other_logits = torch.func.functional_call(net, other_weights, (images,))
    assert not torch.equal(own_logits, other_logits)
    assert not has_cached_kernels(net)
    assert torch.equal(net(images), own_logits)
    stacked = {k: torch.stack([v, other_weights[k]]) for k, v in net.state_dict().items()}
    both_logits = torch.func.vmap(lambda s: torch.func.functional_call(net, s, (images,)))(stacked)
    assert relative(both_logits, torch.stack([own_logits, other_logits])) <= 1e-5
    with torch.inference_mode():
        assert relative(net(images), own_logits) <= 1e-6
    assert torch.equal(net(images), own_logits)


@pytest.mark.gpu
@torch.no_grad()
def test_cuda_graphs_neither_cache_kernels_nor_use_cached_ones():
    net, images = randomized(BiT(SMALL)).cuda(), torch.randn(1, 3, 32, 32, device="cuda")
    expected = net(images)
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        net(images)  # another stream caches its own kernels
        assert all(conv._cache.stream == side_stream.cuda_stream for conv in standardized_convs(net))
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = net(images)
    assert not has_cached_kernels(net)
    for conv in standardized_convs(net):
        conv.weight.mul_(2).add_(1)  # does not change the standardized kernel
    graph.replay()
    assert relative(captured, expected) <= 1e-2
    net.root.weight.normal_()
    graph.replay()
    assert relative(captured, net(images)) <= 1e-2
