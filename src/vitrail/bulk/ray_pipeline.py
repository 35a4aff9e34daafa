"""Parts on a Ray cluster: a Ray Data pipeline from part numbers to summaries.

Each actor opens the model and the data once, then reads, decodes, computes and writes part after part itself. Only part
numbers and summaries pass through the driver and the object store, so their memory does not grow with the images. Ray
restarts actors that die and gives their parts to others.
"""

from __future__ import annotations

import importlib
import json
import logging
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vitrail.bulk.job import Job, OpenJob
from vitrail.bulk.parts import Part
from vitrail.bulk.ray_session import connect
from vitrail.errors import ConfigError, TrainError, VitrailError, first_line
from vitrail.runtime import warn_once
from vitrail.runtime.ray_cluster import import_ray
from vitrail.storage.part_folder import Manifest, PartFolder

MAX_ATTEMPTS = 5
"""Number of times that a part may end its actor; memory that runs out would otherwise be tried forever."""
PARTS_PER_TASK = 4
"""Consecutive parts that an actor with several cores or a GPU computes without a pause."""


@dataclass(frozen=True)
class ActorPlan:
    """The actors of a pipeline."""

    count: int
    cores: int
    """CPU cores of each."""
    gpus: int = 0
    """GPUs of each."""


def plan_actors(nodes: Sequence[Mapping[str, float]], device: str, threads: int, count: int | None) -> ActorPlan:
    """Divide the nodes among `count` actors, by default one for each GPU, or on CPUs one for each `threads` cores.

    `nodes`: CPU and GPU of each node.
    """
    if device == "cuda":
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        if gpus < (count or 1):
            raise ConfigError(
                f"--actors {count or 1} on GPUs: the cluster has {gpus}; try --device cpu or fewer actors."
            )
        cores = min(int(node["CPU"] // node["GPU"]) for node in nodes if node.get("GPU"))
        return ActorPlan(count or gpus, max(cores, 1), 1)
    cores_of = [int(node.get("CPU", 0)) for node in nodes]
    fitting = sum(cores // threads for cores in cores_of)
    if fitting < (count or 1):
        raise ConfigError(
            f"--actors {count or 1} with --threads {threads}: the cluster has {sum(cores_of)} CPU cores, enough for "
            f"{fitting}; try fewer."
        )
    count = count or fitting
    most = max(c for c in range(threads, max(cores_of) + 1) if sum(cores // c for cores in cores_of) >= count)
    return ActorPlan(count, most)


class RayExecutor:
    """Computes and writes parts on a Ray cluster; a context manager that connects to it."""

    def __init__(self, job: Job, address: str, actors: int | None, device: str, per_machine: bool = False) -> None:
        """`per_machine`: start one actor on each machine by default, whose engine uses all of its cores."""
        if job.model is None:
            raise ConfigError("Ray's actors load the model themselves; pass its file, folder or name.")
        self.job, self.address, self.actors, self.requested_device = job, address, actors, device
        self.per_machine = per_machine
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        import_ray()
        self.nodes = self._stack.enter_context(connect(self.address))
        on_gpus = any(node.get("GPU") for node in self.nodes)
        self.device = ("cuda" if on_gpus else "cpu") if self.requested_device == "auto" else self.requested_device
        if self.device not in ("cpu", "cuda"):
            self._stack.close()
            raise ConfigError(f"--device {self.device} with --on ray: expected auto, cpu or cuda.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __call__(self, folder: PartFolder, numbers: Sequence[int], advance: Callable[[int], None]) -> None:
        machines = sum(node.get("CPU", 0) >= self.job.threads for node in self.nodes) if self.per_machine else None
        plan = plan_actors(self.nodes, self.device, self.job.threads, self.actors or machines)
        size = 1 if plan.cores == 1 else min(PARTS_PER_TASK, -(-len(numbers) // plan.count))
        tasks = [list(numbers[i : i + size]) for i in range(0, len(numbers), size)]
        if len(tasks) < plan.count and self.actors is None:
            plan = plan_actors(self.nodes, self.device, self.job.threads, len(tasks))
        folder.forget_attempts()
        described = {
            "job": self.job.for_other_processes(), "manifest": folder.manifest, "folder": folder.path.absolute(),
            "cores": plan.cores, "device": self.device,
        }  # fmt: skip
        for row in _rows_through_client(tasks, described, plan):
            if row["error"]:
                raise TrainError(row["error"])
            folder.note_processor(row["processor"])
            for key, reason in json.loads(row["unreadable"]).items():
                warn_once([f"{key} cannot be used: {reason}"], about=self.job.data.source)
            advance(row["num_images"])


def _rows_through_client(
    tasks: Sequence[list[int]], described: Mapping[str, Any], plan: ActorPlan
) -> Iterator[dict[str, Any]]:
    """`_rows`; through a Ray Client server, which cannot run Ray Data, by an actor on the cluster."""
    ray = import_ray()
    if not ray.util.client.ray.is_connected():
        yield from _rows(tasks, described, plan)
        return
    driver = ray.remote(num_cpus=0)(ClusterDriver).remote(tasks, described, plan)
    while (row := ray.get(driver.next_row.remote())) is not None:
        yield row


class ClusterDriver:
    """Runs the pipeline in an actor, for a client that asks for row after row."""

    def __init__(self, tasks: Sequence[list[int]], described: Mapping[str, Any], plan: ActorPlan) -> None:
        self.rows = _rows(tasks, described, plan)

    def next_row(self) -> dict[str, Any] | None:
        """The next row, or None at the end."""
        return next(self.rows, None)


def _rows(tasks: Sequence[list[int]], described: Mapping[str, Any], plan: ActorPlan) -> Iterator[dict[str, Any]]:
    """A row for each part as it is written, or for an error."""
    ray, data = import_ray(), importlib.import_module("ray.data")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors of actors come back as rows
    context = data.DataContext.get_current()
    context.enable_progress_bars, context.print_on_execution_start = False, False
    source = data.from_items([{"numbers": numbers} for numbers in tasks], override_num_blocks=len(tasks))
    rows = source.flat_map(
        PartActor,
        fn_constructor_kwargs=described,
        compute=data.ActorPoolStrategy(size=min(plan.count, len(tasks))),
        num_cpus=plan.cores,
        num_gpus=plan.gpus or None,
    )
    try:
        yield from rows.iter_rows()
    except ray.exceptions.RayError as error:
        raise TrainError(
            f"the Ray cluster stopped the run ({first_line(error)}); run the same command again to continue."
        ) from error


class PartActor:
    """Computes and writes parts in a process of a Ray cluster."""

    def __init__(self, job: Job, manifest: Manifest, folder: Path, cores: int, device: str) -> None:
        self.job, self.folder, self.cores, self.device = job, PartFolder(folder, manifest), cores, device
        self.opened: OpenJob | None = None

    def __call__(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Part numbers -> a summary of each part; an error is a row, too, since Ray would add pages to it."""
        try:
            return list(self._write([int(number) for number in row["numbers"]]))
        except VitrailError as error:
            return [_summary(error=str(error))]
        except Exception as error:
            traceback.print_exc()  # to the log of the actor, which a cluster keeps
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}, line {last.lineno}, on {socket.gethostname()}"
            return [_summary(error=f"an actor failed with {type(error).__name__}: {first_line(error)} ({where}).")]

    def _write(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        job = self.opened = self.opened or self._open()
        done = set(numbers) - set(self.folder.missing(numbers))  # by this task, in an actor that died
        for number in numbers:
            if number in done:
                yield _summary(len(job.parts[number]))
            elif self.folder.count_attempt(number) > MAX_ATTEMPTS:
                raise TrainError(
                    f"part {number} ended its actor {MAX_ATTEMPTS} times, perhaps for lack of memory; try a smaller "
                    "--batch-size or fewer --actors, and run the same command again to continue."
                )
        readers = 0 if self.cores == 1 and not job.on_gpu else self.cores
        wanted: list[Part] = [job.parts[number] for number in numbers if number not in done]
        for computed in job.computer(self.cores, readers).compute(wanted):
            part = computed.part
            self.folder.write_part(part.number, computed.table, len(part), computed.unreadable)
            self.folder.forget_attempts(part.number)
            yield _summary(len(part), unreadable=computed.unreadable, processor=job.processor(self.device))

    def _open(self) -> OpenJob:
        """Open the model and the data, and check that they are the driver's."""
        host, manifest = socket.gethostname(), self.folder.manifest
        if not self.folder.path.is_dir():
            raise ConfigError(f"{host} does not see {self.folder.path}; choose an --out that all machines share.")
        assert self.job.model is not None
        opened = self.job.open(self.job.model.open(self.device))
        opened.check_same(manifest, self.device, host)
        return opened


def _summary(
    num_images: int = 0, *, unreadable: Mapping[str, str] | None = None, processor: str = "", error: str = ""
) -> dict[str, Any]:
    listed = json.dumps(dict(unreadable or {}))
    return {"num_images": num_images, "unreadable": listed, "processor": processor, "error": error}
