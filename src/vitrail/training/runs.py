"""`vitrail.train` and `vitrail.finetune`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.config import DataConfig, NetConfig, TrainConfig, override, pair
from vitrail.config.image import preprocess_for_size
from vitrail.data.loader import usable_indices
from vitrail.data.sources import open_data
from vitrail.data.transfer import TargetTable
from vitrail.errors import ConfigError, DataError, NotFoundError, TrainError, VitrailError, did_you_mean
from vitrail.evaluation import pixel_knn_applies, pixel_knn_baseline
from vitrail.evaluation.scores import Scores
from vitrail.model import Model
from vitrail.models.base import BaseNet
from vitrail.models.model_names import config_from_name
from vitrail.open_model import load
from vitrail.recipes import RECIPES
from vitrail.recipes import finetune as tuning
from vitrail.report import write_report
from vitrail.runs.run_folder import RunFolder, read_run_config
from vitrail.runtime import log_on_main_process, pick_device, warn_once
from vitrail.training.custom_objects import CustomObjects
from vitrail.training.loop import FitResult, fit
from vitrail.training.resuming import CHANGEABLE as CHANGEABLE
from vitrail.training.resuming import PROPORTIONAL, resolve_run_folder, resume_config, scale_durations, setting_name
from vitrail.weights.loading import load_checkpoint


@dataclass(frozen=True)
class Run:
    """A run that has ended: its folder, scores and model."""

    path: Path
    config: TrainConfig
    scores: Scores | None = None
    """Scores on the validation images; None for a run that was stopped."""
    stop_reason: str | None = None
    """Why it ended early: the name of a signal, or "patience"; None for a run that reached its end."""
    comparisons: tuple[Run, ...] = field(default=())
    """The runs of `config.compare`, in the same order."""
    baselines: Mapping[str, Scores] = field(default_factory=dict)
    """Scores of simple methods on the same images, by name: for small data, 3-nearest neighbors."""
    resume_step: int | None = None
    """The step from which a run stopped by a signal resumes."""
    test_scores: Scores | None = None
    """Scores on the test images, if there is a test split besides the validation split."""

    @cached_property
    def model(self) -> Model:
        """The trained model, loaded on first use."""
        return load(self.path / "model")

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def finished(self) -> bool:
        return RunFolder(self.path).finished

    def to_dict(self) -> dict[str, Any]:
        """The content of result.json: plain numbers, without per-image scores."""
        return {
            "scores": None if self.scores is None else self.scores.to_dict(),
            "test": None if self.test_scores is None else self.test_scores.to_dict(),
            "stop_reason": self.stop_reason,
            "baselines": {name: scores.to_dict() for name, scores in self.baselines.items()},
            "comparisons": [{"run": other.path.name, **other.to_dict()} for other in self.comparisons],
        }

    @classmethod
    def from_dict(cls, path: Path, config: TrainConfig, found: Mapping[str, Any]) -> Run:
        """The inverse of `to_dict`."""
        test, comparisons = found["test"], []
        for other in found["comparisons"]:
            comparison_folder = RunFolder(path / "compare" / other["run"])
            comparisons.append(cls.from_dict(comparison_folder.path, comparison_folder.read_config(), other))
        return cls(
            path,
            config,
            None if found["scores"] is None else Scores.from_dict(found["scores"]),
            found["stop_reason"],
            tuple(comparisons),
            {name: Scores.from_dict(scores) for name, scores in found["baselines"].items()},
            test_scores=None if test is None else Scores.from_dict(test),
        )


def train(
    recipe: str | Path | TrainConfig = "digits",
    *,
    overrides: Sequence[str] = (),
    data: Any = None,
    model: str | nn.Module | Model | None = None,
    objective: Any = None,
    callbacks: Sequence[Any] | None = None,
    trackers: Sequence[Any] | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    auto_resume: bool = False,
    report: bool = True,
    command: str | None = None,
) -> Run:
    """Train from scratch: `train("cifar10", overrides=["optim.lr=3e-4"])`.

    `recipe`: the name of a recipe, the path of a run's config.json, or a TrainConfig. `data` and `model` replace its
    data and network. `out`: the run folder; by default runs/NAME. `resume` continues an interrupted run from its last
    checkpoint, with the same result as an uninterrupted run; with a longer `duration` it extends the run.
    `auto_resume` starts a new run, continues an unfinished one or returns a finished one, whichever the folder holds.

    Objects of your own, each also by the name of an installed plugin (docs/extending.md):

    data        a map-style torch Dataset, a vitrail Source, or a tuple or dict of them (train, validation, test)
    model       a vitrail.Model, a ViT or BiT, or a network of timm, transformers, torchvision or open_clip, whose
                weights are the start
    objective   a function (net, images, targets, weights, sample_seeds) -> dict of per-image values, or a subclass of
                vitrail.objectives.Objective
    callbacks   objects with some of the methods of vitrail.training.callbacks.Callback
    trackers    "tensorboard", "wandb", "mlflow", or objects like vitrail.runs.trackers.Tracker
    """
    objects = CustomObjects()
    settings: dict[str, Any] = {}
    if data is not None:
        data = objects.add_data(data)
    if objective is not None:
        settings["objective"] = objects.add("objective", objective)
    for name, values in (("callbacks", callbacks), ("trackers", trackers)):
        if values is not None:
            settings[name] = values if isinstance(values, str) else objects.add_all(name, values)
    init_from = None if model is None or isinstance(model, str) else objects.add_model(model)
    overrides = [*overrides, *(f"{name}={_as_text(value)}" for name, value in settings.items())]
    if resume and not auto_resume and out is not None:  # the folder has the config
        folder = resolve_run_folder(out, "", resume=True)
    else:
        picked = resolve_recipe(recipe, data, model if isinstance(model, str) else None)
        if init_from is not None:
            picked = _config_from_network(picked, init_from, objects, keep_preprocess=isinstance(model, BaseNet))
        config = _apply_overrides(picked, overrides)
        if str(recipe) in RECIPES and not any(setting_name(o) == "compare" for o in overrides):
            config = config.replace(
                compare=tuple(change for change in config.compare if _is_comparison(config, change))
            )
        folder = resolve_run_folder(out, config.name, resume=resume, auto_resume=auto_resume)
    expected = config if auto_resume and folder.started else None
    if resume or expected is not None:
        resume = True
        config = resume_config(folder, overrides, {"data.source": data, "init_from": init_from}, expected)
        if isinstance(model, str):
            named = config.replace(model=_network_config(model, config.model).to_dict())
            named = override(named, [o for o in overrides if setting_name(o).startswith("model.")])
            if _without_head(named.model) != _without_head(config.model):
                raise ConfigError(f"--model {model} cannot be changed when a run is resumed. Start a new run instead.")
        if auto_resume and (done := _finished_run(folder, config)) is not None:
            return done
    return run_training(config, folder, resume=resume, report=report, command=command, objects=objects)


def finetune(
    model: str,
    data: str,
    *,
    recipe: str = "finetune",
    trainable: str | int = "all",
    image_size: int | tuple[int, int] | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    auto_resume: bool = False,
    report: bool = True,
    command: str | None = None,
) -> Run:
    """Fine-tune a pretrained model on new classes: `finetune("timm/vit_tiny_patch16_224...", "photos/")`.

    `recipe`: "finetune" (AdamW, layer-wise decay, the checkpoint's resolution) or "paper" (SGD at 384 px).
    `trainable`: "all", "head", or a number N for the head and the last N blocks. The other arguments are as in `train`.
    """
    folder = finetune_folder(data, recipe, overrides, out, resume=resume, auto_resume=auto_resume)
    if resume or (auto_resume and folder.started):
        default = recipe == "finetune" and not auto_resume
        if not (default or _name_override(overrides) or folder.read_config().name.startswith(f"{recipe}-")):
            raise ConfigError(f"--recipe {recipe} cannot be changed when a run is resumed. Start a new run instead.")
        requested: dict[str, Any] = {
            "init_from": model or None,
            "data.source": data or None,
            "image_size": image_size and pair(image_size),
        }
        # With auto_resume the command is complete: "all" is not a default to ignore but the requested value.
        if trainable != "all" or (auto_resume and "optim.trainable" not in map(setting_name, overrides)):
            requested["optim.trainable"] = trainable
        device_override = [f"device={device}"] if device != "auto" else []
        config = resume_config(folder, [*overrides, *device_override], requested)
        if auto_resume and (done := _finished_run(folder, config)) is not None:
            return done
        return run_training(config, folder, resume=True, report=report, command=command)
    config = finetune_config(
        model, data, recipe=recipe, trainable=trainable, image_size=image_size, overrides=overrides, device=device
    )
    return run_training(config, folder, report=report, command=command)


def finetune_folder(
    data: str,
    recipe: str,
    overrides: Sequence[str],
    out: str | Path | None,
    *,
    resume: bool = False,
    auto_resume: bool = False,
) -> RunFolder:
    """The run folder of `finetune`."""
    return resolve_run_folder(
        out, _name_override(overrides) or _finetune_name(data, recipe), resume=resume, auto_resume=auto_resume
    )


def finetune_config(
    model: str,
    data: str,
    *,
    recipe: str = "finetune",
    trainable: str | int = "all",
    image_size: int | tuple[int, int] | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
) -> TrainConfig:
    """The config that `finetune` chooses for a model and a data set."""
    if recipe not in tuning.FINETUNE_RECIPES:
        raise NotFoundError(f"unknown fine-tuning recipe {recipe!r}{did_you_mean(recipe, tuning.FINETUNE_RECIPES)}")
    about_data = [o for o in overrides if o.startswith("data.")]
    source = override(DataConfig(source=data), [o.removeprefix("data.") for o in about_data])
    with log_on_main_process():
        train = open_data(source).train
    if not hasattr(train, "__len__"):
        raise DataError(f"the number of images of {data} is unknown, and the settings depend on it; try shards:.")
    num_images = len(usable_indices(train, TargetTable(train.targets, train.multi_label, required=True)))
    config = tuning.FINETUNE_RECIPES[recipe](model, data, num_images=num_images, device=pick_device(device).type)
    if recipe == "paper" and image_size is None:
        image_size = tuning.paper_image_size(load_checkpoint(model)[0].config)
    config = config.replace(name=_finetune_name(data, recipe), device=device, image_size=image_size)
    if trainable != "all":
        config = tuning.train_only(config, trainable)
    if any(o.startswith("model.") for o in overrides):  # they change the checkpoint's network config
        config = config.replace(model=load_checkpoint(model, image_size=config.image_size)[0].config)
    return _apply_overrides(config, overrides)


def _apply_overrides(picked: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """The config with the overrides, and with the durations and the preprocessing adapted to them."""
    named = {setting_name(assignment) for assignment in overrides}
    config = scale_durations(picked, override(picked, overrides), PROPORTIONAL, named)
    if any(name.startswith("model.") for name in named) and not any(name.startswith("preprocess") for name in named):
        config = _match_preprocess(config)
    return config


def _match_preprocess(config: TrainConfig) -> TrainConfig:
    """The config with a preprocessing that has the network's image size and channels."""
    expected, given = config.model, config.preprocess
    if (
        expected is None
        or given is None
        or (pair(expected.image_size), expected.channels) == (pair(given.image_size), given.channels)
    ):
        return config
    fitting = preprocess_for_size(given, pair(expected.image_size), expected.channels)
    return config.replace(preprocess=fitting.to_dict())


def _is_comparison(config: TrainConfig, change: str) -> bool:
    """Whether a recipe's comparison changes the config and is valid for it."""
    try:
        return bool(override(config, [change]) != config)
    except ConfigError as error:
        warn_once([f"the comparison {change} is skipped: {error}"])
        return False


def run_training(
    config: TrainConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    report: bool = True,
    command: str | None = None,
    objects: CustomObjects | None = None,
) -> Run:
    """Train the run and its comparisons, then write the report. `objects`: the objects that the config has names of."""
    if config.model is not None:
        for change in config.compare:
            override(config, [change])  # raises for an invalid comparison before any training
    result = fit(config, folder, resume=resume, objects=objects)
    config = result.setup.config  # resolved once, and so the same for all comparisons
    if result.stop_reason not in (None, "patience"):
        return Run(
            folder.path,
            config,
            result.scores,
            result.stop_reason,
            resume_step=result.resume_step,
            test_scores=result.test_scores,
        )
    others = []
    with _explain_interrupt(folder):
        for change in config.compare:
            comparison_folder = RunFolder(folder.path / "compare" / _slug(change), folder.lock_timeout_s, folder.path)
            changed = override(config.replace(compare=(), callbacks=(), snapshot_every=None), [change])
            other = fit(changed, comparison_folder, resume=comparison_folder.started, objects=objects)
            others.append(Run(comparison_folder.path, other.setup.config, other.scores, other.stop_reason))
            if other.stop_reason not in (None, "patience"):
                return Run(
                    folder.path, config, result.scores, other.stop_reason, tuple(others), resume_step=other.resume_step
                )
        baselines = _baselines(result) if result.is_main else {}
        done = Run(
            folder.path,
            config,
            result.scores,
            result.stop_reason,
            tuple(others),
            baselines,
            test_scores=result.test_scores,
        )
        if report and result.is_main:
            _write_report(done, result, command)
        if result.is_main:
            folder.write_result(done.to_dict())
    return done


@contextmanager
def _explain_interrupt(folder: RunFolder) -> Iterator[None]:
    """Add to a KeyboardInterrupt between two runs or during the report where the model is and how to resume."""
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args:  # a comparison run has added its message
            raise
        hint = f"the model is in {folder.model}; write the report with: {folder.resume_command()}"
        raise KeyboardInterrupt(f"stopped by Ctrl-C; {hint}") from None


def _finished_run(folder: RunFolder, config: TrainConfig) -> Run | None:
    """The finished run of a folder; None if it is not finished or is to be extended."""
    found = folder.read_result() if folder.status == "finished" else None
    if found is None or config.duration != folder.read_config().duration:
        return None
    try:
        done = Run.from_dict(folder.path, config, found)
    except (KeyError, TypeError, ValueError, TrainError):  # damaged, or a comparison run is missing
        return None
    with log_on_main_process():
        warn_once([f"the run in {folder.path} is finished; there is nothing to do"])
    return done


def _baselines(result: FitResult) -> dict[str, Scores]:
    splits = result.setup.splits
    if result.scores is None or not pixel_knn_applies(splits.train, splits.validation):
        return {}
    return {"3-nearest neighbors": pixel_knn_baseline(splits.train, splits.validation)}


def _write_report(done: Run, result: FitResult, command: str | None) -> None:
    """Write report.html; a failure is reported and does not fail the run."""
    splits = result.setup.splits
    try:
        write_report(
            done.path,
            net=done.model.net,
            preprocess=done.model.preprocess,
            labels=splits.train.labels,
            scores=result.scores,
            source=splits.validation,
            measured_on=splits.eval_split,
            baselines=done.baselines,
            unreadable=tuple(result.unreadable_images.items()),
            comparisons=[other.path for other in done.comparisons],
            command=command,
        )
    except (OSError, VitrailError) as error:
        warn_once([f"the report could not be written: {error}"])


def resolve_recipe(recipe: str | Path | TrainConfig, data: str | None, model: str | None) -> TrainConfig:
    if isinstance(recipe, TrainConfig):
        config = recipe
    elif str(recipe) in RECIPES:
        config = RECIPES[str(recipe)]()
    elif str(recipe).endswith(".json"):
        config = read_run_config(Path(recipe).expanduser())
    else:
        raise NotFoundError(f"unknown recipe {str(recipe)!r}{did_you_mean(str(recipe), RECIPES)}")
    if data is not None:
        config = config.replace(data=config.data.replace(source=data).to_dict())
    if model is not None:
        config = config.replace(model=_network_config(model, config.model).to_dict())
    return config


def _config_from_network(
    config: TrainConfig, init_from: str, objects: CustomObjects, *, keep_preprocess: bool
) -> TrainConfig:
    """The config of a run that starts from a network in memory. `keep_preprocess`: fit the recipe's preprocessing to
    it; else the network has its own."""
    assert objects.init_model is not None
    compare = tuple(change for change in config.compare if not setting_name(change).startswith("model."))
    network = objects.init_model[0].config.replace(num_classes=0).to_dict()
    config = config.replace(model=network, init_from=init_from, compare=compare)
    return _match_preprocess(config) if keep_preprocess else config.replace(preprocess=None)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(value) or "none"


def _network_config(name: str, replaced: NetConfig | None) -> NetConfig:
    """The config of a network by name, with the image size and channels of the one it replaces."""
    same: dict[str, Any] = {}
    if replaced is not None:
        same = {"image_size": replaced.image_size, "channels": replaced.channels}
    return config_from_name(name, num_classes=0, **same)


def _without_head(network: NetConfig | None) -> NetConfig | None:
    return network.replace(num_classes=0) if network is not None else None


def _name_override(overrides: Sequence[str]) -> str | None:
    """The run's name if it is among the overrides."""
    return next((o.partition("=")[2].strip() for o in reversed(overrides) if setting_name(o) == "name"), None)


def _finetune_name(data: str, recipe: str) -> str:
    return f"{recipe}-{_slug(Path(data.rpartition(':')[2]).name or 'images')}"


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in text).strip("-.") or "run"
