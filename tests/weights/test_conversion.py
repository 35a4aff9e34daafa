"""Conversion: the library and the CLI report the same losses, or refuse to write for the same reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_models import FORMATS, LABELS, gradient, model, small

import vitrail as package
from vitrail import runtime
from vitrail.cli import main
from vitrail.config import PreprocessConfig
from vitrail.errors import CheckpointError, ConversionError, ModelError
from vitrail.weights import checkpoint
from vitrail.weights.conversion import convert, lost_information

FORMAT_CONVENTIONS = {
    "google": {"activation": "gelu-tanh"},
    "big_vision": {"activation": "gelu-tanh", "position_on_class": False},
}
"""The conventions that each format assumes."""
UNUSUAL = PreprocessConfig(
    image_size=32,
    resize="short",
    resize_to=37,
    interpolation="bicubic",
    antialias=True,
    mean=(0.4,) * 3,
    std=(0.2,) * 3,
)

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def logged_notes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns the notes that the library has logged since the last call."""
    monkeypatch.setattr(runtime.notes, "_logged", set())

    def take_notes() -> list[str]:
        messages = [record.note for record in caplog.records]  # type: ignore[attr-defined]
        caplog.clear()
        return messages

    return take_notes


@pytest.fixture
def run_convert(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[str]]]:
    """Runs `vitrail convert ...` and returns its notes, or its error."""
    logger = logging.getLogger("vitrail")
    before = logger.handlers, logger.level, logger.propagate

    def run(*arguments: object) -> list[str]:
        monkeypatch.setattr(runtime.notes, "_logged", set())
        capsys.readouterr()
        main(["convert", *map(str, arguments)])
        lines = capsys.readouterr().err.splitlines()
        logger.handlers, logger.level, logger.propagate = before
        return [line.removeprefix("note: ").removeprefix("error: ") for line in lines]

    yield run
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("to", FORMATS)
def test_library_and_cli_report_the_same_losses(
    to: str,
    multi_label: bool,
    tmp_path: Path,
    logged_notes: Callable[[], list[str]],
    run_convert: Callable[..., list[str]],
) -> None:
    vit = model(small(**FORMAT_CONVENTIONS.get(to, {})), preprocess=UNUSUAL, multi_label=multi_label)
    vit.save(tmp_path / "source")
    assert logged_notes() == []
    vit.save(tmp_path / "by library" / FORMATS[to], to=to)
    notes = logged_notes()
    assert notes == run_convert(tmp_path / "source", tmp_path / "by command" / FORMATS[to], "--to", to)
    reloaded_info = package.load(tmp_path / "by library" / FORMATS[to]).info
    assert any("class names" in note for note in notes) == (reloaded_info.labels != LABELS)
    assert any("does not store preprocessing (" in note for note in notes) == (reloaded_info.preprocess != UNUSUAL)
    assert any("multi-label" in note for note in notes) == (reloaded_info.multi_label != multi_label)


@pytest.mark.parametrize("to", ["google", "torchvision", "facebook"])
def test_library_and_cli_refuse_the_same_conversions(
    to: str, tmp_path: Path, logged_notes: Callable[[], list[str]], run_convert: Callable[..., list[str]]
) -> None:
    vit = model(small(activation="gelu-quick"))
    vit.save(tmp_path / "source")
    with pytest.raises(ConversionError, match=r"cannot state .*approximate=True") as caught:
        vit.save(tmp_path / FORMATS[to], to=to)
    assert run_convert(tmp_path / "source", tmp_path / FORMATS[to], "--to", to) == [str(caught.value)]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    vit.save(tmp_path / FORMATS[to], to=to, approximate=True)
    notes = logged_notes()
    assert any(note.startswith(f"{to}'s format cannot state ") for note in notes)
    assert notes == run_convert(tmp_path / "source", tmp_path / f"2-{FORMATS[to]}", "--to", to, "--approximate")


def test_every_conversion_of_a_chain_reports_its_losses(tmp_path: Path, logged_notes: Callable[[], list[str]]) -> None:
    """A model written in Google's format is read with Google's preprocessing and gives other logits: a note says so."""
    vit = model(small(activation="gelu-tanh"), preprocess=UNUSUAL)
    vit.save(tmp_path / "x.npz", to="google")
    preprocess = (
        "resize=short, resize_to=37, interpolation=bicubic, antialias=True, mean=[0.4, 0.4, 0.4], std=[0.2, 0.2, 0.2]"
    )
    assert logged_notes() == [
        "google's format does not store class names; readers of the file will not have it.",
        f"google's format does not store preprocessing ({preprocess}); readers of the file will not have it.",
        "google's format does not store how positions are resampled for other sizes (it was timm, there google); "
        "readers of the file will not have it.",
    ]
    google_model = package.load(tmp_path / "x.npz")
    assert not torch.equal(google_model.logits(gradient()), vit.logits(gradient()))
    logged_notes()
    google_model.save(tmp_path / "timm", to="timm")
    assert logged_notes() == [
        "timm's format does not store preprocessing (antialias=False); readers of the file will not have it.",
        "timm's format does not store how positions are resampled for other sizes (it was google, there timm); "
        "readers of the file will not have it.",
    ]


def test_vitrail_format_loses_nothing(tmp_path: Path) -> None:
    vit = model(small(activation="gelu-quick", num_heads=4), preprocess=UNUSUAL, multi_label=True)
    report = convert(vit.net, vit.info, tmp_path / "m")
    assert (report.inexact_conventions, report.lost, report.notes) == ((), (), [])
    assert report.num_tensors == len(vit.net.state_dict())


def test_lost_information_is_named() -> None:
    info = model(small(resample="timm")).info
    assert lost_information(info, info) == []
    converted = info.replace(config=info.config.replace(resample="huggingface"))
    assert lost_information(info, converted) == [
        "how positions are resampled for other sizes (it was timm, there huggingface)"
    ]
    assert lost_information(info.replace(labels=None), info.replace(labels=None, task="embed")) == [
        "that its outputs are classes (read back, they are features)"
    ]
    assert lost_information(info, info.replace(multi_label=True)) == [
        "whether an image may have several classes (multi-label), or exactly one"
    ]


def test_conversion_names_the_family_needed_to_read_the_file(tmp_path: Path) -> None:
    """A file whose tensor names fit two families is refused unless the family is passed."""
    vit = model(small(layer_scale=1e-6, position_on_class=False))
    report = convert(vit.net, vit.info, tmp_path / "x.pth", to="facebook")
    assert report.num_tensors == len(vit.net.state_dict())
    try:
        checkpoint.read(tmp_path / "x.pth")
    except CheckpointError:
        assert report.lost[0] == "its family, without which it cannot be read (family=ViT)"
    else:
        assert not any("family" in loss for loss in report.lost)


def test_non_finite_weights_can_be_converted(tmp_path: Path) -> None:
    vit = model(small())
    vit.net.head.bias.data[0], vit.net.head.bias.data[1] = float("nan"), float("inf")
    vit.save(tmp_path / "timm", to="timm")
    bias = package.load(tmp_path / "timm", check_finite=False).net.head.bias
    assert bias[:2].isnan().tolist() == [True, False]


@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_network_that_does_not_match_its_config_is_not_written(to: str, tmp_path: Path) -> None:
    vit = model(small())
    vit.net.head = torch.nn.Linear(128, 10)
    with pytest.raises(ModelError, match=r"head.weight is \(10, 128\), but its config gives \(5, 128\).*with_classes"):
        vit.save(tmp_path / "m", to=to)
    assert not (tmp_path / "m").exists()
