"""What a file's first look costs: whether its header is read in little time, and in how many scans a JPEG comes.

Readers of images walk over a header's parts in Python, and a small file can have a million of them.
"""

from __future__ import annotations

import re

PNG = b"\x89PNG\r\n\x1a\n"
USUAL_SCANS = 10
"""Passes of a progressive JPEG as libjpeg makes them of a photograph; of one in CMYK it makes eighteen."""
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.S)
"""In a JPEG: anything but data, padding and the restarts within them."""
START_OF_SCAN, END, LONE = 0xDA, 0xD9, (0x01, 0xD8)
SEGMENTS, PADDING = 1024, 64
"""Parts of a JPEG's header, and bytes between two of them, at most, where it is read in a thread of the service."""
CHUNKS, OTHERS, PACKED = 1024, 64, 2
"""Chunks of a PNG or WebP, those of them that hold no pixels, and those of a PNG that are unpacked, likewise."""
PIXEL_CHUNKS = (b"IDAT", b"fdAT", b"ANMF")
SMALL_EXIF = 2**16
"""Bytes of EXIF, likewise: Pillow reads 5,000 entries of it in 20 ms, and its old versions copy all of it for each."""
SMALL_ODD = 2**16
"""Bytes of a file of any other format, likewise."""


def quick_header(data: bytes) -> bool:
    """Whether reading the header takes little time."""
    if data.startswith(b"\xff\xd8"):
        return _few_segments(data)
    if data.startswith(PNG):
        return _few_chunks(data)
    if data.startswith(b"RIFF"):
        return _few_chunks_of_webp(data)
    return len(data) <= SMALL_ODD


def _few_segments(data: bytes) -> bool:
    at, exif = 2, 0
    for _ in range(SEGMENTS):
        found = MARKER.search(data, at, at + PADDING)
        if found is None:
            return data[at : at + 1] != b"\xff"  # what does not go on here is no header
        at, marker = found.end(), data[found.end() - 1]
        if marker == START_OF_SCAN:
            return True
        if marker not in LONE:
            size = max(int.from_bytes(data[at : at + 2], "big"), 2)
            exif += size * (data[at + 2 : at + 6] == b"Exif")  # all such parts are joined
            if exif > SMALL_EXIF:
                return False
            at += size
    return False


def _few_chunks(data: bytes) -> bool:
    at, count, others, packed = len(PNG), 0, 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        count += 1
        others += kind not in PIXEL_CHUNKS
        packed += kind in (b"iCCP", b"zTXt", b"iTXt")
        if count > CHUNKS or others > OTHERS or packed > PACKED:
            return False
        if kind in (b"tEXt", b"zTXt", b"iTXt") and data.startswith(b"Raw profile type", at + 8):  # EXIF in text
            return False
        if kind == b"eXIf" and size > SMALL_EXIF:
            return False
        at += 12 + size
    return True


def _few_chunks_of_webp(data: bytes) -> bool:
    """The rest of it is read by a library."""
    at, count, others = 12, 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at + 4 : at + 8], "little"), data[at : at + 4]
        count += 1
        others += kind not in PIXEL_CHUNKS
        if count > CHUNKS or others > OTHERS or (kind == b"EXIF" and size > SMALL_EXIF):
            return False
        at += 8 + size + size % 2
    return True


def scans(data: bytes, most: int) -> int:
    """Of a JPEG's main image, up to its end, counted no further than past `most`; 0: no more than is usual.

    What lies in its metadata (a thumbnail) or follows its end (a phone's video) is not of it.
    """
    if data.count(b"\xff\xda") <= min(most, USUAL_SCANS):  # perhaps some of them are no scans: no matter
        return 0
    at, count = 2, 0
    while count <= most and (found := MARKER.search(data, at)) is not None:
        at, marker = found.end(), data[found.end() - 1]
        if marker == END:
            break
        if marker not in LONE:  # all others say how long they are
            count += marker == START_OF_SCAN
            at += max(int.from_bytes(data[at : at + 2], "big"), 2)
    return count
