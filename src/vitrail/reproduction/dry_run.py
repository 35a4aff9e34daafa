"""What an experiment needs and whether this machine has it, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vitrail.config import TrainConfig
from vitrail.errors import ConfigError, VitrailError
from vitrail.reproduction.session import Request, open_session

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The plan of an experiment with its estimated cost, and what stands in its way."""

    experiment: str
    scale: str
    data: str
    num_images: int
    is_assumed: bool
    """Whether the number of images is that of the published dataset, as the data is not here."""
    arms: int
    trials: int
    """Number of training runs."""
    finished: int
    seconds: float
    """Estimated duration of the trials that are not finished."""
    jobs: int
    """Number of runs at a time."""
    device: str
    memory: int
    """Estimated bytes of the run with the most FLOPs."""
    left_out: str | None
    problems: tuple[str, ...]
    """Why the experiment cannot run here; empty if it can."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def dry_run(request: Request) -> DryRun:
    """Plan an experiment, open its data, and estimate duration and memory."""
    session = open_session(request, require_data=False)
    plan, first = session.plan, session.plan.arms[0].config
    problems = [] if session.data_error is None else [session.data_error]
    if request.device_problem is not None and session.unfinished:
        problems.append(request.device_problem)
    problems += _invalid(arm.config for arm in plan.arms)
    memory = request.largest_memory
    available = _device_memory(request)
    if available is not None and memory * request.num_jobs > available:
        problems.append(
            f"{request.num_jobs} runs of about {memory / GB:.0f} GB at a time do not fit into the device's "
            f"{available / GB:.0f} GB; try --jobs 1, grad_accum_steps=8 or a smaller batch_size."
        )
    return DryRun(
        experiment=request.name,
        scale=request.resolved_scale,
        data=first.data.source,
        num_images=session.cost.num_images,
        is_assumed=session.data_error is not None,
        arms=len(plan.arms),
        trials=plan.num_trials,
        finished=sum(trial.key in session.results.trials for trial in plan.trials(session.results)),
        seconds=session.seconds_left({}),
        jobs=request.num_jobs,
        device=session.cost.device,
        memory=memory,
        left_out=session.left_out,
        problems=tuple(problems),
    )


def check_feasible(request: Request) -> None:
    """Raise ConfigError with what stands in the way of an experiment."""
    if problems := dry_run(request).problems:
        raise ConfigError(" ".join(problems))


def _invalid(configs: Iterator[TrainConfig]) -> list[str]:
    """The messages of settings that cannot be written and read back."""
    found = []
    for config in configs:
        try:
            TrainConfig.from_dict(config.to_dict())
        except VitrailError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _device_memory(request: Request) -> int | None:
    """Bytes of the GPU's memory; None without one."""
    if request.device_kind != "cuda":
        return None
    return torch.cuda.get_device_properties(request.device if request.device != "auto" else "cuda").total_memory
