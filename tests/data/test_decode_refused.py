"""What cannot be read whole is refused in one sentence that names it and says why."""

from __future__ import annotations

import io
import os
import struct
import sys
import threading
import types
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded
from PIL import Image, ImageFile

from vitrail.data.decode import decode
from vitrail.errors import ImageError, NotFoundError

# What cannot be read


def test_missing_file_raises_not_found(tmp_path: Path) -> None:
    for name in (tmp_path / "none.jpg", tmp_path / "none" / "x.jpg"):
        with pytest.raises(NotFoundError, match=r"no such file: .*none"):
            decode(name)
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError):
        decode(tmp_path / "file" / "below.jpg")


def test_url_raises_not_found() -> None:
    with pytest.raises(NotFoundError, match=r"https://example\.org/cat\.jpg is a URL, expected a file"):
        decode("https://example.org/cat.jpg")


def test_errors_name_folders_empty_files_and_pipes(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=rf"{tmp_path} is a folder, expected an image"):
        decode(tmp_path)
    empty = tmp_path / "empty.jpg"
    empty.touch()
    with pytest.raises(ImageError, match=r"empty\.jpg is empty \(0 bytes\)"):
        decode(empty)
    with pytest.raises(ImageError, match=r"image of 0 bytes is empty"):
        decode(b"")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ImageError, match="not a regular file"):
            decode(tmp_path / "pipe")


def test_impossible_file_name_is_an_error() -> None:
    for name in ("a\0b.jpg", "x" * 5000):
        with pytest.raises((ImageError, NotFoundError)):
            decode(name)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"hello, I am a text file", r"starts with b'hello, I am '; expected JPEG, PNG"),
        (b"<!DOCTYPE html><html>404", "web page"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7 ...", "PDF"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "video"),
        (b"\0" * 3000, "only zeros"),
        (b"\x89PNG\r\n\x1a\n\0\0", "header is damaged"),
        (b"GIF89a\x01", "header is damaged"),
        (b"II*\0\x08\0\0\0\0\0", "a TIFF, damaged or"),
    ],
)
def test_error_says_what_a_file_is_instead_of_an_image(data: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "cat.jpg"
    file.write_bytes(data)
    with pytest.raises(ImageError, match=rf"cat\.jpg is not an image: .*{reason}"):
        decode(file)


def test_eps_programs_are_not_run() -> None:
    with pytest.raises(ImageError, match="EPS, a program that draws an image"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("left", [0.3, 0.7, 0.99])
def test_truncated_jpeg_is_an_error(jpeg: bytes, left: float, progressive: bool, tmp_path: Path) -> None:
    whole = encoded(Image.open(io.BytesIO(jpeg)), "JPEG", progressive=progressive)
    file = tmp_path / "half.jpg"
    file.write_bytes(whole[: int(len(whole) * left)])
    with pytest.raises(ImageError, match=r"half\.jpg cannot be read: .*truncated"):
        decode(file)


def test_truncated_files_are_errors_even_if_pillow_is_set_to_accept_them(
    monkeypatch: pytest.MonkeyPatch, jpeg: bytes
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ImageError, match="truncated"):
        decode(jpeg[: len(jpeg) // 2])
    assert ImageFile.LOAD_TRUNCATED_IMAGES  # the asker's setting is theirs again


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO", "AVIF", "JPEG2000"])
def test_damage_anywhere_gives_an_image_or_an_image_error(photo: np.ndarray, kind: str) -> None:
    if kind not in Image.SAVE:
        Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    whole = encoded(Image.fromarray(photo[:30, :40]), kind)
    random = np.random.default_rng(0)
    errors: list[tuple[int, str]] = []
    for turn in range(120):
        data = bytearray(whole[: random.integers(1, len(whole))] if turn % 2 else whole)
        for place in random.integers(0, min(len(data), 200 if turn % 3 else len(data)), size=turn % 5):
            data[place] = random.integers(0, 256)
        try:
            assert decode(bytes(data)).dtype == np.uint8
        except ImageError as error:
            errors.append((len(data), str(error)))
    assert len(errors) > 20
    assert all(f"image of {size} bytes" in message for size, message in errors)


# Plugins


def heic() -> bytes:
    return b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 40


@pytest.fixture
def registered() -> Iterator[None]:
    """Pillow's tables as they were, afterwards."""
    Image.init()
    formats, openers = Image.ID.copy(), Image.OPEN.copy()
    yield
    Image.ID[:] = formats
    Image.OPEN.clear()
    Image.OPEN.update(openers)


@pytest.mark.parametrize(
    ("data", "module", "remedy"),
    [
        (heic(), "pillow_heif", r"is HEIC.*pip install pillow-heif"),
        (b"\xff\x0a\0\0" + b"\0" * 40, "pillow_jxl", r"is JPEG XL.*pip install pillow-jxl-plugin"),
    ],
)
def test_error_names_the_missing_plugin(data: bytes, module: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    with pytest.raises(ImageError, match=remedy):
        decode(data)


@pytest.mark.usefixtures("registered")
def test_error_names_the_avif_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.ID[:] = [name for name in Image.ID if name != "AVIF"]
    Image.OPEN.pop("AVIF", None)
    monkeypatch.setitem(sys.modules, "pillow_avif", None)
    with pytest.raises(ImageError, match=r"is AVIF.*pip install pillow-avif-plugin"):
        decode(b"\0\0\0\x1cftypavif\0\0\0\0" + b"\0" * 40)


@pytest.mark.usefixtures("registered")
def test_installed_plugin_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Toy(ImageFile.ImageFile):
        format = "HEIF"

        def _open(self) -> None:
            self._size, self._mode = (2, 1), "RGB"

        def load(self) -> Any:
            self.im = Image.new("RGB", (2, 1), (7, 8, 9)).im
            return None

    plugin: Any = types.ModuleType("pillow_heif")
    plugin.register_heif_opener = lambda: Image.register_open("HEIF", Toy, lambda start: start[4:8] == b"ftyp")
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    assert decode(heic())[0].tolist() == [[7, 8, 9], [7, 8, 9]]


# Too many pixels


def test_pixel_limit_error_states_size_limit_and_remedy(monkeypatch: pytest.MonkeyPatch, jpeg: bytes) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    with pytest.raises(ImageError, match=r"11,700 pixels.*limit of 10,000; if you trust it, make a smaller copy"):
        decode(jpeg)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode(jpeg).shape == (90, 130, 3)


def test_decompression_bomb_is_refused_before_decompression() -> None:
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(bytes(100))}
    bomb = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks.items():
        bomb += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    with pytest.raises(ImageError, match=r"3,600,000,000 pixels"):
        decode(bomb)


# Arrays and tensors


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros((4, 5, 3), np.float32),
            r"\(4, 5, 3\) and dtype float32, expected uint8.*\(x \* 255\)\.round\(\)\.astype",
        ),
        (np.zeros((4, 5, 3), np.uint16), r"dtype uint16.*\(x // 257\)\.astype\(np\.uint8\)"),
        (np.zeros((4, 5), bool), r"dtype bool.*x\.astype\(np\.uint8\) \* 255"),
        (np.zeros((3, 40, 50), np.uint8), r"has 50 channels, expected 1, 3 or 4; try x\.transpose\(1, 2, 0\)"),
        (np.zeros((4, 5, 2), np.uint8), r"has 2 channels, expected 1, 3 or 4"),
        (np.zeros((2, 4, 5, 3), np.uint8), r"expected one image.*list\(x\)"),
        (np.zeros((5,), np.uint8), r"shape \(5,\), expected uint8 H W or H W C"),
        (np.zeros((0, 5, 3), np.uint8), r"shape \(0, 5, 3\).*at least one pixel"),
        (np.zeros((4, 5, 0), np.uint8), r"at least one pixel"),
        (
            torch.zeros(3, 4, 5),
            r"tensor of shape \(3, 4, 5\) and dtype float32.*\.to\(torch\.uint8\) if it holds \[0, 1\]",
        ),
        (torch.zeros(40, 50, 3, dtype=torch.uint8), r"has 40 channels, expected 1, 3 or 4; try x\.permute\(2, 0, 1\)"),
        (torch.zeros(4, 5, dtype=torch.uint8), r"expected uint8 C H W; try x\[None\]"),
        (torch.zeros(2, 3, 4, 5, dtype=torch.uint8), r"list\(x\)"),
        (Image.new("RGB", (0, 5)), r"no pixels: 0 x 5"),
        (17, r"got int, expected a path"),
        (None, r"got NoneType, expected a path"),
    ],
)
def test_invalid_arrays_and_types_are_errors_that_say_what_is_expected(array: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        decode(array)


# ThreadPool and warnings


def test_decoding_in_threads_leaves_global_state_unchanged(jpeg: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90 * 130 - 1)  # each reading would warn
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([0, 0, 0, 9, 9, 9])
    images = [jpeg, encoded(palette, "PNG", transparency=bytes([0, 255])), jpeg[:900]]
    filters, failures = list(warnings.filters), []

    def work() -> None:
        for turn in range(60):
            try:
                decode(images[turn % 3])
            except ImageError:
                pass
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(warnings.filters) == filters
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
