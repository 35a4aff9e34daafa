"""Signals as a request to stop: the loop finishes its step, saves and ends.

    first signal          noted in `asked` and answered at once; the loop stops after its step, or an evaluation
                          between two of its batches
    second Ctrl-C         ends at once, by KeyboardInterrupt; where that does not get through within GRACE seconds
                          (a kernel or a collective that never returns), by the end of the process

Checkpoints are whole whenever the process ends, since they are renamed into place. Under torchrun the end of its
agent counts as a request too: without it nobody would restart, stop or wait for this process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Ctrl-C; what schedulers send before they kill; a terminal that closes; `sbatch --signal=USR1@60`."""
ALWAYS = (signal.SIGINT, signal.SIGTERM)
"""Those that are listened to even where somebody has set another handler, which is there again afterwards."""
AGENT = "torchrun"
"""In place of a signal's name: torchrun itself has ended."""
STOPPING, AGAIN = "stopping after this step and saving", "; press Ctrl-C again to stop at once"
GRACE = 5.0
"""Seconds between a second Ctrl-C and the end of the process at the latest."""


heard: list[float] = []
"""When Ctrl-C was pressed, in a process that is one command: one that follows a noted one raises nothing more."""


class StopRequested(Exception):
    """Raised between the batches of an evaluation that is given up because the run is to stop."""


class Interrupt:
    """`with Interrupt() as interrupt:`, then `listen` when there is something to save.

    Before `listen` signals do what they always did: there is nothing to save yet.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.at_once = False
        """Whether a second Ctrl-C has ended it."""
        self.before: dict[signal.Signals, Any] = {}
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.parting: Callable[[], str] = str
        self.line: tuple[socket.socket, socket.socket] | None = None
        self.ended = threading.Event()

    @property
    def asked(self) -> str | None:
        """The name of the signal that asked to stop, or AGENT."""
        if self.signal is None and self.agent is not None and os.getppid() != self.agent:
            self.signal = AGENT
        return self.signal

    def __enter__(self) -> Interrupt:
        return self

    def listen(self, answer: Callable[[str], object], parting: Callable[[], str]) -> None:
        """From now on the first signal is noted and answered by `answer`; `parting`: the words of a second Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():  # Python lets no other thread listen
            return
        self.parting = parting
        wanted = [sig for sig in SIGNALS if sig in ALWAYS or signal.getsignal(sig) == signal.SIG_DFL]
        self.before = {sig: signal.signal(sig, self._note) for sig in wanted}
        # Python's own handler waits for the main thread, which may be in a kernel for long; the wake-up socket
        # is written to by the system's handler itself, and a thread answers at once.
        self.line = socket.socketpair()
        for end in self.line:
            end.setblocking(False)
        self.woken = signal.set_wakeup_fd(self.line[1].fileno(), warn_on_full_buffer=False)
        self.line[0].setblocking(True)
        threading.Thread(target=self._answer, args=(self.line[0], answer), daemon=True, name="signals").start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        if self.line is None:
            return
        signal.set_wakeup_fd(self.woken)
        for sig, handler in self.before.items():
            signal.signal(sig, handler)
        self.line[1].close()  # which ends the thread
        self.line = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            heard.append(time.monotonic())
        if self.signal is None:
            self.signal = signal.Signals(number).name
        elif number == signal.SIGINT and not self.at_once:  # a third would only disturb what the second clears up
            self.at_once = True
            raise KeyboardInterrupt

    def _answer(self, line: socket.socket, answer: Callable[[str], object]) -> None:
        """The thread's life: it hears of each signal as the process does."""
        count = 0
        with line:
            while numbers := line.recv(16):
                for number in numbers:
                    if number not in self.before:
                        continue
                    count += 1
                    if count == 1:
                        with suppress(Exception):  # nobody may be there to read it any more
                            answer(STOPPING + (AGAIN if number == signal.SIGINT else ""))
                    elif number == signal.SIGINT:
                        self._end_soon()

    def _end_soon(self) -> None:
        """Where the main thread never gets to raise anything, the process ends all the same."""
        if self.ended.wait(GRACE):
            return
        with suppress(Exception):
            hidden = "\x1b[?25h" if sys.stderr.isatty() else ""  # a panel hides the cursor
            sys.stderr.write(f"{hidden}\n{self.parting()}\n")
            sys.stderr.flush()
        os._exit(128 + signal.SIGINT)
