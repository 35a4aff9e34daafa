"""Which folder a run is in, whether it begins or goes on, and what may change when it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitrail.config import Duration, TrainConfig, override
from vitrail.config.base import Config
from vitrail.errors import ConfigError
from vitrail.runtime import warn_once
from vitrail.train.run import RESTART, SOON, RunFolder, free_folder, latest_folder

RUNS = Path("runs")

# What may change when a run goes on: how it is watched and spread, never what it computes.
CHANGEABLE = (
    "grad_accum_steps", "checkpoint_every", "compile", "data.max_bad_fraction", "data.root", "data.skip_bad",
    "data.workers", "device", "evaluate_every", "log_every", "on_nan", "parallel", "patience",
    "gradient_checkpointing", "snapshot_every", "tensorboard",
)  # fmt: skip
LENGTH = ("duration", "schedule.cooldown", "augment.mix_off")
"""What may change as well where the duration does: a run can be made longer. The warm-up is how it began."""
SHARES = ("schedule.warmup", *LENGTH[1:])
"""Parts of a new run that keep their share of its length, unless they are given."""
FOUND = ("batch_size", "precision")
"""Settings whose `auto` was replaced by what was found when the run began."""
BLANK = ("model", "preprocess")
"""Settings whose None was."""


def run_folder(out: str | Path | None, name: str, *, resume: bool = False, auto_resume: bool = False) -> RunFolder:
    """Where the run is, or goes.

    Without `out`: a name that is free; with `resume` the latest run of that name. With `auto_resume` runs/NAME
    itself: the same command must mean the same folder each time, and in each of several processes.
    """
    if resume and auto_resume:
        raise ConfigError("resume and auto_resume exclude each other: auto_resume begins a run or goes on with it.")
    if out is not None:
        return RunFolder(Path(out).expanduser(), RESTART if auto_resume else SOON)
    wanted = RUNS / name
    if auto_resume:
        return RunFolder(wanted, RESTART)
    if resume:
        return RunFolder(latest_folder(wanted))
    found = free_folder(wanted)
    if found != wanted:
        warn_once([f"{wanted} holds a run already; this one goes to {found}"])
    return RunFolder(found)


def resumed(
    folder: RunFolder, overrides: Sequence[str], asked: Mapping[str, Any], wanted: TrainConfig | None = None
) -> TrainConfig:
    """The run's own settings; only what does not change its results may be changed, or be `asked` for anew.

    `wanted`: the settings that a new run would have, all of which are compared. A longer duration extends the run;
    `fit` counts its steps, and refuses a shorter one.
    """
    before = folder.read_config()
    last = {name_of(assignment): assignment for assignment in overrides}.values()  # of two for one setting
    config: TrainConfig = override(before, [o for o in last if not _was_found(before, o)])
    names = {name_of(assignment) for assignment in overrides}
    if wanted is not None:
        config = config.replace(duration=wanted.duration)
    longer = config.duration != before.duration
    if longer:
        config = keep_shares(before, config, LENGTH[1:], names)
    changed = [name for name in sorted(names) if at(config, name) != at(before, name)]
    changed += [name for name, value in asked.items() if value is not None and not _same(value, at(before, name))]
    if wanted is not None:
        # With a duration of its own, and in a run that was extended, these follow from the length.
        follow = {"duration", *SHARES} if longer or "duration" in names else set()
        changed += [name for name in differing(wanted, before) if name not in names | follow]
    for name in changed:
        if name not in CHANGEABLE + (LENGTH if longer else ()):
            raise ConfigError(
                f"{name} is {at(before, name)} and cannot change when a run is resumed, since its results would; "
                f"what can is {', '.join(CHANGEABLE)}, and duration can grow. Start a new run instead."
            )
    return config


def differing(wanted: Any, there: Any, path: str = "") -> list[str]:
    """The settings that differ between a new run and one whose blanks are filled in, by their dotted paths."""
    if isinstance(wanted, Config) and type(wanted) is type(there) and not isinstance(wanted, Duration):
        return [
            name
            for inner in (field.name for field in fields(wanted))
            for name in differing(getattr(wanted, inner), getattr(there, inner), f"{path}.{inner}".lstrip("."))
        ]
    blank = (path in BLANK and wanted is None) or (path in FOUND and wanted == "auto")
    return [] if blank or (path == "model.num_classes" and wanted == 0) or _same(wanted, there) else [path]


def keep_shares(before: TrainConfig, config: TrainConfig, parts: Sequence[str], given: set[str]) -> TrainConfig:
    """In a run of another length these parts of it keep their share, unless they are given."""
    for name in parts:
        part, length = at(config, name), before.duration
        if name not in given and config.duration != length and part.unit == length.unit:
            count = round(config.duration.count * part.count / length.count, 12)  # 0.3, not 0.30000000000000004
            kept = config.duration.replace(count=count)
            config = override(config, [f"{name}={kept}"])
    return config


def _was_found(before: TrainConfig, assignment: str) -> bool:
    """batch_size=auto, of a run that has its batch: the same command may be given again."""
    name, _, value = assignment.partition("=")
    return name.strip() in FOUND and value.strip() == "auto" and at(before, name.strip()) != "auto"


def _same(one: Any, other: Any) -> bool:
    """224 and (224, 224) are one size, photos and photos/ one folder."""
    if isinstance(one, str) and isinstance(other, str):
        return one.rstrip("/") == other.rstrip("/")
    return bool(one == other or (one, one) == other or one == (other, other))


def name_of(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def at(config: Any, path: str) -> Any:
    """The setting at a dotted path."""
    for name in path.split("."):
        config = getattr(config, name)
    return config
