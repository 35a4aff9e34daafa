"""Locks: they exclude threads and processes, end with their process, and are skipped where there are none."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from vitrail.storage import locks
from vitrail.storage.locks import file_lock, lock_within, try_lock

HOLDER = """
import pathlib, sys
from vitrail.storage.locks import file_lock
with file_lock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock on `lock`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with process:
        yield process
        process.kill()


def test_file_lock_excludes_other_threads(tmp_path: Path):
    holders: list[int] = []

    def work(number: int) -> None:
        with file_lock(tmp_path / "lock"):
            holders.append(number)
            assert len(holders) == 1
            time.sleep(0.01)
            holders.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


def test_relative_and_absolute_paths_of_a_file_are_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    entered = threading.Event()

    def work() -> None:
        with file_lock(Path("lock")):
            entered.set()

    with file_lock(tmp_path / "lock"):
        thread = threading.Thread(target=work)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(30)
    thread.join()


@pytest.mark.parametrize("killed", [False, True])
def test_file_lock_waits_for_another_process(tmp_path: Path, holder: subprocess.Popen[str], killed: bool):
    entered = threading.Event()

    def work() -> None:
        with file_lock(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not entered.wait(0.3)
    if killed:
        holder.send_signal(signal.SIGKILL)
    else:
        holder.communicate()
    assert entered.wait(30)
    thread.join()


FORKING = """
import os, pathlib, signal, sys
from vitrail.storage.locks import file_lock
with file_lock(pathlib.Path(sys.argv[1])):
    child = os.fork()
    if not child:
        signal.alarm(30)
        with file_lock(pathlib.Path(sys.argv[1])):
            os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_waits_for_the_holder_and_no_longer(tmp_path: Path):
    """The mutex that it inherits is locked and would never be released."""
    code = [sys.executable, "-c", FORKING, str(tmp_path / "lock")]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout == "7\n"


def test_try_lock_returns_whether_the_lock_is_free(tmp_path: Path, holder: subprocess.Popen[str]):
    with (tmp_path / "lock").open("a") as file:
        assert not try_lock(file.fileno())
        holder.communicate()
        assert try_lock(file.fileno())


def test_lock_within_announces_the_wait_once_and_gives_up(tmp_path: Path, holder: subprocess.Popen[str]):
    announced: list[str] = []
    with (tmp_path / "lock").open("a") as file:
        assert not lock_within(file.fileno(), 0.2, lambda: announced.append("waiting"))
        assert announced == ["waiting"]
        holder.communicate()
        assert lock_within(file.fileno(), 0.2, lambda: announced.append("again"))
    assert announced == ["waiting"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_works_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def refuse(file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks, "_lock", refuse)
    with (tmp_path / "lock").open("a") as file:
        assert try_lock(file.fileno())
    with file_lock(tmp_path / "lock"):
        pass


def test_a_lock_that_cannot_be_created_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "gone" / "lock", tmp_path / "file" / "lock"):
        with pytest.raises(OSError, match="lock"), file_lock(path):
            pytest.fail("the block must not run")


class FakeMsvcrt(ModuleType):
    """Locks of Windows: on a range of bytes at the file's position; exclusive also within a process."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.locked: set[tuple[int, int, int]] = set()

    def locking(self, file: int, mode: int, count: int) -> None:
        assert mode == self.LK_NBLCK
        key = (os.fstat(file).st_ino, os.lseek(file, 0, os.SEEK_CUR), count)
        if key in self.locked:
            raise OSError(errno.EACCES, "Permission denied")
        self.locked.add(key)


def test_on_windows_the_first_byte_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    msvcrt = FakeMsvcrt()
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    monkeypatch.setattr(sys, "platform", "win32")
    spec = importlib.util.spec_from_file_location("windows_locks", locks.__file__)
    assert spec is not None
    assert spec.loader is not None
    windows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(windows)
    (tmp_path / "lock").write_text("something")
    with (tmp_path / "lock").open("a") as first, (tmp_path / "lock").open("r+") as second:
        first.seek(3)
        assert windows.try_lock(first.fileno())
        assert not windows.try_lock(second.fileno())
    assert [(start, count) for _, start, count in msvcrt.locked] == [(0, 1)]
