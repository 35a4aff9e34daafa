"""After many random requests with disconnects, deadlines and errors, all queues and quotas are empty."""

from __future__ import annotations

import io
import random
import socket
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from serving import QUICK, BlockingEngine, photo, png_with_size, run_server, served, wait_until
from small_models import model, small

from vitrail.serve import app, image_decoder
from vitrail.serve.limits import Limits

KINDS = ("image/jpeg", "application/json", "text/plain", "multipart/form-data; boundary=edge")
PATHS = (
    "predict",
    "predict",
    "embed",
    "explain",
    "explain?methods=[%22occlusion%22]",
    "preprocess",
    "predict?hide=[999]",
)


@lru_cache(maxsize=1)
def bodies() -> list[bytes]:
    large, tiff = io.BytesIO(), io.BytesIO()
    Image.linear_gradient("L").resize((900, 900)).save(large, "PNG")
    Image.new("I;16", (300, 300)).save(tiff, "TIFF")
    part = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n%s\r\n'
    form = b"".join(part % image for image in (photo(), large.getvalue(), photo(1))) + b"--edge--\r\n"
    return [
        *(photo(), photo(2), large.getvalue(), tiff.getvalue(), form, form[:-9], 3 * form),
        *(photo()[:100], png_with_size(9000, 9000), bytes(300_000), b"", b'{"images": ["!"]}', b'{"image": 3}'),
    ]


def send(port: int, number: int) -> str:
    """Send a random request from one of two addresses; returns its status, or "gone"."""
    rng = random.Random(number)
    data, kind, path = rng.choice(bodies()), rng.choice(KINDS), rng.choice(PATHS)
    if data.startswith(b"--edge"):
        kind = KINDS[-1]
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n"
    head += rng.choice(["", "", f"x-deadline-ms: {rng.randint(1, 60)}\r\n", "accept: application/x-ndjson\r\n"])
    with socket.socket() as sock:
        sock.bind((f"127.0.0.{rng.choice([1, 1, 1, 2])}", 0))
        sock.settimeout(30)
        sock.connect(("127.0.0.1", port))
        if rng.random() < 0.3:  # disconnects while sending or waiting
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", rng.random() < 0.5, 0))
            sock.sendall((head + "\r\n").encode() + data[: rng.choice([len(data), len(data) // 2])])
            sock.settimeout(rng.random() / 10 + 0.001)
            with suppress(TimeoutError):
                sock.recv(1)
            return "gone"
        with suppress(OSError):  # rejected before everything was sent
            sock.sendall((head + "\r\n").encode() + data)
        with suppress(ConnectionResetError):
            return sock.recv(12)[9:].decode()
    return "gone"


class FailingEngine(BlockingEngine):
    """An engine that fails occasionally."""

    def logits(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        if len(self.batches) % 9 == 8:
            self.batches.append(0)
            raise RuntimeError("the engine is broken")
        return super().logits(pixels)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_many_random_requests_all_quotas_and_queues_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_REFUSAL_DELAY_S", 0.01)
    monkeypatch.setattr(image_decoder, "SMALL_PIXELS", 500_000)  # so that some are decoded in processes
    torch.manual_seed(0)
    served_model = served(model(small()))
    served_model.engine = FailingEngine(served_model.model)  # type: ignore[arg-type]
    batching = replace(
        QUICK, max_queue=24, max_explanations=8, max_uploads=24, max_queue_bytes=4_000_000, engine_threads=2
    )
    with run_server(served_model, Limits(max_pixels=1_000_000, max_bytes=200_000), batching) as (client, service):
        port = client.base_url.port
        assert port is not None
        with ThreadPoolExecutor(24) as pool:
            statuses = Counter(pool.map(lambda number: send(port, number), range(300)))
        assert {"200", "400", "413", "415", "gone"} <= set(statuses), statuses  # others depend on timing
        batcher, decoders = service.default.batcher, service.default.batcher.decode_pool
        wait_until(lambda: batcher._decoding == 0)
        wait_until(lambda: service.body_bytes.used == service.uploads.used == batcher.image_quota.used == 0)
        for quota in (
            service.body_bytes,
            service.uploads,
            batcher.image_quota,
            batcher.explain_quota,
            decoders.large_pixel_quota,
        ):
            wait_until(lambda quota=quota: (quota.used, quota._clients) == (0, {}))  # type: ignore[misc]
        wait_until(lambda: not (batcher._image_queue or batcher._explain_queue or batcher._batches_per_client))
        wait_until(lambda: (batcher._running_batches, batcher._running_steps, decoders.small_pending) == (0, 0, 0))
        for jobs in (decoders._small_jobs, decoders._large_jobs):
            wait_until(lambda jobs=jobs: not (jobs._queue or jobs._busy))  # type: ignore[misc]
        assert decoders.pixel_semaphore.available == decoders.pixel_semaphore.total
        assert 'vitrail_queue_images{model="small",version="1"} 0.0' in client.get("/metrics").text
        wait_until(lambda: client.post("/v1/predict", files={"image": photo()}).status_code == 200)
