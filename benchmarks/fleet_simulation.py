"""Discrete-event simulation of processes of `vitrail serve` behind a load balancer (fleet.py).

ReplicaConfig    a process: cores, seconds of work of a request, limits
Replica, Slot    a running process; its place in the fleet, which may be empty
Fleet            the balancer, the stages of a request in a replica, and replicas that crash, restart or are added
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.serve.batch_size import BATCH_SIZES, MAX_SHARED_BATCH_S, MIN_GAIN
from vitrail.serve.limits import BatchingConfig
from vitrail.serve.quota import default_client_limit

BALANCING = ("random", "round-robin", "least", "two-choices")
SCRAPE_S, AVERAGED_S, DOUBLE_S = 10.0, 30.0, 30.0
"""Of deploy/: Prometheus reads the queue, the adapter averages it, and the autoscaler at most doubles the replicas."""
AUTOSCALE_S, TOLERANCE = 15.0, 0.1
"""Of Kubernetes: the period of the autoscaler, and the relative excess that it ignores."""
INTERPRETER, DECODE, ENGINE = range(3)  # stages of a request
OPEN, ANSWERED, REFUSED, LATE, LOST = range(5)  # states of a request


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """One process: its cores, what a request costs in seconds of a core, and its limits."""

    cores: int = 2
    interpreter: float = 0.0
    """Seconds of each request during which all others wait for the Python interpreter."""
    decode: float = 0.0014
    decode_sigma: float = 0.12
    """Of the decode times, log-normal."""
    batch_overhead: float = 0.004
    """a: seconds of a batch of any size."""
    image_time: float = 0.01525
    """b: seconds of each image in a batch."""
    engine_threads: int = 2
    gpu: bool = False
    """Whether batches leave the cores to the other stages."""
    max_queue: int = BatchingConfig.max_queue
    batch_delay: float = BatchingConfig.batch_delay
    deadline: float = math.inf
    """Seconds from the arrival, as X-Deadline-Ms."""
    speed_sigma: float = 0.1
    """Of the speeds of replicas, log-normal: machines differ, and so do their neighbors."""
    one_client: bool = False
    """Whether all requests count as one client, as behind a proxy that is not a --trusted-proxy."""

    @property
    def queue_limit(self) -> int:
        return default_client_limit(self.max_queue) if self.one_client else self.max_queue

    @property
    def max_batch(self) -> int:
        """What `choose_batch_size` chooses for these times."""
        times = {size: self.batch_overhead / size + self.image_time for size in BATCH_SIZES}
        best = next(size for size in BATCH_SIZES if times[size] * (1 - MIN_GAIN) <= min(times.values()))
        short = [size for size in BATCH_SIZES if size <= best and size * times[size] <= MAX_SHARED_BATCH_S]
        return best if self.one_client else max(short, default=BATCH_SIZES[0])

    @property
    def capacity(self) -> float:
        """Requests per second with full batches, at mean speed."""
        engine = self.batch_overhead / self.max_batch + self.image_time
        on_cores = self.interpreter + self.decode + (0.0 if self.gpu else engine)
        stages = ((self.cores, on_cores), (1, self.interpreter), (self.engine_threads, engine))
        return min(threads / seconds for threads, seconds in stages if seconds)


class Replica:
    """A running process: the requests of each stage, and the tasks that share its cores."""

    def __init__(self, config: ReplicaConfig, speed: float, now: float) -> None:
        self.cores, self.speed = config.cores, speed
        self.idle = [1, config.cores, config.engine_threads]  # threads, by stage
        self.queues: list[deque[int]] = [deque(), deque(), deque()]
        self.requests: set[int] = set()
        self.tasks: list[tuple[float, int, int, Sequence[int]]] = []  # (end in work time, number, stage, requests)
        self.work_time, self.updated, self.started, self.busy = 0.0, now, now, 0.0
        """work_time: seconds of its work that each task has done; busy: core seconds used."""
        self.planned = 0  # number of the event that ends the first task
        self.batch_due: float | None = None
        """When an incomplete batch starts although images are being decoded."""
        self.dead = False

    def advance(self, now: float) -> None:
        if self.tasks:
            core_seconds = (now - self.updated) * min(len(self.tasks), self.cores)
            self.work_time += core_seconds / len(self.tasks) * self.speed
            self.busy += core_seconds
        self.updated = now


class Slot:
    """A place in the fleet: its process, if one runs, and whether the balancer sends requests there."""

    def __init__(self, speed: float) -> None:
        self.speed, self.listed = speed, False
        self.replica: Replica | None = None

    @property
    def load(self) -> int:
        return len(self.replica.requests) if self.replica else 0


class Fleet:
    """The simulation. `at` schedules what happens to replicas; then call `run` once."""

    def __init__(
        self, config: ReplicaConfig, replicas: int, balance: str = "two-choices", *, seed: int = 0, retries: int = 1,
        detect: float = 4.0, cold_start: float = 20.0,
    ) -> None:  # fmt: skip
        """retries: further replicas that a request is sent to when its connection fails.

        detect: seconds until the balancer stops sending requests to a dead replica.
        cold_start: seconds until a new process is ready.
        """
        self.config, self.balance, self.rng, self.retries = config, balance, random.Random(seed), retries
        self.detect, self.cold_start = detect, cold_start
        self.slots: list[Slot] = []
        self.listed: list[Slot] = []
        self.history: list[tuple[float, int]] = []  # (time, replicas that get requests)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = self.turn = self.batches = self.batched = 0
        self.busy = self.available = 0.0  # core seconds
        self.scraped: list[int] = []  # sums of the queues
        self.sizes = [(0.0, replicas)]  # (time, replicas), also those that start
        for _ in range(replicas):
            self.slots.append(self._slot())
            self._set(0.0, self.slots[-1], True)

    def at(self, time: float, function: Callable[..., None], *values: Any) -> int:
        """Call function(time, *values) at this time; returns the number of the event."""
        self.number += 1
        heapq.heappush(self.events, (time, self.number, function, values))
        return self.number

    def run(self, arrivals: npt.ArrayLike, decodes: npt.ArrayLike, seconds: float, clients: int = 0) -> Fleet:
        """Simulate until all requests have ended. decodes: seconds of each request.

        clients: that many clients send the next request after each answer, for `seconds`, in place of `arrivals`.
        """
        self.arrivals: list[float] = [0.0] * clients or np.asarray(arrivals).tolist()
        self.decodes: list[float] = np.asarray(decodes).tolist()
        self.states, self.latencies = [OPEN] * len(self.arrivals), [0.0] * len(self.arrivals)
        self.slot_of: list[Slot | None] = [None] * len(self.arrivals)
        self.seconds, self.clients = seconds, clients
        self.at(seconds, lambda now: self._account(now, *(slot.replica for slot in self.slots if slot.replica)))
        arrived = oldest = 0
        while self.events or arrived < len(self.arrivals):
            now = self.events[0][0] if self.events else math.inf
            arrives = arrived < len(self.arrivals) and self.arrivals[arrived] <= now
            now = self.arrivals[arrived] if arrives else now
            while oldest < arrived and self.arrivals[oldest] + self.config.deadline <= now:
                if self.states[oldest] == OPEN:
                    self._finish(oldest, LATE, self.arrivals[oldest] + self.config.deadline)
                oldest += 1
            if arrives:
                self._send(arrived, now, ())
                arrived += 1
            else:
                _, _, function, values = heapq.heappop(self.events)
                function(now, *values)
        return self

    # Requests

    def _send(self, request: int, now: float, tried: tuple[Slot, ...]) -> None:
        """Give a request to a replica; `tried`: where its connection failed."""
        if len(tried) > self.retries or all(slot in tried for slot in self.listed):
            return self._finish(request, LOST if tried else REFUSED, now)
        slot = self._choose(tried)
        if slot.replica is None:
            return self._send(request, now, (*tried, slot))
        if len(slot.replica.requests) >= self.config.queue_limit:
            return self._finish(request, REFUSED, now)
        slot.replica.requests.add(request)
        self.slot_of[request] = slot
        slot.replica.queues[INTERPRETER if self.config.interpreter else DECODE].append(request)
        self._start(slot.replica, now)

    def _choose(self, tried: tuple[Slot, ...]) -> Slot:
        slots, count = self.listed, len(self.listed)
        if self.balance in ("random", "two-choices"):
            slots = [slot for slot in slots if slot not in tried] if tried else slots
            first = int(self.rng.random() * len(slots))
            if self.balance == "random" or len(slots) == 1:
                return slots[first]
            second = (first + 1 + int(self.rng.random() * (len(slots) - 1))) % len(slots)
            return min(slots[first], slots[second], key=lambda slot: slot.load)
        self.turn = (self.turn + 1) % count
        if self.balance == "least":  # equal ones in turn
            loads = [slot.load if slot not in tried else math.inf for slot in slots]
            least = min(loads)
            self.turn = loads.index(least, self.turn if least in loads[self.turn :] else 0)
        while slots[self.turn] in tried:
            self.turn = (self.turn + 1) % count
        return slots[self.turn]

    def _finish(self, request: int, state: int, now: float) -> None:
        self.states[request], self.latencies[request] = state, now - self.arrivals[request]
        slot = self.slot_of[request]
        if slot is not None and slot.replica is not None:
            slot.replica.requests.discard(request)
        if self.clients and now < self.seconds:
            self.arrivals.append(now)
            self.states.append(OPEN)
            self.latencies.append(0.0)
            self.slot_of.append(None)

    # Stages of a replica

    def _start(self, replica: Replica, now: float) -> None:
        """Start what idle threads can do, then plan the end of the first task."""
        if replica.dead:
            return
        replica.advance(now)
        config, (parsing, waiting, ready), idle = self.config, replica.queues, replica.idle
        for stage, queue in ((INTERPRETER, parsing), (DECODE, waiting)):
            while queue and idle[stage]:
                request = queue.popleft()
                if self.states[request] == OPEN:
                    decode = self.decodes[request % len(self.decodes)]
                    self._add_task(replica, config.interpreter if stage == INTERPRETER else decode, stage, (request,))
        while ready and idle[ENGINE]:
            if len(ready) < config.max_batch and (waiting or idle[DECODE] < config.cores):
                if replica.batch_due is None:
                    replica.batch_due = now + config.batch_delay
                    self.at(replica.batch_due, lambda now: self._start(replica, now))
                if now < replica.batch_due:
                    break
            self._start_batch(replica, now)
        if not ready or not idle[ENGINE]:
            replica.batch_due = None
        if replica.tasks:
            left = max(replica.tasks[0][0] - replica.work_time, 0.0) * max(len(replica.tasks) / config.cores, 1.0)
            replica.planned = self.at(now + left / replica.speed, self._end_task, replica, self.number + 1)

    def _start_batch(self, replica: Replica, now: float) -> None:
        ready, batch = replica.queues[ENGINE], []
        full = self.config.batch_overhead + self.config.image_time * self.config.max_batch
        ends = now + full / replica.speed
        while ready and len(batch) < self.config.max_batch:
            request = ready.popleft()
            in_time = self.arrivals[request] + self.config.deadline >= (ends if ready else now)
            if self.states[request] == OPEN and in_time:
                batch.append(request)
        if batch:
            self.batches, self.batched = self.batches + 1, self.batched + len(batch)
            seconds = self.config.batch_overhead + self.config.image_time * len(batch)
            if self.config.gpu:
                replica.idle[ENGINE] -= 1
                self.at(now + seconds / replica.speed, self._end_batch, replica, batch)
            else:
                self._add_task(replica, seconds, ENGINE, batch)

    def _add_task(self, replica: Replica, seconds: float, stage: int, requests: Sequence[int]) -> None:
        replica.idle[stage] -= 1
        self.number += 1
        heapq.heappush(replica.tasks, (replica.work_time + seconds, self.number, stage, requests))

    def _end_task(self, now: float, replica: Replica, number: int) -> None:
        if replica.dead or number != replica.planned:  # the tasks have changed
            return
        replica.advance(now)
        replica.work_time, _, stage, requests = heapq.heappop(replica.tasks)
        if stage == ENGINE:
            return self._end_batch(now, replica, requests)
        replica.idle[stage] += 1
        if self.states[requests[0]] == OPEN:
            replica.queues[stage + 1].append(requests[0])
        self._start(replica, now)

    def _end_batch(self, now: float, replica: Replica, batch: Sequence[int]) -> None:
        if not replica.dead:
            replica.idle[ENGINE] += 1
            for request in batch:
                if self.states[request] == OPEN:
                    self._finish(request, ANSWERED, now)
            self._start(replica, now)

    # Replicas that come and go

    def _slot(self) -> Slot:
        sigma = self.config.speed_sigma
        return Slot(self.rng.lognormvariate(-sigma * sigma / 2, sigma))

    def _boot(self, now: float, slot: Slot) -> None:
        """Start a process; it gets requests when it is ready."""
        self.at(now + self.cold_start, self._set, slot, True)

    def _set(self, now: float, slot: Slot, ready: bool) -> None:
        """Start or stop the requests to a place."""
        if ready:
            slot.replica = Replica(self.config, slot.speed, now)
        slot.listed = ready
        self.listed = [one for one in self.slots if one.listed]
        self.history.append((now, len(self.listed)))

    def crash(self, now: float, slot: Slot) -> None:
        """A process dies and is started again. Requests reach its place until the balancer notices."""
        requests = sorted(slot.replica.requests) if slot.replica else []
        self._stop(now, slot)
        self.at(now + self.detect, self._notice, slot)
        for request in requests:
            self.slot_of[request] = None
            self._send(request, now, (slot,))

    def _notice(self, now: float, slot: Slot) -> None:
        if slot.replica is None:
            self._set(now, slot, False)

    def drain(self, now: float, slot: Slot) -> None:
        """Send a replica no more requests; when it has answered those that it has, start it again."""
        if slot.listed:
            self._set(now, slot, False)
        if slot.load:
            self.at(now + 0.1, self.drain, slot)
        else:
            self._stop(now, slot)

    def _stop(self, now: float, slot: Slot) -> None:
        if slot.replica is not None:
            self._account(now, slot.replica)
            slot.replica.dead, slot.replica = True, None
            self._boot(now, slot)

    def roll(self, now: float, left: Sequence[Slot], group: int, restarting: Sequence[Slot] = ()) -> None:
        """Restart replicas in groups; a group follows when the one before is ready."""
        if all(slot.listed for slot in restarting):
            restarting, left = left[:group], left[group:]
            for slot in restarting:
                self.drain(now, slot)
        if restarting:
            self.at(now + 0.5, self.roll, left, group, restarting)

    def autoscale(self, now: float, target: float, most: int) -> None:
        """Kubernetes' rule: as many replicas as the sum of their queues over the target.

        It only adds replicas; Kubernetes removes none within 300 s.
        """
        queue = float(np.mean(self.scraped[-round(AVERAGED_S / SCRAPE_S) :] or [0]))
        before = next(size for time, size in reversed(self.sizes) if time <= max(now - DOUBLE_S, 0.0))
        if queue > (1 + TOLERANCE) * target * len(self.listed):
            for _ in range(min(math.ceil(queue / target), 2 * before, most) - len(self.slots)):
                self.slots.append(self._slot())
                self._boot(now, self.slots[-1])
        self.sizes.append((now, len(self.slots)))
        if now < self.seconds:
            self.at(now + AUTOSCALE_S, self.autoscale, target, most)

    def scrape(self, now: float) -> None:
        self.scraped.append(sum(slot.load for slot in self.listed))
        if now < self.seconds:
            self.at(now + SCRAPE_S, self.scrape)

    def _account(self, now: float, *replicas: Replica) -> None:
        """Add the core seconds of processes that end, or that run when the last requests arrive."""
        for replica in replicas if now <= self.seconds else ():
            replica.advance(now)
            self.busy += replica.busy
            self.available += (now - replica.started) * self.config.cores
