"""Signals as requests to stop: the loop finishes its step, saves a checkpoint and ends.

    first signal     sets `stop_requested` and prints a message at once; the loop stops after the current step, or
                     between two batches of an evaluation
    second Ctrl-C    raises KeyboardInterrupt; if the main thread does not get to it within FORCED_EXIT_DELAY_S
                     (a kernel or a collective that never returns), exits the process

A file can request a stop, too: its path is in an environment variable, and it names the signal. It is for processes
whose signals belong to somebody else, such as workers of Ray.

Checkpoints are complete whenever the process ends, since they are renamed into place. Under torchrun, the exit of
torchrun itself is a request to stop too, since nothing else would then restart or stop this process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Ctrl-C; sent by schedulers before SIGKILL; sent when the terminal closes; `sbatch --signal=USR1@60`."""
ALWAYS_HANDLED = (signal.SIGINT, signal.SIGTERM)
"""Signals that are handled even if another handler is installed, which is restored afterwards."""
TORCHRUN = "torchrun"
"""Used in place of a signal name if torchrun itself has exited."""
STOPPING_MESSAGE, SECOND_CTRL_C_HINT = "stopping after this step and saving", "; press Ctrl-C again to stop at once"
STOP_FILE = "VITRAIL_STOP_FILE"
"""The environment variable with the path of a file that requests a stop: JSON with the name of a signal."""
STOP_FILE_INTERVAL_S = 0.5
"""Seconds between two looks for that file, which may be on another machine."""
FORCED_EXIT_DELAY_S = 5.0
"""Seconds from a second Ctrl-C until the process is ended by force."""


sigint_times: list[float] = []
"""Times of SIGINT in this process; the command line uses them to ignore a Ctrl-C that follows another."""


class StopRequested(Exception):
    """Raised between two batches of an evaluation because a stop was requested."""


class Interrupt:
    """`with Interrupt() as interrupt:`, then `install` the handlers once there is something to save.

    Before `install`, signals have their usual effect.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.exit_requested = False
        """Whether a second Ctrl-C was pressed."""
        self.previous_handlers: dict[signal.Signals, Any] = {}
        self.stop_file, self.next_look = os.environ.get(STOP_FILE), 0.0
        self.torchrun_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.exit_message: Callable[[], str] = str
        self.wakeup_sockets: tuple[socket.socket, socket.socket] | None = None
        self.ended = threading.Event()

    @property
    def stop_requested(self) -> str | None:
        """The name of the signal that requested a stop, or TORCHRUN; None if there was none."""
        if self.signal is None and self.torchrun_pid is not None and os.getppid() != self.torchrun_pid:
            self.signal = TORCHRUN
        if self.signal is None and self.stop_file is not None and time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + STOP_FILE_INTERVAL_S
            with suppress(OSError, ValueError):
                self.signal = str(json.loads(Path(self.stop_file).read_text())["signal"])
        return self.signal

    def __enter__(self) -> Interrupt:
        return self

    def install(self, notify: Callable[[str], object], exit_message: Callable[[], str]) -> None:
        """Install the handlers. `notify` prints the reply to the first signal; `exit_message` is for a forced exit."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
            return
        self.exit_message = exit_message
        expected = [sig for sig in SIGNALS if sig in ALWAYS_HANDLED or signal.getsignal(sig) == signal.SIG_DFL]
        self.previous_handlers = {sig: signal.signal(sig, self._handle_signal) for sig in expected}
        # Python runs handlers in the main thread, which may be inside a kernel for a long time. The wake-up socket is
        # written by the C-level handler, so that a thread can reply at once.
        self.wakeup_sockets = socket.socketpair()
        for end in self.wakeup_sockets:
            end.setblocking(False)
        self.previous_wakeup_fd = signal.set_wakeup_fd(self.wakeup_sockets[1].fileno(), warn_on_full_buffer=False)
        self.wakeup_sockets[0].setblocking(True)
        threading.Thread(
            target=self._watch_signals, args=(self.wakeup_sockets[0], notify), daemon=True, name="signals"
        ).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        if self.wakeup_sockets is None:
            return
        signal.set_wakeup_fd(self.previous_wakeup_fd)
        for sig, handler in self.previous_handlers.items():
            signal.signal(sig, handler)
        self.wakeup_sockets[1].close()  # which ends the thread
        self.wakeup_sockets = None

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            sigint_times.append(time.monotonic())
        if self.signal is None:
            self.signal = signal.Signals(number).name
        elif number == signal.SIGINT and not self.exit_requested:  # a third must not disturb the cleanup
            self.exit_requested = True
            raise KeyboardInterrupt

    def _watch_signals(self, line: socket.socket, notify: Callable[[str], object]) -> None:
        """Body of the thread: reads the number of each signal from the wake-up socket."""
        count = 0
        with line:
            while numbers := line.recv(16):
                for number in numbers:
                    if number not in self.previous_handlers:
                        continue
                    count += 1
                    if count == 1:
                        with suppress(Exception):  # the terminal may be gone
                            notify(STOPPING_MESSAGE + (SECOND_CTRL_C_HINT if number == signal.SIGINT else ""))
                    elif number == signal.SIGINT:
                        self._force_exit()

    def _force_exit(self) -> None:
        """Exit the process if the main thread has not ended in time."""
        if self.ended.wait(FORCED_EXIT_DELAY_S):
            return
        with suppress(Exception):
            hidden = "\x1b[?25h" if sys.stderr.isatty() else ""  # a panel hides the cursor
            sys.stderr.write(f"{hidden}\n{self.exit_message()}\n")
            sys.stderr.flush()
        os._exit(128 + signal.SIGINT)
