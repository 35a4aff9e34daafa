"""The command as a process: help, statuses, errors in one sentence, pipes, terminals, interrupts."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from small_models import gradient

from vitrail import cli
from vitrail.cli import main

VITRAIL = [sys.executable, "-m", "vitrail"]


def on_a_terminal(columns: int, *arguments: object, out: int | None = None) -> tuple[int, str]:
    """Status and everything a person sees in a window of so many columns, without colors.

    `out` is where standard output goes instead.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    plain = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    running = subprocess.Popen(
        [*VITRAIL, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=theirs if out is None else out,
        stderr=theirs,
        env={**plain, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).replace("\r\n", "\n")
    return running.wait(), text


# Help, version, and what they cost


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["predict", "--help"], ["--version"], []])
def test_help_and_version_do_not_import_torch(arguments):
    code = (
        f"import sys; from vitrail.cli import main; status = main({arguments});"
        "print('heavy', [m for m in ('torch', 'numpy', 'PIL') if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (0 if arguments else 2)
    assert done.stdout
    assert done.stderr == "heavy []\n"


def test_the_version_is_the_packages(vitrail):
    import vitrail as package

    assert vitrail("--version").out == f"vitrail {package.__version__}\n"


@pytest.mark.parametrize("command", ["models", "predict", "convert"])
def test_help_fits_eighty_columns_and_describes_every_option(command):
    status, text = on_a_terminal(80, command, "--help")
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "--json" in text
    assert "--debug" in on_a_terminal(80, "--help")[1]


def test_the_installed_command_is_this_one():
    script = Path(sys.executable).with_name("vitrail")
    if not script.exists():
        pytest.skip("vitrail is not installed in this environment")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vitrail ")


# Errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predct"], "No such command 'predct'. Did you mean 'predict'? See `vitrail --help`."),
        (["predict"], "Missing argument 'IMAGE'. See `vitrail predict --help`."),
        (["convert", "a"], "Missing argument 'DST'. See `vitrail convert --help`."),
        (["predict", "a.jpg", "--top", "0"], "Invalid value for '--top'"),
        (["predict", "a.jpg", "--tpo", "1"], "No such option: --tpo"),
        (["models", "a", "b"], "Got unexpected extra argument"),
    ],
)
def test_a_command_asked_wrongly_is_one_sentence_and_status_2(vitrail, arguments, said):
    result = vitrail(*arguments)
    assert (result.status, result.out) == (2, "")
    assert len(result.problems) == len(result.err.splitlines()) == 1
    assert said in result.problems[0]
    assert " --help`." in result.problems[0]


def test_an_error_is_one_sentence_and_debug_shows_where(process, tmp_path):
    (tmp_path / "bad.safetensors").write_text("not weights")
    gradient().save(tmp_path / "a.png")
    arguments = ["predict", tmp_path / "a.png", "-m", tmp_path / "bad.safetensors"]
    result = process(*arguments)
    assert (result.status, result.out) == (1, "")
    assert len(result.problems) == len(result.err.splitlines()) == 1
    result = process(*arguments, "--debug")
    assert result.status == 1
    assert result.err.startswith("Traceback")
    assert "vitrail.errors." in result.err


def test_what_was_not_foreseen_says_so(vitrail, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by 0")

    monkeypatch.setattr(cli, "app", fail)
    result = vitrail("models")
    assert result.status == 70
    assert result.problems == [
        "ZeroDivisionError: by 0 (unexpected error: run again with --debug for the traceback, and please report it)."
    ]
    with pytest.raises(ZeroDivisionError):
        main(["models", "--debug"])


def test_what_the_system_refuses_is_one_sentence(vitrail, weights):
    result = vitrail("convert", weights, "/proc/nowhere/out")
    assert result.status == 1
    assert len(result.problems) == len(result.err.splitlines()) == 1
    assert "/proc/nowhere" in result.problems[0]


def test_closed_and_full_outputs_are_no_surprise():
    command = f"{sys.executable} -m vitrail --version"
    done = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if Path("/dev/full").exists():
        done = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, "error: No space left on device.\n")


def test_a_message_is_shown_as_it_is(vitrail, tmp_path):
    """Square brackets are markup to the library that prints; a long line must not be cut."""
    name = f"[bold]{'x' * 150}[/bold].jpg"
    result = vitrail("predict", tmp_path / name, "-m", "none")
    assert name in result.problems[0]


# Pipes, terminals, interrupts


@pytest.fixture
def crowd(tmp_path: Path) -> Path:
    """A folder that takes a while."""
    folder = tmp_path / "crowd"
    folder.mkdir()
    gradient(400, 300).save(tmp_path / "one.png")
    for n in range(3000):
        (folder / f"{n:04}.png").symlink_to(tmp_path / "one.png")
    return folder


@pytest.mark.parametrize("kind", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_error(crowd, weights, kind):
    command = [*VITRAIL, "predict", str(crowd), "-m", str(weights), *kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()  # as `| head -1` does
        assert running.stderr.read() == ""
    assert running.returncode == 1


def test_an_interrupt_ends_it_quietly(crowd, weights):
    command = [*VITRAIL, "predict", str(crowd), "-m", str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        rest, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == ""
    assert len(rest.splitlines()) < 2900


def test_on_a_terminal_results_and_notes_are_plain(weights, tmp_path):
    gradient().save(tmp_path / "a.png")
    status, text = on_a_terminal(80, "predict", tmp_path / "a.png", "-m", weights, "--top", 2, "--image-size", 64)
    assert status == 0
    lines = [line.split("\r")[-1] for line in text.splitlines()]
    assert "note: position embeddings were resampled to 64x64 (timm method)." in lines
    assert lines[-3].endswith("a.png")
    assert re.fullmatch(r" +\d+\.\d %  \w+", lines[-1])


def test_progress_on_a_terminal_leaves_the_results_alone(weights, tmp_path):
    gradient().save(tmp_path / "one.png")
    (tmp_path / "many").mkdir()
    for n in range(200):
        (tmp_path / "many" / f"{n:03}.png").symlink_to(tmp_path / "one.png")
    (tmp_path / "many" / "bad.png").write_text("not an image")
    with (tmp_path / "out.csv").open("w") as file:
        arguments = ("predict", tmp_path / "many", "-m", weights, "--top", 1)
        status, seen = on_a_terminal(100, *arguments, out=file.fileno())
    assert status == 1
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 202
    assert lines[0] == "path,label,score,index,error"
    assert all(line.startswith(str(tmp_path / "many")) for line in lines[1:])
    assert "predicting" in seen
    assert "error: 1 of 201 images could not be read." in seen


@pytest.mark.parametrize(("columns", "weights_by"), [(80, "timm"), (120, "timm/vit_base_patch16_224.augreg")])
def test_the_listing_fits_the_window(columns, weights_by):
    status, text = on_a_terminal(columns, "models", "ViT-B*")
    assert status == 0
    assert max(map(len, text.splitlines())) <= columns
    assert f"ViT-B/16      86,567,656    35.1    224  {weights_by}" in text
