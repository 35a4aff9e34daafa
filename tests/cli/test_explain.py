"""`vitrail explain` and `vitrail figures`: files written, one-sentence errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_models import gradient, model, small

from vitrail.cli.explain import stems
from vitrail.config import BiTConfig, SwinConfig


@pytest.fixture
def image(tmp_path: Path) -> Path:
    gradient().save(tmp_path / "one.png")
    return tmp_path / "one.png"


@pytest.fixture(scope="module")
def bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "bit"
    model(BiTConfig(image_size=128, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5)).save(path)
    return path


def test_figures_of_an_image_are_saved_and_listed(vitrail, weights, image, tmp_path):
    result = vitrail("explain", image, "-m", weights, "-o", tmp_path / "out")
    assert result.status == 0
    name, *files = result.out.splitlines()
    assert name.startswith(f"{image}  ")
    expected = [tmp_path / "out" / f"one-{figure}.png" for figure in ("overview", "layers", "heads-2")]
    assert [line.strip() for line in files] == [str(path) for path in expected]
    assert all(path.stat().st_size > 5000 for path in expected)


def test_npz_has_maps_attention_and_faithfulness(vitrail, weights, image, tmp_path):
    options = ("--format", "npz", "--method", "rollout,gradient", "--class", "dog", "--query", "1,2", "--faithfulness")
    result = vitrail("explain", image, "-m", weights, "-o", tmp_path / "out", *options)
    assert result.status == 0
    assert "most faithful: " in result.out
    with np.load(tmp_path / "out" / "one.npz") as arrays:
        assert {"rollout", "gradient", "deletion_random", "insertion_rollout", "shares"} <= set(arrays)
        assert arrays["rollout"].shape == (4, 4)
        assert arrays["attention_by_head"].shape == (2, 2, 4, 4)


def test_json_lists_files_scores_and_faithfulness(vitrail, weights, photos, tmp_path):
    result = vitrail(
        "explain", photos, "-m", weights, "-o", tmp_path / "out", "--json", "--format", "npz", "--faithfulness"
    )
    rows = json.loads(result.out)
    assert len(rows) == 6
    assert set(rows[0]) == {"path", "files", "label", "index", "score", "faithfulness"}
    assert set(rows[0]["faithfulness"]) == {"rollout", "gradient", "attention", "occlusion", "random"}


def test_broken_image_is_named_and_the_others_are_explained(vitrail, weights, image, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no")
    result = vitrail(
        "explain", tmp_path / "broken.png", image, "-m", weights, "-o", tmp_path / "out", "--format", "npz"
    )
    assert result.status == 1
    assert len(result.errors) == 2
    assert "broken.png" in result.errors[0]
    assert (tmp_path / "out" / "one.npz").exists()


def test_images_with_equal_names_do_not_overwrite_each_other(vitrail, weights, tmp_path):
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
def test_file_names_include_folders_only_if_needed(paths, names):
    assert stems([Path(p) for p in paths]) == names


def test_network_without_attention_supports_only_occlusion(vitrail, bit, image, tmp_path):
    result = vitrail("explain", image, "-m", bit, "--method", "rollout", "-o", tmp_path / "out")
    assert result.status == 1
    assert result.errors == ["a BiT has no attention; try a ViT, or occlusion, which works with any network."]
    for option in (("--layer", 1), ("--query", "class")):
        assert vitrail("explain", image, "-m", bit, "-o", tmp_path / "out", *option).status == 1
    result = vitrail("explain", image, "-m", bit, "-o", tmp_path / "out", "--format", "npz")
    assert result.status == 0


def test_layers_and_queries_of_a_swin_transformer_are_shown(vitrail, image, tmp_path):
    sizes = {"image_size": 32, "width": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4, "num_classes": 5}
    model(SwinConfig(**sizes), family="Swin").save(tmp_path / "swin")
    start = ("explain", image, "-m", tmp_path / "swin", "-o", tmp_path / "out")
    result = vitrail(*start, "--layer", "1,-1", "--query", "3,2")
    assert result.status == 0
    assert [Path(line).name for line in result.out.splitlines()[1:]] == [
        "one-overview.png", "one-layers.png", "one-heads-1.png", "one-heads-4.png",
    ]  # fmt: skip
    result = vitrail(*start, "--layer", 5)
    assert result.errors == ["there is no layer 5: this network has layers 1 to 4 (or -1, the last, to -4)."]


def test_all_figures_of_a_model_are_saved(vitrail, weights, photos, tmp_path):
    result = vitrail("figures", "-m", weights, "--data", photos, "-o", tmp_path / "out", "--format", "png,npz")
    assert result.status == 0
    names = ("filters", "positions", "distances", "rollout", "colors")
    assert result.out.splitlines() == [str(tmp_path / "out" / f"{n}.{f}") for n in names for f in ("png", "npz")]
    with np.load(tmp_path / "out" / "rollout.npz") as arrays:
        assert arrays["rollout"].shape == (6, 4, 4)


def test_selected_figures_are_listed_as_json(vitrail, weights, tmp_path):
    result = vitrail(
        "figures", "-m", weights, "--what", "positions", "-o", tmp_path / "out", "--format", "npz", "--json"
    )
    assert json.loads(result.out) == [str(tmp_path / "out" / "positions.npz")]


def test_empty_data_folder_is_a_one_sentence_error(vitrail, weights, tmp_path):
    (tmp_path / "empty").mkdir()
    result = vitrail("figures", "-m", weights, "--data", f"folder:{tmp_path / 'empty'}", "-o", tmp_path / "out")
    assert result.status == 1
    assert len(result.errors) == 1


def test_missing_position_embeddings_are_named_as_the_reason(vitrail, tmp_path):
    model(small(position="none")).save(tmp_path / "m")
    result = vitrail("figures", "-m", tmp_path / "m", "--what", "positions", "-o", tmp_path / "out")
    assert result.status == 1
    assert result.errors == ["positions: this model has no position embeddings."]


@pytest.mark.parametrize("command", ["explain", "figures"])
def test_bfloat16_on_a_cpu_does_not_crash(process, weights, tmp_path, command, monkeypatch):
    """Some CPUs report instructions that crash; this must be detected before the first product."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # conftest.py sets it for the other tests
    gradient().save(tmp_path / "one.png")
    inputs = [tmp_path / "one.png"] if command == "explain" else ["--data", tmp_path]
    result = process(command, *inputs, "-m", weights, "-o", tmp_path / "out", "--dtype", "bfloat16", "--format", "npz")
    assert result.status == 0, result.err


def test_assumed_class_names_are_noted_only_where_names_are_shown(vitrail, real_checkpoint, image, tmp_path):
    assert not any(
        "ImageNet" in note
        for note in vitrail("figures", "-m", real_checkpoint, "--what", "filters", "-o", tmp_path).notes
    )
    result = vitrail("explain", image, "-m", real_checkpoint, "--method", "attention", "-o", tmp_path)
    assert sum("ImageNet" in note for note in result.notes) == 1
