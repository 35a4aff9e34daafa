"""A pool of processes that form a gloo group, started once and reused by many tests.

    with Processes(4) as processes:
        results = processes.run(function, "argument", world=2)   # one result from each of two processes

Importing torch takes seconds, so one process imports it and all others are forked from it.
Each run has a fresh torchrun-like environment (RANK, WORLD_SIZE, ...), in which `DistributedContext.from_env("cpu")`
creates the group. Functions are looked up by file and name: they must be defined at module level,
and their arguments and results must pickle.
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
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0
"""Seconds after which a run counts as hung."""
PRELOADED = ["vitrail.training.loop", "sklearn.datasets", "torch._dynamo", "torch.distributed.checkpoint", "pytest"]

# Some machines report AMX but crash when it is used; bfloat16 products do not need it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class Processes:
    """A pool of `count` worker processes, restarted after a failure."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.workers: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *args: Any, world: int | None = None, allow_failures: bool = False
    ) -> list[Any]:
        """Call `function(*args)` in each of `world` processes; returns the results in rank order.

        The first exception of a process is raised here, with its traceback. With `allow_failures`, processes
        may exit or raise: their results are then the exit code or the exception.
        """
        self._start()
        world, port = world or self.count, free_port()
        for rank, (_, pipe) in enumerate(self.workers[:world]):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            pipe.send_bytes(pickle.dumps((environment, _file_of(function), function.__name__, args)))
        results = self._collect(world, allow_failures)
        if allow_failures and any(isinstance(r, BaseException | int) for r in results):
            self.close()
        return results

    def _start(self) -> None:
        if self.workers:
            return
        for _ in range(self.count):
            parent_end, child_end = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(child_end,), daemon=True)
            process.start()
            child_end.close()
            self.workers.append((process, parent_end))

    def _collect(self, world: int, allow_failures: bool) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < world:
            pending = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world]) if rank not in results}
            ready = wait(list(pending), timeout=deadline - time.monotonic())
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(pending.values())} of {world} hang")
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    results[rank], error_text = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    process = self.workers[rank][0]
                    process.join()
                    results[rank], error_text = process.exitcode, f"exited with code {process.exitcode}"
                if error_text and not allow_failures:
                    self.close()
                    raise AssertionError(f"rank {rank} of {world}: {error_text}")
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.terminate()
            process.join()
        self.workers = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _file_of(function: Callable[..., Any]) -> str:
    return str(sys.modules[function.__module__].__file__)


def _serve(pipe: Connection) -> None:
    """Main loop of a worker: call the functions it receives until the pipe is closed."""
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
                response: tuple[Any, str] = (getattr(modules[file], name)(*args), "")
        except BaseException as error:
            response = (error, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send_bytes(_pickled(*response))


def _pickled(result: Any, error_text: str) -> bytes:
    try:
        return pickle.dumps((result, error_text))
    except Exception:  # some exceptions cannot be pickled, but their text can
        return pickle.dumps((RuntimeError(str(result)), error_text or f"the result cannot be pickled: {result!r}"))


def _module(file: str) -> ModuleType:
    """Import a module by its file, because only pytest can resolve the names of test modules."""
    spec = importlib.util.spec_from_file_location(f"sent_{abs(hash(file))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
