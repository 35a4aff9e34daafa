"""Recognition over timm's and transformers' ViT-shaped models: each is read exactly, or refused by its own name.

The table itself is in `tests/recognition_table.py`; `python tests/recognition_table.py` prints it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import recognition_timm
import recognition_transformers
from recognition_table import Case, Result, results
from recognition_timm import is_read, timm

from vitrail.weights.timm_origin import SUPPORTED_ARCHS

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quick_disk")]

EVERY = [*recognition_timm.cases(), *recognition_transformers.cases()]
GROUPS = list(dict.fromkeys(case.group for case in EVERY))


def found(cases: list[Case], folder: Path) -> list[Result]:
    return [result for number, case in enumerate(cases) for result in results(case, folder / str(number))]


def wrong(found: list[Result]) -> list[str]:
    """What should not be: a misread file, a refusal without the model's name, a question that a sidecar answers."""
    return [
        f"{r.case.name} as {r.form}: {r.outcome}, {r.detail}"
        for r in found
        if r.outcome in ("unnamed", "misread") or (r.outcome == "asked" and r.form == "folder")
    ]


COLUMNS = ("exact", "asked", "refused")
TABLE = {
    ("timm vision_transformer", "folder"): (130, 0, 27),
    ("timm vision_transformer", "bare"): (66, 64, 27),
    ("timm deit", "folder"): (16, 0, 0),
    ("timm deit", "bare"): (16, 0, 0),
    ("timm vision_transformer_hybrid", "folder"): (9, 0, 5),
    ("timm vision_transformer_hybrid", "bare"): (9, 0, 5),
    ("timm resnetv2", "folder"): (6, 0, 14),
    ("timm resnetv2", "bare"): (6, 0, 14),
    ("timm eva", "folder"): (0, 0, 65),
    ("timm eva", "bare"): (0, 0, 65),
    ("timm beit", "folder"): (0, 0, 7),
    ("timm beit", "bare"): (0, 0, 7),
    ("timm vision_transformer_relpos", "folder"): (0, 0, 13),
    ("timm vision_transformer_relpos", "bare"): (0, 0, 13),
    ("timm vision_transformer_sam", "folder"): (0, 0, 4),
    ("timm vision_transformer_sam", "bare"): (0, 0, 4),
    ("timm naflexvit", "folder"): (0, 0, 8),
    ("timm naflexvit", "bare"): (0, 0, 8),
    ("transformers", "folder"): (29, 0, 44),
    ("transformers", "bare"): (27, 10, 36),
}
"""How many of each module are read exactly, read exactly once told what they are asked for, and refused by name."""


@pytest.mark.parametrize("group", GROUPS)
def test_each_is_read_exactly_or_refused_by_its_name(group: str, tmp_path: Path) -> None:
    seen = found([case for case in EVERY if case.group == group], tmp_path)
    assert wrong(seen) == []
    counts = Counter((r.form, r.outcome) for r in seen)
    for form in ("folder", "bare"):
        assert tuple(counts[form, outcome] for outcome in COLUMNS) == TABLE[group, form], form


def test_of_all_of_timms_architectures_only_those_of_the_table_are_known() -> None:
    """A name that vitrail has never heard of is not taken for a ViT."""
    known = {name for name in timm.list_models() if SUPPORTED_ARCHS.fullmatch(name)}
    assert known == {case.name for case in recognition_timm.cases() if is_read(case.name)}
