"""A package outside this repository adds a data source, an objective, a callback, a tracker and a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from training.commands import CommandResult
from training.small_runs import digits_config, identical_weights

from vitrail import plugins
from vitrail.config.data import DataConfig
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, NotFoundError, PluginError
from vitrail.models.model_names import config_from_name
from vitrail.weights.shipped import SHIPPED

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "own-vision"
version = "1.0"

[project.entry-points."vitrail.sources"]
blobs = "own_vision:open_blobs"
broken-source = "own_vision:broken"

[project.entry-points."vitrail.objectives"]
squared = "own_vision:squared_error"
missing = "own_vision:no_such_name"

[project.entry-points."vitrail.formats"]
shouted = "own_vision:SHOUTED"

[project.entry-points."vitrail.callbacks"]
diary = "own_vision:Diary"

[project.entry-points."vitrail.trackers"]
text-file = "own_vision:TextFile"

[project.entry-points."vitrail.models"]
own-tiny = "own_vision:tiny"
"""

CODE = '''
"""A package with vitrail plugins."""

import json

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from vitrail import ViTConfig
from vitrail.models import build
from vitrail.weights.format import Format
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import RenameTable, Rule
from vitrail.weights.writers import write_safetensors


class Blobs(Dataset):
    classes = ["dark", "bright"]

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.targets = (np.arange(count) % 2).tolist()
        self.images = [rng.integers(0, 120, (8, 8, 1), dtype=np.uint8) + 120 * np.uint8(t) for t in self.targets]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def open_blobs(location):
    count = int(location or 64)
    return Blobs(count, 0), Blobs(16, 1)


def broken(location):
    raise KeyError("index")


def squared_error(net, images, targets, weights, sample_seeds):
    logits = net(images, sample_seeds)
    expected = targets if targets.ndim > 1 else F.one_hot(targets, logits.shape[-1])  # b K with mixup
    return {"loss": ((logits - expected) ** 2).sum(-1), "correct": (logits.argmax(-1) == expected.argmax(-1)).float()}


class Diary:
    def on_log(self, run, metrics):
        with open(run.folder / "diary.txt", "a") as file:
            print(run.step, sorted(metrics)[0], file=file)

    def on_end(self, run, status):
        with open(run.folder / "diary.txt", "a") as file:
            print(status, file=file)


class TextFile:
    def start(self, config, folder, step):
        self.file = open(folder / "tracked.jsonl", "a")
        self.log(step, {"objective": config["objective"]})

    def log(self, step, metrics):
        print(json.dumps({"step": step, **metrics}), file=self.file)

    def finish(self, status):
        print(json.dumps({"status": status}), file=self.file)
        self.file.close()


def detect_shouted(archive):
    return "" if "PATCH.WEIGHT" in archive.tensors else None


def shouted_info(archive):
    return ModelInfo.from_dict(json.loads(archive.metadata["info"]))


def shouted_table(config):
    names = build(config).state_dict()
    return RenameTable("shouted", [Rule(name.upper(), name) for name in names])


def write_shouted(path, tensors, info, overwrite):
    write_safetensors(path, tensors, {"info": json.dumps(info.to_dict())}, overwrite=overwrite)


SHOUTED = Format("shouted", detect_shouted, shouted_info, shouted_table, write_shouted)


def tiny():
    return ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=1, num_heads=2, mlp_dim=32)
'''

SETTINGS = [
    "batch_size=16", "duration=6 steps", "log_every=3 steps", "evaluate_every=3 steps", "compare=()", "device=cpu",
    "schedule.warmup=0 steps", "data.workers=1", "data.resident=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pip has installed the package."""
    project, target = tmp_path_factory.mktemp("own-vision"), tmp_path_factory.mktemp("target")
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "own_vision.py").write_text(CODE)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(project)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def run_python(target: Path, folder: Path, *arguments: str) -> CommandResult:
    path = os.pathsep.join([str(target), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment)
    return CommandResult(done.returncode, done.stdout, done.stderr)


def check_run(folder: Path) -> None:
    """The source, the objective, the callback and the tracker of the package were used."""
    config = json.loads((folder / "config.json").read_text())
    assert (config["data"]["source"], config["objective"]) == ("blobs:48", "squared")
    assert (folder / "diary.txt").read_text().split() == ["3", "accuracy", "6", "accuracy", "finished"]
    lines = [json.loads(line) for line in (folder / "tracked.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 0, "objective": "squared"}
    assert [line["step"] for line in lines if "training/loss" in line] == [3, 6]
    assert [line["step"] for line in lines if "evaluation/top1" in line] == [3, 6]
    assert lines[-1] == {"status": "finished"}
    labels = json.loads((folder / "model" / "config.json").read_text())["labels"]
    assert labels == ["dark", "bright"]


def test_the_command_line_uses_a_package_by_name(target: Path, tmp_path: Path):
    settings = [*SETTINGS, "objective=squared", "callbacks=diary", "trackers=text-file", "data.source=blobs:48"]
    options = ["--model", "own-tiny", "--out", "run", "--no-report"]
    result = run_python(target, tmp_path, "-m", "vitrail", "train", "digits", *settings, *options)
    assert result.status == 0, result.err
    check_run(tmp_path / "run")
    resumed = run_python(
        target, tmp_path, "-m", "vitrail", "train", "--resume", "--out", "run", "--no-report", "duration=9 steps"
    )
    assert resumed.status == 0, resumed.err
    assert (tmp_path / "run" / "diary.txt").read_text().split()[-3:] == ["9", "accuracy", "finished"]


def test_python_uses_the_same_package_by_name_and_as_objects(target: Path, tmp_path: Path):
    script = f"""
import vitrail, own_vision
options = dict(overrides={SETTINGS!r}, model="own-tiny", report=False)
vitrail.train("digits", data="blobs:48", objective="squared", callbacks=["diary"], trackers=["text-file"], out="names",
              **options)
run = vitrail.train("digits", data=own_vision.open_blobs("48"), objective=own_vision.squared_error,
                    callbacks=[own_vision.Diary], trackers=[own_vision.TextFile()], out="objects", **options)
print(run.config.objective, *run.config.callbacks, *run.config.trackers, run.config.data.source)
"""
    result = run_python(target, tmp_path, "-c", script)
    assert result.status == 0, result.err
    assert result.out.split() == [
        "own_vision:squared_error", "own_vision:Diary", "memory:TextFile", "memory:Blobs"
    ]  # fmt: skip
    check_run(tmp_path / "names")
    names, objects = (tmp_path / name / "diary.txt" for name in ("names", "objects"))
    assert names.read_text() == objects.read_text()
    assert identical_weights(tmp_path / "names", tmp_path / "objects")
    # What can be imported need not be passed again; the dataset and the tracker, which cannot, are asked for.
    resumed = run_python(target, tmp_path, "-m", "vitrail", "train", "--resume", "--out", "objects")
    assert resumed.status == 1
    assert "was an object in memory, which config.json cannot store; pass it again" in resumed.err
    assert "Traceback" not in resumed.err


def test_a_checkpoint_format_of_a_package_is_written_and_read(target: Path, tmp_path: Path):
    written = run_python(
        target, tmp_path, "-m", "vitrail", "convert", "vitrail/cifar10", "x.safetensors", "--to", "shouted"
    )
    assert written.status == 0, written.err
    back = run_python(target, tmp_path, "-m", "vitrail", "convert", "x.safetensors", "back", "--to", "vitrail")
    assert back.status == 0, back.err
    weights = load_file(tmp_path / "back" / "model.safetensors")
    original = load_file(SHIPPED["vitrail/cifar10"].path / "model.safetensors")
    assert all(torch.equal(weights[name].float(), original[name].float()) for name in original)
    without = run_python(tmp_path, tmp_path, "-m", "vitrail", "convert", "x.safetensors", "z")
    assert "match no known format" in without.err
    unknown = run_python(target, tmp_path, "-m", "vitrail", "convert", "vitrail/cifar10", "y", "--to", "shoutd")
    assert "did you mean 'shouted'" in unknown.err


def test_settings_list_what_is_installed(target: Path, tmp_path: Path):
    out = run_python(target, tmp_path, "-m", "vitrail", "train", "digits", "--settings").out
    assert "  objective: missing, squared" in out
    assert "  data.source: blobs, broken-source" in out
    assert "  trackers: text-file" in out
    assert "objective=NAME" in run_python(target, tmp_path, "-m", "vitrail", "train", "--help").out


@pytest.fixture
def installed(target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package on this process's path."""
    monkeypatch.syspath_prepend(str(target))
    plugins.find_entry_points.cache_clear()  # type: ignore[attr-defined]
    yield
    plugins.find_entry_points.cache_clear()  # type: ignore[attr-defined]
    sys.modules.pop("own_vision", None)


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_says_what_is_available():
    with pytest.raises(NotFoundError, match=r"unknown objective 'focal'; available: classify, missing, squared"):
        plugins.load_plugin("objectives", "focal", ["classify"])
    with pytest.raises(NotFoundError, match=r"unknown objective 'sqared'; did you mean 'squared'\?"):
        plugins.load_plugin("objectives", "sqared")
    with pytest.raises(NotFoundError, match="unknown kind of data source 'blobz' in 'blobz:1'; did you mean 'blobs'"):
        open_data(DataConfig(source="blobz:1"))
    with pytest.raises(NotFoundError, match=r"unknown model 'own-tine'; did you mean 'own-tiny'\?"):
        config_from_name("own-tine")


@pytest.mark.usefixtures("installed")
def test_a_plugin_that_fails_is_named_with_its_package():
    with pytest.raises(
        PluginError, match=r"the objective 'missing' of the package own-vision \(entry point own_vision:"
    ):
        plugins.load_plugin("objectives", "missing")
    with pytest.raises(PluginError, match=r"the data source 'broken-source' of the package own-vision .*KeyError"):
        open_data(DataConfig(source="broken-source:x"))


@pytest.mark.usefixtures("installed")
def test_a_source_and_a_model_of_a_package_work_like_any_other():
    splits = open_data(DataConfig(source="blobs"))
    assert (len(splits.train), len(splits.validation), splits.train.labels) == (64, 16, ("dark", "bright"))
    assert config_from_name("own-tiny", num_classes=3).num_classes == 3


def test_two_packages_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch):
    def fake(value: str, package: str) -> Any:
        distribution = type("Distribution", (), {"name": package})()
        return type("Point", (), {"name": "x", "value": value, "dist": distribution})()

    monkeypatch.setattr(plugins, "find_entry_points", lambda group: {"x": [fake("a:b", "one"), fake("c:d", "two")]})
    with pytest.raises(PluginError, match="the packages one and two both add the tracker 'x'; uninstall one of them"):
        plugins.load_plugin("trackers", "x")


def test_references_are_of_what_can_be_imported():
    assert plugins.reference_to(json.dumps) == "json:dumps"
    assert plugins.import_reference("json:JSONDecoder.decode") is json.JSONDecoder.decode
    assert plugins.reference_to(json.JSONDecoder()) == "memory:JSONDecoder"
    assert plugins.reference_to(lambda: 0) == "memory:<lambda>"
    for text in ("json:no_such_name", "no_such_module:x"):
        with pytest.raises(PluginError, match=r"cannot be imported .*; expected package.module:name"):
            plugins.import_reference(text)


def test_without_plugins_an_unknown_callback_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugins, "find_entry_points", lambda group: {})
    with pytest.raises(ConfigError, match="no installed package adds one"):
        digits_config(2, callbacks="diary")
