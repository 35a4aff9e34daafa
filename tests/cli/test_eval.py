"""`vitrail eval`: table with confidence intervals, JSON, output folder, errors."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from cli.conftest import Command
from images import write_noise_folder
from PIL import Image
from training.processes import Processes

from vitrail.cli import console, main
from vitrail.runtime.terminal import SafeConsole


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images of two of the model's five classes."""
    return write_noise_folder(tmp_path_factory.mktemp("album") / "album", {"cat": 6, "dog": 4})


@pytest.fixture
def run_eval(vitrail: Command, weights: Path):
    """Run `vitrail eval` on this data; it must succeed: `run_eval(data, ...)`."""

    def run(data: object, *arguments: object):
        result = vitrail("eval", "-m", weights, "--data", data, "--device", "cpu", *arguments)
        assert result.status == 0, result.err
        return result

    return run


def test_every_metric_has_its_interval_beside_it(run_eval, album: Path):
    lines = run_eval(album).out.splitlines()
    assert lines[0].endswith("small on album")
    assert lines[1] == "10 images, 2 of 5 classes, 32 px"
    rows = {line.split("  ")[0]: line.split() for line in lines if line.startswith(("top-1", "loss", "calibration"))}
    assert set(rows) == {"top-1", "loss", "calibration error"}
    for cells in rows.values():
        number, low, high = (float(w) for w in [w for w in cells if w.replace(".", "").isdigit()][:3])
        assert low <= number <= high
    assert any(line.startswith("images/s") for line in lines)


def test_worst_classes_are_listed(run_eval, album: Path):
    out = run_eval(album, "--worst", 1).out
    table = out[out.index("worst classes") :].splitlines()
    assert len(table) == 2
    assert "worst classes" not in run_eval(album, "--worst", 0).out


def test_no_number_is_truncated_in_a_narrow_window(run_eval, album: Path, monkeypatch: pytest.MonkeyPatch):
    wide_lines = run_eval(album).out.splitlines()
    monkeypatch.setattr(console, "out", SafeConsole(width=40))
    lines = run_eval(album).out.splitlines()
    assert max(map(len, lines)) <= 40
    for name in ("top-1 ", "loss ", "cat "):
        [number] = [line.removeprefix(name).split()[0] for line in wide_lines if line.startswith(name)]
        assert any(line.startswith(name) and number in line.split() for line in lines), name


def test_json_agrees_with_the_table(run_eval, album: Path):
    result = run_eval(album, "--json")
    values = json.loads(result.out)
    assert values["model"].endswith("small")
    assert (values["data"], values["matched_by"], values["flip"]) == ("album", "name", False)
    [size] = values["sizes"]
    assert size["image_size"] == [32, 32]
    assert size["count"] == 10
    assert size["top1"]["interval_method"] == "wilson"  # ten images: fewer than ten correct or incorrect
    assert len(size["calibration"]["bins"]) == 15
    assert {row["name"] for row in size["per_class"]} == {"cat", "dog"}
    shown = f"{100 * size['top1']['value']:.1f} %"
    assert shown in run_eval(album).out


def test_multiple_sizes_are_a_table_of_at_most_80_columns(run_eval, album: Path):
    out = run_eval(album, "--image-size", "32,48,24x40", "--flip").out
    assert max(map(len, out.splitlines())) <= 80
    assert "averaged with mirror images" in out
    assert "vs 32" in out
    for name in ("32 ", "48 ", "24x40 "):
        assert sum(line.startswith(name) for line in out.splitlines()) == 1


def test_output_folder_has_figures_json_and_csv(run_eval, album: Path, tmp_path: Path):
    run_eval(album, "--out", tmp_path / "out", "--format", "svg")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"reliability.svg", "confusion.svg", "classes.svg", "eval.json", "per_class.csv", "predictions.csv"}
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["data"] == "album"


def test_json_is_the_only_standard_output(run_eval, album: Path, tmp_path: Path):
    result = run_eval(album, "--json", "--out", tmp_path / "out")
    json.loads(result.out)


def test_mismatched_classes_are_an_error(vitrail: Command, weights: Path, tmp_path: Path):
    folder = write_noise_folder(tmp_path / "photos", {"rose": 2, "tulip": 2, "cat": 1})
    result = vitrail("eval", "-m", weights, "--data", folder)
    assert (result.status, len(result.errors)) == (1, 1)
    assert "has 1 of the 3 classes of photos (missing: rose, tulip); it has 5 outputs, such as cat" in result.errors[0]


def test_model_without_classes_is_an_error(vitrail: Command, headless: Path, album: Path):
    result = vitrail("eval", "-m", headless, "--data", album)
    assert (result.status, len(result.errors)) == (1, 1)
    assert "has no classes, only features" in result.errors[0]


def test_empty_folder_and_unlabeled_images_are_errors(vitrail: Command, weights: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    result = vitrail("eval", "-m", weights, "--data", tmp_path / "empty")
    assert (result.status, len(result.errors)) == (1, 1)
    Image.new("RGB", (8, 8)).save(tmp_path / "empty" / "a.png")
    result = vitrail("eval", "-m", weights, "--data", tmp_path / "empty")
    assert (result.status, len(result.errors)) == (1, 1)
    assert "no class folders" in result.errors[0]


def test_unreadable_images_are_an_error_unless_skipped(vitrail: Command, weights: Path, tmp_path: Path):
    folder = write_noise_folder(tmp_path / "photos", {"cat": 3, "dog": 2})
    (folder / "cat" / "1.png").write_bytes(b"broken")
    result = vitrail("eval", "-m", weights, "--data", folder)
    assert result.status == 1
    assert "1 of 5 images of photos cannot be read" in result.errors[0]
    assert "--skip-bad" in result.errors[0]
    result = vitrail("eval", "-m", weights, "--data", folder, "--skip-bad")
    assert result.status == 0
    assert "1 unreadable image skipped" in result.out


def test_data_of_one_class_is_evaluated_with_a_note(vitrail: Command, weights: Path, tmp_path: Path):
    result = vitrail("eval", "-m", weights, "--data", write_noise_folder(tmp_path / "photos", {"cat": 3}))
    assert result.status == 0
    assert any("one class, 'cat'" in note for note in result.notes)


def test_missing_data_option_is_named(vitrail: Command, weights: Path):
    result = vitrail("eval", "-m", weights)
    assert result.status == 2
    assert "needs --data" in result.errors[0]


def test_bundled_model_is_the_default(vitrail: Command, album: Path):
    result = vitrail("eval", "--data", album, "--device", "cpu")
    assert result.status == 0, result.err
    assert result.out.startswith("vitrail/")
    assert "10 images, 2 of 10 classes" in result.out


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(3) as started:
        yield started


def run_command(*arguments: str) -> tuple[int, str]:
    """Run the command in one of several processes; return its status and standard output."""
    with redirect_stdout(io.StringIO()) as out:
        return main(list(arguments)), out.getvalue()


def test_only_the_first_of_three_processes_prints(processes: Processes, run_eval, weights: Path, album: Path):
    expected = json.loads(run_eval(album, "--json").out)
    arguments = ("eval", "-m", str(weights), "--data", str(album), "--device", "cpu", "--json")
    (status, out), *others = processes.run(run_command, *arguments)
    assert status == 0
    assert others == [(0, ""), (0, "")]
    values = json.loads(out)
    assert values["sizes"][0]["top1"] == expected["sizes"][0]["top1"]
    assert values["sizes"][0]["loss"]["value"] == pytest.approx(expected["sizes"][0]["loss"]["value"], rel=1e-6)
