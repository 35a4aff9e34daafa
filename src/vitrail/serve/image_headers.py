"""Cost of reading an image header, and the number of scans of a JPEG.

Pillow reads the segments of a header in Python, and a small file can have a million of them.
"""

from __future__ import annotations

import re

PNG = b"\x89PNG\r\n\x1a\n"
USUAL_SCANS = 10
"""Scans that libjpeg writes for a progressive JPEG; for CMYK it writes eighteen."""
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.S)
"""A JPEG marker other than stuffed bytes, padding and restart markers."""
START_OF_SCAN, END_OF_IMAGE, STANDALONE = 0xDA, 0xD9, (0x01, 0xD8)
MAX_SEGMENTS, MAX_PADDING = 1024, 64
"""Limits for a quick JPEG header: number of segments, and bytes between two of them."""
MAX_CHUNKS, MAX_OTHER_CHUNKS, MAX_COMPRESSED_CHUNKS = 1024, 64, 2
"""Limits for a quick PNG or WebP header: chunks, chunks without pixels, and compressed metadata chunks (PNG)."""
PIXEL_CHUNKS = (b"IDAT", b"fdAT", b"ANMF")
MAX_EXIF_BYTES = 2**16
"""Limit on EXIF: Pillow reads 5,000 entries in 20 ms, and old versions copy the whole block for each."""
MAX_OTHER_BYTES = 2**16
"""Limit on the size of a file of any other format."""
RAW_PIXELS = re.compile(rb"P[56] \d{1,6} \d{1,6} 255\n")
"""Header of a PPM or PGM without comments, as tensor_codec.py writes it."""


def is_quick_header(data: bytes) -> bool:
    """Whether the header is cheap enough to be read in a thread of the service."""
    if data.startswith(b"\xff\xd8"):
        return _is_quick_jpeg(data)
    if data.startswith(PNG):
        return _is_quick_png(data)
    if data.startswith(b"RIFF"):
        return _is_quick_webp(data)
    return len(data) <= MAX_OTHER_BYTES or RAW_PIXELS.match(data) is not None


def _is_quick_jpeg(data: bytes) -> bool:
    at, exif = 2, 0
    for _ in range(MAX_SEGMENTS):
        match = MARKER.search(data, at, at + MAX_PADDING)
        if match is None:
            return data[at : at + 1] != b"\xff"  # no marker follows: the header ends here
        at, marker = match.end(), data[match.end() - 1]
        if marker == START_OF_SCAN:
            return True
        if marker not in STANDALONE:
            size = max(int.from_bytes(data[at : at + 2], "big"), 2)
            exif += size * (data[at + 2 : at + 6] == b"Exif")  # Pillow joins all EXIF segments
            if exif > MAX_EXIF_BYTES:
                return False
            at += size
    return False


def _is_quick_png(data: bytes) -> bool:
    at, count, others, packed = len(PNG), 0, 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        count += 1
        others += kind not in PIXEL_CHUNKS
        packed += kind in (b"iCCP", b"zTXt", b"iTXt")
        if count > MAX_CHUNKS or others > MAX_OTHER_CHUNKS or packed > MAX_COMPRESSED_CHUNKS:
            return False
        if kind in (b"tEXt", b"zTXt", b"iTXt") and data.startswith(b"Raw profile type", at + 8):  # EXIF stored as text
            return False
        if kind == b"eXIf" and size > MAX_EXIF_BYTES:
            return False
        at += 12 + size
    return True


def _is_quick_webp(data: bytes) -> bool:
    """libwebp reads everything else."""
    at, count, others = 12, 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at + 4 : at + 8], "little"), data[at : at + 4]
        count += 1
        others += kind not in PIXEL_CHUNKS
        if count > MAX_CHUNKS or others > MAX_OTHER_CHUNKS or (kind == b"EXIF" and size > MAX_EXIF_BYTES):
            return False
        at += 8 + size + size % 2
    return True


def count_scans(data: bytes, limit: int) -> int:
    """Number of scans of the main image of a JPEG, counted up to `limit` + 1; 0 if there are few.

    Metadata (thumbnails) and data after the end of the image (such as a video) are ignored.
    """
    if data.count(b"\xff\xda") <= min(limit, USUAL_SCANS):  # an upper bound, which is enough here
        return 0
    at, count = 2, 0
    while count <= limit and (match := MARKER.search(data, at)) is not None:
        at, marker = match.end(), data[match.end() - 1]
        if marker == END_OF_IMAGE:
            break
        if marker not in STANDALONE:  # all other segments have a length field
            count += marker == START_OF_SCAN
            at += max(int.from_bytes(data[at : at + 2], "big"), 2)
    return count
