"""Processes that compute together over gloo, started once and used for many checks.

    with Processes(4) as processes:
        results = processes.run(function, "argument", world=2)   # one result from each of two processes

Importing torch takes seconds, so one process imports it and every other is forked from that one.
Each run has a fresh torchrun-like environment (RANK, WORLD_SIZE, ...), in which `DistributedContext.from_env("cpu")`
makes the group. A function is found again by its file and name: it must stand at the top of a
module, and its arguments and result must pickle.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 120.0
"""Seconds until a run is given up as hung."""
PRELOADED = ["vitrail.train.loop", "sklearn.datasets", "torch._dynamo", "torch.distributed.checkpoint", "pytest"]

# Some machines say that they have AMX and die of using it; bfloat16 products need no more than this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class Processes:
    """`count` processes, waiting. After a failure they are replaced by new ones."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.workers: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *args: Any, world: int | None = None, survivors: bool = False
    ) -> list[Any]:
        """What `function(*args)` returns in each of `world` processes, in the order of their ranks.

        The first that raises makes this raise, with its traceback. With `survivors`, processes may
        die or raise: the place of one then holds its exit code or its exception.
        """
        self._start()
        world, port = world or self.count, free_port()
        for rank, (_, pipe) in enumerate(self.workers[:world]):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            pipe.send_bytes(pickle.dumps((environment, _file_of(function), function.__name__, args)))
        results = self._collect(world, survivors)
        if survivors and any(isinstance(r, BaseException | int) for r in results):
            self.close()
        return results

    def _start(self) -> None:
        if self.workers:
            return
        for _ in range(self.count):
            here, there = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))

    def _collect(self, world: int, survivors: bool) -> list[Any]:
        results: dict[int, Any] = {}
        until = time.monotonic() + PATIENCE
        while len(results) < world:
            left = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world]) if rank not in results}
            ready = wait(list(left), timeout=until - time.monotonic())
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(left.values())} of {world} hang")
            for pipe in ready:
                rank = left[pipe]  # type: ignore[index]
                try:
                    results[rank], words = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    process = self.workers[rank][0]
                    process.join()
                    results[rank], words = process.exitcode, f"it ended with exit code {process.exitcode}"
                if words and not survivors:
                    self.close()
                    raise AssertionError(f"rank {rank} of {world}: {words}")
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.terminate()
            process.join()
        self.workers = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _file_of(function: Callable[..., Any]) -> str:
    return str(sys.modules[function.__module__].__file__)


def _serve(pipe: Connection) -> None:
    """A process's life: do what it is sent, until nothing more can come."""
    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            environment, file, name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        os.environ.update({k: str(v) for k, v in environment.items()}, MASTER_ADDR="127.0.0.1")
        try:
            modules[file] = modules.get(file) or _module(file)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")  # Inductor's own
                answer: tuple[Any, str] = (getattr(modules[file], name)(*args), "")
        except BaseException as error:
            answer = (error, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send_bytes(_pickled(*answer))


def _pickled(result: Any, words: str) -> bytes:
    try:
        return pickle.dumps((result, words))
    except Exception:  # some errors hold on to what cannot travel; their words can
        return pickle.dumps((RuntimeError(str(result)), words or f"the result cannot be pickled: {result!r}"))


def _module(file: str) -> ModuleType:
    """Test modules have names that only pytest can resolve, so they are found by their file."""
    spec = importlib.util.spec_from_file_location(f"sent_{abs(hash(file))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
