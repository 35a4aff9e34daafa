"""Resuming runs: which folder a command refers to, and which settings may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitrail.config import Duration, TrainConfig, override
from vitrail.config.base import Config
from vitrail.errors import ConfigError
from vitrail.runs.run_folder import (
    LOCK_TIMEOUT_S,
    RESTART_LOCK_TIMEOUT_S,
    RunFolder,
    first_unused_folder,
    latest_run_folder,
)
from vitrail.runtime import warn_once

RUNS = Path("runs")

# Settings that may change when a run is resumed: logging and parallelism, nothing that changes its result.
CHANGEABLE = (
    "checkpoint_every", "compile", "data.max_bad_fraction", "data.root", "data.skip_bad", "data.workers",
    "device", "evaluate_every", "grad_accum_steps", "gradient_checkpointing", "kernels", "log_every", "on_nan",
    "parallel", "patience", "shard_size", "snapshot_every", "trackers", "callbacks",
)  # fmt: skip
LENGTH = ("duration", "schedule.cooldown", "augment.mix_off")
"""Settings that may also change if the run is made longer. The warm-up is not among them: it is over."""
PROPORTIONAL = ("schedule.warmup", *LENGTH[1:])
"""Durations that are scaled with the length of a new run, unless they are given."""
RESOLVED_AUTO = ("batch_size", "precision")
"""Settings whose `auto` was replaced by a value when the run started."""
RESOLVED_NONE = ("model", "preprocess")
"""Settings whose None was replaced by a value when the run started."""


def resolve_run_folder(
    out: str | Path | None, name: str, *, resume: bool = False, auto_resume: bool = False
) -> RunFolder:
    """The folder of a new or resumed run.

    Without `out`: the first unused of runs/NAME, runs/NAME-2, ...; with `resume` the last used. With `auto_resume`
    always runs/NAME: the same command must refer to the same folder each time and in each process.
    """
    if resume and auto_resume:
        raise ConfigError("resume and auto_resume cannot be combined: auto_resume starts or resumes as needed.")
    if out is not None:
        return RunFolder(Path(out).expanduser(), RESTART_LOCK_TIMEOUT_S if auto_resume else LOCK_TIMEOUT_S)
    expected = RUNS / name
    if auto_resume:
        return RunFolder(expected, RESTART_LOCK_TIMEOUT_S)
    if resume:
        return RunFolder(latest_run_folder(expected))
    found = first_unused_folder(expected)
    if found != expected:
        warn_once([f"{expected} already contains a run; this one is written to {found}"])
    return RunFolder(found)


def resume_config(
    folder: RunFolder, overrides: Sequence[str], requested: Mapping[str, Any], expected: TrainConfig | None = None
) -> TrainConfig:
    """The config of a resumed run; raises ConfigError for a change that would affect its result.

    `requested`: arguments of the command that must match, by dotted path. `expected`: the config a new run would have,
    which must match too. A longer duration extends the run; `fit` refuses a shorter one.
    """
    before = folder.read_config()
    last = {setting_name(assignment): assignment for assignment in overrides}.values()  # of two for one setting
    config: TrainConfig = override(before, [o for o in last if not _is_resolved_auto(before, o)])
    names = {setting_name(assignment) for assignment in overrides}
    if expected is not None:
        config = config.replace(duration=expected.duration)
    longer = config.duration != before.duration
    if longer:
        config = scale_durations(before, config, LENGTH[1:], names)
    changed = [name for name in sorted(names) if get_setting(config, name) != get_setting(before, name)]
    changed += [
        name
        for name, value in requested.items()
        if value is not None and not _equivalent(value, get_setting(before, name))
    ]
    if expected is not None:
        # With another duration, and in a run that was extended, these follow from the length.
        follow = {"duration", *PROPORTIONAL} if longer or "duration" in names else set()
        changed += [name for name in changed_settings(expected, before) if name not in names | follow]
    for name in changed:
        if name not in CHANGEABLE + (LENGTH if longer else ()):
            raise ConfigError(
                f"{name} is {get_setting(before, name)} and cannot be changed when a run is resumed, because the "
                "result would differ. Start a new run instead. Settings that can be changed: "
                f"{', '.join(CHANGEABLE)}; duration can be increased."
            )
    return config


def changed_settings(new: Any, old: Any, path: str = "") -> list[str]:
    """Dotted paths of the settings that differ between a new config and the resolved one of an existing run."""
    if isinstance(new, Config) and type(new) is type(old) and not isinstance(new, Duration):
        return [
            name
            for inner in (field.name for field in fields(new))
            for name in changed_settings(getattr(new, inner), getattr(old, inner), f"{path}.{inner}".lstrip("."))
        ]
    unresolved = (path in RESOLVED_NONE and new is None) or (path in RESOLVED_AUTO and new == "auto")
    return [] if unresolved or (path == "model.num_classes" and new == 0) or _equivalent(new, old) else [path]


def scale_durations(before: TrainConfig, config: TrainConfig, parts: Sequence[str], given: set[str]) -> TrainConfig:
    """Scale these durations with the length of the run, unless they are given."""
    for name in parts:
        part, length = get_setting(config, name), before.duration
        if name not in given and config.duration != length and part.unit == length.unit:
            count = round(config.duration.count * part.count / length.count, 12)  # 0.3, not 0.30000000000000004
            kept = config.duration.replace(count=count)
            config = override(config, [f"{name}={kept}"])
    return config


def _is_resolved_auto(before: TrainConfig, assignment: str) -> bool:
    """Whether an override such as batch_size=auto repeats one that the run has already resolved."""
    name, _, value = assignment.partition("=")
    return name.strip() in RESOLVED_AUTO and value.strip() == "auto" and get_setting(before, name.strip()) != "auto"


def _equivalent(one: Any, other: Any) -> bool:
    """Equality, where 224 equals (224, 224) and "photos" equals "photos/"."""
    if isinstance(one, str) and isinstance(other, str):
        return one.rstrip("/") == other.rstrip("/")
    return bool(one == other or (one, one) == other or one == (other, other))


def setting_name(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def get_setting(config: Any, path: str) -> Any:
    """The setting at a dotted path."""
    for name in path.split("."):
        config = getattr(config, name)
    return config
