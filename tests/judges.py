"""A service on loopback that judges completions or returns what a test sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@contextmanager
def running_judge(judge: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """Serve `{"score": judge(request)}`; yield the address.

    A judge that returns a mapping answers with it, one that raises `Refused` with its status.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            request["authorization"], request["path"] = self.headers["Authorization"], self.path
            status, reply = 200, None
            try:
                reply = judge(request)
            except Refused as refused:
                status = refused.status
            body = json.dumps(reply if isinstance(reply, dict) else {"score": reply}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Refused(Exception):
    """Raised by a judge: the status to answer with."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
