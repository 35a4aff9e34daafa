"""One loaded version of a model: its engine, queues, threads and description."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vitrail.errors import ModelError
from vitrail.explain.masking import Fill
from vitrail.serve.batching import Batcher, OutputName
from vitrail.serve.decode_pool import LargeImageLimits
from vitrail.serve.explain_requests import Explainer, encode_positions
from vitrail.serve.http_errors import RequestError, public_message
from vitrail.serve.image_decoder import ImageDecoder, Pixels
from vitrail.serve.limits import BatchingConfig, Limits
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.responses import describe_model
from vitrail.serve.served_model import Floats, ServedModel


class ModelVersion:
    """A served model under a name and a version. Created in any thread; used on the event loop."""

    def __init__(
        self,
        served: ServedModel,
        limits: Limits,
        batching: BatchingConfig,
        metrics: Metrics,
        *,
        name: str | None = None,
        version: str = "1",
        large_images: LargeImageLimits | None = None,
    ) -> None:
        """name: default: the name of the served model; large_images: limits shared with other versions."""
        self.served, self.name, self.version = served, name or served.name, version
        self.image_decoder = ImageDecoder(served.preprocess, limits, served.grid)
        self.explainer = Explainer(served, self.image_decoder)
        self.description = describe_model(served, limits, self.name, version)
        self.metrics = metrics.for_model(self.name, version, served.engine.name, served.engine.precision)
        self.batcher = Batcher(served, self.image_decoder, batching, self.metrics, large_images)
        self._positions: dict[str, Any] | None = None
        self._leases = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def ready(self) -> bool:
        """Whether the engine has been warmed up."""
        return self.batcher.ready

    def start(self) -> None:
        """Start the threads."""
        self.batcher.start()

    async def stop(self) -> None:
        """Wait for the requests that use this version, stop its threads and drop the model."""
        await self._unused.wait()
        await self.batcher.stop()
        self.drop_model()

    def drop_model(self) -> None:
        """Drop the model, so that its memory is free even if something still refers to this version."""
        self.batcher.release()
        del self.served, self.explainer, self.image_decoder

    def acquire(self) -> None:
        """Count a request that uses this version."""
        self._leases += 1
        self._unused.clear()

    def release(self) -> None:
        """Count the end of a request that used this version."""
        self._leases -= 1
        if not self._leases:
            self._unused.set()

    async def infer(
        self,
        images: Sequence[bytes | str],
        client: str,
        output: OutputName,
        *,
        hide: Sequence[int] = (),
        fill: Fill = "mean",
        deadline: float | None = None,
        disconnected: asyncio.Future[Any] | None = None,
    ) -> list[Floats]:
        """Logits or features of each image, with the given patches hidden."""
        if output == "logits" and not self.served.classifies:
            raise RequestError(400, "no_classes", "this model has no classes, only features; try /v1/embed.")
        if output == "features" and not self.served.has_features:
            message = "an exported file has no features; serve the checkpoint it was made from."
            raise RequestError(501, "no_features", message)
        hider = self.patch_hider(hide, fill)
        return await self.batcher.infer(images, client, output, hider, deadline, disconnected)

    def patch_hider(self, hide: Sequence[int], fill: Fill) -> Callable[[Pixels], Pixels] | None:
        """Function that hides the patches in an image; None if there are none to hide."""
        self.image_decoder.check_patches(hide)
        return partial(self.image_decoder.hide_patches, hide=hide, fill=fill) if hide else None

    async def positions(self) -> dict[str, Any]:
        """Response of /v1/positions."""
        if self._positions is None:
            try:
                self._positions = await asyncio.to_thread(encode_positions, self.served)
            except ModelError as error:
                raise RequestError(
                    404, "no_positions", public_message(error, "this model has no position embeddings.")
                ) from None
        return self._positions
