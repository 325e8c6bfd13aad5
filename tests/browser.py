"""Pages in Debian's Chromium, at the width of a laptop and of a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page, Response

WIDTHS = (1280, 400)
HEIGHT = 900
TIMEOUT_MS = 60_000
_SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@contextmanager
def opened(url: str, *, width: int = WIDTHS[0]) -> Iterator[Page]:
    """Open a page; fail at the end of the block if a request failed or left the host."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium on this machine")
    host, problems = urlsplit(url).hostname, []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": HEIGHT})
        page.set_default_timeout(TIMEOUT_MS)

        def requested(address: str) -> None:
            if urlsplit(address).hostname not in (host, None):
                problems.append(f"asked another host: {address}")

        def logged(message: ConsoleMessage) -> None:
            if message.type == "error":
                problems.append(message.text)

        def answered(response: Response) -> None:
            if response.status >= 400:
                problems.append(f"{response.url}: status {response.status}")

        page.on("console", logged)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requested(request.url))
        page.on("websocket", lambda socket: requested(socket.url))
        page.on("requestfailed", lambda failed: problems.append(f"{failed.url}: {failed.failure}"))
        page.on("response", answered)
        try:
            page.goto(url)
            yield page
            page.wait_for_load_state("networkidle")
            assert not problems, "\n".join(problems)
        finally:
            browser.close()


def screenshot(page: Page, folder: Path, name: str) -> Path:
    """Write a screenshot NAME-WIDTH.png; a narrow page must not scroll sideways."""
    page.wait_for_load_state("networkidle")
    assert page.viewport_size is not None
    width = page.viewport_size["width"]
    path = folder / f"{name}-{width}.png"
    page.screenshot(path=path)
    sideways = page.evaluate(_SIDEWAYS)
    assert sideways <= 0, f"{name} is {sideways} pixels wider than {width}: {path}"
    return path


def look_at(url: str, folder: Path, name: str, *, ready: str = "body") -> list[Path]:
    """Take a screenshot of a page at each width once the selector `ready` is visible."""
    pictures = []
    for width in WIDTHS:
        with opened(url, width=width) as page:
            page.locator(ready).first.wait_for()
            pictures.append(screenshot(page, folder, name))
    return pictures
