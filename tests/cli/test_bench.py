"""`vitrail bench`: options, wrong input, output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

QUICK = (
    "--models Ti/16@32 --batch-size 2 --precision float32 --eager --device cpu --rounds 1 --turn 0.01 --against none"
)


def test_a_run_prints_a_table_and_its_files(vitrail, tmp_path: Path):
    result = vitrail("bench", *f"{QUICK} --modes train --out {tmp_path}".split())
    assert result.status == 0, result.err
    title, headings, row, *_ = result.out.splitlines()
    assert title == "ViT-Ti/16@32 training, batch 2"
    assert headings.split()[:4] == ["library", "version", "setting", "precision"]
    assert row.startswith("vitrail")
    files = [str(tmp_path / name) for name in ("bench.json", "bench.md", "bench.png")]
    assert result.out.splitlines()[-3:] == files


def test_json_has_nothing_else_on_standard_output(vitrail):
    result = vitrail("bench", *f"{QUICK} --modes latency --json".split())
    assert result.status == 0, result.err
    [row] = json.loads(result.out)["rows"]
    assert row["mode"] == "latency"
    assert row["images_per_s"] > 0


def test_the_status_is_1_if_nothing_was_measured(vitrail):
    result = vitrail("bench", *f"{QUICK} --modes train --time-limit 1s".split())
    assert result.status == 1
    assert "1 tables did not fit in the time limit; raise --time-limit." in result.err


def test_communication_as_json(vitrail):
    result = vitrail("bench", "communication", "--processes", "2", "--parallel", "ddp", "--json", "model.depth=1")
    assert result.status == 0, result.err
    largest = json.loads(result.out)[0]
    assert (largest["collective"], largest["dtype"], largest["calls"]) == ("all_reduce", "float32", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--against tim", "unknown library 'tim'; did you mean 'timm'?"),
        ("--modes training", "unknown mode 'training'; did you mean 'train'?"),
        ("--models B/15", "patch_size=15 leaves 14 px of the image's height 224 uncovered"),
        ("--models nothing", "nothing"),
        ("--batch-size 0", "--batch-size expects positive numbers such as 64 or 1,16, got '0'."),
        ("--batch-size many", "--batch-size expects whole numbers"),
        ("--precision int8", "unknown --precision 'int8'"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--time-limit soon", "--time-limit expects a duration such as 25min or 1.5h, got 'soon'."),
        ("--data digits", "--data needs --model FILE"),
        ("--model vitrail/cifar10 --data nothing", "nothing"),
        ("--model a --models B/16", "got --model and --models; pass one of them."),
        ("--rounds 3 loop", "--rounds is an option of `vitrail bench`; pass options after loop."),
        ("engines --batch-size 0", "--batch-size expects positive numbers"),
        ("engines --model nothing", "nothing"),
        ("input --against none --small 0 --large 0", "got 0 small and 0 large images"),
        ("input --against torch", "unknown library 'torch'"),
        ("loop digit", "unknown recipe 'digit'; did you mean 'digits'?"),
        ("loop digits mnist", "expected one recipe, got digits, mnist; settings are written KEY=VALUE."),
        ("serve nothing", "the server exited with status 1; see its message above."),
        ("growth --mode both", "unknown --mode 'both'"),
        ("growth --model BiT-R50x1 --device cpu", "growth is measured for ViTs"),
        ("communication --parallel tp", "unknown --parallel 'tp'"),
        ("communication --processes 1", "expected two or more"),
    ],
)
def test_wrong_input_is_one_sentence(vitrail, arguments: str, message: str):
    result = vitrail("bench", *arguments.split())
    assert result.status == 1
    assert message in result.err
    assert "unexpected error" not in result.err
    assert "Traceback" not in result.err
