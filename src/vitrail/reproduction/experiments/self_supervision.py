"""Masked patch prediction and supervised pre-training, then fine-tuning with few and with all labels."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from vitrail.config import DataConfig, TrainConfig, steps
from vitrail.recipes.finetune import finetune_paper
from vitrail.recipes.imagenet import masked_patch
from vitrail.reproduction.analysis import Analysis, Block, Cell, Plot, Table, compare, similar
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.plots import curve_plot
from vitrail.reproduction.results import Results, SeedMean, mean_difference
from vitrail.reproduction.scales import base_config, recipe_config, vary_model

SCRATCH, SHORT, SUPERVISED = "from scratch", "from scratch, short", "supervised"
TARGETS = {"mean color": "mean-color", "4 x 4 colors": "downsized", "pixels": "pixels"}
"""Name -> masked_patch.target."""
COLOR, DOWNSIZED, PIXELS = TARGETS
STARTS = (SCRATCH, SHORT, *TARGETS, SUPERVISED)
UNTRAINED = (SCRATCH, SHORT)
"""Starts without pre-training: as long as pre-training and fine-tuning together, and as long as fine-tuning."""
BATCH_SIZES: dict[Scale, dict[float, int]] = {
    "tiny": {100: 64, 10: 32, 3: 16},
    "gpu": {100: 512, 10: 512, 1: 128},
    "paper": {100: 4096, 10: 4096, 1: 4096},
}
"""Labeled part of the images for fine-tuning, in percent -> batch size; there must be as many images as in a batch."""
HALF = 0.5
"""The first half of the training images is for pre-training, the other for fine-tuning."""
STEPS: dict[Scale, tuple[int, int, int]] = {
    "tiny": (600, 200, 20),
    "gpu": (1500, 400, 40),
    "paper": (100_000, 20_000, 500),
}
"""Number of steps of pre-training, of fine-tuning, and of its warm-up."""
PRETRAIN_RATES: dict[Scale, tuple[float, float]] = {"tiny": (3e-3, 3e-3), "gpu": (1e-3, 2e-3), "paper": (2e-4, 1e-3)}
"""Learning rate of masked patch prediction and of supervised pre-training; not selected."""
FINETUNE_RATES: dict[Scale, tuple[float, ...]] = {
    "tiny": (1e-3, 3e-3),
    "gpu": (1e-3, 5e-4, 2e-3),
    "paper": (0.01, 0.003, 0.03),
}
SCRATCH_RATES: dict[Scale, tuple[float, ...]] = {
    "tiny": (3e-3, 1e-3),
    "gpu": (2e-3, 1e-3, 4e-3),
    "paper": (1e-3, 3e-4, 3e-3),
}
"""As many as for fine-tuning."""
IMAGENET_IMAGES = 1_281_167
PUBLISHED = {SCRATCH: "77.9", COLOR: "79.9", SUPERVISED: "84.0"}
"""B/16: Table 5 (pre-trained on ImageNet and on ImageNet-21k with labels) and section 4.6 (masked patches on JFT)."""


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    found = [_pretraining(scale, data, start) for start in STARTS if start not in UNTRAINED]
    for percent in percents_of(scale):
        for start in STARTS:
            found.append(
                _finetuning(scale, data, start, percent)
                if start not in UNTRAINED
                else _scratch(scale, data, start, percent)
            )
    return found


def percents_of(scale: Scale) -> list[float]:
    """The labeled parts, in percent; all labels first."""
    return list(BATCH_SIZES[scale])


def arm_name(start: str, percent: float) -> str:
    """`mean color, 10 %`."""
    return f"{start}, {percent:g} %"


def pretraining_name(start: str) -> str:
    return f"pre-training: {start}"


def _base(scale: Scale, data: DataConfig | None) -> TrainConfig:
    """The common settings; patches of at least 4 px, because one of the targets is a patch's 4 x 4 colors."""
    if scale == "paper":
        return recipe_config(masked_patch(), scale, data).replace(objective="classify")
    config = base_config(scale, data)
    if scale == "tiny":
        return vary_model(config, image_size=16, patch_size=4).replace(
            batch_size=64, schedule=config.schedule.replace(warmup=steps(40)).to_dict()
        )
    return config


def _with(config: TrainConfig, part: tuple[float, float], lr: float, **changes: Any) -> TrainConfig:
    """The settings with a part of the training images and a learning rate."""
    data, optim = config.data.replace(fraction=part), config.optim
    return config.replace(data=data.to_dict(), **{"optim": optim.replace(lr=lr).to_dict(), **changes})


def _labeled(percent: float) -> tuple[float, float]:
    return HALF, HALF + (1 - HALF) * percent / 100


def _pretraining(scale: Scale, data: DataConfig | None, start: str) -> Arm:
    changes: dict[str, Any] = {"duration": steps(STEPS[scale][0]).to_dict()}
    if start in TARGETS:
        changes |= {"objective": "masked-patch", "masked_patch": {"target": TARGETS[start]}}
    lr = PRETRAIN_RATES[scale][start == SUPERVISED]
    return Arm(
        name=pretraining_name(start),
        config=_with(_base(scale, data), (0.0, HALF), lr, **changes),
        factors={"start": start, "labels, %": "–"},
        measures=("5-shot",),
    )


def _scratch(scale: Scale, data: DataConfig | None, start: str, percent: float) -> Arm:
    rates, (pretraining, finetuning, _) = SCRATCH_RATES[scale], STEPS[scale]
    total = steps(finetuning if start == SHORT else pretraining + finetuning).to_dict()
    return Arm(
        name=arm_name(start, percent),
        config=_with(
            _base(scale, data), _labeled(percent), rates[0], duration=total, batch_size=BATCH_SIZES[scale][percent]
        ),
        factors={"start": start, "labels, %": percent},
        learning_rates=rates,
    )


def _finetuning(scale: Scale, data: DataConfig | None, start: str, percent: float) -> Arm:
    config, rates = _base(scale, data), FINETUNE_RATES[scale]
    config = config.replace(batch_size=BATCH_SIZES[scale][percent])
    _, count, warmup = STEPS[scale]
    if scale == "paper":
        recipe = finetune_paper("", config.data.source, num_images=IMAGENET_IMAGES)
        config = config.replace(optim=recipe.optim.to_dict(), batch_size=recipe.batch_size)
    changes = {"duration": steps(count), "schedule": config.schedule.replace(warmup=steps(warmup))}
    return Arm(
        name=arm_name(start, percent),
        config=_with(config, _labeled(percent), rates[0], **{k: v.to_dict() for k, v in changes.items()}),
        factors={"start": start, "labels, %": percent},
        learning_rates=rates,
        parent=pretraining_name(start),
        parent_edit="without-head" if start == SUPERVISED else None,
    )


def analyze(results: Results) -> Analysis:
    full = percents_of(results.scale)[0]

    def minus(one: str, other: str) -> SeedMean | None:
        return results.difference(arm_name(one, full), arm_name(other, full))

    pretraining, tuning, _ = STEPS[results.scale]
    verdicts = [
        compare(
            f"With all labels, masked patch prediction is better than training from scratch ({COLOR}).",
            minus(COLOR, SCRATCH), COLOR, SCRATCH,
            why_not=f"Training from scratch has {(pretraining + tuning) / tuning:g} times as many steps with labels as "
            "fine-tuning, and the paper pre-trains on JFT, or with similar gains on ImageNet, which have far more "
            "images.",
        ),
        compare(
            "With all labels, it is worse than supervised pre-training.", minus(SUPERVISED, COLOR), SUPERVISED, COLOR
        ),
        similar(
            "The three targets are alike, compared with what supervised pre-training gains over none.",
            results, [arm_name(target, full) for target in TARGETS],
            mean_difference([arm_name(SUPERVISED, full)], [arm_name(SCRATCH, full)]),
            why_not="This limit is low where training from scratch is almost as good as supervised pre-training.",
        ),
        compare("The regression of pixels is slightly worse than colors.", minus(COLOR, PIXELS), COLOR, PIXELS),
    ]  # fmt: skip
    caption = "Test accuracy after fine-tuning, by labeled part of the images; bands are 95 % intervals over seeds."
    blocks: list[Block] = [Plot("self-supervision", caption, lambda: plot(results)), _table(results)]
    return Analysis(verdicts, [*blocks, _features_table(results)], _differences(results))


def _table(results: Results) -> Table:
    percents = percents_of(results.scale)
    columns = ["start", *(f"{percent:g} % of the labels" for percent in percents), "minus from scratch, all labels"]
    rows: list[list[Cell]] = []
    for start in STARTS:
        row: list[Cell] = [start, *(results.mean(arm_name(start, percent)) for percent in percents)]
        full = arm_name(start, percents[0]), arm_name(SCRATCH, percents[0])
        row += [None if start == SCRATCH else results.difference(*full), PUBLISHED.get(start)]
        rows.append(row)
    caption = "Test accuracy after fine-tuning, %, with 95 % intervals over seeds."
    return Table(caption, [*columns, "paper: B/16 on ImageNet"], rows)


def _features_table(results: Results) -> Table:
    rows: list[list[Cell]] = [
        [start, results.mean(pretraining_name(start), "5-shot")] for start in STARTS if start not in UNTRAINED
    ]
    caption = (
        "5-shot accuracy of the features after pre-training, without fine-tuning, %; the paper finds that of the mean "
        "color the best of the three targets, and has no numbers."
    )
    return Table(caption, ["pre-training", "5-shot accuracy, %"], rows)


def _differences(results: Results) -> str:
    count, tuned, _ = STEPS[results.scale]
    rates = len(FINETUNE_RATES[results.scale])
    text = (
        f"The first half of the training images is for pre-training ({count:,} steps), with labels or by masked patch "
        f"prediction; the other half, or a part of it, is for fine-tuning with labels ({tuned:,} steps) and a new "
        "head. Training from scratch sees the labeled part of the second half alone, for as many steps as "
        "pre-training and fine-tuning together, or (short) as fine-tuning. Supervised pre-training sees labels of the "
        "same classes: twice as many labels as the others with all labels, and many times as many with few. It is "
        "meant as an upper bound; in the paper it uses other classes. Fine-tuning and training from scratch choose "
        f"from {rates} learning rates each; those of pre-training are fixed, because its objectives have no common "
        "score. "
    )
    gains = []
    for percent in percents_of(results.scale):
        gain = results.difference(arm_name(COLOR, percent), arm_name(SCRATCH, percent))
        if gain is not None:
            gains.append(f"{100 * gain.value:+.2f} points with {percent:g} % of the labels")
    if gains:
        text += f"Masked patch prediction ({COLOR}) minus from scratch: {', '.join(gains)} (paper: +2 with all)."
    return text


def plot(results: Results) -> Figure:
    arms = {start: {percent: arm_name(start, percent) for percent in percents_of(results.scale)} for start in STARTS}
    return curve_plot(results, arms, "Self-supervised pre-training", "labeled images for fine-tuning, %")


SELF_SUPERVISION = Experiment(
    name="self-supervision",
    title="Self-supervised pre-training",
    claim=(
        "Masked patch prediction improves a B/16 by 2 points over training from scratch, but is 4 points behind "
        "supervised pre-training. Its three targets all work well; regressing pixels is slightly worse."
    ),
    source="Dosovitskiy et al., An Image is Worth 16x16 Words, section 4.6 and appendix B.1.2",
    arms=arms,
    analyze=analyze,
    data={"tiny": "digits", "gpu": "cifar10", "paper": "ImageNet"},
)
