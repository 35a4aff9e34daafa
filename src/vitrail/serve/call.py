"""A POST request that has been received and is not yet answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.explain.masking import Fill
from vitrail.serve.batching import OutputName
from vitrail.serve.http_errors import RequestError
from vitrail.serve.model_version import ModelVersion
from vitrail.serve.request_parsing import RequestBody
from vitrail.serve.served_model import Floats


@dataclass(frozen=True)
class Call:
    """A request, the model version that answers it, and until when."""

    body: RequestBody
    version: ModelVersion
    """The model version that answers; kept alive until the answer."""
    deadline: float | None
    disconnected: asyncio.Future[None]

    def single_image(self) -> bytes | str:
        """The image of a route that takes only one."""
        if len(self.body.images) > 1:
            raise RequestError(400, "single_image_only", f"got {len(self.body.images)} images, expected 1.")
        return self.body.images[0]

    async def infer(self, output: OutputName, hide: Sequence[int] = (), fill: Fill = "mean") -> list[Floats]:
        """Engine outputs of each image, with the given patches hidden."""
        return await self.version.infer(
            self.body.images,
            self.body.client,
            output,
            hide=hide,
            fill=fill,
            deadline=self.deadline,
            disconnected=self.disconnected,
        )
