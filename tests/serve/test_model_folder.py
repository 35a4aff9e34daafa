"""The folder of --models: which versions are in it, and in which order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitrail.errors import ConfigError
from vitrail.serve.model_folder import find_models, parse_settings
from vitrail.serve.model_registry import version_key


def write(path: Path, text: str = "weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found_in(folder: Path) -> dict[str, dict[str, str]]:
    """Model -> version -> path below the folder."""
    return {
        name: {version: str(one.path.relative_to(folder)) for version, one in model.versions.items()}
        for name, model in find_models(folder).items()
    }


def test_versions_are_folders_files_and_exported_files(tmp_path: Path) -> None:
    write(tmp_path / "photos/1/config.json")
    write(tmp_path / "photos/2.safetensors")
    write(tmp_path / "photos/3.onnx")
    write(tmp_path / "photos/3.onnx.data")
    write(tmp_path / "photos/4/model.xml")
    write(tmp_path / "photos/4/model.bin")
    write(tmp_path / "photos/5/model.safetensors")
    expected = {"1": "photos/1", "2": "photos/2.safetensors", "3": "photos/3.onnx", "4": "photos/4/model.xml"}
    assert found_in(tmp_path) == {"photos": expected | {"5": "photos/5/model.safetensors"}}


def test_a_model_directly_in_the_folder_is_its_version_1(tmp_path: Path) -> None:
    write(tmp_path / "file.npz")
    write(tmp_path / "folder/config.json")
    write(tmp_path / "exported.xml")
    write(tmp_path / "exported.bin")
    assert found_in(tmp_path) == {
        "file": {"1": "file.npz"},
        "folder": {"1": "folder"},
        "exported": {"1": "exported.xml"},
    }


def test_other_files_hidden_names_and_names_unfit_for_urls_are_ignored(tmp_path: Path) -> None:
    for name in ("README.md", "photos/notes.txt", "photos/.2/config.json", ".old/1/config.json", "a b/1/config.json"):
        write(tmp_path / name)
    write(tmp_path / "photos/canary/cat/1.jpg")
    write(tmp_path / "photos/empty/.keep")
    assert find_models(tmp_path) == {}
    write(tmp_path / "photos/1/config.json")
    assert found_in(tmp_path) == {"photos": {"1": "photos/1"}}
    assert find_models(tmp_path)["photos"].canary == tmp_path / "photos/canary"


def test_the_signature_changes_with_every_file_also_a_hidden_one(tmp_path: Path) -> None:
    write(tmp_path / "photos/1/config.json")
    signatures = []
    for change in ("config.json", "model.safetensors", ".model.safetensors.part"):
        signatures.append(find_models(tmp_path)["photos"].versions["1"].signature)
        write(tmp_path / "photos/1" / change, "other text")
    signatures.append(find_models(tmp_path)["photos"].versions["1"].signature)
    os.utime(tmp_path / "photos/1/config.json", ns=(0, 0))
    signatures.append(find_models(tmp_path)["photos"].versions["1"].signature)
    assert len(set(signatures)) == 5


def test_servers_that_see_the_folder_under_other_paths_agree_on_the_signature(tmp_path: Path) -> None:
    write(tmp_path / "models/photos/1/config.json")
    (tmp_path / "mounted").symlink_to(tmp_path / "models")
    one, other = (find_models(tmp_path / name)["photos"].versions["1"] for name in ("models", "mounted"))
    assert one.path != other.path
    assert one.signature == other.signature


def test_of_a_run_only_its_model_counts(tmp_path: Path) -> None:
    run = tmp_path / "photos/1"
    write(run / "config.json")
    write(run / "metrics.jsonl")
    (run / "checkpoint").mkdir()
    assert find_models(tmp_path) == {}  # not finished
    write(run / "model/config.json")
    before = find_models(tmp_path)["photos"].versions["1"].signature
    write(run / "checkpoint/state.pt")
    assert find_models(tmp_path)["photos"].versions["1"].signature == before


def test_versions_are_sorted_with_numbers_as_numbers() -> None:
    shuffled = ["10", "9", "v1.10", "v1.9", "2026-01-02", "2025-12-31", "1"]
    assert sorted(shuffled, key=version_key) == ["v1.9", "v1.10", "1", "9", "10", "2025-12-31", "2026-01-02"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected an object"),
        ({"class": "any"}, "unknown setting 'class'"),
        ({"classes": "all"}, "classes='all': expected append or any"),
        ({"canary_drop": "1"}, "canary_drop='1': expected percentage points"),
        ({"canary_drop": 101}, "canary_drop=101"),
    ],
)
def test_the_error_names_the_wrong_setting(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse_settings(values)


def test_settings_that_cannot_be_read_are_a_problem_of_the_model(tmp_path: Path) -> None:
    write(tmp_path / "photos/1/config.json")
    write(tmp_path / "photos/serving.json", "{")
    assert find_models(tmp_path)["photos"].problem == "serving.json is not readable as JSON."
