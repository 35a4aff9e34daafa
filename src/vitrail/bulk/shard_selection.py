"""`--shard 2/8`: the parts that one of several independent processes computes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vitrail.errors import ConfigError

AUTO = "auto"
SLURM = "SLURM_ARRAY_TASK_"
KUBERNETES_INDEX, KUBERNETES_COUNT = "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"


@dataclass(frozen=True)
class Shard:
    """Shard `number` of `count`, from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def select(self, num_parts: int) -> range:
        """The numbers of its parts: neighbors, so that each machine reads its own tar shards or row groups."""
        return range((self.number - 1) * num_parts // self.count, self.number * num_parts // self.count)


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """`2/8`, or `auto`: from the variables of a SLURM job array or of an indexed Kubernetes Job."""
    if text == AUTO:
        return _from_environment(environment)
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--shard {text}: expected I/N with I from 1 to N, such as 2/8, or auto.")
    return Shard(int(number), int(count))


def _from_environment(environment: Mapping[str, str]) -> Shard:
    if f"{SLURM}ID" in environment:
        task, first, step, count = (
            _number(environment, f"{SLURM}{name}", default)
            for name, default in (("ID", None), ("MIN", 0), ("STEP", 1), ("COUNT", None))
        )
        index = (task - first) // max(step, 1)
    elif KUBERNETES_INDEX in environment:
        index, count = (_number(environment, name) for name in (KUBERNETES_INDEX, KUBERNETES_COUNT))
    else:
        raise ConfigError(
            f"--shard auto: there is neither {SLURM}ID, which SLURM sets in a job array, nor {KUBERNETES_INDEX}, which "
            "Kubernetes sets in an indexed Job; try --shard 2/8."
        )
    if not 0 <= index < count:
        raise ConfigError(f"--shard auto: got index {index} of {count} from the environment; try --shard 2/8.")
    return Shard(index + 1, count)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        hint = "; set it to the Job's spec.completions" if name == KUBERNETES_COUNT else ""
        raise ConfigError(f"--shard auto: expected a number in {name}, got {text or 'nothing'}{hint}.")
    return int(text)
