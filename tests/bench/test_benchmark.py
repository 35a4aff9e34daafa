"""Whole benchmarks with real processes at tiny sizes: files, failing cases, interruption and continuation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import import_peer
from PIL import Image

from vitrail.bench.benchmark import benchmark
from vitrail.bench.cases import OWN, Request
from vitrail.bench.measurement import Benchmark, Row

TINY = Request(
    against=("timm",), models=("Ti/16@32",), modes=("train",), batch_sizes=(2,), precision="float32", device="cpu",
    eager=True,
)  # fmt: skip

CREATE = "def create_model(*args, **options)"


def run(request: Request, out: Path | None = None, **options: object) -> Benchmark:
    return benchmark(request, out, rounds=2, turn_s=0.01, **options)  # type: ignore[arg-type]


def row_of(result: Benchmark, library: str) -> Row:
    [row] = [row for row in result.rows if row.library == library]
    return row


@pytest.fixture
def fake_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that the processes of cases import instead of timm."""

    def write(code: str) -> None:
        folder = tmp_path / "modules"
        folder.mkdir()
        (folder / "timm.py").write_text(code)
        paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return write


@pytest.mark.peer
def test_the_folder_has_json_tables_and_a_chart_of_the_same_rows(tmp_path: Path):
    import_peer("timm")
    result = run(TINY, tmp_path / "out", command="vitrail bench --tiny")
    saved = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert saved["command"] == "vitrail bench --tiny"
    assert [Row.from_dict(row) for row in saved["rows"]] == result.rows
    ours, timm = row_of(result, OWN), row_of(result, "timm")
    assert ours.measured
    assert ours.ratio is not None
    assert len(ours.rounds) == 2
    assert timm.status == "baseline"
    assert result.baselines == {"ViT-Ti/16@32 training, batch 2": "timm, eager, fused AdamW, float32"}
    text = (tmp_path / "out" / "bench.md").read_text()
    assert "ViT-Ti/16@32 training, batch 2" in text
    assert timm.version in text
    with Image.open(tmp_path / "out" / "bench.png") as chart:
        assert chart.width > 400


def test_a_missing_library_is_a_row_that_says_how_to_install_it(fake_timm):
    fake_timm("raise ModuleNotFoundError(\"No module named 'timm'\", name='timm')")
    result = run(TINY)
    assert row_of(result, "timm").status == "not installed: pip install 'vitrail[bench]'"
    assert row_of(result, OWN).measured
    assert row_of(result, OWN).ratio is None


@pytest.mark.slow
def test_a_library_that_lacks_another_says_which(fake_timm):
    fake_timm("import einops_of_another_name")
    status = row_of(run(TINY), "timm").status
    assert status == "not installed (einops_of_another_name is missing): pip install 'vitrail[bench]'"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os.abort()", "its process was ended by SIGABRT"),
        pytest.param("raise SystemExit(3)", "its process ended with status 3", marks=pytest.mark.slow),
        pytest.param(f"{CREATE}: raise TypeError('no such model')", "TypeError: no such model", marks=pytest.mark.slow),
        (f"{CREATE}: raise MemoryError", "out of memory"),
    ],
)
def test_a_case_that_fails_is_a_row_and_the_others_are_measured(fake_timm, tmp_path: Path, code: str, status: str):
    fake_timm(code)
    result = run(TINY, tmp_path / "out")
    assert row_of(result, "timm").status == status
    assert row_of(result, OWN).measured
    assert status in (tmp_path / "out" / "bench.md").read_text()


@pytest.mark.slow
def test_the_traceback_of_a_failed_case_is_in_its_log(fake_timm, tmp_path: Path):
    fake_timm(f"{CREATE}: raise TypeError('no such model')")
    run(TINY, tmp_path)
    logs = [path.read_text() for path in (tmp_path / "logs").glob("*timm.log")]
    assert any("TypeError: no such model" in text and "Traceback" in text for text in logs)


@pytest.mark.slow
def test_cases_that_ran_out_of_memory_together_are_tried_again_alone(fake_timm, tmp_path: Path):
    marker = tmp_path / "tried"
    fake_timm(
        f"from pathlib import Path\nmarker = Path({str(marker)!r})\n"
        "def create_model(*args, **options):\n"
        "    count = len(marker.read_text()) if marker.exists() else 0\n"
        "    marker.write_text('x' * (count + 1))\n"
        "    raise MemoryError\n"
    )
    assert row_of(run(TINY, jobs=3), "timm").status == "out of memory"
    assert marker.read_text() == "xx"


def test_measured_groups_are_not_measured_again(tmp_path: Path):
    request = Request(**{**vars(TINY), "against": ()})
    first = run(request, tmp_path)
    steps: list[str] = []
    again = run(request, tmp_path, progress=steps.append)
    assert steps == []
    assert again.rows == first.rows
    run(Request(**{**vars(request), "batch_sizes": (2, 3)}), tmp_path, progress=steps.append)
    assert steps
    assert all("batch 3" in step for step in steps)


@pytest.mark.slow
def test_other_settings_or_a_damaged_file_are_measured_again(tmp_path: Path):
    request = Request(**{**vars(TINY), "against": ()})
    run(request, tmp_path)
    steps: list[str] = []
    benchmark(request, tmp_path, rounds=1, turn_s=0.01, progress=steps.append)
    assert steps
    [file] = (tmp_path / "groups").glob("*.json")
    file.write_text("{")
    steps.clear()
    benchmark(request, tmp_path, rounds=1, turn_s=0.01, progress=steps.append)
    assert steps


def test_what_does_not_fit_in_the_time_limit_says_so_and_is_measured_later(tmp_path: Path):
    request = Request(**{**vars(TINY), "against": ()})
    result = run(request, tmp_path, time_limit_s=0.1)
    assert result.unfinished == 1
    assert [row.status for row in result.rows] == ["not measured: time limit"]
    assert not (tmp_path / "bench.png").exists()
    assert run(request, tmp_path).unfinished == 0
    assert (tmp_path / "bench.png").exists()


def test_a_run_that_is_interrupted_leaves_no_process_and_continues(tmp_path: Path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "vitrail",
        "bench",
        "--models",
        "Ti/16@32",
        "--modes",
        "train",
        "--against",
        "none",
    ]
    command += ["--batch-size", "2,3", "--precision", "float32", "--eager", "--device", "cpu"]
    command += ["--rounds", "2", "--turn", "0.01", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(out.glob("groups/*-2-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same command again to continue" in errors
    assert list(out.glob("groups/*-3-*.json")) == []
    assert _processes_with(str(out)) == []
    first = next(out.glob("groups/*-2-*.json")).read_text()
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert "batch 2" not in again.stderr
    rows = json.loads(again.stdout)["rows"]
    assert [row["batch_size"] for row in rows] == [2, 3]
    assert rows[0] == json.loads(first)["rows"][0]


def _processes_with(text: str) -> list[str]:
    """Command lines of the processes with this text in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "environ").read_text(errors="replace"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
