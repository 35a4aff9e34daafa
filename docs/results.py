"""Copy the pages of finished experiments into the documentation, and list their verdicts.

    python docs/results.py runs/reproduce/*

Writes docs/results/NAME.md with its figures, docs/results/runs/NAME-SCALE.json with every run, docs/results/README.md
with one figure for each experiment, and src/vitrail/reproduction/recorded.json, which `vitrail reproduce --list` reads.
Experiments that are already in docs/results and not among the folders stay as they are; of two scales of one
experiment, the larger becomes the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from vitrail.report.formatting import format_duration
from vitrail.reproduction.arm import SCALES
from vitrail.reproduction.experiments import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "results"
RECORDED = ROOT / "src" / "vitrail" / "reproduction" / "recorded.json"
KEPT = ("scale", "data", "devices", "seconds", "finished", "total", "date", "command", "summary", "verdicts", "figures")
"""Fields of results.json that are recorded."""
MARKS = {"holds": "✓", "does not hold": "✗", "undecided": "?"}

INTRODUCTION = """# Results

Each page tests one finding of the Vision Transformer literature with this package, by one command that anyone can
repeat: `vitrail reproduce NAME` ([how it works](../reproduce.md)). The datasets are small (digits, MNIST, CIFAR-10),
and so are the networks: a claim that does not hold here may well hold for a ViT-B/16 on ImageNet-21k, and the pages
say where that is likely. Negative findings are kept. A claim *holds* if the 95 % interval of the difference over seeds
lies on its side, *does not hold* if the interval lies on the other side, and is *undecided* otherwise. Times are those
of all runs together, of which several run at the same time; some were recorded on a busy machine and are too long.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of `vitrail reproduce`")
    recorded: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for folder in parser.parse_args().folders:
        found = json.loads((folder / "results.json").read_text())
        recorded.setdefault(found["experiment"], {})[found["scale"]] = {name: found[name] for name in KEPT}
        (PAGES / "runs").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "results.json", PAGES / "runs" / f"{found['experiment']}-{found['scale']}.json")
        if found["scale"] == largest_scale(recorded[found["experiment"]]):
            copy_page(folder, found["experiment"], found["figures"])
    recorded = {name: recorded[name] for name in EXPERIMENTS if name in recorded}
    RECORDED.write_text(json.dumps(recorded, indent=2, ensure_ascii=False) + "\n")
    (PAGES / "README.md").write_text(overview(recorded))


def largest_scale(scales: dict[str, Any]) -> str:
    return max(scales, key=lambda scale: SCALES.index(scale))  # type: ignore[arg-type]


def copy_page(folder: Path, name: str, figures: list[str]) -> None:
    text = (folder / "page.md").read_text()
    (PAGES / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures:
        text = text.replace(f"(figures/{figure}.png)", f"(figures/{name}-{figure}.png)")
        shutil.copy(folder / "figures" / f"{figure}.png", PAGES / "figures" / f"{name}-{figure}.png")
    (PAGES / f"{name}.md").write_text(text)


def overview(recorded: dict[str, dict[str, Any]]) -> str:
    rows = ["| experiment | verdicts | scale, data | time |", "| --- | --- | --- | --- |"]
    sections = []
    for name, scales in recorded.items():
        experiment, found = EXPERIMENTS[name], scales[largest_scale(scales)]
        verdicts = "<br>".join(f"{MARKS[v['outcome']]} {v['claim']}" for v in found["verdicts"])
        time = f"{format_duration(found['seconds'])} on {' and '.join(found['devices'])}"
        rows.append(f"| [{experiment.title}]({name}.md) | {verdicts} | {found['scale']}, {found['data']} | {time} |")
        lines = [f"## {experiment.title}", "", f"> {experiment.claim} ({experiment.source})", ""]
        lines += [f"- **{v['outcome']}**: {v['claim']} {v['reason']}" for v in found["verdicts"]]
        if found["figures"]:
            lines += ["", f"![{experiment.title}](figures/{name}-{found['figures'][0]}.png)"]
        command = f"`vitrail reproduce {name} --scale {found['scale']}`"
        lines += ["", f"[All numbers]({name}.md){_runs(name, found['scale'])}: {command}"]
        sections.append("\n".join(lines))
    return "\n".join([INTRODUCTION, *rows, ""]) + "\n" + "\n\n".join(sections) + "\n"


def _runs(name: str, scale: str) -> str:
    """A link to the runs of an experiment; those of the first recordings were not kept."""
    path = PAGES / "runs" / f"{name}-{scale}.json"
    return f", [every run](runs/{path.name})" if path.exists() else ""


if __name__ == "__main__":
    main()
