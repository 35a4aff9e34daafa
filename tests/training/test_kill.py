"""A run that is killed at random moments and resumed has the result of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

from training.commands import Commands


def test_killed_and_resumed_run_is_identical(commands: Commands, tmp_path: Path):
    """The runs are forked, which is only safe from a process that has not computed anything."""
    script = Path(__file__).with_name("killing.py")
    result = commands.run("--kills", 5, "--seed", 1, folder=tmp_path, script=script)
    assert result.status == 0, result.out + result.err
    assert "5 kills" in result.out
    assert "all weights, averages and moments are identical" in result.out
