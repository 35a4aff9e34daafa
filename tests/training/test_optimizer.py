"""Optimizer steps compared with NumPy and torch; weight decay, layer-wise rates, frozen parameters, saved state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import training.processes  # noqa: F401  limits oneDNN's instruction set before the first bfloat16 product
from conftest import import_peer
from torch import nn
from training.small_objective import NET, SINGLE_PROCESS, SmallObjective, backward

from vitrail.config import BiTConfig, OptimConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.config.train import MaskedPatchConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.models import build
from vitrail.objectives.base import Objective
from vitrail.objectives.masked_patch import MaskedPatchObjective
from vitrail.training.optimizer import Optimizer, freeze, make_optimizer

LR_FACTORS = (0.25, 1.0, 0.5, 0.0, 0.1)
ALL_OPTIONS = NET.replace(
    pool="map", pool_norm="before", class_token=True, pre_logits=6, position="learned-2d", qk_norm=True, pre_norm=True
)


class BareObjective(Objective):
    """An objective without parameters of its own."""

    def __init__(self, config: ViTConfig | BiTConfig) -> None:
        super().__init__(build(config, seed=0))


def set_random_gradients(objective: nn.Module, step: int) -> dict[str, np.ndarray]:
    """Give every trainable parameter a random gradient; returns the gradients by name."""
    g = torch.Generator().manual_seed(step)
    gradients = {}
    for name, p in objective.named_parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) if p.requires_grad else None
        gradients[name] = None if p.grad is None else p.grad.numpy().copy()
    return gradients


def parameter_values(objective: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in objective.named_parameters()}


def kernel_names(objective: nn.Module) -> set[str]:
    """Names of all matrices called weight, found independently of the network's own list."""
    return {n for n, p in objective.named_parameters() if n.endswith("weight") and p.ndim > 1}


def adam(p: Any, m: Any, v: Any, g: Any, t: int, config: OptimConfig) -> tuple[Any, Any, Any]:
    """Adam's update direction and moments, as in its paper."""
    m = config.betas[0] * m + (1 - config.betas[0]) * g
    v = config.betas[1] * v + (1 - config.betas[1]) * g * g
    return (m / (1 - config.betas[0] ** t)) / (np.sqrt(v / (1 - config.betas[1] ** t)) + config.eps), m, v


@pytest.mark.parametrize("decay_by", ["lr", "schedule"])
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_adamw_matches_its_definition(decay_by: Any, layer_decay: float | None) -> None:
    config = OptimConfig(
        lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, decay_by=decay_by, layer_decay=layer_decay
    )
    objective = SmallObjective().double()
    optimizer, expected = make_optimizer(objective, config), parameter_values(objective)
    moments = {name: (np.zeros_like(p), np.zeros_like(p)) for name, p in expected.items()}
    for t, factor in enumerate(LR_FACTORS, 1):
        for name, g in set_random_gradients(objective, t).items():
            net_name = name.removeprefix("net.")
            layer = NET.depth + 1 if name == "scale" else objective.net.layer_id(net_name)
            lr = 0.01 * (layer_decay or 1.0) ** (NET.depth + 1 - layer)
            p = expected[name]
            direction, *moments[name] = adam(p, *moments[name], g, t, config)  # type: ignore[assignment]
            decay = 0.3 if name in kernel_names(objective) else 0.0
            # decay_by=schedule is big_vision's: decay is not multiplied by any learning rate
            expected[name] = p - factor * lr * direction - factor * (lr if decay_by == "lr" else 1.0) * decay * p
        optimizer.step(factor)
    for name, got in parameter_values(objective).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay_by", ["lr", "schedule"])
def test_sgd_matches_its_definition(decay_by: Any, momentum: float, nesterov: bool) -> None:
    config = OptimConfig(kind="sgd", lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.2, decay_by=decay_by)
    objective = SmallObjective().double()
    optimizer, expected = make_optimizer(objective, config), parameter_values(objective)
    momenta = {name: np.zeros_like(p) for name, p in expected.items()}
    for t, factor in enumerate(LR_FACTORS):
        for name, g in set_random_gradients(objective, t).items():
            p, decay = expected[name], 0.2 if name in kernel_names(objective) else 0.0
            if decay_by == "schedule":
                p = p * (1 - factor * decay)
            else:
                g = g + decay * p
            momenta[name] = momentum * momenta[name] + g
            update = g + momentum * momenta[name] if nesterov else momenta[name]
            expected[name] = p - factor * 0.1 * update
        optimizer.step(factor)
    for name, got in parameter_values(objective).items():
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
def test_muon_updates_block_matrices_and_adamw_the_rest(decay_by: Any) -> None:
    config = OptimConfig(kind="muon", lr=0.01, weight_decay=0.1, decay_by=decay_by)
    objective = SmallObjective().double()
    optimizer, expected = make_optimizer(objective, config), parameter_values(objective)
    muon_names = {n for n in kernel_names(objective) if n.startswith("net.blocks.")}
    assert {n.rsplit(".", 2)[1] for n in muon_names} == {"qkv", "out", "up", "down"}
    zeros = {name: np.zeros_like(p) for name, p in expected.items()}
    moments = {name: (z, z) for name, z in zeros.items()}
    for t, factor in enumerate(LR_FACTORS, 1):
        for name, g in set_random_gradients(objective, t).items():
            p, decay = expected[name], 0.1 if name in kernel_names(objective) else 0.0
            p = p - factor * (0.01 if decay_by == "lr" else 1.0) * decay * p
            if name in muon_names:
                buffer = 0.95 * moments[name][0] + 0.05 * g
                moments[name] = (buffer, buffer)
                direction = (
                    newton_schulz(0.05 * g + 0.95 * buffer) * 0.2 * np.sqrt(max(p.shape))
                )  # Nesterov, scaled to AdamW's update size
            else:
                direction, *moments[name] = adam(p, *moments[name], g, t, config)  # type: ignore[assignment]
            expected[name] = p - factor * 0.01 * direction
        optimizer.step(factor)
    for name, got in parameter_values(objective).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)
    assert {n for n in optimizer.state_tensors() if n.startswith("momentum_buffer/")} == {
        f"momentum_buffer/{n}" for n in muon_names
    }


def test_muon_matches_torch_up_to_bfloat16_rounding() -> None:
    ours, theirs = SmallObjective(), SmallObjective()
    optimizer = make_optimizer(ours, OptimConfig(kind="muon", lr=0.01))
    named, before = dict(theirs.named_parameters()), parameter_values(ours)
    block_matrices = [n for n in kernel_names(theirs) if n.startswith("net.blocks.")]
    muon = torch.optim.Muon(
        [named[n] for n in block_matrices], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    for objective in (ours, theirs):
        set_random_gradients(objective, 0)
    optimizer.step(1.0)
    muon.step()
    our_values, torch_values = parameter_values(ours), parameter_values(theirs)
    for name in block_matrices:
        update = torch_values[name] - before[name]
        assert np.linalg.norm(our_values[name] - torch_values[name]) < 0.02 * np.linalg.norm(update), name


@pytest.mark.parametrize("nesterov", [None, True, False])
def test_muon_uses_nesterov_by_default(nesterov: bool | None) -> None:
    optimizer = make_optimizer(SmallObjective(), OptimConfig(kind="muon", nesterov=nesterov))
    assert {g["nesterov"] for g in optimizer.optimizers[0].param_groups} == {nesterov is not False}


def test_adamw_refuses_momentum_settings() -> None:
    for settings in ({"momentum": 0.9}, {"nesterov": True}):
        with pytest.raises(ConfigError, match="momentum and nesterov are only for sgd and muon; for adamw, set betas"):
            OptimConfig(**settings)


def test_objective_parameters_have_layers_and_stay_frozen() -> None:
    objective = MaskedPatchObjective(
        build(NET.replace(pool="map")), MaskedPatchConfig(), PreprocessConfig(image_size=16)
    )
    freeze(objective, "all")
    assert not any(p.requires_grad for p in objective.net.pool.parameters())
    optimizer = make_optimizer(objective, OptimConfig(lr=1.0, layer_decay=0.5, head_lr_factor=10.0))
    peak_lrs = {id(p): g["peak_lr"] for inner in optimizer.optimizers for g in inner.param_groups for p in g["params"]}
    assert peak_lrs[id(objective.mask_token)] == peak_lrs[id(objective.net.patch.weight)] == 0.5 ** (NET.depth + 1)
    assert peak_lrs[id(objective.guess.weight)] == 10.0


def test_muon_without_block_matrices_is_refused() -> None:
    net = BiTConfig(image_size=32, layers=(1,), width_factor=0.5, num_classes=3)
    with pytest.raises(ConfigError, match="muon needs trainable matrices in the blocks, and there are none; try adamw"):
        make_optimizer(BareObjective(net), OptimConfig(kind="muon"))


@pytest.mark.parametrize(
    "config",
    [
        ALL_OPTIONS,
        NET.replace(position="relative"),
        NET.replace(distilled=True, position="learned-1d", position_at="layers", activation="swiglu"),
        NET.replace(stem=StemConfig(layers=(1, 1), width_factor=0.5), patch_size=1, image_size=32),
        BiTConfig(image_size=32, layers=(1, 1), width_factor=0.5, num_classes=3),
    ],
    ids=["everything", "relative", "distilled", "hybrid", "BiT"],
)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_only_kernels_decay(config: ViTConfig | BiTConfig, kind: Any) -> None:
    objective = BareObjective(config)
    with torch.no_grad():
        for p in objective.parameters():
            p.fill_(1.0)
    optimizer = make_optimizer(objective, OptimConfig(kind=kind, lr=0.1, weight_decay=0.5))
    for p in objective.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(1.0)
    shrunk = {name for name, p in objective.named_parameters() if bool((p < 1).all())}
    assert shrunk == kernel_names(objective)
    assert all(bool((p == 1).all()) for n, p in objective.named_parameters() if n not in shrunk)
    undecayed = ("token", "registers", "positions", "norm", "bias", "scale", "probe")
    assert not [n for n in shrunk if any(word in n for word in undecayed)]


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
def test_layer_decay_matches_timm() -> None:
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
    expected["net.positions.0.prefix"] = expected["net.positions.0.table"]  # one tensor in timm, two in vitrail
    objective = BareObjective(NET.replace(depth=3, num_registers=0, layer_scale=None))
    optimizer = make_optimizer(objective, OptimConfig(lr=1.0, weight_decay=0.05, layer_decay=0.7))
    ours = lr_and_decay(objective, optimizer)
    for name in ("net.norm.weight", "net.norm.bias"):  # like the head in MAE and BEiT, one layer below in timm
        assert ours.pop(name) == (1.0, 0.0)
        assert expected.pop(name) == (0.7, 0.0)
    assert ours == {name: (pytest.approx(scale), decay) for name, (scale, decay) in expected.items()}
    assert len({scale for scale, _ in expected.values()}) == 5, "stem, three blocks, head"


def lr_and_decay(objective: nn.Module, optimizer: Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(p): n for n, p in objective.named_parameters()}
    return {
        names[id(p)]: (group["peak_lr"], group["weight_decay"])
        for inner in optimizer.optimizers
        for group in inner.param_groups
        for p in group["params"]
    }


def test_head_lr_factor_applies_to_the_head_and_objective_parameters() -> None:
    objective = SmallObjective()
    objective.predict = nn.Linear(24, 7)
    groups = lr_and_decay(
        objective,
        make_optimizer(objective, OptimConfig(lr=1.0, head_lr_factor=10.0, layer_decay=0.5, weight_decay=0.1)),
    )
    assert {n for n, (lr, _) in groups.items() if lr == 10} == {
        "net.head.weight", "net.head.bias", "scale", "predict.weight", "predict.bias"
    }  # fmt: skip
    assert groups["net.norm.weight"][0] == 1
    assert groups["predict.weight"] == (10, 0.1)
    assert groups["predict.bias"] == (10, 0)


@pytest.mark.parametrize(
    ("trainable", "prefixes"),
    [
        ("head", ("head.", "pre_logits.")),
        (0, ("head.", "pre_logits.")),
        (1, ("head.", "pre_logits.", "norm.", "pool.", "blocks.1.")),
        (2, ("head.", "pre_logits.", "norm.", "pool.", "blocks.")),
        ("all", ("",)),
    ],
)
def test_only_trainable_parameters_change(trainable: Any, prefixes: tuple[str, ...]) -> None:
    objective = SmallObjective(config=ALL_OPTIONS).double()
    freeze(objective, trainable)
    expected = {n for n, _ in objective.named_parameters() if n.removeprefix("net.").startswith(prefixes)} | {"scale"}
    assert {n for n, p in objective.named_parameters() if p.requires_grad} == expected
    optimizer = make_optimizer(objective, OptimConfig(trainable=trainable, lr=0.1, weight_decay=0.1))
    before = parameter_values(objective)
    backward(objective, SINGLE_PROCESS, 0)
    optimizer.step(1.0)
    changed = {n for n, v in parameter_values(objective).items() if not np.array_equal(v, before[n])}
    assert changed == expected
    assert {n.partition("/")[2] for n in optimizer.state_tensors()} == expected


def test_optimizer_ignores_untrainable_parameters_that_are_not_frozen() -> None:
    objective = SmallObjective().double()
    optimizer = make_optimizer(objective, OptimConfig(trainable="head", lr=0.1))
    backward(objective, SINGLE_PROCESS, 0)
    before = parameter_values(objective)
    optimizer.step(1.0)
    assert {n for n, v in parameter_values(objective).items() if not np.array_equal(v, before[n])} <= {
        "net.head.weight", "net.head.bias", "scale"
    }  # fmt: skip
    assert all(p.grad is None for p in objective.parameters()), "their gradients do not accumulate"


def test_invalid_trainable_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="trainable=3 blocks, but the network has 2; try trainable=all"):
        freeze(SmallObjective(), 3)
    objective = BareObjective(NET.replace(num_classes=0))
    freeze(objective, "head")
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        make_optimizer(objective, OptimConfig(trainable="head"))


@pytest.mark.parametrize("max_norm", [0.1, 1e6, None])
def test_gradient_clipping_matches_torch(max_norm: float | None) -> None:
    ours, theirs = SmallObjective(), SmallObjective()
    optimizer = make_optimizer(ours, OptimConfig())
    for objective in (ours, theirs):
        set_random_gradients(objective, 0)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    assert torch.equal(optimizer.clip_grad_norm(max_norm), expected)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert float(optimizer.clip_grad_norm(None)) == pytest.approx(min(max_norm or 1e9, float(expected)), rel=1e-4)


def test_step_without_gradients_changes_nothing() -> None:
    objective = SmallObjective()
    optimizer, before = make_optimizer(objective, OptimConfig(weight_decay=0.1)), parameter_values(objective)
    set_random_gradients(objective, 0)
    optimizer.zero_grad()
    assert float(optimizer.clip_grad_norm(1.0)) == 0
    optimizer.step(1.0)
    assert all(np.array_equal(v, before[n]) for n, v in parameter_values(objective).items())


@pytest.mark.parametrize("config", [{}, {"kind": "sgd"}, {"kind": "sgd", "momentum": 0.0}, {"kind": "muon"}], ids=str)
def test_resumed_optimizer_continues_bit_for_bit_in_any_group_order(config: dict[str, Any]) -> None:
    config = {"lr": 0.01, "weight_decay": 0.1} | config
    first, second = SmallObjective(), SmallObjective()
    first_optimizer = make_optimizer(first, OptimConfig(**config))
    for step in range(3):
        set_random_gradients(first, step)
        first_optimizer.step(0.7)
    second.load_state_dict(first.state_dict())
    second_optimizer = make_optimizer(second, OptimConfig(**config))  # has taken no step
    second_optimizer.load_state_tensors({n: t.clone() for n, t in reversed(first_optimizer.state_tensors().items())})
    regrouped = make_optimizer(SmallObjective(), OptimConfig(layer_decay=0.5, head_lr_factor=3.0, **config))
    regrouped.load_state_tensors(first_optimizer.state_tensors())  # the same names in other groups
    assert all(torch.equal(t, first_optimizer.state_tensors()[n]) for n, t in regrouped.state_tensors().items())
    for step in range(3, 6):
        for objective, optimizer in ((first, first_optimizer), (second, second_optimizer)):
            set_random_gradients(objective, step)
            optimizer.step(0.7)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(t, second_optimizer.state_tensors()[n]) for n, t in first_optimizer.state_tensors().items())


def test_state_exists_under_parameter_names_before_the_first_step() -> None:
    objective = SmallObjective()
    optimizer = make_optimizer(objective, OptimConfig())
    names = {n for n, _ in objective.named_parameters()}
    assert set(optimizer.state_tensors()) == {
        f"{kind}/{n}" for kind in ("exp_avg", "exp_avg_sq", "step") for n in names
    }
    set_random_gradients(objective, 0)
    optimizer.step(1.0)
    state = optimizer.state_tensors()
    assert set(state) == {f"{kind}/{n}" for kind in ("exp_avg", "exp_avg_sq", "step") for n in names}
    assert {float(t) for n, t in state.items() if n.startswith("step/")} == {1.0}


def test_steps_equal_torch_adamw_bit_for_bit() -> None:
    ours, theirs = SmallObjective(), SmallObjective()
    optimizer = make_optimizer(ours, OptimConfig(lr=0.01))
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    for step in range(3):
        for objective in (ours, theirs):
            set_random_gradients(objective, step)
        optimizer.step(1.0)
        adamw.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_mismatched_state_is_refused_by_name() -> None:
    optimizer = make_optimizer(SmallObjective(), OptimConfig())
    state = optimizer.state_tensors()
    with pytest.raises(TrainError, match="the optimizer's tensors in the checkpoint lack 'step/scale'"):
        optimizer.load_state_tensors({n: t for n, t in state.items() if n != "step/scale"})
    with pytest.raises(TrainError, match="include 'exp_avg/other', which this run does not train"):
        optimizer.load_state_tensors(state | {"exp_avg/other": torch.zeros(1)})
