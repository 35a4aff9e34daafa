"""Signals: each is answered at once, the run stops where nothing is lost, and a second Ctrl-C ends it at once."""

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
from train.commands import Commands, Running
from train.small_runs import (
    SMALL,
    at_step,
    digits,
    lines,
    one_thread,
    resumed,
    same_bits,
    saved_steps,
    trained,
)

import vitrail
from vitrail.config import TrainConfig, override
from vitrail.train import interrupt as signals
from vitrail.train import loop
from vitrail.train.checkpointing import read_progress
from vitrail.train.interrupt import Interrupt
from vitrail.train.loop import FitResult
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_logger import RunLogger
from vitrail.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_disk")


def send(number: signal.Signals) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


# A stop between the batches of an evaluation


@contextmanager
def at_evaluation(number: int, action: Callable[[], None], name: str = "evaluate") -> Iterator[None]:
    """Do something when the evaluation of this number, from 1 on, begins."""
    evaluate, count = getattr(Trainer, name), 0

    def evaluated(self: Trainer, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return evaluate(self, *args, **options)

    setattr(Trainer, name, evaluated)
    try:
        yield
    finally:
        setattr(Trainer, name, evaluate)


def stopped_in_evaluation(config: TrainConfig, folder: Path, number: int, name: str = "evaluate") -> FitResult:
    with at_evaluation(number, send(signal.SIGTERM), name):
        result = trained(config, folder)
    assert (result.stop_reason, result.scores) == ("SIGTERM", None)
    return result


CONFIGS = {
    "classify": digits(12, keep="best", ema=0.9),
    "masked": override(digits(12), ["objective=masked-patch"]),
    "patience": digits(12, patience=1),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the runs below are held against: evaluated at steps 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    with one_thread():
        for name, config in CONFIGS.items():
            trained(config, folder / name)
    return {name: folder / name for name in CONFIGS}


@pytest.mark.parametrize(("kind", "number", "step"), [("classify", 2, 10), ("masked", 1, 5), ("patience", 3, 12)])
def test_an_evaluation_is_given_up_saved_and_made_first_when_the_run_goes_on(
    whole: dict[str, Path], tmp_path: Path, kind: str, number: int, step: int
):
    folder = tmp_path / "run"
    result = stopped_in_evaluation(CONFIGS[kind], folder, number)
    assert result.resume_step == step
    assert [line for line in lines(folder) if "evaluation" in line and line["step"] == step] == []
    assert read_progress(folder / "checkpoint" / f"{step:08d}").evaluation_pending
    resumed(folder)
    assert lines(folder) == lines(whole[kind])
    assert same_bits(folder, whole[kind])


def test_an_evaluation_that_was_made_up_for_is_not_logged_twice(whole: dict[str, Path], tmp_path: Path):
    """The run goes on, evaluates, and is killed before it has saved that it did."""
    folder = tmp_path / "run"
    stopped_in_evaluation(CONFIGS["classify"], folder, 1)

    def kill(_: RunLogger) -> None:
        raise KeyboardInterrupt

    with at_step(6, kill), pytest.raises(KeyboardInterrupt):
        resumed(folder)
    resumed(folder)
    assert lines(folder) == lines(whole["classify"])
    assert same_bits(folder, whole["classify"])


def test_the_last_measurements_are_given_up_too_and_made_when_the_run_is_resumed(tmp_path: Path):
    """On the test images at the end, which may be many: the model is written when they have been measured."""
    config = digits(4, data={"workers": 0, "held_out": 0.1}, evaluate_every=None)
    trained(config, tmp_path / "whole")
    result = stopped_in_evaluation(config, tmp_path / "run", 2, "evaluate_classes")
    assert (result.resume_step, result.run.finished) == (4, False)
    again = resumed(tmp_path / "run")
    assert again.test_scores is not None
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert same_bits(tmp_path / "run", tmp_path / "whole")


# Signals


def silent(words: str) -> None:
    """An answer to nobody."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request(number: signal.Signals):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        interrupt.install(silent, str)
        assert interrupt.stop_requested is None
        os.kill(os.getpid(), number)
        assert interrupt.stop_requested == number.name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_a_signal_ends_at_once(number: signal.Signals):
    with Interrupt() as interrupt:
        interrupt.install(silent, str)
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # would disturb what is being cleared up
    assert interrupt.exit_requested


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_what_schedulers_and_terminals_send_is_a_request_to_stop(tmp_path: Path, name: str):
    with at_step(3, send(signal.Signals[name])):
        result = trained(digits(6), tmp_path / "run")
    assert (result.stop_reason, result.resume_step) == (name, 3)
    assert signal.getsignal(signal.Signals[name]) == signal.SIG_DFL


def test_a_handler_of_ones_own_is_not_replaced_by_what_is_seldom_sent(tmp_path: Path):
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        with at_step(3, send(signal.SIGUSR1)):
            assert trained(digits(4), tmp_path / "run").stop_reason is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]


def test_the_first_signal_is_answered_while_the_main_thread_is_busy_elsewhere():
    """In one call of C, such as a kernel: Python's own handlers wait until it returns."""
    said: list[tuple[str, bool]] = []
    busy = True
    with Interrupt() as interrupt:
        interrupt.install(lambda words: said.append((words, busy)), str)
        threading.Timer(0.05, send(signal.SIGINT)).start()
        while not said:
            busy = True
            hashlib.pbkdf2_hmac("sha256", b"some", b"salt", 500_000)
            busy = False
        assert interrupt.stop_requested == "SIGINT"
    assert said == [("stopping after this step and saving; press Ctrl-C again to stop at once", True)]


def script(code: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_second_interrupt_ends_even_what_never_returns():
    running = script("""
        import hashlib
        from vitrail.train import interrupt

        interrupt.FORCED_EXIT_DELAY_S = 0.1
        with interrupt.Interrupt() as listening:
            listening.install(lambda words: print(words, flush=True), lambda: "the last checkpoint is of step 7")
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


def test_the_end_of_torchrun_is_a_request_to_stop():
    """Killed, it leaves its processes behind: they would go on and keep others out of the folder."""
    running = script("""
        import os, time

        os.environ["TORCHELASTIC_RUN_ID"] = "some"
        if not os.fork():
            from vitrail.train.interrupt import Interrupt

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


# What is said where there is nothing to save


def test_an_interrupt_before_the_first_step_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.train.loop.prepare_run", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^stopped by Ctrl-C before the first step; nothing was saved$"):
        trained(digits(4), tmp_path / "run")
    RunFolder(tmp_path / "run").create(digits(4))
    with pytest.raises(KeyboardInterrupt, match=r"stopped by Ctrl-C; there is no checkpoint yet; resume with: vitrail"):
        resumed(tmp_path / "run")


def test_an_interrupt_while_the_report_is_made_says_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.api.training.write_report", interrupted)
    with pytest.raises(
        KeyboardInterrupt, match=r"the model is in .*run/model; write the report with: vitrail train --r"
    ):
        vitrail.train(digits(2), out=tmp_path / "run")
    assert RunFolder(tmp_path / "run").status == "unfinished"
    assert vitrail.load(tmp_path / "run").labels is not None


def test_an_interrupt_in_a_run_that_is_compared_with_names_the_command_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fit(config: TrainConfig, folder: RunFolder, **options: bool) -> object:
        if folder.main_run is not None:
            monkeypatch.setattr("vitrail.train.loop.prepare_run", interrupted)
        return loop.fit(config, folder, **options)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.api.training.fit", fit)
    with pytest.raises(KeyboardInterrupt) as caught:
        vitrail.train(digits(2, compare=["seed=1"]), out=tmp_path / "run")
    assert str(caught.value) == (
        f"stopped by Ctrl-C; there is no checkpoint yet of {tmp_path}/run/compare/seed-1; "
        f"resume with: vitrail train --resume --out {tmp_path}/run"
    )


# The command as a person runs it


ENDLESS = (*SMALL, "duration=100k steps", "evaluate_every=none", "--out", "run")


def saved(running: Running, run: Path) -> None:
    running.until(lambda: (run / "checkpoint").exists() and saved_steps(run))


def test_two_interrupts_at_nearly_the_same_time_end_with_one_sentence(commands: Commands, tmp_path: Path):
    """While a step waits for ever: whoever reads its images sleeps. Nobody else may train there meanwhile."""
    running = commands.start("train", "digits", *ENDLESS, folder=tmp_path)
    saved(running, tmp_path / "run")
    for reader in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split():
        os.kill(int(reader), signal.SIGSTOP)
    beside = commands.run("train", "--resume", "--out", "run", folder=tmp_path)
    assert beside.status == 1
    assert beside.problems == ["another process is training in run; wait until it ends, or choose another folder."]
    os.kill(running.pid, signal.SIGINT)
    time.sleep(0.02)
    os.kill(running.pid, signal.SIGINT)
    done = running.ended()
    assert done.status == 130
    step = saved_steps(tmp_path / "run")[-1]
    words = [line for line in done.err.splitlines() if line.startswith("stop")]
    assert words == [
        "stopping after this step and saving; press Ctrl-C again to stop at once",
        f"stopped at once by a second Ctrl-C; the last checkpoint is of step {step}; resume with: "
        "vitrail train --resume --out run.",
    ]
    assert read_progress(tmp_path / "run" / "checkpoint" / f"{step:08d}").step == step


def test_many_interrupts_leave_a_whole_checkpoint_and_no_traceback(commands: Commands, tmp_path: Path):
    running = commands.start("train", "digits", *ENDLESS, folder=tmp_path)
    saved(running, tmp_path / "run")
    for _ in range(10):
        os.kill(running.pid, signal.SIGINT)
        time.sleep(0.01)
    done = running.ended()
    assert done.status == 130
    last = [line for line in done.err.splitlines() if line.startswith("stopped")]
    assert len(last) == 1
    assert "resume with: vitrail train --resume --out run" in last[0]
    step = saved_steps(tmp_path / "run")[-1]
    assert read_progress(tmp_path / "run" / "checkpoint" / f"{step:08d}").step == step


def test_an_interrupt_while_settings_are_read_ends_with_a_sentence(commands: Commands, tmp_path: Path):
    os.mkfifo(tmp_path / "mine.json")
    running = commands.start("train", "mine.json", folder=tmp_path)
    opened: list[int] = []

    def read() -> bool:
        try:
            opened.append(os.open(tmp_path / "mine.json", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody reads it yet
            return False
        return True

    running.until(read)
    os.kill(running.pid, signal.SIGINT)
    done = running.ended()
    os.close(opened[0])
    assert (done.status, done.err) == (130, "stopped by Ctrl-C.\n")


def test_what_is_listened_to_is_there_again_afterwards():
    names = [signal.getsignal(sig) for sig in signals.SIGNALS]
    with Interrupt() as interrupt:
        interrupt.install(print, str)
        assert signal.getsignal(signal.SIGINT) != names[0]
    assert [signal.getsignal(sig) for sig in signals.SIGNALS] == names
    assert signal.set_wakeup_fd(-1) == -1
