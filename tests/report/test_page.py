"""The page: everything it should say, nothing from elsewhere, for every kind of run."""

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
    evaluated,
    logged,
    measured,
    write_finished,
    write_run,
)

from vitrail.config import BiTConfig, PreprocessConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import NotFoundError
from vitrail.evaluate import pixel_knn_baseline
from vitrail.models import Net, build
from vitrail.report import write_report


def report(run: Path, net: Net, **options: Any) -> Page:
    """The page of a run, taken apart."""
    values = {"preprocess": PREPROCESS, "labels": LABELS} | options
    return Page(write_report(run, net=net, **values).read_text(encoding="utf-8"))


@dataclass
class Whole:
    """A page with everything there is to show, and what went into it."""

    run: Path
    net: Net
    page: Page


@pytest.fixture(scope="module")
def all_of_it(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("runs")
    run, net, source = write_finished(folder / "digits"), randomized(build(MODEL)), Images()
    without = MODEL.replace(position="none").to_dict()
    other = write_run(folder / "other", [evaluated(s, s / 800) for s in (100, 200)], model=without)
    page = report(
        run,
        net,
        scores=measured(net, source),
        source=source,
        measured_on="test",
        baselines={"3 nearest neighbors": pixel_knn_baseline(Images(60), source)},
        comparisons=[other],
        unreadable=[("noise/bad.png", "is empty (0 bytes)")],
        command="vitrail train digits",
    )
    return Whole(run, net, page)


@pytest.fixture
def whole(all_of_it: Whole) -> Page:
    return all_of_it.page


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """PNG files take a second a page; `all_of_it`, which is made before, has them."""
    for name in ("draw_charts", "draw_confusion"):
        monkeypatch.setattr(f"vitrail.report.page.{name}", lambda *_: None)


def test_it_is_all_in_one_file(whole: Page):
    for tag, attributes in whole.tags:
        assert tag not in {"script", "link", "iframe", "object", "base"}
        for name in ("src", "href", "srcset", "data", "action"):
            address = attributes.get(name)
            assert address is None or address.startswith(("data:image/", "#")), address
    assert "http" not in whole.html
    assert "url(" not in whole.html
    assert "@import" not in whole.html


def test_it_is_small(whole: Page):
    assert len(whole.html) < 120_000


def test_every_link_leads_to_a_section(whole: Page):
    targets = {str(a["href"]).removeprefix("#") for a in whole.all("a")}
    assert targets
    assert targets == whole.ids()


def test_it_opens_with_the_result_and_what_stands_beside_it(all_of_it: Whole):
    scores, said = measured(all_of_it.net, Images()), all_of_it.page.text
    assert f"{100 * scores.top1:.1f} % top-1 accuracy (40 test images)." in said
    assert f"95 % interval: {100 * scores.low:.1f} to {100 * scores.high:.1f} %." in said
    assert "this model" in said
    assert "3 nearest neighbors" in said
    assert re.search(r"without positions 25\.0 %", said)  # the other run's last measurement


def test_it_says_what_was_trained(all_of_it: Whole):
    whole, parameters = all_of_it.page, sum(p.numel() for p in all_of_it.net.parameters())
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
        assert part in whole.text, part


def test_it_says_how_to_use_it_and_to_repeat_it(whole: Page, all_of_it: Whole):
    assert f"vitrail predict --model {all_of_it.run.name}/model image.jpg" in whole.text
    assert "vitrail train digits" in whole.text
    assert "--resume" not in whole.text


@pytest.mark.parametrize(
    "command",
    ["vitrail train --resume --out 'my run'", "vitrail finetune -o r --resume", "vitrail train digits --auto-resume"],
)
def test_a_resumed_run_is_repeated_from_its_settings(tmp_path: Path, net: Net, command: str):
    run = write_finished(tmp_path / "my run")
    page = report(run, net, command=command)
    assert "Repeat the run vitrail train 'my run/config.json'" in page.text
    assert "--resume" not in page.text
    assert "--auto-resume" not in page.text


def test_it_lists_images_that_could_not_be_read(whole: Page):
    assert "unreadable" in whole.ids()
    assert "noise/bad.png is empty (0 bytes)" in whole.text


def test_names_of_classes_are_text_never_markup(whole: Page):
    assert "<script>" not in whole.html
    assert "<script>alert(1)</script>" in whole.text
    assert "dog & co" in whole.text
    assert "sea horse" in whole.text


def test_the_confusion_matrix_is_that_of_the_scores(finished: Path, net: Net):
    source = Images()
    scores = measured(net, source)
    html = report(finished, net, scores=scores, source=source).html
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", html, re.S)[: len(LABELS)]
    table = [[int(c) if c != "·" else 0 for c in re.findall(r"<td.*?>(?:<span.*?>)?([\d,·]+)", row)] for row in rows]
    assert np.array_equal(np.array(table), scores.confusion)


def test_images_are_the_sources_own_pixel_for_pixel(finished: Path, net: Net):
    source = Images()
    html = report(finished, net, scores=measured(net, source), source=source).html
    cards = re.findall(
        r'<figure class="card wrong" title="noise/(\d+)\.png"><img src="data:image/png;base64,(.*?)"', html
    )
    assert len(cards) >= 10
    for index, data in cards:
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        assert np.array_equal(shown, source.pixels[int(index)].repeat(3, axis=2))


def test_every_image_says_what_it_shows(whole: Page):
    assert whole.all("img")
    assert all(attributes.get("alt") for attributes in whole.all("img"))
    assert {"lang": "en"} in [a for t, a in whole.tags if t == "html"]


def test_figures_lie_beside_it_as_png(all_of_it: Whole):
    for name in ("curves", "confusion", "attention", "positions", "filters"):
        with Image.open(all_of_it.run / "figures" / f"{name}.png") as image:
            assert image.format == "PNG"
            assert min(image.size) >= 200, name


def test_it_is_written_again_over_itself(finished: Path, net: Net):
    first = report(finished, net).html
    assert report(finished, net).html == first
    assert not [p for p in finished.iterdir() if p.name.startswith(".")]


def test_a_run_stopped_early_says_so_and_how_to_go_on(tmp_path: Path, net: Net):
    run = write_run(tmp_path / "early", [logged(10)])
    page = report(run, net, source=Images())
    assert "This run stopped at 1 of 20 epochs" in page.text
    assert "vitrail train --resume --out early" in page.text
    assert "1.81 training loss." in page.text


def test_a_run_that_patience_ended_is_not_told_to_go_on(tmp_path: Path, net: Net):
    run = write_run(tmp_path / "patient", [logged(10)])
    (run / "model").mkdir()
    (run / "model" / "config.json").touch()
    page = report(run, net, source=Images())
    assert "This run stopped at 1 of 20 epochs" in page.text
    assert "--resume" not in page.text


def test_class_names_in_charts_differ_and_are_whole_where_there_is_room(tmp_path: Path, net: Net):
    names = ("chain saw", "church", "a_very_long_name_that_ends_in_one", "a_very_long_name_that_ends_in_two")
    source = Images(labels=names)
    page = report(write_finished(tmp_path / "run"), net, labels=names, scores=measured(net, source), source=source)
    heads = re.findall(r'<th scope="(?:col|row)"[^>]*>(?:<span>)?([^<]*)', page.html.partition("matrix named")[2])
    expected = ["chain saw", "church", "a very long…t ends in one", "a very long…t ends in two"]
    assert heads[:8] == expected + expected
    bars = re.findall(r'class="who" title="[^"]*">([^<]*)', page.html)
    assert set(bars) == set(expected)


def test_a_matrix_of_many_named_classes_has_the_whole_width(tmp_path: Path):
    names = (*(f"class {i}" for i in range(10)), "red \x1b[31m")
    for count, layout in ((10, 'class="two"'), (11, 'class="two stacked"')):
        net, source = randomized(build(MODEL.replace(num_classes=count))), Images(labels=names[:count])
        run = write_finished(tmp_path / f"run{count}")
        page = report(run, net, labels=names[:count], scores=measured(net, source), source=source)
        assert layout in page.html
    assert "\x1b" not in page.html


def test_it_holds_no_folders_of_this_machine(tmp_path: Path, net: Net):
    data, start = f"folder:{tmp_path}/my photos", f"{tmp_path}/weights/tiny.safetensors"
    run = write_run(tmp_path / "run", [logged(200)], data={"source": data}, init_from=start, model=None)
    command = shlex.join(["vitrail", "finetune", "--model", start, f"--data={data}", "--out", str(run)])
    page = report(run, net, command=command)
    assert str(tmp_path) not in page.html
    assert "vitrail finetune --model tiny.safetensors '--data=folder:my photos' --out run" in page.text
    assert "Started from tiny.safetensors" in page.text


def test_a_run_stopped_before_its_first_step_has_a_page(tmp_path: Path, net: Net):
    run = write_run(tmp_path / "nothing", [])
    page = report(run, net)
    assert "Nothing has been measured yet." in page.text
    assert "ended before its first logged step" in page.text


def test_a_run_that_was_killed_while_it_wrote_a_line_has_a_page(finished: Path, net: Net):
    with (finished / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "lo')
    assert "This run stopped" not in report(finished, net).text


def test_without_final_scores_the_last_measurement_is_reported(finished: Path, net: Net):
    assert "50.0 % top-1 accuracy (40 validation images)." in report(finished, net).text


def test_a_test_that_had_no_part_in_choosing_comes_first(finished: Path, net: Net):
    found = {"top1": 0.61, "top5": 1.0, "loss": 1.0, "low": 0.58, "high": 0.64, "count": 1000}
    with (finished / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 200, "epoch": 20.0, "images": 6400, "test": found, "model_step": 150}) + "\n")
    source = Images()
    scores = measured(net, source)
    page = report(finished, net, scores=scores, source=source)
    assert "61.0 % top-1 accuracy (1,000 test images)." in page.text
    assert f"On 40 validation images: {100 * scores.top1:.1f} %." in page.text
    assert "this model, test 61.0 %" in page.text
    assert "selected on these images" not in page.text


def test_weights_chosen_on_the_images_they_are_measured_on_say_so(finished: Path, net: Net):
    scores = measured(net, Images())
    warning = "selected on these images"
    assert warning in report(finished, net, scores=scores, measured_on="held out").text
    assert warning not in report(finished, net, scores=scores, measured_on="test").text


def test_where_only_averaged_weights_were_measured_they_are_the_curve(tmp_path: Path, net: Net):
    lines = [evaluated(step, step / 400) | {"ema": True} for step in (100, 200)]
    page = report(write_run(tmp_path / "ema", lines), net)
    assert "EMA weights" not in page.text
    assert "50.0 % validation" in page.text


def test_very_many_classes_show_the_worst_only(finished: Path):
    labels = tuple(f"class number {i}" for i in range(150))
    source, net = Images(600, labels), randomized(build(MODEL.replace(num_classes=150)))
    page = report(finished, net, scores=measured(net, source), source=source, labels=labels)
    assert "Most frequent confusions:" in page.text
    assert re.search(r"The 16 worst of 1[45]\d classes", page.text)
    assert "Top-5 accuracy:" in page.text
    assert not [a for a in page.all("table") if a.get("class") == "matrix"]
    assert len(page.html) < 200_000


def test_several_labels_are_told_by_average_precision(tmp_path: Path, net: Net):
    source = Images()
    targets = (torch.rand(40, 4, generator=torch.Generator().manual_seed(0)) < 0.4).float()
    scores = measured(net, source, targets)
    run = write_run(tmp_path / "multi_label", [logged(200), evaluated(200, 0.5, map=scores.mean_average_precision)])
    page = report(run, net, scores=scores, source=source)
    assert f"{100 * scores.mean_average_precision:.1f} % mean average precision over 4 classes" in page.text
    assert "By class: average precision." in page.text
    assert "Mean average precision" in page.text
    assert not [a for a in page.all("table") if a.get("class") == "matrix"]


def test_several_labels_are_all_named_and_have_the_sigmoid(tmp_path: Path, net: Net):
    source, targets = Images(), torch.tensor([[1.0, 1.0, 0.0, 1.0]]).repeat(40, 1)
    lines = [logged(100), logged(200), *(evaluated(step, 0.5, map=0.4) for step in (100, 200))]
    run = write_run(tmp_path / "multi_label", lines, classify={"label_smoothing": 0.1})
    page = report(run, net, scores=measured(net, source, targets), source=source)
    assert "Objective sigmoid cross-entropy, label smoothing 0.1" in page.text
    assert "The prediction is one of the image's classes." in page.text
    looks = page.html.partition('id="attention"')[2]
    for part in (page.html.partition('id="right"')[2].partition("</section>")[0], looks.partition("</section>")[0]):
        assert "cat, dog &amp; co, sea horse" in part
    chart = page.html.partition("<figcaption>Mean average precision")[2].partition("</figure>")[0]
    assert "<svg" in chart
    assert "training" not in chart


def test_masked_patches_have_a_loss_and_no_accuracy(tmp_path: Path):
    lines = [logged(s, accuracy=None) for s in range(10, 201, 10)] + [evaluated(200, None, low=None, high=None)]
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


def test_a_network_without_attention_says_so_in_its_place(tmp_path: Path):
    config = BiTConfig(image_size=32, channels=1, num_classes=4, layers=(1, 1, 1, 1), width_factor=0.5)
    run = write_run(tmp_path / "bit", [logged(200)], model=config.to_dict())
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


def test_a_model_without_positions_says_so(finished: Path):
    net = randomized(build(MODEL.replace(position="none")))
    assert "This model has no position embeddings" in report(finished, net).text


def test_color_photographs_become_small_jpegs(finished: Path):
    from sklearn.datasets import load_sample_image

    photo = load_sample_image("china.jpg")
    source = Images(4, channels=3)
    source.pixels = np.stack([photo[:320, i * 40 : i * 40 + 320] for i in range(4)])
    config = MODEL.replace(image_size=224, patch_size=16, channels=3)
    preprocess = Preprocess(PreprocessConfig(image_size=224))
    page = report(finished, randomized(build(config)), source=source, preprocess=preprocess)
    looks = [str(a["src"]) for a in page.all("img") if str(a["src"]).startswith("data:image/jpeg")]
    assert len(looks) == 8
    assert max(map(len, looks)) < 30_000


def test_an_image_that_cannot_be_read_any_more_is_left_out(finished: Path, net: Net, tmp_path: Path):
    class Gone(Images):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return type(sample)(sample.key, tmp_path / "gone.png", sample.target)

    page = report(finished, net, scores=measured(net, Images()), source=Gone())
    assert "There are no images to show." in page.text
    assert "There are none to show." in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, net: Net):
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        report(tmp_path, net)
