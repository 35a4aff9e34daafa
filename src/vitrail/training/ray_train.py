"""`vitrail train --on ray`: the processes of a run are workers of Ray Train, which starts them again after a failure.

    runs/digits/ray/NAME/    while the run is under way: what the main process prints, a request to stop, the outcome

Every worker gets the environment variables that torchrun sets, and calls the same function as the command without Ray,
with `auto_resume`: after a failure the run continues from its last checkpoint. The run folder has to be on a file
system that all machines share. The machine of the command shows what the main process prints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from vitrail import errors
from vitrail.errors import ConfigError, TrainError, VitrailError, first_line
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime.ray_cluster import ray_cluster
from vitrail.training.interrupt import STOP_FILE
from vitrail.training.runs import Run, finetune, train

FUNCTIONS: dict[str, Callable[..., Run]] = {"train": train, "finetune": finetune}
POLL_INTERVAL_S = 0.3
OUTPUT, STOP, OUTCOME, ERROR = "output.txt", "stop", "outcome.json", "error.json"


@dataclass(frozen=True, kw_only=True)
class RayRun:
    """A call of `train` or `finetune` on the workers of a cluster."""

    function: str
    """train or finetune."""
    arguments: dict[str, Any]
    """Its arguments, without `out`, `resume` and `auto_resume`."""
    out: str
    """The run folder; an absolute path on a shared file system."""
    resume: bool = False
    """Continue the run in the folder, whatever its settings were; else start it, or continue after a failure."""
    workers: int | None = None
    """Number of processes; None: one for each GPU of the cluster, or without GPUs one for each machine."""
    max_restarts: int = 3
    """How often the run may be started again after a failure."""
    gpu: bool = True
    """Use the GPUs of the cluster, if it has any."""
    working_folder: str = ""
    """Where the workers run, for relative paths of data."""
    scratch: str = ""
    """The folder inside the run folder for the files that the processes exchange."""
    threads: int = 0
    """CPU threads of each worker; 0: torch's default."""


def run_on_ray(address: str, spec: RayRun, **local: Any) -> Run:
    """Train on a Ray cluster and return the run, as the function would without it.

    `address`, `local`: as in `ray_cluster`. SIGINT and SIGTERM end the run after a step, with a checkpoint; a second
    Ctrl-C ends it at once.
    """
    folder = RunFolder(Path(spec.out))
    scratch = folder.path / "ray" / uuid4().hex[:8]
    with ExitStack() as stack:
        stack.callback(_delete_scratch, scratch)  # at the end, when no worker writes to it
        ray = stack.enter_context(ray_cluster(address, **local))
        resources = worker_resources(ray.nodes(), spec.workers, gpu=spec.gpu)
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            raise TrainError(f"cannot create the run folder {folder.path}: {error.strerror or error}.") from None
        stack.enter_context(_stop_on_signals(scratch / STOP))
        check_shared_folder(ray, scratch)
        found = {"scratch": str(scratch), "working_folder": os.getcwd(), "threads": resources["CPU"]}
        spec = RayRun(**asdict(spec) | found)
        task = ray.remote(num_cpus=0, max_retries=0)(_fit)
        pending = task.remote(asdict(spec), resources)
        with _Tail(scratch / OUTPUT) as output:
            while not ray.wait([pending], timeout=POLL_INTERVAL_S)[0]:
                output.show()
        try:
            ray.get(pending)
        except Exception as error:
            if not (scratch / ERROR).exists():
                raise TrainError(_describe_failure(error, folder, spec)) from error
        return _outcome(folder, scratch)


def _delete_scratch(scratch: Path) -> None:
    """Delete the folder of this command; another command for the same run may have one beside it."""
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):
        scratch.parent.rmdir()


def worker_resources(nodes: list[dict[str, Any]], workers: int | None, *, gpu: bool) -> dict[str, Any]:
    """The number of workers and the resources of each, such as {"workers": 8, "GPU": 1, "CPU": 4}.

    Every worker has the same share of the CPU cores. ConfigError if the cluster has fewer GPUs or cores than workers.
    """
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = sum(int(machine.get("GPU", 0)) for machine in machines) if gpu else 0
    kind, there = ("GPU", gpus) if gpus else ("CPU", sum(int(machine.get("CPU", 0)) for machine in machines))
    count = workers or (gpus if gpus else sum(machine.get("CPU", 0) >= 1 for machine in machines))
    name = "GPUs" if gpus else "CPU cores"
    if not 1 <= count <= there:
        raise ConfigError(f"--workers {count}: the cluster has {there} {name}; try --workers {max(there, 1)}.")

    def places(cpus: int) -> int:
        """How many workers with this number of cores fit."""
        by_cpu = [int(machine.get("CPU", 0)) // cpus for machine in machines]
        return sum(min(n, int(m.get("GPU", 0))) if gpus else n for n, m in zip(by_cpu, machines, strict=True))

    most = max(int(machine.get("CPU", 0)) for machine in machines)
    cpus = next((n for n in range(most, 0, -1) if places(n) >= count), 0)
    if gpus and not cpus:  # fewer cores than GPUs
        return {"workers": count, "GPU": 1, "CPU": 0}
    return {"workers": count, **({"GPU": 1} if kind == "GPU" else {}), "CPU": cpus}


def check_shared_folder(ray: Any, folder: Path) -> None:
    """Raise ConfigError unless every machine of the cluster sees a folder."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(os.path.isdir)
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    where = {node: {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in nodes}
    seen = dict(zip(nodes, ray.get([look.options(**where[node]).remote(str(folder)) for node in nodes]), strict=True))
    if not all(seen.values()):
        blind = ", ".join(sorted(nodes[node] for node in nodes if not seen[node]))
        raise ConfigError(
            f"{blind} does not see the run folder {folder.parent.parent}; "
            "use --out with a folder on a file system that all machines of the cluster share."
        )


def _fit(given: dict[str, Any], resources: dict[str, Any]) -> None:
    """The body of the task that runs Ray Train; it raises if the run failed more often than allowed."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.v2.api.config import LoggingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class SharedDevices(Backend):  # type: ignore[misc]
        """All workers of a machine see its GPUs, and each uses the one of its LOCAL_RANK."""

        share_cuda_visible_devices = True

    class SharedDevicesConfig(BackendConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type:
            return SharedDevices

    spec = RayRun(**given)
    per_worker = {name: count for name, count in resources.items() if name != "workers"}
    scratch = Path(spec.scratch)
    DataParallelTrainer(
        _work,
        train_loop_config=given,
        backend_config=SharedDevicesConfig(),
        scaling_config=ScalingConfig(
            num_workers=resources["workers"], use_gpu="GPU" in resources, resources_per_worker=per_worker
        ),
        run_config=RunConfig(
            name="state",
            storage_path=str(scratch),
            failure_config=FailureConfig(max_failures=spec.max_restarts),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    ).fit()


def _work(given: dict[str, Any]) -> None:
    """One process of the run."""
    from ray.train import get_context

    spec, context = RayRun(**given), get_context()
    if spec.threads:  # also where the environment says otherwise: the bits of a CPU run depend on it
        torch.set_num_threads(spec.threads)
    scratch = Path(spec.scratch)
    if (scratch / ERROR).exists():  # of the start before this one
        return
    if os.path.isdir(spec.working_folder):
        os.chdir(spec.working_folder)
    os.environ |= _rank_environment(context) | {STOP_FILE: str(scratch / STOP)}
    with ExitStack() as stack:
        if context.get_world_rank() == 0:
            output = stack.enter_context((scratch / OUTPUT).open("a", buffering=1))
            stack.enter_context(redirect_stdout(output))
            stack.enter_context(redirect_stderr(output))
            if output.tell():
                output.write("a worker failed; the run continues from its last checkpoint\n")
        mode = {"resume": True} if spec.resume else {"auto_resume": True}
        try:
            done = FUNCTIONS[spec.function](**spec.arguments, out=spec.out, **mode)
        except VitrailError as error:
            if _may_be_repeated(error):
                raise
            _write(scratch / ERROR, {"type": type(error).__name__, "message": str(error)})
            return
        if context.get_world_rank() == 0:
            _write(scratch / OUTCOME, {"stop_reason": done.stop_reason, "resume_step": done.resume_step})


def _rank_environment(context: Any) -> dict[str, str]:
    """torchrun's environment variables, from Ray Train's."""
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    address = None
    if context.get_world_rank() == 0:
        with socket.socket() as listener:
            listener.bind(("", 0))
            address = get_node_ip_address(), listener.getsockname()[1]
    host, port = broadcast_from_rank_zero(address)
    return {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _may_be_repeated(error: VitrailError) -> bool:
    """Whether another start may succeed: a process lost the others. The other errors would only be repeated."""
    return isinstance(error, TrainError) and isinstance(error.__cause__, RuntimeError)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)


def _outcome(folder: RunFolder, scratch: Path) -> Run:
    """The run as its main process has left it; raises the error with which it has ended."""
    if (scratch / ERROR).exists():
        found = json.loads((scratch / ERROR).read_text(encoding="utf-8"))
        raise getattr(errors, found["type"], TrainError)(found["message"])
    outcome = json.loads((scratch / OUTCOME).read_text(encoding="utf-8"))
    config, result = folder.read_config(), folder.read_result()
    if folder.finished and result is not None:
        return Run.from_dict(folder.path, config, result)
    return Run(folder.path, config, None, outcome["stop_reason"], resume_step=outcome["resume_step"])


def _describe_failure(error: Exception, folder: RunFolder, spec: RayRun) -> str:
    """The error message for a run that failed more often than it may be restarted."""
    causes = getattr(getattr(error, "cause", error), "worker_failures", None) or {}
    reason = first_line(next(iter(causes.values()), error))
    return (
        f"the run failed and was restarted {spec.max_restarts} times ({reason}); "
        f"resume it with: {folder.resume_command()}"
    )


class _Tail:
    """Prints what is added to a file to standard error."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0

    def __enter__(self) -> _Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self.show()

    def show(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                added = file.read()
        except FileNotFoundError:
            return
        self.position += len(added)
        sys.stderr.write(added.decode(errors="replace"))
        sys.stderr.flush()


@contextmanager
def _stop_on_signals(stop: Path) -> Iterator[None]:
    """Context in which the first SIGINT or SIGTERM is written to a file, where the main process finds it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: object) -> None:
        if stop.exists() and number == signal.SIGINT:
            raise KeyboardInterrupt
        _write(stop, {"signal": signal.Signals(number).name, "time": time.time()})

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
