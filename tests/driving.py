"""Firefox and WebKit, driven over the protocols they come with: no package is needed for either."""

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
from serving import until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what WebDriver calls one in its JSON
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
MINI_BROWSER = next((str(path) for path in sorted(Path("/usr").glob("lib*/**/webkit2gtk-4*/MiniBrowser"))), None)
PREFERENCES = {
    "marionette.port": 0,  # any that is free; it is written into the profile
    "ui.primaryPointerCapabilities": 6,  # without a screen it takes itself for a phone: here is a mouse
    "ui.allPointerCapabilities": 6,
    "app.update.enabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
}
LISTEN = """window.complaints = [];
    for (const kind of ["error", "warn"]) console[kind] = (...words) => complaints.push(words.join(" "));
    addEventListener("error", ({ message }) => complaints.push(message));
    addEventListener("unhandledrejection", ({ reason }) => complaints.push(String(reason)));
    addEventListener("securitypolicyviolation", ({ blockedURI }) => complaints.push(blockedURI));"""
Send = Callable[[str, str, dict[str, Any]], Any]


class Driven:
    """One window; `send` takes a WebDriver command by both its names, the address and Marionette's."""

    def __init__(self, send: Send, log: Path) -> None:
        self.send = send
        self.log = log

    def go(self, url: str) -> None:
        self.send("POST url", "WebDriver:Navigate", {"url": "about:blank"})  # another # alone would load nothing
        self.send("POST url", "WebDriver:Navigate", {"url": url})
        self.run(LISTEN)

    def complaints(self) -> list[str]:
        """What the page complained about since it was loaded, and what Firefox writes down before that."""
        errors = [
            line
            for line in self.log.read_text(errors="replace").splitlines()
            if line.startswith("JavaScript error: http")
        ]
        return [*errors, *self.run("return complaints")]

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page."""
        return self.send("POST execute/sync", "WebDriver:ExecuteScript", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def see(self, selector: str, text: str) -> None:
        """Wait until it says so."""
        try:
            until(lambda: text in self.text(selector))
        except AssertionError:
            assert text in self.text(selector)

    def move(self, *place: float) -> None:
        self._pointer(_move(*place))

    def drag(self, first: tuple[float, ...], *rest: tuple[float, ...]) -> None:
        """Press at the first place and let go at the last; with one place it is a click."""
        moves = [_move(*place) for place in rest]
        self._pointer(_move(*first), {"type": "pointerDown", "button": 0}, *moves, {"type": "pointerUp", "button": 0})

    def click(self, selector: str) -> None:
        script = """const { x, y, width, height } = document.querySelector(arguments[0]).getBoundingClientRect();
            return [x + width / 2, y + height / 2]"""
        self.drag(tuple(self.run(script, selector)))

    def _pointer(self, *steps: dict[str, Any]) -> None:
        what = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self.send("POST actions", "WebDriver:PerformActions", {"actions": [what]})

    def press(self, *keys: str) -> None:
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        what = {"type": "key", "id": "keys", "actions": steps}
        self.send("POST actions", "WebDriver:PerformActions", {"actions": [what]})

    def choose_file(self, selector: str, path: Path) -> None:
        how = {"using": "css selector", "value": selector}
        element = self.send("POST element", "WebDriver:FindElement", how)[ELEMENT]
        told = {"id": element, "text": str(path)}
        self.send(f"POST element/{element}/value", "WebDriver:ElementSendKeys", told)


def _move(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 20, "origin": "viewport"}


@contextmanager
def firefox(folder: Path) -> Iterator[Driven]:
    """Without geckodriver, which translates WebDriver into Marionette: that is spoken here."""
    (folder / "user.js").write_text("".join(f'user_pref("{k}", {json.dumps(v)});\n' for k, v in PREFERENCES.items()))
    log, port = folder / "log", folder / "MarionetteActivePort"
    command = [str(FIREFOX), "--headless", "--marionette", "--no-remote", "--profile", str(folder), "about:blank"]
    with _started(command, log):
        until(lambda: port.exists() and port.read_text().strip(), 60)
        with (
            socket.create_connection(("127.0.0.1", int(port.read_text())), timeout=60) as connection,
            connection.makefile("rwb") as stream,
        ):
            _receive(stream)  # who it is
            numbers = itertools.count(1)

            def send(_: str, command: str, body: dict[str, Any]) -> Any:
                text = json.dumps([0, next(numbers), command, body]).encode()
                stream.write(b"%d:%s" % (len(text), text))
                stream.flush()
                _, _, error, found = _receive(stream)
                assert error is None, error["message"]
                return found.get("value", found)

            send("", "WebDriver:NewSession", {})
            yield Driven(send, log)


def _receive(stream: Any) -> Any:
    length = b""
    while (digit := stream.read(1)) != b":":
        assert digit, "the browser hung up"
        length += digit
    return json.loads(stream.read(int(length)))


@contextmanager
def webkit(folder: Path) -> Iterator[Driven]:
    """The engine of Safari, in GTK's MiniBrowser, on a screen that nobody sees."""
    log, screen = folder / "log", folder / "screen"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _started(["Xvfb", "-displayfd", "1", "-screen", "0", "1600x1200x24", "-nolisten", "tcp"], screen):
        until(lambda: screen.read_text().endswith("\n"))
        around = {"HOME": str(folder), "DISPLAY": f":{screen.read_text().split()[-1]}", "GDK_BACKEND": "x11"}
        options = {"binary": MINI_BROWSER, "args": ["--automation"]}
        expected = {"capabilities": {"alwaysMatch": {"webkitgtk:browserOptions": options}}}
        with (
            _started(["WebKitWebDriver", f"--port={port}"], log, **around),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            until(lambda: _answers(port))
            session = client.post("/session", json=expected).json()["value"]["sessionId"]

            def send(command: str, _: str, body: dict[str, Any]) -> Any:
                method, path = command.split(" ")
                found = client.request(method, f"/session/{session}/{path}", json=body).json()["value"]
                assert not (isinstance(found, dict) and "error" in found), found["message"]
                return found

            yield Driven(send, log)
            client.delete(f"/session/{session}")


@contextmanager
def _started(command: list[str], log: Path, **environment: str) -> Iterator[None]:
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | environment) as one:
        try:
            yield
        finally:
            one.terminate()
            one.wait(20)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
