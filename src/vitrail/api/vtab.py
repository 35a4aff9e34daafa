"""`vitrail vtab`: one model on the tasks of VTAB-1k that are here, by fine-tuning or with its features as they are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.api.model import Model, load
from vitrail.api.probing import Progress, no_progress
from vitrail.api.training import finetune
from vitrail.data.decode import decode
from vitrail.data.loader import evaluation_batches
from vitrail.data.sources.base import Sample, Source
from vitrail.errors import ConfigError, DataError
from vitrail.evaluate import logistic
from vitrail.evaluate.accuracy import measure
from vitrail.evaluate.features import Features, FeatureSpec, extract_features
from vitrail.evaluate.intervals import Estimate, proportion
from vitrail.evaluate.vtab_tasks import TASKS, Task, TaskData, group_means, locate_tasks, open_task, select_tasks
from vitrail.train.run_folder import RunFolder

LEARNING_RATES = (0.003, 0.01, 0.03)
STEPS = 2500
"""The paper's length; its learning_rate is .01, chosen by a small sweep."""

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
        return "C" in self.chosen and logistic.is_at_range_edge(self.chosen["C"])

    def to_dict(self) -> dict[str, Any]:
        told = {"task": self.task.name, "group": self.task.group, **self.accuracy.to_dict(), "count": self.count}
        return told | {"chosen": self.chosen, "at_edge": self.at_edge}


@dataclass(frozen=True)
class VtabResult:
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
    learning_rates: Sequence[float] = LEARNING_RATES,
    steps: int = STEPS,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    out: str | Path = "runs/vtab",
    batch_size: int = 64,
    progress: Progress = no_progress,
) -> VtabResult:
    """800 images of each task learn and 200 choose, then 1,000 learn; accuracy on the whole test part.

    finetune: the paper's SGD, all weights; runs go to `out`, and those that are finished there are
    not run again. linear: logistic regression on the features.
    """
    if method not in ("finetune", "linear"):
        raise ConfigError(f"method={method!r}: wanted finetune or linear.")
    if isinstance(model, Model) and method == "finetune":
        raise ConfigError("fine-tuning starts from a checkpoint: give its file, folder, name or hub id.")
    root, requested = Path(root).expanduser(), select_tasks(tasks)
    there = locate_tasks(root, tuple(TASKS.values()))
    if not any(task.name in there for task in requested):
        what = f"the task {requested[0].name}" if len(requested) == 1 else f"any of the {len(requested)} tasks"
        raise DataError(f"{root} does not hold {what}; it wants a folder named {requested[0].name}, say.")
    vit = (
        model
        if isinstance(model, Model)
        else load(model, device=device, image_size=image_size)
        if method == "linear"
        else None
    )
    scores = []
    for task in requested:
        if task.name not in there:
            continue
        data = open_task(task, there[task.name], root)
        if vit is not None:
            scores.append(_probe_linear(vit, task, data, batch_size, progress))
        else:
            scores.append(
                _finetune_task(str(model), task, data, learning_rates, steps, image_size, device, Path(out) / task.name)
            )
    found = {score.task.name: (score.accuracy.value, score.count) for score in scores}
    missing = tuple(task for task in TASKS.values() if task.name not in there)
    return VtabResult(method, tuple(scores), missing, group_means(found))


def _probe_linear(vit: Model, task: Task, data: TaskData, batch_size: int, progress: Progress) -> TaskScore:
    """C chosen on the 200, then learned from the 1,000."""
    parts = []
    for source in (data.train, data.validation, data.test):
        with progress(f"{task.title}: features", len(source)) as advance:
            options: dict[str, Any] = {"preprocess": vit.preprocess, "spec": FeatureSpec(), "batch_size": batch_size}
            parts.append(extract_features(vit.net, source, device=vit.device, advance=advance, **options)[0])
    learn, choose, test = parts
    with progress(f"{task.title}: choosing C", logistic.SEARCH_FITS) as advance:
        c = logistic.search_c(learn, choose, device=vit.device, advance=advance)
    values, targets = (torch.cat([getattr(f, name) for f in (learn, choose)]) for name in ("values", "targets"))
    fit = logistic.fit(Features(values, targets, learn.labels, task.title), c, device=vit.device)
    right = int((fit.predict(test.values).cpu() == test.targets).sum())
    return TaskScore(task, _proportion(right, len(test)), len(test), {"C": c})


def _finetune_task(
    model: str,
    task: Task,
    data: TaskData,
    learning_rates: Sequence[float],
    steps: int,
    image_size: int | tuple[int, int] | None,
    device: str,
    out: Path,
) -> TaskScore:
    """The learning_rate chosen on the 200, then learned from the 1,000."""
    out.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"recipe": "paper", "image_size": image_size, "device": device, "report": False}
    length = [f"duration={steps} steps"]
    best = learning_rates[0]
    if len(learning_rates) > 1:
        some = _write_table(out / "800.parquet", {"train": [data.train], "validation": [data.validation]})
        tried = {}
        for learning_rate in learning_rates:
            folder = out / f"800-lr-{learning_rate:g}"
            run = _run_finetuning(model, some, folder, options, [*length, f"optim.lr={learning_rate:g}"])
            tried[learning_rate] = run.scores.top1 if run.scores is not None else 0.0
        best = max(learning_rates, key=lambda learning_rate: (tried[learning_rate], -learning_rate))
    # Something has to be watched while the 1,000 learn; nothing is chosen by it.
    whole = _write_table(
        out / "1000.parquet", {"train": [data.train, data.validation], "validation": [data.validation]}
    )
    run = _run_finetuning(model, whole, out / f"1000-lr-{best:g}", options, [*length, f"optim.lr={best:g}"])
    scores = _test_accuracy(run.model, data, device)
    return TaskScore(task, scores, len(data.test), {"lr": best})


def _run_finetuning(model: str, data: Path, folder: Path, options: dict[str, Any], overrides: list[str]) -> Any:
    run = finetune(model, f"table:{data}", out=folder, overrides=overrides, resume=RunFolder(folder).started, **options)
    if run.stop_reason is not None:
        raise KeyboardInterrupt
    return run


def _test_accuracy(vit: Model, data: TaskData, device: str) -> Estimate:
    """On the test images, whose classes are found in the model by name."""
    vit = vit.to(device)
    names = list(vit.labels or ())
    there = torch.tensor([names.index(label) if label in names else -1 for label in data.test.labels])
    batches = evaluation_batches(data.test, preprocess=vit.preprocess.config, batch_size=64, device=vit.device)
    with batches:
        scores = measure(
            vit.net, _with_model_targets(batches, there), preprocess=vit.preprocess, num_classes=vit.config.num_classes
        )
    return _proportion(round(scores.top1 * scores.count), int((data.test.targets >= 0).sum()))


def _with_model_targets(batches: Any, there: torch.Tensor) -> Any:
    """With the model's class numbers; a class it never saw is one it cannot name, and counts as wrong."""
    from dataclasses import replace

    for batch in batches:
        targets = torch.where(batch.targets.cpu() >= 0, there[batch.targets.cpu().clamp(min=0)], -1)
        yield replace(batch, targets=targets.to(batch.images.device))


def _write_table(path: Path, parts: dict[str, list[Source]]) -> Path:
    """Images as bytes with their labels and parts, in one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {"image": [], "label": [], "split": []}
    for split, sources in parts.items():
        for source in sources:
            for i in range(len(source)):
                sample = source[i]
                if isinstance(sample.target, int) and sample.target >= 0:
                    columns["image"].append(_image_bytes(sample))
                    columns["label"].append(source.labels[sample.target])
                    columns["split"].append(split)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns), temporary)
    temporary.replace(path)
    return path


def _image_bytes(sample: Sample) -> bytes:
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


def _proportion(right: int, count: int) -> Estimate:
    found = proportion(right, count)
    assert found is not None
    return found
