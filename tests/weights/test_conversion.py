"""The library and the command report what another format does not store, or both refuse to write."""

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

OWN = {"google": {"activation": "gelu-tanh"}, "big_vision": {"activation": "gelu-tanh", "position_on_class": False}}
"""What a format computes without being told."""
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
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the library has logged since it was last asked."""
    monkeypatch.setattr(runtime, "_logged", set())

    def notes() -> list[str]:
        found = [record.note for record in caplog.records]  # type: ignore[attr-defined]
        caplog.clear()
        return found

    return notes


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """The notes of `vitrail convert ...`, or the problem it ended with."""
    logger = logging.getLogger("vitrail")
    before = logger.handlers, logger.level, logger.propagate

    def run(*arguments: object) -> list[str]:
        monkeypatch.setattr(runtime, "_logged", set())
        capsys.readouterr()
        main(["convert", *map(str, arguments)])
        lines = capsys.readouterr().err.splitlines()
        logger.handlers, logger.level, logger.propagate = before
        return [line.removeprefix("note: ").removeprefix("error: ") for line in lines]

    yield run
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("to", FORMATS)
def test_the_library_says_what_the_command_says(
    to: str, multi_label: bool, tmp_path: Path, said: Callable[[], list[str]], command: Callable[..., list[str]]
) -> None:
    vit = model(small(**OWN.get(to, {})), preprocess=UNUSUAL, multi_label=multi_label)
    vit.save(tmp_path / "source")
    assert said() == []
    vit.save(tmp_path / "by library" / FORMATS[to], to=to)
    notes = said()
    assert notes == command(tmp_path / "source", tmp_path / "by command" / FORMATS[to], "--to", to)
    again = package.load(tmp_path / "by library" / FORMATS[to]).info
    assert any("class names" in note for note in notes) == (again.labels != LABELS)
    assert any("does not store preprocessing (" in note for note in notes) == (again.preprocess != UNUSUAL)
    assert any("multi-label" in note for note in notes) == (again.multi_label != multi_label)


@pytest.mark.parametrize("to", ["google", "torchvision", "facebook"])
def test_the_library_refuses_what_the_command_refuses(
    to: str, tmp_path: Path, said: Callable[[], list[str]], command: Callable[..., list[str]]
) -> None:
    vit = model(small(activation="gelu-quick"))
    vit.save(tmp_path / "source")
    with pytest.raises(ConversionError, match=r"cannot state .*approximate=True") as caught:
        vit.save(tmp_path / FORMATS[to], to=to)
    assert command(tmp_path / "source", tmp_path / FORMATS[to], "--to", to) == [str(caught.value)]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    vit.save(tmp_path / FORMATS[to], to=to, approximate=True)
    notes = said()
    assert any(note.startswith(f"{to}'s format cannot state ") for note in notes)
    assert notes == command(tmp_path / "source", tmp_path / f"2-{FORMATS[to]}", "--to", to, "--approximate")


def test_every_step_of_a_chain_of_formats_says_what_it_loses(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """Written as Google's, a model is read with Google's preprocessing: other classes, unless someone is told."""
    vit = model(small(activation="gelu-tanh"), preprocess=UNUSUAL)
    vit.save(tmp_path / "x.npz", to="google")
    there = (
        "resize=short, resize_to=37, interpolation=bicubic, antialias=True, mean=[0.4, 0.4, 0.4], std=[0.2, 0.2, 0.2]"
    )
    assert said() == [
        "google's format does not store class names; readers of the file will not have it.",
        f"google's format does not store preprocessing ({there}); readers of the file will not have it.",
        "google's format does not store how positions are resampled for other sizes (it was timm, there google); "
        "readers of the file will not have it.",
    ]
    google = package.load(tmp_path / "x.npz")
    assert not torch.equal(google.logits(gradient()), vit.logits(gradient()))
    said()
    google.save(tmp_path / "timm", to="timm")
    assert said() == [
        "timm's format does not store preprocessing (antialias=False); readers of the file will not have it.",
        "timm's format does not store how positions are resampled for other sizes (it was google, there timm); "
        "readers of the file will not have it.",
    ]


def test_our_own_format_loses_nothing(tmp_path: Path) -> None:
    vit = model(small(activation="gelu-quick", num_heads=4), preprocess=UNUSUAL, multi_label=True)
    found = convert(vit.net, vit.info, tmp_path / "m")
    assert (found.inexact_conventions, found.lost, found.notes) == ((), (), [])
    assert found.num_tensors == len(vit.net.state_dict())


def test_what_is_lost_is_named() -> None:
    info = model(small(resample="timm")).info
    assert lost_information(info, info) == []
    there = info.replace(config=info.config.replace(resample="huggingface"))
    assert lost_information(info, there) == [
        "how positions are resampled for other sizes (it was timm, there huggingface)"
    ]
    assert lost_information(info.replace(labels=None), info.replace(labels=None, task="embed")) == [
        "that its outputs are classes (read back, they are features)"
    ]
    assert lost_information(info, info.replace(multi_label=True)) == [
        "whether an image may have several classes (multi-label), or exactly one"
    ]


def test_a_file_that_is_not_read_alone_says_what_must_be_told(tmp_path: Path) -> None:
    """Names that two families share are refused, and not guessed."""
    vit = model(small(layer_scale=1e-6, position_on_class=False))
    found = convert(vit.net, vit.info, tmp_path / "x.pth", to="facebook")
    assert found.num_tensors == len(vit.net.state_dict())
    try:
        checkpoint.read(tmp_path / "x.pth")
    except CheckpointError:
        assert found.lost[0] == "its family, without which it cannot be read (family=ViT)"
    else:
        assert not any("family" in what for what in found.lost)


def test_weights_that_are_not_finite_can_be_written_for_others_too(tmp_path: Path) -> None:
    vit = model(small())
    vit.net.head.bias.data[0], vit.net.head.bias.data[1] = float("nan"), float("inf")
    vit.save(tmp_path / "timm", to="timm")
    bias = package.load(tmp_path / "timm", check_finite=False).net.head.bias
    assert bias[:2].isnan().tolist() == [True, False]


@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_a_network_that_is_not_what_its_config_says_is_not_written(to: str, tmp_path: Path) -> None:
    vit = model(small())
    vit.net.head = torch.nn.Linear(128, 10)
    with pytest.raises(ModelError, match=r"head.weight is \(10, 128\), but its config gives \(5, 128\).*with_classes"):
        vit.save(tmp_path / "m", to=to)
    assert not (tmp_path / "m").exists()
