"""`vitrail vtab`: measure a model on the VTAB-1k tasks found on this machine, by fine-tuning or linear probing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.data.batches import evaluation_batches
from vitrail.data.decode import decode
from vitrail.data.sources.base import Sample, Source
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import logistic
from vitrail.evaluation.accuracy import measure
from vitrail.evaluation.features import Features, FeatureSpec, extract_features
from vitrail.evaluation.intervals import Estimate, proportion
from vitrail.evaluation.probing import Progress, no_progress
from vitrail.evaluation.vtab_tasks import TASKS, Task, TaskData, group_means, locate_tasks, open_task, select_tasks
from vitrail.model import Model
from vitrail.open_model import load
from vitrail.runs.run_folder import RunFolder
from vitrail.storage.atomic_write import atomic_file
from vitrail.training.runs import finetune

LEARNING_RATES = (0.003, 0.01, 0.03)
STEPS = 2500
"""The paper's number of steps; its learning rate is 0.01, selected by a small sweep."""

Method = Literal["finetune", "linear"]


@dataclass(frozen=True)
class TaskScore:
    """Accuracy of a model on one task."""

    task: Task
    accuracy: Estimate
    count: int
    """Number of test images."""
    chosen: dict[str, float]
    """The hyperparameters selected on the validation images."""

    @property
    def at_edge(self) -> bool:
        """Whether the selected C is at the edge of the searched range."""
        return "C" in self.chosen and logistic.is_at_range_edge(self.chosen["C"])

    def to_dict(self) -> dict[str, Any]:
        values = {"task": self.task.name, "group": self.task.group, **self.accuracy.to_dict(), "count": self.count}
        return values | {"chosen": self.chosen, "at_edge": self.at_edge}


@dataclass(frozen=True)
class VtabResult:
    """Scores of the tasks that were found, and the missing tasks."""

    method: str
    scores: tuple[TaskScore, ...]
    missing: tuple[Task, ...]
    means: dict[str, Estimate] = field(default_factory=dict)
    """Mean accuracy of each complete group; "VTAB" is the mean over all 19 tasks."""

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
    """Select hyperparameters with 800 training and 200 validation images, train on all 1,000, measure the test split.

    finetune: all weights, with the paper's SGD; runs are written to `out`, and finished runs there are reused.
    linear: logistic regression on frozen features.
    """
    if method not in ("finetune", "linear"):
        raise ConfigError(f"method={method!r}: expected finetune or linear.")
    if isinstance(model, Model) and method == "finetune":
        raise ConfigError("fine-tuning starts from a checkpoint; give a file, folder, name or hub ID, not a Model.")
    root, requested = Path(root).expanduser(), select_tasks(tasks)
    present = locate_tasks(root, tuple(TASKS.values()))
    if not any(task.name in present for task in requested):
        what = f"the task {requested[0].name}" if len(requested) == 1 else f"any of the {len(requested)} tasks"
        raise DataError(f"{root} does not contain {what}; expected a folder such as {requested[0].name}.")
    vit: Model | None = None
    if isinstance(model, Model):
        vit = model
    elif method == "linear":
        vit = load(model, device=device, image_size=image_size)
    scores = []
    for task in requested:
        if task.name not in present:
            continue
        data = open_task(task, present[task.name], root)
        if vit is not None:
            scores.append(_probe_linear(vit, task, data, batch_size, progress))
        else:
            folder = Path(out) / task.name
            scores.append(_finetune_task(str(model), task, data, learning_rates, steps, image_size, device, folder))
    found = {score.task.name: (score.accuracy.value, score.count) for score in scores}
    missing = tuple(task for task in TASKS.values() if task.name not in present)
    return VtabResult(method, tuple(scores), missing, group_means(found))


def _probe_linear(model: Model, task: Task, data: TaskData, batch_size: int, progress: Progress) -> TaskScore:
    """Select C on the 200 validation images, then fit to all 1,000."""
    parts = []
    for source in (data.train, data.validation, data.test):
        with progress(f"{task.title}: features", len(source)) as advance:
            options: dict[str, Any] = {"preprocess": model.preprocess, "spec": FeatureSpec(), "batch_size": batch_size}
            parts.append(extract_features(model.net, source, device=model.device, advance=advance, **options)[0])
    train, validation, test = parts
    with progress(f"{task.title}: selecting C", logistic.SEARCH_FITS) as advance:
        c = logistic.search_c(train, validation, device=model.device, advance=advance)
    values, targets = (torch.cat([getattr(f, name) for f in (train, validation)]) for name in ("values", "targets"))
    fit = logistic.fit(Features(values, targets, train.labels, task.title), c, device=model.device)
    correct = int((fit.predict(test.values).cpu() == test.targets).sum())
    return TaskScore(task, _proportion(correct, len(test)), len(test), {"C": c})


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
    """Select the learning rate on the 200 validation images, then train on all 1,000."""
    out.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"recipe": "paper", "image_size": image_size, "device": device, "report": False}
    length = [f"duration={steps} steps"]
    best = learning_rates[0]
    if len(learning_rates) > 1:
        selection = _write_table(out / "800.parquet", {"train": [data.train], "validation": [data.validation]})
        accuracies = {}
        for learning_rate in learning_rates:
            folder = out / f"800-lr-{learning_rate:g}"
            run = _run_finetuning(model, selection, folder, options, [*length, f"optim.lr={learning_rate:g}"])
            accuracies[learning_rate] = run.scores.top1 if run.scores is not None else 0.0
        best = max(learning_rates, key=lambda rate: (accuracies[rate], -rate))
    # Training needs a validation split; here nothing is selected on it.
    both = [data.train, data.validation]
    final = _write_table(out / "1000.parquet", {"train": both, "validation": [data.validation]})
    run = _run_finetuning(model, final, out / f"1000-lr-{best:g}", options, [*length, f"optim.lr={best:g}"])
    scores = _test_accuracy(run.model, data, device)
    return TaskScore(task, scores, len(data.test), {"lr": best})


def _run_finetuning(model: str, data: Path, folder: Path, options: dict[str, Any], overrides: list[str]) -> Any:
    run = finetune(model, f"table:{data}", out=folder, overrides=overrides, resume=RunFolder(folder).started, **options)
    if run.stop_reason is not None:
        raise KeyboardInterrupt
    return run


def _test_accuracy(model: Model, data: TaskData, device: str) -> Estimate:
    """Accuracy on the test split, whose classes are matched to the model's by name."""
    model = model.to(device)
    names = list(model.labels or ())
    outputs = torch.tensor([names.index(label) if label in names else -1 for label in data.test.labels])
    batches = evaluation_batches(data.test, preprocess=model.preprocess.config, batch_size=64, device=model.device)
    with batches:
        targets = _with_model_targets(batches, outputs)
        scores = measure(model.net, targets, preprocess=model.preprocess, num_classes=model.config.num_classes)
    return _proportion(round(scores.top1 * scores.count), int((data.test.targets >= 0).sum()))


def _with_model_targets(batches: Any, outputs: torch.Tensor) -> Any:
    """Batches with the model's class indices; images of a class that was not in training count as wrong."""
    from dataclasses import replace

    for batch in batches:
        targets = torch.where(batch.targets.cpu() >= 0, outputs[batch.targets.cpu().clamp(min=0)], -1)
        yield replace(batch, targets=targets.to(batch.images.device))


def _write_table(path: Path, parts: dict[str, list[Source]]) -> Path:
    """Write encoded images with their labels and splits to one Parquet file."""
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
    with atomic_file(path) as temporary:
        pq.write_table(pa.table(columns), temporary)
    return path


def _image_bytes(sample: Sample) -> bytes:
    """The encoded image; decoded pixels are encoded as PNG."""
    from PIL import Image

    image = sample.image
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    file = io.BytesIO()
    Image.fromarray(decode(image, 3)).save(file, "PNG")
    return file.getvalue()


def _proportion(correct: int, count: int) -> Estimate:
    value = proportion(correct, count)
    assert value is not None
    return value
