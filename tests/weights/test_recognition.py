"""Recognition of the ViT-like models of timm and transformers: each is read exactly, or refused by name.

The cases are in `tests/recognition_table.py`; `python tests/recognition_table.py` prints the table.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import recognition_timm
import recognition_transformers
from recognition_table import Case, Result, evaluate_case
from recognition_timm import is_supported, timm

from vitrail.weights.timm_family import SUPPORTED_ARCHS

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quick_disk")]

CASES = [*recognition_timm.cases(), *recognition_transformers.cases()]
GROUPS = list(dict.fromkeys(case.group for case in CASES))


def evaluate_cases(cases: list[Case], folder: Path) -> list[Result]:
    return [result for number, case in enumerate(cases) for result in evaluate_case(case, folder / str(number))]


def failures(results: list[Result]) -> list[str]:
    """Misread files, refusals that do not name the model, and options required although a sidecar states them."""
    return [
        f"{result.case.name} as {result.form}: {result.outcome}, {result.detail}"
        for result in results
        if result.outcome in ("unclear", "misread") or (result.outcome == "option" and result.form == "folder")
    ]


COLUMNS = ("exact", "option", "refused")
TABLE = {
    ("timm vision_transformer", "folder"): (130, 0, 27),
    ("timm vision_transformer", "bare"): (66, 64, 27),
    ("timm deit", "folder"): (16, 0, 0),
    ("timm deit", "bare"): (16, 0, 0),
    ("timm vision_transformer_hybrid", "folder"): (9, 0, 5),
    ("timm vision_transformer_hybrid", "bare"): (9, 0, 5),
    ("timm resnetv2", "folder"): (6, 0, 14),
    ("timm resnetv2", "bare"): (6, 0, 14),
    ("timm eva", "folder"): (16, 0, 49),
    ("timm eva", "bare"): (0, 16, 49),
    ("timm beit", "folder"): (0, 0, 7),
    ("timm beit", "bare"): (0, 0, 7),
    ("timm vision_transformer_relpos", "folder"): (0, 0, 13),
    ("timm vision_transformer_relpos", "bare"): (0, 0, 13),
    ("timm vision_transformer_sam", "folder"): (0, 0, 4),
    ("timm vision_transformer_sam", "bare"): (0, 0, 4),
    ("timm naflexvit", "folder"): (0, 0, 8),
    ("timm naflexvit", "bare"): (0, 0, 8),
    ("timm swin_transformer", "folder"): (9, 0, 0),
    ("timm swin_transformer", "bare"): (9, 0, 0),
    ("timm swin_transformer_v2", "folder"): (12, 0, 0),
    ("timm swin_transformer_v2", "bare"): (0, 12, 0),
    ("timm swin_transformer_v2_cr", "folder"): (0, 0, 16),
    ("timm swin_transformer_v2_cr", "bare"): (0, 0, 16),
    ("transformers", "folder"): (36, 0, 41),
    ("transformers", "bare"): (33, 12, 32),
}
"""Counts for each module: read exactly, read exactly with the required option, refused by name."""


@pytest.mark.parametrize("group", GROUPS)
def test_each_model_is_read_exactly_or_refused_by_name(group: str, tmp_path: Path) -> None:
    results = evaluate_cases([case for case in CASES if case.group == group], tmp_path)
    assert failures(results) == []
    counts = Counter((result.form, result.outcome) for result in results)
    for form in ("folder", "bare"):
        assert tuple(counts[form, outcome] for outcome in COLUMNS) == TABLE[group, form], form


def test_supported_timm_architectures_are_those_of_the_table() -> None:
    """An unknown architecture name is not read as a ViT."""
    supported = {name for name in timm.list_models() if SUPPORTED_ARCHS.fullmatch(name)}
    assert supported == {case.name for case in recognition_timm.cases() if is_supported(case.name)}
