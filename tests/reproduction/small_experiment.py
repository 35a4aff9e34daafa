"""An experiment of half-second runs, and a script that reproduces it in a process of its own.

python tests/reproduction/small_experiment.py '{"out": "folder", "seeds": 2}'

Prints a line of JSON for each trial that has finished.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vitrail.config import (
    AugmentConfig,
    DataConfig,
    OptimConfig,
    PreprocessConfig,
    TrainConfig,
    ViTConfig,
    steps,
)
from vitrail.reproduction.analysis import Analysis, Paragraph, arm_table, compare
from vitrail.reproduction.arm import Arm, Scale
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.results import Results

RATES = (1e-2, 3e-3)
LENGTH = 12
"""Steps of a run."""


def arms(scale: Scale, data: DataConfig | None = None) -> list[Arm]:
    """Two arms that start from nothing and two that start from the first one's model."""
    config = TrainConfig(
        name="small",
        model=ViTConfig(
            image_size=8, patch_size=4, channels=1, num_classes=0, width=16, depth=1, num_heads=2, mlp_dim=32,
            dropout=0.1,
        ),
        preprocess=PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,)),
        augment=AugmentConfig(crop="pad", pad=1, flip=0.0),
        optim=OptimConfig(lr=1e-2, weight_decay=0.05),
        data=(data or DataConfig(source="digits")).replace(held_out=0.2),
        duration=steps(LENGTH),
        batch_size=64,
        log_every=steps(1),
        evaluate_every=None,
        checkpoint_every=steps(4),
        keep="last",
    )  # fmt: skip
    deeper = config.replace(model=config.model.replace(position="none").to_dict())
    tuned = config.replace(model=None, init_from="parent", data=config.data.replace(fraction=0.5).to_dict())
    return [
        Arm(name="base", config=config, factors={"start": "none"}, learning_rates=RATES, measures=("5-shot",)),
        Arm(name="no positions", config=deeper, factors={"start": "none"}, learning_rates=RATES),
        Arm(name="tuned", config=tuned, factors={"start": "base"}, learning_rates=RATES, parent="base"),
        Arm(name="once", config=tuned, factors={"start": "base"}, parent="base", max_seeds=1, learning_rates=RATES),
    ]


def analyze(results: Results) -> Analysis:
    verdict = compare("Fine-tuning helps.", results.difference("tuned", "base"), "tuned", "base")
    table = arm_table(results, "Accuracy", {"test": "test accuracy, %", "5-shot": "5-shot, %"}, reference="base")
    return Analysis([verdict], [table, Paragraph(f"{len(results.trials)} runs.")])


SMALL = Experiment(
    name="small",
    title="A small experiment",
    claim="Fine-tuning helps.",
    source="nowhere",
    arms=arms,
    analyze=analyze,
    seeds={"tiny": 2, "gpu": 2, "paper": 1},
)


def main() -> int:
    from vitrail.reproduction.reproduce import Status, reproduce

    EXPERIMENTS["small"] = SMALL
    options: dict[str, Any] = {"scale": "tiny", "device": "cpu", "jobs": 2} | json.loads(sys.argv[1])

    def report(status: Status) -> None:
        if status.newest is not None:
            print(json.dumps({"key": status.newest.key}), flush=True)

    reproduce("small", **options, on_progress=report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
