"""`vitrail predict` with unusual and damaged image files: correct results, or a one-sentence error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_models import gradient


@pytest.fixture
def logits(vitrail, weights) -> Callable[[Path], list[float]]:
    """Logits that the command prints for an image; it must succeed without any message."""

    def run(path: Path) -> list[float]:
        result = vitrail("predict", path, "-m", weights, "--json", "--logits")
        assert (result.status, result.err) == (0, "")
        [entry] = json.loads(result.out)
        return entry["logits"]

    return run


# Supported images


def test_sixteen_bit_images_are_scaled_not_clipped(logits, tmp_path):
    gray = np.asarray(gradient().convert("L"))
    Image.fromarray(gray).save(tmp_path / "8.png")
    Image.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / "16.png")
    assert logits(tmp_path / "16.png") == pytest.approx(logits(tmp_path / "8.png"), abs=1e-5)


def test_cmyk_images_are_converted_to_rgb(logits, tmp_path):
    gradient().save(tmp_path / "rgb.tiff")
    gradient().convert("CMYK").save(tmp_path / "cmyk.tiff")
    assert logits(tmp_path / "cmyk.tiff") == pytest.approx(logits(tmp_path / "rgb.tiff"), abs=0.05)
    gradient().convert("CMYK").save(tmp_path / "cmyk.jpg")
    assert len(logits(tmp_path / "cmyk.jpg")) == 5


def test_palette_images_are_converted_to_rgb(logits, tmp_path):
    indexed = gradient().quantize(256)
    indexed.save(tmp_path / "palette.png")
    indexed.convert("RGB").save(tmp_path / "rgb.png")
    assert logits(tmp_path / "palette.png") == logits(tmp_path / "rgb.png")


def test_transparent_images_are_composited_on_white(logits, tmp_path):
    transparent = gradient()
    mask = Image.linear_gradient("L").resize(transparent.size)
    transparent.putalpha(mask)
    transparent.save(tmp_path / "alpha.png")
    white = Image.new("RGB", transparent.size, "white")
    white.paste(transparent.convert("RGB"), mask=mask)
    white.save(tmp_path / "white.png")
    assert logits(tmp_path / "alpha.png") == logits(tmp_path / "white.png")


def test_exif_orientation_is_applied(logits, tmp_path):
    upright = gradient()
    upright.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotate clockwise to display
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "sideways.png", exif=exif)
    assert logits(tmp_path / "sideways.png") == logits(tmp_path / "upright.png")


def test_single_pixel_equals_a_larger_image_of_the_same_color(logits, tmp_path):
    for name, side in (("one.png", 1), ("many.png", 64)):
        Image.new("RGB", (side, side), (10, 200, 90)).save(tmp_path / name)
    assert logits(tmp_path / "one.png") == pytest.approx(logits(tmp_path / "many.png"), abs=1e-5)


@pytest.mark.parametrize("height", [1, 40])
def test_image_20000_pixels_wide_is_predicted(logits, tmp_path, height):
    gradient(20_000, height).save(tmp_path / "wide.png")
    assert len(logits(tmp_path / "wide.png")) == 5


def test_first_frame_of_an_animation_is_used(logits, tmp_path):
    first = gradient().quantize(64)
    first.save(tmp_path / "film.gif", save_all=True, append_images=[first.transpose(Image.Transpose.ROTATE_180)])
    first.save(tmp_path / "still.gif")
    assert logits(tmp_path / "film.gif") == logits(tmp_path / "still.gif")


# Rejected files


def jpeg(path: Path) -> bytes:
    gradient(200, 200).save(path)
    return path.read_bytes()


REJECTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "text.jpg": (lambda p: p.write_text("hello"), "is not an image: it starts with b'hello'"),
    "page.jpg": (lambda p: p.write_text("<!DOCTYPE html><html>"), "it is a web page, perhaps from a failed download"),
    "pointer.jpg": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1"), "run git lfs pull"),
    "empty.jpg": (lambda p: p.touch(), "is empty (0 bytes)"),
    "cut.jpg": (lambda p: p.write_bytes(jpeg(p)[:1500]), "cannot be read: image file is truncated"),
    "header.jpg": (lambda p: p.write_bytes(jpeg(p)[:12]), "header.jpg "),
    "bomb.png": (lambda p: Image.new("1", (30_000, 30_000)).save(p), "pixels, more than the limit"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_incomplete_or_non_image_file_is_a_one_sentence_error(vitrail, weights, tmp_path, name):
    write, message = REJECTED[name]
    write(tmp_path / name)
    result = vitrail("predict", tmp_path / name, "-m", weights)
    assert (result.status, result.out) == (1, "")
    assert len(result.errors) == len(result.err.splitlines()) == 1
    assert result.errors[0].startswith(str(tmp_path / name))
    assert message in result.errors[0]


def test_folder_with_an_image_extension_is_read_as_a_folder(vitrail, weights, tmp_path):
    (tmp_path / "x.jpg").mkdir()
    result = vitrail("predict", tmp_path / "x.jpg", "-m", weights)
    assert result.status == 1
    assert result.errors[0].startswith(f"no images in the folder {tmp_path / 'x.jpg'}")
    gradient().save(tmp_path / "x.jpg" / "a.png")
    assert vitrail("predict", tmp_path / "x.jpg", "-m", weights).out.startswith("path,")


def test_file_without_read_permission_is_a_one_sentence_error(vitrail, weights, tmp_path, monkeypatch):
    gradient().save(tmp_path / "secret.png")
    original_open = Path.open

    def raise_permission_error(path: Path, *arguments: object, **options: object) -> object:
        if path.name == "secret.png":  # chmod has no effect for root
            raise PermissionError(13, "Permission denied")
        return original_open(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", raise_permission_error)
    result = vitrail("predict", tmp_path / "secret.png", "-m", weights)
    assert result.status == 1
    assert result.errors == [f"cannot open '{tmp_path / 'secret.png'}': permission denied."]


def test_every_rejected_file_of_a_folder_is_reported(process, weights, tmp_path):
    gradient().save(tmp_path / "good.png")
    names = [name for name in REJECTED if name != "bomb.png"]
    for name in names:
        REJECTED[name][0](tmp_path / name)
    result = process("predict", tmp_path, "-m", weights, "--json")
    assert result.status == 1
    entries = {Path(entry["path"]).name: entry for entry in json.loads(result.out)}
    assert {name for name, entry in entries.items() if "error" in entry} == set(names)
    assert "predictions" in entries["good.png"]
    assert len(result.errors) == len(result.err.splitlines()) == len(names) + 1
