"""/openapi.json describes the server; schemathesis sends valid and invalid requests generated from it."""

from __future__ import annotations

import base64
import io
import os
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from serving import QUICK, photo, run_server, served
from small_models import LABELS

from vitrail.serve.app import create_app
from vitrail.serve.image_decoder import FORMATS
from vitrail.serve.schema import IMAGE_TYPES

pytest.importorskip("schemathesis", reason="schemathesis is not installed; make test installs it")
import schemathesis
from schemathesis import GenerationMode

IMAGES = st.sampled_from([photo(0), photo(1), photo(2, "PNG"), photo(3, "WEBP")])
schemathesis.openapi.format("binary", IMAGES)
schemathesis.openapi.format("byte", IMAGES.map(lambda data: base64.b64encode(data).decode()))
schemathesis.openapi.format(
    "data-uri", IMAGES.map(lambda data: f"data:image/png;base64,{base64.b64encode(data).decode()}")
)
REFUSED = ["400", "403", "404", "405", "408", "413", "415", "431"]
EXAMPLES = int(os.environ.get("VITRAIL_EXAMPLES", "25"))
RAW_TYPES = (*IMAGE_TYPES, "application/octet-stream")
for kind in RAW_TYPES:
    schemathesis.openapi.media_type(kind, IMAGES)

MODEL = "/v2/models/{name}"
PROTOCOLS = {(path, "get") for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/ping")}
PROTOCOLS |= {(path, "get") for model in (MODEL, f"{MODEL}/versions/{{version}}") for path in (model, f"{model}/ready")}
PROTOCOLS |= {(f"{model}/infer", "post") for model in (MODEL, f"{MODEL}/versions/{{version}}")}
PROTOCOLS |= {(path, "post") for path in ("/v2/repository/index", "/v1/embeddings", "/invocations")}
"""Routes of the protocols of other servers."""
PROBES = ("/v2/health/live", "/v2/health/ready", "/ping")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return create_app(served(), batching=QUICK).openapi()


def test_the_schema_describes_every_route(schema: dict[str, Any]) -> None:
    routes = {(path, method) for path, methods in schema["paths"].items() for method in methods}
    posts = {(f"/v1/{name}", "post") for name in ("predict", "embed", "explain", "preprocess")}
    gets = {(f"/v1/{name}", "get") for name in ("models", "model", "positions", "samples")}
    assert routes == posts | gets | {("/healthz", "get"), ("/readyz", "get"), ("/metrics", "get")} | PROTOCOLS


def test_the_schema_describes_bodies_and_parameters_with_examples(schema: dict[str, Any]) -> None:
    predict = schema["paths"]["/v1/predict"]["post"]
    content = predict["requestBody"]["content"]
    assert set(content) == {*IMAGE_TYPES, "application/octet-stream", "multipart/form-data", "application/json"}
    assert {kind.rpartition("/")[2].replace("x-portable-pixmap", "ppm").upper() for kind in IMAGE_TYPES} == set(FORMATS)
    fields = [kind["required"] for kind in content["multipart/form-data"]["schema"]["anyOf"]]
    assert fields == [["images"], ["image"], ["file"]]
    assert {p["name"] for p in predict["parameters"]} == {"X-Deadline-Ms", "model", "version", "top", "hide", "fill"}
    embed = {p["name"]: p for p in schema["paths"]["/v1/embed"]["post"]["parameters"]}
    assert set(embed) == {"X-Deadline-Ms", "model", "version", "hide", "fill"}
    assert embed["hide"]["schema"]["examples"] == [[0, 1, 2]]
    assert embed["hide"]["schema"]["maxItems"] == 20_000
    assert embed["hide"]["schema"]["items"] == {"type": "integer", "minimum": 0, "maximum": 15}
    image = Image.open(io.BytesIO(base64.b64decode(content["application/json"]["example"]["image"])))
    assert image.size == (1, 1)
    refusals = {"400", "403", "408", "413", "415", "503", "504"}
    assert refusals <= set(predict["responses"])
    prediction = schema["components"]["schemas"]["Prediction"]["properties"]
    assert all(field["examples"] for field in prediction.values())


def test_the_schema_lists_host_and_token_errors() -> None:
    paths = create_app(served(), batching=QUICK, token="t", hosts=()).openapi()["paths"]
    for path, methods in paths.items():
        statuses = set(next(iter(methods.values()))["responses"])
        protected = path.startswith(("/v1", "/metrics", "/v2", "/invocations")) and path not in PROBES
        assert ("401" in statuses) == protected
        assert "421" in statuses


def test_examples_are_those_of_the_served_model(schema: dict[str, Any]) -> None:
    schemas = schema["components"]["schemas"]
    assert schemas["PredictResponse"]["properties"]["model"]["examples"] == ["small"]
    assert schemas["Prediction"]["properties"]["label"]["examples"] == [LABELS[0]]
    assert schemas["PredictResponse"]["properties"]["version"]["examples"] == ["1"]
    assert schemas["ModelResponse"]["examples"][0]["name"] == "small"
    assert schemas["HealthResponse"]["properties"]["status"]["const"] == "alive"
    assert schemas["ReadyResponse"]["properties"]["status"]["const"] == "ready"


@pytest.fixture(scope="module")
def api() -> Any:
    with run_server(served()) as (client, _):
        config = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}})
        yield schemathesis.openapi.from_url(f"{client.base_url}/openapi.json", config=config)


ROUTES = [(f"/v1/{name}", "POST") for name in ("predict", "embed", "explain", "preprocess")]
ROUTES += [(f"/v1/{name}", "GET") for name in ("models", "model", "positions", "samples")]
ROUTES += [(path, "GET") for path in ("/healthz", "/readyz", "/metrics")]
# An inference is left out, because a schema cannot say that the data fits the shape; see test_tensor_codec.py.
ROUTES += [(path, method.upper()) for path, method in sorted(PROTOCOLS) if not path.endswith("/infer")]


def nested(values: Any) -> bool:
    """In a form or query string, a list with a single list means that list, because it may be written as JSON."""
    lists = [value for value in values.values() if isinstance(value, list)] if isinstance(values, dict) else []
    return any(isinstance(item, list) for value in lists for item in value)


POSITIVE = [(path, method, GenerationMode.POSITIVE) for path, method in ROUTES]
NEGATIVE = [
    (path, "POST", GenerationMode.NEGATIVE) for path, method in ROUTES if method == "POST" and "repository" not in path
]


@pytest.mark.parametrize(("path", "method", "mode"), [*POSITIVE, *NEGATIVE])
def test_the_server_conforms_to_its_schema(api: Any, path: str, method: str, mode: GenerationMode) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        assume(
            not case.query or case.media_type in RAW_TYPES
        )  # otherwise parameters in the body could hide an invalid one
        assume(not nested(case.query))
        assume(case.media_type != "multipart/form-data" or not nested(case.body))
        if re.fullmatch(r"[1-9]\d{0,8}", str(case.headers.get("X-Deadline-Ms", ""))):
            case.headers["X-Deadline-Ms"] = "20000"  # a short deadline could pass
        case.call_and_validate()

    check()
