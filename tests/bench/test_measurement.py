"""Rows of a benchmark: medians, ratios, rates, shares and which outputs agree, from replies made up here."""

from __future__ import annotations

import json

import pytest

from vitrail.bench.benchmark import describe_environment
from vitrail.bench.cases import OWN, PRODUCT, Case, Group
from vitrail.bench.measurement import COLUMNS, Benchmark, Row, make_rows
from vitrail.bench.power_law import Point, Sweep, fit_exponent
from vitrail.bench.result_tables import HEADINGS, cells, markdown


def group(*cases: Case, **fields: object) -> Group:
    return Group(model="ViT-Ti/16", mode="inference", batch_size=8, cases=cases, **fields)  # type: ignore[arg-type]


def case(library: str, **fields: object) -> Case:
    return Case(library=library, model="ViT-Ti/16", batch_size=8, **fields)  # type: ignore[arg-type]


def turns(*seconds: float) -> list[dict[str, float]]:
    return [{"step_s": s, "cpu_s": 2 * s, "peak_bytes": 3_000_000_000} for s in seconds]


SETUP = {"flops": 16e9, "error": 1e-6, "version": "1.0"}


def test_rates_are_of_the_median_step():
    [row] = make_rows(group(case(OWN)), [SETUP], [turns(0.2, 0.1, 0.4)])
    assert row.images_per_s == pytest.approx(40)
    assert row.step_ms == pytest.approx(200)
    assert row.tflops == pytest.approx(16e9 / 0.2 / 1e12)
    assert row.rounds == pytest.approx((40, 80, 20))
    assert row.spread == pytest.approx(60 / 40)
    assert row.memory_gb == pytest.approx(3)
    assert row.cpu_ms == pytest.approx(50)


def test_the_ratio_is_the_median_of_the_ratios_to_the_best_peer_within_each_round():
    rows = make_rows(
        group(case(OWN), case("timm"), case("torchvision")),
        [SETUP] * 3,
        [turns(1.0, 4.0, 10.0), turns(2.0, 2.0, 30.0), turns(9.0, 9.0, 9.0)],
    )
    ours, timm, torchvision = rows
    assert timm.status == "baseline"  # its median step is the shortest of the peers
    assert ours.ratio == pytest.approx(2.0)  # of 2, 0.5 and 3
    assert timm.ratio == pytest.approx(1.0)
    assert torchvision.ratio == pytest.approx(2 / 9)


def test_own_rows_are_never_the_baseline_of_peers():
    rows = make_rows(group(case(OWN), case("timm")), [SETUP] * 2, [turns(0.1), turns(1.0)])
    assert [row.status for row in rows] == ["ok", "baseline"]


def test_the_first_row_is_the_baseline_where_the_group_says_so():
    rows = make_rows(group(case(OWN), case(OWN, work="rollout"), baseline="first"), [SETUP] * 2, [turns(1), turns(4)])
    assert [row.ratio for row in rows] == [1.0, 0.25]


def test_a_row_whose_outputs_differ_is_shown_and_not_a_baseline():
    rows = make_rows(
        group(case(OWN), case("timm", precision="int8"), case("torchvision")),
        [SETUP, {**SETUP, "error": 0.5}, SETUP],
        [turns(1.0), turns(0.1), turns(2.0)],
    )
    assert rows[1].status == "differs: relative error 0.5"
    assert rows[2].status == "baseline"
    assert rows[0].ratio == pytest.approx(2.0)


def test_labeled_images_decide_instead_of_the_relative_error():
    setups = [
        {**SETUP, "top1": 0.743},
        {**SETUP, "top1": 0.741, "error": 0.4},
        {**SETUP, "top1": 0.739, "error": 0.001},
    ]
    cases = (case(OWN), case("openvino", precision="int8"), case("onnxruntime", precision="int8"))
    rows = make_rows(group(*cases), setups, [turns(1.0)] * 3)
    assert [row.status for row in rows] == ["ok", "baseline", "differs: top-1 -0.4 points"]


def test_the_share_is_of_the_product_in_the_same_precision():
    products = [case(PRODUCT, work="product", precision=kind) for kind in ("float32", "bfloat16")]
    rows = make_rows(
        group(case(OWN), case(OWN, precision="bfloat16"), case("openvino", precision="int8"), *products),
        [SETUP, SETUP, SETUP, {"flops": 64e9}, {"flops": 256e9}],
        [turns(1.0)] * 5,
    )
    assert len(rows) == 3
    assert [row.share for row in rows] == [pytest.approx(1 / 4), pytest.approx(1 / 16), None]


def test_a_failure_in_any_round_is_the_row():
    failed = {"kind": "memory", "reason": "out of memory"}
    rows = make_rows(group(case(OWN), case("timm")), [failed, SETUP], [[], turns(1.0)])
    assert rows[0].status == "out of memory"
    assert not rows[0].measured
    assert rows[0].ratio is None


def test_every_field_of_a_row_is_a_column_and_a_key():
    row = Row(model="ViT-Ti/16", mode="train", batch_size=8, library=OWN, setting="eager", precision="float32")
    assert set(row.to_dict()) == {*COLUMNS, "rounds"}
    assert set(COLUMNS) == {*HEADINGS, "model", "mode", "batch_size"}  # these three are the title of the table
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def test_tables_leave_out_empty_columns_and_put_the_fastest_first():
    rows = make_rows(group(case("timm"), case(OWN)), [SETUP] * 2, [turns(2.0), turns(1.0)])
    headings, lines = cells(rows)
    assert [line[0] for line in lines] == [OWN, "timm"]
    assert "top-1" not in headings
    assert "compile s" not in headings
    assert lines[0][headings.index("images/s")] == "8"
    text = markdown(
        Benchmark(describe_environment("cpu"), rows, {"ViT-Ti/16 inference, batch 8": "timm"}), "vitrail bench"
    )
    assert "| vitrail | 1.0 | eager | float32 | 8 |" in text
    assert "ratio: to timm" in text


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 2.0, 3.5])
def test_the_exponent_of_a_power_law_is_found(exponent: float):
    assert fit_exponent([(x, 7 * x**exponent) for x in (1.0, 2.0, 5.0, 9.0)]) == pytest.approx(exponent)


def test_points_without_a_measurement_do_not_count():
    costs = {160: 1.0, 320: 4.0, 640: 64.0, 1024: None}
    points = tuple(Point(value=v, ms=ms, memory_mb=None, gflops=1.0, status="") for v, ms in costs.items())
    sweep = Sweep(variable="image size", title="", points=points)
    assert sweep.exponent("ms") == pytest.approx(3.0)
    assert sweep.last_exponent("ms") == pytest.approx(4.0)
    assert sweep.exponent("memory_mb") is None
    assert fit_exponent([(2.0, 1.0)]) is None
