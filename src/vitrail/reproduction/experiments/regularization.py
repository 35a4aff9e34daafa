"""Weight decay, dropout with stochastic depth, and augmentation, against fractions of the training images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.figure import Figure

from vitrail.config import DataConfig, TrainConfig
from vitrail.reproduction.analysis import Analysis, Cell, Paragraph, Plot, Table, Verdict, arm_table, compare, shrinks
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.curves import curve_of_seed, geometric_mean, log_error, mean_curve, x_where
from vitrail.reproduction.data_fractions import on_fraction
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.plots import curve_plot
from vitrail.reproduction.results import Results, SeedMean
from vitrail.reproduction.scales import LEARNING_RATES, base_config, vary_model

NONE, DECAY, DROPOUT, AUGMENT = "none", "weight decay", "dropout, stochastic depth", "augmentation"
TREATMENTS = (NONE, AUGMENT, DROPOUT, DECAY)
FRACTIONS: dict[Scale, tuple[float, ...]] = {
    "tiny": (0.1, 0.3, 1.0),
    "gpu": (0.1, 0.3, 1.0),
    "paper": (0.1, 1.0),
}
"""Fractions of the training images. `paper`: ImageNet-1k has a tenth of the images of ImageNet-21k."""
WEIGHT_DECAY: dict[Scale, float] = {"tiny": 1.0, "gpu": 0.3, "paper": 0.1}
"""Decay per unit of the learning rate. The paper's 0.1 would shrink nothing in the few steps of the smaller scales."""
MAGNITUDE: dict[Scale, float] = {"tiny": 5.0, "gpu": 10.0, "paper": 10.0}
"""Magnitude of RandAugment; the operations at full magnitude make digits of 8 px unreadable."""
PUBLISHED_FACTOR = 10.0
"""Section 4.1: augmentation and regularization are worth about an order of magnitude of data."""
TOLERANCE = 3.0
"""About ten means within this factor."""


def arm_name(treatment: str, fraction: float) -> str:
    return f"{treatment}, {100 * fraction:g} %"


def treat(config: TrainConfig, treatment: str, scale: Scale) -> TrainConfig:
    """One treatment and none of the others. All of them have the scale's crops and flips, as in the paper."""
    decay = WEIGHT_DECAY[scale] if treatment == DECAY else 0.0
    rate = 0.1 if treatment == DROPOUT else 0.0
    changes = {"optim": config.optim.replace(weight_decay=decay).to_dict()}
    if treatment == AUGMENT:
        augment = config.augment.replace(policy="rand", num_ops=2, magnitude=MAGNITUDE[scale], mixup=0.2)
        changes["augment"] = augment.to_dict()
    return vary_model(config.replace(**changes), dropout=rate, drop_path=rate)


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    """Every fraction with the same number of steps, the least data first."""
    return [
        Arm(
            name=arm_name(treatment, fraction),
            config=on_fraction(treat(base_config(scale, data), treatment, scale), scale, fraction),
            factors={"regularization": treatment, "training images, %": f"{100 * fraction:g}"},
            learning_rates=LEARNING_RATES[scale],
        )
        for fraction in FRACTIONS[scale]
        for treatment in TREATMENTS
    ]


def treatment_arms(scale: Scale, treatment: str) -> dict[float, str]:
    """Percentage of the training images -> arm."""
    return {100 * fraction: arm_name(treatment, fraction) for fraction in FRACTIONS[scale]}


@dataclass(frozen=True)
class DataWorth:
    """How many times the data the unregularized model needs for the accuracy of a treatment."""

    factor: SeedMean | None
    """Geometric mean over the seeds; a seed that is beyond the curve counts with the end of the curve."""
    num_above: int = 0
    """Seeds that are better than the unregularized model with all data: their factor is a lower bound."""
    num_below: int = 0
    """Seeds that are worse than it with the least data: their factor is an upper bound."""

    @property
    def is_capped(self) -> bool:
        """Whether a seed is beyond the curve, so that the factor is a bound and its interval means nothing."""
        return self.num_above + self.num_below > 0

    @property
    def text(self) -> str | None:
        if self.factor is None:
            return None
        value, count = f"{self.factor.value:.2g}", self.factor.count
        if self.num_above and self.num_below:
            return f"unknown: {self.num_above} of {count} seeds above the curve, {self.num_below} below"
        if self.is_capped:
            return f"at least {value}" if self.num_above else f"at most {value}"
        interval = f" ({self.factor.low:.2g} to {self.factor.high:.2g})" if self.factor.has_interval else ""
        return f"{value}{interval}"


def data_worth(results: Results, treatment: str, percent: float) -> DataWorth:
    """Interpolated for each seed from its curve without regularization, linear in the logarithm of the data.

    The sampling errors of the test images, of the curve and of the treatment, are the least that seeds vary by.
    """
    plain, treated = treatment_arms(results.scale, NONE), treatment_arms(results.scale, treatment)
    factors, above, below = [], 0, 0
    for seed, score in results.values(treated[percent]).items():
        curve = curve_of_seed(results, plain, seed)
        if len(curve) < 2:
            continue
        reached = x_where(curve, score)
        if reached is None:
            is_above = score > max(curve.values())
            above, below = above + is_above, below + (not is_above)
            reached = max(curve) if is_above else min(curve)
        factors.append(reached / percent)
    sample = results.sample(treated[percent])
    if sample is None:
        return DataWorth(None)
    means = {x: mean.value for x, mean in mean_curve(results, plain).items()}
    error = log_error(means, sample.mean, math.sqrt(2 * sample.least_variance))
    return DataWorth(geometric_mean(factors, error**2), above, below)


def analyze(results: Results) -> Analysis:
    least, most = min(FRACTIONS[results.scale]), max(FRACTIONS[results.scale])
    few = {treatment: arm_name(treatment, least) for treatment in TREATMENTS}
    full = {treatment: arm_name(treatment, most) for treatment in TREATMENTS}
    verdicts = [
        compare(f"With {100 * least:g} % of the data, augmentation helps.",
                results.difference(few[AUGMENT], few[NONE]), AUGMENT, NONE, why_not=_why(results)),
        _worth_verdict(results, 100 * least),
        compare(f"Augmentation helps more than dropout and stochastic depth ({100 * least:g} % of the data).",
                results.difference(few[AUGMENT], few[DROPOUT]), AUGMENT, "dropout", why_not=_why(results)),
        shrinks("With more data and the same number of steps, augmentation helps less.", results,
                (few[AUGMENT], few[NONE]), (full[AUGMENT], full[NONE]), (f"at {100 * least:g} %", "at 100 %")),
    ]  # fmt: skip
    caption = "Test accuracy by treatment and number of training images, with 95 % intervals over seeds."
    return Analysis(
        verdicts,
        [
            Plot("regularization", "Test accuracy over the data; bands are 95 % intervals.", lambda: plot(results)),
            _gains(results),
            _worths(results),
            arm_table(results, caption, {"test": "test accuracy, %"}),
            Paragraph(_describe_full(results, full)),
        ],
        "The paper trains six ViTs and three hybrids on ImageNet-1k for 300 epochs and on the ten times larger "
        "ImageNet-21k for 30 and for 300, with and without dropout and stochastic depth of 0.1, seven settings of "
        "mixup and RandAugment, and two of weight decay; its best models with augmentation and regularization on "
        "ImageNet-1k are about equal to plain ones on ImageNet-21k after fine-tuning (Fig. 1). Here it is "
        f"{results.setting}, on fractions of the images, all for the same number of steps, without fine-tuning. Each "
        "treatment has one strength: dropout and stochastic depth 0.1, RandAugment of 2 operations at magnitude "
        f"{MAGNITUDE[results.scale]:g} of 10 with mixup 0.2, weight decay {WEIGHT_DECAY[results.scale]:g}; 'none' "
        "keeps random crops (and flips, where the data has them).",
    )


def _worth_verdict(results: Results, percent: float) -> Verdict:
    claim = f"Augmentation is worth about {PUBLISHED_FACTOR:g} times the data (at {percent:g} % of the data)."
    worth = data_worth(results, AUGMENT, percent)
    if worth.factor is None:
        return Verdict(claim, "undecided", "too few of the runs are finished.")
    factor = worth.factor
    least, most = PUBLISHED_FACTOR / TOLERANCE, PUBLISHED_FACTOR * TOLERANCE
    if worth.num_below == factor.count > 1:
        reason = f"in every seed, accuracy is lower than without augmentation, so it is worth no data. {_why(results)}"
        return Verdict(claim, "does not hold", reason.strip())
    if worth.num_above and worth.num_below:
        reason = "how much data without it gives the same accuracy cannot be read from the curve."
    else:
        reason = f"without it, the same accuracy takes {worth.text} times the data"
        reason += f"; about ten means {least:.2g} to {most:.2g}."
    if worth.num_above:
        reason += f" {worth.num_above} of {factor.count} seeds are better than all data without it."
    if worth.num_below:
        reason += f" {worth.num_below} of {factor.count} seeds are worse than without it."
    if not factor.has_interval:
        return Verdict(claim, "undecided", f"{reason} One seed has no interval.")
    if factor.high < least and not worth.num_above:
        return Verdict(claim, "does not hold", reason)
    if factor.low > least and factor.high < most and not worth.is_capped:
        return Verdict(claim, "holds", reason)
    return Verdict(claim, "undecided", reason)


def _why(results: Results) -> str:
    """Why augmentation may lower the accuracy."""
    reasons = []
    if next(iter(results.arms.values())).config.data.source == "digits":
        reasons.append(
            "At 8 px, RandAugment's shifts, shears and rotations may turn one digit's strokes into another's."
        )
    least, most = min(FRACTIONS[results.scale]), max(FRACTIONS[results.scale])
    augmented, plain = (
        results.difference(arm_name(treatment, most), arm_name(treatment, least)) for treatment in (AUGMENT, NONE)
    )
    if augmented is not None and plain is not None and plain.value > 0 and augmented.value < plain.value / 4:
        reasons.append(
            f"With augmentation, {most / least:g} times the data change the accuracy by {100 * augmented.value:+.2f} "
            f"points ({100 * plain.value:+.2f} without): the number of steps limits these runs, not the data."
        )
    return " ".join(reasons)


def _gains(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for treatment in TREATMENTS[1:]:
        pairs = [(arm_name(treatment, f), arm_name(NONE, f)) for f in FRACTIONS[results.scale]]
        rows.append([treatment, *(results.difference(*pair) for pair in pairs)])
    columns = ["", *(f"{100 * fraction:g} % of the data" for fraction in FRACTIONS[results.scale])]
    return Table("Gain over no regularization, in points.", columns, rows)


def _worths(results: Results) -> Table:
    fractions = [100 * fraction for fraction in FRACTIONS[results.scale] if fraction < 1]
    rows: list[list[Cell]] = [
        [treatment, *(data_worth(results, treatment, percent).text for percent in fractions), text]
        for treatment, text in zip(TREATMENTS[1:], ("about 10", None, None), strict=True)
    ]
    columns = ["", *(f"at {percent:g} % of the data" for percent in fractions), "paper, Fig. 1 (all together)"]
    return Table("How many times the data without regularization gives the same accuracy.", columns, rows)


def _describe_full(results: Results, full: dict[str, str]) -> str:
    """Whether the treatments still help with all the data, where the paper finds that almost everything hurts."""
    parts, helps = [], False
    for treatment in TREATMENTS[1:]:
        gain = results.difference(full[treatment], full[NONE])
        if gain is None:
            continue
        effect = "helps" if gain.value > 0 else "hurts"
        sure = gain.has_interval and not gain.low <= 0 <= gain.high
        helps = helps or (sure and gain.value > 0)
        parts.append(
            f"{treatment} {effect} by {100 * abs(gain.value):.2f} points{'' if sure else ' (not significant)'}"
        )
    if not parts:
        return "With all the data, too few runs are finished."
    text = f"With all the data: {'; '.join(parts)}. The paper finds that on ImageNet-21k with a fixed training budget "
    text += "almost everything hurts (Fig. 4), except for its largest models."
    if helps and results.scale != "paper":
        text += " All the data here is little in comparison, so that these networks may still overfit it."
    return text


def plot(results: Results) -> Figure:
    arms = {treatment: treatment_arms(results.scale, treatment) for treatment in TREATMENTS}
    return curve_plot(results, arms, "Regularization and data, equal steps", "training images, % of all")


REGULARIZATION = Experiment(
    name="regularization",
    title="Augmentation and regularization against data",
    claim=(
        "With little data almost any augmentation or regularization helps, and together they are worth about ten times "
        "the data; augmentation helps more often than regularization. With ten times the data and the same compute, "
        "almost everything hurts."
    ),
    source="Steiner et al., How to train your ViT?, arXiv 2106.10270, sections 4.1 and 4.4, Fig. 1 and 4",
    arms=arms,
    analyze=analyze,
)
