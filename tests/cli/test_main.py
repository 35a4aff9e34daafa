"""The command line: help, exit status, one-sentence errors, pipes, terminals, interrupts."""

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


def run_in_terminal(columns: int, *arguments: object, out: int | None = None) -> tuple[int, str]:
    """Run the command in a pseudo-terminal of this width; return its status and its output without colors.

    `out` is a file descriptor that receives standard output instead.
    """
    parent_fd, child_fd = os.openpty()
    fcntl.ioctl(child_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    running = subprocess.Popen(
        [*VITRAIL, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=child_fd if out is None else out,
        stderr=child_fd,
        env={**environment, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(child_fd)
    output = b""
    while True:
        try:
            chunk = os.read(parent_fd, 65536)
        except OSError:  # Linux raises this when the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(parent_fd)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode()).replace("\r\n", "\n")
    return running.wait(), text


# Help and version


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["predict", "--help"], ["--version"], []])
def test_help_and_version_do_not_import_torch(arguments):
    code = (
        f"import sys; from vitrail.cli import main; status = main({arguments});"
        "print('heavy', [m for m in ('torch', 'numpy', 'PIL') if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.returncode == (0 if arguments else 2)
    assert completed.stdout
    assert completed.stderr == "heavy []\n"


def test_version_is_that_of_the_package(vitrail):
    import vitrail as package

    assert vitrail("--version").out == f"vitrail {package.__version__}\n"


@pytest.mark.parametrize("command", ["models", "predict", "convert"])
def test_help_fits_eighty_columns_and_describes_every_option(command):
    status, text = run_in_terminal(80, command, "--help")
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "--json" in text
    assert "--debug" in run_in_terminal(80, "--help")[1]


def test_installed_command_runs():
    script = Path(sys.executable).with_name("vitrail")
    if not script.exists():
        pytest.skip("vitrail is not installed in this environment")
    completed = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert completed.stdout.startswith("vitrail ")


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predct"], "No such command 'predct'. Did you mean 'predict'? See `vitrail --help`."),
        (["predict"], "Missing argument 'IMAGE'. See `vitrail predict --help`."),
        (["convert", "a"], "Missing argument 'DST'. See `vitrail convert --help`."),
        (["predict", "a.jpg", "--top", "0"], "Invalid value for '--top'"),
        (["predict", "a.jpg", "--tpo", "1"], "No such option: --tpo"),
        (["models", "a", "b"], "Got unexpected extra argument"),
    ],
)
def test_usage_error_is_one_sentence_with_status_2(vitrail, arguments, message):
    result = vitrail(*arguments)
    assert (result.status, result.out) == (2, "")
    assert len(result.errors) == len(result.err.splitlines()) == 1
    assert message in result.errors[0]
    assert " --help`." in result.errors[0]


def test_error_is_one_sentence_and_debug_shows_the_traceback(process, tmp_path):
    (tmp_path / "bad.safetensors").write_text("not weights")
    gradient().save(tmp_path / "a.png")
    arguments = ["predict", tmp_path / "a.png", "-m", tmp_path / "bad.safetensors"]
    result = process(*arguments)
    assert (result.status, result.out) == (1, "")
    assert len(result.errors) == len(result.err.splitlines()) == 1
    result = process(*arguments, "--debug")
    assert result.status == 1
    assert result.err.startswith("Traceback")
    assert "vitrail.errors." in result.err


def test_unexpected_error_asks_for_a_report(vitrail, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by 0")

    monkeypatch.setattr(cli, "app", fail)
    result = vitrail("models")
    assert result.status == 70
    assert result.errors == [
        "ZeroDivisionError: by 0 (unexpected error: run again with --debug for the traceback, and please report it)."
    ]
    with pytest.raises(ZeroDivisionError):
        main(["models", "--debug"])


def test_operating_system_error_is_one_sentence(vitrail, weights):
    result = vitrail("convert", weights, "/proc/nowhere/out")
    assert result.status == 1
    assert len(result.errors) == len(result.err.splitlines()) == 1
    assert "/proc/nowhere" in result.errors[0]


def test_closed_standard_output_is_ignored_and_a_full_one_is_an_error():
    command = f"{sys.executable} -m vitrail --version"
    completed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (0, "")
    if Path("/dev/full").exists():
        completed = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True)
        assert (completed.returncode, completed.stderr) == (1, "error: No space left on device.\n")


def test_error_message_is_printed_verbatim(vitrail, tmp_path):
    """rich would read square brackets as markup and break a long line."""
    name = f"[bold]{'x' * 150}[/bold].jpg"
    result = vitrail("predict", tmp_path / name, "-m", "none")
    assert name in result.errors[0]


# Pipes, terminals, interrupts


@pytest.fixture
def many_images(tmp_path: Path) -> Path:
    """A folder of 3,000 images, which take a few seconds."""
    folder = tmp_path / "many"
    folder.mkdir()
    gradient(400, 300).save(tmp_path / "one.png")
    for n in range(3000):
        (folder / f"{n:04}.png").symlink_to(tmp_path / "one.png")
    return folder


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_closed_pipe_prints_no_error(many_images, weights, options):
    command = [*VITRAIL, "predict", str(many_images), "-m", str(weights), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()  # as `| head -1` does
        assert running.stderr.read() == ""
    assert running.returncode == 1


def test_interrupt_exits_with_status_130_and_no_message(many_images, weights):
    command = [*VITRAIL, "predict", str(many_images), "-m", str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        rest, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == ""
    assert len(rest.splitlines()) < 2900


def test_results_and_notes_in_a_terminal_are_plain_text(weights, tmp_path):
    gradient().save(tmp_path / "a.png")
    status, text = run_in_terminal(80, "predict", tmp_path / "a.png", "-m", weights, "--top", 2, "--image-size", 64)
    assert status == 0
    lines = [line.split("\r")[-1] for line in text.splitlines()]
    assert "note: position embeddings were resampled to 64x64 (timm method)." in lines
    assert lines[-3].endswith("a.png")
    assert re.fullmatch(r" +\d+\.\d %  \w+", lines[-1])


def test_progress_bar_in_a_terminal_is_not_in_the_results(weights, tmp_path):
    gradient().save(tmp_path / "one.png")
    (tmp_path / "many").mkdir()
    for n in range(200):
        (tmp_path / "many" / f"{n:03}.png").symlink_to(tmp_path / "one.png")
    (tmp_path / "many" / "bad.png").write_text("not an image")
    with (tmp_path / "out.csv").open("w") as file:
        arguments = ("predict", tmp_path / "many", "-m", weights, "--top", 1)
        status, terminal_output = run_in_terminal(100, *arguments, out=file.fileno())
    assert status == 1
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 202
    assert lines[0] == "path,label,score,index,error"
    assert all(line.startswith(str(tmp_path / "many")) for line in lines[1:])
    assert "predicting" in terminal_output
    assert "error: 1 of 201 images could not be read." in terminal_output


@pytest.mark.parametrize(("columns", "checkpoint"), [(80, "timm"), (120, "timm/vit_base_patch16_224.augreg")])
def test_model_list_fits_the_window(columns, checkpoint):
    status, text = run_in_terminal(columns, "models", "ViT-B*")
    assert status == 0
    assert max(map(len, text.splitlines())) <= columns
    assert f"ViT-B/16      86,567,656    35.1    224  {checkpoint}" in text
