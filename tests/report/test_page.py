"""The report page: content for every kind of run, no external resources."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import randomized
from PIL import Image
from report.run_folders import (
    LABELS,
    MODEL,
    PREPROCESS,
    Images,
    Page,
    compute_scores,
    evaluation_line,
    train_line,
    write_finished,
    write_run,
)

from vitrail.config import BiTConfig, PreprocessConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import NotFoundError
from vitrail.evaluation import pixel_knn_baseline
from vitrail.models import Net, build
from vitrail.report import write_report


def report(run: Path, net: Net, **options: Any) -> Page:
    """Write the report of a run and parse it."""
    values = {"preprocess": PREPROCESS, "labels": LABELS} | options
    return Page(write_report(run, net=net, **values).read_text(encoding="utf-8"))


@dataclass
class FullReport:
    """A report with every section, and its run and network."""

    run: Path
    net: Net
    page: Page


@pytest.fixture(scope="module")
def full_report(tmp_path_factory: pytest.TempPathFactory) -> FullReport:
    folder = tmp_path_factory.mktemp("runs")
    run, net, source = write_finished(folder / "digits"), randomized(build(MODEL)), Images()
    config_without_positions = MODEL.replace(position="none").to_dict()
    other_run = write_run(
        folder / "other", [evaluation_line(s, s / 800) for s in (100, 200)], model=config_without_positions
    )
    page = report(
        run,
        net,
        scores=compute_scores(net, source),
        source=source,
        measured_on="test",
        baselines={"3 nearest neighbors": pixel_knn_baseline(Images(60), source)},
        comparisons=[other_run],
        unreadable=[("noise/bad.png", "is empty (0 bytes)")],
        command="vitrail train digits",
    )
    return FullReport(run, net, page)


@pytest.fixture
def page(full_report: FullReport) -> Page:
    return full_report.page


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the PNG files, which take a second per page; `full_report` has them."""
    for name in ("draw_charts", "draw_confusion"):
        monkeypatch.setattr(f"vitrail.report.page.{name}", lambda *_: None)


def test_page_has_no_external_resources(page: Page):
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "base"}
        for name in ("src", "href", "srcset", "data", "action"):
            url = attributes.get(name)
            assert url is None or url.startswith(("data:image/", "#")), url
    assert "http" not in page.html
    assert "url(" not in page.html
    assert "@import" not in page.html


def test_page_is_under_120_kilobytes(page: Page):
    assert len(page.html) < 120_000


def test_every_link_targets_a_section(page: Page):
    targets = {str(a["href"]).removeprefix("#") for a in page.all("a")}
    assert targets
    assert targets == page.ids()


def test_page_opens_with_accuracy_interval_and_baselines(full_report: FullReport):
    scores, text = compute_scores(full_report.net, Images()), full_report.page.text
    assert f"{100 * scores.top1:.1f} % top-1 accuracy (40 test images)." in text
    assert f"95 % interval: {100 * scores.low:.1f} to {100 * scores.high:.1f} %." in text
    assert "this model" in text
    assert "3 nearest neighbors" in text
    assert re.search(r"without positions 25\.0 %", text)  # the last evaluation of the other run


def test_page_describes_the_model_and_its_training(full_report: FullReport):
    page, parameters = full_report.page, sum(p.numel() for p in full_report.net.parameters())
    for part in (
        "ViT: width 16, 2 blocks, 2 heads, MLP 32",
        f"{parameters:,}",
        "4 × 4, 2 × 2 pixels each, 1 channel",
        "AdamW, learning rate 0.001, gradient clipping 1",
        "20 epochs, batch size 256, cosine",
        "random crop of 8 to 100 % of the area, horizontal flip",
        "900 images per second (median)",
        "6,400 training images processed",
    ):
        assert part in page.text, part


def test_page_has_commands_to_predict_and_to_repeat_the_run(page: Page, full_report: FullReport):
    assert f"vitrail predict --model {full_report.run.name}/model image.jpg" in page.text
    assert "vitrail train digits" in page.text
    assert "--resume" not in page.text


@pytest.mark.parametrize(
    "command",
    ["vitrail train --resume --out 'my run'", "vitrail finetune -o r --resume", "vitrail train digits --auto-resume"],
)
def test_resumed_run_is_repeated_from_its_config(tmp_path: Path, net: Net, command: str):
    run = write_finished(tmp_path / "my run")
    page = report(run, net, command=command)
    assert "Repeat the run vitrail train 'my run/config.json'" in page.text
    assert "--resume" not in page.text
    assert "--auto-resume" not in page.text


def test_page_lists_unreadable_images(page: Page):
    assert "unreadable" in page.ids()
    assert "noise/bad.png is empty (0 bytes)" in page.text


def test_class_names_are_escaped(page: Page):
    assert "<script>" not in page.html
    assert "<script>alert(1)</script>" in page.text
    assert "dog & co" in page.text
    assert "sea horse" in page.text


def test_confusion_matrix_equals_that_of_the_scores(finished: Path, net: Net):
    source = Images()
    scores = compute_scores(net, source)
    html = report(finished, net, scores=scores, source=source).html
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", html, re.S)[: len(LABELS)]
    table = [[int(c) if c != "·" else 0 for c in re.findall(r"<td.*?>(?:<span.*?>)?([\d,·]+)", row)] for row in rows]
    assert np.array_equal(np.array(table), scores.confusion)


def test_images_equal_those_of_the_source_pixel_for_pixel(finished: Path, net: Net):
    source = Images()
    html = report(finished, net, scores=compute_scores(net, source), source=source).html
    cards = re.findall(
        r'<figure class="card wrong" title="noise/(\d+)\.png"><img src="data:image/png;base64,(.*?)"', html
    )
    assert len(cards) >= 10
    for index, data in cards:
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        assert np.array_equal(shown, source.pixels[int(index)].repeat(3, axis=2))


def test_every_image_has_alt_text(page: Page):
    assert page.all("img")
    assert all(attributes.get("alt") for attributes in page.all("img"))
    assert {"lang": "en"} in [a for t, a in page.tags if t == "html"]


def test_figures_are_saved_as_png(full_report: FullReport):
    for name in ("curves", "confusion", "attention", "positions", "filters"):
        with Image.open(full_report.run / "figures" / f"{name}.png") as image:
            assert image.format == "PNG"
            assert min(image.size) >= 200, name


def test_rewritten_page_is_identical(finished: Path, net: Net):
    first = report(finished, net).html
    assert report(finished, net).html == first
    assert not [p for p in finished.iterdir() if p.name.startswith(".")]


def test_stopped_run_shows_its_progress_and_the_resume_command(tmp_path: Path, net: Net):
    run = write_run(tmp_path / "early", [train_line(10)])
    page = report(run, net, source=Images())
    assert "This run stopped at 1 of 20 epochs" in page.text
    assert "vitrail train --resume --out early" in page.text
    assert "1.81 training loss." in page.text


def test_run_ended_by_patience_has_no_resume_command(tmp_path: Path, net: Net):
    run = write_run(tmp_path / "patient", [train_line(10)])
    (run / "model").mkdir()
    (run / "model" / "config.json").touch()
    page = report(run, net, source=Images())
    assert "This run stopped at 1 of 20 epochs" in page.text
    assert "--resume" not in page.text


def test_class_names_in_charts_are_unique_and_abbreviated_only_if_needed(tmp_path: Path, net: Net):
    names = ("chain saw", "church", "a_very_long_name_that_ends_in_one", "a_very_long_name_that_ends_in_two")
    source = Images(labels=names)
    page = report(
        write_finished(tmp_path / "run"), net, labels=names, scores=compute_scores(net, source), source=source
    )
    heads = re.findall(r'<th scope="(?:col|row)"[^>]*>(?:<span>)?([^<]*)', page.html.partition("matrix named")[2])
    expected = ["chain saw", "church", "a very long…t ends in one", "a very long…t ends in two"]
    assert heads[:8] == expected + expected
    bars = re.findall(r'class="who" title="[^"]*">([^<]*)', page.html)
    assert set(bars) == set(expected)


def test_confusion_matrix_of_many_classes_has_the_full_width(tmp_path: Path):
    names = (*(f"class {i}" for i in range(10)), "red \x1b[31m")
    for count, layout in ((10, 'class="two"'), (11, 'class="two stacked"')):
        net, source = randomized(build(MODEL.replace(num_classes=count))), Images(labels=names[:count])
        run = write_finished(tmp_path / f"run{count}")
        page = report(run, net, labels=names[:count], scores=compute_scores(net, source), source=source)
        assert layout in page.html
    assert "\x1b" not in page.html


def test_page_contains_no_local_paths(tmp_path: Path, net: Net):
    data, start = f"folder:{tmp_path}/my photos", f"{tmp_path}/weights/tiny.safetensors"
    run = write_run(tmp_path / "run", [train_line(200)], data={"source": data}, init_from=start, model=None)
    command = shlex.join(["vitrail", "finetune", "--model", start, f"--data={data}", "--out", str(run)])
    page = report(run, net, command=command)
    assert str(tmp_path) not in page.html
    assert "vitrail finetune --model tiny.safetensors '--data=folder:my photos' --out run" in page.text
    assert "Started from tiny.safetensors" in page.text


def test_run_without_logged_steps_has_a_page(tmp_path: Path, net: Net):
    run = write_run(tmp_path / "nothing", [])
    page = report(run, net)
    assert "Nothing has been measured yet." in page.text
    assert "ended before its first logged step" in page.text


def test_run_with_an_incomplete_last_line_has_a_page(finished: Path, net: Net):
    with (finished / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "lo')
    assert "This run stopped" not in report(finished, net).text


def test_last_evaluation_is_reported_without_final_scores(finished: Path, net: Net):
    assert "50.0 % top-1 accuracy (40 validation images)." in report(finished, net).text


def test_scores_on_the_test_split_come_first(finished: Path, net: Net):
    test_scores = {"top1": 0.61, "top5": 1.0, "loss": 1.0, "low": 0.58, "high": 0.64, "count": 1000}
    with (finished / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 200, "epoch": 20.0, "images": 6400, "test": test_scores, "model_step": 150}) + "\n"
        )
    source = Images()
    scores = compute_scores(net, source)
    page = report(finished, net, scores=scores, source=source)
    assert "61.0 % top-1 accuracy (1,000 test images)." in page.text
    assert f"On 40 validation images: {100 * scores.top1:.1f} %." in page.text
    assert "this model, test 61.0 %" in page.text
    assert "selected on these images" not in page.text


def test_scores_on_images_used_for_selection_have_a_warning(finished: Path, net: Net):
    scores = compute_scores(net, Images())
    warning = "selected on these images"
    assert warning in report(finished, net, scores=scores, measured_on="held out").text
    assert warning not in report(finished, net, scores=scores, measured_on="test").text


def test_ema_scores_are_the_curve_if_only_ema_was_evaluated(tmp_path: Path, net: Net):
    lines = [evaluation_line(step, step / 400) | {"ema": True} for step in (100, 200)]
    page = report(write_run(tmp_path / "ema", lines), net)
    assert "EMA weights" not in page.text
    assert "50.0 % validation" in page.text


def test_only_the_worst_of_150_classes_are_shown(finished: Path):
    labels = tuple(f"class number {i}" for i in range(150))
    source, net = Images(600, labels), randomized(build(MODEL.replace(num_classes=150)))
    page = report(finished, net, scores=compute_scores(net, source), source=source, labels=labels)
    assert "Most frequent confusions:" in page.text
    assert re.search(r"The 16 worst of 1[45]\d classes", page.text)
    assert "Top-5 accuracy:" in page.text
    assert not [a for a in page.all("table") if a.get("class") == "matrix"]
    assert len(page.html) < 200_000


def test_multi_label_page_has_mean_average_precision(tmp_path: Path, net: Net):
    source = Images()
    targets = (torch.rand(40, 4, generator=torch.Generator().manual_seed(0)) < 0.4).float()
    scores = compute_scores(net, source, targets)
    run = write_run(
        tmp_path / "multi_label", [train_line(200), evaluation_line(200, 0.5, map=scores.mean_average_precision)]
    )
    page = report(run, net, scores=scores, source=source)
    assert f"{100 * scores.mean_average_precision:.1f} % mean average precision over 4 classes" in page.text
    assert "By class: average precision." in page.text
    assert "Mean average precision" in page.text
    assert not [a for a in page.all("table") if a.get("class") == "matrix"]


def test_multi_label_page_names_all_labels_and_the_sigmoid_loss(tmp_path: Path, net: Net):
    source, targets = Images(), torch.tensor([[1.0, 1.0, 0.0, 1.0]]).repeat(40, 1)
    lines = [train_line(100), train_line(200), *(evaluation_line(step, 0.5, map=0.4) for step in (100, 200))]
    run = write_run(tmp_path / "multi_label", lines, classify={"label_smoothing": 0.1})
    page = report(run, net, scores=compute_scores(net, source, targets), source=source)
    assert "Objective sigmoid cross-entropy, label smoothing 0.1" in page.text
    assert "The prediction is one of the image's classes." in page.text
    attention = page.html.partition('id="attention"')[2]
    for part in (page.html.partition('id="right"')[2].partition("</section>")[0], attention.partition("</section>")[0]):
        assert "cat, dog &amp; co, sea horse" in part
    chart = page.html.partition("<figcaption>Mean average precision")[2].partition("</figure>")[0]
    assert "<svg" in chart
    assert "training" not in chart


def test_masked_patch_page_has_a_loss_and_no_accuracy(tmp_path: Path):
    lines = [train_line(s, accuracy=None) for s in range(10, 201, 10)] + [
        evaluation_line(200, None, low=None, high=None)
    ]
    run = write_run(tmp_path / "masked", lines, objective="masked-patch")
    net = randomized(build(MODEL.replace(num_classes=0)))
    page = report(run, net, source=Images(), labels=())
    assert "0.271 training loss (from 1.81 at the start)." in page.text
    assert "Loss on validation images: 0.5." in page.text
    assert "predict corrupted patches" in page.text
    assert "vitrail finetune --model" in page.text
    assert "classes" not in page.ids()
    assert "Accuracy" not in page.text
    assert "attention" in page.ids()


def test_missing_attention_is_stated_in_its_section(tmp_path: Path):
    config = BiTConfig(image_size=32, channels=1, num_classes=4, layers=(1, 1, 1, 1), width_factor=0.5)
    run = write_run(tmp_path / "bit", [train_line(200)], model=config.to_dict())
    page = report(
        run,
        build(config).eval(),
        source=Images(),
        preprocess=Preprocess(PreprocessConfig(image_size=32, mean=(0.5,), std=(0.5,))),
    )
    assert "A BiT has no attention" in page.text
    assert "A BiT has no position embeddings" in page.text
    assert "BiT ResNet, 1-1-1-1 units" in page.text
    assert not (run / "figures" / "attention.png").exists()


def test_missing_position_embeddings_are_stated(finished: Path):
    net = randomized(build(MODEL.replace(position="none")))
    assert "This model has no position embeddings" in report(finished, net).text


def test_color_photographs_are_small_jpegs(finished: Path):
    from sklearn.datasets import load_sample_image

    photo = load_sample_image("china.jpg")
    source = Images(4, channels=3)
    source.pixels = np.stack([photo[:320, i * 40 : i * 40 + 320] for i in range(4)])
    config = MODEL.replace(image_size=224, patch_size=16, channels=3)
    preprocess = Preprocess(PreprocessConfig(image_size=224))
    page = report(finished, randomized(build(config)), source=source, preprocess=preprocess)
    jpegs = [str(a["src"]) for a in page.all("img") if str(a["src"]).startswith("data:image/jpeg")]
    assert len(jpegs) == 8
    assert max(map(len, jpegs)) < 30_000


def test_image_that_became_unreadable_is_skipped(finished: Path, net: Net, tmp_path: Path):
    class MissingImages(Images):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return type(sample)(sample.key, tmp_path / "gone.png", sample.target)

    page = report(finished, net, scores=compute_scores(net, Images()), source=MissingImages())
    assert "There are no images to show." in page.text
    assert "There are none to show." in page.text


def test_folder_without_a_run_is_an_error(tmp_path: Path, net: Net):
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        report(tmp_path, net)
