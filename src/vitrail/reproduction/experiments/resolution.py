"""Fine-tuning at a higher resolution, with each convention of resampling positions and without resampling."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from vitrail.config import DataConfig, TrainConfig, epochs, pair
from vitrail.recipes.imagenet import deit_s16
from vitrail.reproduction.analysis import Analysis, Plot, arm_table, compare, similar
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.plots import Panel, dot_plot
from vitrail.reproduction.results import Results, mean_difference
from vitrail.reproduction.scales import LEARNING_RATES, at_size, base_config, recipe_config

PRETRAINED, SMALL, SCRATCH = "pre-training, small", "small size", "large size from scratch"
CORNER, RENEWED = "unscaled, in the corner", "new positions"
INTERPOLATIONS = {
    "google": "bilinear, corners aligned",
    "timm": "bicubic, antialiased",
    "timm-npz": "bilinear",
    "huggingface": "bicubic",
    "torchvision": "bicubic, corners aligned",
    "dinov2": "bicubic, scale + 0.1",
}
CONVENTIONS = tuple(INTERPOLATIONS)
"""Those of `RESAMPLES` that differ when the grid grows: tipsv2's antialiasing changes only smaller grids."""
DEFAULT, BILINEAR, BICUBIC = "google", "timm-npz", "huggingface"
"""The original's convention, and two that differ in the kernel only."""
SIZES: dict[Scale, tuple[int, int]] = {"tiny": (8, 12), "gpu": (20, 32), "paper": (224, 384)}
"""Image sizes of pre-training and fine-tuning, in pixels."""
FINETUNE_EPOCHS: dict[Scale, tuple[float, float]] = {"tiny": (12, 1), "gpu": (4, 0.4), "paper": (25, 0)}
"""Length of fine-tuning and of its warm-up."""
FINETUNE_RATES: dict[Scale, tuple[float, ...]] = {
    "tiny": (1e-3, 3e-4, 3e-3),
    "gpu": (5e-4, 2e-4, 1e-3),
    "paper": (1e-5, 5e-6, 2e-5),
}
PUBLISHED = {PRETRAINED: "81.8", BICUBIC: "83.1"}
"""DeiT's Table 3: DeiT-B at 224 px, and after fine-tuning at 384 px with bicubic positions; top-1 on ImageNet, %."""


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    small, large = SIZES[scale]
    base = recipe_config(deit_s16(), scale, data) if scale == "paper" else base_config(scale, data)
    rates = LEARNING_RATES[scale]

    def finetuned(name: str, positions: str, edit: str | None, **fields: Any) -> Arm:
        larger = name != SMALL
        return Arm(
            name=name,
            config=_finetuning(base, scale, larger, **fields),
            factors=_factors(f"{small} → {large if larger else small}", positions),
            learning_rates=FINETUNE_RATES[scale],
            parent=PRETRAINED,
            parent_edit=edit,
            measures=("start",),
        )

    pretraining = at_size(base, small)
    total = base.duration.replace(count=base.duration.count + FINETUNE_EPOCHS[scale][0])
    scratch = at_size(base, large).replace(duration=total)
    return [
        Arm(name=PRETRAINED, config=pretraining, factors=_factors(f"{small}", "–"), learning_rates=rates),
        finetuned(DEFAULT, f"{INTERPOLATIONS[DEFAULT]} ({DEFAULT})", f"resample-{DEFAULT}", resample=DEFAULT),
        finetuned(SMALL, "unchanged", None),
        finetuned(CORNER, "unscaled in the corner, others zero", "positions-in-corner"),
        finetuned(RENEWED, "new, as at initialization", "new-positions"),
        Arm(name=SCRATCH, config=scratch, factors=_factors(f"{large}", "from scratch"), learning_rates=rates),
        *(
            finetuned(name, f"{INTERPOLATIONS[name]} ({name})", f"resample-{name}", resample=name)
            for name in CONVENTIONS
            if name != DEFAULT
        ),
    ]


def _finetuning(base: TrainConfig, scale: Scale, larger: bool, **fields: Any) -> TrainConfig:
    size, (length, warmup) = SIZES[scale][larger], FINETUNE_EPOCHS[scale]
    config = at_size(base, size)
    assert config.model is not None
    return config.replace(
        model=config.model.replace(**fields).to_dict(),
        image_size=size if larger else None,
        duration=epochs(length),
        schedule=base.schedule.replace(warmup=epochs(warmup)).to_dict(),
        optim=base.optim.replace(lr=FINETUNE_RATES[scale][0]).to_dict(),
    )


def _factors(size: str, positions: str) -> dict[str, str | float]:
    return {"image size, px": size, "positions of the larger image": positions}


def analyze(results: Results) -> Analysis:
    unneeded = "With few patches and a long fine-tuning, the model may learn its positions again."
    verdicts = [
        compare(
            "Fine-tuning at a higher resolution than pre-training gains accuracy.",
            results.difference(DEFAULT, SMALL), "large size", "small size",
        ),
        compare(
            "Positions must be resampled: before fine-tuning, unscaled positions in a corner lose accuracy.",
            results.difference(DEFAULT, CORNER, "start"), "resampled", CORNER,
        ),
        compare(
            "Fine-tuning does not make up for unscaled positions.",
            results.difference(DEFAULT, CORNER), "resampled", CORNER, why_not=unneeded,
        ),
        compare(
            "Resampled positions are better than new ones, also after fine-tuning.",
            results.difference(DEFAULT, RENEWED), "resampled", RENEWED, why_not=unneeded,
        ),
        compare(
            "Before fine-tuning, bicubic interpolation is better than bilinear (DeiT, section 6).",
            results.difference(BICUBIC, BILINEAR, "start"), "bicubic", "bilinear",
            why_not="DeiT's reason is that bilinear interpolation shrinks the vectors; a short training at a small "
            "scale may leave positions whose length matters less.",
        ),
        similar(
            "After fine-tuning, the six conventions are alike, compared with what unscaled positions lose.",
            results, CONVENTIONS, mean_difference([DEFAULT], [CORNER]),
        ),
        compare(
            "Pre-training small and fine-tuning large is better than training large from scratch for as many epochs.",
            results.difference(DEFAULT, SCRATCH), "fine-tuned", "from scratch",
            why_not="It is cheaper all the same: most of its steps are on small images.",
        ),
    ]  # fmt: skip
    metrics = {"start": "before fine-tuning, %", "test": "after training, %"}
    table = arm_table(
        results,
        "Test accuracy before and after fine-tuning, with 95 % intervals over seeds.",
        metrics,
        reference=SMALL,
        published={"DeiT-B on ImageNet": PUBLISHED},
    )
    caption = "Test accuracy before and after fine-tuning, by what becomes of the positions."
    return Analysis(verdicts, [Plot("resolution", caption, lambda: plot(results)), table], _differences(results))


def _differences(results: Results) -> str:
    small, large = SIZES[results.scale]
    model = results.arms[PRETRAINED].config.model
    patch = pair(getattr(model, "patch_size", 1))[0]
    text = (
        f"All fine-tuned models start from the same pre-training of their seed at {small} px and are fine-tuned on "
        f"the same images at {large} px, which have {(large // patch) ** 2} patches instead of "
        f"{(small // patch) ** 2}; the ViT paper fine-tunes on another dataset. Unscaled means that each position "
        "stays with its row and column: the trained positions cover the upper left corner, and the other patches have "
        "zeros. "
        "The large size from scratch trains for as many epochs as pre-training and fine-tuning together. "
    )
    if results.scale == "tiny":
        text += "The digits have 8 px: at 12 px there are more and smaller patches, but no new detail. "
    before = {name: mean.value for name in CONVENTIONS if (mean := results.mean(name, "start")) is not None}
    after = {name: mean.value for name in CONVENTIONS if (mean := results.mean(name)) is not None}
    if len(before) > 1 and len(after) > 1:
        best = max(before, key=lambda name: before[name])
        spread, left = (100 * (max(values.values()) - min(values.values())) for values in (before, after))
        text += (
            f"The conventions differ by {spread:.2f} points before fine-tuning, where {best} has the highest mean, "
            f"and by {left:.2f} points after it."
        )
    return text


def plot(results: Results) -> Figure:
    names = [PRETRAINED, SMALL, *CONVENTIONS, CORNER, RENEWED, SCRATCH]
    panels = [
        Panel(title, {name: results.mean(name, metric) for name in names})
        for metric, title in (("start", "before fine-tuning, %"), ("test", "after training, %"))
    ]
    groups = {name: 0 if name in CONVENTIONS else 1 if name in (CORNER, RENEWED) else 2 for name in names}
    labels = {name: f"{name}: {INTERPOLATIONS[name]}" for name in CONVENTIONS}
    panels = [Panel(p.title, {labels.get(name, name): mean for name, mean in p.means.items()}) for p in panels]
    small, large = SIZES[results.scale]
    subtitle = f"{small} to {large} px, {results.origin}"
    groups = {labels.get(name, name): group for name, group in groups.items()}
    return dot_plot(list(groups), panels, "Fine-tuning at a higher resolution", subtitle, groups)


RESOLUTION = Experiment(
    name="resolution",
    title="Resolution of fine-tuning",
    claim=(
        "Fine-tuning at a higher resolution than pre-training gains accuracy; the position embeddings have to be "
        "interpolated, because they lose their meaning on another grid."
    ),
    source=(
        "Dosovitskiy et al., An Image is Worth 16x16 Words, section 3.2; Touvron et al., Training data-efficient image "
        "transformers (DeiT), section 6 and Table 3"
    ),
    arms=arms,
    analyze=analyze,
    data={"tiny": "digits", "gpu": "cifar10", "paper": "ImageNet"},
)
