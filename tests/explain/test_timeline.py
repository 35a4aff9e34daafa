"""Timelines of a run: arrays of each snapshot, alignment of filters, animations, errors."""

from __future__ import annotations

import json
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from PIL import Image
from small_models import small
from training.small_runs import digits_config, one_thread, train_run

from vitrail.config import BiTConfig, PreprocessConfig, steps
from vitrail.errors import ConfigError, ModelError, NotFoundError
from vitrail.explain.animation import (
    Timeline,
    draw_animation,
    draw_strip,
    filter_grid,
    save_gif,
    similarity_grid,
    strip_frame_indices,
)
from vitrail.explain.canvas import COLORS, FAINT, HEAT, INK, QUIET
from vitrail.explain.distance import attention_distance, uniform_distance
from vitrail.explain.filters import filter_components
from vitrail.explain.positions import position_similarity
from vitrail.explain.rollout import rollout_map
from vitrail.explain.timeline import SUBJECTS, Snapshot, align_filters, compute_frames
from vitrail.figures.run_timeline import draw_timelines
from vitrail.models import build
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo

pytestmark = pytest.mark.usefixtures("quick_disk")

TINY = BiTConfig(layers=(1, 1, 1, 1), width_factor=0.5, image_size=32, num_classes=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with six snapshots."""
    folder = tmp_path_factory.mktemp("followed") / "run"
    with one_thread():
        train_run(digits_config(snapshot_every=steps(4)), folder)
    return folder


def draw_timeline(folder: Path, **changes: Any) -> dict[str, Path]:
    return {path.name: path for path in draw_timelines(folder, folder.parent / "figures", **changes)}


# Arrays


def test_frames_equal_the_arrays_of_each_network():
    nets = [randomized(build(small()), seed) for seed in range(3)]
    images = torch.randn(4, 3, 32, 32)
    result = compute_frames(nets, images=images, image=images[:1])
    assert result.subjects == list(SUBJECTS)
    assert result.skipped == {}
    for index, net in enumerate(nets):
        np.testing.assert_array_equal(result.arrays["positions"][index], position_similarity(net))
        np.testing.assert_array_equal(result.arrays["distances"][index], attention_distance(net, images).numpy())
        np.testing.assert_allclose(result.arrays["rollout"][index], rollout_map(net, images[:1])[0].numpy(), rtol=1e-6)
    assert result.arrays["uniform"].tolist() == [uniform_distance((4, 4), (32, 32))] * 3
    np.testing.assert_array_equal(result.arrays["filters"][-1], filter_components(nets[-1])[0])


def test_only_requested_subjects_are_computed():
    result = compute_frames([build(small())], ["filters"])
    assert set(result.arrays) == {"filters", "shares"}
    assert result.skipped == {}


def test_unavailable_subjects_are_skipped_with_the_reason():
    result = compute_frames([build(small(position="none"))] * 2)
    assert result.subjects == ["filters"]
    assert result.skipped["positions"].startswith("this model has no position embeddings")
    assert result.skipped["rollout"] == "no image was given."
    image = torch.zeros(1, 3, 32, 32)
    bit = compute_frames([build(TINY)], images=image, image=image)
    assert bit.arrays == {}
    assert set(bit.skipped) == set(SUBJECTS)


def test_unknown_subject_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown timeline 'position'; did you mean 'positions'\?"):
        compute_frames([], ["position"])


def orthonormal_filters(seed: int, count: int, side: int = 3, channels: int = 1) -> np.ndarray:
    """Random orthonormal filters, n p q C."""
    values = np.random.default_rng(seed).standard_normal((side * side * channels, count))
    return np.linalg.qr(values)[0].T.reshape(count, side, side, channels)


@settings(max_examples=30)
@given(st.integers(2, 5), st.integers(1, 9), st.integers(0, 99))
def test_permuted_and_negated_filters_are_aligned(snapshots: int, count: int, seed: int):
    rng, original = np.random.default_rng(seed), orthonormal_filters(seed, count)
    shares = np.sort(rng.random(count))[::-1]
    orders = [rng.permutation(count) for _ in range(snapshots)]
    signs = rng.choice([-1.0, 1.0], (snapshots, count, 1, 1, 1))
    shuffled = np.stack([original[order] * sign for order, sign in zip(orders, signs, strict=True)])
    got, weights = align_filters(shuffled, np.stack([shares[order] for order in orders]))
    np.testing.assert_allclose(got, np.broadcast_to(shuffled[-1], got.shape))
    np.testing.assert_allclose(weights, np.broadcast_to(shares[orders[-1]], weights.shape))


@pytest.mark.parametrize("seed", range(5))
def test_alignment_maximizes_the_sum_of_absolute_cosines(seed: int):
    pair = np.stack([orthonormal_filters(seed, 4, 2), orthonormal_filters(seed + 100, 4, 2)])
    got, _ = align_filters(pair, np.ones((2, 4)))
    cosines = pair[1].reshape(4, -1) @ pair[0].reshape(4, -1).T
    best = max(sum(abs(cosines[i, j]) for i, j in enumerate(order)) for order in permutations(range(4)))
    paired = (got[1].reshape(4, -1) * got[0].reshape(4, -1)).sum(1)
    assert (paired >= 0).all()
    assert paired.sum() == pytest.approx(best)
    np.testing.assert_array_equal(got[1], pair[1])


# Images


@given(st.integers(1, 100))
def test_strip_has_the_first_and_last_moment_and_growing_gaps(count: int):
    chosen = strip_frame_indices(count)
    assert chosen[0] == 0
    assert chosen[-1] == count - 1
    assert len(chosen) == min(count, 6)
    gaps = np.diff(chosen)
    assert (gaps > 0).all()
    assert count <= 6 or gaps[-1] == gaps.max()


def test_similarity_grid_has_each_map_at_its_patch():
    similarity = np.zeros((2, 3, 2, 3))
    for row in range(2):
        for column in range(3):
            similarity[row, column, row, column] = 1.0
    image = similarity_grid(similarity, 0.0)
    side, gap = 16, 4
    bright = (image[..., 3] == 255) & (image[..., 0] > 200)  # viridis ends in yellow
    for row in range(2):
        for column in range(3):
            top, left = row * (2 * side + gap), column * (3 * side + gap)
            tile = bright[top : top + 2 * side : side, left : left + 3 * side : side]
            assert np.argwhere(tile).tolist() == [[row, column]]


def test_large_similarity_grid_is_subsampled_from_corner_to_corner():
    similarity = np.random.default_rng(0).random((20, 20, 20, 20))
    similarity[0, 0], similarity[-1, -1] = 0.0, 1.0
    image = similarity_grid(similarity, 0.0)
    assert image.shape == (7 * 40 + 6 * 3, 7 * 40 + 6 * 3, 4)
    assert (image[:40, :40] == image[0, 0]).all()
    assert (image[-40:, -40:] == image[-1, -1]).all()


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_filter_grid_shows_zero_as_gray_on_a_shared_scale(channels: int):
    weights = np.zeros((2, 4, 4, channels))
    weights[0, 0, 0] = 0.5
    image = filter_grid(weights, max_abs=1.0)
    assert image[0, 0, :3].tolist() == [191] * 3
    assert image[-1, -1, :3].tolist() == [128] * 3


def make_timeline(subject: str, arrays: dict[str, np.ndarray], **changes: Any) -> Timeline:
    count = len(arrays[subject])
    snapshots = [Snapshot(10 * i, i / 2, None) for i in range(count)]
    return Timeline(subject, arrays, snapshots, "test: ViT", **changes)


def test_animation_keeps_static_parts_and_holds_the_last_frame(tmp_path: Path):
    values = np.random.default_rng(0).uniform(-0.5, 1, (5, 4, 4, 4, 4))
    measured = [(0.5, 0.4), (2.0, 0.9)]
    path = draw_animation(make_timeline("positions", {"positions": values}, measured=measured), tmp_path / "a.gif")
    with Image.open(path) as gif:
        assert (gif.n_frames, gif.width, gif.info["loop"]) == (5, 800, 0)
        durations, pixels = [], []
        for number in range(5):
            gif.seek(number)
            durations.append(gif.info["duration"])
            pixels.append(np.asarray(gif.convert("RGB")).astype(int))
    assert durations == [700, 180, 180, 180, 2000]
    assert pixels[0][0, 0].tolist() == [255, 255, 255]  # the background is white
    changed = np.ptp(np.stack(pixels), axis=0).max(-1)
    height, width = changed.shape
    assert changed[:50].max() == 0  # the title
    assert changed[110 : int(0.7 * height), int(0.86 * width) :].max() == 0  # the scale
    assert (changed[150 : int(0.6 * height), 60 : int(0.6 * width)] > 0).mean() > 0.5  # the maps


def test_thirty_frames_of_a_14x14_grid_are_under_two_megabytes(tmp_path: Path):
    """14 x 14 positions interpolated from noise to sines of row and column."""
    rng, coordinate = np.random.default_rng(0), np.arange(14)[:, None] / 14
    waves = np.concatenate(
        [np.sin(coordinate * 2**k) for k in range(4)] + [np.cos(coordinate * 2**k) for k in range(4)], 1
    )
    rows, columns = np.repeat(waves, 14, axis=0), np.tile(waves, (14, 1))
    structured, noise = np.concatenate([rows, columns], 1), rng.standard_normal((196, 16))
    values = []
    for share in np.linspace(0, 1, 30):
        table = share * (structured - structured.mean(0)) + (1 - share) * noise
        table /= np.linalg.norm(table, axis=1, keepdims=True)
        values.append((table @ table.T).reshape(14, 14, 14, 14))
    path = draw_animation(make_timeline("positions", {"positions": np.stack(values)}), tmp_path / "a.gif")
    assert path.stat().st_size < 2_000_000


def test_palette_keeps_the_colors_of_the_scale(tmp_path: Path):
    from matplotlib import colormaps

    ramp = (255 * colormaps[HEAT](np.linspace(0, 1, 256))[None, :, :3]).round().astype(np.uint8).repeat(20, 0)
    white = np.full_like(ramp, 255)
    images = [np.concatenate([ramp, white]), np.concatenate([white, ramp])]
    with Image.open(save_gif(images, tmp_path / "a.gif")) as gif:
        decoded = np.asarray(gif.convert("RGB")).astype(int)
    assert np.abs(decoded[:20] - ramp).max() <= 4
    assert (decoded[20:] == 255).all()


def test_palette_keeps_the_drawing_colors(tmp_path: Path):
    """The accuracy curve is blue, not the nearest color of the scale."""
    ramp = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    colors = [tuple(round(255 * part) for part in to_rgb(color)) for color in (INK, QUIET, FAINT, COLORS[0])]
    ramp[0, :4] = colors
    with Image.open(save_gif([ramp, ramp[::-1]], tmp_path / "a.gif")) as gif:
        decoded = np.asarray(gif.convert("RGB"))
    assert [tuple(pixel) for pixel in decoded[0, :4].tolist()] == colors


def test_strip_titles_have_the_epoch_and_measured_scores():
    values = np.random.default_rng(0).random((3, 4, 4))
    snapshots = [Snapshot(0, 0.0), Snapshot(20, 1.02), Snapshot(60, 3.06, 0.913)]
    image = np.zeros((8, 8, 3), np.uint8)
    figure = draw_strip(Timeline("rollout", {"rollout": values}, snapshots, "test: ViT", image=image))
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["", "epoch 0\n", "epoch 1.02\n", "epoch 3.06\ntop-1 91.3 %", ""]  # the image and the scale


# Timelines of a run


def test_timeline_has_all_snapshots_of_a_run(run: Path):
    progress: list[tuple[int, int]] = []
    paths = draw_timeline(run, on_progress=lambda done, total: progress.append((done, total)))
    assert sorted(paths) == sorted(f"timeline-{s}.{e}" for s in SUBJECTS for e in ("gif", "png", "svg", "npz"))
    assert progress == [(i, 10) for i in range(1, 11)]
    with np.load(paths["timeline-positions.npz"]) as arrays:
        assert arrays["step"].tolist() == [0, 4, 8, 12, 16, 20]
        net, _ = checkpoint.read(run / "snapshots" / "00000008")
        np.testing.assert_array_equal(arrays["positions"][2], position_similarity(net))
        assert np.isnan(arrays["score"][:5]).all()  # scores were measured at steps 5, 10, 15 and 20
        measured = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert arrays["score"][5] == [m["evaluation"]["top1"] for m in measured if "evaluation" in m][-1]
        assert arrays["epoch"][5] == pytest.approx(20 * 64 / 1438)
    for name, path in paths.items():
        if name.endswith("gif"):
            with Image.open(path) as gif:
                assert 1 < gif.n_frames <= 6


def test_image_option_sets_the_image_of_the_rollout(run: Path, tmp_path: Path):
    image = np.random.default_rng(0).integers(0, 256, (20, 20, 1), dtype=np.uint8)
    rollouts = {}
    for name, options in {"first": {}, "own": {"image": image}}.items():
        paths = draw_timelines(run, tmp_path / name, ["rollout"], **options)
        with np.load(paths[-1]) as arrays:
            rollouts[name] = arrays["rollout"]
    assert rollouts["own"].shape == rollouts["first"].shape == (6, 2, 2)
    assert not np.array_equal(rollouts["own"], rollouts["first"])


def copy_with_snapshots(run: Path, folder: Path, keep: int) -> Path:
    """Copy a run with only its first `keep` snapshots."""
    shutil.copytree(run, folder)
    for path in sorted((folder / "snapshots").iterdir())[keep:]:
        shutil.rmtree(path)
    return folder


@pytest.mark.parametrize(("keep", "message"), [(0, "has no snapshots"), (1, "has only one snapshot, of step 0")])
def test_run_without_snapshots_is_an_error_with_advice(run: Path, tmp_path: Path, keep: int, message: str):
    folder = copy_with_snapshots(run, tmp_path / "run", keep)
    with pytest.raises(NotFoundError, match=f"{message}; a timeline needs two or more\\. Train with snapshot_every="):
        draw_timelines(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_without_a_run_is_an_error(tmp_path: Path):
    with pytest.raises(NotFoundError, match="is not a run folder"):
        draw_timelines(tmp_path, tmp_path / "out")


def test_missing_data_skips_only_the_subjects_that_need_it(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = copy_with_snapshots(run, tmp_path / "run", 2)
    config = json.loads((folder / "config.json").read_text())
    config["data"]["source"] = str(tmp_path / "gone")
    (folder / "config.json").write_text(json.dumps(config))
    for step, net in enumerate([build(small(position="none")), build(small(position="none"), seed=1)]):
        shutil.rmtree(folder / "snapshots" / f"{4 * step:08d}")
        info = ModelInfo(config=net.config, preprocess=PreprocessConfig(image_size=32))
        checkpoint.write(net, info, folder / "snapshots" / f"{4 * step:08d}")
    names = {path.stem for path in draw_timelines(folder, tmp_path / "out")}
    assert names == {"timeline-filters"}
    assert "skipped distances: the evaluation images cannot be read" in caplog.text
    assert "skipped positions: this model has no position embeddings" in caplog.text


def test_model_without_any_subject_is_an_error_with_all_reasons(run: Path, tmp_path: Path):
    folder, net = copy_with_snapshots(run, tmp_path / "run", 0), build(TINY)
    info = ModelInfo(config=net.config, preprocess=PreprocessConfig(image_size=32))
    for step in (0, 1):
        checkpoint.write(net, info, folder / "snapshots" / f"{step:08d}")
    message = r"no timeline can be drawn for .*; positions: a BiT .*; filters: .*; distances: .*; rollout: a BiT"
    with pytest.raises(ModelError, match=message):
        draw_timelines(folder, tmp_path / "out")


def test_too_many_snapshots_are_subsampled_with_a_note(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("vitrail.figures.run_timeline.MAX_FRAMES", 3)
    paths = draw_timelines(run, tmp_path, ["filters"])
    with np.load(paths[-1]) as arrays:
        assert arrays["step"].tolist() == [0, 8, 20]
    assert "has 6 snapshots; 3 of them are shown" in caplog.text
