"""Tar headers, compared with Python's tarfile."""

from __future__ import annotations

import contextlib
import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources import tar
from vitrail.errors import DataError

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=130)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join).filter(lambda p: p.strip("./"))


def over(data: bytes) -> tar.ReadAt:
    return lambda at, length: data[at : at + length]


@given(
    st.lists(st.tuples(PATHS, st.binary(max_size=1500)), min_size=1, max_size=6),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_members_are_those_of_tarfile(make_tar, members, kind):
    data = make_tar(members, format=kind)
    found = list(tar.iter_members(over(data), "x.tar", len(data)))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive]
    assert [(m.name.rstrip("/"), m.offset, m.size) for m in found] == expected
    assert [data[m.offset : m.offset + m.size] for m in found] == [content for _, content in members]


def test_folders_links_and_global_records_are_skipped():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            info = tarfile.TarInfo("odd")
            info.type = kind
            archive.addfile(info)
        info = tarfile.TarInfo("a.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"7"))
    assert [m.name for m in tar.iter_members(over(out.getvalue()), "x.tar")] == ["a.cls"]


def test_a_size_beyond_eight_gigabytes_is_read():
    info = tarfile.TarInfo("big.jpg")
    info.size = 10 << 30
    header = info.tobuf(tarfile.GNU_FORMAT)
    [member] = tar.iter_members(lambda at, length: header[at : at + length] if at < 512 else b"", "x.tar")
    assert member.size == 10 << 30
    in_records = info.tobuf(tarfile.PAX_FORMAT)
    [member] = tar.iter_members(lambda at, length: in_records[at : at + length] if at < 2048 else b"", "x.tar")
    assert member.size == 10 << 30


@given(st.data())
def test_a_file_truncated_anywhere_inside_its_members_is_named(make_tar, data):
    whole = make_tar([("a.jpg", b"x" * 700), ("b.jpg", b"y" * 100)])
    second = 512 + 1024
    cut = data.draw(st.integers(1, second + 512 + 99).filter(lambda n: n not in (second,)))
    with pytest.raises(DataError, match=r"x\.tar is truncated"):
        list(tar.iter_members(over(whole[:cut]), "x.tar", cut))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty, expected a tar file"),
        (b"\x1f\x8b" + bytes(2000), "is compressed with gzip; decompress it first"),
        (b"<!doctype html>" + b" " * 1000, "is not a tar file"),
        (b"short", "is truncated at byte 5, inside a header"),
    ],
)
def test_a_file_that_is_not_a_tar_file_is_an_error(data, message):
    with pytest.raises(DataError, match=rf"x\.tar {message}"):
        list(tar.iter_members(over(data), "x.tar", len(data)))


def test_damage_between_members_is_named_with_its_offset(make_tar):
    whole = bytearray(make_tar([("a.jpg", b"x" * 700), ("b.jpg", b"y" * 100)]))
    whole[1536] ^= 0xFF
    with pytest.raises(DataError, match=r"x\.tar is damaged at byte 1,536"):
        list(tar.iter_members(over(bytes(whole)), "x.tar"))


@given(st.integers(0, 5000), st.integers(1, 255), st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
def test_any_damage_is_either_harmless_or_named(make_tar, place, flip, kind):
    whole = bytearray(make_tar([("a" * 120 + ".jpg", b"x" * 700), ("b.jpg", b"y" * 100)], format=kind))
    whole[place % len(whole)] ^= flip
    with contextlib.suppress(DataError):
        found = list(tar.iter_members(over(bytes(whole)), "x.tar", len(whole)))
        assert all(m.offset + m.size <= len(whole) for m in found)


def test_samples_are_consecutive_members_with_one_key():
    names = ["a.jpg", "a.cls", "d/b.seg.png", "d/b.JPG", "._c.jpg", "README", "a.jpg", "a.jpg", "./e.jpg"]
    found = tar.group_samples(tar.Member(name, i, 1) for i, name in enumerate(names))
    assert [(key, {kind: m.offset for kind, m in parts.items()}) for key, parts in found] == [
        ("a", {"jpg": 0, "cls": 1}),
        ("d/b", {"seg.png": 2, "jpg": 3}),
        ("a", {"jpg": 6}),
        ("a", {"jpg": 7}),
        ("e", {"jpg": 8}),
    ]


@pytest.mark.parametrize(
    ("kinds", "given", "expected"),
    [
        (["cls", "jpg"], None, "jpg"),
        (["seg.png", "jpg"], None, "jpg"),
        (["depth.png", "seg.png"], None, "depth.png"),
        (["cls", "json"], None, None),
        (["jpg", "seg.png"], "seg.png", "seg.png"),
        (["jpg"], "png", None),
    ],
)
def test_the_image_extension_with_the_fewest_dots_wins(kinds, given, expected):
    assert tar.find_image(kinds, frozenset({".jpg", ".png"}), given) == expected
