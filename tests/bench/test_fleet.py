"""The simulation of a fleet: queueing theory, the package's rules, conservation, and what failures change."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, need_extra

need_extra("serve")

from vitrail.serve import batch_size  # noqa: E402


def load(name: str) -> ModuleType:
    """A module of benchmarks/, without that folder on sys.path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulation, fleet = load("fleet_simulation"), load("fleet")
Fleet, ReplicaConfig = simulation.Fleet, simulation.ReplicaConfig
REQUESTS = 50_000


def config(**changes: Any) -> Any:
    """A process with one core, no queue limit and a batch size of 1; by default nothing costs time."""
    settings = {"cores": 1, "decode": 0.0, "batch_overhead": 0.0, "image_time": 0.0, "engine_threads": 1,
                "max_queue": 10**9, "batch_delay": 0.0, "speed_sigma": 0.0}  # fmt: skip
    return ReplicaConfig(**settings | changes)


def mean_latency(settings: Any, rate: float, decodes: Any = (0.0,), requests: int = REQUESTS, **options: Any) -> float:
    """Of one replica, with Poisson arrivals."""
    arrivals = np.cumsum(np.random.default_rng(3).exponential(1 / rate, requests))
    run = Fleet(settings, options.pop("replicas", 1), **options).run(arrivals, decodes, float(arrivals[-1]))
    assert set(run.states) == {simulation.ANSWERED}
    return float(np.mean(run.latencies))


def small_fleet(
    replicas: int = 8, seconds: float = 20.0, rate: float = 600.0, burst: float = 0.0, **options: Any
) -> Any:
    settings = fleet.PRESETS["cpu"] if "settings" not in options else options.pop("settings")
    run = Fleet(settings, replicas, **options)
    arrivals = fleet.poisson(rate, seconds, burst=burst)
    return run, arrivals, fleet.decode_times(settings, len(arrivals))


def test_exponential_work_on_one_core_waits_like_m_m_1() -> None:
    work = np.random.default_rng(4).exponential(1.0, REQUESTS)
    assert mean_latency(config(), 0.6, work) == pytest.approx(1 / (1 - 0.6), rel=0.04)


def test_exponential_work_on_three_cores_waits_like_m_m_3() -> None:
    load, cores = 2.1, 3
    all_busy = load**cores / math.factorial(cores) / (1 - load / cores)
    waits = all_busy / (sum(load**n / math.factorial(n) for n in range(cores)) + all_busy)  # Erlang C
    work = np.random.default_rng(5).exponential(1.0, REQUESTS)
    assert mean_latency(config(cores=cores), load, work) == pytest.approx(1 + waits / (cores - load), rel=0.04)


def test_an_engine_of_constant_time_waits_like_m_d_1() -> None:
    constant = config(batch_overhead=0.7, gpu=True)
    assert constant.max_batch == 1  # longer than the 50 ms that a shared batch may take
    expected = 0.7 + 0.7 * 0.6 / (2 * (1 - 0.6))
    assert mean_latency(constant, 0.6 / 0.7) == pytest.approx(expected, rel=0.04)


def test_stages_in_series_wait_like_queues_in_series() -> None:
    """The departures of M/M/1 are a Poisson process, so an engine of constant time behind it is M/D/1."""
    work = np.random.default_rng(6).exponential(1.0, REQUESTS)
    settings = config(image_time=0.8, gpu=True)
    expected = 1 / (1 - 0.6) + 0.8 + 0.8 * 0.48 / (2 * (1 - 0.48))
    assert mean_latency(settings, 0.6, work) == pytest.approx(expected, rel=0.04)


def test_tasks_share_the_cores_equally() -> None:
    """Two requests: the second is decoded while the batch of the first runs, on one core."""
    run = Fleet(config(image_time=1.0), 1).run([0.0, 0.5], [0.25], 1.0)
    # The first is decoded at 0.25. From 0.5 both advance at half speed: the decoding ends at 1.0, the batch at 1.5.
    assert run.latencies == pytest.approx([1.5, 2.0])
    assert run.busy == pytest.approx(1.0)
    assert run.available == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("preset", "changes", "clients", "rate"),
    [("cpu", {}, 32, 118), ("gpu", {}, 128, 1538 / 4), ("gpu", {"cores": 16}, 128, 491)],
)
def test_presets_have_the_measured_throughput(preset: str, changes: dict[str, Any], clients: int, rate: float) -> None:
    settings = replace(fleet.PRESETS[preset], one_client=True, speed_sigma=0.0, **changes)
    run = Fleet(settings, 1).run([], fleet.decode_times(settings, 1000), 60.0, clients)
    assert sum(np.array(run.arrivals) + run.latencies < 60) / 60 == pytest.approx(rate, rel=0.02)


def test_random_balancing_makes_replicas_independent_queues() -> None:
    work = np.random.default_rng(7).exponential(1.0, REQUESTS)
    latency = mean_latency(config(), 5 * 0.6, work, replicas=5, balance="random")
    assert latency == pytest.approx(1 / (1 - 0.6), rel=0.04)


def test_an_overloaded_replica_answers_at_its_capacity() -> None:
    one = replace(fleet.PRESETS["cpu"], speed_sigma=0.0)
    run, arrivals, decodes = small_fleet(1, 40.0, 2 * one.capacity, settings=one)
    run.run(arrivals, decodes, 40.0)
    answered = Counter(run.states)[simulation.ANSWERED] - one.queue_limit  # those that are in the queue at the end
    assert answered / 40 == pytest.approx(one.capacity, rel=0.01)
    assert max(run.latencies) == pytest.approx(one.queue_limit / one.capacity, rel=0.04)
    assert run.busy / run.available == pytest.approx(1.0, rel=0.001)


@pytest.mark.parametrize(
    ("overhead", "image"), [(0.004, 0.01525), (0.0, 0.01), (0.02, 0.002), (0.001, 0.001), (0.1, 0.1)]
)
def test_the_batch_size_is_the_one_that_the_package_chooses(
    overhead: float, image: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def outputs(pixels: Any, output: str) -> None:
        nonlocal now
        now += overhead + image * len(pixels)

    clock = SimpleNamespace(**dict.fromkeys(("monotonic", "perf_counter", "thread_time"), lambda: now))
    monkeypatch.setattr(batch_size, "time", clock)
    served: Any = SimpleNamespace(
        outputs=outputs, parallel_batches=True, engine=SimpleNamespace(name="torch"), input_shape=(2, 2, 3),
        preprocess=SimpleNamespace(dtype=np.uint8),
    )  # fmt: skip
    best, shared = batch_size.choose_batch_size(served, batch_size.BATCH_SIZES, seconds=math.inf)
    settings = {"batch_overhead": overhead, "image_time": image}
    assert (config(**settings, one_client=True).max_batch, config(**settings).max_batch) == (best, shared)


@pytest.mark.parametrize("balance", simulation.BALANCING)
def test_every_request_ends_once(balance: str) -> None:
    """Also with bursts, deadlines, full queues, deaths, restarts and an autoscaler."""
    settings = ReplicaConfig(deadline=0.2, max_queue=20)
    run, arrivals, decodes = small_fleet(8, 30.0, 900.0, 0.5, settings=settings, balance=balance, retries=0)
    run.cold_start, ended, finish = 5.0, Counter[int](), run._finish

    def count(request: int, state: int, now: float) -> None:
        ended[request] += 1
        finish(request, state, now)

    run._finish = count
    for slot in run.slots[:2]:
        run.at(10.0, run.crash, slot)
    run.at(1.0, run.roll, run.slots[4:], 2)
    run.at(15.0, run.autoscale, 4.0, 20)
    run.at(10.0, run.scrape)
    run.run(arrivals, decodes, 30.0)
    assert ended == dict.fromkeys(range(len(arrivals)), 1)
    assert set(run.states) == {simulation.ANSWERED, simulation.REFUSED, simulation.LATE, simulation.LOST}
    assert max(run.latencies) <= 0.2 + 1e-9
    assert not any(slot.load for slot in run.slots)
    assert len(run.slots) > 8
    assert run.history[-1][1] == len(run.slots)  # all are ready again


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (small_fleet(8, 5.0) for _ in range(2))
    assert first[0].run(*first[1:], 5.0).latencies == second[0].run(*second[1:], 5.0).latencies


def test_more_replicas_and_better_balancing_shorten_the_tail() -> None:
    def p99(replicas: int, balance: str = "two-choices") -> float:
        run, arrivals, decodes = small_fleet(replicas, balance=balance)
        run.run(arrivals, decodes, 20.0)
        return float(np.quantile(run.latencies, 0.99))

    tails = [p99(replicas) for replicas in (6, 7, 8, 10)]
    assert tails == sorted(tails, reverse=True)
    assert p99(8, "random") > p99(8, "two-choices") > p99(8, "least")


def test_bursts_lengthen_the_tail() -> None:
    tails = []
    for burst in (0.0, 0.3, 0.6):
        run, arrivals, decodes = small_fleet(burst=burst)
        tails.append(np.quantile(run.run(arrivals, decodes, 20.0).latencies, 0.99))
    assert tails == sorted(tails)


def lost_requests(balance: str, retries: int, detect: float = 2.0) -> int:
    run, arrivals, decodes = small_fleet(10, 10.0, balance=balance, retries=retries, detect=detect)
    run.at(3.0, run.crash, run.slots[0])
    return Counter(run.run(arrivals, decodes, 10.0).states)[simulation.LOST]


def test_a_dead_replica_attracts_requests_if_the_fewest_connections_win() -> None:
    assert lost_requests("least", 0) > 3 * lost_requests("round-robin", 0) > 3 * 2 * 60 * 0.9
    assert lost_requests("round-robin", 0, detect=0.0) < 20  # only those in progress


def test_one_retry_loses_no_request_of_a_dead_replica() -> None:
    assert [lost_requests(balance, 1) for balance in simulation.BALANCING] == [0, 0, 0, 0]


def test_a_rolling_restart_loses_nothing_and_replaces_every_replica() -> None:
    run, arrivals, decodes = small_fleet(10, 20.0, cold_start=2.0)
    before = [slot.replica for slot in run.slots]
    run.at(1.0, run.roll, list(run.slots), 2)
    run.run(arrivals, decodes, 20.0)
    assert set(run.states) == {simulation.ANSWERED}
    assert not {slot.replica for slot in run.slots} & {*before, None}
    assert min(count for _, count in run.history[10:]) == 8


def test_the_autoscaler_adds_what_the_queue_asks_for_and_at_most_doubles_in_30_seconds() -> None:
    run, *_ = small_fleet(4, 100.0)
    run.seconds, run.scraped = 100.0, [200, 240, 280]
    run.autoscale(60.0, 16.0, 100)
    assert len(run.slots) == 8  # ceil(240 / 16) = 15, but twice 4 in 30 s
    run.autoscale(75.0, 16.0, 100)
    assert len(run.slots) == 8
    run.autoscale(90.0, 16.0, 100)
    assert len(run.slots) == 15
    run.scraped = [4 * 17] * 3  # within a tenth of the target, in 4 replicas that are ready
    run.autoscale(150.0, 16.0, 100)
    assert len(run.slots) == 15


def test_the_table_has_a_row_for_each_number_of_replicas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rate", "300", "--seconds", "3", "--replicas", "3,4", "--image-time", "0.01")
    monkeypatch.setattr(sys, "argv", ["fleet.py", *options])
    fleet.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[2:]] == ["3", "4"]
    assert {line[0] for line in lines[2:]} == {"two-choices"}
