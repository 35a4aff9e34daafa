"""`vitrail vtab` on tasks made of scikit-learn's digits."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits

import vitrail as package
from vitrail.cli.vtab import format_vtab
from vitrail.evaluation.intervals import proportion
from vitrail.evaluation.vtab_tasks import TASKS, group_means
from vitrail.vtab import TaskScore, VtabResult


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks made of digits: the digit, with file lists, and small or large, with class folders."""
    root = tmp_path_factory.mktemp("vtab")
    digits = load_digits()
    lists: dict[str, list[str]] = {"train800": [], "val200": [], "test": []}
    for i, (pixels, number) in enumerate(zip(digits.images[:180], digits.target[:180], strict=True)):
        split = "test" if i % 3 == 0 else "val200" if i % 3 == 1 and i % 2 else "train800"
        image = Image.fromarray((pixels * 15).astype(np.uint8)).resize((32, 32)).convert("RGB")
        path = root / "svhn" / "images" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        lists[split].append(f"images/{i}.png {number}")
        size = "large" if number >= 5 else "small"
        path = root / "eurosat" / ("test" if split == "test" else "train") / size / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    for name, lines in lists.items():
        (root / "svhn" / f"{name}.txt").write_text("\n".join(lines))
    return root


def test_linear_probe_scores_the_available_tasks(vitrail, weights, tasks):
    result = vitrail("vtab", "-m", weights, "--root", tasks, "--method", "linear", "--json", "--device", "cpu")
    report = json.loads(result.out)
    scores = {score["task"]: score for score in report["tasks"]}
    assert list(scores) == ["svhn", "eurosat"]
    assert scores["svhn"]["count"] == scores["eurosat"]["count"] == 60
    assert scores["svhn"]["value"] > 0.4  # chance is 0.1; the network is untrained
    assert scores["eurosat"]["value"] > 0.6
    assert scores["svhn"]["low"] < scores["svhn"]["value"] < scores["svhn"]["high"]
    assert set(scores["svhn"]["chosen"]) == {"C"}
    assert len(report["missing"]) == 17
    assert report["means"] == {}


def test_missing_tasks_and_their_layout_are_printed(vitrail, weights, tasks):
    result = vitrail("vtab", "-m", weights, "--root", tasks, "--method", "linear", "--tasks", "SVHN", "--device", "cpu")
    lines = result.out.splitlines()
    assert lines[1].split()[:2] == ["Natural", "SVHN"]
    assert "17 of 19 tasks are missing, so there is no VTAB score: caltech101, cifar100" in result.out
    assert "train800.txt, val200.txt and test.txt" in result.out


@pytest.mark.slow
def test_fine_tuning_follows_the_protocol(vitrail, weights, tasks, tmp_path):
    """The learning rate is chosen on val200, then all 1,000 images are used; a second call reuses the runs."""
    options = ("--steps", "8", "--lr", "0.03,0.1", "--image-size", "32", "--device", "cpu", "--out", tmp_path, "--json")
    command = ("vtab", "-m", weights, "--root", tasks, "--tasks", "svhn", *options)
    result = vitrail(*command)
    assert result.status == 0, result.err
    [score] = json.loads(result.out)["tasks"]
    names = {path.name for path in (tmp_path / "svhn").iterdir()}
    best = f"1000-lr-{score['chosen']['lr']:g}"
    assert names == {"800.parquet", "1000.parquet", "800-lr-0.03", "800-lr-0.1", best}
    rows = [line.split() for line in (tasks / "svhn" / "test.txt").read_text().splitlines()]
    tuned = package.load(tmp_path / "svhn" / best)
    predictions = tuned.predict([tasks / "svhn" / path for path, _ in rows], top=1)
    assert score["value"] == np.mean([p[0].label == number for p, (_, number) in zip(predictions, rows, strict=True)])
    assert json.loads(vitrail(*command).out)["tasks"] == [score]


def test_means_are_printed_with_their_intervals():
    scores = tuple(TaskScore(task, proportion(300 + i, 500), 500, {"C": 1.0}) for i, task in enumerate(TASKS.values()))
    result = VtabResult("linear", scores, (), group_means({s.task.name: (s.accuracy.value, s.count) for s in scores}))
    console = Console(width=100, file=io.StringIO())
    for part in format_vtab(result, Path("vtab-1k")):
        console.print(part)
    [line] = [line for line in console.file.getvalue().splitlines() if line.startswith("VTAB score")]
    mean = result.means["VTAB"]
    assert f"61.80 %   {100 * mean.low:.1f} to {100 * mean.high:.1f}" in line
    assert result.to_dict()["means"]["VTAB"]["low"] == mean.low
