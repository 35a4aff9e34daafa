"""ViT, hybrid and ResNet of about equal FLOPs on fractions of the training images: the paper's Fig. 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from matplotlib.figure import Figure

from vitrail.config import DataConfig
from vitrail.reproduction.analysis import Analysis, Paragraph, Plot, Table, arm_table, compare, shrinks
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.curves import crossings, mean_curve
from vitrail.reproduction.data_fractions import Schedule, on_fraction
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.network_families import FAMILIES, HYBRID, RESNET, VIT, network, network_config
from vitrail.reproduction.plots import curve_plot
from vitrail.reproduction.results import Results
from vitrail.reproduction.scales import LEARNING_RATES

STEPS: Schedule = "equal steps"
SCHEDULES: tuple[Schedule, ...] = (STEPS, "equal epochs")
FRACTIONS: dict[Scale, tuple[float, ...]] = {
    "tiny": (0.1, 0.3, 1.0),
    "gpu": (0.01, 0.03, 0.1, 0.3, 1.0),
    "paper": (0.03, 0.1, 0.3, 1.0),
}
"""Fractions of the training images. `paper`: those of JFT-300M in Fig. 4, here of ImageNet-21k."""
SMALL_SCALES_ALSO = (
    " Even all the data is less than the paper's smallest set. Images are enlarged so that the ResNet's root, which "
    "downsamples four times, leaves a map to work on."
)


def arm_name(family: str, fraction: float, schedule: str) -> str:
    return f"{family} {100 * fraction:g}" + (f" {schedule}" if fraction < 1 else "")


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    """All networks on all data first, then on ever less: at equal steps, then at equal epochs."""
    found = []
    for fraction in reversed(FRACTIONS[scale]):
        for schedule in SCHEDULES if fraction < 1 else (STEPS,):
            for family in FAMILIES:
                config = network_config(scale, data, network(scale, family, "base"))
                found.append(
                    Arm(
                        name=arm_name(family, fraction, schedule),
                        config=on_fraction(config, scale, fraction, schedule),
                        factors={
                            "network": family,
                            "training images, %": f"{100 * fraction:g}",
                            "length": schedule if fraction < 1 else "full",
                        },
                        learning_rates=LEARNING_RATES[scale],
                        measures=("5-shot",),
                    )
                )
    return found


def family_arms(scale: Scale, family: str, schedule: str) -> dict[float, str]:
    """Percentage of the training images -> arm."""
    return {100 * fraction: arm_name(family, fraction, schedule) for fraction in FRACTIONS[scale]}


def analyze(results: Results) -> Analysis:
    fractions = FRACTIONS[results.scale]
    least, most = min(fractions), max(fractions)
    verdicts = [
        compare(
            f"With little data ({100 * least:g} % of the training images, {schedule}) the ResNet is better than the "
            "ViT.",
            results.difference(arm_name(RESNET, least, schedule), arm_name(VIT, least, schedule)), RESNET, VIT,
            why_not=_too_short(results, arm_name(VIT, least, schedule)) if schedule != STEPS else "",
        )
        for schedule in SCHEDULES
    ]  # fmt: skip
    too_little = "All the data here may be too little." if results.scale != "paper" else ""
    full_vit, full_resnet = arm_name(VIT, most, STEPS), arm_name(RESNET, most, STEPS)
    verdicts += [
        compare(
            "With all data the ViT is better than the ResNet.", results.difference(full_vit, full_resnet), VIT, RESNET,
            why_not=too_little,
        ),
        shrinks(
            f"The ResNet's advantage shrinks as the data grow (from {100 * least:g} % to all, equal steps).", results,
            (arm_name(RESNET, least, STEPS), arm_name(VIT, least, STEPS)), (full_resnet, full_vit),
            (f"at {100 * least:g} %", "at 100 %"), why_not=too_little,
        ),
    ]  # fmt: skip
    plots = [
        Plot(
            f"data-size-{metric}-{schedule.split()[-1]}",
            f"{title} over the number of training images, {schedule}; bands are 95 % intervals over seeds.",
            partial(plot, results, metric, title, schedule),
        )
        for metric, title in (("test", "Test accuracy"), ("5-shot", "5-shot accuracy"))
        for schedule in SCHEDULES
    ]
    metrics = {"test": "test accuracy, %", "5-shot": "5-shot accuracy, %"}
    caption = "Accuracy by network and number of training images, with 95 % intervals over seeds."
    return Analysis(
        verdicts,
        [
            *plots,
            Paragraph(" ".join(_describe_crossings(results, schedule) for schedule in SCHEDULES)),
            arm_table(results, caption, metrics),
            _networks(results),
        ],
        "The paper pre-trains on 9, 30, 90 and 300 million images of JFT and measures 5-shot accuracy on ImageNet "
        "(Fig. 4: ViT-B/32 is much worse than a ResNet50 on 9 M images and better from 90 M on), or on ImageNet, "
        "ImageNet-21k and JFT with fine-tuning on ImageNet (Table 5: ViT-B/16 77.91, 83.97, 84.15 %; BiT is better "
        f"than ViTs on the first). Here it is {results.setting} without fine-tuning, and the 5-shot classifier sees "
        "images of the same dataset. The paper stops early; here the length is fixed, at as many steps as on all the "
        "data (equal compute, more epochs of fewer images) or at as many epochs (fewer steps)."
        + (SMALL_SCALES_ALSO if results.scale != "paper" else ""),
    )


def _too_short(results: Results, arm: str) -> str:
    """Why networks that see few images for few epochs may not differ as the paper's."""
    images, batch_size = results.mean(arm, "images"), results.arms[arm].config.batch_size
    if images is None or not isinstance(batch_size, int):
        return ""
    steps = round(images.value / batch_size)
    return f"As many epochs of so few images are {steps} steps, in which neither network may learn much."


def _describe_crossings(results: Results, schedule: str) -> str:
    """Where the curves of the mean test accuracy cross, in a sentence for each pair."""
    curves = {
        family: {x: m.value for x, m in mean_curve(results, family_arms(results.scale, family, schedule)).items()}
        for family in FAMILIES
    }
    sentences = [
        _describe_pair(first, second, curves) for first, second in ((RESNET, VIT), (HYBRID, VIT), (RESNET, HYBRID))
    ]
    return f"At {schedule}, by the means over seeds: {'; '.join(sentences)}."


def _describe_pair(first: str, second: str, curves: Mapping[str, Mapping[float, float]]) -> str:
    common = sorted(set(curves[first]) & set(curves[second]))
    if len(common) < 2:
        return f"too few runs are finished to compare {first} and {second}"
    found = crossings(curves[first], curves[second])
    if found:
        places = " and ".join(f"{x:.2g} %" for x in found)
        return f"the curves of {first} and {second} cross at {places} of the data"
    gaps = [curves[first][x] - curves[second][x] for x in common]
    ahead, behind = (first, second) if sum(gaps) > 0 else (second, first)
    return (
        f"{ahead} is ahead of {behind} from {common[0]:g} to {common[-1]:g} %, "
        f"by {100 * abs(gaps[0]):.2f} points at first and {100 * abs(gaps[-1]):.2f} at last"
    )


def _networks(results: Results) -> Table:
    """FLOPs and parameters of the networks."""
    rows = []
    for family in FAMILIES:
        arm = arm_name(family, 1.0, STEPS)
        flops, parameters = results.mean(arm, "flops"), results.mean(arm, "parameters")
        cells = [None if flops is None else f"{flops.value / 1e6:,.1f}"]
        cells += [None if parameters is None else f"{parameters.value / 1e6:,.2f}"]
        rows.append([family, *cells])
    return Table("The networks.", ["network", "FLOPs per image, million", "parameters, million"], rows)


def plot(results: Results, metric: str, title: str, schedule: str) -> Figure:
    arms = {family: family_arms(results.scale, family, schedule) for family in FAMILIES}
    label = "training images, % of all"
    return curve_plot(results, arms, f"{title} and data, {schedule}", label, metric, f"{title.lower()}, %")


DATA_SIZE = Experiment(
    name="data-size",
    title="Data size: ViT, hybrid and ResNet",
    claim=(
        "Vision Transformers overfit more than ResNets of comparable cost on small datasets; with more data they "
        "overtake them."
    ),
    source="Dosovitskiy et al., An Image is Worth 16x16 Words, section 4.3, Fig. 3 and 4, Table 5",
    arms=arms,
    analyze=analyze,
)
