"""Dropout and stochastic depth: what is dropped for a sample depends on its seed, not on its batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitrail import rng
from vitrail.config import BiTConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.models import Net, build, drop

SMALL = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 3, "num_heads": 2, "mlp_dim": 24, "num_classes": 5}
RATES = {"dropout": 0.2, "drop_path": 0.5}


def seeds_for(count: int, step: int = 0) -> Tensor:
    return rng.seeds_to_tensor(rng.sample_seeds(7, step, np.arange(count)))


def training(**options: object) -> Net:
    return randomized(build(ViTConfig(**SMALL | RATES | options))).double().train()  # type: ignore[arg-type]


def random_images(count: int) -> Tensor:
    return torch.randn(count, 3, 16, 16, dtype=torch.float64)


@settings(max_examples=15)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_a_samples_draws_do_not_depend_on_its_batch(order: list[int], first: int) -> None:
    net, images, sample_seeds = training(), random_images(6), seeds_for(6)
    full_batch = net(images, sample_seeds)
    parts = torch.cat(
        [
            net(images[order[:first]], sample_seeds[order[:first]]),
            net(images[order[first:]], sample_seeds[order[first:]]),
        ]
    )
    torch.testing.assert_close(parts, full_batch[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"drop_path": 0.0}, {"dropout": 0.0}, {}])
def test_sample_seeds_determine_the_draws(options: dict[str, float]) -> None:
    net, images = training(**options), random_images(4)
    first = net(images, seeds_for(4))
    assert torch.equal(net(images, seeds_for(4)), first)
    assert not torch.equal(net(images, seeds_for(4, step=1)), first)
    out = net.features(images, outputs=("logits", "tokens"), sample_seeds=seeds_for(4))
    torch.testing.assert_close(out.logits, first)


def test_every_layer_and_dropout_site_draws_independently() -> None:
    x, sample_seeds = torch.ones(8, 5, 16), seeds_for(8)
    all_seeds = [drop.embedding_seeds(sample_seeds), *drop.block_seeds(sample_seeds, 3).flatten(0, 1)]
    assert len(all_seeds) == 16
    masks = [drop.dropout(x, 0.5, seed) > 0 for seed in all_seeds]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.35 < float((a == b).float().mean()) < 0.65


def fold_in(x: int) -> int:
    """rng.fold_in(x, 0) of an unsigned 64-bit Python integer."""
    return int(rng.fold_in(torch.tensor([x - (1 << 64) * (x >= 1 << 63)]), 0)) % (1 << 64)


def reference_dropout(x: np.ndarray, rate: float, seeds: list[int]) -> np.ndarray:
    """Dropout in NumPy, element by element."""
    flat = x.reshape(len(x), -1)
    out, level = np.zeros_like(flat), min(round(rate * 65536), 65535)
    for b, seed in enumerate(seeds):
        for j in range(flat.shape[1]):
            draw, part = divmod(j, 4)
            bits = fold_in((seed + draw) % (1 << 64)) >> (16 * part) & 0xFFFF
            signed = bits - 65536 if bits >= 32768 else bits
            if signed >= level - 32768:
                out[b, j] = flat[b, j] / (1 - level / 65536)
    return out.reshape(x.shape)


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.sampled_from([0.1, 0.5, 0.9, 0.99999]))
def test_dropout_matches_the_elementwise_reference(batch: int, tokens: int, width: int, rate: float) -> None:
    x, seed = np.random.default_rng(batch).normal(size=(batch, tokens, width)), seeds_for(batch)
    got = drop.dropout(torch.from_numpy(x), rate, seed)
    np.testing.assert_allclose(
        got.numpy(), reference_dropout(x, rate, [s % (1 << 64) for s in seed.tolist()]), rtol=1e-12
    )


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unseeded", [False, True])
def test_drop_rates_are_as_specified_and_means_are_preserved(rate: float, dtype: torch.dtype, unseeded: bool) -> None:
    x, seeds = torch.full((64, 50, 64), 1.25, dtype=dtype), drop.block_seeds(seeds_for(64), 1)[0]
    out = drop.dropout(x, rate, None if unseeded else seeds[0])
    dropped_share = float((out == 0).double().mean())
    assert dropped_share == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / x.numel()))
    assert float(out.double().mean()) == pytest.approx(1.25, rel=0.01)
    samples = torch.ones(20_000, 1, 2, dtype=dtype)
    dropped_paths = drop.drop_path(samples, rate, None if unseeded else drop.block_seeds(seeds_for(20_000), 1)[0, 4])
    assert torch.equal(dropped_paths[:, :, 0], dropped_paths[:, :, 1])
    assert float((dropped_paths == 0).double().mean()) == pytest.approx(
        rate, abs=4 * math.sqrt(rate * (1 - rate) / 20_000)
    )


def test_neighboring_draws_are_uncorrelated() -> None:
    u = (drop.random_int16(torch.zeros(32, 10_000), seeds_for(32)).double() + 0.5) / drop.NUM_LEVELS
    noise = 5 / math.sqrt(u.numel()) / 12
    assert float(u.mean()) == pytest.approx(0, abs=5 * math.sqrt(1 / 12 / u.numel()))
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.01)
    for lag in (1, 2, 3, 4, 8, 2500, 5000):
        assert abs(float((u[:, lag:] * u[:, :-lag]).mean())) < noise
    assert abs(float((u[1:] * u[:-1]).mean())) < noise


def test_blocks_without_seeds_draw_from_torchs_generator() -> None:
    block, x = training().blocks[-1], torch.randn(3, 17, 16, dtype=torch.float64)
    torch.manual_seed(0)
    first, second = block(x), block(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(block(x), first)


def test_networks_without_seeds_draw_from_torchs_generator() -> None:
    net, images = training(), random_images(3)
    torch.manual_seed(1)
    first, second = net(images), net(images)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(net(images), first)


def test_nothing_is_drawn_in_evaluation_or_at_rate_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random_sample_seeds", "random_int16"):
        monkeypatch.setattr(drop, name, lambda *_: pytest.fail("drawn"))
    images = random_images(2)
    net, eval_net = training(dropout=0.0, drop_path=0.0), training().eval()
    state = torch.get_rng_state()
    assert torch.equal(net(images), net.eval()(images))
    eval_net(images, seeds_for(2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("sample_seeds", [seeds_for(3), None], ids=["sample_seeds", "fresh"])
@pytest.mark.parametrize("encode_only", [False, True])
def test_gradient_checkpointing_repeats_the_same_draws(sample_seeds: Tensor | None, encode_only: bool) -> None:
    images = random_images(3)
    gradients = []
    for checkpointing in (False, True):
        net = training()
        net.gradient_checkpointing = checkpointing
        torch.manual_seed(0)
        out = (
            net.encode(*net.embed(images, sample_seeds), sample_seeds=sample_seeds)[:, 0]
            if encode_only
            else net(images, sample_seeds)
        )
        out.square().sum().backward()
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_network_drops_the_same_without_recompiling_each_step(checkpointing: bool) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    net, images = training(depth=1, drop_path=0.0), random_images(3)
    net.gradient_checkpointing = checkpointing
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for step in range(3):
        expected, got = net(images, seeds_for(3, step)), compiled(images, seeds_for(3, step))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        got.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_inductor_draws_the_same_dropout() -> None:
    torch.compiler.reset()
    net, images = training(depth=2), random_images(3)
    compiled = torch.compile(net, fullgraph=True)
    for step in range(20):  # an out-of-bounds write by inductor would show only after some steps
        got = compiled(images, seeds_for(3, step))
        torch.testing.assert_close(got, net(images, seeds_for(3, step)), rtol=1e-10, atol=1e-10)
        got.sum().backward()
        compiled(images)


def test_bit_accepts_sample_seeds_and_draws_nothing() -> None:
    net = randomized(build(BiTConfig(layers=(1,), width_factor=0.5, num_classes=5, image_size=32))).train()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(net(images, seeds_for(2)), net(images))
    assert net.features(images, outputs="pooled", sample_seeds=seeds_for(2)).pooled is not None


@pytest.mark.parametrize("sample_seeds", [torch.zeros(2, dtype=torch.int64), torch.zeros(3), torch.zeros(3, 1).long()])
def test_invalid_sample_seeds_are_refused(sample_seeds: Tensor) -> None:
    with pytest.raises(ModelError, match="one int64 seed for each of 3 images"):
        training()(random_images(3), sample_seeds)
