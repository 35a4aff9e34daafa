"""/openapi.json says what the server does: schemathesis asks everything it allows and much that it forbids."""

from __future__ import annotations

import base64
import io
import os
import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis import GenerationMode
from serving import QUICK, photo, running, served

from vitrail.serve.app import create_app

PICTURES = st.sampled_from([photo(0), photo(1), photo(2, "PNG"), photo(3, "WEBP")])
schemathesis.openapi.format("binary", PICTURES)
schemathesis.openapi.format("byte", PICTURES.map(lambda data: base64.b64encode(data).decode()))
REFUSED = ["400", "405", "408", "413", "415"]
EXAMPLES = int(os.environ.get("VITRAIL_EXAMPLES", "25"))
RAW = ("image/jpeg", "image/png", "application/octet-stream")
for kind in RAW:
    schemathesis.openapi.media_type(kind, PICTURES)


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    return create_app(served(), work=QUICK).openapi()


def test_every_route_of_the_contract_is_described(description: dict[str, Any]) -> None:
    routes = {(path, method) for path, methods in description["paths"].items() for method in methods}
    posts = {(f"/v1/{name}", "post") for name in ("predict", "embed", "explain")}
    gets = {(f"/v1/{name}", "get") for name in ("model", "positions", "samples")}
    assert routes == posts | gets | {("/healthz", "get"), ("/readyz", "get"), ("/metrics", "get")}


def test_every_body_and_value_is_described_with_an_example(description: dict[str, Any]) -> None:
    predict = description["paths"]["/v1/predict"]["post"]
    content = predict["requestBody"]["content"]
    assert {"image/jpeg", "application/octet-stream", "multipart/form-data", "application/json"} <= set(content)
    assert {p["name"] for p in predict["parameters"]} == {"X-Deadline-Ms", "top", "hide", "fill"}
    picture = Image.open(io.BytesIO(base64.b64decode(content["application/json"]["example"]["image"])))
    assert picture.size == (1, 1)
    refusals = {"400", "408", "413", "415", "503", "504"}
    assert refusals <= set(predict["responses"])
    schema = description["components"]["schemas"]["Prediction"]["properties"]
    assert all(field["examples"] for field in schema.values())


@pytest.fixture(scope="module")
def api() -> Any:
    with running(served()) as (client, _):
        config = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}})
        yield schemathesis.openapi.from_url(f"{client.base_url}/openapi.json", config=config)


ROUTES = [(f"/v1/{name}", "POST") for name in ("predict", "embed", "explain")]
ROUTES += [(path, "GET") for path in ("/v1/model", "/v1/positions", "/v1/samples", "/healthz", "/readyz", "/metrics")]


def nested(values: Any) -> bool:
    """A list that holds one list is that list, in a form or an address: a list may be one piece of JSON there."""
    lists = [value for value in values.values() if isinstance(value, list)] if isinstance(values, dict) else []
    return any(isinstance(item, list) for value in lists for item in value)


POSITIVE = [(path, method, GenerationMode.POSITIVE) for path, method in ROUTES]
NEGATIVE = [(path, "POST", GenerationMode.NEGATIVE) for path, method in ROUTES if method == "POST"]


@pytest.mark.parametrize(("path", "method", "mode"), [*POSITIVE, *NEGATIVE])
def test_the_server_does_what_it_says(api: Any, path: str, method: str, mode: GenerationMode) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        assume(not case.query or case.media_type in RAW)  # else the body's values count, and may hide a wrong one
        assume(not nested(case.query))
        assume(case.media_type != "multipart/form-data" or not nested(case.body))
        if re.fullmatch(r"[1-9]\d{0,8}", str(case.headers.get("X-Deadline-Ms", ""))):
            case.headers["X-Deadline-Ms"] = "20000"  # else it may well pass
        case.call_and_validate()

    ask()
