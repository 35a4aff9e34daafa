"""Firefox and WebKit, controlled over Marionette and WebDriver; no further package is needed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from serving import wait_until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # key of an element in WebDriver's JSON
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
MINI_BROWSER = next((str(path) for path in sorted(Path("/usr").glob("lib*/**/webkit2gtk-4*/MiniBrowser"))), None)
PREFERENCES = {
    "marionette.port": 0,  # any free port; Firefox writes it into the profile
    "ui.primaryPointerCapabilities": 6,  # a mouse; headless Firefox reports a touch screen
    "ui.allPointerCapabilities": 6,
    "app.update.enabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
}
RECORD_ERRORS = """window.recordedErrors = [];
    for (const kind of ["error", "warn"]) console[kind] = (...values) => recordedErrors.push(values.join(" "));
    addEventListener("error", ({ message }) => recordedErrors.push(message));
    addEventListener("unhandledrejection", ({ reason }) => recordedErrors.push(String(reason)));
    addEventListener("securitypolicyviolation", ({ blockedURI }) => recordedErrors.push(blockedURI));"""
Send = Callable[[str, str, dict[str, Any]], Any]


class BrowserSession:
    """A browser window. `send` takes the HTTP route of a WebDriver command and its Marionette name."""

    def __init__(self, send: Send, log: Path) -> None:
        self.send = send
        self.log = log

    def open(self, url: str) -> None:
        self.send(
            "POST url", "WebDriver:Navigate", {"url": "about:blank"}
        )  # a URL that differs only in the fragment would not be loaded
        self.send("POST url", "WebDriver:Navigate", {"url": url})
        self.run(RECORD_ERRORS)

    def errors(self) -> list[str]:
        """Errors and warnings of the page since it was loaded, and JavaScript errors in Firefox's log."""
        logged = [
            line
            for line in self.log.read_text(errors="replace").splitlines()
            if line.startswith("JavaScript error: http")
        ]
        return [*logged, *self.run("return recordedErrors")]

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body in the page and return its result."""
        return self.send("POST execute/sync", "WebDriver:ExecuteScript", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until the element contains the text."""
        try:
            wait_until(lambda: text in self.text(selector))
        except AssertionError:
            assert text in self.text(selector)

    def move(self, *point: float) -> None:
        self._pointer(_move(*point))

    def drag(self, first: tuple[float, ...], *rest: tuple[float, ...]) -> None:
        """Press at the first point and release at the last; a single point is a click."""
        moves = [_move(*point) for point in rest]
        self._pointer(_move(*first), {"type": "pointerDown", "button": 0}, *moves, {"type": "pointerUp", "button": 0})

    def click(self, selector: str) -> None:
        script = """const { x, y, width, height } = document.querySelector(arguments[0]).getBoundingClientRect();
            return [x + width / 2, y + height / 2]"""
        self.drag(tuple(self.run(script, selector)))

    def _pointer(self, *steps: dict[str, Any]) -> None:
        source = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self.send("POST actions", "WebDriver:PerformActions", {"actions": [source]})

    def press_keys(self, *keys: str) -> None:
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        source = {"type": "key", "id": "keys", "actions": steps}
        self.send("POST actions", "WebDriver:PerformActions", {"actions": [source]})

    def choose_file(self, selector: str, path: Path) -> None:
        query = {"using": "css selector", "value": selector}
        element = self.send("POST element", "WebDriver:FindElement", query)[ELEMENT]
        body = {"id": element, "text": str(path)}
        self.send(f"POST element/{element}/value", "WebDriver:ElementSendKeys", body)


def _move(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 20, "origin": "viewport"}


@contextmanager
def firefox(folder: Path) -> Iterator[BrowserSession]:
    """Headless Firefox, controlled over Marionette without geckodriver."""
    (folder / "user.js").write_text("".join(f'user_pref("{k}", {json.dumps(v)});\n' for k, v in PREFERENCES.items()))
    log, port = folder / "log", folder / "MarionetteActivePort"
    command = [str(FIREFOX), "--headless", "--marionette", "--no-remote", "--profile", str(folder), "about:blank"]
    with _running(command, log):
        wait_until(lambda: port.exists() and port.read_text().strip(), 60)
        with (
            socket.create_connection(("127.0.0.1", int(port.read_text())), timeout=60) as connection,
            connection.makefile("rwb") as stream,
        ):
            _receive(stream)  # the greeting
            numbers = itertools.count(1)

            def send(_: str, command: str, body: dict[str, Any]) -> Any:
                text = json.dumps([0, next(numbers), command, body]).encode()
                stream.write(b"%d:%s" % (len(text), text))
                stream.flush()
                _, _, error, response = _receive(stream)
                assert error is None, error["message"]
                return response.get("value", response)

            send("", "WebDriver:NewSession", {})
            yield BrowserSession(send, log)


def _receive(stream: Any) -> Any:
    length = b""
    while (character := stream.read(1)) != b":":
        assert character, "the browser closed the connection"
        length += character
    return json.loads(stream.read(int(length)))


@contextmanager
def webkit(folder: Path) -> Iterator[BrowserSession]:
    """WebKit, the engine of Safari, in GTK's MiniBrowser on a virtual screen."""
    log, display_log = folder / "log", folder / "screen"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _running(["Xvfb", "-displayfd", "1", "-screen", "0", "1600x1200x24", "-nolisten", "tcp"], display_log):
        wait_until(lambda: display_log.read_text().endswith("\n"))
        environment = {"HOME": str(folder), "DISPLAY": f":{display_log.read_text().split()[-1]}", "GDK_BACKEND": "x11"}
        options = {"binary": MINI_BROWSER, "args": ["--automation"]}
        capabilities = {"capabilities": {"alwaysMatch": {"webkitgtk:browserOptions": options}}}
        with (
            _running(["WebKitWebDriver", f"--port={port}"], log, **environment),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            wait_until(lambda: _is_listening(port))
            session = client.post("/session", json=capabilities).json()["value"]["sessionId"]

            def send(command: str, _: str, body: dict[str, Any]) -> Any:
                method, path = command.split(" ")
                value = client.request(method, f"/session/{session}/{path}", json=body).json()["value"]
                assert not (isinstance(value, dict) and "error" in value), value["message"]
                return value

            yield BrowserSession(send, log)
            client.delete(f"/session/{session}")


@contextmanager
def _running(command: list[str], log: Path, **environment: str) -> Iterator[None]:
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environment) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
