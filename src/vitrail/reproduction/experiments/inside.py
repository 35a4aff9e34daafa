"""Inspection of a trained ViT: patch filters, positions, attention distance, rollout (the paper's Fig. 6 and 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt
from matplotlib.figure import Figure

from vitrail.config import DataConfig, PreprocessConfig, TrainConfig, ViTConfig, epochs, pair
from vitrail.explain import figures
from vitrail.explain.overlays import as_rgb
from vitrail.explain.positions import SIMILARITY_MEANING
from vitrail.recipes.cifar10 import cifar10
from vitrail.recipes.digits import small_gray_vit
from vitrail.reproduction.analysis import (
    PLAIN,
    Analysis,
    Block,
    Metric,
    Plot,
    Table,
    Verdict,
    arm_table,
    judge,
)
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.plots import Line, line_plot
from vitrail.reproduction.results import Results
from vitrail.reproduction.scales import base_config

Arrays = Mapping[str, npt.NDArray[Any]]

PAPERS, RECIPE = "ViT as in the paper", "recipe for CIFAR-10"
GLOBAL = 0.9
"""A head is called global if its attention distance is at least this fraction of that of uniform attention."""
CORRELATION, SHARE, OVERLAP, LEADING = (
    "position-distance correlation",
    "row and column share",
    "filter overlap",
    "leading filters",
)
PIXELS = Metric(percent=False, digits=1, unit=" px")
FINE = Metric(percent=False, digits=3)


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    """The arms are not compared: they are models with learned positions and, at `gpu`, with rotary ones."""
    if scale == "paper":
        found = {PAPERS: base_config(scale, data)}
    elif scale == "tiny":
        found = {PAPERS: _digits(data)}
    else:
        found = {PAPERS: _cifar10(data, class_token=True), RECIPE: _cifar10(data, class_token=False)}
    arms = []
    for name, config in found.items():
        assert isinstance(config.model, ViTConfig)
        factors = {"positions": config.model.position, "pooling": config.model.pool}
        config = config.replace(snapshot_every=config.duration)
        seeds = 1 if name == RECIPE else None  # shown beside the paper's model, and in no verdict
        arms.append(Arm(name=name, config=config, factors=factors, max_seeds=seeds, measures=("inspection",)))
    return arms


def _digits(data: DataConfig | None) -> TrainConfig:
    """Digits of 8 px enlarged to 32 px, for 8 x 8 patches of 4 px."""
    model = small_gray_vit(image_size=32, patch_size=4, depth=4, mlp_dim=128)
    preprocess = PreprocessConfig(image_size=32, mean=(0.5,), std=(0.5,))
    return base_config("tiny", data, model=model, preprocess=preprocess, duration=epochs(60))


def _cifar10(data: DataConfig | None, *, class_token: bool) -> TrainConfig:
    """The network of the recipe cifar10-small and the settings of cifar10, with 40 epochs in place of 370.

    class_token: with the class token and the learned positions of the paper.
    """
    recipe = cifar10()
    assert recipe.model is not None
    model = recipe.model.replace(width=192, num_heads=3, mlp_dim=768, drop_path=0.0)
    if class_token:
        model = model.replace(class_token=True, pool="token", pool_norm="before", position="learned-1d", qk_norm=False)
    changes = {name: getattr(recipe, name) for name in ("classify", "optim", "batch_size", "ema", "compile")}
    return base_config(
        "gpu",
        data,
        model=model,
        augment=recipe.augment.replace(mix_off=epochs(4)),
        schedule=recipe.schedule.replace(warmup=epochs(2)),
        duration=epochs(40),
        **changes,
    )


def analyze(results: Results) -> Analysis:
    blocks: list[Block] = [
        Plot("distance", "Attention distance by depth; bands are 95 % intervals over seeds.", lambda: trend(results)),
        arm_table(results, "The models, with 95 % intervals.", {"test": "test accuracy, %"}),
        number_table(results),
    ]
    for name in results.arms:
        arrays = results.arrays(name)
        if arrays:
            blocks += figure_blocks(results, name, arrays)
    return Analysis(verdicts(results), blocks, _differences(results))


def verdicts(results: Results) -> list[Verdict]:
    arm, widest = PAPERS, "widest first head"
    untrained_head = results.mean(arm, f"{widest}, untrained")
    lowest = judge(
        "Some heads attend to most of the image already in the lowest layer.",
        results.mean(arm, widest), "Widest head of the first layer / uniform attention", above=GLOBAL, metric=PLAIN,
    )  # fmt: skip
    if untrained_head is not None:
        lowest = replace(lowest, reason=f"{lowest.reason} Before training: {PLAIN.format(untrained_head.value)}.")
    unlike = "A model that has learned little from few images may keep much of its initial weights."
    return [
        judge(
            "Attention distance grows with depth.",
            results.change(arm, "distance, last layer", "distance, first layer"),
            "Last minus first layer", above=0.0, metric=PIXELS,
        ),
        lowest,
        judge(
            "Close patches have similar position embeddings.", results.mean(arm, CORRELATION),
            "Correlation of similarity and distance after training", below=0.0, metric=PLAIN, why_not=unlike,
        ),
        judge(
            "The position embeddings have a row-column structure.", results.change(arm, SHARE, f"{SHARE}, untrained"),
            "Variance explained by row and column, trained minus untrained", above=0.0, metric=PLAIN, why_not=unlike,
        ),
        judge(
            "Training concentrates the variance of the filters in fewer components.",
            results.change(arm, LEADING, f"{LEADING}, untrained"),
            "Variance of the leading quarter of the components, trained minus untrained", above=0.0, metric=FINE,
            why_not=_why_random(results),
        ),
        judge(
            "The model attends to regions that matter for the class.", results.mean(arm, "rollout gain"),
            "Area under the deletion curve, random order minus rollout", above=0.0, metric=PLAIN,
            why_not="The class probability falls at least as fast when random patches are masked.",
        ),
    ]  # fmt: skip


def _why_random(results: Results) -> str:
    change, overlap = results.mean(PAPERS, "change of filters"), results.mean(PAPERS, "change overlap")
    if change is None or overlap is None:
        return ""
    return (
        f"Training changes the random initial filters by {100 * change.value:.0f} % of their norm; the leading "
        f"components of this change overlap with those of the patches by {overlap.value:.2f} (0.25 at random)."
    )


def number_table(results: Results) -> Table:
    """Numbers of each arm, trained and untrained, in the rows."""
    names = {
        "distance, first layer": "attention distance, first layer, px",
        "distance, last layer": "attention distance, last layer, px",
        "widest first head": "widest head of the first layer / uniform",
        "deepening": "rank correlation of distance and depth",
        CORRELATION: "correlation of position similarity and distance",
        SHARE: "row and column share of the positions",
        LEADING: "variance of the leading quarter of filter components",
        OVERLAP: "overlap of these with the components of the patches",
        "change of filters": "change of the filters in training / initial filters",
        "change overlap": "overlap of the change with the components of the patches",
        "rollout gain": "deletion area, random minus rollout",
    }
    columns = [(arm, suffix) for arm in results.arms for suffix in ("", ", untrained")]
    rows = [
        [title, *(results.mean(arm, metric + suffix) for arm, suffix in columns)] for metric, title in names.items()
    ]
    titles = [f"{arm}{suffix or ', trained'}" for arm, suffix in columns]
    return Table("What the figures show, as numbers, with 95 % intervals over seeds.", ["", *titles], rows, PLAIN)


def figure_blocks(results: Results, arm: str, arrays: Arrays) -> list[Plot]:
    """The figures of `vitrail figures`, of the model of seed 0."""
    config = results.arms[arm].config
    model = config.model
    assert isinstance(model, ViTConfig)
    about = f"{arm}, {config.data.source}, {pair(model.image_size)[0]} px, seed 0"
    shown = [as_rgb(image) for image in arrays["images"]]
    prefix = f"{'paper' if arm == PAPERS else 'recipe'}-"
    found = [
        Plot(
            f"{prefix}heads",
            f"{arm}: attention distance of each head (Fig. 7, right).",
            lambda: figures.distances(
                arrays["distances"], float(arrays["uniform"]), "Attention distance by layer and head", about
            ),
        ),
        Plot(
            f"{prefix}filters",
            f"{arm}: principal components of the patch embedding filters (Fig. 7, left).",
            lambda: figures.filters(
                arrays["patterns"], arrays["shares"], "Principal components of the patch filters",
                f"{about}; fraction of the variance",
            ),
        ),
        Plot(
            f"{prefix}rollout",
            f"{arm}: test images, each beside the same image masked by attention rollout (Fig. 6).",
            lambda: figures.rollout_grid(shown, [*arrays["rollout"]], "Attention rollout", about, 6),
        ),
        Plot(
            f"{prefix}colors",
            f"{arm}: the first three principal components of the patch features as red, green and blue.",
            lambda: figures.colors(shown[: len(arrays["colors"])], arrays["colors"], "Patch features as colors", about),
        ),
    ]  # fmt: skip
    if "similarity" in arrays:
        meaning = SIMILARITY_MEANING[model.position]
        plot = Plot(
            f"{prefix}positions",
            f"{arm}: similarity of the positions of each pair of patches (Fig. 7, center).",
            lambda: figures.positions(arrays["similarity"], "Similarity of positions", f"{about}; {meaning}"),
        )
        found.insert(2, plot)
    return found


def trend(results: Results) -> Figure:
    """Mean attention distance of each layer, trained and untrained."""
    lines = []
    for arm, labels in zip(results.arms, (("trained", "untrained"), (RECIPE, f"{RECIPE}, untrained")), strict=False):
        model = results.arms[arm].config.model
        assert isinstance(model, ViTConfig)
        for suffix, label in zip(("", ", untrained"), labels, strict=True):
            means = {i: results.mean(arm, f"distance, layer {i}{suffix}") for i in range(1, model.depth + 1)}
            lines.append(Line(label, {float(i): mean for i, mean in means.items() if mean is not None}))
    first = next(iter(results.arms.values())).config
    subtitle = f"{first.data.source}, {results.num_seeds} seeds"
    ticks = [float(i) for i in range(1, max(arm.config.model.depth for arm in results.arms.values()) + 1)]  # type: ignore[union-attr]
    label = "mean attention distance (pixels)"
    return line_plot(lines, "Attention distance", subtitle, "layer", label, percent=False, x_ticks=ticks)


def _differences(results: Results) -> str:
    config = results.arms[PAPERS].config
    model = config.model
    assert isinstance(model, ViTConfig)
    rows, columns = model.grid
    random = (rows + columns - 2) / (rows * columns - 1)
    accuracy = results.mean(PAPERS)
    reached = "" if accuracy is None else f" that reaches {100 * accuracy.value:.1f} %"
    return (
        "The paper inspects ViTs of 24 layers, L/32 and L/16; its figures come without numbers. "
        f"Here it is a model of {model.depth} layers and {rows * columns} patches, trained on "
        f"{config.data.source} alone,{reached}. The attention distance is the mean over 128 test images, "
        "weighted by attention, without the class token. Position embeddings of random vectors have a row and column "
        f"share of {random:.2f}; the leading quarter of the components of random filters has more than 0.25 of the "
        "variance and an overlap of 0.25. Learned structure is the difference from the network's initial weights. "
        "A head with nearly uniform attention counts as global, so that a network may have one before training. "
        "Rollout is tested by masking: if the probability of the predicted class falls faster when the patches with "
        "the most rollout are masked first than in random order, these patches matter. Every figure shows seed 0."
    )


INSIDE = Experiment(
    name="inside",
    title="Inside a trained ViT",
    claim=(
        "The first filters are a low-dimensional basis of the patches; positions show distances, rows and columns; "
        "some heads attend to the whole image in the lowest layer, and attention distance grows with depth; the model "
        "attends to what matters for the class."
    ),
    source="Dosovitskiy et al., An Image is Worth 16x16 Words, Section 4.5, Fig. 6 and 7, and appendix D.7, Fig. 11",
    arms=arms,
    analyze=analyze,
)
