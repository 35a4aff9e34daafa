"""A process that has imported everything and forks others, each within milliseconds.

multiprocessing has such a process too, but its children import the main module of the program: a script that starts
a service outside `if __name__ == "__main__"` would be run again, and would fail to listen at the same address.
"""

from __future__ import annotations

import atexit
import contextlib
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

COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from vitrail.serve.fork_server import main; main(int(sys.argv[1]))"
NUMBER = struct.Struct("q")
SECONDS = 60
"""Within which it answers, also when it still has to import everything."""
FORK = 0
"""Sent with a descriptor in place of a process id."""


class ForkServer:
    """Starts the process when it is first needed, and again if it dies; thread-safe.

    It ends, with all that it has forked, as soon as this process does, however that ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, pipe: Connection) -> int:
        """The id of a new process that decodes what comes through the pipe; OSError if there cannot be one."""
        with self._lock:
            for last in (False, True):
                try:
                    found = self._asked(FORK, [pipe.fileno()])
                    break
                except OSError:  # it has died, or has just been started and cannot run
                    self._close()
                    if last:
                        raise
        if found < 0:
            raise OSError(-found, os.strerror(-found))
        return found

    def end(self, pid: int) -> int | None:
        """Kill a process that was forked here, or find it dead: its exit code as multiprocessing has it, if known."""
        with self._lock:
            if self._control is None:
                return None
            try:
                status = self._asked(pid)
            except OSError:
                self._close()
                return None
        return None if status < 0 else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _asked(self, number: int, descriptors: list[int] | None = None) -> int:
        control = self._control or self._started()
        socket.send_fds(control, [NUMBER.pack(number)], descriptors or [])
        answer = control.recv(NUMBER.size)
        if len(answer) < NUMBER.size:
            raise ConnectionResetError("the process that forks others has ended")
        return int(NUMBER.unpack(answer)[0])

    def _started(self) -> socket.socket:
        control, other = socket.socketpair()
        with other:
            command = [get_executable(), "-c", COMMAND, str(other.fileno()), *sys.path]
            try:  # in a group of its own: Ctrl-C is not for it
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], process_group=0
                )
            except BaseException:
                control.close()
                raise
        control.settimeout(SECONDS)
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


fork_server = ForkServer()
"""The only one of this process."""
atexit.register(fork_server.close)


def main(descriptor: int) -> None:
    """The process."""
    for sig in (signal.SIGINT, signal.SIGTERM):  # a signal to all processes: the service decides when to stop
        signal.signal(sig, signal.SIG_IGN)
    from vitrail.serve.decode_process import decode

    children: set[int] = set()
    with socket.socket(fileno=descriptor) as control, contextlib.suppress(OSError):
        while True:
            message, descriptors, *_ = socket.recv_fds(control, NUMBER.size, 1)
            if len(message) < NUMBER.size:
                break
            if descriptors:
                answer = _forked(control, descriptors[0], decode)
                if answer > 0:
                    children.add(answer)
            else:
                answer = _ended(NUMBER.unpack(message)[0], children)
            control.sendall(NUMBER.pack(answer))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _forked(control: socket.socket, descriptor: int, work: Callable[[Connection], None]) -> int:
    """The new process's id, or a negative error number."""
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


def _ended(pid: int, children: set[int]) -> int:
    """Its status, as waitpid has it; -1: it is no child of this process."""
    if pid not in children:
        return -1
    children.remove(pid)
    os.kill(pid, signal.SIGKILL)  # of no effect on one that has ended
    return os.waitpid(pid, 0)[1]
