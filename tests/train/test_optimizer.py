"""Steps against NumPy and torch's own rules; who decays, who is slower, who stays; memory by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import train.processes  # noqa: F401  for its setting of bfloat16 products, before the first of them
from conftest import import_peer
from torch import nn
from train.small_learner import ALONE as ALONE
from train.small_learner import NET, Learner, backward

from vitrail.config import BiTConfig, OptimConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.config.train import MaskedPatchConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.models import build
from vitrail.objectives.base import Objective
from vitrail.objectives.masked_patch import MaskedPatchObjective
from vitrail.train.optimizer import Optimizer, freeze, make_optimizer

FACTORS = (0.25, 1.0, 0.5, 0.0, 0.1)
RICH = NET.replace(
    pool="map", pool_norm="before", class_token=True, pre_logits=6, position="learned-2d", qk_norm=True, pre_norm=True
)


class Plain(Objective):
    """A learner that adds nothing of its own."""

    def __init__(self, config: ViTConfig | BiTConfig) -> None:
        super().__init__(build(config, seed=0))


def gradients(learner: nn.Module, step: int) -> dict[str, np.ndarray]:
    """Random ones, given to every parameter that learns."""
    g = torch.Generator().manual_seed(step)
    found = {}
    for name, p in learner.named_parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) if p.requires_grad else None
        found[name] = None if p.grad is None else p.grad.numpy().copy()
    return found


def values(learner: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in learner.named_parameters()}


def kernels(learner: nn.Module) -> set[str]:
    """By another way than the networks': what is called weight and has rows and columns."""
    return {n for n, p in learner.named_parameters() if n.endswith("weight") and p.ndim > 1}


def adam(p: Any, m: Any, v: Any, g: Any, t: int, config: OptimConfig) -> tuple[Any, Any, Any]:
    """Adam's direction, as its paper has it."""
    m = config.betas[0] * m + (1 - config.betas[0]) * g
    v = config.betas[1] * v + (1 - config.betas[1]) * g * g
    return (m / (1 - config.betas[0] ** t)) / (np.sqrt(v / (1 - config.betas[1] ** t)) + config.eps), m, v


@pytest.mark.parametrize("decay_by", ["lr", "schedule"])
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_adamw_is_its_definition_and_decay_may_follow_the_schedule_alone(
    decay_by: Any, layer_decay: float | None
) -> None:
    config = OptimConfig(
        lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, decay_by=decay_by, layer_decay=layer_decay
    )
    learner = Learner().double()
    optimizer, expected = make_optimizer(learner, config), values(learner)
    memory = {name: (np.zeros_like(p), np.zeros_like(p)) for name, p in expected.items()}
    for t, factor in enumerate(FACTORS, 1):
        for name, g in gradients(learner, t).items():
            inner = name.removeprefix("net.")
            depth = NET.depth + 1 if name == "scale" else learner.net.layer_id(inner)
            lr = 0.01 * (layer_decay or 1.0) ** (NET.depth + 1 - depth)
            p = expected[name]
            direction, *memory[name] = adam(p, *memory[name], g, t, config)  # type: ignore[assignment]
            decay = 0.3 if name in kernels(learner) else 0.0
            # big_vision: the decay is not multiplied by the learning rate, whoever's it is
            expected[name] = p - factor * lr * direction - factor * (lr if decay_by == "lr" else 1.0) * decay * p
        optimizer.step(factor)
    for name, got in values(learner).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay_by", ["lr", "schedule"])
def test_sgd_is_its_definition(decay_by: Any, momentum: float, nesterov: bool) -> None:
    config = OptimConfig(kind="sgd", lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.2, decay_by=decay_by)
    learner = Learner().double()
    optimizer, expected = make_optimizer(learner, config), values(learner)
    memory = {name: np.zeros_like(p) for name, p in expected.items()}
    for t, factor in enumerate(FACTORS):
        for name, g in gradients(learner, t).items():
            p, decay = expected[name], 0.2 if name in kernels(learner) else 0.0
            if decay_by == "schedule":
                p = p * (1 - factor * decay)
            else:
                g = g + decay * p
            memory[name] = momentum * memory[name] + g
            move = g + momentum * memory[name] if nesterov else memory[name]
            expected[name] = p - factor * 0.1 * move
        optimizer.step(factor)
    for name, got in values(learner).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-12, atol=1e-13, err_msg=name)


def newton_schulz(g: np.ndarray) -> np.ndarray:
    """Five steps of Keller Jordan's quintic towards the nearest orthogonal matrix."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


@pytest.mark.parametrize("decay_by", ["lr", "schedule"])
def test_muon_turns_the_matrices_of_blocks_and_adamw_has_the_rest(decay_by: Any) -> None:
    config = OptimConfig(kind="muon", lr=0.01, weight_decay=0.1, decay_by=decay_by)
    learner = Learner().double()
    optimizer, expected = make_optimizer(learner, config), values(learner)
    turned = {n for n in kernels(learner) if n.startswith("net.blocks.")}
    assert {n.rsplit(".", 2)[1] for n in turned} == {"qkv", "out", "up", "down"}
    zeros = {name: np.zeros_like(p) for name, p in expected.items()}
    memory = {name: (z, z) for name, z in zeros.items()}
    for t, factor in enumerate(FACTORS, 1):
        for name, g in gradients(learner, t).items():
            p, decay = expected[name], 0.1 if name in kernels(learner) else 0.0
            p = p - factor * (0.01 if decay_by == "lr" else 1.0) * decay * p
            if name in turned:
                buffer = 0.95 * memory[name][0] + 0.05 * g
                memory[name] = (buffer, buffer)
                direction = (
                    newton_schulz(0.05 * g + 0.95 * buffer) * 0.2 * np.sqrt(max(p.shape))
                )  # Nesterov, then AdamW's size
            else:
                direction, *memory[name] = adam(p, *memory[name], g, t, config)  # type: ignore[assignment]
            expected[name] = p - factor * 0.01 * direction
        optimizer.step(factor)
    for name, got in values(learner).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)
    assert {n for n in optimizer.state_tensors() if n.startswith("momentum_buffer/")} == {
        f"momentum_buffer/{n}" for n in turned
    }


def test_muon_is_torchs_but_for_the_rounding_of_bfloat16() -> None:
    ours, theirs = Learner(), Learner()
    optimizer = make_optimizer(ours, OptimConfig(kind="muon", lr=0.01))
    named, before = dict(theirs.named_parameters()), values(ours)
    inside = [n for n in kernels(theirs) if n.startswith("net.blocks.")]
    muon = torch.optim.Muon([named[n] for n in inside], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for learner in (ours, theirs):
        gradients(learner, 0)
    optimizer.step(1.0)
    muon.step()
    mine, other = values(ours), values(theirs)
    for name in inside:
        moved = other[name] - before[name]
        assert np.linalg.norm(mine[name] - other[name]) < 0.02 * np.linalg.norm(moved), name


@pytest.mark.parametrize("nesterov", [None, True, False])
def test_muon_looks_ahead_unless_told_otherwise(nesterov: bool | None) -> None:
    optimizer = make_optimizer(Learner(), OptimConfig(kind="muon", nesterov=nesterov))
    assert {g["nesterov"] for g in optimizer.optimizers[0].param_groups} == {nesterov is not False}


def test_what_a_rule_has_no_use_for_is_refused() -> None:
    for settings in ({"momentum": 0.9}, {"nesterov": True}):
        with pytest.raises(ConfigError, match="momentum and nesterov are for sgd and muon; AdamW has betas"):
            OptimConfig(**settings)


def test_what_an_objective_adds_has_its_own_height_and_what_it_froze_stays_frozen() -> None:
    learner = MaskedPatchObjective(build(NET.replace(pool="map")), MaskedPatchConfig(), PreprocessConfig(image_size=16))
    freeze(learner, "all")
    assert not any(p.requires_grad for p in learner.net.pool.parameters())
    optimizer = make_optimizer(learner, OptimConfig(lr=1.0, layer_decay=0.5, head_lr_factor=10.0))
    speeds = {id(p): g["peak_lr"] for rule in optimizer.optimizers for g in rule.param_groups for p in g["params"]}
    assert speeds[id(learner.mask_token)] == speeds[id(learner.net.patch.weight)] == 0.5 ** (NET.depth + 1)
    assert speeds[id(learner.guess.weight)] == 10.0


def test_muon_needs_matrices() -> None:
    net = BiTConfig(image_size=32, layers=(1,), width_factor=0.5, num_classes=3)
    with pytest.raises(ConfigError, match="muon needs trainable matrices in the blocks, and there are none; try adamw"):
        make_optimizer(Plain(net), OptimConfig(kind="muon"))


@pytest.mark.parametrize(
    "config",
    [
        RICH,
        NET.replace(position="relative"),
        NET.replace(distilled=True, position="learned-1d", position_at="layers", activation="swiglu"),
        NET.replace(stem=StemConfig(layers=(1, 1), width_factor=0.5), patch_size=1, image_size=32),
        BiTConfig(image_size=32, layers=(1, 1), width_factor=0.5, num_classes=3),
    ],
    ids=["everything", "relative", "distilled", "hybrid", "BiT"],
)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_only_kernels_decay(config: ViTConfig | BiTConfig, kind: Any) -> None:
    learner = Plain(config)
    with torch.no_grad():
        for p in learner.parameters():
            p.fill_(1.0)
    optimizer = make_optimizer(learner, OptimConfig(kind=kind, lr=0.1, weight_decay=0.5))
    for p in learner.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(1.0)
    shrunk = {name for name, p in learner.named_parameters() if bool((p < 1).all())}
    assert shrunk == kernels(learner)
    assert all(bool((p == 1).all()) for n, p in learner.named_parameters() if n not in shrunk)
    apart = ("token", "registers", "positions", "norm", "bias", "scale", "probe")
    assert not [n for n in shrunk if any(word in n for word in apart)]


TIMM = {
    "cls_token": "class_token",
    "pos_embed": "positions.0.table",
    "patch_embed.proj": "patch",
    "attn.proj": "attention.out",
    "attn.": "attention.",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}


@pytest.mark.peer
def test_layer_decay_is_timms_on_the_same_network() -> None:
    timm = import_peer("timm")
    from timm.optim import param_groups_layer_decay

    theirs = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=2, num_classes=5)
    groups = param_groups_layer_decay(
        theirs, weight_decay=0.05, layer_decay=0.7, no_weight_decay_list=theirs.no_weight_decay()
    )
    names, expected = {id(p): n for n, p in theirs.named_parameters()}, {}
    for group in groups:
        for p in group["params"]:
            name = names[id(p)]
            for old, new in TIMM.items():
                name = name.replace(old, new)
            expected[f"net.{name}"] = (group["lr_scale"], group["weight_decay"])
    expected["net.positions.0.prefix"] = expected["net.positions.0.table"]  # one tensor there, two here
    learner = Plain(NET.replace(depth=3, num_registers=0, layer_scale=None))
    optimizer = make_optimizer(learner, OptimConfig(lr=1.0, weight_decay=0.05, layer_decay=0.7))
    found = speeds(learner, optimizer)
    for name in ("net.norm.weight", "net.norm.bias"):  # MAE's and BEiT's code count it with the head, timm below it
        assert found.pop(name) == (1.0, 0.0)
        assert expected.pop(name) == (0.7, 0.0)
    assert found == {name: (pytest.approx(scale), decay) for name, (scale, decay) in expected.items()}
    assert len({scale for scale, _ in expected.values()}) == 5, "stem, three blocks, head"


def speeds(learner: nn.Module, optimizer: Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(p): n for n, p in learner.named_parameters()}
    return {
        names[id(p)]: (group["peak_lr"], group["weight_decay"])
        for rule in optimizer.optimizers
        for group in rule.param_groups
        for p in group["params"]
    }


def test_the_head_and_what_the_objective_adds_may_learn_faster() -> None:
    learner = Learner()
    learner.predict = nn.Linear(24, 7)
    found = speeds(
        learner, make_optimizer(learner, OptimConfig(lr=1.0, head_lr_factor=10.0, layer_decay=0.5, weight_decay=0.1))
    )
    assert {n for n, (lr, _) in found.items() if lr == 10} == {
        "net.head.weight", "net.head.bias", "scale", "predict.weight", "predict.bias"
    }  # fmt: skip
    assert found["net.norm.weight"][0] == 1
    assert found["predict.weight"] == (10, 0.1)
    assert found["predict.bias"] == (10, 0)


@pytest.mark.parametrize(
    ("train", "prefixes"),
    [
        ("head", ("head.", "pre_logits.")),
        (0, ("head.", "pre_logits.")),
        (1, ("head.", "pre_logits.", "norm.", "pool.", "blocks.1.")),
        (2, ("head.", "pre_logits.", "norm.", "pool.", "blocks.")),
        ("all", ("",)),
    ],
)
def test_only_what_was_chosen_learns(train: Any, prefixes: tuple[str, ...]) -> None:
    learner = Learner(config=RICH).double()
    freeze(learner, train)
    expected = {n for n, _ in learner.named_parameters() if n.removeprefix("net.").startswith(prefixes)} | {"scale"}
    assert {n for n, p in learner.named_parameters() if p.requires_grad} == expected
    optimizer = make_optimizer(learner, OptimConfig(trainable=train, lr=0.1, weight_decay=0.1))
    before = values(learner)
    backward(learner, ALONE, 0)
    optimizer.step(1.0)
    moved = {n for n, v in values(learner).items() if not np.array_equal(v, before[n])}
    assert moved == expected
    assert {n.partition("/")[2] for n in optimizer.state_tensors()} == expected


def test_even_where_nobody_froze_it_nothing_else_moves() -> None:
    learner = Learner().double()
    optimizer = make_optimizer(learner, OptimConfig(trainable="head", lr=0.1))
    backward(learner, ALONE, 0)
    before = values(learner)
    optimizer.step(1.0)
    assert {n for n, v in values(learner).items() if not np.array_equal(v, before[n])} <= {
        "net.head.weight", "net.head.bias", "scale"
    }  # fmt: skip
    assert all(p.grad is None for p in learner.parameters()), "nor does its gradient pile up"


def test_more_blocks_than_there_are_and_nothing_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="trainable=3 blocks, but the network has 2; try trainable=all"):
        freeze(Learner(), 3)
    learner = Plain(NET.replace(num_classes=0))
    freeze(learner, "head")
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        make_optimizer(learner, OptimConfig(trainable="head"))


@pytest.mark.parametrize("largest", [0.1, 1e6, None])
def test_clipping_is_torchs(largest: float | None) -> None:
    ours, theirs = Learner(), Learner()
    optimizer = make_optimizer(ours, OptimConfig())
    for learner in (ours, theirs):
        gradients(learner, 0)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest or float("inf"))
    assert torch.equal(optimizer.clip_grad_norm(largest), expected)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert float(optimizer.clip_grad_norm(None)) == pytest.approx(min(largest or 1e9, float(expected)), rel=1e-4)


def test_a_step_without_gradients_can_be_left_out() -> None:
    learner = Learner()
    optimizer, before = make_optimizer(learner, OptimConfig(weight_decay=0.1)), values(learner)
    gradients(learner, 0)
    optimizer.zero_grad()
    assert float(optimizer.clip_grad_norm(1.0)) == 0
    optimizer.step(1.0)
    assert all(np.array_equal(v, before[n]) for n, v in values(learner).items())


@pytest.mark.parametrize("config", [{}, {"kind": "sgd"}, {"kind": "sgd", "momentum": 0.0}, {"kind": "muon"}], ids=str)
def test_a_resumed_run_goes_on_to_the_bit_whatever_the_order_of_groups(config: dict[str, Any]) -> None:
    config = {"lr": 0.01, "weight_decay": 0.1} | config
    first, second = Learner(), Learner()
    one = make_optimizer(first, OptimConfig(**config))
    for step in range(3):
        gradients(first, step)
        one.step(0.7)
    second.load_state_dict(first.state_dict())
    two = make_optimizer(second, OptimConfig(**config))  # has taken no step
    two.load_state_tensors({n: t.clone() for n, t in reversed(one.state_tensors().items())})
    other = make_optimizer(Learner(), OptimConfig(layer_decay=0.5, head_lr_factor=3.0, **config))
    other.load_state_tensors(one.state_tensors())  # the same names in other groups
    assert all(torch.equal(t, one.state_tensors()[n]) for n, t in other.state_tensors().items())
    for step in range(3, 6):
        for learner, optimizer in ((first, one), (second, two)):
            gradients(learner, step)
            optimizer.step(0.7)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(t, two.state_tensors()[n]) for n, t in one.state_tensors().items())


def test_memory_has_names_and_is_there_before_the_first_step() -> None:
    learner = Learner()
    optimizer = make_optimizer(learner, OptimConfig())
    names = {n for n, _ in learner.named_parameters()}
    assert set(optimizer.state_tensors()) == {
        f"{kind}/{n}" for kind in ("exp_avg", "exp_avg_sq", "step") for n in names
    }
    gradients(learner, 0)
    optimizer.step(1.0)
    state = optimizer.state_tensors()
    assert set(state) == {f"{kind}/{n}" for kind in ("exp_avg", "exp_avg_sq", "step") for n in names}
    assert {float(t) for n, t in state.items() if n.startswith("step/")} == {1.0}


def test_the_first_step_is_torchs_to_the_bit() -> None:
    ours, theirs = Learner(), Learner()
    optimizer = make_optimizer(ours, OptimConfig(lr=0.01))
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    for step in range(3):
        for learner in (ours, theirs):
            gradients(learner, step)
        optimizer.step(1.0)
        adamw.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_memory_of_another_run_is_refused_by_name() -> None:
    optimizer = make_optimizer(Learner(), OptimConfig())
    state = optimizer.state_tensors()
    with pytest.raises(TrainError, match="the optimizer's tensors in the checkpoint lack 'step/scale'"):
        optimizer.load_state_tensors({n: t for n, t in state.items() if n != "step/scale"})
    with pytest.raises(TrainError, match="include 'exp_avg/other', which this run does not train"):
        optimizer.load_state_tensors(state | {"exp_avg/other": torch.zeros(1)})
