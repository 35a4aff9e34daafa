"""Recognition of checkpoints, over every ViT-shaped model of timm and transformers.

Each model is built small with random weights and saved twice: as the folder its own library writes, and as a bare
file of weights. Reading it has one of five outcomes:

    exact     the logits are the library's own, to float32 rounding
    asked     refused with the name of an option; with that option the logits are the library's own
    refused   refused by the model's own name
    unnamed   refused, and not by its name, or with an option that leads to another model
    misread   read as a network with other logits

`python tests/recognition_table.py` prints the table; `tests/weights/test_recognition.py` holds the last two at 0.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from compare import relative
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.weights import checkpoint

Form = Literal["folder", "bare"]
Outcome = Literal["exact", "asked", "refused", "unnamed", "misread"]
ROUNDING = 3e-6
"""The largest relative difference in float64 that counts as none. CLIP's epsilon in place of ViT's gives more; 1e-6 in
place of 1e-12 does not, and a bare file of ViT-MSN is not told from one of ViT."""
OPTION = re.compile(r"\b(activation|num_heads|family|position|image_size)=")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A model of another library with random weights."""

    model: nn.Module
    answer: Callable[[Tensor], Tensor]
    image_size: tuple[int, int]
    """Height and width it takes."""
    save: Callable[[Path], object]
    """Writes the folder as its library does."""
    truth: Mapping[str, Any] | None
    """Options that would settle a question about it; None: vitrail does not build this network."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture of another library."""

    group: str
    """The module it comes from: a row of the table."""
    name: str
    called: str
    """A pattern for the model's own name, which a refusal must contain."""
    make: Callable[[], Sample] = field(compare=False)


@dataclass(frozen=True)
class Result:
    case: Case
    form: Form
    outcome: Outcome
    detail: str


def results(case: Case, folder: Path) -> list[Result]:
    """Both forms of one case."""
    sample = case.make()
    folder.mkdir(parents=True, exist_ok=True)
    sample.save(folder / "saved")
    (folder / "weights.safetensors").hardlink_to(folder / "saved" / "model.safetensors")
    if sample.truth is not None:
        sample.model.double()
    paths: dict[Form, Path] = {"folder": folder / "saved", "bare": folder / "weights.safetensors"}
    return [Result(case, form, *outcome(case, form, sample, path)) for form, path in paths.items()]


def outcome(case: Case, form: Form, sample: Sample, path: Path) -> tuple[Outcome, str]:
    try:
        net = checkpoint.read(path, dtype=torch.float64)[0]
    except VitrailError as error:
        return refusal(case, form, sample, path, str(error))
    if sample.truth is None:
        return "misread", "a network that vitrail does not build"
    wrong = difference(net, sample)
    return ("misread" if wrong > ROUNDING else "exact"), f"differs by {wrong:.1e}"


def refusal(case: Case, form: Form, sample: Sample, path: Path, said: str) -> tuple[Outcome, str]:
    """A refusal names the model, or an option that settles the question."""
    said = said.replace(str(path), "PATH")
    options = set(OPTION.findall(said))
    by_name = bool(re.search(case.called, said)) and not (options - {"family"} if form == "bare" else options)
    if sample.truth is None or (by_name and not options):
        return ("refused" if by_name else "unnamed"), said
    if not options or not options <= sample.truth.keys():
        return "unnamed", said
    known = {name: sample.truth[name] for name in options}
    family = known.pop("family", None)
    try:
        net = checkpoint.read(path, family=family, overrides=known, dtype=torch.float64)[0]
    except VitrailError as error:
        if not OPTION.findall(str(error)) or set(OPTION.findall(str(error))) <= options:
            return "unnamed", f"refused again with {known}, family={family}: {error}"
        return refusal(case, form, sample, path, f"{said} {error}")  # it asks for one option after the other
    wrong = difference(net, sample)
    return ("misread" if wrong > ROUNDING else "asked"), f"differs by {wrong:.1e} with {sorted(options)}: {said}"


@torch.no_grad()
def difference(net: nn.Module, sample: Sample) -> float:
    """Of the logits, relative; infinite where they are of another shape."""
    images = torch.randn(1, 3, *sample.image_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        ours, theirs = net(images), sample.answer(images)
    except VitrailError:
        return float("inf")
    return relative(ours, theirs) if ours.shape == theirs.shape else float("inf")


def table(found: Iterable[Result]) -> str:
    """One row for each module and form."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for result in found:
        counts.setdefault((result.case.group, result.form), Counter())[result.outcome] += 1
    total = sum(counts.values(), Counter[str]())
    rows = [*counts.items(), (("all", ""), total)]
    columns = ("read exactly", "exactly, once told", "refused by name", "refused otherwise", "misread")
    lines = [f"| {'module':32} | as     | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
    lines += [
        f"| {group:32} | {form:6} | {n['exact']:12} | {n['asked']:18} | {n['refused']:15} | "
        f"{n['unnamed']:17} | {n['misread']:7} |"
        for (group, form), n in rows
    ]
    return "\n".join(lines)


def cases(pattern: str = "") -> list[Case]:
    import recognition_timm
    import recognition_transformers

    both = [*recognition_timm.cases(), *recognition_transformers.cases()]
    return [case for case in both if re.search(pattern, f"{case.group}/{case.name}")]


def main() -> None:
    import conftest  # noqa: F401  torchvision beside a CPU-only torch

    torch.set_num_threads(1)
    found: list[Result] = []
    for case in cases(sys.argv[1] if len(sys.argv) > 1 else ""):
        with tempfile.TemporaryDirectory() as folder:
            found += results(case, Path(folder))
        for result in found[-2:]:
            print(f"{result.outcome:8} {result.form:6} {case.group} {case.name}: {result.detail}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
