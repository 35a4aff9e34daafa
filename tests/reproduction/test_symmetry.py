"""The symmetry experiment: permutations and shifts, measures that must be exact, verdicts from made-up numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reproduction.synthetic import make_result

from vitrail.config import BiTConfig, ViTConfig
from vitrail.models import BiT, ViT
from vitrail.reproduction.arm import SCALES, Scale, Trial
from vitrail.reproduction.experiments.symmetry import KINDS, NONE, RES, analyze, arms, patches_per_side
from vitrail.reproduction.measures import MEASURES
from vitrail.reproduction.measures.symmetries import (
    exact_numbers,
    patch_orders,
    prediction_numbers,
    reaches,
    shift,
    shuffle_patches,
)
from vitrail.reproduction.results import Results

PER_SIDE = 4


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def vit(position: str) -> ViT:
    """A network with random weights, also in the head, and positions as large as the patch embeddings."""
    config = ViTConfig(
        image_size=16, patch_size=4, channels=1, num_classes=5, width=32, depth=2, num_heads=2, mlp_dim=48,
        position=position, position_init_std=1.0,  # type: ignore[arg-type]
    )  # fmt: skip
    net = ViT(config, seed=0).double().eval()
    torch.nn.init.normal_(net.head.weight, generator=torch.Generator().manual_seed(2))
    return net


@pytest.mark.parametrize("scale", SCALES)
def test_vits_differ_in_their_positions_only(scale: Scale):
    found = {arm.name: arm for arm in arms(scale)}
    assert set(found) == {*KINDS, RES}
    same = set()
    for name, kind in KINDS.items():
        config = found[name].config
        assert isinstance(config.model, ViTConfig)
        assert config.model.position == kind
        same.add(config.replace(model=config.model.replace(position="none").to_dict()))
    assert len(same) == 1
    assert isinstance(found[RES].config.model, BiTConfig)
    assert found[RES].config.replace(model=None, init_from="x") == same.pop().replace(model=None, init_from="x")
    assert len({arm.learning_rates for arm in found.values()}) == 1
    assert {measure for arm in found.values() for measure in arm.measures} <= set(MEASURES)


@pytest.mark.parametrize("scale", SCALES)
def test_all_networks_are_measured_with_the_same_patches(scale: Scale):
    found = arms(scale)
    (measure,) = {measure for arm in found for measure in arm.measures}
    assert measure == f"symmetry-{patches_per_side(Results(found, scale, []))}"


def test_shuffled_patches_are_those_of_the_order():
    before, order = images(), next(patch_orders(PER_SIDE**2))
    after = shuffle_patches(before, order, PER_SIDE)
    for place, source in enumerate(order.tolist()):
        (row, column), (top, left) = divmod(place, PER_SIDE), divmod(source, PER_SIDE)
        expected = before[:, :, 4 * top : 4 * top + 4, 4 * left : 4 * left + 4]
        assert torch.equal(after[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4], expected)


def test_a_cyclic_shift_by_a_patch_is_a_permutation_of_patches():
    places = torch.arange(PER_SIDE**2).view(PER_SIDE, PER_SIDE)
    order = places.roll((1, 0), (0, 1)).flatten()
    assert torch.equal(shift(images(), 4, 0), shuffle_patches(images(), order, PER_SIDE))


def test_without_positions_outputs_and_tokens_follow_the_patches():
    found = exact_numbers(vit("none"), images(), PER_SIDE)
    for name in ("logit change, largest", "feature change, largest", "token equivariance"):
        assert found[name] < 1e-12


@pytest.mark.parametrize("position", [kind for kind in KINDS.values() if kind != "none"])
def test_with_positions_they_do_not(position: str):
    found = exact_numbers(vit(position), images(), PER_SIDE)
    assert min(found["logit change"], found["feature change"], found["token equivariance"]) > 1e-3


def test_a_zero_head_has_no_relative_change():
    net = vit("learned-1d")
    torch.nn.init.zeros_(net.head.weight)
    found = exact_numbers(net, images(), PER_SIDE)
    assert "logit change" not in found
    assert found["feature change"] > 1e-3


@torch.no_grad()
def test_attention_reaches_all_tokens_and_the_mlp_none():
    found = reaches(vit("learned-1d"), images())
    expected = {"attention reach": 1, "MLP reach": 0, "patch reach, embedding": 0, "patch reach, first block": 1}
    assert found == expected


@torch.no_grad()
def test_a_block_whose_attention_is_off_reaches_no_other_token():
    net = vit("learned-1d")
    torch.nn.init.zeros_(net.blocks[0].attention.out.weight)  # type: ignore[union-attr, arg-type]
    assert reaches(net, images())["patch reach, first block"] == 0


def test_a_resnet_has_no_token_measures():
    config = BiTConfig(image_size=16, channels=1, num_classes=5, width_factor=0.5, layers=(1,))
    found = exact_numbers(BiT(config, seed=0).double().eval(), images(), PER_SIDE)
    assert found["feature change"] > 1e-3
    assert "token equivariance" not in found


def test_predictions_are_compared_with_those_of_the_unchanged_images():
    net, batch = vit("none"), images(20)
    classes = net(batch).argmax(1)
    classes[:5] = (classes[:5] + 1) % 5
    found = prediction_numbers(net, batch, classes, PER_SIDE)
    assert found["accuracy"] == 0.75
    for name in ("shuffled", "4 px", "8 px"):
        assert found[f"agreement, {name}"] == 1
        assert found[f"accuracy, {name}"] == 0.75
    by_hand = np.mean([
        (net(batch.roll(by, dim)).argmax(1) == net(batch).argmax(1)).double().mean().item()
        for by in (1, -1) for dim in (2, 3)
    ])  # fmt: skip
    assert found["agreement, 1 px"] == pytest.approx(by_hand)


def made_up(seeds: int = 3, **changes: dict[str, float]) -> Results:
    """Results as the claims have them; `changes` replace numbers of an arm."""
    found = []
    for arm in arms("tiny"):
        values: dict[str, Any] = {"agreement, 1 px": 0.7}
        if arm.name != RES:
            exact = 1e-15 if arm.name == NONE else 0.5
            for suffix in ("", ", untrained"):
                names = ("logit change", "logit change, largest", "feature change, largest", "token equivariance")
                values |= {name + suffix: exact for name in names}
                values |= {f"{name}{suffix}": 1.0 for name in ("attention reach", "patch reach, first block")}
                values |= {f"{name}{suffix}": 0.0 for name in ("MLP reach", "patch reach, embedding")}
        values |= changes.get(arm.name, {})
        for seed in range(seeds):
            trial = Trial(arm=arm, lr=arm.rates[0], seed=seed)
            found.append(make_result(trial, test=0.9, validation=0.9, measures=values))
    return Results(arms("tiny"), "tiny", found)


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


def test_the_paper_s_statements_are_recognized():
    assert outcomes(made_up()) == ["holds"] * 6


@pytest.mark.parametrize(
    ("arm", "number", "value", "verdict"),
    [
        (NONE, "logit change, largest", 1e-3, 0),
        (NONE, "feature change, largest, untrained", 1e-3, 0),
        ("rotary", "logit change", 1e-6, 1),
        (NONE, "token equivariance", 1e-3, 2),
        ("2-D", "attention reach", 0.9, 3),
        ("relative", "MLP reach, untrained", 0.1, 4),
        (RES, "agreement, 1 px", 1.0, 5),
        (NONE, "logit change, largest", 1e-8, 0),
    ],
)
def test_one_number_against_a_claim_changes_its_verdict_only(arm: str, number: str, value: float, verdict: int):
    expected = ["holds"] * 6
    expected[verdict] = "does not hold"
    assert outcomes(made_up(**{arm: {number: value}})) == expected


def test_a_resnet_that_changes_one_prediction_in_a_thousand_is_not_invariant():
    assert outcomes(made_up(**{RES: {"agreement, 1 px": 0.999}}))[5] == "holds"


def test_a_claim_about_every_kind_of_positions_needs_all_of_them():
    whole = made_up()
    some = Results(arms("tiny"), "tiny", [trial for trial in whole.trials.values() if trial.arm != "rotary"])
    verdict = analyze(some).verdicts[1]
    assert verdict.outcome == "undecided"
    assert verdict.reason.endswith("Not finished: rotary.")


def test_nothing_is_decided_without_results():
    assert outcomes(Results(arms("tiny"), "tiny", [])) == ["undecided"] * 6
