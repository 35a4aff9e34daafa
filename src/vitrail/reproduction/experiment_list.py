"""The list of experiments: what each claims, what it costs and what it showed when it was last run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from vitrail.report.formatting import format_duration
from vitrail.reproduction.arm import SCALES, Scale
from vitrail.reproduction.cost import CostModel
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiment_page import OUTCOME_MARKS
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.planning import Plan
from vitrail.reproduction.scales import NOMINAL_IMAGES

TYPICAL: Mapping[Scale, tuple[str, int]] = {"tiny": ("cpu", 2), "gpu": ("cuda", 8)}
"""Scale -> the device and the number of runs at a time that the costs are stated for."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An experiment in the list."""

    name: str
    title: str
    claim: str
    source: str
    cost: str
    """Duration at each scale: `tiny: 6 min on two CPU cores`."""
    result: str
    """The recorded runs: `gpu, cifar10: 2 hold, 1 undecided`, and each verdict of the largest scale."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def catalog() -> list[Entry]:
    """All experiments."""
    recorded = recorded_results()
    return [_entry(experiment, recorded.get(experiment.name, {})) for experiment in EXPERIMENTS.values()]


def recorded_results() -> dict[str, dict[str, dict[str, Any]]]:
    """Experiment -> scale -> its recorded run: data, devices, seconds, date, summary, verdicts.

    docs/results.py writes the file.
    """
    file = files("vitrail.reproduction").joinpath("recorded.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _entry(experiment: Experiment, found: dict[str, dict[str, Any]]) -> Entry:
    costs = []
    for scale, (device, jobs) in TYPICAL.items():
        where = "two CPU cores" if device == "cpu" else "one GPU"
        if scale in found:
            costs.append(f"{scale}: {format_duration(found[scale]['seconds'] / jobs)} on {where}")
        else:
            costs.append(f"{scale}: about {format_duration(estimate(experiment, scale))} on {where}")
    results = [f"{scale}, {record['data']}: {record['summary']}" for scale, record in found.items()]
    if found:
        largest = found[max(found, key=SCALES.index)]
        results += [f"{OUTCOME_MARKS[verdict['outcome']]} {verdict['claim']}" for verdict in largest["verdicts"]]
    return Entry(
        name=experiment.name,
        title=experiment.title,
        claim=experiment.claim,
        source=experiment.source,
        cost="\n".join(costs),
        result="\n".join(results) or "not recorded",
    )


def estimate(experiment: Experiment, scale: Scale) -> float:
    """Estimated seconds of a whole experiment on the scale's typical device."""
    device, jobs = TYPICAL[scale]
    arms = tuple(experiment.arms(scale, None))
    num_images = NOMINAL_IMAGES.get(arms[0].config.data.source, 50_000)
    return CostModel(device, num_images, arms, jobs).of_plan(Plan(arms, experiment.seeds[scale]))
