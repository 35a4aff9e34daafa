"""`vitrail predict`: files, folders, patterns; text, CSV and JSON output; unreadable files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from images import write_noise_folder
from small_models import LABELS, gradient, model, small

import vitrail as package
from vitrail.cli import predict as command
from vitrail.config import DataConfig
from vitrail.data.sources import open_source_splits

IN_ORDER = ["C.JPG", "a.jpg", "b.png", "holiday/10.png", "holiday/2.webp", "holiday/deep/x.bmp"]


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    gradient().save(tmp_path / "one.png")
    return tmp_path / "one.png"


# Output


def test_one_file_gives_a_readable_list(vitrail, weights, image):
    result = vitrail("predict", image, "--model", weights)
    assert result.status == 0
    assert result.err == ""
    name, *lines = result.out.splitlines()
    assert name == str(image)
    expected = package.load(weights).predict(image)
    assert lines == [f"  {100 * p.score:5.1f} %  {p.label}" for p in expected]


def test_files_are_listed_in_the_order_given(vitrail, weights, photos):
    result = vitrail("predict", photos / "b.png", photos / "a.jpg", photos / "b.png", "-m", weights, "--top", 1)
    assert [line for line in result.out.splitlines() if not line.startswith(" ")] == [
        str(photos / "b.png"),
        str(photos / "a.jpg"),
    ]


def test_folder_gives_a_csv_in_a_stable_order(vitrail, weights, photos):
    result = vitrail("predict", photos, "-m", weights, "--top", 2)
    assert result.status == 0
    assert result.out.splitlines()[0] == "path,label_1,score_1,index_1,label_2,score_2,index_2,error"
    table = read_csv(result.out)
    assert [row["path"] for row in table] == [str(photos / name) for name in IN_ORDER]
    best = package.load(weights).predict(photos / "C.JPG")[0]
    assert table[0]["label_1"] == best.label == LABELS[int(table[0]["index_1"])]
    assert float(table[0]["score_1"]) == pytest.approx(best.score, abs=1e-5)
    assert vitrail("predict", photos, "-m", weights, "--top", 2, "--batch-size", 2).out == result.out


def test_header_for_one_class_has_no_numbers(vitrail, weights, photos):
    assert vitrail("predict", photos, "-m", weights, "--top", 1).out.startswith("path,label,score,index,error\n")


def test_top_above_the_number_of_classes_lists_all_classes(vitrail, weights, photos):
    assert "label_5" in read_csv(vitrail("predict", photos, "-m", weights, "--top", 50).out)[0]
    assert "label_6" not in read_csv(vitrail("predict", photos, "-m", weights, "--top", 50).out)[0]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.png", ["b.png"]),
        ("**/*.png", ["b.png", "holiday/10.png"]),
        ("holiday/[12]*.*", ["holiday/10.png", "holiday/2.webp"]),
    ],
)
def test_glob_pattern_gives_a_csv(vitrail, weights, photos, pattern, names):
    result = vitrail("predict", photos / pattern, "-m", weights)
    assert [row["path"] for row in read_csv(result.out)] == [str(photos / name) for name in names]


def test_existing_file_named_like_a_pattern_is_read(vitrail, weights, tmp_path):
    gradient().save(tmp_path / "photo[1].png")
    assert vitrail("predict", tmp_path / "photo[1].png", "-m", weights).out.startswith(str(tmp_path / "photo[1].png"))


def test_json_is_the_only_standard_output(vitrail, weights, photos):
    result = vitrail("predict", photos, photos / "a.jpg", "-m", weights, "--json", "--top", 3, "--image-size", "64")
    entries = json.loads(result.out)
    assert [entry["path"] for entry in entries] == [str(photos / name) for name in IN_ORDER]
    assert [len(entry["predictions"]) for entry in entries] == [3] * 6
    assert set(entries[0]["predictions"][0]) == {"label", "score", "index"}
    assert result.notes == ["position embeddings were resampled to 64x64 (timm method)."]


def test_logits_option_adds_logits_to_json(vitrail, weights, image):
    [entry] = json.loads(vitrail("predict", image, "-m", weights, "--json", "--logits").out)
    assert entry["logits"] == pytest.approx(package.load(weights).logits(image)[0].tolist())
    result = vitrail("predict", image, "-m", weights, "--logits")
    assert (result.status, result.errors) == (1, ["--logits needs --json."])


def test_results_are_written_to_a_file(vitrail, weights, photos, tmp_path):
    table, entries = tmp_path / "new" / "out.csv", tmp_path / "out.json"
    result = vitrail("predict", photos, "-m", weights, "--out", table)
    assert (result.status, result.out) == (0, "")
    assert result.notes == [f"wrote predictions for 6 of 6 images to {table}."]
    assert table.read_text() == vitrail("predict", photos, "-m", weights).out
    assert vitrail("predict", photos / "a.jpg", "-m", weights, "-o", entries).status == 0  # JSON by its extension
    assert json.loads(entries.read_text())[0]["path"] == str(photos / "a.jpg")


def test_interrupted_command_keeps_the_existing_output_file(vitrail, weights, photos, tmp_path, monkeypatch):
    table = tmp_path / "out.csv"
    table.write_text("precious")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.data.csv_escape.csv_line", interrupt)
    assert vitrail("predict", photos, "-m", weights, "-o", table).status == 130
    assert table.read_text() == "precious"


def test_invalid_destination_is_an_error_before_the_model_is_loaded(vitrail, image, tmp_path):
    for destination, message in ((tmp_path, "is a folder"), (image / "out.csv", "is a file, not a folder")):
        result = vitrail("predict", image, "-m", "no-such-model", "-o", destination)
        assert result.status == 1
        assert message in result.errors[0]


# Options that change the model


def test_image_size_may_be_non_square(vitrail, weights, image):
    result = vitrail("predict", image, "-m", weights, "--image-size", "288x192")
    assert result.status == 0
    assert result.notes == ["position embeddings were resampled to 288x192 (timm method)."]
    for value in ("abc", "0", "12x", "1x2x3", "-4"):
        result = vitrail("predict", image, "-m", weights, f"--image-size={value}")
        assert result.errors == [f"--image-size expects 384 or 384x288 (height x width), got {value!r}."]
    result = vitrail("predict", image, "-m", weights, "--image-size", "30")
    assert result.errors == ["patch_size=8 leaves 6 px of the image's height 30 uncovered; try height 24 or 32."]


def test_gray_and_rgba_images_are_predicted(vitrail, weights, tmp_path):
    gradient().convert("L").save(tmp_path / "gray.png")
    gradient().convert("RGBA").save(tmp_path / "clear.png")
    result = vitrail("predict", tmp_path / "gray.png", "-m", weights, "--channels", 1)
    assert result.notes == ["for 1 channel the first filters were summed over the 3 channels."]
    assert len(result.out.splitlines()) == 6
    result = vitrail("predict", tmp_path / "clear.png", "-m", weights, "--channels", 4)
    assert result.notes == ["for 4 channels the first filters were repeated from 3 to 4 and scaled by 3/4."]
    assert len(result.out.splitlines()) == 6


def test_set_and_family_options_change_the_model(vitrail, weights, image):
    plain = vitrail("predict", image, "-m", weights).out
    assert vitrail("predict", image, "-m", weights, "--set", "activation=gelu-quick").out != plain
    assert vitrail("predict", image, "-m", weights, "--family", "DeiT").out != plain
    result = vitrail("predict", image, "-m", weights, "--set", "image_size=64")
    assert result.errors == ["--set image_size=64: pass --image-size instead."]


def test_missing_class_names_are_noted_and_can_be_passed(vitrail, image, tmp_path):
    model(small(), labels=None).save(tmp_path / "nameless")
    result = vitrail("predict", image, "-m", tmp_path / "nameless", "--top", 1)
    assert "  class " in result.out
    assert len(result.notes) == 1
    assert "--labels" in result.notes[0]
    (tmp_path / "names.txt").write_text("\n".join("vwxyz"))
    result = vitrail("predict", image, "-m", tmp_path / "nameless", "--labels", tmp_path / "names.txt")
    assert result.err == ""
    assert {line.split()[-1] for line in result.out.splitlines()[1:]} == set("vwxyz")


# Missing and unreadable images


def test_unreadable_image_is_named_and_the_others_are_predicted(vitrail, weights, photos, tmp_path):
    (photos / "bad.png").write_text("not an image")
    (photos / "holiday" / "empty.jpg").touch()
    result = vitrail("predict", photos, "-m", weights)
    assert result.status == 1
    rows_by_name = {Path(row["path"]).name: row for row in read_csv(result.out)}
    assert len(rows_by_name) == 8
    assert [name for name, row in rows_by_name.items() if row["error"]] == ["bad.png", "empty.jpg"]
    assert all(bool(row["label_1"]) != bool(row["error"]) for row in rows_by_name.values())
    assert [p.split(" ")[0] for p in result.errors[:2]] == [
        str(photos / "bad.png"),
        str(photos / "holiday/empty.jpg"),
    ]
    assert result.errors[2:] == ["2 of 8 images could not be read."]
    entries = json.loads(vitrail("predict", photos, "-m", weights, "--json").out)
    assert ["error" in entry for entry in entries].count(True) == 2
    three_files = vitrail("predict", photos / "a.jpg", photos / "bad.png", tmp_path / "gone.png", "-m", weights)
    assert three_files.status == 1
    assert len(three_files.out.splitlines()) == 6
    assert len(three_files.errors) == 3


def test_only_the_first_of_many_unreadable_images_are_listed(vitrail, weights, photos):
    for n in range(30):
        (photos / f"bad{n}.png").write_text("not an image")
    result = vitrail("predict", photos, "-m", weights)
    assert len(result.errors) == command.MAX_LISTED_ERRORS + 2
    assert result.errors[-1] == "30 of 36 images could not be read."


def test_no_matching_image_is_a_one_sentence_error(vitrail, tmp_path):
    (tmp_path / "album").mkdir()
    for path, message in (
        (tmp_path / "album", "no images in the folder"),
        (tmp_path / "gone.jpg", "no such image or folder"),
        (tmp_path / "*.jpg", "matches nothing."),
        (tmp_path / "al*", "matches only folders; name one without the pattern."),
    ):
        result = vitrail("predict", path, "-m", "no-such-model")
        assert (result.status, result.out) == (1, "")
        assert len(result.err.splitlines()) == 1
        assert message in result.errors[0]


def test_unknown_model_suggests_the_nearest_name(vitrail, image):
    result = vitrail("predict", image, "-m", "ViTT-Ti/16")
    assert result.errors == ["unknown model 'ViTT-Ti/16'; did you mean 'ViT-Ti/16'?"]


def test_model_without_classes_is_a_one_sentence_error(vitrail, headless, image):
    result = vitrail("predict", image, "-m", headless)
    assert (result.status, result.out) == (1, "")
    assert len(result.errors) == len(result.err.splitlines()) == 1
    advice = f"train a classifier with vitrail finetune --model {headless} --data DATA."
    assert result.errors == [f"{headless} has no classes; {advice}"]


def test_unknown_device_is_a_one_sentence_error(vitrail, weights, image):
    result = vitrail("predict", image, "-m", weights, "--device", "gpu")
    assert result.errors == ["unknown device 'gpu'; try cpu, cuda, cuda:1, mps or auto."]


def test_heic_images_are_reported_as_unreadable(vitrail, weights, photos):
    (photos / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(32))
    result = vitrail("predict", photos, "-m", weights)
    assert str(photos / "IMG_1.HEIC") in result.errors[0]


HOSTILE = ("=1+1", "\x1b[31mred\x1b[0m", "[bold]b[/bold]", "-name", "new\nline")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose class names contain formulas, control characters and markup."""
    path = tmp_path_factory.mktemp("weights") / "hostile"
    model(small(), labels=HOSTILE).save(path)
    return path


def test_control_characters_in_names_are_escaped(vitrail, hostile, tmp_path):
    file = tmp_path / "a\x1b[2Jb.png"
    gradient().save(file)
    result = vitrail("predict", file, tmp_path / "no\x1bc.png", "-m", hostile)
    assert "\x1b" not in result.out + result.err
    assert len(result.out.splitlines()) == 1 + len(HOSTILE)
    assert r"a\x1b[2Jb.png" in result.out
    assert r"no\x1bc.png" in result.err
    assert {line.split("%  ")[-1] for line in result.out.splitlines()[1:]} == {
        "=1+1", r"\x1b[31mred\x1b[0m", "[bold]b[/bold]", "-name", r"new\nline",
    }  # fmt: skip


def test_json_keeps_names_unchanged(vitrail, hostile, image):
    [row] = json.loads(vitrail("predict", image, "-m", hostile, "--json").out)
    assert {p["label"] for p in row["predictions"]} == set(HOSTILE)


def test_csv_on_standard_output_keeps_names_unchanged(vitrail, hostile, image):
    _, row = csv.reader(io.StringIO(vitrail("predict", image.parent, "-m", hostile).out))
    assert "\x1b[31mred\x1b[0m" in row


def test_csv_file_escapes_formulas_and_loads_as_a_source(vitrail, hostile, tmp_path, monkeypatch):
    (tmp_path / "-images").mkdir()
    gradient().save(tmp_path / "-images" / "a.png")
    monkeypatch.chdir(tmp_path)
    assert vitrail("predict", "-m", hostile, "--top", 1, "-o", "predictions.csv", "--", "-images").status == 0
    path, label, *_ = list(csv.reader(io.StringIO(Path("predictions.csv").read_text())))[1]
    assert path == "'-images/a.png"
    assert label.startswith("'") == (label.lstrip("'")[0] in "=-")
    source = open_source_splits(DataConfig(source="table:predictions.csv")).train
    assert (source.key(0), source.labels) == ("-images/a.png", (label.removeprefix("'"),))


@pytest.mark.parametrize(
    ("origin", "advice"),
    [("tiny.safetensors", ", or install timm, which has the ImageNet names."), ("fine-tuned from tiny", ".")],
)
def test_timm_is_suggested_only_if_it_has_the_class_names(
    vitrail, image, tmp_path, monkeypatch, origin: str, advice: str
):
    monkeypatch.setattr("vitrail.weights.class_names.imagenet_1k", lambda: None)
    model(small(num_classes=1000), origin=origin).save(tmp_path / "bare")
    result = vitrail("predict", image, "-m", tmp_path / "bare")
    assert f"the checkpoint has no class names: pass --labels FILE{advice}" in result.notes
    assert "class " in result.out


def test_unreadable_images_are_no_failure_with_skip_bad(vitrail, weights, tmp_path):
    album = write_noise_folder(tmp_path / "album", {"cat": 2})
    (album / "cat" / "1.png").write_bytes(b"no image")
    for options, status in (((), 1), (("--skip-bad",), 0)):
        result = vitrail("predict", album, "-m", weights, *options)
        assert (result.status, result.errors[-1]) == (status, "1 of 2 images could not be read.")


def test_a_data_set_is_classified_into_a_folder_of_parts(vitrail, weights, tmp_path):
    album = write_noise_folder(tmp_path / "album", {"cat": 3, "dog": 2})
    (album / "cat" / "1.png").write_bytes(b"no image")
    command = ("predict", "-m", weights, "--data", album, "--top", "2", "--batch-size", "2", "--part-size", "2")
    result = vitrail(*command, "--out", tmp_path / "classes")
    assert (result.status, result.out) == (1, f"{tmp_path / 'classes'}: 5 images, the 2 best classes of each.\n")
    assert result.errors == ["skipped 1 unreadable image; add --skip-bad to allow this."]
    parts = sorted((tmp_path / "classes").glob("part-*"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    assert [row["key"] for row in rows] == ["cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png"]
    assert [row["error"] is None for row in rows] == [True, False, True, True, True]
    expected = json.loads(vitrail("predict", album / "dog" / "0.png", "-m", weights, "--top", "2", "--json").out)
    assert rows[3]["top_labels"] == [each["label"] for each in expected[0]["predictions"]]
    for number in (1, 2):
        vitrail(*command, "--out", tmp_path / f"shard{number}", "--shard", f"{number}/2", "--skip-bad")
    joins = ("--join", tmp_path / "shard1", "--join", tmp_path / "shard2")
    joined = vitrail("predict", *joins, "--out", tmp_path / "joined", "--skip-bad", "--json")
    assert json.loads(joined.out)["num_images"] == 5
    assert [path.read_bytes() for path in sorted((tmp_path / "joined").glob("part-*"))] == [
        path.read_bytes() for path in parts
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("a.jpg --data digits --out f", "--data SPEC writes the best classes; leave out IMAGE and --logits."),
        ("--data digits --out f --logits", "--data SPEC writes the best classes; leave out IMAGE and --logits."),
        ("--data digits", "predict needs --data SPEC and --out DIR: vitrail predict --data photos/ --out classes/."),
        ("--shard 1/2", "predict needs --data SPEC and --out DIR: vitrail predict --data photos/ --out classes/."),
        ("--data digits --out f.csv", "--out f.csv: expected a .parquet file or a folder; try f.parquet or f."),
        ("--data digits --out f --on ray --engine auto", "--engine auto with --on ray: pass the exported file as"),
        ("a.jpg --split test", "--root and --split need --data SPEC; leave them out, or pass the images with --data."),
        ("a.jpg --root photos", "--root and --split need --data SPEC; leave them out, or pass the images with --data."),
        ("--data digits --out f --top 2 --split tset", "unknown split 'tset'; did you mean 'test'?"),
    ],
)
def test_wrong_options_with_data_are_one_sentence_errors(vitrail, weights, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = vitrail("predict", "-m", weights, *options.split())
    assert result.status == 1
    assert message in result.errors[0]
    assert list(tmp_path.iterdir()) == []
