"""The browser harness reports everything that is wrong with a page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.browser import look_at

HEAD = '<!doctype html><link rel="icon" href="data:">'


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path, body: str) -> Iterator[str]:
    (folder / "index.html").write_text(HEAD + body)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def test_a_page_without_errors_gets_a_screenshot_at_each_width(tmp_path: Path) -> None:
    with served(tmp_path, "<p>calm</p>") as url:
        pictures = look_at(url, tmp_path, "calm", ready="p")
    assert [path.name for path in pictures] == ["calm-1280.png", "calm-400.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_everything_that_failed_on_a_page_is_reported(tmp_path: Path) -> None:
    script = "<script>console.error('out of luck'); throw new Error('thrown away')</script>"
    images = "<img src='missing.png'><img src='http://elsewhere.invalid/x.png'>"
    with served(tmp_path, images + script) as url, pytest.raises(AssertionError) as raised:
        look_at(url, tmp_path, "page")
    message = str(raised.value)
    for problem in ("out of luck", "thrown away", "missing.png: status 404", "elsewhere.invalid"):
        assert problem in message


def test_a_narrow_page_may_not_scroll_sideways(tmp_path: Path) -> None:
    with (
        served(tmp_path, "<p style='width: 600px'>wide</p>") as url,
        pytest.raises(AssertionError, match=r"wide is 2\d\d pixels wider than 400"),
    ):
        look_at(url, tmp_path, "wide", ready="p")
