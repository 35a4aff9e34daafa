"""The page of an experiment: HTML and Markdown with the same content, safe and self-contained."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from reproduction.pages import read_html, read_markdown
from reproduction.synthetic import CONFIG, make_arm, make_results

from vitrail.config import epochs, steps
from vitrail.reproduction.analysis import Analysis, Metric, Paragraph, Plot, Table, Verdict
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.experiment_page import PageInfo, format_cell, write_page
from vitrail.reproduction.results import Results, SeedMean

ARMS = [make_arm("a", (1e-3, 3e-3)), make_arm("b", (1e-3, 3e-3))]
RESULTS = make_results(ARMS, {"a": [0.5, 0.75], "b": [0.25]})
TABLE = Table(
    "Accuracy.",
    ["arm", "accuracy, %", "paper"],
    [
        ["a", SeedMean(0.625, -0.5, 1.25, 2), "64.2"],
        ["b", SeedMean(0.25, math.nan, math.nan, 1), None],
        ["c", None, None],
    ],
)


def analysis(*blocks: object, verdicts: tuple[Verdict, ...] = ()) -> Analysis:
    verdicts = verdicts or (Verdict("A claim.", "holds", "a minus b: +1.00 points."),)
    return Analysis(verdicts, blocks, "Ours are smaller.")  # type: ignore[arg-type]


def write(out: Path, found: Analysis, results: Results = RESULTS, **changes: object) -> Path:
    experiment = Experiment(
        name="small", title="A <title> & more", claim="It *helps* | a lot.", source="Paper, Table 1",
        arms=lambda scale, data: ARMS, analyze=lambda results: found,
    )  # fmt: skip
    info = {"finished": 3, "total": 9, "left_out": None, "command": None, "written": 0.0} | changes
    out.mkdir(exist_ok=True)
    write_page(out, experiment, results, found, PageInfo(**info))  # type: ignore[arg-type]
    return out


def draw() -> Figure:
    figure = Figure()
    figure.subplots().plot([0, 1])
    return figure


def test_both_files_have_the_same_tables_verdicts_and_facts(tmp_path: Path):
    verdicts = tuple(Verdict(f"Claim {o}.", o, f"Because {o}.") for o in ("holds", "does not hold", "undecided"))  # type: ignore[arg-type]
    out = write(tmp_path, analysis(TABLE, Paragraph("Plain."), TABLE, verdicts=verdicts))
    html, markdown = read_html(out), read_markdown(out)
    assert html == markdown
    for text in ((out / "index.html").read_text(), (out / "page.md").read_text()):
        assert "1 of 3 claims agrees with the source." in text
        assert "Ours are smaller." in text
    assert html.tables[0].columns == ["arm", "accuracy, %", "paper"]
    assert html.tables[0].rows == [["a", "62.50 -50.00 to 125.00", "64.2"], ["b", "25.00", "–"], ["c", "–", "–"]]
    assert html.verdicts == [(v.outcome, v.claim, v.reason) for v in verdicts]
    assert "| a | 62.50 (-50.00 to 125.00) | 64.2 |" in (out / "page.md").read_text()


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)


@given(st.lists(TEXTS, min_size=2, max_size=2), TEXTS, TEXTS)
def test_any_text_is_shown_as_it_is(tmp_path_factory: pytest.TempPathFactory, columns: list[str], cell: str, text: str):
    verdict = Verdict(text, "undecided", cell)
    out = write(tmp_path_factory.mktemp("page"), analysis(Table("T", columns, [[cell, text]]), verdicts=(verdict,)))
    html = read_html(out)
    assert html.tables[0].columns == columns
    assert html.tables[0].rows == [[cell, text]]
    assert html.verdicts == [("undecided", text, cell)]


def test_bars_in_cells_columns_and_captions_do_not_split_a_row(tmp_path: Path):
    table = Table("T", ["a|b", "c"], [["x|y", "1"], ["z", "|"]])
    out = write(tmp_path, analysis(table, verdicts=(Verdict("p|q", "holds", "r|s"),)), command="vitrail a|b")
    markdown = read_markdown(out)
    assert markdown == read_html(out)
    assert markdown.tables[0].rows == [["x|y", "1"], ["z", "|"]]
    assert markdown.facts["Command"] == "vitrail a|b"


def test_the_page_needs_no_other_file_and_runs_no_script(tmp_path: Path):
    out = write(tmp_path, analysis(Plot("curve", "A <script>curve</script>", draw), TABLE))
    html = (out / "index.html").read_text()
    assert "<script" not in html
    assert "A &lt;title&gt; &amp; more" in html
    references = [a or b for a, b in re.findall(r"(?:src|href)=\"([^\"]{0,30})|url\(([^)]{0,30})", html)]
    assert [text[:22] for text in references] == ["data:image/png;base64,"]
    assert (out / "figures" / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert "![A <script>curve</script>](figures/curve.png)" in (out / "page.md").read_text()


def test_facts_state_runs_learning_rates_time_and_command(tmp_path: Path):
    facts = read_html(write(tmp_path, analysis(TABLE), command="vitrail reproduce small", left_out="arm c")).facts
    assert facts["Runs"] == "3 of 9; left out: arm c"
    assert "0.001, 0.003" in facts["Learning rates"]
    assert "2 of 2 arms use the smallest or the largest rate of their list" in facts["Learning rates"]
    assert facts["Source"] == "Paper, Table 1"
    assert facts["Command"] == "vitrail reproduce small"
    assert facts["Time"].startswith("30 s in all runs together")
    assert facts["Versions"].endswith("1970-01-01")
    fixed = Results([make_arm("a")], "tiny", ())
    assert "Learning rates" not in read_html(write(tmp_path, analysis(TABLE), results=fixed)).facts


def test_facts_state_every_duration_and_batch_size(tmp_path: Path):
    short = CONFIG.replace(duration=steps(4), batch_size=64)
    long = CONFIG.replace(duration=steps(1000), batch_size=256)
    counted = CONFIG.replace(duration=epochs(3), batch_size=128)
    for name, configs, expected in (
        ("one", [short, short], "4 steps, batch size 64"),
        ("range", [short, long, short], "4 to 1000 steps, batch size 64 to 256"),
        ("units", [short, counted], "3 epochs or 4 steps, batch size 64 to 128"),
    ):
        results = Results([make_arm(f"arm {i}", config=config) for i, config in enumerate(configs)], "tiny", ())
        facts = read_html(write(tmp_path / name, analysis(TABLE), results=results)).facts
        assert facts["Scale"] == f"tiny: digits, {expected}"


def test_no_arm_at_the_end_of_its_learning_rates_is_not_mentioned(tmp_path: Path):
    arm = make_arm("a", (3e-3, 1e-3, 1e-2))
    facts = read_html(write(tmp_path, analysis(TABLE), results=make_results([arm], {"a": [0.5]}))).facts
    assert facts["Learning rates"].endswith("the test images are used for the final number only")


def test_runs_that_diverged_are_named(tmp_path: Path):
    assert "Diverged" not in read_html(write(tmp_path, analysis(TABLE))).facts
    (first, *others) = make_results([make_arm("a")], {"a": [0.5, 0.75]}).trials.values()
    results = Results([make_arm("a")], "tiny", [replace(first, test=None, validation=None, diverged=True), *others])
    page = read_html(write(tmp_path, analysis(TABLE), results=results))
    assert page.facts["Diverged"].startswith(f"{first.key};")


def test_results_json_has_the_trials_in_a_fixed_order(tmp_path: Path):
    shuffled = Results(ARMS, "tiny", list(RESULTS.trials.values())[::-1])
    first, second = (
        (write(tmp_path / name, analysis(TABLE), results=results) / "results.json").read_text()
        for name, results in (("one", RESULTS), ("two", shuffled))
    )
    assert first == second
    found = json.loads(first)
    assert [trial["key"] for trial in found["trials"]] == sorted(RESULTS.trials)
    assert found["summary"] == "1 holds"


@pytest.mark.parametrize(
    ("cell", "metric", "expected"),
    [
        (None, Metric(), "–"),
        ("text", Metric(), "text"),
        (SeedMean(0.5, math.nan, math.nan, 1), Metric(), "50.00"),
        (SeedMean(0.12345, 0.1, 0.2, 3), Metric(), "12.35 (10.00 to 20.00)"),
        (SeedMean(1.5, 1.0, 2.0, 3), Metric(percent=False, digits=1, unit=" px"), "1.5 px (1.0 px to 2.0 px)"),
    ],
)
def test_cells_are_means_with_their_interval(cell: object, metric: Metric, expected: str):
    assert format_cell(cell, metric) == expected  # type: ignore[arg-type]
