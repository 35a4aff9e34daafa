"""What operators chose through the admin routes, in a JSON file that all workers of a server follow."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitrail.storage.atomic_write import write_json
from vitrail.storage.locks import file_lock

FILE_NAME = ".vitrail-serve.json"

log = logging.getLogger("vitrail.serve")


@dataclass
class ModelChoice:
    """Choices about the versions of one model."""

    held: dict[str, str] = field(default_factory=dict)
    """Versions that are not used by default, with the signature of their files; other files under the same name are a
    new version, to which this does not apply."""
    kept: list[str] = field(default_factory=list)
    """Versions that are loaded beside the default."""


@dataclass
class Choices:
    """Choices about all models."""

    models: dict[str, ModelChoice] = field(default_factory=dict)
    reloads: int = 0
    """Increases with every request to reload; each worker then retries what has failed."""

    def of(self, name: str) -> ModelChoice:
        """Choices about a model, to be changed in place."""
        return self.models.setdefault(name, ModelChoice())


class ChoicesFile:
    """Reads and changes the file. A missing file means no choices; one that cannot be read, those read last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last, self._failing = Choices(), False

    def read(self) -> Choices:
        """The choices. Otherwise a version that an operator has taken out of use would return with a read error."""
        try:
            self._last, self._failing = self._parse(), False
        except (OSError, ValueError) as error:
            if not self._failing:
                log.error("%s cannot be read (%s); the choices stay as they are", self.path, error)
            self._failing = True
        return self._last

    def _parse(self) -> Choices:
        try:
            values: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Choices()
        try:
            models = {str(name): ModelChoice(**choice) for name, choice in values["models"].items()}
            return Choices(models, int(values["reloads"]))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"unexpected contents: {error}") from None

    @contextmanager
    def change(self) -> Iterator[Choices]:
        """Read the choices, and write them after the `with` block; other processes wait meanwhile."""
        with file_lock(self.path.with_suffix(".lock")):
            choices = copy.deepcopy(self.read())
            yield choices
            write_json(self.path, asdict(choices), overwrite=True)
