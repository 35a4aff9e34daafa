"""Distillation from a ResNet and from a ViT: soft, hard, and with a distillation token (DeiT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from vitrail.config import BiTConfig, DataConfig, TrainConfig, epochs
from vitrail.recipes.imagenet import deit_s16
from vitrail.reproduction.analysis import Analysis, Block, Cell, Plot, Table, compare
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.plots import Panel, dot_plot
from vitrail.reproduction.results import Results, Sample, SeedMean, proportion_mean, proportion_variance, weighted_sum
from vitrail.reproduction.scales import LEARNING_RATES, at_size, base_config, recipe_config

NONE = "no teacher"
BIT, WEAK_BIT, VIT = "BiT", "weaker BiT", "ViT"
TEACHERS = (BIT, WEAK_BIT, VIT)
SOFT, HARD, TOKEN = "soft", "hard", "hard, with token"
LOSSES: dict[str, dict[str, Any]] = {
    SOFT: {"kind": "soft", "alpha": 0.1, "temperature": 3.0},
    HARD: {"kind": "hard", "alpha": 0.5},
    TOKEN: {"kind": "hard", "alpha": 0.5},
}
"""DeiT's settings (its sections 4 and 6)."""
STUDENTS = (
    (BIT, TOKEN), (VIT, TOKEN), (BIT, HARD), (BIT, SOFT), (WEAK_BIT, TOKEN), (VIT, HARD), (VIT, SOFT),
)  # fmt: skip
"""The most telling first."""
RESNETS: dict[Scale, tuple[BiTConfig, int]] = {
    "tiny": (BiTConfig(layers=(1, 1), width_factor=0.5), 16),
    "gpu": (BiTConfig(layers=(2, 2, 2), width_factor=0.5), 64),
    "paper": (BiTConfig(layers=(3, 4, 6, 3)), 224),
}
"""The ResNet teacher and its image size."""
SHORTER: dict[Scale, int] = {"tiny": 20, "gpu": 10, "paper": 10}
"""The ResNet that is trained less has this part of the epochs, so that its accuracy is nearer to the ViT's."""
TINY_FRACTION = 0.3
"""Part of the digits: with all of them the student needs no teacher."""
CLASS_HEAD, DISTILL_HEAD = "class head", "distillation head"
PUBLISHED = {
    "DeiT-Ti": {
        NONE: ("72.2", None, None),
        SOFT: ("72.2", None, None),
        HARD: ("74.3", None, None),
        TOKEN: ("74.5", "73.9", "74.6"),
    },
    "DeiT-S": {
        NONE: ("79.8", None, None),
        SOFT: ("79.8", None, None),
        HARD: ("80.9", None, None),
        TOKEN: ("81.2", "80.9", "81.1"),
    },
}
"""DeiT's Table 3, with a convnet: ImageNet top-1, %, of both heads, the class head and the distillation head."""
SHOWN: dict[Scale, str] = {"tiny": "DeiT-Ti", "gpu": "DeiT-Ti", "paper": "DeiT-S"}
"""The model of Table 3 beside the results: the smallest; at the paper's scale, the student's own."""
TABLE_2_GAP = -1.8
"""DeiT's Table 2: accuracy of the weakest convnet minus that of the transformer, in points, 80.0 - 81.8 %."""


def student_name(teacher: str, loss: str) -> str:
    return f"{teacher} teacher: {loss}"


def teacher_name(teacher: str) -> str:
    """The arm that trains a teacher; the ViT teacher is the student trained without one, as in DeiT."""
    return NONE if teacher == VIT else f"teacher: {teacher}"


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    base, rates = _base(scale, data), LEARNING_RATES[scale]

    def arm(name: str, config: TrainConfig, teacher: str, loss: str, parent: str | None = None) -> Arm:
        factors = {"teacher": teacher, "loss of the teacher": loss}
        setting: dict[str, Any] = {"parent": parent, "parent_setting": "distill.teacher"} if parent else {}
        return Arm(name=name, config=config, factors=factors, learning_rates=rates, measures=("heads",), **setting)

    full = _resnet(base, scale)
    warmup = full.schedule.warmup.replace(count=full.schedule.warmup.count / SHORTER[scale])
    less = full.replace(
        duration=epochs(full.duration.count / SHORTER[scale]),
        schedule=full.schedule.replace(warmup=warmup.to_dict()).to_dict(),
    )
    found = [arm(teacher_name(BIT), full, "–", "–"), arm(NONE, base, "–", "–")]
    for teacher, loss in STUDENTS:
        if teacher == WEAK_BIT:
            found.append(arm(teacher_name(WEAK_BIT), less, "–", "–"))
        parent = teacher_name(teacher)
        found.append(arm(student_name(teacher, loss), _student(base, loss), teacher, loss, parent))
    return found


def _base(scale: Scale, data: DataConfig | None) -> TrainConfig:
    if scale == "paper":
        return recipe_config(deit_s16(), scale, data)
    config = base_config(scale, data)
    if scale == "tiny":
        part = config.data if data is not None else config.data.replace(fraction=TINY_FRACTION)
        return config.replace(data=part.to_dict(), duration=epochs(100), batch_size=64)
    return config


def _resnet(base: TrainConfig, scale: Scale) -> TrainConfig:
    """A BiT teacher. Its root downsamples four times, so small images are enlarged."""
    assert base.model is not None
    resnet, size = RESNETS[scale]
    return at_size(base.replace(model=resnet.replace(channels=base.model.channels, num_classes=0)), size)


def _student(base: TrainConfig, loss: str) -> TrainConfig:
    assert base.model is not None
    distill = {**base.distill.to_dict(), **LOSSES[loss], "teacher": "the parent"}
    model = base.model.replace(distilled=True) if loss == TOKEN else base.model
    return base.replace(objective="distill", distill=distill, model=model.to_dict())


def analyze(results: Results) -> Analysis:
    token, other = student_name(BIT, TOKEN), student_name(VIT, TOKEN)
    hard, soft = student_name(BIT, HARD), student_name(BIT, SOFT)
    small_gain = (
        "The teacher was trained on the same images, so most of its hard labels may be the true ones and add little."
    )
    convnet = compare(
        "A convnet is a better teacher than a transformer.",
        results.difference(token, other), "BiT's student", "the ViT's student",
        why_not="Its inductive bias may help less on images of so few patches.",
    )  # fmt: skip
    weaker = compare(
        "A convnet that is trained less is also a better teacher than a transformer.",
        results.difference(student_name(WEAK_BIT, TOKEN), other), "its student", "the ViT's student",
        why_not=_why_weak(results),
    )  # fmt: skip
    verdicts = [
        compare(
            "Hard distillation from a convnet, with a distillation token, is better than no distillation.",
            results.difference(token, NONE), "distilled", NONE, why_not=small_gain,
        ),
        compare("Hard distillation is better than soft.", results.difference(hard, soft), HARD, SOFT),
        compare(
            "The distillation token, with both heads, is better than hard distillation with one head.",
            results.difference(token, hard), "two heads", "one head",
        ),
        compare(
            "The distillation head alone is better than the class head alone.",
            results.change(token, DISTILL_HEAD, CLASS_HEAD), DISTILL_HEAD, CLASS_HEAD,
        ),
        compare(
            "Both heads together are better than the class head alone.",
            results.change(token, "test", CLASS_HEAD), "both heads", CLASS_HEAD,
        ),
        replace(convnet, reason=f"{convnet.reason} {_teachers(results)}".strip()),
        replace(weaker, reason=f"{weaker.reason} {_teachers(results, (WEAK_BIT, VIT))}".strip()),
        compare(
            "A student of a convnet agrees with it more often than a transformer trained without it (Table 4).",
            agreement_gain(results, token), "distilled", NONE,
        ),
    ]  # fmt: skip
    caption = (
        "Test accuracy of teachers and students, and the part of the test images for which they predict the same class "
        "as the BiT teacher, right or wrong."
    )
    blocks: list[Block] = [Plot("distillation", caption, lambda: plot(results)), _table(results), _agreements(results)]
    return Analysis(verdicts, blocks, _differences(results))


def agreements(results: Results, arm: str, other: str, head: str = "predicted") -> Sample | None:
    """For each seed, the fraction of the test images for which two models predict the same class."""
    found, num_images = [], 0
    for seed in results.selected(arm):
        ours, theirs = results.arrays(arm, seed).get(head), results.arrays(other, seed).get("predicted")
        if ours is not None and theirs is not None and len(ours) == len(theirs):
            found.append(float((ours == theirs).mean()))
            num_images = len(ours)
    return Sample(found, proportion_variance(sum(found) / len(found), num_images)) if found else None


def agreement(results: Results, arm: str, other: str, head: str = "predicted") -> SeedMean | None:
    """The mean over seeds of `agreements`."""
    found = agreements(results, arm, other, head)
    return None if found is None else proportion_mean(found)


def agreement_gain(results: Results, student: str) -> SeedMean | None:
    """Agreement of a student with the BiT teacher, minus that of the model trained without a teacher."""
    ours, theirs = (agreements(results, arm, teacher_name(BIT)) for arm in (student, NONE))
    return weighted_sum([(1.0, ours), (-1.0, theirs)]) if ours is not None and theirs is not None else None


def _table(results: Results) -> Table:
    columns = ["model", "learning rate", "test accuracy, %", f"{CLASS_HEAD}, %", f"{DISTILL_HEAD}, %", f"minus {NONE}"]
    model = SHOWN[results.scale]
    columns += [f"{model} on ImageNet{head}" for head in ("", f", {CLASS_HEAD}", f", {DISTILL_HEAD}")]
    rows: list[list[Cell]] = []
    for name, arm in results.arms.items():
        rate = results.selected_rate(name)
        row: list[Cell] = [name, None if rate is None else f"{rate:g}"]
        row += [results.mean(name, metric) for metric in ("test", CLASS_HEAD, DISTILL_HEAD)]
        row.append(results.difference(name, NONE) if name != NONE else None)
        loss = NONE if name == NONE else arm.factors["loss of the teacher"]
        shown = name == NONE or arm.factors["teacher"] == BIT
        rows.append([*row, *(PUBLISHED[model].get(str(loss), (None,) * 3) if shown else (None,) * 3)])
    caption = "Test accuracy, with 95 % intervals over seeds; with two heads, that of their mean and of each alone."
    return Table(caption, columns, rows)


def _agreements(results: Results) -> Table:
    """DeiT's Table 4: how often two models predict the same class."""
    token = student_name(BIT, TOKEN)
    students = {
        NONE: (NONE, "predicted", "86.7"),
        f"{token}, {CLASS_HEAD}": (token, "predicted_class", "88.8"),
        f"{token}, {DISTILL_HEAD}": (token, "predicted_distill", "90.0"),
        f"{token}, both heads": (token, "predicted", "89.8"),
        student_name(VIT, TOKEN): (student_name(VIT, TOKEN), "predicted", None),
    }
    rows: list[list[Cell]] = [
        [label, *(agreement(results, arm, teacher_name(teacher), head) for teacher in (BIT, VIT)), published]
        for label, (arm, head, published) in students.items()
    ]
    rows[0][2] = None
    caption = "The same predicted class, % of the test images, with 95 % intervals over seeds."
    return Table(
        caption, ["model", "as the BiT teacher", "as the ViT teacher", "DeiT-B with its RegNetY teacher"], rows
    )


def _teachers(results: Results, teachers: Sequence[str] = TEACHERS) -> str:
    """The teachers' accuracies."""
    means = {name: results.mean(teacher_name(name)) for name in teachers}
    known = [f"{name} {100 * mean.value:.2f}" for name, mean in means.items() if mean is not None]
    return f"Accuracy of the teachers: {', '.join(known)} %." if known else ""


def _weak_gap(results: Results) -> float | None:
    """Accuracy of the weaker BiT minus that of the ViT teacher, in points."""
    less, vit = results.mean(teacher_name(WEAK_BIT)), results.mean(teacher_name(VIT))
    return None if less is None or vit is None else 100 * (less.value - vit.value)


def _why_weak(results: Results) -> str:
    gap = _weak_gap(results)
    if gap is None or gap >= TABLE_2_GAP:
        return ""
    return (
        f"The accuracy of this convnet is {-gap:.2f} points below the ViT's; that of the weakest one in DeiT's Table 2 "
        f"is {-TABLE_2_GAP:g} below."
    )


def _differences(results: Results) -> str:
    text = (
        f"DeiT trains on ImageNet; here it is {results.setting}. "
        "Teachers and students are trained on the same images, as in DeiT. The ViT teacher is the student's own "
        "network, trained without a teacher. "
    )
    gap = _weak_gap(results)
    gains = {name: results.difference(student_name(name, TOKEN), NONE) for name in TEACHERS}
    known = [f"{name} {100 * gain.value:+.2f}" for name, gain in gains.items() if gain is not None]
    if gap is not None:
        text += (
            f"The weaker BiT is trained for 1/{SHORTER[results.scale]} of the epochs; its accuracy minus the ViT's is "
            f"{gap:+.2f} points. "
        )
    if known:
        text += f"With a token and hard labels a student gains, by teacher: {', '.join(known)} points. "
    text += (
        "In DeiT's Table 2, a DeiT-B reaches 81.9 % with a DeiT-B of 81.8 % as its teacher, 82.7 % with a RegNetY of "
        "80.0 %, and 83.1 % with one of 82.9 %. "
        "DeiT trains for 300 epochs with strong augmentation; there the teacher sees crops that no longer show the "
        "labeled object, and corrects the label. Small centered images may show this effect less."
    )
    if results.arms[NONE].config.data.fraction == TINY_FRACTION:
        text += f" {100 * TINY_FRACTION:g} % of the digits are used, so that there is something to gain."
    return text


def plot(results: Results) -> Figure:
    groups = {teacher_name(BIT): 0, teacher_name(WEAK_BIT): 0, NONE: 0}
    for i, teacher in enumerate(TEACHERS):
        groups |= {student_name(teacher, loss): i + 1 for loss in LOSSES if (teacher, loss) in STUDENTS}
    names = list(groups)
    panels = [
        Panel("test accuracy, %", {name: results.mean(name) for name in names}),
        Panel(
            "same class as the BiT teacher, %",
            {name: agreement(results, name, teacher_name(BIT)) for name in names if name != teacher_name(BIT)},
        ),
    ]
    return dot_plot(names, panels, "Distillation", results.origin, groups)


DISTILLATION = Experiment(
    name="distillation",
    title="Distillation",
    claim=(
        "Hard distillation through a distillation token improves a small transformer by 2 points, more than soft "
        "distillation; both heads together are best for DeiT-S and B (for Ti the distillation head alone has 74.6 % "
        "against 74.5 %). A convnet is a better teacher than a transformer of like accuracy."
    ),
    source=(
        "Touvron et al., Training data-efficient image transformers & distillation through attention (DeiT), section "
        "5.2, Tables 2 to 4"
    ),
    arms=arms,
    analyze=analyze,
    data={"tiny": "digits", "gpu": "cifar10", "paper": "ImageNet"},
)
