"""Signals: answered at once, the run stops without losing a step, and a second Ctrl-C ends it immediately."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from training.commands import Commands, RunningCommand
from training.small_runs import (
    SMALL,
    at_step,
    digits_config,
    identical_weights,
    logged_metrics,
    one_thread,
    resume_run,
    saved_steps,
    train_run,
)

import vitrail
from vitrail.config import TrainConfig, override
from vitrail.runs.run_folder import RunFolder
from vitrail.training import interrupt as signals
from vitrail.training import loop
from vitrail.training.checkpointing import read_progress
from vitrail.training.interrupt import Interrupt
from vitrail.training.loop import FitResult
from vitrail.training.run_logger import RunLogger
from vitrail.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_disk")


def signal_sender(number: signal.Signals) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


# Stops during an evaluation


@contextmanager
def at_evaluation(number: int, action: Callable[[], None], method: str = "evaluate") -> Iterator[None]:
    """Call `action` when the evaluation of this number begins, counted from 1."""
    evaluate, count = getattr(Trainer, method), 0

    def evaluate_and_act(self: Trainer, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return evaluate(self, *args, **options)

    setattr(Trainer, method, evaluate_and_act)
    try:
        yield
    finally:
        setattr(Trainer, method, evaluate)


def interrupt_evaluation(config: TrainConfig, folder: Path, number: int, method: str = "evaluate") -> FitResult:
    with at_evaluation(number, signal_sender(signal.SIGTERM), method):
        result = train_run(config, folder)
    assert (result.stop_reason, result.scores) == ("SIGTERM", None)
    return result


CONFIGS = {
    "classify": digits_config(12, keep="best", ema=0.9),
    "masked": override(digits_config(12), ["objective=masked-patch"]),
    "patience": digits_config(12, patience=1),
}


@pytest.fixture(scope="module")
def reference_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The uninterrupted runs that the runs below are compared with, evaluated at steps 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with one_thread():
        for name, config in CONFIGS.items():
            train_run(config, folder / name)
    return {name: folder / name for name in CONFIGS}


@pytest.mark.parametrize(("kind", "number", "step"), [("classify", 2, 10), ("masked", 1, 5), ("patience", 3, 12)])
def test_interrupted_evaluation_is_repeated_first_after_a_resume(
    reference_runs: dict[str, Path], tmp_path: Path, kind: str, number: int, step: int
):
    folder = tmp_path / "run"
    result = interrupt_evaluation(CONFIGS[kind], folder, number)
    assert result.resume_step == step
    assert [line for line in logged_metrics(folder) if "evaluation" in line and line["step"] == step] == []
    assert read_progress(folder / "checkpoint" / f"{step:08d}").evaluation_pending
    resume_run(folder)
    assert logged_metrics(folder) == logged_metrics(reference_runs[kind])
    assert identical_weights(folder, reference_runs[kind])


def test_repeated_evaluation_is_not_logged_twice(reference_runs: dict[str, Path], tmp_path: Path):
    """The resumed run evaluates, and is killed before a checkpoint records that."""
    folder = tmp_path / "run"
    interrupt_evaluation(CONFIGS["classify"], folder, 1)

    def raise_interrupt(_: RunLogger) -> None:
        raise KeyboardInterrupt

    with at_step(6, raise_interrupt), pytest.raises(KeyboardInterrupt):
        resume_run(folder)
    resume_run(folder)
    assert logged_metrics(folder) == logged_metrics(reference_runs["classify"])
    assert identical_weights(folder, reference_runs["classify"])


def test_interrupted_final_evaluation_is_repeated_after_a_resume(tmp_path: Path):
    """The model is written after the final evaluation on the test images."""
    config = digits_config(4, data={"workers": 0, "held_out": 0.1}, evaluate_every=None)
    train_run(config, tmp_path / "uninterrupted")
    result = interrupt_evaluation(config, tmp_path / "run", 2, "evaluate_classes")
    assert (result.resume_step, result.run.finished) == (4, False)
    resumed = resume_run(tmp_path / "run")
    assert resumed.test_scores is not None
    assert logged_metrics(tmp_path / "run") == logged_metrics(tmp_path / "uninterrupted")
    assert identical_weights(tmp_path / "run", tmp_path / "uninterrupted")


# Signals


def ignore_message(message: str) -> None:
    """Discard the message."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_requests_a_stop(number: signal.Signals):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        interrupt.install(ignore_message, str)
        assert interrupt.stop_requested is None
        os.kill(os.getpid(), number)
        assert interrupt.stop_requested == number.name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_interrupt_raises_keyboard_interrupt(number: signal.Signals):
    with Interrupt() as interrupt:
        interrupt.install(ignore_message, str)
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # is ignored during the cleanup
    assert interrupt.exit_requested


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_sigusr1_and_sighup_request_a_stop(tmp_path: Path, name: str):
    before = signal.signal(signal.Signals[name], signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    try:
        with at_step(3, signal_sender(signal.Signals[name])):
            result = train_run(digits_config(6), tmp_path / "run")
        assert (result.stop_reason, result.resume_step) == (name, 3)
        assert signal.getsignal(signal.Signals[name]) == signal.SIG_DFL
    finally:
        signal.signal(signal.Signals[name], before)


def test_custom_handler_of_a_rare_signal_is_kept(tmp_path: Path):
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        with at_step(3, signal_sender(signal.SIGUSR1)):
            assert train_run(digits_config(4), tmp_path / "run").stop_reason is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]


def test_first_signal_is_answered_while_the_main_thread_is_in_c_code():
    """Python's own signal handlers run only after a call of C code, such as a kernel, has returned."""
    messages: list[tuple[str, bool]] = []
    busy = True
    with Interrupt() as interrupt:
        interrupt.install(lambda message: messages.append((message, busy)), str)
        threading.Timer(0.05, signal_sender(signal.SIGINT)).start()
        while not messages:
            busy = True
            hashlib.pbkdf2_hmac("sha256", b"some", b"salt", 500_000)
            busy = False
        assert interrupt.stop_requested == "SIGINT"
    assert messages == [("stopping after this step and saving; press Ctrl-C again to stop at once", True)]


def start_script(code: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_second_interrupt_ends_a_call_that_never_returns():
    running = start_script("""
        import hashlib
        from vitrail.training import interrupt

        interrupt.FORCED_EXIT_DELAY_S = 0.1
        with interrupt.Interrupt() as handler:
            handler.install(lambda message: print(message, flush=True), lambda: "the last checkpoint is of step 7")
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"some", b"salt", 2**31 - 1)
    """)
    with running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        assert running.stdout.readline() == "stopping after this step and saving; press Ctrl-C again to stop at once\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.strip() == "the last checkpoint is of step 7"


def test_end_of_torchrun_requests_a_stop():
    """A killed torchrun leaves its processes running, which would keep the run folder locked."""
    running = start_script("""
        import os, time

        os.environ["TORCHELASTIC_RUN_ID"] = "some"
        if not os.fork():
            from vitrail.training.interrupt import Interrupt

            interrupt = Interrupt()
            before = interrupt.stop_requested
            print("ready", flush=True)
            while interrupt.stop_requested is None:
                time.sleep(0.01)
            print(before, interrupt.stop_requested, flush=True)
            os._exit(0)
        time.sleep(60)
    """)
    with running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.kill()
        assert running.stdout.readline() == "None torchrun\n"


# Messages where there is nothing to save


def test_interrupt_before_the_first_step_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def raise_interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.training.loop.prepare_run", raise_interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^stopped by Ctrl-C before the first step; nothing was saved$"):
        train_run(digits_config(4), tmp_path / "run")
    RunFolder(tmp_path / "run").create(digits_config(4))
    with pytest.raises(KeyboardInterrupt, match=r"stopped by Ctrl-C; there is no checkpoint yet; resume with: vitrail"):
        resume_run(tmp_path / "run")


def test_interrupt_during_the_report_names_the_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def raise_interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.training.runs.write_report", raise_interrupt)
    with pytest.raises(
        KeyboardInterrupt, match=r"the model is in .*run/model; write the report with: vitrail train --r"
    ):
        vitrail.train(digits_config(2), out=tmp_path / "run")
    assert RunFolder(tmp_path / "run").status == "unfinished"
    assert vitrail.load(tmp_path / "run").labels is not None


def test_interrupt_in_a_comparison_names_the_command_of_the_main_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fit_and_interrupt_comparison(config: TrainConfig, folder: RunFolder, **options: bool) -> object:
        if folder.main_run is not None:
            monkeypatch.setattr("vitrail.training.loop.prepare_run", raise_interrupt)
        return loop.fit(config, folder, **options)

    def raise_interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.training.runs.fit", fit_and_interrupt_comparison)
    with pytest.raises(KeyboardInterrupt) as caught:
        vitrail.train(digits_config(2, compare=["seed=1"]), out=tmp_path / "run")
    assert str(caught.value) == (
        f"stopped by Ctrl-C; there is no checkpoint yet of {tmp_path}/run/compare/seed-1; "
        f"resume with: vitrail train --resume --out {tmp_path}/run"
    )


# The command line


ENDLESS = (*SMALL, "duration=100k steps", "evaluate_every=none", "--out", "run")


def wait_for_checkpoint(running: RunningCommand, run: Path) -> None:
    running.wait_until(lambda: (run / "checkpoint").exists() and saved_steps(run))


def test_two_quick_interrupts_end_with_one_message(commands: Commands, tmp_path: Path):
    """The data loader is stopped, so that the step never ends; a second process is refused."""
    running = commands.start("train", "digits", *ENDLESS, folder=tmp_path)
    wait_for_checkpoint(running, tmp_path / "run")
    for reader in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split():
        os.kill(int(reader), signal.SIGSTOP)
    second_result = commands.run("train", "--resume", "--out", "run", folder=tmp_path)
    assert second_result.status == 1
    assert second_result.errors == ["another process is training in run; wait until it ends, or choose another folder."]
    os.kill(running.pid, signal.SIGINT)
    time.sleep(0.02)
    os.kill(running.pid, signal.SIGINT)
    result = running.wait()
    assert result.status == 130
    step = saved_steps(tmp_path / "run")[-1]
    messages = [line for line in result.err.splitlines() if line.startswith("stop")]
    assert messages == [
        "stopping after this step and saving; press Ctrl-C again to stop at once",
        f"stopped at once by a second Ctrl-C; the last checkpoint is of step {step}; resume with: "
        "vitrail train --resume --out run.",
    ]
    assert read_progress(tmp_path / "run" / "checkpoint" / f"{step:08d}").step == step


def test_many_interrupts_leave_a_valid_checkpoint_and_no_traceback(commands: Commands, tmp_path: Path):
    running = commands.start("train", "digits", *ENDLESS, folder=tmp_path)
    wait_for_checkpoint(running, tmp_path / "run")
    for _ in range(10):
        os.kill(running.pid, signal.SIGINT)
        time.sleep(0.01)
    result = running.wait()
    assert result.status == 130
    messages = [line for line in result.err.splitlines() if line.startswith("stopped")]
    assert len(messages) == 1
    assert "resume with: vitrail train --resume --out run" in messages[0]
    step = saved_steps(tmp_path / "run")[-1]
    assert read_progress(tmp_path / "run" / "checkpoint" / f"{step:08d}").step == step


def test_interrupt_while_settings_are_read_prints_one_message(commands: Commands, tmp_path: Path):
    os.mkfifo(tmp_path / "mine.json")
    running = commands.start("train", "mine.json", folder=tmp_path)
    descriptors: list[int] = []

    def open_fifo() -> bool:
        try:
            descriptors.append(os.open(tmp_path / "mine.json", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # not yet opened for reading
            return False
        return True

    running.wait_until(open_fifo)
    os.kill(running.pid, signal.SIGINT)
    result = running.wait()
    os.close(descriptors[0])
    assert (result.status, result.err) == (130, "stopped by Ctrl-C.\n")


def test_previous_signal_handlers_are_restored():
    handlers = [signal.getsignal(sig) for sig in signals.SIGNALS]
    with Interrupt() as interrupt:
        interrupt.install(print, str)
        assert signal.getsignal(signal.SIGINT) != handlers[0]
    assert [signal.getsignal(sig) for sig in signals.SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
