"""POST /v1/preprocess: the image as the network receives it."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from serving import BlockingEngine, photo, run_server
from small_models import model, small

import vitrail
from vitrail.serve.served_model import ServedModel

PREPROCESS = vitrail.PreprocessConfig(image_size=32, resize="short", resize_to=40)


@pytest.mark.parametrize("exported", [False, True], ids=["network", "exported"])
def test_the_image_is_the_crop_that_the_network_receives(exported: bool) -> None:
    torch.manual_seed(0)
    vit = model(small(), preprocess=PREPROCESS)
    with run_server(ServedModel(BlockingEngine(vit), None if exported else vit, name="small")) as (client, service):
        response = client.post("/v1/preprocess", files={"image": photo()}).json()
        assert response["grid"] == {"rows": 4, "columns": 4}
        data = base64.b64decode(response["image"].removeprefix("data:image/jpeg;base64,"))
        with Image.open(io.BytesIO(data)) as image:
            returned = np.asarray(image.resize((32, 32), Image.Resampling.BOX), dtype=float)
        pixels = service.default.image_decoder.decode_bytes(photo())
        assert np.abs(returned - pixels).mean() < 3
        assert np.abs(returned - np.asarray(Image.open(io.BytesIO(photo())).resize((32, 32)), dtype=float)).mean() > 6
        hidden = client.post("/v1/preprocess", files={"image": photo()}, data={"hide": "[0]"}).json()
        assert hidden["image"] != response["image"]
        refused = client.post("/v1/preprocess", files=[("images", photo()), ("images", photo(1))])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "single_image_only")
