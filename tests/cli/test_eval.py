"""`vitrail eval`: numbers with intervals for people, JSON for machines, a folder with everything, clear refusals."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import Command
from PIL import Image
from train.processes import Processes

from vitrail.cli import console, main
from vitrail.runtime.terminal import SafeConsole


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images of two of the model's five classes."""
    return images(tmp_path_factory.mktemp("album") / "album", {"cat": 6, "dog": 4})


def images(folder: Path, counts: dict[str, int]) -> Path:
    rng = np.random.default_rng(5)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((40, 36)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def measured(vitrail: Command, weights: Path):
    """`measured(data, ...)`, which must succeed."""

    def run(data: object, *arguments: object):
        result = vitrail("eval", "-m", weights, "--data", data, "--device", "cpu", *arguments)
        assert result.status == 0, result.err
        return result

    return run


def test_every_number_has_its_interval_beside_it(measured, album: Path):
    lines = measured(album).out.splitlines()
    assert lines[0].endswith("small on album")
    assert lines[1] == "10 images, 2 of 5 classes, 32 px"
    found = {line.split("  ")[0]: line.split() for line in lines if line.startswith(("top-1", "loss", "calibration"))}
    assert set(found) == {"top-1", "loss", "calibration error"}
    for words in found.values():
        number, low, high = (float(w) for w in [w for w in words if w.replace(".", "").isdigit()][:3])
        assert low <= number <= high
    assert any(line.startswith("images/s") for line in lines)


def test_the_worst_classes_are_listed_with_what_was_said_instead(measured, album: Path):
    out = measured(album, "--worst", 1).out
    table = out[out.index("worst classes") :].splitlines()
    assert len(table) == 2
    assert "worst classes" not in measured(album, "--worst", 0).out


def test_no_number_is_cut_off_in_a_narrow_window(measured, album: Path, monkeypatch: pytest.MonkeyPatch):
    wide = measured(album).out.splitlines()
    monkeypatch.setattr(console, "out", SafeConsole(width=40))
    lines = measured(album).out.splitlines()
    assert max(map(len, lines)) <= 40
    for name in ("top-1 ", "loss ", "cat "):
        [number] = [line.removeprefix(name).split()[0] for line in wide if line.startswith(name)]
        assert any(line.startswith(name) and number in line.split() for line in lines), name


def test_json_says_the_same(measured, album: Path):
    result = measured(album, "--json")
    values = json.loads(result.out)
    assert values["model"].endswith("small")
    assert (values["data"], values["matched_by"], values["flip"]) == ("album", "name", False)
    [size] = values["sizes"]
    assert size["image_size"] == [32, 32]
    assert size["count"] == 10
    assert size["top1"]["interval_method"] == "wilson"  # ten images: fewer than ten right or wrong
    assert len(size["calibration"]["bins"]) == 15
    assert {row["name"] for row in size["per_class"]} == {"cat", "dog"}
    shown = f"{100 * size['top1']['value']:.1f} %"
    assert shown in measured(album).out


def test_several_sizes_are_a_table_that_fits_eighty_columns(measured, album: Path):
    out = measured(album, "--image-size", "32,48,24x40", "--flip").out
    assert max(map(len, out.splitlines())) <= 80
    assert "averaged with mirror images" in out
    assert "vs 32" in out
    for name in ("32 ", "48 ", "24x40 "):
        assert sum(line.startswith(name) for line in out.splitlines()) == 1


def test_everything_goes_to_a_folder(measured, album: Path, tmp_path: Path):
    measured(album, "--out", tmp_path / "out", "--format", "svg")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"reliability.svg", "confusion.svg", "classes.svg", "eval.json", "per_class.csv", "predictions.csv"}
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["data"] == "album"


def test_results_are_all_that_is_on_standard_output(measured, album: Path, tmp_path: Path):
    result = measured(album, "--json", "--out", tmp_path / "out")
    json.loads(result.out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image-size", "30"], "patch_size=8 leaves 6 px"),
        (["--image-size", "32,30"], "patch_size=8 leaves 6 px"),
        (["--image-size", "32,x"], "--image-size expects 384 or 384x288"),
        (["--protocol", "imagenet"], "no WordNet IDs"),
        (["--protocol", "imgnet"], "did you mean 'imagenet'"),
        (["--real", "nowhere.json"], "nowhere.json cannot be read"),
        (["--format", "jpg", "--out", "x"], "there is no figure format 'jpg'"),
        (["--model", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_what_cannot_be_is_refused_in_one_sentence(
    vitrail: Command, weights: Path, album: Path, arguments: list[str], said: str
):
    result = vitrail("eval", "-m", weights, "--data", album, "--device", "cpu", *arguments)
    assert result.status == 1
    assert result.out == ""
    assert len(result.problems) == 1
    assert said in result.problems[0]


def test_classes_that_do_not_match_are_refused(vitrail: Command, weights: Path, tmp_path: Path):
    folder = images(tmp_path / "photos", {"rose": 2, "tulip": 2, "cat": 1})
    result = vitrail("eval", "-m", weights, "--data", folder)
    assert (result.status, len(result.problems)) == (1, 1)
    assert "has 1 of the 3 classes of photos (not rose, tulip); it has 5 outputs, such as cat" in result.problems[0]


def test_a_model_without_classes_is_refused(vitrail: Command, headless: Path, album: Path):
    result = vitrail("eval", "-m", headless, "--data", album)
    assert (result.status, len(result.problems)) == (1, 1)
    assert "has no classes, only features" in result.problems[0]


def test_an_empty_folder_and_images_without_labels_are_refused(vitrail: Command, weights: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    result = vitrail("eval", "-m", weights, "--data", tmp_path / "empty")
    assert (result.status, len(result.problems)) == (1, 1)
    Image.new("RGB", (8, 8)).save(tmp_path / "empty" / "a.png")
    result = vitrail("eval", "-m", weights, "--data", tmp_path / "empty")
    assert (result.status, len(result.problems)) == (1, 1)
    assert "no class folders" in result.problems[0]


def test_unreadable_images_are_refused_by_name_or_left_out(vitrail: Command, weights: Path, tmp_path: Path):
    folder = images(tmp_path / "photos", {"cat": 3, "dog": 2})
    (folder / "cat" / "1.png").write_bytes(b"broken")
    result = vitrail("eval", "-m", weights, "--data", folder)
    assert result.status == 1
    assert "1 of 5 images of photos cannot be read" in result.problems[0]
    assert "--skip-bad" in result.problems[0]
    result = vitrail("eval", "-m", weights, "--data", folder, "--skip-bad")
    assert result.status == 0
    assert "1 unreadable image skipped" in result.out


def test_one_class_is_measured_and_said(vitrail: Command, weights: Path, tmp_path: Path):
    result = vitrail("eval", "-m", weights, "--data", images(tmp_path / "photos", {"cat": 3}))
    assert result.status == 0
    assert any("one class, 'cat'" in said for said in result.notes)


def test_without_data_it_says_what_is_missing(vitrail: Command, weights: Path):
    result = vitrail("eval", "-m", weights)
    assert result.status == 2
    assert "needs --data" in result.problems[0]


def test_without_a_model_the_one_that_ships_is_measured(vitrail: Command, album: Path):
    result = vitrail("eval", "--data", album, "--device", "cpu")
    assert result.status == 0, result.err
    assert result.out.startswith("vitrail/")
    assert "10 images, 2 of 10 classes" in result.out


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(3) as started:
        yield started


def command(*arguments: str) -> tuple[int, str]:
    """The command in one of several processes."""
    with redirect_stdout(io.StringIO()) as out:
        return main(list(arguments)), out.getvalue()


def test_of_three_processes_only_the_first_prints(processes: Processes, measured, weights: Path, album: Path):
    expected = json.loads(measured(album, "--json").out)
    arguments = ("eval", "-m", str(weights), "--data", str(album), "--device", "cpu", "--json")
    (status, out), *others = processes.run(command, *arguments)
    assert status == 0
    assert others == [(0, ""), (0, "")]
    got = json.loads(out)
    assert got["sizes"][0]["top1"] == expected["sizes"][0]["top1"]
    assert got["sizes"][0]["loss"]["value"] == pytest.approx(expected["sizes"][0]["loss"]["value"], rel=1e-6)
