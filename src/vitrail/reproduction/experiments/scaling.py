"""Depth, width, MLP width and patch size; ViT, hybrid and ResNet over compute: the paper's Fig. 5 and 8."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from vitrail.config import DataConfig, ViTConfig, epochs
from vitrail.reproduction.analysis import Analysis, Cell, Paragraph, Plot, Table, Verdict, arm_table, compare, shrinks
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.compute_plot import Group, compute_plot
from vitrail.reproduction.curves import (
    best_so_far,
    geometric_mean,
    mean_curve,
    pareto_front,
    slope_weights,
    x_where,
)
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.network_families import (
    FAMILIES,
    HYBRID,
    RESNET,
    VIT,
    Network,
    network,
    network_config,
    sizes,
)
from vitrail.reproduction.plots import Line, line_plot
from vitrail.reproduction.results import Results, SeedMean, mean_difference
from vitrail.reproduction.scales import LEARNING_RATES

LENGTHS: dict[Scale, tuple[int, int]] = {"tiny": (10, 30), "gpu": (3, 10), "paper": (30, 90)}
"""Epochs of the short and of the long runs."""
DEPTH, WIDTH, MLP, PATCH, ALL = "depth", "width", "MLP width", "patch size", "all together"
DIMENSIONS = (DEPTH, WIDTH, MLP, PATCH, ALL)
FIELDS = {DEPTH: "depth", WIDTH: "width", MLP: "mlp_dim", PATCH: "patch_size"}
VALUES: dict[Scale, dict[str, tuple[int, ...]]] = {
    "tiny": {DEPTH: (4, 8), WIDTH: (52, 80), MLP: (128, 256), PATCH: (2,)},
    "gpu": {DEPTH: (8, 16), WIDTH: (104, 168), MLP: (512, 1024), PATCH: (4,)},
    "paper": {DEPTH: (16, 32), WIDTH: (2048,), MLP: (4096, 8192), PATCH: (16,)},
}
"""What each dimension of the base is scaled to."""
TABLE_6 = (
    ("ViT-B/32", "80.73", "55"), ("ViT-B/16", "84.15", "224"), ("ViT-L/16", "86.30", "783"),
    ("R50+ViT-B/32", "84.90", "106"), ("R50+ViT-B/16", "85.58", "274"), ("R50+ViT-L/16", "86.60", "859"),
    ("ResNet50x1", "77.54", "50"), ("ResNet50x2", "82.12", "199"), ("ResNet152x2", "84.97", "563"),
)  # fmt: skip
"""The paper's Table 6: 7 epochs on JFT; accuracy on ImageNet after fine-tuning, exaFLOPs of pre-training."""


def arm_name(family: str, size: str, length: int) -> str:
    return f"{family} {size}, {length} epochs"


def base_name(scale: Scale) -> str:
    """The model whose dimensions are scaled: the small ViT; at the paper's scale that of Fig. 8."""
    return "Fig. 8 base" if scale == "paper" else arm_name(VIT, "small", LENGTHS[scale][1])


def base_network(scale: Scale) -> ViTConfig:
    found = network(scale, VIT, "small")
    assert isinstance(found, ViTConfig)
    return found.replace(depth=8, width=1024, mlp_dim=2048, num_heads=16) if scale == "paper" else found


def shape_arms(scale: Scale) -> dict[str, list[str]]:
    """Dimension -> the arms in which it is larger, ascending."""
    found = {dimension: [f"{dimension} {value}" for value in values] for dimension, values in VALUES[scale].items()}
    found[ALL] = [ALL] if scale == "paper" else [arm_name(VIT, size, LENGTHS[scale][1]) for size in sizes(scale)[1:]]
    return found


def _shape_networks(scale: Scale) -> dict[str, Network]:
    """Arm -> network, of the arms that are not among those of the families."""
    base = base_network(scale)
    found: dict[str, Network] = {
        f"{dimension} {value}": base.replace(**{FIELDS[dimension]: value})
        for dimension, values in VALUES[scale].items()
        for value in values
    }
    if scale == "paper":
        everything = {FIELDS[dimension]: values[0] for dimension, values in VALUES[scale].items()}
        found = {base_name(scale): base, **found, ALL: base.replace(**everything)}
    return found


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    """The long runs of the families, those of the shapes, then the short runs of the families."""
    short, long = LENGTHS[scale]
    shapes = [_arm(scale, data, name, model, "ViT", long) for name, model in _shape_networks(scale).items()]
    by_length = {
        length: [
            _arm(scale, data, arm_name(family, size, length), network(scale, family, size), family, length)
            for size in sizes(scale)
            for family in FAMILIES
        ]
        for length in (long, short)
    }
    return [*by_length[long], *shapes, *by_length[short]]


def _arm(scale: Scale, data: DataConfig | None, name: str, model: Network, family: str, length: int) -> Arm:
    longest = LENGTHS[scale][1]
    config = network_config(scale, data, model, duration=epochs(length), checkpoint_every=epochs(max(longest // 3, 1)))
    warmup = config.schedule.warmup
    if warmup.unit == "epochs":
        config = config.replace(
            schedule=config.schedule.replace(warmup=epochs(warmup.count * length / longest)).to_dict()
        )
    factors = {"network": family, "variant": name.partition(",")[0].removeprefix(f"{family} "), "epochs": str(length)}
    return Arm(name=name, config=config, factors=factors, learning_rates=LEARNING_RATES[scale])


def cost(results: Results, arm: str, metric: str) -> float | None:
    """`flops` of the whole training (three times the forward pass, in units of 10^12) or `seconds` of the run."""
    mean = results.mean(arm, metric)
    if metric == "seconds" or mean is None:
        return None if mean is None else mean.value
    images = results.mean(arm, "images")
    return None if images is None else 3e-12 * mean.value * images.value


def costs(results: Results, arms: Sequence[str], metric: str) -> dict[str, float]:
    return {arm: value for arm in arms if (value := cost(results, arm, metric))}


def family_arms(scale: Scale, family: str, lengths: Sequence[int] | None = None) -> list[str]:
    return [arm_name(family, size, length) for length in lengths or LENGTHS[scale] for size in sizes(scale)]


def analyze(results: Results) -> Analysis:
    scale, (short, long) = results.scale, LENGTHS[results.scale]
    families = [arm for family in FAMILIES for arm in family_arms(scale, family)]
    fronts = {metric: _front(results, families, metric) for metric in ("flops", "seconds")}
    titles = {"flops": "best for its FLOPs", "seconds": "best for its time"}
    on_front = {titles[metric]: dict.fromkeys(front, "yes") for metric, front in fronts.items()}
    relative = "relative to the base; bars are 95 % intervals over seeds"
    shapes = [base_name(scale), *(arm for arms in shape_arms(scale).values() for arm in arms)]
    return Analysis(
        [*_shape_verdicts(results), *_family_verdicts(results, short, long)],
        [
            Plot("compute", "Test accuracy over the cost of training; bars are 95 % intervals over seeds.",
                 partial(plot_families, results)),
            Plot("shape", f"Test accuracy over the FLOPs of training, {relative}.",
                 partial(plot_shapes, results, "flops")),
            Plot("shape-time", f"Test accuracy over the duration of the run, {relative}.",
                 partial(plot_shapes, results, "seconds")),
            _slopes(results),
            Paragraph(_describe_ratio(results)),
            arm_table(results, "Families of networks; the best for a cost are on the Pareto front.",
                      {"test": "test accuracy, %"}, arms=families, published=on_front),
            _cost_table(results, [*families, *(arm for arm in shapes if arm not in families)]),
            Table("The paper's Table 6: 7 epochs of pre-training on JFT.",
                  ["", "ImageNet, fine-tuned, %", "pre-training, exaFLOPs"], [list(row) for row in TABLE_6]),
        ],
        "The paper pre-trains on JFT-300M for 7 or 14 epochs and fine-tunes (Fig. 5), or measures 5-shot accuracy "
        f"(Fig. 8, from 8 layers, width 1024, MLP width 2048 and patches of 32 px). Here it is {results.setting}, for "
        "which data and not compute may be the limit; the accuracy is that on its test images. FLOPs are those of "
        "forward and backward pass; seconds are of runs that share the machine with others and depend on how well "
        "small networks use it.",
    )  # fmt: skip


def _shape_verdicts(results: Results) -> list[Verdict]:
    groups, base = shape_arms(results.scale), base_name(results.scale)
    return [
        compare("Depth helps more than width, per doubling of the FLOPs.", _slope(results, "flops", DEPTH, WIDTH),
                DEPTH, WIDTH),
        compare("Smaller patches help without more parameters.", results.difference(groups[PATCH][-1], base),
                "smaller patches", "the base"),
        compare("Scaling all dimensions together helps.", results.difference(groups[ALL][-1], base),
                ALL, "the base"),
    ]  # fmt: skip


def _family_verdicts(results: Results, short: int, long: int) -> list[Verdict]:
    scale, (first, last) = results.scale, (sizes(results.scale)[0], sizes(results.scale)[-1])
    cheap = {family: arm_name(family, first, short) for family in FAMILIES}
    costly = {family: arm_name(family, last, long) for family in FAMILIES}
    difference = results.contrast(mean_difference(family_arms(scale, VIT), family_arms(scale, RESNET)))
    return [
        compare("At equal compute ViTs are better than ResNets (mean over sizes and lengths).", difference, VIT, RESNET,
                why_not="ResNets need less data than ViTs, and there may be too little here."),
        compare(f"With little compute (small, {short} epochs) hybrids are better than ViTs.",
                results.difference(cheap[HYBRID], cheap[VIT]), HYBRID, VIT),
        shrinks(f"The advantage of hybrids shrinks with more compute ({last}, {long} epochs).", results,
                (cheap[HYBRID], cheap[VIT]), (costly[HYBRID], costly[VIT]), ("with little compute", "with much"),
                why_not="Convolutions help where data is little, and more training on the same images does not change "
                "that; the paper's hybrids lose their advantage on 300 million images."),
    ]  # fmt: skip


def _slope(results: Results, metric: str, dimension: str, minus: str | None = None) -> SeedMean | None:
    """Accuracy gained per doubling of the cost, from the base and the arms of a dimension; less that of another."""
    weights: dict[str, float] = {}
    for sign, each in ((1.0, dimension), (-1.0, minus)):
        if each is None:
            continue
        names = [base_name(results.scale), *shape_arms(results.scale)[each]]
        slopes = slope_weights(costs(results, names, metric))
        if set(slopes) != set(names):
            return None
        weights = {arm: weights.get(arm, 0.0) + sign * slopes.get(arm, 0.0) for arm in weights | slopes}
    return results.contrast(weights)


def _slopes(results: Results) -> Table:
    rows: list[list[Cell]] = [
        [dimension, *(_slope(results, metric, dimension) for metric in ("flops", "seconds"))]
        for dimension in DIMENSIONS
    ]
    columns = ["scaled dimension", "points per doubling of FLOPs", "points per doubling of time"]
    return Table("What each dimension is worth: points of accuracy per doubling of the cost.", columns, rows)


def _front(results: Results, arms: Sequence[str], metric: str) -> list[str]:
    scores = {arm: mean.value for arm in arms if (mean := results.mean(arm)) is not None}
    return pareto_front(costs(results, arms, metric), scores)


def compute_ratio(results: Results, seed: int) -> float | None:
    """ResNets' training FLOPs divided by ViTs' for the same accuracy, the geometric mean over the accuracies of the
    best models of both that the other family reaches too; None if there is none."""
    curves = {}
    for family in (VIT, RESNET):
        found = costs(results, family_arms(results.scale, family), "flops")
        scores = {arm: results.values(arm) for arm in found}
        curves[family] = best_so_far({found[arm]: scores[arm][seed] for arm in found if seed in scores[arm]})
    ratios = [x / own for own, score in curves[VIT].items() if (x := x_where(curves[RESNET], score))]
    ratios += [own / x for own, score in curves[RESNET].items() if (x := x_where(curves[VIT], score))]
    return statistics.geometric_mean(ratios) if ratios else None


def _describe_ratio(results: Results) -> str:
    seeds = range(results.num_seeds)
    ratio = geometric_mean([found for seed in seeds if (found := compute_ratio(results, seed)) is not None])
    paper = "The paper finds that ViTs need a half to a quarter of the compute."
    if ratio is None:
        return f"{paper} Here there is no accuracy that the finished runs of both families reach."
    interval = f" ({ratio.low:.2g} to {ratio.high:.2g})" if ratio.has_interval else ""
    return (
        f"{paper} Here, for the accuracies that both families reach, ResNets take {ratio.value:.2g}{interval} times "
        f"the training FLOPs of ViTs (interpolated, geometric mean over {ratio.count} seeds)."
    )


def _cost_table(results: Results, arms: Sequence[str]) -> Table:
    rows: list[list[Cell]] = []
    for arm in arms:
        flops, total, seconds = results.mean(arm, "flops"), cost(results, arm, "flops"), cost(results, arm, "seconds")
        parameters = results.mean(arm, "parameters")
        rows.append([
            arm,
            None if flops is None else f"{flops.value / 1e6:,.2f}",
            None if parameters is None else f"{parameters.value / 1e3:,.0f}",
            None if total is None else f"{total:.3g}",
            None if seconds is None else f"{seconds:,.1f}",
        ])  # fmt: skip
    columns = ["", "FLOPs per image, million", "parameters, thousand", "training, 10¹² FLOPs", "training, s"]
    return Table("Costs.", columns, rows)


def plot_families(results: Results) -> Figure:
    short, long = LENGTHS[results.scale]
    groups = [
        Group(f"{family}, {length} epochs", family_arms(results.scale, family, [length]), i, dash)
        for dash, length in enumerate((long, short))
        for i, family in enumerate(FAMILIES)
    ]
    arms = [arm for group in groups for arm in group.arms]
    labels = {"training FLOPs, 10¹²": "flops", "training time, s": "seconds"}
    found = {label: costs(results, arms, metric) for label, metric in labels.items()}
    scores = {arm: mean for arm in arms if (mean := results.mean(arm)) is not None}
    return compute_plot(groups, found, scores, "Accuracy and compute", results.origin)


def plot_shapes(results: Results, metric: str) -> Figure:
    base = base_name(results.scale)
    unit, lines = cost(results, base, metric), []
    for dimension, arms in shape_arms(results.scale).items():
        found = costs(results, [base, *arms], metric) if unit else {}
        lines.append(Line(dimension, mean_curve(results, {found[arm] / (unit or 1.0): arm for arm in found})))
    label = {"flops": "FLOPs", "seconds": "time"}[metric]
    return line_plot(
        lines, f"Scaling one dimension: {label}", results.origin, f"training {label}, base = 1",
        "test accuracy, %", log_x=bool(unit), x_ticks=_powers_of_two([x for line in lines for x in line.points]),
        bands=False,
    )  # fmt: skip


def _powers_of_two(values: Sequence[float]) -> list[float]:
    """Those around the values."""
    exponents = [math.log2(value) for value in values] or [0.0]
    return [2.0**i for i in range(math.floor(min(exponents)), math.ceil(max(exponents)) + 1)]


SCALING = Experiment(
    name="scaling",
    title="Scaling: shape, compute and families",
    claim=(
        "Depth helps most, width least, and smaller patches help without parameters. ViTs need two to four times less "
        "compute than ResNets for the same accuracy; hybrids are better at small budgets, and the difference vanishes."
    ),
    source="Dosovitskiy et al., An Image is Worth 16x16 Words, section 4.4 and appendix D.2, Fig. 5 and 8, Table 6",
    arms=arms,
    analyze=analyze,
)
