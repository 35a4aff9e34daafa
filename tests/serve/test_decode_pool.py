"""Decoding in threads and processes: cost, fairness, limits, cancellation."""

from __future__ import annotations

import io
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from serving import QUICK, photo, png_of, run_server, served, until
from small_models import model, small

import vitrail
from vitrail.serve import decode_pool, decode_process, fair_queue, image_decoder, image_headers
from vitrail.serve.app import Service
from vitrail.serve.decode_process import DecodeProcess
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder, InspectedImage
from vitrail.serve.image_headers import is_quick_header
from vitrail.serve.limits import Limits

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def vit() -> vitrail.Model:
    torch.manual_seed(0)
    return model(small())


@pytest.fixture(scope="module")
def large() -> bytes:
    """An image that is decoded in a process."""
    return saved(Image.linear_gradient("L").resize((2500, 2000)).convert("RGB"), "PNG", compress_level=1)


@pytest.fixture
def process(vit: vitrail.Model) -> Iterator[DecodeProcess]:
    found = DecodeProcess(vit.preprocess.config, Limits())
    yield found
    found.close()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def reader(vit: vitrail.Model, **limits: Any) -> ImageDecoder:
    return ImageDecoder(vit.preprocess, Limits(**limits), (4, 4))


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_chunks(count: int, name: bytes = b"prVt", data: bytes = b"") -> bytes:
    whole = photo(kind="PNG")
    return whole[:33] + count * chunk(name, data) + whole[33:]


def with_exif(kind: str, size: int) -> bytes:
    whole, exif = photo(kind=kind), b"II*\0\x08\0\0\0" + bytes(size - 8)
    if kind == "PNG":
        return with_chunks(1, b"eXIf", exif)
    if kind == "WEBP":
        return saved(Image.open(io.BytesIO(whole)), kind, exif=exif)
    parts = [b"Exif\0\0" + exif[at : at + 60_000] for at in range(0, size, 60_000)]
    return whole[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts) + whole[2:]


def expected() -> bool:
    return True


# Which images are large


@pytest.mark.parametrize(
    ("image", "kind", "cost"),
    [
        (Image.new("RGB", (30, 20)), "JPEG", 600),
        (Image.new("CMYK", (30, 20)), "JPEG", 600),
        (Image.new("RGB", (30, 20)), "PNG", 600),
        (Image.new("RGBA", (30, 20)), "PNG", 1200),
        (Image.new("I;16", (30, 20)), "PNG", 2400),
        (Image.new("F", (30, 20)), "TIFF", 2400),
        (Image.new("RGB", (30, 20)), "WEBP", 1200),
    ],
)
def test_what_an_image_costs_follows_from_its_header(
    vit: vitrail.Model, image: Image.Image, kind: str, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(image, kind)
    inspected = reader(vit).inspect(data)
    assert (inspected.pixels, inspected.cost, inspected.large) == (600, cost, False)
    monkeypatch.setattr(image_decoder, "SMALL_PIXELS", cost - 1)
    assert reader(vit).inspect(data).large
    assert np.array_equal(reader(vit).decode(inspected), reader(vit).decode_bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(with_chunks(100), id="a PNG of many chunks"),
        pytest.param(b"\xff\xd8" + b"\xff\xe9\0\x02" * 2000 + photo()[2:], id="a JPEG of many parts"),
        pytest.param(b"\xff\xd8" + b"\xff" * 1000 + photo()[2:], id="a JPEG with padding"),
        pytest.param(b"\xff\xd8" + b"\xff\0" * 1000 + photo()[2:], id="a JPEG with what Pillow skips"),
        pytest.param(saved(Image.effect_noise((700, 700), 90).convert("RGB"), "TIFF"), id="a TIFF of 1.4 MB"),
        pytest.param(saved(Image.effect_noise((1500, 1500), 90).convert("RGB"), "PNG"), id="a PNG of 6 MB"),
        pytest.param(with_exif("JPEG", 70_000), id="a JPEG with EXIF in two parts"),
        pytest.param(with_exif("PNG", 70_000), id="a PNG with much EXIF"),
        pytest.param(with_exif("WEBP", 70_000), id="a WebP with much EXIF"),
        pytest.param(with_chunks(1, b"tEXt", b"Raw profile type exif\0" + bytes(9)), id="a PNG with EXIF in text"),
        pytest.param(with_chunks(3, b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20))), id="a PNG with packed text"),
        pytest.param(with_chunks(3, b"iCCP", b"a\0\0" + zlib.compress(bytes(2**20))), id="a PNG with 3 profiles"),
    ],
)
def test_an_image_with_a_slow_header_counts_as_large(
    vit: vitrail.Model, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspected = reader(vit).inspect(data)
    assert inspected.large
    assert is_quick_header(data) == (len(data) > image_decoder.SMALL_BYTES)
    if not is_quick_header(data):
        monkeypatch.setattr(Image, "open", None)
        assert reader(vit).inspect(data).pixels == Limits().max_pixels


def test_headers_of_common_files_are_quick() -> None:
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        assert is_quick_header(photo(kind=kind)), kind
    assert is_quick_header(with_chunks(50))
    assert is_quick_header(photo()[:30])
    for kind in ("JPEG", "PNG", "WEBP"):
        assert is_quick_header(with_exif(kind, 50_000)), kind


@pytest.mark.parametrize("data", [with_chunks(100), b"\xff\xd8" + b"\xff\xe9\0\x02" * 2000 + photo()[2:]])
def test_a_slow_header_is_checked_during_decoding(vit: vitrail.Model, data: bytes) -> None:
    inspected = reader(vit).inspect(data)
    assert (inspected.source, inspected.cost) == (None, Limits().max_pixels // image_decoder.UNREAD_HEADER_DIVISOR)
    assert np.array_equal(
        reader(vit).decode(inspected), reader(vit).decode_bytes(photo(kind="PNG" if data[0] == 0x89 else "JPEG"))
    )
    with pytest.raises(RequestError, match="at most 100 are allowed"):
        reader(vit, max_pixels=100).decode_bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"P1\n4 4\n" + b"1 " * 16, id="P1"),
        pytest.param(b"P2\n4 4\n255\n" + b"9 " * 16, id="P2"),
        pytest.param(b"P3\n4 4\n255\n" + b"9 " * 48, id="P3"),
        pytest.param(b"P6\n4 4\n65535\n" + bytes(96), id="P6 of 16 bits"),
    ],
)
def test_formats_that_pillow_decodes_in_python_are_refused(vit: vitrail.Model, data: bytes) -> None:
    assert np.asarray(Image.open(io.BytesIO(data))).shape[:2] == (4, 4)  # Pillow itself can read them
    with pytest.raises(RequestError, match="this variant of PPM is not supported; send it as PNG or JPEG") as refused:
        reader(vit).inspect(data)
    assert (refused.value.status, refused.value.code) == (400, "image_unreadable")
    assert reader(vit).decode_bytes(b"P6\n4 4\n255\n" + bytes(48)).shape == (32, 32, 3)


# The process


def test_a_large_image_has_the_same_pixels_from_the_process(
    vit: vitrail.Model, process: DecodeProcess, large: bytes
) -> None:
    for data in (large, photo()):
        found = process.decode(data, expected)
        assert found is not None
        assert np.array_equal(found, reader(vit).decode_bytes(data))


def test_errors_are_the_same_with_json_lines(vit: vitrail.Model, process: DecodeProcess) -> None:
    for data in (png_of(60_000, 60_000, bytes(100)), png_of(2000, 1000, bytes(10)), b"P3\n4 4\n255\n" + b"9 " * 48):
        with pytest.raises(RequestError) as here:
            reader(vit).decode_bytes(data)
        with pytest.raises(RequestError) as there:
            process.decode(data, expected)
        assert there.value.body() == here.value.body()
        assert there.value.status == here.value.status


def test_the_process_has_low_priority_and_ignores_group_signals(process: DecodeProcess) -> None:
    assert process.decode(photo(), expected) is not None
    pid = process._pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + decode_process.NICENESS, 19)
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, sig)
    assert process.decode(photo(1), expected) is not None
    assert process._pid == pid


def test_work_that_is_no_longer_wanted_is_killed_and_the_next_image_decoded(
    process: DecodeProcess, large: bytes
) -> None:
    assert process.decode(photo(), expected) is not None
    before = process._pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)  # so that it never responds
    assert process.decode(large, lambda: False) is None
    assert not Path(f"/proc/{before}").exists()
    assert process.decode(photo(), expected) is not None


@pytest.mark.parametrize(
    ("sig", "message"),
    [(signal.SIGPROF, "takes more than 20 s"), (signal.SIGSEGV, "decoding it failed"), (signal.SIGKILL, "it failed")],
)
def test_a_decode_process_that_dies_fails_only_its_image(
    process: DecodeProcess, sig: signal.Signals, message: str
) -> None:
    assert process.decode(photo(), expected) is not None
    pid = process._pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    def strike() -> bool:
        os.kill(pid, sig)
        os.kill(pid, signal.SIGCONT)
        return True

    with pytest.raises(RequestError, match=message):
        process.decode(photo(), strike)
    assert process.decode(photo(), expected) is not None


def test_an_image_that_takes_too_long_ends_its_process(vit: vitrail.Model) -> None:
    process = DecodeProcess(vit.preprocess.config, Limits(), seconds=0.05)
    with pytest.raises(RequestError, match=r"takes more than 0\.05 s") as refused:
        process.decode(with_chunks(200_000), expected)
    assert (refused.value.status, refused.value.code) == (400, "image_unreadable")
    process.close()


# The service


class Senders:
    """Sends requests in parallel."""

    def __init__(self, client: httpx.Client, pool: ThreadPoolExecutor) -> None:
        self.client, self.pool = client, pool

    def send(self, *images: bytes, **headers: str) -> Future[httpx.Response]:
        return self.pool.submit(
            self.client.post, "/v1/predict", files=[("images", image) for image in images], headers=headers
        )


@pytest.fixture
def sending() -> Iterator[Callable[[httpx.Client], Senders]]:
    with ThreadPoolExecutor(8) as pool:
        yield lambda client: Senders(client, pool)


class BlockingDecodeProcess:
    """Replaces the decode process; blocks each image until `go` is set."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images, self.go, self.seen, self.dropped = service.image_decoder, threading.Event(), [], 0
        monkeypatch.setattr(decode_pool.DecodePool, "_decode_in_process", self._decoded)

    def _decoded(self, process: Any, request: Any, inspected: InspectedImage) -> Any:
        self.seen.append(len(inspected.data))
        while not self.go.wait(0.01):
            if request.expired():
                self.dropped += 1
                return None
        return self.images.decode(inspected)


def test_a_large_image_is_answered_like_any_other(vit: vitrail.Model, large: bytes) -> None:
    with run_server(served(vit)) as (client, service):
        answer = client.post("/v1/predict", files=[("images", photo()), ("images", large)])
        results = answer.json()["results"]
        for result, data in zip(results, (photo(), large), strict=True):
            best = vit.predict(data)[0]
            assert result["predictions"][0]["index"] == best.index
            assert result["predictions"][0]["score"] == pytest.approx(best.score, abs=1e-6)
        assert client.post("/v1/explain", content=large, headers=PNG).status_code == 200
        assert client.post("/v1/preprocess?hide=[1]", content=large, headers=PNG).status_code == 200
        tiff = saved(Image.effect_noise((300, 200), 90).convert("RGB"), "TIFF")
        assert len(tiff) > image_headers.MAX_OTHER_BYTES
        assert client.post("/v1/predict", files=[("images", tiff)] * 5).status_code == 200
        assert service.batcher.decode_pool.large_pixel_quota.used == 0


def test_small_images_do_not_wait_for_large_ones(
    vit: vitrail.Model, large: bytes, sending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(served(vit)) as (client, service):
        blocking, senders = BlockingDecodeProcess(service, monkeypatch), sending(client)
        waiting = [senders.send(large, large, large) for _ in range(3)]
        until(lambda: len(blocking.seen) == QUICK.decode_threads)
        until(lambda: service.batcher.decode_pool.small_pending == 0)  # a batch does not wait for them
        assert senders.send(photo()).result().status_code == 200
        blocking.go.set()
        assert {answer.result().status_code for answer in waiting} == {200}


def test_what_a_request_costs_is_counted_before_anything_is_decoded(
    vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = saved(Image.new("I;16", (50, 40)), "PNG")  # 2,000 pixels that count as 8,000
    with run_server(served(vit), Limits(max_pixels=5000)) as (client, service):
        monkeypatch.setattr(service.image_decoder, "decode", None)
        answer = client.post("/v1/predict", files=[("images", deep)] * 3)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_pixels")
        assert "24,000 pixels" in answer.json()["error"]["message"]
        assert "at most 20,000" in answer.json()["error"]["message"]
        assert client.get("/v1/model").json()["limits"]["max_total_pixels"] == 20_000
        monkeypatch.undo()
        assert client.post("/v1/predict", files=[("images", deep)] * 2).status_code == 200


def test_one_client_may_have_so_many_large_images_waiting(
    vit: vitrail.Model, sending: Any, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(served(vit), Limits(max_pixels=5_000_000)) as (client, service):
        blocking, senders = BlockingDecodeProcess(service, monkeypatch), sending(client)
        held = [senders.send(*[large] * 4) for _ in range(2)]
        quota = service.batcher.decode_pool.large_pixel_quota
        until(lambda: quota.used == 40_000_000)
        refused = senders.send(large).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert "40,000,000 pixels of large images" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert senders.send(photo()).result().status_code == 200  # small images are not limited
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=client.base_url, timeout=20, transport=transport) as other:
            allowed = sending(other).send(large)
            until(lambda: quota.used == 45_000_000)
            blocking.go.set()
            assert allowed.result().status_code == 200
        assert {answer.result().status_code for answer in held} == {200}
        until(lambda: quota.used == 0)


def test_one_process_is_reserved_for_other_clients(
    vit: vitrail.Model, sending: Any, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "CONTENTION_WINDOW_S", 60)
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with (
        run_server(served(vit)) as (client, service),
        httpx.Client(base_url=client.base_url, transport=transport) as other,
    ):
        assert other.post("/v1/predict", content=photo(), headers={"content-type": "image/jpeg"}).status_code == 200
        blocking, senders, jobs = (
            BlockingDecodeProcess(service, monkeypatch),
            sending(client),
            service.batcher.decode_pool._large_jobs,
        )
        many = [senders.send(large, large) for _ in range(3)]
        until(lambda: service.batcher.decode_pool.large_pixel_quota.used == 30_000_000)
        one = sending(other).send(large)
        until(lambda: jobs._busy == {"127.0.0.1": 1, "127.0.0.2": 1})
        assert len(blocking.seen) == QUICK.decode_threads == 2
        blocking.go.set()
        assert {answer.result().status_code for answer in (one, *many)} == {200}
        until(lambda: not jobs._busy)


def test_large_images_of_a_client_that_left_are_dropped(
    vit: vitrail.Model, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(served(vit)) as (client, service):
        blocking = BlockingDecodeProcess(service, monkeypatch)
        request = client.build_request("POST", "/v1/predict", files=[("images", large)] * 5)
        body = request.read()
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(f"POST /v1/predict HTTP/1.1\r\n{head}\r\n".encode() + body)
            until(lambda: len(blocking.seen) == QUICK.decode_threads)
        until(lambda: blocking.dropped == QUICK.decode_threads)
        until(lambda: service.batcher._decoding == 0)
        assert len(blocking.seen) == QUICK.decode_threads  # the other three were not started
        assert service.batcher.decode_pool.large_pixel_quota.used == 0
        assert service.batcher.image_quota.used == 0


def test_the_number_of_pixels_decoded_at_a_time_is_limited(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "PIXELS_PER_EXTRA_PROCESS", 10)
    lock, now, most = threading.Lock(), 0, 0

    class Counting:
        def decode(self, data: bytes, expected: Any) -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.01)
            with lock:
                now -= 1

    images = reader(vit, max_pixels=25)
    decoders = decode_pool.DecodePool(images, 4, None, None)  # type: ignore[arg-type]
    assert decoders.pixel_semaphore.total == 55  # the largest image leaves room for others
    inspected = InspectedImage(b"", b"", 15, 15, large=True)
    request: Any = object()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: decoders._decode_in_process(Counting(), request, inspected), range(12)))  # type: ignore[arg-type]
    assert most == 3
    assert decoders.pixel_semaphore.available == 55
