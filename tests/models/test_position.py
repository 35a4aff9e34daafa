"""Position embeddings, each against a slow implementation of its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import randomized, relative
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config import ViTConfig
from vitrail.models import ViT
from vitrail.models.position import (
    RESAMPLE_ARGS,
    LearnedPosition2d,
    RelativePosition,
    RotaryPosition2d,
    resample,
    sincos_2d,
)

CONFIG = ViTConfig(image_size=(12, 16), patch_size=4, width=16, depth=2, num_heads=2, mlp_dim=16, num_classes=3)


def test_google_resampling_equals_scipys_zoom() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    table = torch.randn(5, 5, 8)
    expected = ndimage.zoom(table.numpy(), (9 / 5, 7 / 5, 1), order=1)
    assert np.abs(resample(table, (9, 7), "google").numpy() - expected).max() <= 1e-6


def cubic_kernel(t: float, a: float) -> float:
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def resample_rows(
    values: np.ndarray, count: int, *, a: float, antialias: bool, corners: bool, offset: float
) -> np.ndarray:
    """Bicubic resampling along the first axis, implemented from the definition."""
    size = len(values)
    if count == size and not offset:
        return values
    scale = (size - 1) / (count - 1) if corners else size / (count + offset)
    stretch = max(scale, 1.0) if antialias else 1.0
    result = []
    for i in range(count):
        center = i * scale if corners else (i + 0.5) * scale - 0.5
        indices = range(math.floor(center - 2 * stretch) - 1, math.ceil(center + 2 * stretch) + 2)
        if antialias:  # only existing samples count, and the weights are normalized
            indices = range(max(indices.start, 0), min(indices.stop, size))
        weights = np.array([cubic_kernel((j - center) / stretch, a) for j in indices])
        rows = values[np.clip(np.array(list(indices)), 0, size - 1)]
        result.append(np.tensordot(weights / weights.sum(), rows, axes=1))
    return np.array(result)


@pytest.mark.parametrize(
    ("convention", "options"),
    [
        ("timm", {"a": -0.5, "antialias": True, "corners": False, "offset": 0.0}),
        ("huggingface", {"a": -0.75, "antialias": False, "corners": False, "offset": 0.0}),
        ("torchvision", {"a": -0.75, "antialias": False, "corners": True, "offset": 0.0}),
        ("dinov2", {"a": -0.75, "antialias": False, "corners": False, "offset": 0.1}),
    ],
)
@pytest.mark.parametrize("grid", [(9, 7), (3, 11), (4, 2)])
def test_bicubic_conventions_match_their_definitions(
    convention: str, options: dict[str, float], grid: tuple[int, int]
) -> None:
    table = torch.randn(5, 6, 4, dtype=torch.float64)
    rows = resample_rows(table.numpy(), grid[0], **options)
    expected = resample_rows(rows.transpose(1, 0, 2), grid[1], **options).transpose(1, 0, 2)
    assert np.abs(resample(table, grid, convention).numpy() - expected).max() <= 1e-6


def test_resampling_conventions_differ() -> None:
    table = torch.randn(14, 14, 32)
    results = {name: resample(table, (24, 9), name) for name in RESAMPLE_ARGS}  # antialiasing shows at fewer columns
    for first in results:
        for second in results:
            assert first == second or relative(results[first], results[second]) > 0.005, (first, second)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from(list(RESAMPLE_ARGS)))
def test_resampling_preserves_constants_and_returns_an_equal_grid_as_is(
    h: int, w: int, rows: int, columns: int, name: str
) -> None:
    flat = torch.ones(h, w, 2)
    assert torch.allclose(resample(flat, (rows, columns), name), torch.ones(rows, columns, 2), atol=1e-5)
    table = torch.randn(h, w, 2)
    assert resample(table, (h, w), name) is table


def test_half_precision_tables_are_resampled_in_float32() -> None:
    table = torch.randn(7, 7, 8)
    exact = resample(table.half().float(), (12, 9), "timm")
    got = resample(table.half(), (12, 9), "timm")
    assert got.dtype == torch.float16
    assert torch.equal(got, exact.half())


def test_learned_2d_concatenates_row_and_column_embeddings() -> None:
    position = randomized(LearnedPosition2d(CONFIG))
    table = position.patch_table((3, 4), torch.zeros(1)).unflatten(0, (3, 4))
    for y in range(3):
        for x in range(4):
            assert torch.equal(table[y, x], torch.cat([position.rows[y], position.columns[x]]))


def test_sincos_encodes_columns_then_rows() -> None:
    width, grid = 16, (3, 5)
    got = sincos_2d(grid, width, torch.zeros(1, dtype=torch.float64)).unflatten(0, grid)
    for y in range(3):
        for x in range(5):
            omega = [10_000 ** -(i / 3) for i in range(4)]
            expected = [f(coordinate * o) for coordinate in (x, y) for f in (math.sin, math.cos) for o in omega]
            assert got[y, x].tolist() == pytest.approx(expected)


@settings(max_examples=10)
@given(st.integers(0, 2), st.booleans())
def test_relative_attention_matches_its_definition(registers: int, class_token: bool) -> None:
    """q . embedding(p_q - p_k) is added to the logits, between patches only."""
    config = CONFIG.replace(position="relative", num_registers=registers, class_token=class_token, pool="gap")
    position = randomized(RelativePosition(config))
    num_prefix, count, heads, k = config.num_prefix_tokens, 12, 2, 8
    q, keys = torch.randn(1, heads, num_prefix + count, k), torch.randn(1, heads, num_prefix + count, k)
    q2, k2, bias = position((3, 4), q)(q, keys)
    assert q2 is q
    assert k2 is keys
    expected = torch.zeros(1, heads, num_prefix + count, num_prefix + count)
    for h in range(heads):
        for i in range(count):
            for j in range(count):
                embedding = position.offsets[i - j + count - 1].view(heads, k)[h]
                expected[0, h, num_prefix + i, num_prefix + j] = q[0, h, num_prefix + i] @ embedding / math.sqrt(k)
    assert relative(bias + 1, expected + 1) <= 1e-6


def test_rope_rotates_pairs_by_the_position_of_the_patch() -> None:
    config = CONFIG.replace(position="rope-2d", num_registers=1)
    q, k = torch.randn(1, 2, 2 + 12, 8, dtype=torch.float64), torch.randn(1, 2, 2 + 12, 8, dtype=torch.float64)
    rotated, _, bias = RotaryPosition2d(config)((3, 4), q)(q, k)
    assert bias is None
    assert torch.equal(rotated[:, :, :2], q[:, :, :2]), "class token and registers have no position"
    for y in range(3):
        for x in range(4):
            token = 2 + y * 4 + x
            position = (2 * (y + 0.5) / 3 - 1, 2 * (x + 0.5) / 4 - 1)
            angles = [2 * math.pi * c / 100 ** (i / 2) for c in position for i in range(2)]
            for index, angle in enumerate(angles):  # feature i is rotated with feature i + K / 2
                a, b = q[0, 0, token, index], q[0, 0, token, index + 4]
                got = rotated[0, 0, token, index], rotated[0, 0, token, index + 4]
                assert float(got[0]) == pytest.approx(float(a * math.cos(angle) - b * math.sin(angle)))
                assert float(got[1]) == pytest.approx(float(b * math.cos(angle) + a * math.sin(angle)))


@pytest.mark.parametrize("position_at", ["stem", "layers", "shared"])
def test_positions_are_added_where_position_at_says(position_at: str) -> None:
    net = randomized(ViT(CONFIG.replace(position_at=position_at)))
    assert len(net.positions) == (2 if position_at == "layers" else 1)
    images = torch.randn(1, 3, 12, 16)
    with torch.no_grad():
        x = net.patch(images).flatten(1, 2)
        x = torch.cat([net.class_token.expand(1, 1, -1), x], dim=1)
        for i, block in enumerate(net.blocks):
            if i == 0 or position_at != "stem":
                position = net.positions[i if position_at == "layers" else 0]
                x = x + torch.cat([position.prefix, position.table.flatten(0, 1)])
            x = block(x)
        expected = net.head(F.layer_norm(x, (16,), net.norm.weight, net.norm.bias, 1e-6)[:, 0])
        assert relative(net(images), expected) <= 1e-6
