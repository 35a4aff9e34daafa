"""Kinds of position encoding, and where they are added: the paper's Table 8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from vitrail.config import DataConfig
from vitrail.reproduction.analysis import Analysis, Plot, arm_table, compare, similar
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.plots import Panel, dot_plot
from vitrail.reproduction.results import Results, SeedMean, mean_difference
from vitrail.reproduction.scales import LEARNING_RATES, base_config, vary_model

NONE, DEFAULT = "none", "1-D, stem"
ENCODINGS: dict[str, dict[str, Any]] = {
    NONE: {"position": "none"},
    DEFAULT: {"position": "learned-1d", "position_at": "stem"},
    "1-D, layers": {"position": "learned-1d", "position_at": "layers"},
    "1-D, shared": {"position": "learned-1d", "position_at": "shared"},
    "2-D, stem": {"position": "learned-2d", "position_at": "stem"},
    "2-D, layers": {"position": "learned-2d", "position_at": "layers"},
    "2-D, shared": {"position": "learned-2d", "position_at": "shared"},
    "relative, layers": {"position": "relative", "position_at": "layers"},
    "sin-cos, stem": {"position": "sincos-2d", "position_at": "stem"},
    "rotary, layers": {"position": "rope-2d", "position_at": "layers"},
}
PUBLISHED = {
    NONE: 0.61382, DEFAULT: 0.64206, "1-D, layers": 0.63964, "1-D, shared": 0.64292, "2-D, stem": 0.64001,
    "2-D, layers": 0.64046, "2-D, shared": 0.64022, "relative, layers": 0.64032,
}  # fmt: skip
"""Table 8: 5-shot accuracy on ImageNet of a pre-trained B/16; the paper does not name the data."""
PAPERS_KINDS = (DEFAULT, "2-D, stem", "relative, layers")


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    config = base_config(scale, data)
    found = []
    for name, fields in ENCODINGS.items():
        kind, _, place = name.partition(", ")
        found.append(
            Arm(
                name=name,
                config=vary_model(config, **fields),
                factors={"positions": kind, "added at": place or "–"},
                learning_rates=LEARNING_RATES[scale],
                measures=("5-shot",),
            )
        )
    return found


def analyze(results: Results) -> Analysis:
    large = mean_difference(PAPERS_KINDS, [NONE])
    small = "With few patches and a short training, it may matter how much of an encoding has to be learned."
    verdicts = [
        compare("Positions matter: without them, accuracy is lower.", results.difference(DEFAULT, NONE), DEFAULT, NONE),
        similar(
            "The kind matters little: 1-D, 2-D and relative are alike.", results, PAPERS_KINDS, large, why_not=small
        ),
        similar(
            "The place matters little: at the stem, at every layer, or shared by all layers.",
            results, [name for name in ENCODINGS if name.startswith("1-D")], large,
        ),
    ]  # fmt: skip
    published = {"paper: ImageNet, 5-shot": {name: f"{100 * value:.2f}" for name, value in PUBLISHED.items()}}
    metrics = {"test": "test accuracy, %", "5-shot": "5-shot accuracy, %"}
    caption = "Accuracy by position encoding, with 95 % intervals over seeds."
    return Analysis(
        verdicts,
        [
            Plot(
                "positions", "Accuracy by position encoding; bars are 95 % intervals over seeds.", lambda: plot(results)
            ),
            arm_table(results, caption, metrics, reference=NONE, published=published),
        ],
        _differences(results, results.contrast(large)),
    )


def _differences(results: Results, gap: SeedMean | None) -> str:
    text, published = "", sum(PUBLISHED[name] for name in PAPERS_KINDS) / len(PAPERS_KINDS) - PUBLISHED[NONE]
    if gap is not None:
        text = (
            f"The mean of 1-D, 2-D and relative positions minus no positions is {100 * gap.value:+.1f} points; in the "
            f"paper it is {100 * published:+.1f}. "
        )
        if results.scale == "tiny" and gap.has_interval and gap.low > published:
            text += (
                "One reason may be that a patch of a digit is a stroke, which means little without its place, while "
                "the parts of an object in a photograph often tell what it is. "
            )
    return text + (
        "The paper measures 5-shot accuracy on ImageNet of a B/16 with 196 patches per image, and does not name the "
        f"data of its pre-training; here it is {results.setting}, so only differences can be compared. Relative "
        "positions change the attention weights only; tokens carry no position themselves. Sin-cos and rotary "
        "encodings are later work and not in the paper's table."
    )


def plot(results: Results) -> Figure:
    panels = [
        Panel(title, {arm: results.mean(arm, metric) for arm in ENCODINGS})
        for metric, title in (("test", "test accuracy, %"), ("5-shot", "5-shot accuracy, %"))
    ]
    kinds: Sequence[str] = list(dict.fromkeys(name.partition(",")[0] for name in ENCODINGS))
    groups = {name: kinds.index(name.partition(",")[0]) for name in ENCODINGS}
    return dot_plot(list(ENCODINGS), panels, "Position encodings", results.origin, groups)


POSITIONS = Experiment(
    name="positions",
    title="Position encodings",
    claim=(
        "Without positions the model is about 3 points worse; 1-D, 2-D and relative encodings, added at the stem or at "
        "every layer, are alike."
    ),
    source="Dosovitskiy et al., An Image is Worth 16x16 Words, appendix D.4, Table 8",
    arms=arms,
    analyze=analyze,
)
