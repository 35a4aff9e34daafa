"""`vitrail explain` and `vitrail figures`: files written, bad input in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_models import gradient, model, small

from vitrail.cli.explain import stems
from vitrail.config import BiTConfig


@pytest.fixture
def image(tmp_path: Path) -> Path:
    gradient().save(tmp_path / "one.png")
    return tmp_path / "one.png"


@pytest.fixture(scope="module")
def bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "bit"
    model(BiTConfig(image_size=128, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5)).save(path)
    return path


def test_one_image_gives_its_figures_and_says_where_they_are(vitrail, weights, image, tmp_path):
    result = vitrail("explain", image, "-m", weights, "-o", tmp_path / "out")
    assert result.status == 0
    name, *files = result.out.splitlines()
    assert name.startswith(f"{image}  ")
    expected = [tmp_path / "out" / f"one-{end}.png" for end in ("overview", "layers", "heads-2")]
    assert [line.strip() for line in files] == [str(path) for path in expected]
    assert all(path.stat().st_size > 5000 for path in expected)


def test_the_numbers_behind_them_and_how_far_to_trust_them(vitrail, weights, image, tmp_path):
    options = ("--format", "npz", "--method", "rollout,gradient", "--class", "dog", "--query", "1,2", "--faithfulness")
    result = vitrail("explain", image, "-m", weights, "-o", tmp_path / "out", *options)
    assert result.status == 0
    assert "most faithful: " in result.out
    with np.load(tmp_path / "out" / "one.npz") as arrays:
        assert {"rollout", "gradient", "deletion_random", "insertion_rollout", "shares"} <= set(arrays)
        assert arrays["rollout"].shape == (4, 4)
        assert arrays["attention_by_head"].shape == (2, 2, 4, 4)


def test_json_for_machines(vitrail, weights, photos, tmp_path):
    result = vitrail(
        "explain", photos, "-m", weights, "-o", tmp_path / "out", "--json", "--format", "npz", "--faithfulness"
    )
    rows = json.loads(result.out)
    assert len(rows) == 6
    assert set(rows[0]) == {"path", "files", "label", "index", "score", "faithfulness"}
    assert set(rows[0]["faithfulness"]) == {"rollout", "gradient", "attention", "occlusion", "random"}


def test_a_broken_image_is_named_and_the_rest_is_explained(vitrail, weights, image, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no")
    result = vitrail(
        "explain", tmp_path / "broken.png", image, "-m", weights, "-o", tmp_path / "out", "--format", "npz"
    )
    assert result.status == 1
    assert len(result.problems) == 2
    assert "broken.png" in result.problems[0]
    assert (tmp_path / "out" / "one.npz").exists()


def test_images_of_one_name_in_two_folders_do_not_overwrite_each_other(vitrail, weights, tmp_path):
    for name in ("a/one.png", "b/one.png"):
        (tmp_path / name).parent.mkdir()
        gradient().save(tmp_path / name)
    options = ("--format", "npz", "--method", "rollout")
    result = vitrail("explain", tmp_path / "a", tmp_path / "b", "-m", weights, "-o", tmp_path / "out", *options)
    assert result.status == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a-one.npz", "b-one.npz"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a.png", "x/b.png"], ["a", "b"]),
        (["x/a.png", "y/a.png"], ["x-a", "y-a"]),
        (["a.png", "a.jpg"], ["a-png-1", "a-jpg-2"]),
        (["/x/a.png"], ["a"]),
    ],
)
def test_figures_are_named_by_as_much_of_the_path_as_is_needed(paths, names):
    assert stems([Path(p) for p in paths]) == names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layer", "3"], "there is no layer 3: this network has layers 1 to 2"),
        (["--layer", "last"], "--layer expects numbers"),
        (["--class", "horse"], "there is no class 'horse'"),
        (["--class", "9"], "there is no class 9: this model has 5"),
        (["--query", "distill"], "this network has no token 'distill': it has class and patches"),
        (["--query", "5,1"], "no patch in row 5, column 1"),
        (["--method", "lime"], "there is no method 'lime'"),
        (["--format", "gif"], "no format 'gif'"),
        (["--method", ","], "expected comma-separated names"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(vitrail, weights, image, tmp_path, options, words):
    result = vitrail("explain", image, "-m", weights, "-o", tmp_path / "out", *options)
    assert result.status in (1, 2)
    assert len(result.problems) == 1
    assert words in result.problems[0]
    assert not (tmp_path / "out").exists()


def test_a_network_without_attention_is_asked_for_occlusion_only(vitrail, bit, image, tmp_path):
    result = vitrail("explain", image, "-m", bit, "--method", "rollout", "-o", tmp_path / "out")
    assert result.status == 1
    assert result.problems == ["a BiT has no attention; try a ViT, or occlusion, which works with any network."]
    for option in (("--layer", 1), ("--query", "class")):
        assert vitrail("explain", image, "-m", bit, "-o", tmp_path / "out", *option).status == 1
    result = vitrail("explain", image, "-m", bit, "-o", tmp_path / "out", "--format", "npz")
    assert result.status == 0


def test_the_figures_of_a_model(vitrail, weights, photos, tmp_path):
    result = vitrail("figures", "-m", weights, "--data", photos, "-o", tmp_path / "out", "--format", "png,npz")
    assert result.status == 0
    names = ("filters", "positions", "distances", "rollout", "colors")
    assert result.out.splitlines() == [str(tmp_path / "out" / f"{n}.{f}") for n in names for f in ("png", "npz")]
    with np.load(tmp_path / "out" / "rollout.npz") as arrays:
        assert arrays["rollout"].shape == (6, 4, 4)


def test_some_figures_as_json(vitrail, weights, tmp_path):
    result = vitrail(
        "figures", "-m", weights, "--what", "positions", "-o", tmp_path / "out", "--format", "npz", "--json"
    )
    assert json.loads(result.out) == [str(tmp_path / "out" / "positions.npz")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--what", "filter"], "there is no figure 'filter'; did you mean 'filters'"),
        (["--what", "colors", "--layer", "5"], "there is no layer 5"),
        (["--what", "positions", "--layer", "5"], "there is no layer 5"),
        (["--timeline", "--layer", "1"], "--layer cannot be combined with --timeline"),
        (["--timeline", "--format", "pdf"], "--format cannot be combined with --timeline"),
        (["--timeline", "-m", "weights.npz"], "--timeline expects a run folder: --model runs/digits, got weights.npz"),
        (["--data", "nowhere/"], "nowhere"),
    ],
)
def test_figures_that_cannot_be_are_said_in_one_sentence(vitrail, weights, tmp_path, options, words):
    result = vitrail("figures", "-m", weights, "-o", tmp_path / "out", *options)
    assert result.status == 1
    assert len(result.problems) == 1
    assert words in result.problems[0]


def test_an_empty_folder_has_nothing_to_look_at(vitrail, weights, tmp_path):
    (tmp_path / "empty").mkdir()
    result = vitrail("figures", "-m", weights, "--data", f"folder:{tmp_path / 'empty'}", "-o", tmp_path / "out")
    assert result.status == 1
    assert len(result.problems) == 1


def test_a_model_without_positions_says_why_there_is_no_figure(vitrail, tmp_path):
    model(small(position="none")).save(tmp_path / "m")
    result = vitrail("figures", "-m", tmp_path / "m", "--what", "positions", "-o", tmp_path / "out")
    assert result.status == 1
    assert result.problems == ["positions: this model has no position embeddings."]


@pytest.mark.parametrize("command", ["explain", "figures"])
def test_bfloat16_on_a_cpu_ends_no_process(process, weights, tmp_path, command, monkeypatch):
    """Some CPUs announce what they do not have: it has to be found out before the first product."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # which the other tests are kept safe by
    gradient().save(tmp_path / "one.png")
    what = [tmp_path / "one.png"] if command == "explain" else ["--data", tmp_path]
    result = process(command, *what, "-m", weights, "-o", tmp_path / "out", "--dtype", "bfloat16", "--format", "npz")
    assert result.status == 0, result.err


def test_assumed_class_names_are_noted_where_names_are_shown_only(vitrail, real_checkpoint, image, tmp_path):
    assert not any(
        "ImageNet" in note
        for note in vitrail("figures", "-m", real_checkpoint, "--what", "filters", "-o", tmp_path).notes
    )
    explained = vitrail("explain", image, "-m", real_checkpoint, "--method", "attention", "-o", tmp_path)
    assert sum("ImageNet" in note for note in explained.notes) == 1
