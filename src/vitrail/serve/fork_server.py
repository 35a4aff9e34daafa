"""A process with everything imported that forks worker processes within milliseconds.

multiprocessing has a fork server too, but its children import the main module: a script that starts a service outside
`if __name__ == "__main__"` would run again and fail to listen at the same address.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable

COMMAND = "import sys; sys.path[:] = sys.argv[4:]; from vitrail.serve.fork_server import main; main(*sys.argv[1:4])"
INT64 = struct.Struct("q")
REPLY_TIMEOUT_S = 60
"""Timeout of a reply, including the imports at startup."""
FORK_REQUEST = 0
"""Request to fork, sent with a file descriptor; any other number is the id of a process to kill."""


class ForkServer:
    """Client of the fork server process, which is started on first use and restarted if it dies. Thread-safe.

    The process and all its children exit when this process does, even if that is killed.
    """

    def __init__(self, module: str, function: str) -> None:
        """The function of a module that each child runs with its pipe; the server imports the module."""
        self.target = module, function
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, pipe: Connection) -> int:
        """Fork a process that runs the function with the pipe; returns its id. Raises OSError if that fails."""
        with self._lock:
            for last in (False, True):
                try:
                    pid = self._request(FORK_REQUEST, [pipe.fileno()])
                    break
                except OSError:  # the server died, or cannot be started
                    self._close()
                    if last:
                        raise
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def kill(self, pid: int) -> int | None:
        """Kill a forked process if it still runs; returns its exit code (negative signal number), if known."""
        with self._lock:
            if self._control is None:
                return None
            try:
                status = self._request(pid)
            except OSError:
                self._close()
                return None
        return None if status < 0 else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _request(self, number: int, descriptors: list[int] | None = None) -> int:
        control = self._control or self._start()
        socket.send_fds(control, [INT64.pack(number)], descriptors or [])
        reply = control.recv(INT64.size)
        if len(reply) < INT64.size:
            raise ConnectionResetError("the fork server has exited")
        return int(INT64.unpack(reply)[0])

    def _start(self) -> socket.socket:
        control, other = socket.socketpair()
        with other:
            command = [get_executable(), "-c", COMMAND, str(other.fileno()), *self.target, *sys.path]
            try:  # own process group: not interrupted by Ctrl-C
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], process_group=0
                )
            except BaseException:
                control.close()
                raise
        control.settimeout(REPLY_TIMEOUT_S)
        self._control = control
        return control

    def _close(self) -> None:
        control, process, self._control, self._process = self._control, self._process, None, None
        if control is not None:
            control.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.kill()
            process.wait()


def main(descriptor: str, module: str, function: str) -> None:
    """Main function of the fork server process."""
    for sig in (signal.SIGINT, signal.SIGTERM):  # signals sent to the whole group: the service decides when to stop
        signal.signal(sig, signal.SIG_IGN)
    work = getattr(importlib.import_module(module), function)
    children: set[int] = set()
    with socket.socket(fileno=int(descriptor)) as control, contextlib.suppress(OSError):
        while True:
            message, descriptors, *_ = socket.recv_fds(control, INT64.size, 1)
            if len(message) < INT64.size:
                break
            if descriptors:
                reply = _fork_child(control, descriptors[0], work)
                if reply > 0:
                    children.add(reply)
            else:
                reply = _kill_child(INT64.unpack(message)[0], children)
            control.sendall(INT64.pack(reply))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork_child(control: socket.socket, descriptor: int, work: Callable[[Connection], None]) -> int:
    """Id of the new process, or a negative errno."""
    try:
        pid = os.fork()
    except OSError as error:
        os.close(descriptor)
        return -(error.errno or 1)
    if pid:
        os.close(descriptor)
        return pid
    status = 1
    try:
        control.close()
        work(Connection(descriptor))
        status = 0
    finally:
        os._exit(status)


def _kill_child(pid: int, children: set[int]) -> int:
    """Kill a child; returns its wait status, or -1 if it is not a child of this process."""
    if pid not in children:
        return -1
    children.remove(pid)
    os.kill(pid, signal.SIGKILL)  # no effect on a zombie
    return os.waitpid(pid, 0)[1]
