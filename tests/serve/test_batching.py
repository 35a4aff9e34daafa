"""Batching, queue limits, deadlines and disconnects."""

from __future__ import annotations

import resource
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving import JPEG, QUICK, BusyServer, other_client, photo, run_server, served, wait_until

import vitrail
from vitrail.serve import batching
from vitrail.serve.app import Service
from vitrail.serve.image_decoder import InspectedImage
from vitrail.serve.limits import Limits, divide_cores


def test_concurrent_requests_share_a_batch_and_get_their_own_results(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        responses = [busy.send(i) for i in range(1, 7)]
        busy.wait_until_queued(6)
        busy.engine.go.set()
        for number, response in enumerate([busy.first, *responses]):
            predictions = response.result().json()["results"][0]["predictions"]
            expected = vit.predict(photo(number))
            assert [p["index"] for p in predictions] == [p.index for p in expected]
            assert [p["score"] for p in predictions] == pytest.approx([p.score for p in expected], abs=1e-6)
        assert busy.engine.batches == [1, 4, 2]  # batches of at most four


def test_a_single_request_is_not_delayed(vit: vitrail.Model) -> None:
    with run_server(served(vit), batching=replace(QUICK, batch_delay=1.0)) as (client, _):
        start = time.monotonic()
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200
        assert time.monotonic() - start < 0.8


def test_a_batch_waits_for_images_being_decoded(vit: vitrail.Model) -> None:
    with run_server(served(vit), batching=replace(QUICK, batch_delay=1.0)) as (client, service):
        decode, batches = service.default.image_decoder.decode, service.default.served.engine.batches  # type: ignore[attr-defined]

        def decode_second(inspected: InspectedImage) -> Any:
            if inspected.data == photo(0):  # decoded after the other image
                wait_until(lambda: service.default.batcher._image_queue or batches)
                time.sleep(0.1)
            return decode(inspected)

        service.default.image_decoder.decode = decode_second  # type: ignore[method-assign]
        client.post("/v1/predict", files=[("images", photo(0)), ("images", photo(1))])
        assert batches == [2]


def test_a_full_queue_gives_503_with_retry_after(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit), batching=replace(QUICK, max_queue=3)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        others = [busy.send(1), busy.send(2)]
        busy.wait_until_queued(2)
        for path in ("predict", "embed", "explain"):
            refused = busy.send(3, path).result()
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        busy.engine.go.set()
        assert [a.result().status_code for a in (busy.first, *others)] == [200, 200, 200]
        assert busy.send(3).result().status_code == 200


def test_a_request_that_exceeds_the_queue_is_rejected_as_a_whole(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit), batching=replace(QUICK, max_queue=3)) as (client, service):
        BusyServer(client, service, request_pool)
        refused = client.post("/v1/predict", files=[("images", photo(i)) for i in range(3)])
        assert refused.status_code == 503
        assert client.post("/v1/predict", content=b"bad", headers=JPEG).status_code == 400
        assert service.default.batcher.image_quota.used == 1


def test_the_bytes_of_queued_bodies_are_limited(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit), batching=replace(QUICK, max_queue_bytes=4 * len(photo()) // 3 + 10)) as (
        client,
        service,
    ):
        busy = BusyServer(client, service, request_pool)
        assert busy.send().result().status_code == 503
        busy.engine.go.set()
        assert busy.first.result().status_code == 200
        wait_until(lambda: service.body_bytes.used == 0)
        assert busy.send().result().status_code == 200


def test_the_number_of_bodies_being_read_is_limited(vit: vitrail.Model) -> None:
    with run_server(served(vit), batching=replace(QUICK, max_uploads=1)) as (client, service):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as slow:
            slow.sendall(
                b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\n"
            )
            wait_until(lambda: service.uploads.used == 1)
            assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 503
        wait_until(lambda: service.uploads.used == 0)
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200


def test_rejected_bodies_do_not_count_as_being_read(vit: vitrail.Model) -> None:
    head = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\n"
    with run_server(served(vit), batching=replace(QUICK, max_uploads=1)) as (client, service), ExitStack() as stack:
        address = (client.base_url.host, client.base_url.port)
        slow, *others = [stack.enter_context(socket.create_connection(address)) for _ in range(4)]
        slow.sendall(head)
        wait_until(lambda: service.uploads.used == 1)
        for sock in others:  # the rest of their bodies is received for a second
            sock.sendall(head)
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 503
        assert service.uploads.used == 1
        slow.close()
        wait_until(lambda: service.uploads.used == 0, seconds=0.7)
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200


@pytest.mark.parametrize("kind", ["image/jpeg", "application/json", "multipart/form-data; boundary=x"])
def test_the_bytes_of_incomplete_bodies_are_limited(vit: vitrail.Model, kind: str) -> None:
    starts = {"i": b"", "a": b'{"image": "', "m": b"--x\r\nContent-Disposition: form-data; name=image\r\n\r\n"}
    start = starts[kind[0]]
    head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 90000\r\n\r\n".encode()
    with (
        run_server(served(vit), batching=replace(QUICK, max_queue_bytes=105_000)) as (client, service),
        ExitStack() as stack,
    ):
        address = (client.base_url.host, client.base_url.port)
        for number in range(1, 4):
            sock = stack.enter_context(socket.create_connection(address))
            sock.sendall(head + start + bytes(30_000))
            wait_until(lambda n=number: service.body_bytes.used == n * (30_000 + len(start)))
        for size, status, code in ((5000, 429, "too_many_requests"), (20_000, 503, "queue_full")):
            refused = client.post("/v1/predict", content=bytes(size), headers=JPEG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            assert refused.headers["retry-after"] == "1"
        with other_client(client) as other:
            assert (
                other.post("/v1/predict", content=bytes(5000), headers=JPEG).status_code == 400
            )  # the body is accepted; it is not an image
        assert service.body_bytes.used == 3 * (30_000 + len(start))
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200  # fits again
        sock.close()
        wait_until(lambda: service.body_bytes.used == 2 * (30_000 + len(start)))
        assert client.post("/v1/predict", content=bytes(20_000), headers=JPEG).status_code == 400  # not an image
    assert service.body_bytes.used == 0


def test_an_image_past_its_deadline_does_not_reach_the_engine(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        start = time.monotonic()
        expired = busy.send(1, **{"x-deadline-ms": "150"}).result()
        assert expired.status_code == 504
        assert expired.json()["error"]["code"] == "deadline_exceeded"
        assert 0.1 < time.monotonic() - start < 5
        assert service.default.batcher.image_quota.used == 1
        busy.engine.go.set()
        assert busy.first.result().status_code == 200
        assert busy.send(2, **{"x-deadline-ms": "20000"}).result().status_code == 200
        assert busy.engine.batches == [1, 1]


def test_an_image_that_cannot_be_answered_in_time_makes_room_for_others(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        service.default.batcher.batch_seconds = 60.0
        late = busy.send(1, **{"x-deadline-ms": "5000"})
        busy.wait_until_queued(1)
        other = busy.send(2)
        busy.wait_until_queued(2)
        busy.engine.go.set()
        assert [busy.first.result().status_code, other.result().status_code] == [200, 200]
        assert late.result().status_code == 504
        assert busy.engine.batches == [1, 1]
        alone = busy.send(3, **{"x-deadline-ms": "20000"}).result()
        assert alone.status_code == 200  # nobody else waits


def test_the_work_of_a_client_that_disconnects_is_dropped(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        data = photo(1)
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            head = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
            raw.sendall(head % len(data) + data)
            busy.wait_until_queued(1)
        wait_until(lambda: service.default.batcher.image_quota.used == 1)
        busy.engine.go.set()
        assert busy.first.result().status_code == 200
        assert busy.send(2).result().status_code == 200
        assert busy.engine.batches == [1, 1]
        assert "vitrail_client_disconnects_total 1.0" in client.get("/metrics").text


def test_an_image_of_a_disconnected_client_is_not_decoded(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit), batching=replace(QUICK, decode_threads=1)) as (client, service):
        decoders = Decoders(service)
        sizes, go = decoders.seen, decoders.go
        first = request_pool.submit(client.post, "/v1/predict", content=photo(0), headers=JPEG)
        wait_until(lambda: len(sizes) == 1)
        expired = client.post("/v1/predict", content=photo(9), headers=JPEG | {"x-deadline-ms": "50"})
        assert expired.status_code == 504
        go.set()
        assert first.result().status_code == 200
        assert client.post("/v1/predict", content=photo(1), headers=JPEG).status_code == 200
        assert sizes == [len(photo(0)), len(photo(1))]


class Decoders:
    """Blocks decoding, and records the images to decode."""

    def __init__(self, service: Service) -> None:
        self.seen, self.go, self.original = [], threading.Event(), service.default.image_decoder.decode
        service.default.image_decoder.decode = self.decode  # type: ignore[method-assign]

    def decode(self, inspected: InspectedImage) -> Any:
        self.seen.append(len(inspected.data))
        assert self.go.wait(20)
        return self.original(inspected)


def memory() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc/self/statm")
@pytest.mark.parametrize("path", ["predict", "explain"])
def test_memory_of_disconnected_clients_is_freed_while_decoders_are_busy(
    vit: vitrail.Model, request_pool: Any, path: str
) -> None:
    with run_server(served(vit), batching=replace(QUICK, decode_threads=1)) as (client, service):
        decoders = Decoders(service)
        first = request_pool.submit(client.post, "/v1/predict", content=photo(), headers=JPEG)
        wait_until(lambda: len(decoders.seen) == 1)
        data = photo(1) + np.random.default_rng(0).bytes(4_000_000)
        head = b"POST /v1/%s HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
        before = memory()
        for number in range(40):
            with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
                raw.sendall(head % (path.encode(), len(data)) + data)
                wait_until(lambda: service.default.batcher.image_quota.used == 2)
            wait_until(lambda n=number: service.metrics.disconnects._value.get() == n + 1)
            assert (service.default.batcher.image_quota.used, service.default.batcher.explain_quota.used) == (1, 0)
        assert memory() - before < 60_000_000  # the clients sent 160 MB
        decoders.go.set()
        assert first.result().status_code == 200
        assert client.post("/v1/predict", content=photo(2), headers=JPEG).status_code == 200
        assert decoders.seen == [len(photo()), len(photo(2))]


def test_pixels_of_a_disconnected_client_are_dropped(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        expired = busy.send(1, **{"x-deadline-ms": "500"})
        busy.wait_until_queued(1)
        (((_, _, (ticket, number)),),) = service.default.batcher._image_queue._clients.values()
        assert ticket.payloads[number].shape == service.default.served.input_shape
        assert expired.result().status_code == 504
        wait_until(lambda: ticket.payloads == [None])
        assert ticket.future is None
        busy.engine.go.set()
        assert busy.first.result().status_code == 200


def test_the_number_of_explanations_is_limited_including_queued_ones(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit), batching=replace(QUICK, max_explanations=2, decode_threads=1)) as (client, service):
        decoders = Decoders(service)
        service.default.batcher.explain_seconds = 6.0
        explanations = [
            request_pool.submit(client.post, "/v1/explain", content=photo(), headers=JPEG) for _ in range(2)
        ]
        wait_until(lambda: service.default.batcher.explain_quota.used == 2)
        assert len(service.default.batcher._explain_queue) == 0  # none is decoded yet
        refused = client.post("/v1/explain", content=photo(), headers=JPEG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "12"  # two of six seconds each, in sequence
        assert "2 explanations" in refused.json()["error"]["message"]
        prediction = request_pool.submit(client.post, "/v1/predict", content=photo(), headers=JPEG)
        wait_until(lambda: service.default.batcher.image_quota.used == 3)  # these fit into the queue
        decoders.go.set()
        assert {response.result().status_code for response in (*explanations, prediction)} == {200}
        assert service.default.batcher.explain_quota.used == 0
        assert service.default.batcher.explain_seconds < 6  # these were faster
        assert client.post("/v1/explain", content=photo(), headers=JPEG).status_code == 200


def test_more_images_than_fit_into_the_queue_are_rejected_with_413(vit: vitrail.Model) -> None:
    with run_server(served(vit), batching=replace(QUICK, max_queue=2)) as (client, _):
        response = client.post("/v1/predict", files=[("images", photo(i)) for i in range(3)])
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_many_images")
        assert "at most 2" in response.json()["error"]["message"]
        assert client.get("/v1/model").json()["limits"]["max_images"] == 2
        assert client.post("/v1/predict", files=[("images", photo(i)) for i in range(2)]).status_code == 200
    with run_server(served(vit), batching=replace(QUICK, max_queue_bytes=114)) as (client, _):
        response = client.post("/v1/predict", content=photo(), headers=JPEG)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert client.get("/v1/model").json()["limits"]["max_bytes"] == 100


def test_explanations_and_predictions_take_turns(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit), batching=replace(QUICK, batch_size=1)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        order: list[str] = []
        step, run = service.default.batcher._run_explain_step, service.default.batcher._run_batch
        service.default.batcher._run_explain_step = lambda *a: (order.append("look"), step(*a))[1]  # type: ignore[method-assign]
        service.default.batcher._run_batch = lambda group: (order.append("batch"), run(group))[1]  # type: ignore[method-assign]
        explanation = busy.send(1, "explain")
        others = [busy.send(i) for i in range(4)]
        busy.wait_until_queued(4)
        wait_until(lambda: len(service.default.batcher._explain_queue) == 1)
        busy.engine.go.set()
        assert explanation.result().status_code == 200
        assert all(a.result().status_code == 200 for a in others)
        assert order[:8] == ["look", "batch"] * 4
        assert order.count("look") > 4


def test_features_and_logits_are_computed_in_separate_batches(vit: vitrail.Model, request_pool: Any) -> None:
    with run_server(served(vit)) as (client, service):
        busy = BusyServer(client, service, request_pool)
        responses = [busy.send(1), busy.send(2, "embed"), busy.send(3)]
        busy.wait_until_queued(3)
        busy.engine.go.set()
        keys = [set(a.result().json()["results"][0]) for a in responses]
        assert keys == [{"predictions"}, {"embedding"}, {"predictions"}]


def test_an_engine_error_is_a_500_without_details_and_the_server_continues(vit: vitrail.Model) -> None:
    with run_server(served(vit)) as (client, service):
        engine: Any = service.default.served.engine
        logits = engine.logits

        def fail(pixels: Any) -> Any:
            raise RuntimeError("out of memory at /usr/lib/secret.so")

        engine.logits = fail
        response = client.post("/v1/predict", content=photo(), headers=JPEG)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        assert "content-security-policy" in response.headers
        engine.logits = logits
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200


def test_several_engine_threads_give_the_same_results(vit: vitrail.Model, request_pool: Any) -> None:
    config = divide_cores(2, parallel_batches=True, batch_size=2)
    assert (config.engine_threads, config.intra_op_threads, config.decode_threads) == (2, 1, 2)
    assert (
        divide_cores(2, parallel_batches=False).engine_threads,
        divide_cores(2, parallel_batches=False).intra_op_threads,
    ) == (1, 2)
    with run_server(served(vit), batching=config) as (client, _):
        responses = [request_pool.submit(client.post, "/v1/predict", content=photo(i), headers=JPEG) for i in range(24)]
        for number, response in enumerate(responses):
            [best, *_] = response.result().json()["results"][0]["predictions"]
            expected = vit.predict(photo(number))[0]
            assert (best["index"], best["score"]) == (expected.index, pytest.approx(expected.score, abs=1e-6))


@pytest.mark.parametrize("failing_part", ["submit", "metrics", "decode"])
def test_an_error_before_the_queue_is_a_500_and_the_server_still_stops(
    vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch, failing_part: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no more")

    with run_server(served(vit)) as (client, service):
        with monkeypatch.context() as patched:
            parts = {
                "submit": (service.default.batcher.decode_pool, "submit"),
                "metrics": (service.default.metrics.decode_seconds, "observe"),
            }
            patched.setattr(*parts.get(failing_part, (service.default.image_decoder, "decode")), fail)
            assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 500
        assert service.default.batcher._decoding == 0
        assert service.default.batcher.image_quota.used == 0
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200


def test_throughput_counts_batches_that_run_in_parallel(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    served_model, clock = served(vit), [0.0]
    batcher = Service(Limits(), QUICK).create_version(served_model, replace(QUICK, engine_threads=4)).batcher
    batcher._call_on_loop = lambda *_: None  # type: ignore[method-assign]
    monkeypatch.setattr(batching, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))
    group = [(batching.PendingRequest(None, [b""]), 0, np.zeros(served_model.input_shape, np.uint8))] * 2  # type: ignore[arg-type]

    def outputs(pixels: np.ndarray, want: str) -> np.ndarray:
        clock[0] += 0.1
        return np.zeros((len(pixels), 5), np.float32)

    served_model.outputs = outputs  # type: ignore[method-assign]
    for others, speed in ((0, 20), (2, 60)):  # two images in 0.1 s, with 0 or 2 other batches in parallel
        batcher._running_batches = others
        for _ in range(100):
            batcher._run_batch(group)
        assert batcher.images_per_second == pytest.approx(speed, rel=0.01)
        assert batcher._running_batches == others


def test_readyz_is_503_before_the_warm_up_and_while_draining(vit: vitrail.Model) -> None:
    with run_server(served(vit)) as (client, service):
        assert client.get("/readyz").json() == {"status": "ready"}
        service.default.batcher.ready = False
        assert client.get("/readyz").status_code == 503
        service.default.batcher.ready = True
        service.draining = True
        refused = client.get("/readyz")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert client.get("/healthz").json() == {"status": "alive"}
