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
from PIL import Image
from serving import QUICK, photo, png_with_size, run_server, served, wait_until

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
def large() -> bytes:
    """An image that is decoded in a process."""
    return encode(Image.linear_gradient("L").resize((2500, 2000)).convert("RGB"), "PNG", compress_level=1)


@pytest.fixture
def process(vit: vitrail.Model) -> Iterator[DecodeProcess]:
    process_ = DecodeProcess(vit.preprocess.config, Limits())
    yield process_
    process_.close()


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def image_decoder_for(vit: vitrail.Model, **limits: Any) -> ImageDecoder:
    return ImageDecoder(vit.preprocess, Limits(**limits), (4, 4))


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_chunks(count: int, name: bytes = b"prVt", data: bytes = b"") -> bytes:
    original = photo(kind="PNG")
    return original[:33] + count * chunk(name, data) + original[33:]


def with_exif(kind: str, size: int) -> bytes:
    original, exif = photo(kind=kind), b"II*\0\x08\0\0\0" + bytes(size - 8)
    if kind == "PNG":
        return with_chunks(1, b"eXIf", exif)
    if kind == "WEBP":
        return encode(Image.open(io.BytesIO(original)), kind, exif=exif)
    segments = [b"Exif\0\0" + exif[at : at + 60_000] for at in range(0, size, 60_000)]
    return (
        original[:2]
        + b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in segments)
        + original[2:]
    )


def is_wanted() -> bool:
    return True


# Which images are decoded in a process


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
def test_the_cost_of_an_image_is_computed_from_its_header(
    vit: vitrail.Model, image: Image.Image, kind: str, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(image, kind)
    inspected = image_decoder_for(vit).inspect(data)
    assert (inspected.pixels, inspected.cost, inspected.large) == (600, cost, False)
    monkeypatch.setattr(image_decoder, "SMALL_PIXELS", cost - 1)
    assert image_decoder_for(vit).inspect(data).large
    assert np.array_equal(image_decoder_for(vit).decode(inspected), image_decoder_for(vit).decode_bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(with_chunks(100), id="a PNG of many chunks"),
        pytest.param(b"\xff\xd8" + b"\xff\xe9\0\x02" * 2000 + photo()[2:], id="a JPEG of many parts"),
        pytest.param(b"\xff\xd8" + b"\xff" * 1000 + photo()[2:], id="a JPEG with padding"),
        pytest.param(b"\xff\xd8" + b"\xff\0" * 1000 + photo()[2:], id="a JPEG with bytes that Pillow skips"),
        pytest.param(encode(Image.effect_noise((700, 700), 90).convert("RGB"), "TIFF"), id="a TIFF of 1.4 MB"),
        pytest.param(encode(Image.effect_noise((1500, 1500), 90).convert("RGB"), "PNG"), id="a PNG of 6 MB"),
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
    inspected = image_decoder_for(vit).inspect(data)
    assert inspected.large
    assert is_quick_header(data) == (len(data) > image_decoder.SMALL_BYTES)
    if not is_quick_header(data):
        monkeypatch.setattr(Image, "open", None)
        assert image_decoder_for(vit).inspect(data).pixels == Limits().max_pixels


def test_headers_of_common_files_are_quick() -> None:
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        assert is_quick_header(photo(kind=kind)), kind
    assert is_quick_header(with_chunks(50))
    assert is_quick_header(photo()[:30])
    for kind in ("JPEG", "PNG", "WEBP"):
        assert is_quick_header(with_exif(kind, 50_000)), kind


@pytest.mark.parametrize("data", [with_chunks(100), b"\xff\xd8" + b"\xff\xe9\0\x02" * 2000 + photo()[2:]])
def test_a_slow_header_is_checked_during_decoding(vit: vitrail.Model, data: bytes) -> None:
    inspected = image_decoder_for(vit).inspect(data)
    assert (inspected.source, inspected.cost) == (None, Limits().max_pixels // image_decoder.UNREAD_HEADER_DIVISOR)
    assert np.array_equal(
        image_decoder_for(vit).decode(inspected),
        image_decoder_for(vit).decode_bytes(photo(kind="PNG" if data[0] == 0x89 else "JPEG")),
    )
    with pytest.raises(RequestError, match="at most 100 are allowed"):
        image_decoder_for(vit, max_pixels=100).decode_bytes(data)


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
        image_decoder_for(vit).inspect(data)
    assert (refused.value.status, refused.value.code) == (400, "image_unreadable")
    assert image_decoder_for(vit).decode_bytes(b"P6\n4 4\n255\n" + bytes(48)).shape == (32, 32, 3)


# The process


def test_a_large_image_has_the_same_pixels_from_the_process(
    vit: vitrail.Model, process: DecodeProcess, large: bytes
) -> None:
    for data in (large, photo()):
        pixels = process.decode(data, is_wanted)
        assert pixels is not None
        assert np.array_equal(pixels, image_decoder_for(vit).decode_bytes(data))


def test_errors_are_the_same_with_json_lines(vit: vitrail.Model, process: DecodeProcess) -> None:
    for data in (
        png_with_size(60_000, 60_000, bytes(100)),
        png_with_size(2000, 1000, bytes(10)),
        b"P3\n4 4\n255\n" + b"9 " * 48,
    ):
        with pytest.raises(RequestError) as local_error:
            image_decoder_for(vit).decode_bytes(data)
        with pytest.raises(RequestError) as process_error:
            process.decode(data, is_wanted)
        assert process_error.value.body() == local_error.value.body()
        assert process_error.value.status == local_error.value.status


def test_the_process_has_low_priority_and_ignores_group_signals(process: DecodeProcess) -> None:
    assert process.decode(photo(), is_wanted) is not None
    pid = process._pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + decode_process.NICENESS, 19)
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, sig)
    assert process.decode(photo(1), is_wanted) is not None
    assert process._pid == pid


def test_cancelled_work_is_killed_and_the_next_image_is_decoded(process: DecodeProcess, large: bytes) -> None:
    assert process.decode(photo(), is_wanted) is not None
    pid = process._pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it never responds
    assert process.decode(large, lambda: False) is None
    assert not Path(f"/proc/{pid}").exists()
    assert process.decode(photo(), is_wanted) is not None


@pytest.mark.parametrize(
    ("sig", "message"),
    [(signal.SIGPROF, "takes more than 20 s"), (signal.SIGSEGV, "decoding it failed"), (signal.SIGKILL, "it failed")],
)
def test_a_decode_process_that_dies_fails_only_its_own_image(
    process: DecodeProcess, sig: signal.Signals, message: str
) -> None:
    assert process.decode(photo(), is_wanted) is not None
    pid = process._pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    def kill_process() -> bool:
        os.kill(pid, sig)
        os.kill(pid, signal.SIGCONT)
        return True

    with pytest.raises(RequestError, match=message):
        process.decode(photo(), kill_process)
    assert process.decode(photo(), is_wanted) is not None


def test_an_image_that_takes_too_long_ends_its_process(vit: vitrail.Model) -> None:
    process = DecodeProcess(vit.preprocess.config, Limits(), seconds=0.05)
    with pytest.raises(RequestError, match=r"takes more than 0\.05 s") as refused:
        process.decode(with_chunks(200_000), is_wanted)
    assert (refused.value.status, refused.value.code) == (400, "image_unreadable")
    process.close()


# The service


class RequestSender:
    """Sends requests in parallel."""

    def __init__(self, client: httpx.Client, pool: ThreadPoolExecutor) -> None:
        self.client, self.pool = client, pool

    def send(self, *images: bytes, **headers: str) -> Future[httpx.Response]:
        return self.pool.submit(
            self.client.post, "/v1/predict", files=[("images", image) for image in images], headers=headers
        )


@pytest.fixture
def senders_for() -> Iterator[Callable[[httpx.Client], RequestSender]]:
    with ThreadPoolExecutor(8) as pool:
        yield lambda client: RequestSender(client, pool)


class BlockingDecodeProcess:
    """Replaces the decode process; blocks each image until `go` is set."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images, self.go, self.seen, self.dropped = service.default.image_decoder, threading.Event(), [], 0
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
        response = client.post("/v1/predict", files=[("images", photo()), ("images", large)])
        results = response.json()["results"]
        for result, data in zip(results, (photo(), large), strict=True):
            best = vit.predict(data)[0]
            assert result["predictions"][0]["index"] == best.index
            assert result["predictions"][0]["score"] == pytest.approx(best.score, abs=1e-6)
        assert client.post("/v1/explain", content=large, headers=PNG).status_code == 200
        assert client.post("/v1/preprocess?hide=[1]", content=large, headers=PNG).status_code == 200
        tiff = encode(Image.effect_noise((300, 200), 90).convert("RGB"), "TIFF")
        assert len(tiff) > image_headers.MAX_OTHER_BYTES
        assert client.post("/v1/predict", files=[("images", tiff)] * 5).status_code == 200
        assert service.default.batcher.decode_pool.large_pixel_quota.used == 0


def test_small_images_do_not_wait_for_large_ones(
    vit: vitrail.Model, large: bytes, senders_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(served(vit)) as (client, service):
        blocking, request_pool = BlockingDecodeProcess(service, monkeypatch), senders_for(client)
        queued = [request_pool.send(large, large, large) for _ in range(3)]
        wait_until(lambda: len(blocking.seen) == QUICK.decode_threads)
        wait_until(lambda: service.default.batcher.decode_pool.small_pending == 0)  # a batch does not wait for them
        assert request_pool.send(photo()).result().status_code == 200
        blocking.go.set()
        assert {response.result().status_code for response in queued} == {200}


def test_the_cost_of_a_request_is_checked_before_decoding(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    image = encode(Image.new("I;16", (50, 40)), "PNG")  # 2,000 pixels that count as 8,000
    with run_server(served(vit), Limits(max_pixels=5000)) as (client, service):
        monkeypatch.setattr(service.default.image_decoder, "decode", None)
        response = client.post("/v1/predict", files=[("images", image)] * 3)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_many_pixels")
        assert "24,000 pixels" in response.json()["error"]["message"]
        assert "at most 20,000" in response.json()["error"]["message"]
        assert client.get("/v1/model").json()["limits"]["max_total_pixels"] == 20_000
        monkeypatch.undo()
        assert client.post("/v1/predict", files=[("images", image)] * 2).status_code == 200


def test_the_large_images_queued_by_one_client_are_limited(
    vit: vitrail.Model, senders_for: Any, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(served(vit), Limits(max_pixels=5_000_000)) as (client, service):
        blocking, request_pool = BlockingDecodeProcess(service, monkeypatch), senders_for(client)
        queued = [request_pool.send(*[large] * 4) for _ in range(2)]
        quota = service.default.batcher.decode_pool.large_pixel_quota
        wait_until(lambda: quota.used == 40_000_000)
        refused = request_pool.send(large).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert "40,000,000 pixels of large images" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert request_pool.send(photo()).result().status_code == 200  # small images are not limited
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=client.base_url, timeout=20, transport=transport) as other:
            allowed = senders_for(other).send(large)
            wait_until(lambda: quota.used == 45_000_000)
            blocking.go.set()
            assert allowed.result().status_code == 200
        assert {response.result().status_code for response in queued} == {200}
        wait_until(lambda: quota.used == 0)


def test_one_process_is_reserved_for_other_clients(
    vit: vitrail.Model, senders_for: Any, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "CONTENTION_WINDOW_S", 60)
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with (
        run_server(served(vit)) as (client, service),
        httpx.Client(base_url=client.base_url, transport=transport) as other,
    ):
        assert other.post("/v1/predict", content=photo(), headers={"content-type": "image/jpeg"}).status_code == 200
        blocking, request_pool, jobs = (
            BlockingDecodeProcess(service, monkeypatch),
            senders_for(client),
            service.default.batcher.decode_pool._large_jobs,
        )
        queued = [request_pool.send(large, large) for _ in range(3)]
        wait_until(lambda: service.default.batcher.decode_pool.large_pixel_quota.used == 30_000_000)
        other_request = senders_for(other).send(large)
        wait_until(lambda: jobs._busy == {"127.0.0.1": 1, "127.0.0.2": 1})
        assert len(blocking.seen) == QUICK.decode_threads == 2
        blocking.go.set()
        assert {response.result().status_code for response in (other_request, *queued)} == {200}
        wait_until(lambda: not jobs._busy)


def test_large_images_of_a_disconnected_client_are_dropped(
    vit: vitrail.Model, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(served(vit)) as (client, service):
        blocking = BlockingDecodeProcess(service, monkeypatch)
        request = client.build_request("POST", "/v1/predict", files=[("images", large)] * 5)
        body = request.read()
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(f"POST /v1/predict HTTP/1.1\r\n{head}\r\n".encode() + body)
            wait_until(lambda: len(blocking.seen) == QUICK.decode_threads)
        wait_until(lambda: blocking.dropped == QUICK.decode_threads)
        wait_until(lambda: service.default.batcher._decoding == 0)
        assert len(blocking.seen) == QUICK.decode_threads  # the other three were not started
        assert service.default.batcher.decode_pool.large_pixel_quota.used == 0
        assert service.default.batcher.image_quota.used == 0


def test_the_number_of_pixels_decoded_at_once_is_limited(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "PIXELS_PER_EXTRA_PROCESS", 10)
    lock, running, max_running = threading.Lock(), 0, 0

    class CountingProcess:
        def decode(self, data: bytes, is_wanted: Any) -> None:
            nonlocal running, max_running
            with lock:
                running += 1
                max_running = max(max_running, running)
            time.sleep(0.01)
            with lock:
                running -= 1

    images = image_decoder_for(vit, max_pixels=25)
    decoders = decode_pool.DecodePool(images, 4, None, None)  # type: ignore[arg-type]
    assert decoders.pixel_semaphore.total == 55  # the largest image leaves room for others
    inspected = InspectedImage(b"", b"", 15, 15, large=True)
    request: Any = object()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: decoders._decode_in_process(CountingProcess(), request, inspected), range(12)))  # type: ignore[arg-type]
    assert max_running == 3
    assert decoders.pixel_semaphore.available == 55
