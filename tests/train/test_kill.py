"""A run that is killed anywhere and resumed ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

from train.commands import Commands


def test_a_killed_run_ends_with_the_same_bits(commands: Commands, tmp_path: Path):
    """A run is forked, which a process that has computed something must not be."""
    script = Path(__file__).with_name("killing.py")
    done = commands.run("--kills", 5, "--seed", 1, folder=tmp_path, script=script)
    assert done.status == 0, done.out + done.err
    assert "5 kills" in done.out
    assert "every weight, average and moment has the same bits" in done.out
