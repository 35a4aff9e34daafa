"""`vitrail serve --models` over HTTP: choosing models, the admin routes, metrics, and a switch under load."""

from __future__ import annotations

import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_folders import ADMIN, make_model, put, run_app, run_models, run_models_command, states_of
from serving import JPEG, QUICK, photo, run_server, served, wait_until
from small_models import LABELS

import vitrail
from vitrail.cli import main
from vitrail.serve.app import create_app
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.served_model import ServedModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def predict(client: httpx.Client, **parameters: Any) -> httpx.Response:
    return client.post("/v1/predict", content=photo(), headers=JPEG, params={"top": 1, **parameters})


def top_label(response: httpx.Response) -> str:
    return str(response.json()["results"][0]["predictions"][0]["label"])


def test_requests_choose_a_model_and_a_version_in_every_kind_of_body(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "animals", "3", seed=3)
    put(folder, "photos", "1", seed=1)
    with run_models(folder, monkeypatch) as (client, _):
        by_default = predict(client).json()
        assert (by_default["model"], by_default["version"]) == ("animals", "3")
        chosen = {"model": "photos", "version": "1"}
        answers = [
            predict(client, **chosen),
            client.post("/v1/predict", files={"image": photo()}, data=chosen),
            client.post("/v1/predict", json={"image": "/9j/", **chosen, "version": 1}),
        ]
        for answer in answers[:2]:
            assert {"model": answer.json()["model"], "version": answer.json()["version"]} == chosen
            assert top_label(answer) == LABELS[1]
        assert answers[2].json()["error"]["code"] == "image_unreadable"  # a number is a version too
        assert client.get("/v1/model", params=chosen).json()["version"] == "1"
        assert client.get("/v1/positions", params=chosen).json()["model"] == "photos"
        explained = client.post("/v1/explain", files={"image": photo()}, data=chosen).json()
        assert (explained["model"], explained["version"]) == ("photos", "1")


@pytest.mark.parametrize(
    ("chosen", "code", "message"),
    [
        ({"model": "cars"}, "unknown_model", "there is no model 'cars'; there is photos."),
        ({"model": "photos", "version": "2"}, "unknown_version", "model 'photos' has no version '2'; there is 1."),
        ({"version": "x" * 150}, "unknown_version", "..."),
    ],
)
def test_an_unknown_model_or_version_is_404_and_creates_no_metric(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], code: str, message: str
) -> None:
    put(folder, "photos", "1")
    with run_models(folder, monkeypatch) as (client, _):
        for response in (predict(client, **chosen), client.get("/v1/model", params=chosen)):
            assert (response.status_code, response.json()["error"]["code"]) == (404, code)
            assert message in response.json()["error"]["message"]
        models = set(re.findall(r'model="([^"]*)"', client.get("/metrics").text))
        assert models == {"photos", ""}


def test_the_metrics_of_a_removed_version_disappear(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def versions_in(text: str) -> set[str]:
        return set(re.findall(r'model="photos".*version="(\d+)"', text))

    put(folder, "photos", "1")
    with run_models(folder, monkeypatch) as (client, _):
        predict(client)
        text = client.get("/metrics").text
        assert versions_in(text) == {"1"}
        for name in ("requests_total", "request_seconds_count", "batch_size_sum", "decode_seconds_count"):
            assert re.search(rf'^vitrail_{name}\{{model="photos".*version="1"\}} [1-9.]', text, re.MULTILINE)
        put(folder, "photos", "2")
        wait_until(lambda: states_of(client) == {"1": "available", "2": "ready"})
        predict(client)
        text = client.get("/metrics").text
        assert versions_in(text) == {"2"}
        assert 'vitrail_model_loads_total{model="photos",result="ready"} 2.0' in text
        shutil.rmtree(folder / "photos")
        wait_until(lambda: client.get("/v1/models").json() == {"object": "list", "data": []})
        assert '"photos"' not in client.get("/metrics").text
        assert predict(client).status_code == 503


def test_a_version_that_is_overwritten_has_the_engine_of_its_new_files() -> None:
    def described() -> list[str]:
        lines = metrics.render().decode().splitlines()
        return [line for line in lines if line.startswith(("vitrail_model_info{", "vitrail_queue_images{"))]

    metrics = Metrics()
    old, new = metrics.for_model("a", "1", "torch", "float32"), metrics.for_model("a", "1", "openvino", "int8")
    assert len(described()) == 3
    metrics.remove_model(old)
    assert described() == [
        'vitrail_queue_images{model="a",version="1"} 0.0',
        'vitrail_model_info{engine="openvino",model="a",precision="int8",version="1"} 1.0',
    ]
    metrics.remove_model(new)
    assert described() == []


def test_a_failed_version_is_listed_with_its_reason_and_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "photos", "1", seed=1)
    with run_models(folder, monkeypatch) as (client, _):
        put(folder, "photos", "2", make_model(2, LABELS[:3]))
        wait_until(lambda: states_of(client) == {"1": "ready", "2": "failed"})
        [_, failed] = client.get("/v1/models").json()["data"][0]["versions"]
        assert "it has 3 classes, the version in use 5" in failed["reason"]
        assert 'vitrail_model_failed_versions{model="photos"} 1.0' in client.get("/metrics").text
        assert client.get("/readyz").status_code == 200
        assert top_label(predict(client)) == LABELS[1]


def test_one_admin_call_returns_to_the_version_before_and_a_later_version_is_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "photos", "1", seed=1)
    put(folder, "photos", "2", seed=2)
    with run_models(folder, monkeypatch) as (client, _):
        assert predict(client).json()["version"] == "2"
        path = "/admin/models/photos/versions/1/default?wait=60"
        assert client.post(path, headers=ADMIN).status_code == 200
        assert (predict(client).json()["version"], top_label(predict(client))) == ("1", LABELS[1])
        wait_until(lambda: states_of(client) == {"1": "ready", "2": "available"})
        put(folder, "photos", "3", seed=3)
        wait_until(lambda: predict(client).json()["version"] == "3")


def test_a_version_can_be_kept_beside_the_default_and_unloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "photos", "1", seed=1)
    put(folder, "photos", "2", seed=2)
    with run_models(folder, monkeypatch) as (client, _):
        client.post("/admin/models/photos/versions/1/load?wait=60", headers=ADMIN)
        assert states_of(client) == {"1": "ready", "2": "ready"}
        assert [top_label(predict(client, version=v)) for v in ("1", "2")] == [LABELS[1], LABELS[2]]
        assert predict(client).json()["version"] == "2"
        client.post("/admin/models/photos/versions/1/unload?wait=60", headers=ADMIN)
        wait_until(lambda: states_of(client) == {"1": "available", "2": "ready"})
        assert predict(client, version="1").status_code == 404
        client.post("/admin/models/photos/versions/2/unload?wait=60", headers=ADMIN)
        assert predict(client).json()["version"] == "1"
        client.post("/admin/models/photos/versions/1/unload?wait=60", headers=ADMIN)
        wait_until(lambda: states_of(client) == {"1": "available", "2": "available"})
        assert predict(client, model="photos").status_code == 503
        client.post("/admin/models/photos/versions/1/default?wait=60", headers=ADMIN)
        assert predict(client).json()["version"] == "1"


def test_admin_routes_need_their_own_token_and_do_not_exist_without_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "photos", "1")
    other = {"authorization": "Bearer of-the-clients"}
    with run_models(folder, monkeypatch, token="of-the-clients") as (client, _):
        basic = {"authorization": "Basic b3BlcmF0b3Jz"}
        for headers, code in (({}, "missing_token"), (other, "invalid_token"), (basic, "missing_token")):
            for method, path in (("GET", "models"), ("POST", "reload"), ("POST", "models/photos/versions/1/unload")):
                refused = client.request(method, f"/admin/{path}", headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, code)
        assert client.get("/v1/models", headers=ADMIN).status_code == 401
        assert client.get("/admin/models", headers=ADMIN).json()["models"][0]["versions"][0]["path"].startswith("/")
        for path, status in (
            ("models/photos/versions/7/load", 404),
            ("models/cars/versions/1/load", 404),
            ("models/photos/versions/1/delete", 404),
            ("reload?wait=-1", 400),
            ("reload?wait=nan", 400),
        ):
            assert client.post(f"/admin/{path}", headers=ADMIN).status_code == status
    with run_server(served()) as (client, _):
        assert client.get("/admin/models", headers=ADMIN).status_code == 404


def test_a_return_to_a_broken_version_leaves_the_one_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "photos", "0")
    broken = put(folder, "photos", "1", seed=1) / "model.safetensors"
    data = broken.read_bytes()
    broken.write_bytes(b"")
    put(folder, "photos", "2", seed=2)
    with run_models(folder, monkeypatch) as (client, service):
        refused = client.post("/admin/models/photos/versions/1/default?wait=60", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_failed")
        assert states_of(client) == {"0": "available", "1": "failed", "2": "ready"}
        assert service.manager is not None
        assert not service.manager.choices_file.read().of("photos").held  # also after a restart
        with service.manager.choices_file.change() as choices:  # as a request that does not wait for the result
            choices.of("photos").held["2"] = service.manager.signatures("photos")["2"]
        wait_until(lambda: "2" in service.manager._folder.choices.models["photos"].held)  # type: ignore[union-attr]
        assert states_of(client) == {"0": "available", "1": "failed", "2": "ready"}
        assert predict(client).json()["version"] == "2"
        broken.write_bytes(data)
        wait_until(lambda: predict(client).json()["version"] == "1")


def test_a_version_is_unloaded_although_a_newer_one_has_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "photos", "1", seed=1)
    put(folder, "photos", "2", seed=2)
    (put(folder, "photos", "3") / "model.safetensors").write_bytes(b"")
    with run_models(folder, monkeypatch) as (client, _):
        client.post("/admin/models/photos/versions/2/unload?wait=60", headers=ADMIN)
        wait_until(lambda: states_of(client) == {"1": "ready", "2": "available", "3": "failed"})


def test_guesses_of_the_token_of_operators_are_counted_and_limited(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request_pool: ThreadPoolExecutor
) -> None:
    put(folder, "photos", "1")
    with run_models(folder, monkeypatch) as (client, _):

        def guess(number: int) -> int:
            return client.get("/admin/models", headers={"authorization": f"Bearer guess-{number}"}).status_code

        assert set(request_pool.map(guess, range(30))) == {401, 429}
        text = client.get("/metrics").text
        assert 'vitrail_authentication_failures_total{reason="wrong"}' in text
        assert 'vitrail_authentication_failures_total{reason="limited"}' in text
        assert client.get("/admin/models", headers=ADMIN).status_code == 200


def test_reload_takes_new_files_at_once_and_says_why_a_version_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "photos", "1")
    with run_models(folder, monkeypatch) as (client, _):
        put(folder, "photos", "2")
        models = client.post("/admin/reload?wait=60", headers=ADMIN).json()["models"]
        assert models[0]["default"] == "2"
        (put(folder, "photos", "3") / "model.safetensors").write_bytes(b"")
        failed = client.post("/admin/models/photos/versions/3/default?wait=60", headers=ADMIN)
        assert (failed.status_code, failed.json()["error"]["code"]) == (409, "version_failed")
        assert predict(client).json()["version"] == "2"


def test_an_app_may_have_several_fixed_models(vit: vitrail.Model) -> None:
    models = [served(vit), served(make_model(3))]
    models[1].name = "other"
    with run_app(create_app(models, batching=QUICK)) as (client, _):
        assert predict(client).json()["model"] == "small"
        assert top_label(predict(client, model="other")) == LABELS[3]
        listed = client.get("/v1/models").json()["data"]
        assert [(one["name"], one["default"]) for one in listed] == [("small", "1"), ("other", "1")]
        described = client.get("/openapi.json").json()["paths"]["/v1/predict"]["post"]["parameters"]
        [names] = [one["schema"] for one in described if one["name"] == "model"]
        assert names["enum"] == ["small", "other"]


def load(url: str, stop: threading.Event, answers: list[tuple[int, str, str]], expected: dict[str, str]) -> None:
    """Send requests until told to stop; records status, version and whether the class is that of the version."""
    with httpx.Client(timeout=30) as client:
        while not stop.is_set():
            response = client.post(f"{url}/v1/predict?top=1", content=photo(), headers=JPEG)
            version = response.json().get("version", "")
            right = response.status_code == 200 and top_label(response) == expected[version]
            answers.append((response.status_code, version, "right" if right else response.text))


def test_versions_are_switched_under_load_without_a_lost_or_mixed_answer(folder: Path) -> None:
    expected = {str(n): make_model(n).predict(photo())[0].label for n in (1, 2, 3)}
    assert len(set(expected.values())) == 3
    put(folder, "photos", "1", seed=1)
    with run_models_command(folder) as (process, url):
        stop, answers = threading.Event(), []  # type: ignore[var-annotated]
        threads = [threading.Thread(target=load, args=(url, stop, answers, expected)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for version in ("2", "3"):
            put(folder, "photos", version, seed=int(version))
            wait_until(lambda v=version: answers and answers[-1][1] == v, 60)
        (folder / "photos" / "3").rename(folder / "photos" / ".3")  # back to version 2
        wait_until(lambda: answers[-1][1] == "2", 60)
        stop.set()
        for thread in threads:
            thread.join()
        assert {status for status, _, _ in answers} == {200}
        assert {right for _, _, right in answers} == {"right"}
        assert {version for _, version, _ in answers} == {"1", "2", "3"}
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.slow
def test_all_workers_follow_the_folder_and_the_choices_of_operators(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATORS", "of-the-operators")
    put(folder, "photos", "1", seed=1)
    put(folder, "photos", "2", seed=2)

    def versions(url: str) -> set[str]:
        """Versions that answer, each request on a connection of its own."""
        return {
            httpx.post(f"{url}/v1/predict", content=photo(), headers=JPEG, timeout=30).json()["version"]
            for _ in range(20)
        }

    with run_models_command(folder, "--workers", "2", "--admin-token", "OPERATORS") as (_, url):
        assert versions(url) == {"2"}
        httpx.post(f"{url}/admin/models/photos/versions/1/default?wait=30", headers=ADMIN, timeout=40)
        wait_until(lambda: versions(url) == {"1"}, 30)
        put(folder, "photos", "3", seed=3)
        wait_until(lambda: versions(url) == {"3"}, 30)
        text = httpx.get(f"{url}/metrics").text
        assert set(re.findall(r'model="photos".*version="(\d+)"', text)) == {"3"}
    assert (folder / ".vitrail-serve.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "nowhere"], "there is no such folder"),
        (["vitrail/cifar10", "--models", "."], "expected one of them"),
        (["--canary", "digits"], "--canary is about the models of --models"),
        (
            ["--models", ".", "--admin-token", "NOT_SET_ANYWHERE"],
            "--admin-token NOT_SET_ANYWHERE: there is no such file",
        ),
    ],
)
def test_options_that_do_not_go_together_are_errors(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *options]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("option", ["--token", "--tokens"])
def test_clients_must_not_have_the_token_of_operators(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    monkeypatch.setenv("OPERATORS", "of-the-operators")
    (tmp_path / "tokens").write_text("app: of-the-operators\n")
    where = {"--token": "OPERATORS", "--tokens": str(tmp_path / "tokens")}[option]
    assert main(["serve", "--models", str(tmp_path), "--admin-token", "OPERATORS", option, where]) != 0
    assert "the token of --admin-token is one of the clients'" in " ".join(capsys.readouterr().err.split())


def test_the_served_model_compares_architectures() -> None:
    one, same, other = (served(vit) for vit in (make_model(1), make_model(2), make_model(1, LABELS[:3])))
    assert ServedModel.computes_like(one, same)
    assert not one.computes_like(other)
