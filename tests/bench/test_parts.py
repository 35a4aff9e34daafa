"""The benchmarks of single parts, run for real at small sizes: input, loop, service, growth and communication."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import import_peer, need_extra
from PIL import Image

from vitrail.bench.cases import OWN, Case
from vitrail.bench.communication import Collective, count_communication, ring_bytes
from vitrail.bench.growth import measure_growth, resnet_group, write_growth
from vitrail.bench.libraries import network_config
from vitrail.bench.loop_speed import measure_loop
from vitrail.bench.serve_load import measure_service, median_round
from vitrail.errors import ConfigError, TrainError
from vitrail.models.flops import count_flops, count_parameters
from vitrail.recipes import RECIPES


@pytest.mark.peer
@pytest.mark.slow
def test_input_measures_every_loader_on_both_kinds_of_images():
    """In a process of its own: it limits itself to some cores."""
    pytest.importorskip("skimage")
    import_peer("timm")
    command = "bench input --small 24 --large 2 --rounds 1 --cores 1 --json"
    completed = subprocess.run([sys.executable, "-m", "vitrail", *command.split()], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(completed.stdout)
    assert {row["images"] for row in rows} == {"small", "large"}
    assert len(rows) == 10
    assert all(row["images_per_s"] > 0 for row in rows)
    best = max(row["images_per_s"] for row in rows if row["images"] == "small" and "vitrail" not in row["loader"])
    [ours] = [row for row in rows if row["images"] == "small" and "vitrail" in row["loader"]]
    assert ours["ratio"] == pytest.approx(ours["images_per_s"] / best)


def test_loop_measures_the_step_and_the_loop():
    found = measure_loop("digits", ["batch_size=32", "model.depth=1"], steps_per_round=3, rounds=1)
    assert found.ratio == pytest.approx(found.loop[0] / found.bare[0])
    assert json.loads(json.dumps(found.to_dict()))["ratio"] == found.ratio


def test_loop_refuses_unknown_recipes():
    with pytest.raises(ConfigError, match="unknown recipe 'digit'; did you mean 'digits'"):
        measure_loop("digit")


def test_serve_measures_the_service_and_the_plain_loops():
    need_extra("serve")
    rows = measure_service("vitrail/cifar10", clients=2, seconds=0.2, rounds=1)
    [row] = rows
    assert row.service > 0
    assert row.ratio == pytest.approx(row.service / max(row.together, row.apart))
    assert row.p50_ms <= row.p99_ms
    assert median_round(rows) == row


@pytest.mark.slow
def test_growth_measures_every_point_and_draws_it(tmp_path: Path):
    growth = measure_growth(
        "Ti/16", tmp_path, device="cpu", image_sizes=(32, 50), batch_sizes=(1, 2), depths=(1, 2), rounds=1, turn_s=0.01
    )
    assert [[point.value for point in sweep.points] for sweep in growth.sweeps] == [[32, 48], [1, 2], [1, 2]]
    assert all(point.ms and point.status == "ok" for sweep in growth.sweeps for point in sweep.points)
    flops = [point.gflops for point in growth.sweeps[0].points]
    assert flops[0] == count_flops(network_config("ViT-Ti/16", {"image_size": 32})) / 1e9
    [(vit, resnet)] = growth.pairs
    assert (vit.model, resnet.model) == ("ViT-S/16", "BiT-R50x1")
    assert resnet.ratio is not None
    write_growth(growth, tmp_path, "vitrail bench growth")
    saved = json.loads((tmp_path / "growth.json").read_text())
    assert saved["sweeps"][0]["exponents"]["ms"]["all"] == growth.sweeps[0].exponent("ms")
    with Image.open(tmp_path / "growth.png") as chart:
        assert chart.width > 600


@pytest.mark.parametrize("vit", ["S/16", "B/16", "L/16"])
def test_each_vit_has_a_resnet_of_similar_flops(vit: str):
    first, second = resnet_group(Case(library=OWN), vit, "inference", 4).cases
    ratio = count_flops(network_config(second.model, {})) / count_flops(network_config(first.model, {}))
    assert 0.85 < ratio < 1.15


def test_growth_needs_patches():
    with pytest.raises(ConfigError, match="growth is measured for ViTs"):
        measure_growth("BiT-R50x1", device="cpu")


def count_with_batches_of(size: int) -> list[Collective]:
    """With AdamW: Muon gathers matrices, too."""
    overrides = ["optim.kind=adamw", f"batch_size={size}"]
    return count_communication("digits", overrides, processes=(2, 4), parallel=("ddp", "fsdp", "hsdp"))


@pytest.fixture(scope="module")
def communication() -> list[Collective]:
    return count_with_batches_of(32)


def by_kind(found: list[Collective], parallel: str, processes: int) -> dict[tuple[str, str], Collective]:
    chosen = [entry for entry in found if (entry.parallel, entry.processes) == (parallel, processes)]
    assert {entry.dimension for entry in chosen} == {"all"}
    return {(entry.collective, entry.dtype): entry for entry in chosen}


WEIGHT_BYTES = 4 * count_parameters(RECIPES["digits"]().model.replace(num_classes=10))  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_data_parallel_steps_reduce_each_gradient_once(communication: list[Collective], processes: int):
    found = by_kind(communication, "ddp", processes)
    assert found["all_reduce", "float32"].bytes == WEIGHT_BYTES
    others = [entry for kind, entry in found.items() if kind != ("all_reduce", "float32")]
    assert sum(entry.bytes for entry in others) <= 64  # counts, and a sum of weights


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_sharded_steps_gather_weights_twice_and_reduce_gradients_once(communication: list[Collective], processes: int):
    found = by_kind(communication, "fsdp", processes)
    assert found["reduce_scatter", "float32"].bytes == pytest.approx(WEIGHT_BYTES, rel=0.01)  # shards are padded
    assert found["all_gather", "float32"].bytes == pytest.approx(2 * WEIGHT_BYTES, rel=0.01)
    large = {("reduce_scatter", "float32"), ("all_gather", "float32")}
    assert sum(entry.bytes for kind, entry in found.items() if kind not in large) <= 64


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_nothing_but_padding_grows_with_the_number_of_processes(communication: list[Collective], parallel: str):
    two, four = (by_kind(communication, parallel, processes) for processes in (2, 4))
    assert two.keys() == four.keys()
    for kind, entry in two.items():
        assert four[kind].calls == entry.calls
        assert four[kind].bytes == pytest.approx(entry.bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_hybrid_sharding_gathers_in_a_group_and_reduces_a_shard_between_groups(
    communication: list[Collective], processes: int
):
    chosen = [entry for entry in communication if (entry.parallel, entry.processes) == ("hsdp", processes)]
    found = {(entry.collective, entry.dimension): entry for entry in chosen if entry.bytes > 64}
    assert {entry.group for (_, dimension), entry in found.items() if dimension == "shard"} == {2}
    assert found["reduce_scatter", "shard"].bytes == pytest.approx(WEIGHT_BYTES, rel=0.01)
    assert found["all_gather", "shard"].bytes == pytest.approx(2 * WEIGHT_BYTES, rel=0.01)
    between = found.pop(("all_reduce", "replicate"), None)
    assert between is not None or processes == 2
    if between is not None:
        assert between.group == processes // 2
        assert between.bytes == pytest.approx(WEIGHT_BYTES / 2, rel=0.01), "each process reduces its shard only"
    assert len(found) == 2, "nothing else is large"


@pytest.mark.slow
def test_no_collective_of_a_step_grows_with_the_batch(communication: list[Collective]):
    assert count_with_batches_of(128) == communication


def test_ring_bytes():
    assert ring_bytes("all_reduce", 100, 4) == 150
    assert ring_bytes("reduce_scatter", 100, 4) == ring_bytes("all_gather", 100, 4) == 75
    assert ring_bytes("broadcast", 100, 4) == 100


@pytest.mark.slow
def test_a_run_that_fails_says_why():
    with pytest.raises(TrainError, match="the run with 2 processes failed: batch_size=33 cannot be divided"):
        count_communication("digits", ["batch_size=33"], processes=(2,), parallel=("ddp",))


def test_one_process_communicates_nothing():
    with pytest.raises(ConfigError, match="expected two or more"):
        count_communication(processes=(1, 2))
