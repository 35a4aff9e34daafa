"""What stays the same when patches are shuffled or images shifted, for each kind of positions and for a ResNet."""

from __future__ import annotations

from matplotlib.figure import Figure

from vitrail.config import DataConfig, NetConfig, TrainConfig, ViTConfig, pair
from vitrail.reproduction.analysis import Analysis, Plot, Table, Verdict, arm_table
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.measures.symmetries import shifts
from vitrail.reproduction.network_families import RESNET, VIT, network, network_config
from vitrail.reproduction.plots import Line, Panel, dot_plot, line_plot
from vitrail.reproduction.results import Results
from vitrail.reproduction.scales import LEARNING_RATES

NONE, RES = "none", "ResNet"
KINDS = {
    NONE: "none",
    "1-D": "learned-1d",
    "2-D": "learned-2d",
    "relative": "relative",
    "sin-cos": "sincos-2d",
    "rotary": "rope-2d",
}
IN_CURVES = (NONE, "1-D", "relative", "rotary", RES)
"""Arms in the figure of all shifts; the others are in the tables."""
EQUAL = 1e-10
"""Relative difference in float64 below which outputs are called equal to rounding."""
DIFFERENT = 1e-3
"""Relative difference above which outputs are called different."""


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    vit = network(scale, VIT, "base")
    assert isinstance(vit, ViTConfig)
    found = [
        _arm(name, scale, network_config(scale, data, vit.replace(position=kind)), vit.grid[0])
        for name, kind in KINDS.items()
    ]
    return [*found, _arm(RES, scale, network_config(scale, data, network(scale, RESNET, "base")), vit.grid[0])]


def _arm(name: str, scale: Scale, config: TrainConfig, per_side: int) -> Arm:
    return Arm(
        name=name,
        config=config.replace(snapshot_every=config.duration),
        factors={"network": "BiT" if name == RES else "ViT", "positions": "–" if name == RES else name},
        learning_rates=LEARNING_RATES[scale],
        measures=(f"symmetry-{per_side}",),
    )


def image_size(results: Results) -> int:
    config = next(iter(results.arms.values())).config.model
    assert isinstance(config, NetConfig)
    return pair(config.image_size)[0]


def patches_per_side(results: Results) -> int:
    config = results.arms[NONE].config.model
    assert isinstance(config, ViTConfig)
    return config.grid[0]


def analyze(results: Results) -> Analysis:
    patch = image_size(results) // patches_per_side(results)
    one_patch, one_pixel = f"{patch} px", "1 px"
    return Analysis(
        verdicts(results),
        [
            Plot(
                "symmetry",
                "Predictions that are unchanged; bars are 95 % intervals over seeds.",
                lambda: agreement_figure(results, one_patch),
            ),
            arm_table(
                results,
                "Accuracy of the trained networks, with 95 % intervals over seeds. Shifts are cyclic.",
                {
                    "test": "test accuracy, %",
                    "accuracy, shuffled": "patches shuffled, %",
                    f"accuracy, {one_patch}": f"shifted by a patch ({one_patch}), %",
                    f"accuracy, {one_pixel}": f"shifted by {one_pixel}, %",
                },
            ),
            arm_table(
                results,
                "Predictions that are unchanged, with 95 % intervals over seeds.",
                {
                    "agreement, shuffled": "patches shuffled, %",
                    f"agreement, {one_patch}": f"shifted by a patch ({one_patch}), %",
                    f"agreement, {one_pixel}": f"shifted by {one_pixel}, %",
                },
            ),
            Plot("shifts", "Predictions that are unchanged by a cyclic shift.", lambda: shift_figure(results)),
            exact_table(results),
        ],
        _differences(results, one_patch),
    )


def verdicts(results: Results) -> list[Verdict]:
    vits = [name for name in KINDS if results.selected(name)]
    return [
        _bag_of_words(results),
        _positions_matter(results),
        _below(
            "Without positions the encoder is equivariant: the tokens of shuffled patches are the shuffled tokens.",
            results, [NONE], ("token equivariance",),
        ),
        _always(
            "Attention is global: a changed patch reaches every token in the first block.",
            results, vits, ("attention reach", "patch reach, first block"), 1.0,
        ),
        _always(
            "The MLP is local: a changed token changes no other.",
            results, vits, ("MLP reach", "patch reach, embedding"), 0.0,
        ),
        _resnet_changes(results),
    ]  # fmt: skip


def _all_values(results: Results, arms: list[str], metrics: tuple[str, ...]) -> list[float]:
    """The metrics of the trained and the untrained networks, of all arms and seeds."""
    names = [name for metric in metrics for name in dict.fromkeys((metric, f"{metric}, untrained"))]
    return [value for arm in arms for name in names for value in results.values(arm, name).values()]


def _below(claim: str, results: Results, arms: list[str], metrics: tuple[str, ...]) -> Verdict:
    """The check that every value is below EQUAL."""
    values = _all_values(results, arms, metrics)
    if not values:
        return Verdict(claim, "undecided", "No finished run.")
    reason = (
        f"Largest relative difference {max(values):.1e} in float64, over {len(values)} measurements of trained and "
        f"untrained networks; below {EQUAL:g} is called equal to rounding."
    )
    return Verdict(claim, "holds" if max(values) < EQUAL else "does not hold", reason)


def _bag_of_words(results: Results) -> Verdict:
    claim = "Without positions the patches are a bag of words: shuffling them does not change the outputs."
    return _below(claim, results, [NONE], ("logit change, largest", "feature change, largest"))


def _positions_matter(results: Results) -> Verdict:
    claim = "With positions of any kind, the order of the patches matters."
    means = {name: results.mean(name, "logit change") for name in KINDS if name != NONE}
    known = {name: mean.value for name, mean in means.items() if mean is not None}
    if not known:
        return Verdict(claim, "undecided", "No finished run with positions.")
    least = min(known, key=lambda name: known[name])
    reason = f"Shuffling changes the logits by {100 * known[least]:.0f} % or more ({least} the least)."
    if known[least] <= DIFFERENT:
        return Verdict(claim, "does not hold", reason)
    missing = [name for name in KINDS if name != NONE and name not in known]
    if missing:
        return Verdict(claim, "undecided", f"{reason} Not finished: {', '.join(missing)}.")
    return Verdict(claim, "holds", reason)


def _always(claim: str, results: Results, arms: list[str], metrics: tuple[str, ...], expected: float) -> Verdict:
    values = _all_values(results, arms, metrics)
    if not values:
        return Verdict(claim, "undecided", "No finished run.")
    shown = " to ".join(f"{100 * value:g}" for value in dict.fromkeys((min(values), max(values))))
    reason = (
        f"Other tokens that change: {shown} %, over {len(values)} measurements of networks with "
        f"{', '.join(arms)} positions, trained and untrained."
    )
    return Verdict(claim, "holds" if {min(values), max(values)} == {expected} else "does not hold", reason)


def _resnet_changes(results: Results) -> Verdict:
    """The check that any prediction changes: an invariant network keeps all of them."""
    claim = "A ResNet is not invariant to shifts either."
    changed = {arm: [1 - value for value in results.values(arm, "agreement, 1 px").values()] for arm in (RES, *KINDS)}
    if not changed[RES]:
        return Verdict(claim, "undecided", "No finished ResNet.")
    least, most = min(changed[RES]), max(changed[RES])
    shown = f"{100 * least:.1f}" if least == most else f"{100 * least:.1f} to {100 * most:.1f}"
    reason = f"A cyclic shift by 1 px changes {shown} % of the ResNet's predictions"
    vits = [f"{arm} {100 * sum(found) / len(found):.1f}" for arm, found in changed.items() if found and arm != RES]
    reason += f"; of the ViTs' {', '.join(vits)} %." if vits else "."
    return Verdict(claim, "holds" if most > 0 else "does not hold", reason)


def exact_table(results: Results) -> Table:
    """Relative differences, as powers of ten; they are means over seeds of the mean over images."""
    columns = {
        "logit change": "logits, trained",
        "feature change": "input of the head, trained",
        "feature change, untrained": "input of the head, untrained",
        "token equivariance": "tokens against shuffled tokens, trained",
    }
    rows = []
    for name in results.arms:
        means = [results.mean(name, metric) for metric in columns]
        rows.append([name, *(None if mean is None else f"{mean.value:.1e}" for mean in means)])
    caption = "Relative difference of outputs when the patches are shuffled, in float64; 0 is invariant or equivariant."
    return Table(caption, ["", *columns.values()], rows)


def _differences(results: Results, one_patch: str) -> str:
    source = next(iter(results.arms.values())).config.data.source
    without, resnet = results.mean(NONE, f"agreement, {one_patch}"), results.mean(RES, f"agreement, {one_patch}")
    text = (
        f"All networks are trained on {source} with the same augmentation, which moves and enlarges the images a "
        "little, and each has its own learning rate. Shifts are cyclic, so that nothing leaves the image, but "
        "they move its border into the interior, which no training image shows; a ResNet pads with zeros there. "
    )
    if without is not None and resnet is not None:
        text += (
            f"A shift by a whole patch is a permutation of the patches: without positions {100 * without.value:.1f} % "
            f"of the predictions stay; of the ResNet's {100 * resnet.value:.1f} %. "
        )
    return text + (
        "A shift by fewer pixels changes the content of every patch. A ResNet is equivariant to shifts except for its "
        "strides and borders; both can change predictions. The paper "
        "states these inductive biases in words (Section 3.1) and gives no numbers; that the MLP is equivariant to "
        "translations follows from the third and the fifth claim: without positions the tokens of the whole encoder "
        "follow any permutation of the patches, such as a shift by a patch, and the MLP processes each token alone."
    )


def agreement_figure(results: Results, one_patch: str) -> Figure:
    titles = {
        "agreement, shuffled": "patches shuffled, %",
        f"agreement, {one_patch}": "shifted by a patch, %",
        "agreement, 1 px": "shifted by 1 px, %",
    }
    rows = list(results.arms)
    panels = [Panel(title, {arm: results.mean(arm, metric) for arm in rows}) for metric, title in titles.items()]
    groups = {name: 1 if name == NONE else 2 if name == RES else 0 for name in rows}
    return dot_plot(rows, panels, "Unchanged predictions", _subtitle(results), groups)


def shift_figure(results: Results) -> Figure:
    sizes = shifts(image_size(results), patches_per_side(results))
    lines = []
    for arm in IN_CURVES:
        means = {s: results.mean(arm, f"agreement, {s} px") for s in sizes} if arm in results.arms else {}
        lines.append(Line(arm, {float(s): mean for s, mean in means.items() if mean is not None}))
    patch = image_size(results) // patches_per_side(results)
    ticks = [float(s) for s in sizes if s % max(patch // 2, 1) == 0 or s == 1]
    label = f"cyclic shift in pixels (a patch has {patch})"
    return line_plot(
        lines, "Unchanged predictions", _subtitle(results), label, "unchanged predictions, %", x_ticks=ticks
    )


def _subtitle(results: Results) -> str:
    return f"{image_size(results)} px, {results.origin}"


SYMMETRY = Experiment(
    name="symmetry",
    title="Shuffled patches and shifted images",
    claim=(
        "In a ViT only the MLP layers are local and translation-equivariant, the self-attention is global; without "
        "positions the patches are a set without order. A ResNet is built for shifts, but not invariant either."
    ),
    source="Dosovitskiy et al., An Image is Worth 16x16 Words, Section 3.1, Inductive bias",
    arms=arms,
    analyze=analyze,
)
