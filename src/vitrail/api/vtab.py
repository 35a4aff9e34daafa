"""`vitrail vtab`: one model on the tasks of VTAB-1k that are here, by fine-tuning or with its features as they are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.api.model import Model, load
from vitrail.api.probing import Watch, unwatched
from vitrail.api.training import finetune
from vitrail.data.decode import decode
from vitrail.data.loader import evaluation_batches
from vitrail.data.sources.base import Sample, Source
from vitrail.errors import ConfigError, DataError
from vitrail.evaluate import logistic
from vitrail.evaluate.accuracy import measure
from vitrail.evaluate.features import Features, Place, gather
from vitrail.evaluate.intervals import Estimate, share
from vitrail.evaluate.vtab import TASKS, Task, TaskData, locate, means, named, open_task
from vitrail.train.run import RunFolder

RATES = (0.003, 0.01, 0.03)
STEPS = 2500
"""The paper's length; its rate is .01, chosen by a small sweep."""

Method = Literal["finetune", "linear"]


@dataclass(frozen=True)
class TaskScore:
    """How well a model does on one task."""

    task: Task
    accuracy: Estimate
    count: int
    """Test images."""
    chosen: dict[str, float]
    """What the 200 chose."""

    @property
    def at_edge(self) -> bool:
        """Whether the C they chose is at the edge of the range that was tried."""
        return "C" in self.chosen and logistic.at_edge(self.chosen["C"])

    def to_dict(self) -> dict[str, Any]:
        told = {"task": self.task.name, "group": self.task.group, **self.accuracy.to_dict(), "count": self.count}
        return told | {"chosen": self.chosen, "at_edge": self.at_edge}


@dataclass(frozen=True)
class Vtab:
    """The tasks that are here, and those that are not."""

    method: str
    scores: tuple[TaskScore, ...]
    missing: tuple[Task, ...]
    means: dict[str, Estimate] = field(default_factory=dict)
    """Of each group that is whole, and of all 19 as "VTAB"."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "tasks": [score.to_dict() for score in self.scores],
            "missing": [task.name for task in self.missing],
            "means": {name: mean.to_dict() for name, mean in self.means.items()},
        }


def vtab(
    model: str | Path | Model,
    root: str | Path,
    *,
    tasks: Sequence[str] = (),
    method: Method = "finetune",
    rates: Sequence[float] = RATES,
    steps: int = STEPS,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    out: str | Path = "runs/vtab",
    batch_size: int = 64,
    watch: Watch = unwatched,
) -> Vtab:
    """800 images of each task learn and 200 choose, then 1,000 learn; accuracy on the whole test part.

    finetune: the paper's SGD, all weights; runs go to `out`, and those that are finished there are
    not run again. linear: logistic regression on the features.
    """
    if method not in ("finetune", "linear"):
        raise ConfigError(f"method={method!r}: wanted finetune or linear.")
    if isinstance(model, Model) and method == "finetune":
        raise ConfigError("fine-tuning starts from a checkpoint: give its file, folder, name or hub id.")
    root, asked = Path(root).expanduser(), named(tasks)
    there = locate(root, tuple(TASKS.values()))
    if not any(task.name in there for task in asked):
        what = f"the task {asked[0].name}" if len(asked) == 1 else f"any of the {len(asked)} tasks"
        raise DataError(f"{root} does not hold {what}; it wants a folder named {asked[0].name}, say.")
    vit = (
        model
        if isinstance(model, Model)
        else load(model, device=device, image_size=image_size)
        if method == "linear"
        else None
    )
    scores = []
    for task in asked:
        if task.name not in there:
            continue
        data = open_task(task, there[task.name], root)
        if vit is not None:
            scores.append(_linear(vit, task, data, batch_size, watch))
        else:
            scores.append(_finetuned(str(model), task, data, rates, steps, image_size, device, Path(out) / task.name))
    found = {score.task.name: (score.accuracy.value, score.count) for score in scores}
    missing = tuple(task for task in TASKS.values() if task.name not in there)
    return Vtab(method, tuple(scores), missing, means(found))


def _linear(vit: Model, task: Task, data: TaskData, batch_size: int, watch: Watch) -> TaskScore:
    """C chosen on the 200, then learned from the 1,000."""
    parts = []
    for source in (data.learn, data.choose, data.test):
        with watch(f"{task.title}: features", len(source)) as advance:
            options: dict[str, Any] = {"preprocess": vit.preprocess, "place": Place(), "batch_size": batch_size}
            parts.append(gather(vit.net, source, device=vit.device, advance=advance, **options)[0])
    learn, choose, test = parts
    with watch(f"{task.title}: choosing C", logistic.FITS) as advance:
        strength = logistic.choose(learn, choose, device=vit.device, advance=advance)
    values, targets = (torch.cat([getattr(f, name) for f in (learn, choose)]) for name in ("values", "targets"))
    fit = logistic.fit(Features(values, targets, learn.labels, task.title), strength, device=vit.device)
    right = int((fit.predict(test.values).cpu() == test.targets).sum())
    return TaskScore(task, _share(right, len(test)), len(test), {"C": strength})


def _finetuned(
    model: str,
    task: Task,
    data: TaskData,
    rates: Sequence[float],
    steps: int,
    image_size: int | tuple[int, int] | None,
    device: str,
    out: Path,
) -> TaskScore:
    """The rate chosen on the 200, then learned from the 1,000."""
    out.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"recipe": "paper", "image_size": image_size, "device": device, "report": False}
    length = [f"duration={steps} steps"]
    best = rates[0]
    if len(rates) > 1:
        some = _table(out / "800.parquet", {"train": [data.learn], "validation": [data.choose]})
        tried = {}
        for rate in rates:
            folder = out / f"800-lr-{rate:g}"
            run = _run(model, some, folder, options, [*length, f"optim.lr={rate:g}"])
            tried[rate] = run.scores.top1 if run.scores is not None else 0.0
        best = max(rates, key=lambda rate: (tried[rate], -rate))
    # Something has to be watched while the 1,000 learn; nothing is chosen by it.
    whole = _table(out / "1000.parquet", {"train": [data.learn, data.choose], "validation": [data.choose]})
    run = _run(model, whole, out / f"1000-lr-{best:g}", options, [*length, f"optim.lr={best:g}"])
    scores = _tested(run.model, data, device)
    return TaskScore(task, scores, len(data.test), {"lr": best})


def _run(model: str, data: Path, folder: Path, options: dict[str, Any], overrides: list[str]) -> Any:
    run = finetune(model, f"table:{data}", out=folder, overrides=overrides, resume=RunFolder(folder).started, **options)
    if run.stopped is not None:
        raise KeyboardInterrupt
    return run


def _tested(vit: Model, data: TaskData, device: str) -> Estimate:
    """On the test images, whose classes are found in the model by name."""
    vit = vit.to(device)
    names = list(vit.labels or ())
    there = torch.tensor([names.index(label) if label in names else -1 for label in data.test.labels])
    batches = evaluation_batches(data.test, preprocess=vit.preprocess.config, batch_size=64, device=vit.device)
    with batches:
        scores = measure(
            vit.net, _renumbered(batches, there), preprocess=vit.preprocess, num_classes=vit.config.num_classes
        )
    return _share(round(scores.top1 * scores.count), int((data.test.targets >= 0).sum()))


def _renumbered(batches: Any, there: torch.Tensor) -> Any:
    """With the model's class numbers; a class it never saw is one it cannot name, and counts as wrong."""
    from dataclasses import replace

    for batch in batches:
        targets = torch.where(batch.targets.cpu() >= 0, there[batch.targets.cpu().clamp(min=0)], -1)
        yield replace(batch, targets=targets.to(batch.images.device))


def _table(path: Path, parts: dict[str, list[Source]]) -> Path:
    """Images as bytes with their labels and parts, in one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {"image": [], "label": [], "split": []}
    for split, sources in parts.items():
        for source in sources:
            for i in range(len(source)):
                sample = source[i]
                if isinstance(sample.target, int) and sample.target >= 0:
                    columns["image"].append(_bytes(sample))
                    columns["label"].append(source.labels[sample.target])
                    columns["split"].append(split)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns), temporary)
    temporary.replace(path)
    return path


def _bytes(sample: Sample) -> bytes:
    """An image as a file holds it; pixels become PNG."""
    from PIL import Image

    image = sample.image
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    file = io.BytesIO()
    Image.fromarray(decode(image, 3)).save(file, "PNG")
    return file.getvalue()


def _share(right: int, count: int) -> Estimate:
    found = share(right, count)
    assert found is not None
    return found
