"""Recognition of checkpoints, for every ViT-like model of timm and transformers.

Each model is built small with random weights and saved twice: as the folder that its library writes, and as a bare
weights file. Reading it has one of five outcomes:

    exact     the logits match the library's, to float32 rounding
    option    refused with an error that names an option; with that option the logits match the library's
    refused   refused with an error that names the model
    unclear   refused with an error that does not name the model, or names an option that gives another model
    misread   read as a network with other logits

`python tests/recognition_table.py` prints the table. `tests/weights/test_recognition.py` requires that the last two
do not occur.
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
Outcome = Literal["exact", "option", "refused", "unclear", "misread"]
TOLERANCE = 3e-6
"""Tolerance of the relative difference, in float64. Reading CLIP with ViT's epsilon exceeds it; reading 1e-12 as 1e-6
does not, so that bare files of ViT-MSN and ViT are not distinguished."""
OPTION = re.compile(r"\b(activation|num_heads|family|position|image_size|window_size|pretrained_window_sizes|pool)=")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A model of another library with random weights."""

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    image_size: tuple[int, int]
    """Height and width of its input."""
    save: Callable[[Path], object]
    """Writes a folder with the library's own function."""
    options: Mapping[str, Any] | None
    """The right value of each option that reading may require; None if vitrail does not support the network."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture of another library."""

    group: str
    """The module that defines it: a row of the table."""
    name: str
    name_pattern: str
    """Pattern of the model's name, which the error of a refusal must match."""
    make: Callable[[], Sample] = field(compare=False)


@dataclass(frozen=True)
class Result:
    case: Case
    form: Form
    outcome: Outcome
    detail: str


def evaluate_case(case: Case, folder: Path) -> list[Result]:
    """The results of one case, as a folder and as a bare file."""
    sample = case.make()
    folder.mkdir(parents=True, exist_ok=True)
    sample.save(folder / "saved")
    (folder / "weights.safetensors").hardlink_to(folder / "saved" / "model.safetensors")
    if sample.options is not None:
        sample.model.double()
    paths: dict[Form, Path] = {"folder": folder / "saved", "bare": folder / "weights.safetensors"}
    return [Result(case, form, *classify(case, form, sample, path)) for form, path in paths.items()]


def classify(case: Case, form: Form, sample: Sample, path: Path) -> tuple[Outcome, str]:
    try:
        net = checkpoint.read(path, dtype=torch.float64)[0]
    except VitrailError as error:
        return classify_refusal(case, form, sample, path, str(error))
    if sample.options is None:
        return "misread", "an unsupported network"
    difference = logit_difference(net, sample)
    return ("misread" if difference > TOLERANCE else "exact"), f"differs by {difference:.1e}"


def classify_refusal(case: Case, form: Form, sample: Sample, path: Path, message: str) -> tuple[Outcome, str]:
    """The outcome of a refusal: the error must name the model, or an option with which it is read exactly."""
    message = message.replace(str(path), "PATH")
    named_options = set(OPTION.findall(message))
    by_name = bool(re.search(case.name_pattern, message)) and not (
        named_options - {"family"} if form == "bare" else named_options
    )
    if sample.options is None or (by_name and not named_options):
        return ("refused" if by_name else "unclear"), message
    if not named_options or not named_options <= sample.options.keys():
        return "unclear", message
    overrides = {name: sample.options[name] for name in named_options}
    family = overrides.pop("family", None)
    try:
        net = checkpoint.read(path, family=family, overrides=overrides, dtype=torch.float64)[0]
    except VitrailError as error:
        if not OPTION.findall(str(error)) or set(OPTION.findall(str(error))) <= named_options:
            return "unclear", f"refused again with {overrides}, family={family}: {error}"
        return classify_refusal(case, form, sample, path, f"{message} {error}")  # a second option is required
    difference = logit_difference(net, sample)
    return (
        "misread" if difference > TOLERANCE else "option"
    ), f"differs by {difference:.1e} with {sorted(named_options)}: {message}"


@torch.no_grad()
def logit_difference(net: nn.Module, sample: Sample) -> float:
    """Relative difference of the logits; infinity if the shapes differ."""
    images = torch.randn(1, 3, *sample.image_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        ours, theirs = net(images), sample.forward(images)
    except VitrailError:
        return float("inf")
    return relative(ours, theirs) if ours.shape == theirs.shape else float("inf")


def format_table(results: Iterable[Result]) -> str:
    """The table in Markdown, with one row for each module and form."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        counts.setdefault((result.case.group, result.form), Counter())[result.outcome] += 1
    total = sum(counts.values(), Counter[str]())
    rows = [*counts.items(), (("all", ""), total)]
    columns = ("read exactly", "exact, with option", "refused by name", "refused unclearly", "misread")
    lines = [f"| {'module':32} | as     | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
    lines += [
        f"| {group:32} | {form:6} | {count['exact']:12} | {count['option']:18} | {count['refused']:15} | "
        f"{count['unclear']:17} | {count['misread']:7} |"
        for (group, form), count in rows
    ]
    return "\n".join(lines)


def cases(pattern: str = "") -> list[Case]:
    import recognition_timm
    import recognition_transformers

    all_cases = [*recognition_timm.cases(), *recognition_transformers.cases()]
    return [case for case in all_cases if re.search(pattern, f"{case.group}/{case.name}")]


def main() -> None:
    import conftest  # noqa: F401  makes torchvision importable with a CPU-only torch

    torch.set_num_threads(1)
    results: list[Result] = []
    for case in cases(sys.argv[1] if len(sys.argv) > 1 else ""):
        with tempfile.TemporaryDirectory() as folder:
            results += evaluate_case(case, Path(folder))
        for result in results[-2:]:
            print(f"{result.outcome:8} {result.form:6} {case.group} {case.name}: {result.detail}", flush=True)
    print(format_table(results))


if __name__ == "__main__":
    main()
