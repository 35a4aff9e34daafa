"""Class token, mean of the patches or attention pooling, each at every learning rate of a sweep: the paper's Fig. 9."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from vitrail.config import DataConfig
from vitrail.reproduction.analysis import Analysis, Cell, Paragraph, Plot, Table, Verdict, compare, judge
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.plots import curve_plot
from vitrail.reproduction.results import Results
from vitrail.reproduction.scales import base_config, vary_model

TOKEN, MEAN, ATTENTION = "class token", "mean", "attention"
POOLINGS: dict[str, dict[str, Any]] = {
    TOKEN: {"class_token": True, "pool": "token"},
    MEAN: {"class_token": False, "pool": "gap"},
    ATTENTION: {"class_token": False, "pool": "map"},
}
RATES: dict[Scale, tuple[float, ...]] = {
    "tiny": (3e-3, 1e-3, 1e-2, 3e-4, 3e-2),
    "gpu": (2e-3, 1e-3, 4e-3, 5e-4, 8e-3),
    "paper": (8e-4, 3e-4, 1.6e-3),
}
"""The sweep, the most likely first. `paper`: the two rates of Fig. 9 and one above."""
PUBLISHED_RATES = {TOKEN: "0.0008", MEAN: "0.0003"}
"""Fig. 9: the learning rates at which both reach the same 5-shot accuracy on ImageNet; the paper draws it only."""
MARGIN = 0.01
"""Poolings whose accuracies differ by less than this are called equal."""


def arm_name(pooling: str, rate: float) -> str:
    return f"{pooling}, {rate:g}"


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    """An arm for each pooling and learning rate, so that all of them have every seed."""
    config = base_config(scale, data)
    return [
        Arm(
            name=arm_name(pooling, rate),
            config=vary_model(config.replace(optim=config.optim.replace(lr=rate).to_dict()), **fields),
            factors={"pooling": pooling, "learning rate": f"{rate:g}"},
            measures=("5-shot",),
        )
        for rate in RATES[scale]
        for pooling, fields in POOLINGS.items()
    ]


def compared_rates(results: Results) -> list[float]:
    """The learning rates that every pooling with a result has finished: a budget may end the sweep of some early."""
    found = {p: {r for r in RATES[results.scale] if results.of_arm(arm_name(p, r))} for p in POOLINGS}
    begun = [rates for rates in found.values() if rates]
    return [rate for rate in RATES[results.scale] if begun and all(rate in rates for rates in begun)]


def best_rate(results: Results, pooling: str) -> float | None:
    """Of `compared_rates`, that of the highest validation accuracy, the mean over seeds; None without a result.

    A run that diverged counts as an accuracy of zero.
    """
    found = {rate: results.of_arm(arm_name(pooling, rate)) for rate in compared_rates(results)}
    known = {rate: [trial.validation or 0.0 for trial in trials] for rate, trials in found.items() if trials}
    best = max(known, key=lambda rate: sum(known[rate]) / len(known[rate]), default=None)
    return best if best is not None and results.values(arm_name(pooling, best)) else None


def analyze(results: Results) -> Analysis:
    rates = {pooling: rate for pooling in POOLINGS if (rate := best_rate(results, pooling)) is not None}
    best = {pooling: arm_name(pooling, rate) for pooling, rate in rates.items()}
    verdicts = [
        _equal("The mean of the patches and the class token are equally good, each at its own learning rate.",
               results, best, MEAN),
        _needs_own_rate(results, rates),
        _equal("Attention pooling and the class token are equally good, each at its own learning rate.", results, best,
               ATTENTION),
    ]  # fmt: skip
    return Analysis(
        verdicts,
        [
            Plot("pooling", "Test accuracy at each learning rate; bands are 95 % intervals.", lambda: plot(results)),
            _best_table(results, best),
            _sweep_table(results),
            Paragraph(_edges(results, rates)),
        ],
        "The paper shows 5-shot accuracy on ImageNet during seven epochs of pre-training, for two learning rates of "
        f"the mean and one of the class token, in a figure without numbers. Here it is {results.setting}, "
        "and each pooling has the same sweep of learning rates with every seed at every rate; its own rate is the one "
        "with the highest mean accuracy on held-out training images. Attention pooling (one learned query over the "
        f"patches, then an MLP) is later work and has more parameters. Accuracies within {100 * MARGIN:g} point are "
        "called equal. Only rates that every pooling has finished are compared.",
    )


def _equal(claim: str, results: Results, best: dict[str, str], pooling: str) -> Verdict:
    """The verdict on "as good as the class token": the difference is within the margin."""
    difference = results.difference(best[pooling], best[TOKEN]) if pooling in best and TOKEN in best else None
    return judge(claim, difference, f"{pooling} minus {TOKEN}", above=-MARGIN, below=MARGIN)


def _needs_own_rate(results: Results, rates: dict[str, float]) -> Verdict:
    claim = "The mean of the patches needs another learning rate: at the class token's it is worse than at its own."
    if TOKEN not in rates or MEAN not in rates:
        return Verdict(claim, "undecided", "Too few of the runs are finished.")
    if rates[TOKEN] == rates[MEAN]:
        sweep, compared = RATES[results.scale], compared_rates(results)
        step = (max(sweep) / min(sweep)) ** (1 / (len(sweep) - 1))
        reason = f"Both are best at {rates[MEAN]:g}; the sweep's steps (a factor of about {step:.0f}) may be too coarse"
        reason += " to see a difference of their rates."
        if len(compared) < len(sweep):
            reason += f" Only {len(compared)} of its {len(sweep)} rates are finished."
        return Verdict(claim, "undecided", reason)
    own, other = (arm_name(MEAN, rates[pooling]) for pooling in (MEAN, TOKEN))
    return compare(claim, results.difference(own, other), f"mean at {rates[MEAN]:g}", f"mean at {rates[TOKEN]:g}")


def _best_table(results: Results, best: dict[str, str]) -> Table:
    rows: list[list[Cell]] = []
    for pooling, arm in best.items():
        minus = results.difference(arm, best[TOKEN]) if pooling != TOKEN and TOKEN in best else None
        rate = str(results.arms[arm].factors["learning rate"])
        scores = [results.mean(arm, metric) for metric in ("test", "5-shot")]
        rows.append([pooling, rate, *scores, minus, PUBLISHED_RATES.get(pooling)])
    columns = [
        "pooling", "its learning rate", "test accuracy, %", "5-shot accuracy, %", f"minus {TOKEN}",
        "paper, Fig. 9: its learning rate",
    ]  # fmt: skip
    return Table("Each pooling at its own learning rate, with 95 % intervals over seeds.", columns, rows)


def _sweep_table(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for pooling in POOLINGS:
        for rate in sorted(RATES[results.scale]):
            arm = arm_name(pooling, rate)
            rows.append([pooling, f"{rate:g}", *(results.mean(arm, m) for m in ("validation", "test", "5-shot"))])
    columns = ["pooling", "learning rate", "validation accuracy, %", "test accuracy, %", "5-shot accuracy, %"]
    return Table("Accuracy at each learning rate.", columns, rows)


def _edges(results: Results, rates: dict[str, float]) -> str:
    """Sentences about the selected rates, and about the sensitivity of each pooling to the rate."""
    sentences = []
    sweep = RATES[results.scale]
    for pooling, rate in rates.items():
        found = {other: results.of_arm(arm_name(pooling, other)) for other in sorted(sweep)}
        means = [results.mean(arm_name(pooling, other)) for other in sweep]
        values = [mean.value for mean in means if mean is not None]
        text = f"{pooling.capitalize()}: best on held-out images at {rate:g}"
        if len(values) > 1:
            text += f"; over the sweep its test accuracy varies by {100 * (max(values) - min(values)):.2f} points"
        diverged = {other: sum(trial.diverged for trial in trials) for other, trials in found.items()}
        if any(diverged.values()):
            runs = [f"{count} of {len(found[other])} runs at {other:g}" for other, count in diverged.items() if count]
            text += f", not counting {' and '.join(runs)}, which diverged"
        if rate in (min(sweep), max(sweep)) and all(found.values()):
            text += ", and a rate outside of the sweep may be better still"
        sentences.append(text + ".")
    return " ".join(sentences) or "No run is finished."


def plot(results: Results) -> Figure:
    arms = {pooling: {rate: arm_name(pooling, rate) for rate in RATES[results.scale]} for pooling in POOLINGS}
    return curve_plot(results, arms, "Pooling and learning rate", "learning rate")


POOLING = Experiment(
    name="pooling",
    title="Class token or mean of the patches",
    claim=(
        "A classifier on the mean of the patches works as well as one on the class token, but it needs another "
        "learning rate; this fully explains why it first performed very poorly."
    ),
    source="Dosovitskiy et al., An Image is Worth 16x16 Words, appendix D.3, Fig. 9",
    arms=arms,
    analyze=analyze,
)
