"""A local HTTP server in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """A handler whose `respond` answers HEAD and GET requests; it logs nothing."""

    def respond(self) -> None:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self.respond()

    def do_GET(self) -> None:
        self.respond()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def run_http_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server with this handler; the context's value is its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
