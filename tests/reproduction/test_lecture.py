"""The lecture experiment: its settings, the structure of weights it measures, verdicts from made-up numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reproduction.synthetic import make_result

from vitrail.config import DataConfig, ViTConfig, steps
from vitrail.models import ViT
from vitrail.reproduction.analysis import Plot
from vitrail.reproduction.arm import SCALES, Scale, Trial
from vitrail.reproduction.experiments.lecture import (
    DEFAULT,
    LONG,
    MEAN,
    NO_POSITIONS,
    analyze,
    arms,
    filter_figure,
    position_figure,
)
from vitrail.reproduction.measures.development import development
from vitrail.reproduction.measures.weight_structure import (
    change_components,
    change_numbers,
    distance_correlation,
    patch_components,
    row_column_share,
    subspace_overlap,
)
from vitrail.reproduction.results import ARRAYS_FILE, Results
from vitrail.training.runs import train

MNIST_STEPS = 10 * 60_000 / 256
GRID = (5, 6)


def cosines(table: np.ndarray) -> np.ndarray:
    """h w D -> h w h w."""
    flat = table.reshape(-1, table.shape[-1])
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return (flat @ flat.T).reshape(*table.shape[:2], *table.shape[:2])


@pytest.mark.parametrize(("scale", "data"), [("gpu", None), ("paper", None), ("tiny", DataConfig(source="mnist"))])
def test_on_mnist_the_settings_are_the_lecture_s(scale: Scale, data: DataConfig | None):
    config = arms(scale, data)[0].config
    model, optim = config.model, config.optim
    assert isinstance(model, ViTConfig)
    assert (model.image_size, model.patch_size, model.width, model.num_heads, model.depth) == (
        (28, 28),
        (4, 4),
        64,
        4,
        2,
    )
    assert (optim.kind, optim.lr, optim.weight_decay, config.batch_size) == ("adamw", 1e-3, 0.0, 256)
    assert (config.schedule.kind, config.schedule.warmup.count, str(config.duration)) == ("constant", 0, "10 epochs")
    assert config.data.source == "mnist"


def test_digits_have_as_many_steps_as_mnist():
    config = arms("tiny")[0].config
    images = round(1438 * (1 - (config.data.held_out or 0)))
    assert isinstance(config.batch_size, int)
    assert config.duration.to_steps(batch_size=config.batch_size, images=images) == pytest.approx(MNIST_STEPS, rel=0.15)
    assert config.data.source == "digits"


@pytest.mark.parametrize("scale", SCALES)
def test_arms_differ_in_positions_pooling_and_length_only(scale: Scale):
    found = {arm.name: arm for arm in arms(scale)}
    same = set()
    for name, arm in found.items():
        model = arm.config.model
        assert isinstance(model, ViTConfig)
        assert (model.position == "none") == name.startswith("no positions")
        assert (model.pool, model.class_token) == (("gap", False) if "mean" in name else ("token", True))
        changed = model.replace(position="none", class_token=True, pool="token")
        same.add(arm.config.replace(model=changed.to_dict(), duration=steps(1).to_dict()))
    assert len(same) == 1
    assert (LONG in found) == (scale != "tiny")


def test_similarity_that_falls_with_distance_has_correlation_minus_one():
    places = np.stack(np.meshgrid(*map(np.arange, GRID), indexing="ij"), -1).reshape(-1, 2)
    distances = np.linalg.norm(places[:, None] - places[None], axis=2).reshape(*GRID, *GRID)
    assert distance_correlation(1 - 0.1 * distances) == pytest.approx(-1)
    assert distance_correlation(0.1 * distances) == pytest.approx(1)


def test_row_and_column_share_is_the_two_way_analysis_of_variance():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(*GRID, 40))
    table /= np.linalg.norm(table, axis=2, keepdims=True)
    centered = table - table.mean((0, 1))
    by_row, by_column = centered.mean(1, keepdims=True), centered.mean(0, keepdims=True)
    expected = (np.square(by_row).sum() * GRID[1] + np.square(by_column).sum() * GRID[0]) / np.square(centered).sum()
    assert row_column_share(cosines(table)) == pytest.approx(expected)
    assert expected == pytest.approx(sum(n - 1 for n in GRID) / (GRID[0] * GRID[1] - 1), abs=0.05)


def test_halves_for_row_and_column_have_a_share_of_one():
    rng = np.random.default_rng(1)
    rows, columns = rng.normal(size=(GRID[0], 1, 8)), rng.normal(size=(1, GRID[1], 8))
    rows, columns = (part / np.linalg.norm(part, axis=2, keepdims=True) for part in (rows, columns))
    halves = [np.broadcast_to(part, (*GRID, 8)) for part in (rows, columns)]
    assert row_column_share(cosines(np.concatenate(halves, axis=2))) == pytest.approx(1)


def test_patch_components_are_those_of_scikit_learn():
    from sklearn.decomposition import PCA

    images = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(0)).cumsum(3)
    patches = [
        image[:, y : y + 4, x : x + 4].permute(1, 2, 0).flatten().numpy()
        for image in images for y in (0, 4) for x in (0, 4)
    ]  # fmt: skip
    found, shares = patch_components(images, (4, 4))
    expected = PCA(5).fit(np.stack(patches).astype(float))
    cosine = np.abs((found[:5].reshape(5, -1) * expected.components_).sum(1))
    np.testing.assert_allclose(cosine, 1, atol=1e-6)
    np.testing.assert_allclose(shares[:5], expected.explained_variance_ratio_, rtol=1e-6)


def test_overlap_is_one_for_equal_spans_and_their_share_at_random():
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(16, 16)))[0].reshape(16, 4, 4, 1)
    mixed = np.tensordot(np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0], basis[:4], 1)
    assert subspace_overlap(mixed, basis[:4]) == pytest.approx(1)
    assert subspace_overlap(basis[4:8], basis[:4]) == pytest.approx(0)
    assert subspace_overlap(basis[:4], np.eye(16).reshape(16, 4, 4, 1)) == pytest.approx(1)


def test_the_change_of_the_filters_is_found_under_the_initial_values():
    config = ViTConfig(image_size=8, patch_size=4, channels=1, width=32, depth=1, num_heads=2, mlp_dim=8)
    before, after = ViT(config, seed=0), ViT(config, seed=0)
    patches = np.eye(16).reshape(16, 4, 4, 1)
    with torch.no_grad():
        after.patch.weight[:, 0, 0] += 0.01 * torch.randn(32, 4)  # the first row of the patch: 4 of the 16 directions
    assert subspace_overlap(change_components(after, before)[:4], patches[:4]) == pytest.approx(1)
    found = change_numbers(after, before, patches)
    assert found["change overlap"] == pytest.approx(1)
    assert 0 < found["change of filters"] < 0.1


def test_development_measures_the_run(tmp_path: Path):
    config = arms("tiny")[0].config.replace(duration=steps(6), snapshot_every=steps(3))
    run = train(config, out=tmp_path / "run", report=False)
    found = development(run)
    assert run.test_scores is not None
    assert found["accuracy"] == pytest.approx(run.test_scores.top1)
    assert found["change of filters"] > found["change of filters, first"] > 0
    arrays = dict(np.load(run.path / ARRAYS_FILE))
    assert arrays["step"].tolist() == [0, 3, 6]
    assert distance_correlation(arrays["similarity"][1]) == found["position-distance correlation, first"]
    assert arrays["overlap_change"][3] == found["change overlap"]
    position_figure(arrays, DEFAULT)
    filter_figure(arrays)


def made_up(scale: Scale, test: dict[str, float], **measures: float) -> Results:
    """Results with these accuracies, and numbers as the claims have them unless given."""
    values = {
        "accuracy, first": 0.68, "position-distance correlation, untrained": -0.1,
        "position-distance correlation": -0.5, "row and column share, untrained": 0.2, "row and column share": 0.5,
        "filter overlap": 0.7, "filter overlap, untrained": 0.25, "change overlap": 0.9, "change of filters": 0.5,
    } | {name.replace("_", " "): value for name, value in measures.items()}  # fmt: skip
    found = [
        make_result(Trial(arm=arm, lr=1e-3, seed=seed), test=test.get(arm.name, 0.9) + 0.0005 * seed, measures=values)
        for arm in arms(scale) for seed in range(3)
    ]  # fmt: skip
    return Results(arms(scale), scale, found)


AS_CLAIMED = {DEFAULT: 0.98, NO_POSITIONS: 0.85, MEAN: 0.985}


def outcomes(results: Results) -> list[str]:
    return [verdict.outcome for verdict in analyze(results).verdicts]


def test_the_lecture_s_claims_are_recognized():
    assert outcomes(made_up("gpu", AS_CLAIMED)) == ["holds"] * 7


def test_each_claim_can_fail():
    assert outcomes(made_up("gpu", AS_CLAIMED | {DEFAULT: 0.95}))[0] == "does not hold"
    assert outcomes(made_up("gpu", AS_CLAIMED | {NO_POSITIONS: 0.99}))[1] == "does not hold"
    assert outcomes(made_up("gpu", AS_CLAIMED | {MEAN: 0.9}))[2] == "does not hold"
    numbers = {"change_overlap": 0.1, "filter_overlap": 0.1, "row_and_column_share": 0.1}
    results = made_up("gpu", AS_CLAIMED, **numbers, **{"position-distance correlation": 0.0})
    assert outcomes(results)[3:] == ["does not hold"] * 4
    assert "The border of MNIST's images is almost always empty" in analyze(results).verdicts[3].reason


def test_the_structure_of_the_positions_is_compared_with_the_untrained_network_s():
    early = {"position-distance correlation, first": -0.6}  # most of the structure is there after the first snapshot
    assert outcomes(made_up("gpu", AS_CLAIMED, **early))[3] == "holds"


def test_the_figure_of_accuracies_has_one_color_with_positions_and_one_without():
    (plot,) = [b for b in analyze(made_up("gpu", AS_CLAIMED)).blocks if isinstance(b, Plot) and b.name == "accuracy"]
    axes = plot.draw().axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    dots = [line.get_color() for line in axes.get_lines() if line.get_marker() == "o"]
    without = {color for row, color in zip(rows, dots, strict=True) if row.startswith("no positions")}
    assert len(without) == 1
    assert len(set(dots) - without) == 1


def test_other_data_says_nothing_about_mnist():
    assert outcomes(made_up("tiny", AS_CLAIMED))[0] == "undecided"


def test_the_slides_are_compared_with_the_closest_accuracies():
    blocks = analyze(made_up("gpu", AS_CLAIMED | {"no positions, mean": 0.95})).blocks
    (text,) = [block.text for block in blocks if hasattr(block, "text") and "slides" in block.text]
    assert "closest to 95 % is “no positions, mean” at the end with 95.0" in text
    assert "after 1 epoch with 68.0 %" in text
